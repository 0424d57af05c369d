"""Snapshots that must be refused, by name and before a table is touched; and saves that fail, and lose nothing.

Damage is done to real files; test_forged.py has those whose checksums are right. Failing disks are the system's own
limits where it has one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
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

from oracle import as_ids
from satrap.config.optimizers import SGD, Adagrad
from satrap.config.tables import MinCount, Table
from satrap.errors import SnapshotError
from satrap.table.store import Store
from snapshots import TABLE, assert_same, exported, manifest, refused, save_with_changes, seal


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Store, Store]:
    return save_with_changes(tmp_path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


# -- torn, truncated, damaged ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rows", "sightings", "removed"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "gone", "folder"])
def test_a_damaged_data_file(kind: str, damage: str, saved: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    name = next(file["name"] for file in manifest(tmp_path / "changes")["files"] if file["kind"] == kind)
    path = tmp_path / "changes" / name
    good = path.read_bytes()
    for at in rng.integers(len(good), size=10 if damage in ("flip", "cut") else 1).tolist():
        match damage:
            case "flip":
                flip(path, at)
            case "cut":
                path.write_bytes(good[:at])
            case "grow":
                path.write_bytes(good + b"\0")
            case "empty":
                path.write_bytes(b"")
            case _:
                path.unlink()
        if damage == "folder":
            path.mkdir()
        with refused(saved[1], str(path)):
            saved[1].apply_changes(tmp_path / "changes")
        if damage != "folder":
            path.write_bytes(good)
    if damage != "folder":
        saved[1].apply_changes(tmp_path / "changes")
        assert_same(exported(saved[1]), exported(saved[0]))


def test_a_damaged_manifest(saved: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    """Any wrong bit is refused, unless JSON ignores it."""
    path = tmp_path / "changes" / "manifest.json"
    good = path.read_bytes()
    for at in rng.integers(len(good), size=150).tolist():
        flip(path, at)
        try:
            same = json.loads(path.read_bytes()) == json.loads(good)
        except ValueError:
            same = False
        if not same:
            with refused(saved[1], str(path)):
                saved[1].apply_changes(tmp_path / "changes")
        path.write_bytes(good)
    for end in range(0, len(good) - 2, 37):
        path.write_bytes(good[:end])
        with refused(saved[1], str(path)):
            saved[1].apply_changes(tmp_path / "changes")


def test_files_of_another_save(saved: Any, tmp_path: Path) -> None:
    """Two data files of one size, exchanged; and the manifest of one save over the files of another."""
    store, replica = saved
    store.save_changes(tmp_path / "again", since=replica.version)
    shutil.copy(tmp_path / "again" / "manifest.json", tmp_path / "changes" / "manifest.json")
    with refused(replica, "missing"):
        replica.apply_changes(tmp_path / "changes")


# -- foreign -----------------------------------------------------------------------------------------------------------


def test_what_is_no_snapshot(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, words in {"nowhere": "does not exist", "file": "is a file", "empty": "has no manifest.json"}.items():
        for call in (Store.load, saved[1].apply_changes):
            with refused(saved[1], str(tmp_path / name), words):
                call(tmp_path / name)
    contents_and_words = {
        b"": "is no JSON",
        b"\xff\xfe\x00": "is no JSON",
        b"[" * 100_000: "is no JSON",
        b'{"a":' * 100_000: "is no JSON",
        b"[1, 2]": "no manifest of a Satrap table",
        b"null": "no manifest of a Satrap table",
        b'{"format": "parquet"}': "'parquet'",
        b'{"format": "satrap-table"}': "format_version None",
        b'{"format": "satrap-table", "format_version": 2}': "format_version 2; this Satrap reads 1",
        b'{"format": "satrap-table", "format_version": 1}': "crc32c",
        b'{"format": "satrap-table", "format_version": 1, "lr": NaN, "crc32c": 1}': "damaged",
        seal({"format": "satrap-table", "format_version": 1}): "'kind' is missing",
    }
    for text, words in contents_and_words.items():
        (tmp_path / "empty" / "manifest.json").write_bytes(text)
        with refused(saved[1], "manifest.json", words):
            Store.load(tmp_path / "empty")


def test_one_kind_in_place_of_the_other(saved: Any, tmp_path: Path) -> None:
    with refused(saved[1], "the changes since version", "load the full snapshot"):
        Store.load(tmp_path / "changes")
    with refused(saved[1], "full snapshot", "Store.load"):
        saved[1].apply_changes(tmp_path / "full")


# -- changes that do not fit -------------------------------------------------------------------------------------------


def test_changes_out_of_order(saved: Any, tmp_path: Path) -> None:
    store, replica = saved
    first, second = replica.version, store.version
    store.lookup(as_ids([1, 2, 3]))
    store.save_changes(tmp_path / "later", since=second)
    with refused(
        replica, f"at version {first}, but", f"{second} to {second + 1}; apply the changes since version {first}"
    ):
        replica.apply_changes(tmp_path / "later")
    fresh = Store(TABLE, num_threads=1)
    with refused(fresh, "at version 1", "of no snapshot yet; load the full one first"):
        fresh.apply_changes(tmp_path / "changes")
    replica.apply_changes(tmp_path / "changes")
    with refused(replica, f"at version {second}", f"{first} to {second}: these changes are already applied"):
        replica.apply_changes(tmp_path / "changes")
    replica.apply_changes(tmp_path / "later")
    with refused(replica, "these changes are already applied"):
        replica.apply_changes(tmp_path / "changes")
    assert_same(exported(replica), exported(store))
    store.save(tmp_path / "again")
    newer = Store.load(tmp_path / "again", num_threads=1)
    with refused(newer, f"older than the table; apply the changes since version {second + 2}"):
        newer.apply_changes(tmp_path / "later")


def test_changes_of_another_table(saved: Any, tmp_path: Path) -> None:
    for other, seed, words in [
        (Table("other", dim=3, capacity=64, num_buckets=4, admission=MinCount(2)), 0, ["name is 'other' in the table"]),
        (Table("item", dim=3, optimizer=Adagrad(eps=1e-4), capacity=32, num_buckets=4, admission=MinCount(2)), 0,
         ["capacity is 32 in the table and 64", "optimizer.eps is 0.0001 in the table and 1e-10"]),
        (Table("item", dim=3, optimizer=Adagrad(lr=0.5), capacity=64, num_buckets=4, admission=MinCount(2)), 0,
         ["optimizer.lr is 0.5 in the table and", "to continue with another rate, set it in optimizer.param_groups"]),
        (Table("item", dim=3, optimizer=SGD()), 0, ["optimizer.type is 'SGD' in the table and 'Adagrad'"]),
        (TABLE, 5, ["seed is 5 in the table and 0"]),
    ]:  # fmt: skip
        store = Store(other, seed=seed, num_threads=1)
        store.save(tmp_path / "a")
        with refused(store, "is of another table", *words):
            store.apply_changes(tmp_path / "changes")
        shutil.rmtree(tmp_path / "a")


def test_changes_of_another_run(saved: Any, tmp_path: Path) -> None:
    """The same table at the same version, but with another history."""
    store = Store(TABLE, num_threads=1)
    store.save(tmp_path / "a")
    assert store.version == saved[1].version
    with refused(store, "different runs", manifest(tmp_path / "a")["id"], manifest(tmp_path / "full")["id"]):
        store.apply_changes(tmp_path / "changes")


def test_changes_to_a_table_that_went_on(saved: Any, tmp_path: Path) -> None:
    saved[1].lookup(as_ids([15]), train=False)
    saved[1].lookup(as_ids([15]))
    with refused(saved[1], "was changed after version"):
        saved[1].apply_changes(tmp_path / "changes")


@pytest.mark.parametrize("since", [0, 1, 3, -1, 2.0, True, None, "2", 2**40])
def test_since_what(since: Any, tmp_path: Path) -> None:
    store = Store(TABLE, num_threads=1)
    with pytest.raises(SnapshotError, match=re.escape("(none yet)")):
        store.save_changes(tmp_path / "a", since=2)
    store.save(tmp_path / "full")
    with refused(store, "table 'item'", f"since is {since!r}", "(2)"):
        store.save_changes(tmp_path / "a", since=since)
    assert not (tmp_path / "a").exists()


# -- folders that are taken --------------------------------------------------------------------------------------------


def test_one_folder_holds_one_snapshot(saved: Any, tmp_path: Path) -> None:
    store, replica = saved
    version = store.version
    other = Store(Table("user", dim=3), num_threads=1)
    alike = Store(Table("item", dim=5, optimizer=SGD()), num_threads=1)
    seeded = Store(TABLE, seed=7, num_threads=1)
    words_of_chain = [f"since version {replica.version} of", f"not since version {version}", "another folder"]
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text('{"format": "other"}')
    calls: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: other.save(tmp_path / "full"), ["'item'", "not 'user'"]),
        (
            lambda: alike.save(tmp_path / "full"),
            ["dim is 5 in the table and 3 in the snapshot", "'SGD'", "not replaced"],
        ),
        (lambda: seeded.save(tmp_path / "full"), ["seed is 7 in the table and 0 in the snapshot; it is not replaced"]),
        (lambda: store.save_changes(tmp_path / "changes", since=version), words_of_chain),
        (lambda: store.save_changes(tmp_path / "full", since=version), ["a full snapshot", "give another"]),
        (lambda: store.save(tmp_path / "changes"), ["the changes of a save_changes", "give another"]),
        (lambda: store.save(tmp_path / "foreign"), ["manifest.json", "not overwritten"]),
    ]
    for call, words in calls:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with refused(store, *words):
            call()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert_same(exported(Store.load(tmp_path / "full", num_threads=1)), exported(replica))


def test_a_folder_that_another_save_writes_into(saved: Any, tmp_path: Path) -> None:
    opened = os.open(tmp_path / "full", os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        with refused(saved[0], str(tmp_path / "full"), "another save"):
            saved[0].save(tmp_path / "full")
    finally:
        os.close(opened)
    saved[0].save(tmp_path / "full")


# -- saves that fail ---------------------------------------------------------------------------------------------------


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Makes the system refuse files larger than this, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 700, 1500])
def test_a_full_disk(size: int, saved: Any, tmp_path: Path) -> None:
    store, replica = saved
    since = store.version
    store.lookup(as_ids(range(30, 42)), step=100)
    before = sorted(path.name for path in (tmp_path / "full").iterdir())
    calls: dict[str, Callable[[], Any]] = {
        "full": lambda: store.save(tmp_path / "full"),
        "new": lambda: store.save_changes(tmp_path / "new", since=since),
    }
    for path, call in calls.items():
        with (
            pytest.raises(SnapshotError, match=rf"table 'item': .*{path}/\S+: File too large") as raised,
            files_up_to(size),
        ):
            call()
        assert isinstance(raised.value.__cause__, OSError)
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == before
    assert not (tmp_path / "new").exists()
    assert_same(exported(Store.load(tmp_path / "full", num_threads=1)), exported(replica))
    with pytest.raises(SnapshotError, match="expected the version of a snapshot"):  # the failed saves made none
        store.save_changes(tmp_path / "new", since=store.version)
    store.save_changes(tmp_path / "new", since=since)  # and no change is forgotten
    for path in ("changes", "new"):
        replica.apply_changes(tmp_path / path)
    assert_same(exported(replica), exported(store))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails(call: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save may fail at any system call; a retry works."""
    store, replica = saved
    real, left = getattr(os, call), 0

    def failing(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, "Input/output error", str(arguments[0]))
        return real(*arguments)

    monkeypatch.setattr(os, call, failing)
    for i in range(10):
        left = i
        try:
            store.save(tmp_path / "full")
            break
        except SnapshotError as error:
            assert "Input/output error" in str(error)
            if Store.load(tmp_path / "full", num_threads=1).version == replica.version:
                assert_same(exported(Store.load(tmp_path / "full", num_threads=1)), exported(replica))
    assert i == {"fsync": 4, "replace": 1}[call]  # rows, sightings, manifest, folder
    assert_same(exported(Store.load(tmp_path / "full", num_threads=1)), exported(store))


