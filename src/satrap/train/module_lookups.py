"""The lookups that modules make inside forward, and the steps that these lookups belong to.

    forward           `look_up`: rows of the step now open, as a leaf of autograd
    backward          a hook notes that the leaf has a gradient
    optimizer.step()  `update`: the gradients of all lookups of the step, one update of all tables; the step ends

A session has either a `Stream` or these as what it trains with, so both have the same calls. A lookup that no backward
pass reaches leaves nothing to do; `zero_grad()` clears gradients as torch does. A backward pass to a lookup of a step
that has ended raises an error, since its gradient would be lost.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satrap.data.inputs import Position
from satrap.device.device_stream import to_device
from satrap.errors import SatrapError, StreamError
from satrap.interrupts import Uninterrupted
from satrap.monitor.report import Counters
from satrap.train.batch import InFlightBatch, gradient_array
from satrap.worker.rows import Ids
from satrap.worker.worker import Worker


class ModuleLookups:
    """The lookups of modules and their steps, between the start of training and that of a stream, or a resume."""

    joint = None
    """Trainers compare nothing: each takes as many steps as every other, as with DDP."""
    position: Position | None = None
    """The modules' program reads its data without Satrap, so no position is known."""

    def __init__(
        self, worker: Worker, last_step: int, on_hold: Callable[[list[Tensor]], None], *, has_peers: bool
    ) -> None:
        """has_peers: whether other trainers may wait for this one's part of each step."""
        self.last_step = last_step
        self._worker, self._has_peers = worker, has_peers
        self._tables = worker.rows.table_lookups(worker.tables)
        self._num_lookups = 0
        self._reached: dict[int, _Lookup] = {}  # lookups with a gradient, by number
        self._leaves: list[Tensor] = []  # those of `_reached`, which the optimizer shares
        self._apply: Callable[[], None] | None = None  # the update of the last step, until it is applied
        self._dropped: Counter[str] = Counter()
        self._is_closed = False
        on_hold(self._leaves)

    def look_up(self, table: str, ids: Ids, device: torch.device) -> Tensor:
        """Return the rows of the ids in the open step, [ids, dim], as a leaf on the device."""
        self._settle()
        ids = ids.copy()  # the caller may reuse the memory before the step ends
        rows = self._tables.look_up(table, ids, self.last_step + 1)
        leaf = to_device(rows, device).requires_grad_()
        self._num_lookups += 1
        leaf.register_post_accumulate_grad_hook(_Lookup(self, self._num_lookups, self.last_step + 1, table, ids))
        return leaf

    def reach(self, lookup: "_Lookup", leaf: Tensor) -> None:
        """Note that a backward pass has reached the lookup."""
        if self._is_closed or lookup.step <= self.last_step:
            what = "these lookups had ended" if self._is_closed else "optimizer.step() had ended the step"
            raise StreamError(
                f"step {lookup.step}: a loss reached a lookup of table {lookup.table!r} after {what}, so its gradient "
                "would be lost: call backward() of all losses before the step, or forward again after it"
            )
        if lookup.number not in self._reached:
            lookup.leaf = leaf
            self._reached[lookup.number] = lookup
            self._leaves.append(leaf)

    def update(self, lrs: dict[str, float], scale: float) -> bool:
        """Apply the gradients of the step, and end it. Return False if there are none: then the step stays open, unless
        other trainers wait for it."""
        if self._apply is not None:
            self._settle()
            return True
        if not self._reached:
            if self._has_peers:
                self._worker.skip(self.last_step + 1)
                self._worker.settle()
                self.last_step += 1
            return self._has_peers
        apply = self._tables.update(self._gradients(), self.last_step + 1, lrs, scale)
        with Uninterrupted():
            self._apply = apply
            self._forget()
            self.last_step += 1
        self._settle()
        return True

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

    def _gradients(self) -> dict[str, tuple[Ids, Any]]:
        """Return the ids and gradients of each table, in the order of the lookups."""
        by_table: dict[str, tuple[list[Ids], list[Any]]] = {}
        for _, lookup in sorted(self._reached.items()):
            assert lookup.leaf is not None
            ids, gradients = by_table.setdefault(lookup.table, ([], []))
            ids.append(lookup.ids)
            gradients.append(gradient_array(lookup.leaf))
        return {name: (np.concatenate(ids), np.concatenate(given)) for name, (ids, given) in by_table.items()}

    def _forget(self) -> None:
        """Clear the gradients of the step."""
        for leaf in self._leaves:
            leaf.grad = None
        for lookup in self._reached.values():
            lookup.leaf = None
        self._reached.clear()
        self._leaves.clear()

    def drop(self, cause: str) -> None:
        """Clear the gradients of the open step; it stays open."""
        self._settle()
        if self._reached:
            with Uninterrupted():
                self._dropped[cause] += 1
                self._forget()

    def counters(self) -> Counters:
        """Return the counters of these lookups so far: a batch is what has the gradients of a step."""
        return Counters(lost={f"batches/{cause}": count for cause, count in self._dropped.items()})

    def close(self, why: str) -> None:
        """End these lookups; gradients that no step has taken are dropped."""
        self.drop("closed")
        self._is_closed = True

    # -- what only a stream has to do ----------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Do nothing: only rows on a device need the largest gradient."""

    def _waiting_batches(self) -> list[InFlightBatch]:
        return []

    def drain(self) -> None:
        """Apply the update of the last step, if an interrupt came between."""
        self._settle()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do what `drain` does: no thread of Satrap works on the tables."""
        self._settle()
        yield

    def release(self) -> None:
        """Do nothing: no call waits for other trainers."""


class _Lookup:
    """One lookup: the hook of its leaf. Must not refer to the leaf before it has a gradient, so that it is collected
    with the user's last reference."""

    __slots__ = ("__weakref__", "_lookups", "ids", "leaf", "number", "step", "table")

    def __init__(self, lookups: ModuleLookups, number: int, step: int, table: str, ids: Ids) -> None:
        self._lookups, self.number, self.step, self.table, self.ids = lookups, number, step, table, ids
        self.leaf: Tensor | None = None

    def __call__(self, leaf: Tensor) -> None:
        self._lookups.reach(self, leaf)
