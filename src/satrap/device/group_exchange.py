"""What travels between trainers of tables with `num_rows`: the numbers of rows, rows, and gradients, each by one
`all_to_all_single` for all tables.

A trainer sends to each trainer group after group of tables; a line of a group is a row, counted over what one exchange
carries of the group.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.device.device_stream import to_device
from satrap.device.exchange import Exchange


class GroupExchange:
    """Sends what there is of each group of tables to all trainers at once."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def numbers(self, sent: Tensor, own: NDArray[np.int64], asked: NDArray[np.int64]) -> Tensor:
        """Send numbers of rows, int32; return the numbers that all trainers sent to this one, int64. own: how many this
        trainer sends to each, by group, [trainers, groups]. asked: how many each trainer sends here."""
        return self._exchange.rows(sent[:, None], own.sum(1).tolist(), asked.sum(1).tolist())[:, 0].long()

    def lines(self, sent: Sequence[Tensor], own: NDArray[np.int64], received: NDArray[np.int64]) -> list[Tensor]:
        """Send the lines of each group; return for each group the lines that all trainers sent to this one, in the
        order of the ranks. own, received: how many lines, as own and asked in `numbers`."""
        if len(sent) == 1:
            return [self._exchange.rows(sent[0], own[:, 0].tolist(), received[:, 0].tolist())]
        sizes = np.array([lines.shape[1] * lines.dtype.itemsize for lines in sent])
        parts = [
            lines.reshape(-1).view(torch.uint8).split((own[:, group] * sizes[group]).tolist())
            for group, lines in enumerate(sent)
        ]
        to = torch.cat([part for of_trainer in zip(*parts, strict=True) for part in of_trainer])
        num_bytes = [(counts * sizes).sum(1).tolist() for counts in (own, received)]
        by_owner = self._exchange.rows(to[:, None], *num_bytes)[:, 0].split((received * sizes).ravel().tolist())
        return [
            torch.cat(by_owner[group :: len(sent)]).view(lines.dtype).view(-1, lines.shape[1])
            for group, lines in enumerate(sent)
        ]


def of_group(entries: Tensor, group: int, counts: NDArray[np.int64]) -> Tensor:
    """Return the entries of a group. entries: trainer after trainer, group after group. counts: [trainers, groups]."""
    if counts.shape[1] == 1:
        return entries[: counts.sum()]
    sizes = [*counts.ravel().tolist(), len(entries) - int(counts.sum())]
    return torch.cat(entries.split(sizes)[group : counts.size : counts.shape[1]])


def lines_of(entries: Tensor, counts: NDArray[np.int64]) -> Tensor:
    """Return the line of each entry within its group, int64. entries: positions in the order of an exchange: trainer
    after trainer, group after group. counts: [trainers, groups]."""
    if counts.shape[1] == 1:
        return entries
    first_line, first = np.cumsum(counts, 0) - counts, np.cumsum(counts.ravel())
    shift = first_line.ravel() - (first - counts.ravel())
    bounds, shifts = (to_device(array, entries.device) for array in (first, np.append(shift, 0)))
    return entries + shifts[torch.bucketize(entries, bounds, right=True)]
