"""The interaction of DLRM: the dot products of all pairs of a sample's vectors.

The pairs are expensive, but not by their arithmetic: 27 x 27 products of 16 or 64 numbers per sample are few, but with
torch's operators every row of the batch is copied, multiplied separately and gathered. There are two forms, chosen by
the device of the vectors. On the CPU the core's kernel takes a sample from its input to its output in one pass.
Elsewhere, and under torch.compile, torch's product has a custom gradient: one product with the mirrored gradient
instead of two, and gathers instead of a scatter. An exported or traced program contains torch's operators alone and
takes any batch size: every size is read from `shape`, because len() of a tensor becomes a constant of the program.
docs/internals/log.md has the other forms that were measured.
"""

import atexit
from functools import cache
from typing import Any

import torch

from satrap import _core
from satrap.models.parts import is_traced
from satrap.train.torch_threads import torch_threads


class Interaction(torch.nn.Module):
    """Maps [batch, dim] (or None) and a block [batch, n * dim] to the first input and the pairs' products, side by
    side."""

    pairs: torch.Tensor
    mirror: torch.Tensor

    def __init__(self, num_vectors: int, dim: int) -> None:
        """num_vectors: the number of vectors, including the first input if there is one."""
        super().__init__()
        self.dim = dim
        pairs, mirror = pair_indices(num_vectors)
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("mirror", mirror, persistent=False)

    def forward(self, first: torch.Tensor | None, block: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Return [batch, (dim) + pairs], with the pairs row by row of the triangle: (1, 0), (2, 0), (2, 1), ...

        padding: the number of columns of zeros behind them on a GPU; there are none on the CPU and in a traced or
        exported program."""
        is_float32 = block.dtype == torch.float32 and (first is None or first.dtype == torch.float32)
        if _is_plain_tensor(block) and (is_float32 or torch.is_autocast_enabled("cpu")):
            head = None if first is None else first.float()  # autocast's linear layers return 16 bits, as rows may have
            fused: torch.Tensor = _FusedInteraction.apply(head, block.float(), self)  # type: ignore[no-untyped-call]
            return fused
        is_plain = block.device.type == "cpu" or is_traced() or torch.compiler.is_exporting()
        return self.in_torch(first, block, 0 if is_plain else padding)

    def in_torch(self, first: torch.Tensor | None, block: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Return what `forward` does, by torch's operators alone: for what the core's kernel cannot do, such as other
        devices than the CPU, traced programs and gradients of gradients. `padding` holds on every device."""
        vectors, head = block.unflatten(1, (-1, self.dim)), []
        if first is not None:
            # Use the dtype of `first`: under autocast the copy that cat makes is half as large.
            vectors, head = torch.cat([first.unsqueeze(1), vectors.to(first.dtype)], 1), [first]
        dots = dot_products(vectors, self.pairs, self.mirror)
        zeros = [dots.new_zeros(dots.shape[0], padding)] if padding else []
        return torch.cat([*head, dots, *zeros], 1) if head or zeros else dots


def dot_products(vectors: torch.Tensor, pairs: torch.Tensor, mirror: torch.Tensor) -> torch.Tensor:
    """Return the dot products of all pairs of vectors [batch, n, dim], in torch: [batch, n (n - 1) / 2]."""
    if is_traced() or torch.compiler.is_exporting():  # a Function is Python code, which no program can contain
        return _columns(_products(vectors), pairs)
    dots: torch.Tensor = _PairProducts.apply(vectors, pairs, mirror)  # type: ignore[no-untyped-call]
    return dots


def pair_indices(num_vectors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each pair in the flat n x n matrix, and the pair at each index of the matrix; the diagonal
    has the number one past the last pair."""
    i, j = torch.tril_indices(num_vectors, num_vectors, -1)
    mirror = torch.full((num_vectors, num_vectors), len(i))
    mirror[i, j] = mirror[j, i] = torch.arange(len(i))
    return i * num_vectors + j, mirror.flatten()


class _FusedInteraction(torch.autograd.Function):
    """The core's kernel, which reads and writes the tensors' memory directly."""

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
        if torch.is_grad_enabled():  # for a gradient of the gradient, which torch's form has
            inputs = [tensor for tensor in (first, block) if tensor is not None]
            out = ctx.interaction.in_torch(first, block)
            gradients_of_inputs = torch.autograd.grad(out, inputs, gradients[0], create_graph=True)
            return None if first is None else gradients_of_inputs[0], gradients_of_inputs[-1], None
        first, block = None if first is None else first.contiguous(), block.contiguous()
        of_first, of_block = None if first is None else torch.empty_like(first), torch.empty_like(block)
        gradient = gradients[0].contiguous()
        with torch_threads():
            _native(torch.get_num_threads()).backward(
                ctx.interaction.dim, _numpy(first), _numpy(block), _numpy(gradient), _numpy(of_first), _numpy(of_block)
            )
        return of_first, of_block, None


def _is_plain_tensor(block: torch.Tensor) -> bool:
    """Return whether the kernel may read the tensor's memory. Under tracers, torch.compile and torch.func it may
    not."""
    traced = torch.compiler.is_compiling() or is_traced() or torch._C._len_torch_dispatch_stack() > 0
    return (
        not traced
        and type(block) in (torch.Tensor, torch.nn.Parameter)
        and block.device.type == "cpu"
        and block.dtype != torch.float64
    )


@cache
def _native(num_threads: int) -> Any:
    return _core.Dots(num_threads)


atexit.register(_native.cache_clear)  # stops its threads before the interpreter exits


def _numpy(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().numpy()


class _PairProducts(torch.autograd.Function):
    """V V^t below the diagonal. Its gradient is (G + G^t) V, where G has the pairs' gradients below the diagonal."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, pairs: torch.Tensor, mirror: torch.Tensor) -> torch.Tensor:
        products = _products(vectors)
        ctx.save_for_backward(vectors.to(products.dtype), mirror)  # autocast may multiply in another dtype
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
    # gather, since torch runs index_select in one thread, and slowly in 16 bits.
    return matrix.gather(1, index.expand(matrix.shape[0], -1))


def _products(vectors: torch.Tensor) -> torch.Tensor:
    """Return the dot products of every vector with every vector, flat: [batch, n * n]."""
    return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
