"""DCN-v2: cross layers, which multiply the input with a learned linear map of itself, beside a deep stack.

A cross layer over n columns costs n^2 products per sample, and the deep stack's first layer n x its width. With
hundreds of columns pass `rank`, for two products of n x rank instead.
"""

from collections.abc import Sequence

import torch
from torch import nn

from satrap.config.validation import known_arguments
from satrap.models.parts import block_dims, check_inputs, count, stack, widths


class DCN(nn.Module):
    """Cross layers and deep layers side by side over dense features and embeddings, joined by a linear layer."""

    @known_arguments()
    def __init__(
        self,
        num_dense: int,
        embeddings: object,
        num_cross: int = 3,
        rank: int | None = None,
        deep: Sequence[int] = (512, 256),
        ignore: Sequence[str] = (),
    ) -> None:
        """embeddings: a satrap.Embeddings or its features, of any dims.

        rank: rank of the cross layers' matrices; None for full matrices.
        deep: widths of the deep stack; () for cross layers alone.
        ignore: features without pooling, which another part of the model uses: all of them, since this model cannot.
        """
        super().__init__()
        self.num_dense: int = count("DCN", "num_dense", num_dense, 0)
        """Number of dense features."""
        self.total_dim: int = sum(block_dims("DCN", embeddings, ignore).values())
        """Number of columns of the embeddings."""
        width = self.num_dense + self.total_dim
        deep = widths("DCN", "deep", deep)
        rank = None if rank is None else count("DCN", "rank", rank, 1)
        self.cross: nn.ModuleList = nn.ModuleList(
            Cross(width, rank) for _ in range(count("DCN", "num_cross", num_cross, 1))
        )
        """The cross layers."""
        self.deep: nn.Sequential | None = stack([width, *deep], last_relu=True) if deep else None
        self.join: nn.Linear = nn.Linear(width + (deep[-1] if deep else 0), 1)
        """The layer from both stacks to the logit."""

    def forward(self, dense: torch.Tensor | None, embeddings: torch.Tensor) -> torch.Tensor:
        """Return logits [batch] for dense [batch, num_dense], None if that is 0, and embeddings [batch, total_dim]."""
        check_inputs("DCN", dense, embeddings, self.num_dense, self.total_dim)
        first = embeddings if dense is None else torch.cat([dense, embeddings], 1)
        crossed = first
        for layer in self.cross:
            crossed = layer(first, crossed)
        if self.deep is not None:
            crossed = torch.cat([crossed, self.deep(first)], 1)
        logits: torch.Tensor = self.join(crossed)
        return logits.squeeze(1).float()


class Cross(nn.Module):
    """x0 * (W x + b) + x, where W may be the product of two low-rank matrices."""

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        self.linear: nn.Module = nn.Linear(width, width)
        if rank is not None:
            self.linear = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

    def forward(self, first: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: `first` is the input of the first cross layer, `x` the input of this one."""
        crossed: torch.Tensor = first * self.linear(x) + x
        return crossed
