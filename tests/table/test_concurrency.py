"""Several Python threads in one store: nothing lost, nothing applied twice, no row half-written, the GIL free
meanwhile.

SGD with lr = 1 on rows of zeros and gradients of ones makes a row's every element minus the number of updates applied
to it, exact in float32 far beyond what is done here, so sums tell everything. Threads are joined with deadlines; none
sleeps.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import as_ids
from satrap.config.optimizers import SGD
from satrap.config.tables import Constant, Table
from satrap.errors import CapacityError, TicketError
from satrap.table.store import Store
from waiting import DEADLINE_SECONDS

OpenStore = Callable[..., Store]


def counting(**options: Any) -> Table:
    plain: dict[str, Any] = {"dim": 16, "optimizer": SGD(lr=1.0), "initial": Constant(0.0), "num_buckets": 8}
    return Table("counts", **{**plain, **options})


class Crew:
    """Threads that run once, and threads that run until those have ended; raises the first exception of any."""

    def __init__(self) -> None:
        self._once: list[Callable[[], None]] = []
        self._forever: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None], *, forever: bool = False) -> None:
        (self._forever if forever else self._once).append(work)

    def run(self) -> None:
        stop = threading.Event()

        def repeat(work: Callable[[], None]) -> None:
            work()
            while not stop.is_set():
                work()

        pool = ThreadPoolExecutor(len(self._once) + len(self._forever))
        once = [pool.submit(work) for work in self._once]
        forever = [pool.submit(repeat, work) for work in self._forever]
        wait(once, DEADLINE_SECONDS)
        stop.set()
        stuck = wait((*once, *forever), DEADLINE_SECONDS).not_done
        pool.shutdown(wait=not stuck)
        assert not stuck, f"{len(stuck)} threads still run after {DEADLINE_SECONDS} s"
        for each in (*once, *forever):
            each.result()


@contextmanager
def short_switches() -> Iterator[None]:
    """Makes Python switch threads often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def assert_whole(rows: Any) -> None:
    """Checks that every row was written by whole updates only."""
    assert np.all(rows == rows[:, :1]), "a row was seen half-written"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_updates_from_many_threads_all_count(num_threads: int, open_store: OpenStore, seed: int) -> None:
    store = open_store(counting(), num_threads=num_threads)
    num_ids, num_updates, batch = 3000, 150, 1500
    everyone = np.arange(num_ids, dtype=np.uint64)
    applied = np.zeros((4, num_ids), np.int64)
    crew = Crew()

    def updater(which: int) -> Callable[[], None]:
        rng = np.random.default_rng([seed, which])

        def update() -> None:
            for i in range(num_updates):
                ids = rng.integers(num_ids, size=batch).astype(np.uint64)
                ones = np.ones((batch, 16), np.float32)
                rows, ticket = store.lookup_for_update(ids)
                assert_whole(rows)
                store.update(ticket if i % 2 else ids, ones)
                np.add.at(applied[which], ids.astype(np.int64), 1)

        return update

    def read() -> None:
        assert_whole(store.lookup(everyone, train=False))
        assert_whole(store.read(everyone[::7]).values)

    def count() -> None:
        stats = store.stats()
        assert stats["rows"] <= num_ids
        assert stats["lookups"] >= stats["hits"]
        assert stats["rows"] <= len(store)
        store.check()

    for which in range(4):
        crew.add(updater(which))
    crew.add(read, forever=True)
    crew.add(count, forever=True)
    with short_switches():
        crew.run()
    total = applied.sum(axis=0)
    read_back = store.read(everyone)
    np.testing.assert_array_equal(read_back.values, np.repeat(-total[:, None], 16, axis=1).astype(np.float32))
    np.testing.assert_array_equal(read_back.present, total > 0)
    stats = store.stats()
    assert stats["inserted"] == len(store) == np.sum(total > 0)
    assert stats["not_applied_absent"] == 0
    assert stats["lookups"] == stats["hits"] + stats["inserted"] == stats["updated"]
    assert store.latest_step == 4 * num_updates, "each lookup has its own step"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_updates_amid_evictions_are_applied_or_counted(num_threads: int, open_store: OpenStore, seed: int) -> None:
    """Rows come and go; each gradient is applied to a row of its id or counted, none lands on another row."""
    num_ids, workers, batch, num_batches = 4000, 4, 200, 250
    store = open_store(counting(capacity=1600, num_buckets=4), num_threads=num_threads)
    sent = [0] * workers
    crew = Crew()

    def worker(which: int) -> Callable[[], None]:
        rng = np.random.default_rng([seed, which])

        def work() -> None:
            for _ in range(num_batches):
                ids = np.unique(rng.integers(num_ids, size=batch)).astype(np.uint64)
                try:
                    rows, ticket = store.lookup_for_update(ids)
                except CapacityError:
                    continue  # the other threads' rows are pinned by a late step
                assert_whole(rows)
                store.update(ticket, np.ones((len(ids), 16), np.float32))
                sent[which] += len(ids)

        return work

    def read() -> None:
        assert_whole(store.lookup(np.arange(0, num_ids, 3, dtype=np.uint64), train=False))

    for which in range(workers):
        crew.add(worker(which))
    crew.add(read, forever=True)
    with short_switches():
        crew.run()
    stats = store.stats()
    assert stats["updated"] + stats["not_applied_absent"] == sum(sent)
    assert stats["evicted"] > 0
    assert stats["inserted"] - stats["evicted"] == len(store) <= 1600
    read_back = store.read(np.arange(num_ids, dtype=np.uint64))
    assert_whole(read_back.values)
    assert -read_back.values[:, 0].sum() <= stats["updated"]
    assert np.all(read_back.values <= 0)


