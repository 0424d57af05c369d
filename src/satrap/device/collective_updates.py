"""The updates of several trainers, which together make one update of each step.

A trainer joins the update of every step once, in ascending order; with nothing, if it has no gradients for the step. A
thread runs the rounds, so that a trainer that drops a step joins it although its loop continues.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.device.asked_rounds import AskedRounds
from satrap.device.device_stream import DeviceStream
from satrap.device.exchange import Exchange, RoundThread, RowExchange
from satrap.device.owned_rows import OwnedRows
from satrap.device.segments import TableGroups
from satrap.errors import StreamError


class StepOrder:
    """Decides for which steps a trainer joins with nothing, and when. Pure."""

    def __init__(self) -> None:
        self.next_step = 1
        """The first step that was not joined."""
        self._skipped: set[int] = set()

    def start(self, step: int) -> None:
        """Continue with this step, in another stream."""
        self.next_step = step
        self._skipped.clear()

    def update(self, step: int) -> tuple[list[int], list[int]]:
        """Join a step with gradients; return the steps to join without gradients before it, and after it."""
        if step < self.next_step:
            raise StreamError(
                f"step {step} is updated after step {self.next_step - 1}; trainers with rows on devices update steps "
                "in ascending order: call optimizer.step() for the batches in the order of the stream"
            )
        earlier = list(range(self.next_step, step))
        return earlier, self._advance(step)[len(earlier) + 1 :]

    def skip(self, step: int) -> list[int]:
        """Note that a step has no gradients; return the steps to join without gradients now."""
        self._skipped.add(step)
        return self._advance(self.next_step - 1)

    def pass_through(self, step: int) -> list[int]:
        """Note that no update of a step up to this one will follow; return the steps to join without gradients now."""
        return self._advance(step)

    def _advance(self, last: int) -> list[int]:
        """Join all steps up to `last`, and the skipped ones that follow."""
        first, last = self.next_step, max(last, self.next_step - 1)
        while last + 1 in self._skipped:
            last += 1
        self.next_step = last + 1
        self._skipped = {step for step in self._skipped if step > last}
        return list(range(first, last + 1))


_IDLE, _NOTHING, _PART = range(3)  # what a trainer brings to a round
_KIND, _STEP, _BOUND, _LOOKUP, _COUNTS = range(5)  # columns of a header; rates follow the counts


@dataclass(frozen=True, slots=True, eq=False)
class UpdatePart:
    """One trainer's gradients of a step."""

    ids: Any
    """The ids of each owner; of tables with `num_rows` the numbers of their rows, as one tensor."""
    counts: NDArray[np.int64]
    """How many of each table, [trainers, tables]; with `num_rows` of each group, [trainers, groups]."""
    sums: Sequence[Tensor]
    """For each group of tables the gradients, owner by owner; once, if they go to all trainers."""
    lrs: Sequence[float]
    """The rate of each table."""
    bound: float
    """No number of the gradients is larger than this."""
    lookup: int = -1
    """The number of the round that looked up the same ids; -1: there is none."""


