"""Interference from outside: interrupts, kills, limits of the system, and other threads that write to a caller's
arrays.

Where the moment matters, the test creates it: the call before that moment is replaced by one that also does what the
outside would do, so each test can fail only at that moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import satrap.table.snapshot.reader
from oracle import as_ids
from satrap import _core
from satrap.config.optimizers import SGD
from satrap.config.tables import Constant, Table, Zeros
from satrap.errors import InputError, SatrapError, SharedMemoryError, SnapshotError, TicketError
from satrap.table.snapshot.directory import read_manifest
from satrap.table.store import Store
from satrap.table.table_group import TableGroup
from waiting import DEADLINE_SECONDS


def run(program: str, *arguments: object) -> str:
    """Return what the program prints, in a separate process with its own limits."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Repeat `work` in another thread inside the context."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# -- memory ------------------------------------------------------------------------------------------------------------

NO_MEMORY = """
import resource, numpy as np
from satrap import SGD, Store, Table, Zeros
store = Store(Table("item", dim=500, num_buckets=1, optimizer=SGD(lr=1.0), initial=Zeros()), num_threads=1)
ids, gradients = np.arange(20_000, dtype=np.uint64), np.ones((20_000, 500), np.float32)
_, ticket = store.lookup_for_update(ids)
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + (8 << 20), resource.RLIM_INFINITY))
try:
    store.update(ticket, gradients)
    print("no error")
except MemoryError:
    print("no memory")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(ticket.used, store.stats()["updated"], store.read(ids).values.any())
store.update(ticket, gradients)
print((store.read(ids).values == -1).all())
store.check()
"""


def test_an_update_without_memory_applies_nothing_and_can_be_retried() -> None:
    assert run(NO_MEMORY).split() == ["no", "memory", "False", "0", "False", "True"]


NO_THREADS = """
import resource, sys
from satrap import Store, Table
from satrap.errors import InputError
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), resource.RLIM_INFINITY))
try:
    Store(Table("item", dim=2), num_threads=1024, shared=sys.argv[1])
except InputError as error:
    print(error)
"""


def test_a_limit_on_threads_raises(tmp_path: Path) -> None:
    words = run(NO_THREADS, tmp_path / "shared")
    assert "num_threads=1024: only " in words and "use fewer" in words
    assert not (tmp_path / "shared").exists()


# -- interrupts and kills ----------------------------------------------------------------------------------------------


