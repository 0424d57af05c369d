"""DeepFM: a linear term, the products of all pairs of features, and a deep stack over the same vectors.

The first number of a feature's vector is its weight in the linear term, the others are its factors. So a table of dim
1 + k is what the paper keeps in two tables, of dims 1 and k.
"""

from collections.abc import Sequence

import torch
from torch import nn

from satrap.config.validation import known_arguments
from satrap.errors import ConfigError
from satrap.models.parts import block_dims, check_inputs, count, stack, widths


class DeepFM(nn.Module):
    """A factorization machine and a deep stack side by side, whose logits are added."""

    @known_arguments()
    def __init__(
        self, num_dense: int, embeddings: object, deep: Sequence[int] = (400, 400), ignore: Sequence[str] = ()
    ) -> None:
        """embeddings: a satrap.Embeddings or its features, all of one dim, at least 2.

        deep: widths of the deep stack before its logit.
        ignore: features without pooling, which another part of the model uses: all of them, since this model cannot.
        """
        super().__init__()
        dims = block_dims("DeepFM", embeddings, ignore)
        self.dim: int = next(iter(dims.values()))
        other = next((name for name, dim in dims.items() if dim != self.dim), None)
        if other is not None or self.dim < 2:
            name = other or next(iter(dims))
            raise ConfigError(
                f"DeepFM: feature {name!r} has dim {dims[name]} and {next(iter(dims))!r} has {self.dim}; expected one "
                "dim of at least 2 for all: the weight of the linear term, and the factors of the products"
            )
        self.num_dense: int = count("DeepFM", "num_dense", num_dense, 0)
        self.total_dim: int = len(dims) * self.dim
        self.linear: nn.Linear | None = nn.Linear(self.num_dense, 1, bias=False) if self.num_dense else None
        sizes = [self.num_dense + len(dims) * (self.dim - 1), *widths("DeepFM", "deep", deep), 1]
        self.deep: nn.Sequential = stack(sizes, last_relu=False)

    def forward(self, dense: torch.Tensor | None, embeddings: torch.Tensor) -> torch.Tensor:
        """Return logits [batch] for dense [batch, num_dense], None if that is 0, and embeddings [batch, total_dim]."""
        check_inputs("DeepFM", dense, embeddings, self.num_dense, self.total_dim)
        vectors = embeddings.unflatten(1, (-1, self.dim))
        factors = vectors[:, :, 1:]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        inputs = factors.flatten(1) if dense is None else torch.cat([dense, factors.flatten(1)], 1)
        logits: torch.Tensor = vectors[:, :, 0].sum(1) + pairs + self.deep(inputs).squeeze(1)
        if self.linear is not None:
            logits = logits + self.linear(dense).squeeze(1)
        return logits.float()
