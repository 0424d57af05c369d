"""A drop-in for an nn.Linear whose weight is that of an embedding, such as a tied output layer."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear


class TiedLinear(torch.nn.Module):
    """An nn.Linear whose weight is all rows of a table. It owns its bias alone."""

    def __init__(self, embedding: torch.nn.Module, layer: torch.nn.Linear) -> None:
        """embedding: the module over the table, with `num_rows`. layer: what this replaces."""
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that the model has it under one name
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias: torch.nn.Parameter | None = layer.bias
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """All rows of the table: each use is a lookup."""
        weight = self._embedding[0].weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the products of the input with all rows, plus the bias."""
        return linear(input, self.weight, self.bias)

    __call__: Callable[..., Tensor]

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, tied to {self._embedding[0]}"
