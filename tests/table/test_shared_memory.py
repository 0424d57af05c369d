"""Rows in a shared-memory file outlive their process: closed cleanly, or killed at any moment.

Child processes (shared_memory_child.py) are killed with SIGKILL in the midst of updates and insertions, many times at
random moments. What is left is attached by another process and must hold: every invariant, every update that was
acknowledged, each bucket's update whole or not at all, and bit for bit the values of a run that was never
interrupted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from child_processes import child_process
from oracle import as_ids
from satrap import _core
from satrap.config.optimizers import SGD, Adagrad, Adam
from satrap.config.tables import Constant, MinCount, Table
from satrap.errors import SharedMemoryError
from satrap.server.server import Server
from satrap.table.store import Store
from shared_memory_child import CHURN, EQUAL, EQUAL_IDS, GROW, GROW_IDS
from snapshots import assert_same, exported, update_at_random
from waiting import DEADLINE_SECONDS

CHILD = Path(__file__).parents[1] / "support/shared_memory_child.py"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file on tmpfs where there is one, so that a test writes no disk full."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path / "table"
        return
    path = shm / f"satrap-test-{os.getpid()}-{tmp_path.name}"
    yield path
    path.unlink(missing_ok=True)


@contextmanager
def child(job: str, path: Path, *arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(CHILD), job, str(path), *map(str, arguments)]
    with child_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"ready")
        yield process


def kill_amid(
    process: subprocess.Popen[bytes], rng: np.random.Generator, num_lines: int, most_seconds: float = 3e-3
) -> list[bytes]:
    """Reads some acknowledgements, lets a random time pass, kills; returns all lines that were sent.

    The sleep waits for nothing: it is the random moment. Spinning instead would keep the child off its core."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(num_lines)]
    time.sleep(rng.uniform(0, most_seconds))
    os.kill(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_SECONDS)
    lines += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    return [line for line in lines if line.endswith(b"\n")]


# -- clean -------------------------------------------------------------------------------------------------------------


def test_attach_after_a_clean_close(path: Path, tmp_path: Path) -> None:
    """Configuration and seed come from the file; rows, stamps, sightings, lr and steps continue, as without a file."""
    table = Table("item", dim=5, optimizer=Adam(), capacity=400, num_buckets=4, admission=MinCount(2), dtype="float16",
                  expire_after=30)  # fmt: skip
    store = Store(table, seed=7, shared=path, num_threads=2)
    update_at_random(store, np.random.default_rng(1), steps=40, universe=900, batch=100)
    store.set_lr(0.125)
    before = exported(store)
    assert len(before["sightings"]["id"]) > 0
    store.save(tmp_path / "same")
    del store
    again = Store.attach(path, num_threads=1)
    assert_same(exported(again), before)
    uninterrupted = Store.load(tmp_path / "same", num_threads=3)
    for each in (again, uninterrupted):
        update_at_random(each, np.random.default_rng(2), steps=20, universe=900, batch=100)
        each.check()
    assert_same(exported(again), exported(uninterrupted))


def test_attached_again_and_again(path: Path, rng: np.random.Generator) -> None:
    """Free rows, growth and undo space survive many generations."""
    table = Table("item", dim=3, optimizer=Adagrad(), capacity=3000, num_buckets=2)
    Store(table, shared=path, num_threads=1)
    sizes = []
    for generation in range(12):
        store = Store.attach(path, num_threads=1 + generation % 3)
        for _ in range(4):
            ids = rng.integers(2**64, size=1200, dtype=np.uint64)
            store.lookup(ids)
            store.update(ids, np.ones((1200, 3), np.float32))
        store.check()
        assert store.latest_step == 4 * (generation + 1)
        del store
        sizes.append(path.stat().st_size)
    assert sizes[-1] == sizes[4], f"the file grows with every attach: {sizes}"


# -- killed ------------------------------------------------------------------------------------------------------------


def trajectory(num_updates: int) -> tuple[Any, Any]:
    """Returns the values of a row of the table of equal rows after 0, 1, 2, ... updates, without interruption."""
    store = Store(EQUAL, num_threads=1)
    one = EQUAL_IDS[:1]
    store.lookup(one)
    values, states = [], []
    for _ in range(num_updates + 1):
        read = store.read(one)
        values.append(read.values[0].copy())
        states.append(read.state[0].copy())
        store.update(one, np.full((1, EQUAL.dim), 0.25, np.float32))
    return np.array(values), np.array(states)


