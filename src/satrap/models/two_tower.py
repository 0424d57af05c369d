"""A two-tower model: a network for the query, one for the item; their dot product says how well they match.

It trains with a softmax over the items of the batch (`satrap.negatives.in_batch`): each item is a negative of all other
queries. The vectors of all items, computed once, are then searched for those that match a query.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import normalize

from satrap.config.validation import known_arguments
from satrap.errors import ConfigError
from satrap.models.parts import block_dims, check_inputs, columns_of, count, stack, widths


class TwoTower(nn.Module):
    """Two stacks of layers, over the query's features and over the item's, that end in vectors of one dim."""

    query_columns: torch.Tensor
    item_columns: torch.Tensor

    @known_arguments()
    def __init__(
        self,
        embeddings: object,
        query: Sequence[str],
        item: Sequence[str],
        num_dense: int = 0,
        hidden: Sequence[int] = (256,),
        dim: int = 64,
        temperature: float = 0.05,
        ignore: Sequence[str] = (),
    ) -> None:
        """embeddings: a satrap.Embeddings or its features.

        query, item: the names of the pooled features of each tower, which together are all of them.
        num_dense: the dense features, which belong to the query.
        hidden: widths of the layers of each tower before its vector.
        dim: of the vectors, which have length 1. temperature: what the dot products are divided by.
        ignore: features without pooling, which another part of the model uses: all of them, since this model cannot.
        """
        super().__init__()
        dims = block_dims("TwoTower", embeddings, ignore)
        for tower, names in (("query", query), ("item", item)):
            self.register_buffer(f"{tower}_columns", columns_of(f"TwoTower, {tower}", dims, names), persistent=False)
        if sorted([*query, *item]) != sorted(dims):
            raise ConfigError(
                f"TwoTower: query is {list(query)} and item {list(item)}; expected each of the pooled features "
                f"{list(dims)} in one of the two"
            )
        if not temperature > 0:
            raise ConfigError(f"TwoTower: temperature is {temperature!r}; expected a number above 0, e.g. 0.05")
        self.num_dense: int = count("TwoTower", "num_dense", num_dense, 0)
        self.total_dim, self.temperature = sum(dims.values()), float(temperature)
        ends = [*widths("TwoTower", "hidden", hidden), count("TwoTower", "dim", dim, 1)]
        self.query: nn.Sequential = stack([self.num_dense + sum(dims[name] for name in query), *ends], last_relu=False)
        self.item: nn.Sequential = stack([sum(dims[name] for name in item), *ends], last_relu=False)

    def forward(self, dense: torch.Tensor | None, embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the vectors of the queries, divided by the temperature, and of the items: both [batch, dim]. Their dot
        products are logits."""
        check_inputs("TwoTower", dense, embeddings, self.num_dense, self.total_dim)
        features = embeddings[:, self.query_columns]
        inputs = features if dense is None else torch.cat([dense, features], 1)
        queries = normalize(self.query(inputs).float(), dim=1) / self.temperature
        return queries, normalize(self.item(embeddings[:, self.item_columns]).float(), dim=1)
