"""Snapshots that must be refused, by name and before a table is touched; and saves that fail, and lose nothing.

Damage is done to real files; forged ones have right checksums and say something else than what is right. Failing disks
are the system's own limits where it has one.
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
import pyarrow as pa
import pytest

from oracle import as_ids
from satrap.config.tables import SGD, Adagrad, MinCount, Table
from satrap.errors import SnapshotError
from satrap.table.store import Store
from snapshots import assert_same, contents, forge, forge_file, manifest, seal

TABLE = Table("item", dim=3, capacity=64, num_buckets=4, admission=MinCount(2))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Store, Store]:
    """A store, its replica at its first snapshot (tmp_path/full), and changes since then (tmp_path/changes)."""
    store = Store(TABLE, num_threads=2)
    for step in range(1, 8):
        store.lookup(as_ids(range(step, step + 12)), step=step)
    version = store.save(tmp_path / "full")
    replica = Store.load(tmp_path / "full", num_threads=1)
    for step in range(8, 30):
        store.lookup(as_ids(range(step, step + 12)), step=step)
    store.save_changes(tmp_path / "changes", since=version)
    return store, replica


@contextmanager
def refused(replica: Store, *words: str) -> Iterator[None]:
    """Checks that the call raises a SnapshotError with these words and leaves the replica unchanged."""
    before, version = contents(replica), replica.version
    with pytest.raises(SnapshotError) as raised:
        yield
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"
    assert_same(contents(replica), before)
    assert replica.version == version
    replica.check()


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
        assert_same(contents(saved[1]), contents(saved[0]))


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


def file_of(content: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(file for file in content["files"] if file["kind"] == kind)


FORGED: list[tuple[str, Callable[[dict[str, Any]], Any], list[str]]] = [
    *(
        (f"no {name}", lambda content, name=name: content.pop(name), [f"'{name}' is missing"])
        for name in (
            "kind", "id", "version", "config", "seed", "latest_step", "expire_before", "lr", "num_buckets",
            "rows", "removed", "sightings", "files",
        )
    ),
    ("kind", lambda content: content.update(kind="half"), ["'kind' is 'half'", "'full'"]),
    ("id", lambda content: content.update(id=7), ["'id' is 7", "string"]),
    ("another id", lambda content: content.update(id="0" * 16), ["0000000000000000"]),
    ("version", lambda content: content.update(version=-1), ["'version' is -1"]),
    ("version of float", lambda content: content.update(version=3.0), ["'version' is 3.0", "integer"]),
    ("version of bool", lambda content: content.update(version=True), ["'version' is True"]),
    ("seed", lambda content: content.update(seed=2**64), ["'seed' is 18446744073709551616"]),
    ("latest_step", lambda content: content.update(latest_step=2**32), ["'latest_step'"]),
    ("lr", lambda content: content.update(lr=-0.5), ["'lr' is -0.5"]),
    ("lr of str", lambda content: content.update(lr="1"), ["'lr' is '1'"]),
    ("since", lambda content: content.update(since=None), ["kind is 'changes' and since is None"]),
    ("since later", lambda content: content.update(since=9), ["since is 9"]),
    ("config", lambda content: content.update(config=[]), ["'config' is []"]),
    ("config key", lambda content: content["config"].update(dimm=3), ["'dimm'", "'dim'"]),
    ("config value", lambda content: content["config"].update(dim=0), ["dim is 0"]),
    ("num_buckets", lambda content: content.update(num_buckets=8), ["8"]),
    ("config buckets", lambda content: content["config"].update(num_buckets=8), ["num_buckets is 4", "gives 8"]),
    ("rows", lambda content: content.update(rows=content["rows"] + 1), ["rows is"]),
    ("removed", lambda content: content.update(removed=1000), ["removed is 1000"]),
    ("files", lambda content: content.update(files=[1]), ["'files' is [1]"]),
    ("no rows file", lambda content: content["files"].remove(file_of(content, "rows")), ["bucket 0 of 4"]),
    ("no sightings file", lambda content: content["files"].pop(-2), ["are 0 sightings"]),
    ("file kind", lambda content: file_of(content, "rows").update(kind="row"), ["files[0]", "'kind' is 'row'"]),
    ("file outside", lambda content: file_of(content, "rows").update(name="../../etc/passwd"), ["'../../etc/passwd'"]),
    ("bucket gap", lambda content: file_of(content, "rows").update(bucket_begin=1), ["but 0 is the next"]),
    ("file rows", lambda content: [file_of(content, "rows").update(rows=1), content.update(rows=1)], ["expected 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [each[1:] for each in FORGED], ids=[each[0] for each in FORGED])
def test_a_forged_manifest(change: Any, words: list[str], saved: Any, tmp_path: Path) -> None:
    forge(tmp_path / "changes", change)
    with refused(saved[1], str(tmp_path / "changes"), *words):
        saved[1].apply_changes(tmp_path / "changes")


def without_metadata(table: Any) -> Any:
    return table.replace_schema_metadata(None)


def with_column(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.column_names.index(name), table.schema.field(name), pa.array(values))


FORGED_FILES: list[tuple[str, str, Callable[[Any], Any], list[str]]] = [
    ("metadata", "rows", without_metadata, ["has the schema", "expected"]),
    ("column", "rows", lambda table: table.drop_columns(["step"]), ["has the schema"]),
    ("another kind", "removed", lambda table: table.rename_columns(["ids"]), ["has the schema"]),
    ("lines", "rows", lambda table: table.slice(1), ["lines; expected"]),
    ("lines of sightings", "sightings", lambda table: table.slice(1), ["lines; expected"]),
    ("nulls", "rows", lambda table: with_column(table, "step", pa.array([None] * len(table), pa.uint32())), ["nulls"]),
]


@pytest.mark.parametrize(
    ("kind", "change", "words"), [each[1:] for each in FORGED_FILES], ids=[f[0] for f in FORGED_FILES]
)
def test_a_forged_data_file(kind: str, change: Any, words: list[str], saved: Any, tmp_path: Path) -> None:
    name = forge_file(tmp_path / "changes", kind, change)
    with refused(saved[1], str(tmp_path / "changes" / name), *words):
        saved[1].apply_changes(tmp_path / "changes")


def test_ids_of_other_buckets(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.table.snapshot.writer._BATCH_BYTES", 1)  # two threads: two rows files
    saved[0].save(tmp_path / "two")
    files = [file for file in manifest(tmp_path / "two")["files"] if file["kind"] == "rows"]
    assert len(files) == 2

    def exchange(content: dict[str, Any]) -> None:
        for key in ("name", "bytes", "rows", "crc32c"):
            content["files"][0][key], content["files"][1][key] = content["files"][1][key], content["files"][0][key]

    forge(tmp_path / "two", exchange)
    with refused(saved[1], files[1]["name"], "holds ids of the buckets 2 to", "expected 0 to 1"):
        Store.load(tmp_path / "two", num_threads=1)


def test_one_id_twice(saved: Any, tmp_path: Path) -> None:
    def double(table: Any) -> Any:
        return pa.concat_tables([table.slice(0, 1), table.slice(0, 1), table.slice(2)])

    forge_file(tmp_path / "full", "rows", double)
    with refused(saved[1], str(tmp_path / "full"), "expected one row for each id"):
        Store.load(tmp_path / "full", shared=tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


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
    assert_same(contents(replica), contents(store))
    store.save(tmp_path / "again")
    newer = Store.load(tmp_path / "again", num_threads=1)
    with refused(newer, f"older than the table; apply the changes since version {second + 2}"):
        newer.apply_changes(tmp_path / "later")


def test_changes_of_another_table(saved: Any, tmp_path: Path) -> None:
    for other, seed, words in [
        (Table("other", dim=3, capacity=64, num_buckets=4, admission=MinCount(2)), 0, ["name is 'other' in the table"]),
        (Table("item", dim=3, optimizer=Adagrad(eps=1e-4), capacity=32, num_buckets=4, admission=MinCount(2)), 0,
         ["capacity is 32 in the table and 64", "optimizer.eps is 0.0001 in the table and 1e-10"]),
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
    assert_same(contents(Store.load(tmp_path / "full", num_threads=1)), contents(replica))


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
    assert_same(contents(Store.load(tmp_path / "full", num_threads=1)), contents(replica))
    with pytest.raises(SnapshotError, match="expected the version of a snapshot"):  # the failed saves made none
        store.save_changes(tmp_path / "new", since=store.version)
    store.save_changes(tmp_path / "new", since=since)  # and no change is forgotten
    for path in ("changes", "new"):
        replica.apply_changes(tmp_path / path)
    assert_same(contents(replica), contents(store))


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
                assert_same(contents(Store.load(tmp_path / "full", num_threads=1)), contents(replica))
    assert i == {"fsync": 4, "replace": 1}[call]  # rows, sightings, manifest, folder
    assert_same(contents(Store.load(tmp_path / "full", num_threads=1)), contents(store))


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
