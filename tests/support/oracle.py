"""A dictionary model of a `Store`, for the property test.

One dict: id -> Row(values, state, stamp), one dict of sightings per bucket, counters. It decides admission,
sightings, shares of the capacity, eviction, expiry, what an absent row reads as, and which gradients are applied.
Three things it asks of the store's own functions instead of repeating them, through probe stores: the initial values
of an id, the draw of `Probability`, and the bucket of an id. It is slow and simple; it has no threads, no files and
no native code.

Values after an update are not predicted but judged: `settle` takes the row the store arrived at, asserts that the
step is right (one_row.py) and adopts it, so that differences of an ulp never add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from one_row import F32, assert_step, initial_state, ulp
from satrap import _core
from satrap.config.optimizers import Ftrl
from satrap.config.tables import Always, MinCount, Probability, Table
from satrap.table.store import Store

COUNTERS = (
    "lookups", "hits", "inserted", "refused", "evicted", "expired", "updated", "not_applied_absent", "skipped"
)  # fmt: skip


class Full(Exception):
    """The store must raise CapacityError."""


class NonFinite(Exception):
    """The store must raise NonFiniteError, naming this position."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


@dataclass
class Row:
    values: F32
    state: F32 | None  # None: just inserted, not yet seen
    stamp: int


@dataclass
class Oracle:
    table: Table
    seed: int
    rows: dict[int, Row] = field(default_factory=dict)
    sightings: list[dict[int, tuple[int, int]]] = field(default_factory=list)  # per bucket: id -> (stamp, count)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    latest_step: int = 0
    expire_before: int = 0
    lr: float = 0.0
    _initial: dict[int, F32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sightings = [{} for _ in range(self.table.resolved_num_buckets)]
        self.lr = self.table.optimizer.lr

    # -- what is asked of the store's own functions ------------------------------------------------------------------

    def initial(self, ids: Iterable[int]) -> dict[int, F32]:
        """Returns initial values, from a store that never inserts: capacity, admission, buckets do not affect them."""
        unknown = [id_ for id_ in dict.fromkeys(ids) if id_ not in self._initial]
        if unknown:
            probe = Store(_plain(self.table, absent="initial"), seed=self.seed, num_threads=1)
            rows = probe.lookup(as_ids(unknown), train=False)
            self._initial.update(zip(unknown, rows, strict=True))
        return self._initial

    def drawn(self, ids: Sequence[int], step: int) -> dict[int, bool]:
        """Returns the ids that `Probability` admits at this step: a pure function of (seed, table, id, step)."""
        probe = Store(_plain(self.table, admission=self.table.admission), seed=self.seed, num_threads=1)
        probe.lookup(as_ids(ids), step=step)
        return dict(zip(ids, probe.read(as_ids(ids)).present.tolist(), strict=True))

    def bucket(self, id_: int) -> int:
        return int(_core.bucket_of(as_ids([id_]), self.table.resolved_num_buckets, self.table.is_direct)[0])

    # -- lookup ------------------------------------------------------------------------------------------------------

    def lookup(
        self, ids: Sequence[int], *, train: bool = True, step: int | None = None, oldest_open: int | None = None
    ) -> F32:
        if train:
            step = self.latest_step + 1 if step is None else step
            self._train(list(dict.fromkeys(ids)), step, step if oldest_open is None else oldest_open)
        return self.peek(ids)

    def peek(self, ids: Sequence[int]) -> F32:
        """Returns the rows' values; changes nothing."""
        out = np.zeros((len(ids), self.table.dim), np.float32)
        initial = self.initial(ids) if self.table.absent == "initial" else {}
        for i, id_ in enumerate(ids):
            if id_ in self.rows:
                out[i] = self.rows[id_].values
            elif initial:
                out[i] = initial[id_]
        return out

    def _train(self, unique: list[int], step: int, oldest_open: int) -> None:
        self.latest_step = max(self.latest_step, step)
        self._expire(step, oldest_open)
        self.counters["lookups"] += len(unique)
        misses = []
        for id_ in unique:
            if id_ in self.rows:
                self.counters["hits"] += 1
                self.rows[id_].stamp = max(self.rows[id_].stamp, step)
            else:
                misses.append(id_)
        drawn = self.drawn(misses, step) if isinstance(self.table.admission, Probability) and misses else {}
        initial = self.initial(misses)
        for id_ in misses:
            if drawn.get(id_, True) and self._admit(id_, step):
                self._make_room(id_, oldest_open)
                self.sightings[self.bucket(id_)].pop(id_, None)
                self.rows[id_] = Row(initial[id_], None, max(step, self.expire_before))  # a very late step, too
                self.counters["inserted"] += 1
            else:
                self.counters["refused"] += 1

    def _expire(self, step: int, oldest_open: int) -> None:
        if self.table.expire_after is None:
            return
        self.expire_before = max(self.expire_before, min(step - self.table.expire_after, oldest_open), 0)
        gone = [id_ for id_, row in self.rows.items() if row.stamp < self.expire_before]
        for id_ in gone:
            del self.rows[id_]
        self.counters["expired"] += len(gone)

    def _admit(self, id_: int, step: int) -> bool:
        """Counts a sighting: one a step, in a window per bucket that forgets the smallest (stamp, id). The one
        that admits stays until the row exists, so that a lookup without room can be retried."""
        admission = self.table.admission
        if not isinstance(admission, MinCount) or admission.n == 1:
            return True
        seen = self.sightings[self.bucket(id_)]
        if id_ not in seen:
            if len(seen) >= max(1, self.share(admission.window, self.bucket(id_))):
                del seen[min(seen, key=lambda other: (seen[other][0], other))]
            seen[id_] = (step, 1)
            return False
        stamp, count = seen[id_]
        if step > stamp and count < admission.n:
            count += 1
        seen[id_] = (max(stamp, step), count)
        return count >= admission.n

    def share(self, total: int, bucket: int) -> int:
        """Returns the bucket's share of the capacity, or of the window."""
        each, rest = divmod(total, self.table.resolved_num_buckets)
        return each + (bucket < rest)

    def _make_room(self, id_: int, oldest_open: int) -> None:
        if self.table.capacity is None or self.table.on_full == "grow":
            return
        bucket = self.bucket(id_)
        mine = [other for other in self.rows if self.bucket(other) == bucket]
        if len(mine) < self.share(self.table.capacity, bucket):
            return
        oldest = min(((self.rows[other].stamp, other) for other in mine), default=(oldest_open, 0))
        if self.table.on_full == "raise" or oldest[0] >= oldest_open:
            raise Full
        del self.rows[oldest[1]]
        self.counters["evicted"] += 1

    # -- update ------------------------------------------------------------------------------------------------------

    def update(self, ids: Sequence[int], gradients: F32, *, step: int | None = None) -> dict[int, F32]:
        """Returns the gradient of each row's step: summed in order of appearance, in float32."""
        trains = [id_ not in self.table.frozen_ids for id_ in ids]
        finite = [not of or bool(np.isfinite(gradient).all()) for of, gradient in zip(trains, gradients, strict=True)]
        if not all(finite) and self.table.on_nonfinite == "raise":
            raise NonFinite(finite.index(False))
        self.counters["skipped"] += finite.count(False)
        step = max(1, self.latest_step) if step is None else step
        self.latest_step = max(self.latest_step, step)
        summed: dict[int, F32] = {}
        for id_, gradient, good, of in zip(ids, gradients, finite, trains, strict=True):
            if good and of:
                summed[id_] = summed[id_] + gradient if id_ in summed else gradient.copy()
        applied = {id_: gradient for id_, gradient in summed.items() if id_ in self.rows}
        for id_ in applied:
            self.rows[id_].stamp = max(self.rows[id_].stamp, step)
        self.counters["updated"] += len(applied)
        self.counters["not_applied_absent"] += len(summed) - len(applied)
        return applied

    def settle(self, store: Store, applied: dict[int, F32], lr: float | None = None) -> None:
        """Checks the rows that the store computed in an update, then adopts them."""
        ids = list(applied)
        after = store.read(as_ids(ids))
        assert after.present.all(), "a row vanished in an update"
        for i, id_ in enumerate(ids):
            row = self.rows[id_]
            assert row.state is not None
            new = (after.values[i].copy(), after.state[i].copy())
            rate = self.lr if lr is None else lr
            assert_step(self.table.optimizer, rate, (row.values, row.state), applied[id_], new, self.table.dtype)
            row.values, row.state = new

    def adopt(self, store: Store) -> None:
        """Adopts the store's content. A lookup that raised CapacityError may have inserted some of its rows."""
        engine, index, num_buckets = store._engine, store._slot.index, len(self.sightings)
        self.counters.update({name: store.stats()[name] for name in COUNTERS})
        rows = engine.export_rows(index, 0, num_buckets, 0)
        read = store.read(rows["id"])
        columns = zip(rows["id"].tolist(), read.values, read.state, rows["step"].tolist(), strict=True)
        self.rows = {id_: Row(values.copy(), state.copy(), stamp) for id_, values, state, stamp in columns}
        for bucket in range(num_buckets):
            seen = engine.export_sightings(index, bucket, bucket + 1)
            columns_ = zip(seen["id"].tolist(), seen["step"].tolist(), seen["count"].tolist(), strict=True)
            self.sightings[bucket] = {id_: (stamp, count) for id_, stamp, count in columns_}

    # -- comparison --------------------------------------------------------------------------------------------------

    def compare(self, store: Store, universe: Sequence[int], *, counters: bool = True) -> None:
        """Checks that everything observable of the store equals the model, bit for bit."""
        store.check()
        read = store.read(as_ids(universe))
        present = [id_ in self.rows for id_ in universe]
        assert read.present.tolist() == present, _membership(universe, read.present, present)
        self.see(store)
        for i, id_ in enumerate(universe):
            if id_ in self.rows:
                np.testing.assert_array_equal(read.values[i], self.rows[id_].values, err_msg=f"values of {id_}")
                np.testing.assert_array_equal(read.state[i], self.rows[id_].state, err_msg=f"state of {id_}")
        np.testing.assert_array_equal(store.lookup(as_ids(universe), train=False), self.peek(universe))
        assert len(store) == len(self.rows)
        assert store.lr == self.lr
        assert store.latest_step == self.latest_step
        stats = store.stats()
        assert stats["rows"] == len(self.rows)
        assert stats["sightings"] == sum(len(seen) for seen in self.sightings)
        if counters:
            assert {name: stats[name] for name in COUNTERS} == self.counters

    def see(self, store: Store) -> None:
        """Checks and adopts the state of rows that were inserted since."""
        new = [id_ for id_, row in self.rows.items() if row.state is None]
        read = store.read(as_ids(new))
        for i, id_ in enumerate(new):
            if not read.present[i]:
                continue  # compare() says so
            state = read.state[i]
            row, optimizer = self.rows[id_], self.table.optimizer
            expected = initial_state(optimizer, row.values, optimizer.lr)
            slack = 2 * ulp(expected) if isinstance(optimizer, Ftrl) else 0.0
            assert np.all(np.abs(state - expected) <= slack), (
                f"state of the new row {id_}: {state}, expected {expected}"
            )
            row.state = state.copy()


def as_ids(ids: Iterable[int]) -> NDArray[np.uint64]:
    return np.array(list(ids), dtype=np.uint64)


def _plain(table: Table, **changes: Any) -> Table:
    """Returns the same table without any limit of its rows, in one bucket."""
    limits = {"capacity": None, "on_full": "grow", "num_buckets": 1, "expire_after": None, "admission": Always()}
    return replace(table, **limits | changes)


def _membership(universe: Sequence[int], found: Any, expected: Sequence[bool]) -> str:
    extra = [id_ for id_, a, b in zip(universe, found, expected, strict=True) if a and not b]
    missing = [id_ for id_, a, b in zip(universe, found, expected, strict=True) if b and not a]
    return f"rows that should not be there: {extra}; rows that are missing: {missing}"
