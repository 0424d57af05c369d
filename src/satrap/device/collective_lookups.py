"""The lookups of several trainers: each looks up its batch while it reads the rows here for the others.

A round has a part of each trainer: a batch, nothing (padding), or idle. A trainer that is paused, or whose stream has
ended, is idle until all are, so a lookup that another one has started is answered. A batch that is refused, such as one
with an id that its table cannot have, is a part, too: then no trainer looks anything up, and all raise its error.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.device.asked_rounds import AskedRounds, AskedRows
from satrap.device.collective_updates import CollectiveUpdates
from satrap.device.device_stream import DeviceStream
from satrap.device.exchange import Exchange, RoundThread, RowExchange
from satrap.device.owned_rows import FoundIds, LookupTime, OwnedRows
from satrap.device.segments import TableGroups
from satrap.errors import InputError
from satrap.interrupts import Uninterrupted
from satrap.worker.rows import RowStream

IDLE, _PADDING, PART, _REFUSED = range(4)  # what a trainer brings to a round
KIND, STEP, OLDEST_OPEN, _FIRST_EPOCH, COUNTS = range(5)  # columns of a header
Sent = tuple[Any, NDArray[np.int64]]
"""What a trainer sends: ids and their counts, as `UpdatePart` has them."""


@dataclass(frozen=True, slots=True, eq=False)
class LookupPart:
    """One trainer's ids of a batch."""

    at: LookupTime
    sent: Callable[[], Sent] | None
    """Called in the thread. Raises InputError if the batch is refused. None: there is no batch."""