def assert_equal_rows(path: Path, acknowledged: int) -> tuple[int, int]:
    """Attaches and checks the table of equal rows; returns the least and the most updates that its rows have had."""
    store = Store.attach(path, num_threads=1)
    store.check()
    assert len(store) == len(EQUAL_IDS)
    read = store.read(EQUAL_IDS)
    counts = read.state[:, -1].astype(np.int64)  # Adam's own count
    assert counts.min() >= acknowledged, "an acknowledged update was lost"
    buckets = _core.bucket_of(EQUAL_IDS, EQUAL.resolved_num_buckets)
    for bucket in range(EQUAL.resolved_num_buckets):
        mine = np.unique(counts[buckets == bucket])
        assert len(mine) == 1, f"bucket {bucket} was updated in part: {mine}"
    values, states = trajectory(int(counts.max()))
    np.testing.assert_array_equal(read.values, values[counts], "values differ from an uninterrupted run")
    np.testing.assert_array_equal(read.state, states[counts], "state differs from an uninterrupted run")
    return int(counts.min()), int(counts.max())


def test_kill_9_amid_updates(path: Path, rng: np.random.Generator) -> None:
    torn = updates = kills = 0
    while kills < 10 or (torn == 0 and kills < 60):
        # Longer and longer: on a busy machine the child stands for a while behind the line that it wrote.
        with child("count", path) as process:
            lines = kill_amid(process, rng, int(rng.integers(1, 6)), 3e-3 * (1 + kills))
        updates, kills = updates + len(lines), kills + 1
        least, most = assert_equal_rows(path, updates)
        assert most <= updates + kills, "more updates than were started"
        torn += least != most
    print(f"{torn} of {kills} kills left buckets of two ages")
    assert torn > 0, "no kill came amid an update: the test shows nothing"


