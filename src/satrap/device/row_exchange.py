"""How rows and gradients travel between trainers, by how the tables of a group are divided over them.

By rows, a row comes from its owner, and its gradient goes there. Replicated, a trainer has the rows that it needs, and
its gradients go to all. By columns, each trainer sends its columns of the row and gets those of the gradient.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from satrap.device.exchange import Exchange
from satrap.device.segments import TableGroups


class RowExchange:
    """The rows and gradients of all groups of tables."""

    def __init__(self, exchange: Exchange, groups: TableGroups) -> None:
        self._exchange, self._groups, world_size = exchange, groups, exchange.world_size
        self._bounds = [[dim * rank // world_size for rank in range(world_size + 1)] for _, dim in groups.layouts]

    def rows(self, group: int, found: Tensor, asked: Sequence[int], own: Sequence[int]) -> Tensor:
        """Return the rows of the own ids. found: the rows here. asked: how many ids each trainer has sent here.
        own: how many were sent to each."""
        kind = self._groups.kinds[group]
        if kind == "replicated":
            return found
        if kind == "rows":
            return self._exchange.rows(found, asked, own)
        widths = self._widths(group)
        sent = [lines * found.shape[1] for lines in asked]
        received = [lines * width for lines, width in zip(own, widths, strict=True)]
        parts = self._exchange.rows(found.view(-1, 1), sent, received).split(received)
        lines = own[self._exchange.rank]
        return torch.cat([part.view(lines, width) for part, width in zip(parts, widths, strict=True)], 1)

    def gradients(self, group: int, sums: Tensor, own: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the gradients of the rows here, of all trainers. sums: for the own ids. own: how many were sent to
        each trainer. received: how many each has sent here."""
        kind = self._groups.kinds[group]
        if kind == "rows":
            return self._exchange.rows(sums, own, received)
        if kind == "replicated":
            return self._exchange.rows(sums.repeat(len(own), 1), own, received)
        widths, bounds = self._widths(group), self._bounds[group]
        parts = [sums[:, begin:end].reshape(-1, 1) for begin, end in pairwise(bounds)]
        width = widths[self._exchange.rank]
        sizes = [lines * width for lines in received]
        return self._exchange.rows(torch.cat(parts), [len(part) for part in parts], sizes).view(-1, width)

    def _widths(self, group: int) -> list[int]:
        """Return how many columns of a group's rows each trainer has."""
        bounds = self._bounds[group]
        return [end - begin for begin, end in pairwise(bounds)]