def test_saves_amid_updates_hold_whole_rows(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(counting(), num_threads=2)
    num_ids = 2000
    ids = np.arange(num_ids, dtype=np.uint64)
    store.lookup(ids)
    store.save(tmp_path / "base")
    replica = Store.load(tmp_path / "base", num_threads=1)
    crew = Crew()
    saves = 0

    def update() -> None:
        for _ in range(300):
            store.update(ids, np.ones((num_ids, 16), np.float32))

    def save() -> None:
        nonlocal saves
        saves += 1
        store.save(tmp_path / "full")
        loaded = Store.load(tmp_path / "full", num_threads=2)
        loaded.check()
        assert len(loaded) == num_ids
        assert_whole(loaded.read(ids).values)
        store.save_changes(tmp_path / f"changes-{saves}", since=replica.version)
        replica.apply_changes(tmp_path / f"changes-{saves}")
        assert_whole(replica.read(ids).values)

    crew.add(update)
    crew.add(update)
    crew.add(save, forever=True)
    crew.run()
    assert np.all(store.read(ids).values == -600)
    replica.check()


def test_one_ticket_in_many_threads_is_applied_once(open_store: OpenStore) -> None:
    store = open_store(counting(), num_threads=2)
    ids, barrier = np.arange(2000, dtype=np.uint64), threading.Barrier(4)

    def use(ticket: Any) -> None:
        barrier.wait(DEADLINE_SECONDS)
        store.update(ticket, np.ones((2000, 16), np.float32))

    for round_ in range(1, 21):
        _, ticket = store.lookup_for_update(ids)
        with ThreadPoolExecutor(4) as pool:
            used = [pool.submit(use, ticket) for _ in range(4)]
        assert sum(isinstance(each.exception(), TicketError) for each in used) == 3
        assert np.all(store.read(ids).values == -round_)


@pytest.mark.alone
def test_the_gil_is_free_during_a_lookup_an_update_and_a_check(open_store: OpenStore) -> None:
    """A Python thread runs on while native code runs. One good round of several proves it; the machine may be busy."""
    store = open_store(counting(num_buckets=256))
    ids = np.arange(1_500_000, dtype=np.uint64)
    gradients = np.ones((len(ids), 16), np.float32)
    out = np.zeros((len(ids), 16), np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "lookup": lambda: store.lookup(ids, out=out),
        "update": lambda: store.update(ids, gradients),
        "read": lambda: store.read(ids),
        "check": store.check,
    }
    for name, call in calls.items():
        assert any(_longest_gap(call) < 0.5 for _ in range(8)), f"{name} holds the GIL"


def _longest_gap(call: Callable[[], Any]) -> float:
    """Returns the longest time in which another thread could not run, as a fraction of the call's."""
    ticks: list[float] = []
    crew = Crew()

    def tick() -> None:
        for _ in range(200):
            ticks.append(time.perf_counter())

    crew.add(tick, forever=True)
    span: list[float] = []

    def work() -> None:
        while not ticks:
            pass
        span.append(time.perf_counter())
        call()
        span.append(time.perf_counter())

    crew.add(work)
    crew.run()
    begin, end = span
    inside = np.array([begin, *(at for at in ticks if begin < at < end), end])
    return float(np.diff(inside).max() / (end - begin))


def test_stores_take_their_threads_with_them() -> None:
    """Native threads stop with their store, used or not."""
    ids = np.arange(20_000, dtype=np.uint64)
    before = len(os.listdir("/proc/self/task"))
    for round_ in range(20):
        store = Store(counting(), num_threads=4)
        if round_ % 2:
            store.lookup(ids)
        del store
    assert len(os.listdir("/proc/self/task")) <= before


def test_a_store_that_is_dropped_while_another_thread_uses_it() -> None:
    """Any thread may drop the last reference; results keep their memory."""
    rows: list[Any] = []

    def use(store: Store) -> None:
        rows.append(store.lookup(as_ids(range(5000))))

    for _ in range(10):
        crew = Crew()
        store = Store(counting(), num_threads=2)
        for _ in range(3):
            crew.add(lambda store=store: use(store))  # type: ignore[misc]
        del store
        crew.run()
        del crew
    assert len(rows) == 30
    assert all(np.all(each == 0) for each in rows)