class CollectiveLookups:
    """The lookups of all trainers."""

    def __init__(
        self,
        exchange: Exchange,
        groups: TableGroups,
        asked: AskedRounds,
        owned: Callable[[], Any],
        thread: RoundThread,
        updates: CollectiveUpdates,
        staleness: int,
        stream: DeviceStream,
    ) -> None:
        """asked: keeps what these lookups ask for. owned: returns the rows that this trainer owns, `OwnedRows` or
        `DirectOwnedRows`. staleness: how many earlier updates a lookup may miss. stream: of the rows."""
        self._exchange, self._groups, self._owned, self._thread = exchange, groups, owned, thread
        self._rows_between, self._asked = RowExchange(exchange, groups), asked
        self._updates, self._staleness, self._stream = updates, staleness, stream
        self._num_counts = groups.num_counts
        self._to_order: FoundIds | None = None
        """What the last round has found, unless it is ordered."""

    def submit(self, part: LookupPart) -> "Future[Any]":
        """Submit a lookup. Its result has the rows of each group of tables, owner by owner, in the order of the ids,
        and the number of the round; or it is the error of a batch that a trainer refuses. Then, while the caller uses
        the rows, the gradients that their update will bring are ordered."""
        future = self._thread.submit(lambda: self._rows(part))
        self._thread.submit(self._order)
        return future

    def idle(self) -> None:
        """Answer the lookups of other trainers until all are idle."""
        self._thread.submit(self._run_idle)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _rows(self, part: LookupPart) -> Any:
        rows = self._round(part)
        assert rows is not None
        return rows

    def _run_idle(self) -> None:
        while self._round(None) is not None:
            self._order()

    def _order(self) -> None:
        """Order the gradients that the update of the last round will bring."""
        asked, self._to_order = self._to_order, None
        if asked is not None and (owned := asked.owned()) is not None:
            with self._stream.running():
                owned.order(asked)

    def _round(self, part: LookupPart | None) -> Any:
        """Exchange ids and rows; return None if all trainers are idle."""
        own = np.zeros((self._exchange.world_size, COUNTS + self._num_counts), np.int64)
        ids, refused = None, ""
        if part is not None:
            own[:, :COUNTS] = _PADDING, part.at.step, part.at.oldest_open, part.at.first_epoch
            if part.sent is not None:
                try:
                    ids, own[:, COUNTS:] = part.sent()
                    own[:, KIND] = PART
                except InputError as error:
                    own[:, KIND], refused = _REFUSED, str(error)
        headers = self._exchange.headers(own)
        kinds = headers[:, KIND]
        if (kinds == IDLE).all():
            return None
        if (kinds == _REFUSED).any():
            rank = int(np.flatnonzero(kinds == _REFUSED)[0])
            return InputError(f"trainer {rank}: {self._exchange.texts(refused)[rank]}")
        last = int(headers[kinds != IDLE, STEP].max())
        self._updates.wait_applied(last - self._staleness - 1)  # before trainer 0 numbers the round
        return self._exchange_rows(ids, own[:, COUNTS:], headers)

    def _exchange_rows(self, ids: Any, sent: NDArray[np.int64], headers: NDArray[np.int64]) -> Any:
        """Send ids, and return their rows and the number of the round. sent: how many, as in `Sent`. headers: of all
        trainers."""
        counts, no_ids = headers[:, COUNTS:], [np.empty(0, np.uint64)] * len(headers)
        received, number = self._exchange.ids(no_ids if ids is None else ids, counts.sum(1).tolist())
        with self._stream.running():
            rows = self._look_up(received, headers, number)
            of_groups = zip(rows, self._groups.counts(counts), self._groups.counts(sent), strict=True)
            with self._exchange.in_order(number):
                return [self._rows_between.rows(group, *part) for group, part in enumerate(of_groups)], number

    def _look_up(self, received: NDArray[np.uint64], headers: NDArray[np.int64], number: int) -> list[Tensor]:
        """Read the rows here, and keep what they are for the update. Trainers that are at different steps, after a
        pause, are served one step after another. number: of the round."""
        parts = headers[headers[:, KIND] != IDLE]
        times = sorted({(int(step), bool(first)) for step, first in parts[:, [STEP, _FIRST_EPOCH]]})
        oldest_open = int(parts[:, OLDEST_OPEN].min())
        if len(times) == 1:
            lines, asked = self._look_up_at(received, headers[:, COUNTS:], *times[0], oldest_open)
            self._asked.keep(number, AskedRows(asked, times[0][0], ranks_of(headers)))
            self._to_order = asked
            return lines
        self._asked.keep(number, None)
        bounds = np.append(0, headers[:, COUNTS:].sum(1).cumsum())
        answers: list[list[Tensor]] = [[] for _ in headers]
        for step, first_epoch in times:
            for rank in np.flatnonzero((headers[:, STEP] == step) & (headers[:, _FIRST_EPOCH] == first_epoch)):
                counts = np.zeros_like(headers[:, COUNTS:])
                counts[rank] = headers[rank, COUNTS:]
                ids = received[bounds[rank] : bounds[rank + 1]]
                answers[rank], _ = self._look_up_at(ids, counts, step, first_epoch, oldest_open)
        present = [answer for answer in answers if answer]
        return [torch.cat(lines) for lines in zip(*present, strict=True)]

    def _look_up_at(
        self, ids: NDArray[np.uint64], counts: NDArray[np.int64], step: int, first_epoch: bool, oldest_open: int
    ) -> tuple[list[Tensor], FoundIds]:
        owned: OwnedRows = self._owned()
        at = LookupTime(step, min(step, oldest_open), first_epoch)
        return owned.look_up_received(ids, counts, at, may_order=self._asked.are_used)


def ranks_of(headers: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the trainers that have a batch."""
    return tuple(np.flatnonzero(headers[:, KIND] == PART).tolist())


class CollectiveStream(RowStream):
    """Has the trainer answer the others with nothing once its own stream has ended."""

    def __init__(self, lookups: CollectiveLookups, updates: CollectiveUpdates) -> None:
        self.has_ended_lookups = False
        """Changes under the lock, so that no lookup follows the end of the lookups."""
        self.lock = threading.Lock()
        self.released = threading.Event()
        """Whether calls that wait for other trainers fail."""
        self._lookups, self._updates = lookups, updates
        self._has_ended_updates = self._is_settled = False

    def end_lookups(self) -> None:
        with self.lock:
            if not self.has_ended_lookups:
                self.has_ended_lookups = True
                self._lookups.idle()

    def end_updates(self) -> None:
        with Uninterrupted():
            if not self._has_ended_updates:
                self._has_ended_updates = True
                self._updates.idle()
        if not self._is_settled:  # else an earlier call has waited
            self._updates.settle()
            self._is_settled = True

    def release(self) -> None:
        self.released.set()
