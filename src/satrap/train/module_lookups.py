"""The lookups that modules make inside forward where no stream is open, and the steps that these lookups belong to.

    forward           `look_up`: rows for the open step, whose gradients come to a leaf of autograd
    backward          a hook notes that the leaf has a gradient
    optimizer.step()  `update`: the gradients of all lookups of the step, one update of all tables; the step ends

A session trains with either a `Stream` or these, so both have the same calls. `zero_grad()` clears
gradients as torch does.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from satrap.data.inputs import Position
from satrap.errors import SatrapError
from satrap.interrupts import Uninterrupted
from satrap.monitor.report import Counters
from satrap.train.batch import InFlightBatch
from satrap.train.dense_strategy import DenseStrategy
from satrap.train.step_lookups import StepLookups, TakenGradients, read_rows
from satrap.train.training_watch import TrainingWatch
from satrap.worker.rows import Ids
from satrap.worker.worker import Worker

_STEPPED = "optimizer.step() had ended the step"


class ModuleLookups:
    """The lookups of modules and the steps of these, from the first lookup until a stream starts or a checkpoint is
    resumed."""

    joint = None
    """Trainers compare nothing: each takes as many steps as every other, as with DDP."""
    position: Position | None = None
    """The modules' program reads its data without Satrap, so no position is known."""

    def __init__(
        self,
        worker: Worker,
        last_step: int,
        on_hold: Callable[[list[Tensor]], None],
        *,
        dense: DenseStrategy,
        watch: TrainingWatch,
        has_peers: bool,
    ) -> None:
        """dense, watch: the session's.
        has_peers: whether other trainers may wait for this one's part of each step."""
        self.last_step = last_step
        self._worker, self._on_hold, self._dense, self._has_peers = worker, on_hold, dense, has_peers
        self._watch = watch
        self._apply: Callable[[], None] | None = None  # the update of the last step, until it is applied
        self._dropped: Counter[str] = Counter()
        self._num_ids = 0
        self._open = self._begin_step()
        self._refresh_dense()

    def look_up(self, ids: Mapping[str, Ids], device: torch.device) -> dict[str, Tensor]:
        """Look up ids by table for the open step. Return for each table the rows, [ids, dim], on the device; their
        gradients are applied when the step ends."""
        self._settle()
        step = self._open.step
        if not self._open.num_lookups:
            self._refresh_dense()  # done before, unless the update of the step before was refused
            self._worker.pad(step, step)
        rows = read_rows(self._worker, ids, step, step, device)
        self._num_ids += sum(map(len, ids.values()))
        return {table: self._open.add(table, ids[table], of_table) for table, of_table in rows.items()}

    def update(self, lrs: dict[str, float], scale: float) -> bool:
        """Apply the gradients of the step, and end it. Return False if there are none: then the step stays open, unless
        other trainers wait for it."""
        if self._apply is not None:
            self._settle()
            return True
        self._watch.note(self._open.tables, [lookup.table for lookup in self._open.reached()])
        self._open.tables.clear()
        if not self._open.has_gradient and not (self._dense.tables and self._open.num_lookups):
            if self._has_peers:
                self._worker.skip(self.last_step + 1)
                self._worker.settle()
                self._end_step()
            return self._has_peers
        apply = self._update(lrs, scale)
        with Uninterrupted():
            self._apply = apply
            self._end_step()
        self._settle()
        self._refresh_dense()
        return True

    def _update(self, lrs: dict[str, float], scale: float) -> Callable[[], None]:
        """Return a function that applies the gradients of the open step; it may be called again."""
        worker, step, update_dense = self._worker, self._open.step, self._dense.update_with(scale)
        taken = TakenGradients.of(worker, [(lookup, 1.0) for lookup in self._open.reached()])

        def apply() -> None:
            if taken is not None and taken.ticket.used:  # a retry after an interrupt that came right after the update
                return
            update_dense(step)
            if taken is not None:
                with worker.on_device():
                    given = taken.for_update(worker)
                    worker.update([], [], of_ids=given, step=step, lrs=lrs, scale=scale)

        return apply

    def _begin_step(self) -> StepLookups:
        lookups = StepLookups(self.last_step + 1)
        self._on_hold(lookups.leaves)
        return lookups

    def _end_step(self) -> None:
        self._open.end(_STEPPED)
        self.last_step += 1
        self._open = self._begin_step()

    def _refresh_dense(self) -> None:
        """Fetch dense parameters that are on servers, for the open step."""
        step = self._open.step
        self._dense.look_up(step, step, torch.from_numpy)
        self._dense.hand_over(step)

    def _settle(self) -> None:
        """Apply the update of the last step, if that was not done or an interrupt came between."""
        if self._apply is None:
            return
        try:
            self._apply()
        except SatrapError:  # refused: the step has no other update
            self._dropped["failed"] += 1
            self._apply = None
            raise
        self._apply = None

    def drop(self, cause: str) -> None:
        """Clear the gradients of the open step; it stays open."""
        self._settle()
        if self._open.has_gradient:
            with Uninterrupted():
                self._dropped[cause] += 1
                self._open.forget()
                self._open.tables.clear()  # that they have no gradient now says nothing of them
            self._watch.note_dropped(cause)

    def counters(self) -> Counters:
        """Return the counters of these lookups so far. All gradients that one step takes count as one batch."""
        lost = {f"batches/{cause}": count for cause, count in self._dropped.items()}
        return Counters(lost=lost, module_ids={"on the spot": self._num_ids} if self._num_ids else {})

    def close(self, why: str) -> None:
        """End these lookups; gradients that no step has taken are dropped."""
        self.drop("closed")
        self._open.end("these lookups had ended")
        self._dense.finish()

    # -- what only a stream has to do ----------------------------------------------------------------------------------

    def _measure(self, *, are_checked: bool) -> None:
        """Do nothing: the update computes the largest gradient."""

    def _waiting_batches(self) -> list[InFlightBatch]:
        return []

    def apply_submitted(self) -> None:
        """Apply the update of the last step, if an interrupt came between."""
        self._settle()

    drain = apply_submitted

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do what `drain` does: no thread of Satrap works on the tables."""
        self._settle()
        yield

    def release(self) -> None:
        """Do nothing: no call waits for other trainers."""