def test_paths_that_cannot_be_folders(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(saved[0], f"{tmp_path / 'file'} is a file; expected a folder"):
            saved[0].save(path)
    assert (tmp_path / "file").read_text() == "x"


KILLED = """
import sys, numpy as np
from satrap import Store, Table
store = Store(Table("item", dim=64), num_threads=2)
ids = np.arange(20_000, dtype=np.uint64)
for step in range(1, 1000):
    store.lookup(ids, step=step)
    store.save(sys.argv[1])
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_save_that_is_killed(after: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """kill -9 at any moment of a save leaves the last complete snapshot; the next save sweeps up."""
    path = tmp_path / "a"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        steps = [int(process.stdout.readline()) for _ in range(after)]
        names = {each.name for each in path.iterdir()}
        deadline = time.monotonic() + 60
        for _ in range(int(rng.integers(3))):  # until the folder has changed so many times: in the middle of a save
            while (now := {each.name for each in path.iterdir()}) == names:
                assert time.monotonic() < deadline
            names = now
        process.kill()
        steps += [int(line) for line in process.stdout.read().split()]
    loaded = Store.load(path, num_threads=1)
    assert loaded.latest_step in (steps[-1], steps[-1] + 1)
    assert len(loaded) == 20_000
    loaded.save(path)
    assert {each.name for each in path.iterdir()} == {
        "manifest.json",
        *(file["name"] for file in manifest(path)["files"]),
    }