def test_an_interrupt_right_after_the_rename_loses_no_snapshot(tmp_path: Path, monkeypatch: Any) -> None:
    store = Store(Table("item", dim=2), num_threads=1)
    store.lookup(as_ids(range(10)))
    store.save(tmp_path / "a")
    store.lookup(as_ids(range(20)))
    replace = os.replace

    def interrupted(*names: Any) -> None:
        replace(*names)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    for folder in (tmp_path / "a", tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            store.save(folder)
        assert len(Store.load(folder, num_threads=1)) == 20
    monkeypatch.undo()
    store.save(tmp_path / "a")
    assert len(list((tmp_path / "a").glob("part-*"))) == 1, "the next save removes what is left"


KILLED_LOAD = """
import os, signal, sys, satrap.table.snapshot.reader
from satrap import Store, Table
from satrap.table.table_group import TableGroup
def killed(*arguments): os.kill(os.getpid(), signal.SIGKILL)
satrap.table.snapshot.reader.Snapshot._import = killed
kind, folder, shared = sys.argv[1:]
if kind == "load":
    Store.load(folder, shared=shared, num_threads=1)
else:
    TableGroup([Table("item", dim=2)], shared=shared, num_threads=1).restore({"item": [folder]})
"""


@pytest.mark.parametrize("kind", ["load", "restore"])
def test_a_killed_load_leaves_no_partial_table_to_attach(kind: str, tmp_path: Path) -> None:
    store, folder, shared = Store(Table("item", dim=2), num_threads=1), tmp_path / "a", tmp_path / "shared"
    store.lookup(as_ids(range(10)))
    store.save(folder)
    done = subprocess.run([sys.executable, "-c", KILLED_LOAD, kind, folder, shared], timeout=DEADLINE_SECONDS)
    assert done.returncode == -signal.SIGKILL and shared.exists()
    for attach in (Store.attach, TableGroup.attach):
        with pytest.raises(SharedMemoryError, match="interrupted; remove it and load again"):
            attach(shared)
    shared.unlink()
    del store
    loaded = Store.load(folder, shared=shared, num_threads=1)
    del loaded
    assert len(Store.attach(shared)) == 10


# -- other threads -----------------------------------------------------------------------------------------------------


def test_reading_a_snapshot_that_is_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    """The snapshot that the manifest names is replaced before its files are opened; the new one is read."""
    store, folder = Store(Table("item", dim=2), num_threads=1), tmp_path / "a"
    store.lookup(as_ids(range(10)))
    store.save(folder)
    read, reads = read_manifest, 0

    def replaced(path: Path) -> Any:
        nonlocal reads
        reads += 1
        manifest = read(path)
        if reads in (1, 3):
            store.lookup(as_ids(range(10 + reads)))
            store.save(folder)
        return manifest

    monkeypatch.setattr(satrap.table.snapshot.reader, "read_manifest", replaced)
    assert len(Store.load(folder, num_threads=1)) == 13
    monkeypatch.setattr(satrap.table.snapshot.reader, "_MOST_READS", 3)
    reads = 0
    monkeypatch.setattr(satrap.table.snapshot.reader, "read_manifest", lambda path: (read(path), store.save(folder))[0])
    with pytest.raises(SnapshotError, match="was replaced 3 times"):
        Store.load(folder, num_threads=1)


def test_ids_that_another_thread_changes_never_break_the_table() -> None:
    store = Store(Table("item", dim=1, num_buckets=64), num_threads=1)
    one = np.arange(50_000, dtype=np.uint64)
    other, ids = one + np.uint64(10**6), one.copy()
    refused = 0

    def write() -> None:
        ids[:] = other
        ids[:] = one

    with meanwhile(write):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while refused < 5:
            assert time.monotonic() < deadline, "there was no race"
            try:
                store.lookup(ids, step=1)
            except InputError as error:
                assert "ids changed during the call" in str(error)
                refused += 1
    store.check()
    assert len(store) == store.read(np.concatenate([one, other])).present.sum()


def test_offsets_that_another_thread_changes_are_used_as_checked() -> None:
    tables = TableGroup(
        [Table("a", dim=4, num_buckets=1, initial=Constant(1.0)), Table("b", dim=4, initial=Constant(2.0))],
        num_threads=1,
    )
    n = 100_000
    ids, offsets, memory = np.arange(n, dtype=np.uint64), np.array([0, n, n]), np.empty(3 * n * 4, np.float32)
    out = memory[n * 4 : 2 * n * 4]

    def write() -> None:
        for middle in (0, n):
            offsets[1] = middle

    with meanwhile(write):
        for _ in range(60):
            memory[:] = 7.0
            tables.lookup(ids, offsets, out=out, train=False)
            assert (out == out[0]).all() and out[0] in (1.0, 2.0)
            assert (memory[: n * 4] == 7.0).all() and (memory[2 * n * 4 :] == 7.0).all()


def test_bag_offsets_that_another_thread_changes_are_used_as_checked() -> None:
    table = Table("a", dim=4, num_buckets=1, initial=Constant(1.0))
    store = Store(table, num_threads=1)
    bags = _core.Bags(store._engine, [("a", 0, "sum", False, 0, False, None, False)])
    n = 50_000
    ids, offsets = np.arange(n, dtype=np.uint64), np.arange(n + 1)
    block = np.empty((n, 4), np.float32)

    def write() -> None:
        offsets[1:n] = n
        offsets[1:n] = np.arange(1, n)

    with meanwhile(write):
        for _ in range(60):
            try:
                store._engine.lookup_bags(bags, ids, offsets, None, n, 0, 0, False, block, [])
            except SatrapError as error:
                assert "offsets fall" in str(error)
                continue
            assert block.sum() == 4 * n, "every id is in one bag"


# -- tickets -----------------------------------------------------------------------------------------------------------


def test_a_ticket_of_another_table_is_refused() -> None:
    tables = TableGroup(
        [Table(name, dim=4, optimizer=SGD(lr=1.0), initial=Zeros()) for name in "ab"],
        num_threads=1,
    )
    ids, gradients = as_ids([1, 2]), np.ones((2, 4), np.float32)
    _, of_b = tables["b"].lookup_for_update(ids)
    _, of_both = tables.lookup_for_update(ids, np.array([0, 1, 2]))
    for ticket, store in ((of_b, tables["a"]), (of_both, tables["a"]), (of_both, tables["b"])):
        with pytest.raises(TicketError, match="of another table, or of several"):
            store.update(ticket, gradients)
        assert not ticket.used
    assert not any(store.stats()["updated"] for store in tables.values())
    tables["b"].update(of_b, gradients)
    tables.update(of_both, gradients.reshape(-1))
    _, of_none = tables.lookup_for_update(as_ids([]), np.array([0, 0, 0]))
    tables["b"].update(of_none, gradients[:0])
    _, alone = tables.lookup_for_update(ids, np.array([0, 0, 2]))
    tables["b"].update(alone, gradients)
    np.testing.assert_array_equal(tables["b"].read(ids).values, [[-2.0] * 4, [-3.0] * 4])
