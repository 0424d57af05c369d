"""The rounds of several trainers for tables with `num_rows`: a lookup is one exchange of rows' numbers and one of rows,
for all tables. The order of the rows that a lookup asks for is kept for the update of the same batches, which then
needs neither their numbers nor another sort; other updates exchange and sort numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.device.asked_rounds import AskedRows
from satrap.device.collective_lookups import COUNTS, IDLE, KIND, OLDEST_OPEN, STEP, CollectiveLookups, ranks_of
from satrap.device.collective_updates import CollectiveUpdates, UpdatePart
from satrap.device.direct_ids import RowRuns
from satrap.device.direct_owned_rows import DirectOwnedRows
from satrap.device.exchange import Exchange
from satrap.device.group_exchange import GroupExchange
from satrap.device.segments import TableGroups


@dataclass(frozen=True, slots=True, eq=False)
class FoundNumbers:
    """The numbers of rows here that all trainers sent, sorted."""

    rows: Tensor
    runs: RowRuns


class DirectLookups(CollectiveLookups):
    """The lookups of all trainers. What a trainer sends are numbers of rows, int32 on the device, owner by owner."""

    def __init__(self, exchange: Exchange, groups: TableGroups, base: int, *given: Any) -> None:
        """base: the number of this trainer's first row in `OwnerNumbers`. given: the other arguments of
        `CollectiveLookups`."""
        super().__init__(exchange, groups, *given)
        self._by_group, self._base = GroupExchange(exchange), base

    def _exchange_rows(self, ids: Any, sent: NDArray[np.int64], headers: NDArray[np.int64]) -> tuple[list[Tensor], int]:
        counts, joins = headers[:, COUNTS:], headers[:, KIND] != IDLE
        steps = {
            int(step): np.flatnonzero(joins & (headers[:, STEP] == step)).tolist() for step in headers[joins, STEP]
        }
        oldest = int(headers[joins, OLDEST_OPEN].min())
        number = self._exchange.number()
        with self._stream.running(), self._exchange.in_order(number):
            own = torch.empty(0, dtype=torch.int32, device=self._stream.device) if ids is None else ids
            rows = self._by_group.numbers(own, sent, counts) - self._base
            owned: DirectOwnedRows = self._owned()
            runs = owned.runs(rows)
            asked = AskedRows(FoundNumbers(rows, runs), next(iter(steps)), ranks_of(headers))
            self._asked.keep(number, asked if len(steps) == 1 else None)
            lines = owned.look_up_rows(rows, runs, counts, steps, oldest)
            return self._by_group.lines(lines, counts, sent), number


class DirectUpdates(CollectiveUpdates):
    """The updates of all trainers."""

    def __init__(self, exchange: Exchange, groups: TableGroups, base: int, *given: Any) -> None:
        """base: the number of this trainer's first row in `OwnerNumbers`. given: the other arguments of
        `CollectiveUpdates`."""
        super().__init__(exchange, groups, *given)
        self._by_group, self._base = GroupExchange(exchange), base

    def _apply(self, step: int, part: UpdatePart | None, own: NDArray[np.int64], headers: NDArray[np.int64]) -> None:
        sent, counts = own[:, self._counts], headers[:, self._counts]
        asked, number = self._asked_by(headers), self._exchange.number()
        owned: DirectOwnedRows = self._owned()
        with self._stream.running():
            sums = self._sums(part)
            with self._exchange.in_order(number):
                if asked is not None:
                    rows, runs = asked.rows, asked.runs
                else:
                    nothing = torch.empty(0, dtype=torch.int32, device=self._stream.device)
                    ids = nothing if part is None else part.ids
                    rows = self._by_group.numbers(ids, sent, counts) - self._base
                    runs = owned.runs(rows)
                gradients = self._by_group.lines(sums, sent, counts)
            owned.apply_rows(rows, runs, counts, gradients, step, *self._rates_and_bound(headers))