class CollectiveUpdates:
    """The updates of all trainers."""

    def __init__(
        self,
        exchange: Exchange,
        groups: TableGroups,
        asked: AskedRounds,
        owned: Callable[[], Any],
        thread: RoundThread,
        stream: DeviceStream,
    ) -> None:
        """asked: by the lookups. owned: returns the rows that this trainer owns, `OwnedRows` or `DirectOwnedRows`.
        stream: of the rows."""
        self._asked, self._stream = asked, stream
        self._exchange, self._groups, self._owned, self._thread = exchange, groups, owned, thread
        self._rows_between = RowExchange(exchange, groups)
        self._counts = slice(_COUNTS, _COUNTS + groups.num_counts)
        self._rates = slice(self._counts.stop, self._counts.stop + len(groups.numbers))
        self._order, self._lock = StepOrder(), threading.Lock()
        self._applied = 0
        self._has_applied = threading.Condition()
        self._last: Future[None] | None = None

    def start(self, step: int) -> None:
        """Continue with this step, in another stream."""
        with self._lock:
            self._order.start(step)
            self._last = self._thread.submit(lambda: self._note(step - 1, restart=True))

    def submit(self, step: int, part: UpdatePart) -> "Future[None]":
        """Join a step with gradients."""
        with self._lock:
            earlier, later = self._order.update(step)
            self._pass(earlier)
            self._last = future = self._thread.submit(lambda: self._run(step, part))
            self._pass(later)
            return future

    def skip(self, step: int) -> None:
        """Join a step without gradients, after all earlier steps."""
        with self._lock:
            self._pass(self._order.skip(step))

    def pass_through(self, step: int) -> None:
        """Join all steps up to this one that this trainer has not joined yet."""
        with self._lock:
            self._pass(self._order.pass_through(step))

    def idle(self) -> None:
        """Join the steps of other trainers without gradients, until all trainers are idle."""
        self._thread.submit(self._run_idle)

    def settle(self) -> None:
        """Return once all steps that this trainer joined are applied."""
        if self._last is not None:
            self._thread.wait(self._last)

    def wait_applied(self, step: int) -> None:
        """Wait until the rows here have all updates up to this step. The thread of lookups calls this."""
        with self._has_applied:
            self._has_applied.wait_for(lambda: self._applied >= step or self._thread.error is not None)
            if self._applied < step:
                assert self._thread.error is not None
                raise self._thread.error

    def wake(self) -> None:
        """Wake a lookup that waits for an update, after the thread has failed."""
        with self._has_applied:
            self._has_applied.notify_all()

    def _pass(self, steps: Sequence[int]) -> None:
        for step in steps:
            self._last = self._thread.submit(lambda step=step: self._run(step, None))  # type: ignore[misc]

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _note(self, step: int, *, restart: bool = False) -> None:
        self._asked.forget(step)
        with self._has_applied:
            self._applied = step if restart else max(self._applied, step)
            self._has_applied.notify_all()

    def _run_idle(self) -> None:
        while not self._round(_IDLE, 0, None):
            pass

    def _run(self, step: int, part: UpdatePart | None) -> None:
        self._round(_NOTHING if part is None else _PART, step, part)

    def _round(self, kind: int, step: int, part: UpdatePart | None) -> bool:
        """Exchange gradients, and apply those of the rows here. Return whether all trainers are idle."""
        own = np.zeros((self._exchange.world_size, self._rates.stop), np.int64)
        own[:, _KIND], own[:, _STEP] = kind, step
        if part is not None:
            own[:, _BOUND] = np.float64(part.bound).view(np.int64)
            own[:, _LOOKUP], own[:, self._counts] = part.lookup, part.counts
            own[:, self._rates] = np.array(part.lrs, np.float64).view(np.int64)
        headers = self._exchange.headers(own)
        kinds, steps = headers[:, _KIND], headers[:, _STEP]
        if (kinds == _IDLE).all():
            return True
        joint = int(steps.max())
        if different := [rank for rank in np.flatnonzero(kinds != _IDLE).tolist() if steps[rank] != joint]:
            raise StreamError(
                f"trainer {different[0]} updates step {steps[different[0]]} and another one step {joint}; all trainers "
                "must step the same batches: start all of them again, from the last checkpoint"
            )
        if (kinds == _PART).any():
            self._apply(joint, part, own, headers)
        self._note(joint)
        self._exchange.barrier()  # an update returns once all trainers' rows have it: a server may be asked for them
        return False

    def _apply(self, step: int, part: UpdatePart | None, own: NDArray[np.int64], headers: NDArray[np.int64]) -> None:
        sent, counts = own[:, self._counts], headers[:, self._counts]
        owned: OwnedRows = self._owned()
        if (ids := self._asked_by(headers)) is not None:
            number = self._exchange.number()
        else:
            no_ids = [np.empty(0, np.uint64)] * len(own)
            received, number = self._exchange.ids(no_ids if part is None else part.ids, counts.sum(1).tolist())
            ids = owned.joined(received, counts)
        with self._stream.running():
            sums = self._sums(part)
            of_groups = zip(sums, self._groups.counts(sent), self._groups.counts(counts), strict=True)
            with self._exchange.in_order(number):
                gradients = [self._rows_between.gradients(group, *part) for group, part in enumerate(of_groups)]
            owned.apply(ids, gradients, step, *self._rates_and_bound(headers))

    def _sums(self, part: UpdatePart | None) -> Sequence[Tensor]:
        """Return the gradients that this trainer sends."""
        if part is not None:
            return part.sums
        return [torch.empty((0, dim), device=self._stream.device) for _, dim in self._groups.layouts]

    def _asked_by(self, headers: NDArray[np.int64]) -> Any:
        """Return the rows here that one lookup has asked for, with the same batches; None: ids are to be sent."""
        ranks = np.flatnonzero(headers[:, _KIND] == _PART)
        asked = self._asked.of(np.unique(headers[ranks, _LOOKUP]).tolist(), tuple(ranks.tolist()))
        return None if asked is None else asked.rows

    def _rates_and_bound(self, headers: NDArray[np.int64]) -> tuple[list[float], float]:
        """Return the rate of each table, and the bound of all gradients together."""
        first = int(np.flatnonzero(headers[:, _KIND] == _PART)[0])
        rates = headers[first, self._rates].view(np.float64).tolist()
        return rates, float(headers[:, _BOUND].copy().view(np.float64).sum())
