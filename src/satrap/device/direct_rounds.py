"""The rounds of several trainers for tables with `num_rows`: a lookup is one exchange of rows' numbers and one of rows,
for all tables. The order of the rows that a lookup asks for is kept for the update of the same batches, which then
needs neither their numbers nor another sort; other updates exchange and sort numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.device.collective_lookups import COUNTS, IDLE, KIND, OLDEST_OPEN, PART, STEP, CollectiveLookups
from satrap.device.collective_updates import CollectiveUpdates, UpdatePart
from satrap.device.direct_ids import RowRuns
from satrap.device.direct_owned_rows import DirectOwnedRows
from satrap.device.exchange import Exchange
from satrap.device.group_exchange import GroupExchange
from satrap.device.segments import TableGroups


@dataclass(frozen=True, slots=True, eq=False)
class AskedRows:
    """The rows here that all trainers have asked for in one lookup."""

    rows: Tensor
    runs: RowRuns
    step: int
    ranks: tuple[int, ...]
    """The trainers that have a batch."""


class AskedRounds:
    """What the lookups whose updates are still to come have asked for."""

    def __init__(self, base: int) -> None:
        """base: the number of this trainer's first row among those of all trainers."""
        self.base = base
        self._by_round: dict[int, AskedRows] = {}

    def keep(self, number: int, asked: AskedRows) -> None:
        """Keep what the round with this number has asked for."""
        self._by_round[number] = asked

    def of(self, number: int, ranks: tuple[int, ...]) -> AskedRows | None:
        """Return what a round has asked for, if these trainers had a batch in it, and no other. All trainers find the
        same."""
        asked = self._by_round.get(number)
        return None if asked is None or asked.ranks != ranks else asked

    def forget(self, step: int) -> None:
        """Forget the rounds of steps up to this one."""
        for number, asked in list(self._by_round.items()):
            if asked.step <= step:
                self._by_round.pop(number, None)


class DirectLookups(CollectiveLookups):
    """The lookups of all trainers. What a trainer sends are numbers of rows, int32 on the device, owner by owner."""

    def __init__(self, exchange: Exchange, groups: TableGroups, asked: AskedRounds, *given: Any) -> None:
        """asked: of the rows here. given: the other arguments of `CollectiveLookups`."""
        super().__init__(exchange, groups, *given)
        self._by_group, self._asked, self._num_counts = GroupExchange(exchange), asked, len(groups.tables)

    def _exchange_rows(self, ids: Any, sent: NDArray[np.int64], headers: NDArray[np.int64]) -> tuple[list[Tensor], int]:
        """Return the rows of each group, and the number of the round."""
        counts, joins = headers[:, COUNTS:], headers[:, KIND] != IDLE
        steps = {
            int(step): np.flatnonzero(joins & (headers[:, STEP] == step)).tolist() for step in headers[joins, STEP]
        }
        oldest = int(headers[joins, OLDEST_OPEN].min())
        number = self._exchange.number()
        with self._stream.running(), self._exchange.in_order(number):
            own = torch.empty(0, dtype=torch.int32, device=self._stream.device) if ids is None else ids
            rows = self._by_group.numbers(own, sent, counts) - self._asked.base
            owned: DirectOwnedRows = self._owned()
            runs = owned.runs(rows)
            if len(steps) == 1:
                ranks = tuple(np.flatnonzero(headers[:, KIND] == PART).tolist())
                self._asked.keep(number, AskedRows(rows, runs, next(iter(steps)), ranks))
            lines = owned.look_up_rows(rows, runs, counts, steps, oldest)
            return self._by_group.lines(lines, counts, sent), number


class DirectUpdates(CollectiveUpdates):
    """The updates of all trainers."""

    def __init__(self, exchange: Exchange, groups: TableGroups, asked: AskedRounds, *given: Any) -> None:
        """asked: of the rows here. given: the other arguments of `CollectiveUpdates`."""
        super().__init__(exchange, groups, *given)
        self._by_group, self._asked = GroupExchange(exchange), asked

    def _num_counts(self, groups: TableGroups) -> int:
        return len(groups.tables)

    def _note(self, step: int, *, restart: bool = False) -> None:
        self._asked.forget(step)
        super()._note(step, restart=restart)

    def _apply(self, step: int, part: UpdatePart | None, own: NDArray[np.int64], headers: NDArray[np.int64]) -> None:
        sent, counts = own[:, self._counts], headers[:, self._counts]
        ranks, lookups = self._lookups_of(headers)
        asked = self._asked.of(lookups[0], ranks) if len(lookups) == 1 else None
        number = self._exchange.number()
        owned: DirectOwnedRows = self._owned()
        with self._stream.running():
            sums = self._sums(part)
            with self._exchange.in_order(number):
                if asked is not None:
                    rows, runs = asked.rows, asked.runs
                else:
                    nothing = torch.empty(0, dtype=torch.int32, device=self._stream.device)
                    ids = nothing if part is None else part.ids
                    rows = self._by_group.numbers(ids, sent, counts) - self._asked.base
                    runs = owned.runs(rows)
                gradients = self._by_group.lines(sums, sent, counts)
            owned.apply_rows(rows, runs, counts, gradients, step, *self._rates_and_bound(headers))
