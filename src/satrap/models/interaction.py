"""DLRM's interaction: every sample's vectors meet in the dot products of all pairs.

The pairs are the expensive part, and not by their arithmetic: 27 x 27 products of 16 or 64 numbers a sample are little,
but in torch's terms every row of the batch is copied, multiplied alone and gathered from. Two forms, chosen by where
the vectors are. On the CPU the core's kernel takes a sample from its input to its output in one pass; elsewhere, and
under torch.compile, it is torch's products with a gradient of its own: one product with the mirrored gradient instead
of two, and gathers instead of a scatter. A program that is exported or traced holds torch's operators alone and takes
any batch size: every size is read from `shape`, because len() of a tensor is a constant of the program. docs/log.md has
the other forms that were measured.
"""

import atexit
from functools import cache
from typing import Any

import torch

from satrap import _core
from satrap.models.parts import is_traced
from satrap.train.torch_threads import torch_threads


class Interaction(torch.nn.Module):
    """[batch, dim] (or None) and a block [batch, n * dim] to the first again and the pairs' products, side by side."""

    pairs: torch.Tensor
    mirror: torch.Tensor

    def __init__(self, num_vectors: int, dim: int) -> None:
        """num_vectors: the first one included."""
        super().__init__()
        self.dim = dim
        pairs, mirror = pair_indices(num_vectors)
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("mirror", mirror, persistent=False)

    def forward(self, first: torch.Tensor | None, block: torch.Tensor) -> torch.Tensor:
        """[batch, (dim) + pairs]; the pairs row by row of the triangle: (1, 0), (2, 0), (2, 1), ..."""
        if _is_plain(block) and (first is None or first.dtype == torch.float32 or torch.is_autocast_enabled("cpu")):
            head = None if first is None else first.float()  # autocast's linear layers give 16 bits
            fused: torch.Tensor = _Fused.apply(head, block, self)  # type: ignore[no-untyped-call]
            return fused
        return self.in_torch(first, block)

    def in_torch(self, first: torch.Tensor | None, block: torch.Tensor) -> torch.Tensor:
        """The same by torch's operators alone."""
        vectors = block.unflatten(1, (-1, self.dim))
        if first is None:
            return dot_products(vectors, self.pairs, self.mirror)
        # To the first's dtype: under autocast the copy that cat makes is half as large.
        vectors = torch.cat([first.unsqueeze(1), vectors.to(first.dtype)], 1)
        return torch.cat([first, dot_products(vectors, self.pairs, self.mirror)], 1)


def dot_products(vectors: torch.Tensor, pairs: torch.Tensor, mirror: torch.Tensor) -> torch.Tensor:
    """The dot products of all pairs of vectors [batch, n, dim] in torch: [batch, n (n - 1) / 2]."""
    if is_traced() or torch.compiler.is_exporting():  # a Function is Python, which no program can hold
        return _columns(_products(vectors), pairs)
    dots: torch.Tensor = _Dots.apply(vectors, pairs, mirror)  # type: ignore[no-untyped-call]
    return dots


def pair_indices(num_vectors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each pair lies in the flat n x n matrix; which pair each place of it is, the diagonal one past the last."""
    i, j = torch.tril_indices(num_vectors, num_vectors, -1)
    mirror = torch.full((num_vectors, num_vectors), len(i))
    mirror[i, j] = mirror[j, i] = torch.arange(len(i))
    return i * num_vectors + j, mirror.flatten()


class _Fused(torch.autograd.Function):
    """The core's kernel, which reads and writes the tensors' own memory."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor | None, block: torch.Tensor, interaction: Interaction) -> torch.Tensor:
        ctx.save_for_backward(first, block)
        ctx.interaction, dim = interaction, interaction.dim
        first, block = None if first is None else first.contiguous(), block.contiguous()
        num = block.shape[1] // dim + (first is not None)
        out = block.new_empty(len(block), (0 if first is None else dim) + num * (num - 1) // 2)
        with torch_threads():
            _native(torch.get_num_threads()).forward(dim, _numpy(first), _numpy(block), _numpy(out))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        first, block = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted: torch's form has one
            wanted = [each for each in (first, block) if each is not None]
            out = ctx.interaction.in_torch(first, block)
            found = torch.autograd.grad(out, wanted, gradients[0], create_graph=True)
            return None if first is None else found[0], found[-1], None
        first, block = None if first is None else first.contiguous(), block.contiguous()
        of_first, of_block = None if first is None else torch.empty_like(first), torch.empty_like(block)
        gradient = gradients[0].contiguous()
        with torch_threads():
            _native(torch.get_num_threads()).backward(
                ctx.interaction.dim, _numpy(first), _numpy(block), _numpy(gradient), _numpy(of_first), _numpy(of_block)
            )
        return of_first, of_block, None


def _is_plain(block: torch.Tensor) -> bool:
    """Whether the kernel may read its memory: not what tracers, torch.compile and torch.func put in its place."""
    traced = torch.compiler.is_compiling() or is_traced() or torch._C._len_torch_dispatch_stack() > 0
    return (
        not traced
        and type(block) in (torch.Tensor, torch.nn.Parameter)
        and block.device.type == "cpu"
        and block.dtype == torch.float32
    )


@cache
def _native(num_threads: int) -> Any:
    return _core.Dots(num_threads)


atexit.register(_native.cache_clear)  # its threads end before the interpreter does


def _numpy(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().numpy()


class _Dots(torch.autograd.Function):
    """V V^t below the diagonal. Its gradient is (G + G^t) V, where G has the pairs' gradients below the diagonal."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, pairs: torch.Tensor, mirror: torch.Tensor) -> torch.Tensor:
        products = _products(vectors)
        ctx.save_for_backward(vectors.to(products.dtype), mirror)  # autocast may have multiplied in another dtype
        ctx.dtype = vectors.dtype
        return _columns(products, pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        vectors, mirror = ctx.saved_tensors
        padded = torch.nn.functional.pad(gradient, (0, 1))  # the diagonal has no gradient
        both = _columns(padded, mirror).unflatten(1, (vectors.shape[1], vectors.shape[1]))
        return torch.bmm(both, vectors).to(ctx.dtype), None, None


def _columns(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    # gather and not index_select: torch runs the latter in one thread, and slowly in 16 bits.
    return matrix.gather(1, index.expand(matrix.shape[0], -1))


def _products(vectors: torch.Tensor) -> torch.Tensor:
    """The dot products of every vector with every vector, flat: [batch, n * n]."""
    return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