def test_kill_9_amid_insertion_and_eviction(path: Path, rng: np.random.Generator) -> None:
    everyone = np.arange(5000, dtype=np.uint64)
    shares = [CHURN.capacity // 4] * 4 if CHURN.capacity else []
    latest = 0
    for _ in range(8):
        with child("churn", path, int(rng.integers(2**32))) as process:
            lines = kill_amid(process, rng, int(rng.integers(1, 40)))
        store = Store.attach(path, num_threads=1)
        store.check()
        assert store.latest_step >= int(lines[-1].split()[2]) > latest, "an acknowledged step was lost"
        latest = store.latest_step
        read = store.read(everyone)
        assert len(store) == read.present.sum()
        held = np.bincount(_core.bucket_of(everyone[read.present], 4), minlength=4)
        assert np.all(held <= shares)
        assert np.all(read.values == read.values[:, :1]), "a row is half-written"
        assert np.all((read.values >= 0) & (read.values <= latest) & (read.values == np.rint(read.values)))
        del store


def test_kill_9_amid_growth(path: Path, rng: np.random.Generator) -> None:
    """Rows are inserted whole: all acknowledged ones exist, and every row holds its initial values."""
    acknowledged: list[int] = []
    for _ in range(8):
        with child("grow", path) as process:
            acknowledged += [int(line.split()[1]) for line in kill_amid(process, rng, int(rng.integers(1, 20)))]
        store = Store.attach(path, num_threads=1)
        store.check()
        ids = np.arange(acknowledged[-1] + 3 * GROW_IDS, dtype=np.uint64)
        read = store.read(ids)
        for begin in acknowledged:
            assert read.present[begin : begin + GROW_IDS].all(), "a row of an acknowledged lookup is gone"
        assert len(store) == read.present.sum()
        initial = Store(GROW, num_threads=1).lookup(ids, train=False)
        np.testing.assert_array_equal(read.values[read.present], initial[read.present])
        assert not read.state[read.present].any()
        del store


def test_the_last_acknowledged_batch_is_there(path: Path, rng: np.random.Generator) -> None:
    """Looked-up rows of the last acknowledged call are the youngest: none may be missing after the kill."""
    seed = int(rng.integers(2**32))
    with child("churn", path, seed) as process:
        lines = kill_amid(process, rng, 5)
    done = int(lines[-1].split()[1])
    replay = np.random.default_rng(seed)
    for _ in range(done + 1):
        ids = np.unique(replay.integers(5000, size=150)).astype(np.uint64)
    assert Store.attach(path).read(ids).present.all()


# -- refused -----------------------------------------------------------------------------------------------------------


def refused_by_name(path: Path, words: str) -> None:
    """Checks that neither a store nor a server opens the file."""
    for attach in (lambda: Store.attach(path), lambda: Server(shared=path)):
        with pytest.raises(SharedMemoryError, match=words) as raised:
            attach()
        assert str(path) in str(raised.value)


def test_attach_while_another_process_holds_it(path: Path) -> None:
    store = Store(CHURN, shared=path)
    store.lookup(as_ids([1, 2, 3]))
    del store
    with child("hold", path) as process:
        with pytest.raises(SharedMemoryError, match="already open, in this process or another") as raised:
            Store.attach(path)
        assert str(path) in str(raised.value)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(DEADLINE_SECONDS)
        assert process.returncode == 0
    assert len(Store.attach(path)) == 3


def test_attach_while_this_process_holds_it(path: Path) -> None:
    store = Store(CHURN, shared=path)
    with pytest.raises(SharedMemoryError, match="already open, in this process or another"):
        Store.attach(path)
    store.lookup(as_ids([1]))
    store.check()


def test_create_twice_is_refused_and_harms_nothing(path: Path) -> None:
    store = Store(CHURN, shared=path)
    store.lookup(as_ids([1, 2]))
    with pytest.raises(SharedMemoryError, match="exists") as raised:
        Store(CHURN, shared=path)
    assert str(path) in str(raised.value)
    del store
    with pytest.raises(SharedMemoryError, match="exists"):
        Store(EQUAL, shared=path)
    assert len(Store.attach(path)) == 2


@pytest.mark.parametrize("content", [b"", b"hello", bytes(100), bytes(1 << 16), b"\x7fELF" + bytes(1 << 20)])
def test_a_foreign_file_is_refused_by_name(path: Path, content: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(SharedMemoryError, match=r"is empty|is no") as raised:
        Store.attach(path)
    assert str(path) in str(raised.value)
    assert path.read_bytes() == content, "a foreign file was written to"


def test_a_truncated_file_is_refused_by_name(path: Path) -> None:
    store = Store(EQUAL, shared=path)
    for at in range(0, 400_000, 50_000):
        store.lookup(np.arange(at, at + 50_000, dtype=np.uint64))
    del store
    whole = path.read_bytes()
    used = len(whole.rstrip(b"\0"))
    for size in (used - 1, used // 2, 1 << 20, 4096, 4095, 100):
        path.write_bytes(whole[:size])
        refused_by_name(path, r"is truncated|is not a whole|magic number")
    path.write_bytes(b"")
    refused_by_name(path, "is empty: it was truncated, or its creator was killed")
    assert path.exists()
    path.write_bytes(whole)
    assert len(Store.attach(path)) == 400_000


def mode(path: Path) -> str:
    path.chmod(0o640)
    return r"may be used by others \(mode 640\), who may have changed it; expected mode 600"


def link(path: Path) -> str:
    path.rename(f"{path}-copy")
    path.symlink_to(f"{path}-copy")
    return "is a symbolic link; expected the file itself"


def pipe(path: Path) -> str:
    path.unlink()
    os.mkfifo(path, 0o600)
    return "is not a regular file"


def owner(path: Path) -> str:
    os.chown(path, 65534, -1)
    return "belongs to user 65534, and this is user 0; give another path"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.mark.parametrize("change", [mode, link, pipe, pytest.param(owner, marks=needs_root)])
def test_a_file_that_others_may_have_made_is_refused(path: Path, change: Callable[[Path], str]) -> None:
    Store(CHURN, shared=path)
    words = change(path)
    try:
        refused_by_name(path, words)
        assert os.path.lexists(path)
    finally:
        Path(f"{path}-copy").unlink(missing_ok=True)


def test_damaged_headers_are_refused_or_harmless(path: Path, rng: np.random.Generator) -> None:
    """Any 8 bytes of the file's beginning replaced: attach refuses by name or opens; it never crashes or hangs."""
    store = Store(CHURN, shared=path)
    store.lookup(as_ids(range(300)))
    del store
    whole = path.read_bytes()
    for at in [*range(0, 128, 8), *rng.integers(16, 600, size=20) * 8]:
        damaged = bytearray(whole)
        damaged[at : at + 8] = rng.bytes(8)
        path.write_bytes(damaged)
        try:
            Store.attach(path, num_threads=1)
        except SharedMemoryError as error:
            assert str(path) in str(error)


def test_paths_that_cannot_be_made(path: Path, tmp_path: Path) -> None:
    for bad in (tmp_path / "no" / "folder", tmp_path):
        with pytest.raises(SharedMemoryError, match=str(bad)):
            Store(CHURN, shared=bad)
        with pytest.raises(SharedMemoryError, match=str(bad)):
            Store.attach(bad)


def test_a_file_is_only_as_large_as_needed(path: Path) -> None:
    Store(Table("tiny", dim=4, optimizer=SGD(), initial=Constant(0.0)), shared=path)
    assert path.stat().st_size <= 64 << 20
