"""Folders on a disk and under URLs behave alike; what is saved into one is loaded from another; how much is read."""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostile_store import hostile
from satrap.config.tables import Table
from satrap.errors import SnapshotError
from satrap.storage.folder import Folder
from satrap.storage.object_folder import ObjectFolder
from satrap.storage.open_folder import open_folder
from satrap.table.snapshot import held_bytes, verified_file
from satrap.table.snapshot import writer as snapshot_writer
from satrap.table.snapshot.parts_record import PARTS
from satrap.table.store import Store

KEYS = st.sampled_from(["a", "b.json", "d/a", "d/e[1]", "d/f/g*?"])
CALLS = st.lists(st.tuples(st.sampled_from(["write", "create", "abort", "delete", "delete_all"]), KEYS, st.binary()))


@pytest.fixture(params=["disk", "memory", "hostile"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "hostile":
        with hostile():
            yield "hostile://bucket"
    else:
        yield str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}"


@given(calls=CALLS)
def check_calls(place: str, calls: list[tuple[str, str, bytes]]) -> None:
    folder, model = open_folder(f"{place}/{secrets.token_hex(4)}"), dict[str, bytes]()
    for call, key, data in calls:
        if folder.is_local:
            (Path(folder) / key).parent.mkdir(parents=True, exist_ok=True)
        match call:
            case "write":
                folder.write(key, data)
                model[key] = data
            case "create" | "abort" if key not in model:
                writer = folder.create(key)
                for start in range(0, len(data), 3):
                    writer.write(memoryview(data)[start : start + 3])
                if call == "create":
                    writer.complete()
                    model[key] = data
                else:
                    writer.abort()
                    folder.delete(key)
            case "delete":
                folder.delete(key)
                model.pop(key, None)
            case "delete_all":
                folder.delete_all()
                model.clear()
    assert {key: folder.read(key) for key in folder.sizes()} == model
    assert set(folder.names()) >= {key.partition("/")[0] for key in model}
    for key, data in model.items():
        opened = folder.open(key)
        assert opened.size == len(data)
        if data:
            opened.load(1, len(data))
            assert opened.memory[1 : len(data)] == data[1:]
    with pytest.raises(FileNotFoundError) as caught:
        folder.read("missing")
    assert caught.value.filename == f"{folder}/missing"


def test_any_calls_have_the_effect_of_those_on_a_dictionary(place: str) -> None:
    check_calls(place)


def trained(rows: int = 3000) -> Store:
    store = Store(Table("t", dim=4, num_buckets=16), num_threads=2)
    store.update(store_ids := np.arange(rows, dtype=np.uint64), looked_up(store, store_ids))
    return store


def looked_up(store: Store, ids: Any) -> Any:
    return store.lookup(ids) + 1


def rows_of(store: Store) -> Any:
    return store.read(np.arange(3000, dtype=np.uint64)).values.tobytes()


def copy(source: Folder, target: Folder) -> None:
    for key in source.sizes():
        if target.is_local:
            (Path(target) / key).parent.mkdir(parents=True, exist_ok=True)
        target.write(key, source.read(key))


@pytest.mark.parametrize(("saved_at", "copied_to"), [("{}", "memory://{}"), ("memory://{}", "{}")])
def test_a_copy_elsewhere_is_loaded(saved_at: str, copied_to: str, tmp_path: Path) -> None:
    store, (one, other) = trained(), (open_folder(f"{each.format(tmp_path)}/x") for each in (saved_at, copied_to))
    version = store.save(one)
    copy(one, other)
    loaded = Store.load(other)
    assert rows_of(loaded) == rows_of(store)
    if other.is_local:  # under a URL another save has another manifest
        with pytest.raises(SnapshotError, match="holds a copy of what was saved under a URL; give another folder"):
            store.save(other)
    store.update(np.arange(9, dtype=np.uint64), looked_up(store, np.arange(9, dtype=np.uint64)))
    store.save_changes(one / "changes", since=version)
    loaded.apply_changes(one / "changes")
    assert rows_of(loaded) == rows_of(store)


def test_a_save_replaces_another_one_under_a_url(tmp_path: Path) -> None:
    store, folder = trained(), open_folder(f"memory://{tmp_path.name}/x")
    store.save(folder)
    before = set(folder.sizes())
    store.update(np.arange(9, dtype=np.uint64), looked_up(store, np.arange(9, dtype=np.uint64)))
    store.save(folder)
    assert rows_of(Store.load(folder)) == rows_of(store)
    assert before & set(folder.sizes()) == {PARTS}, "the files of the first are removed"
    with pytest.raises(SnapshotError, match="holds the table 't', not 'u'; give another folder"):
        Store(Table("u", dim=4)).save(folder)


def test_how_often_the_bytes_under_a_url_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once if a table without rows is filled, or while the bytes may be kept; beyond that twice. The rows are equal."""
    read: Counter[str] = Counter()
    get = ObjectFolder.get_range

    def counted(folder: ObjectFolder, key: str, begin: int, end: int) -> Any:
        read[key] += end - begin
        return get(folder, key, begin, end)

    monkeypatch.setattr(ObjectFolder, "get_range", counted)
    monkeypatch.setattr(snapshot_writer, "TARGET_BYTES", 1)
    monkeypatch.setattr(verified_file, "_PIECE_BYTES", 9000)
    store = trained()
    folder, changes = (open_folder(f"memory://{tmp_path.name}/{each}") for each in "xy")
    version = store.save(folder)
    store.update(np.arange(2500, dtype=np.uint64), looked_up(store, np.arange(2500, dtype=np.uint64)))
    store.save_changes(changes, since=version)
    sizes = Counter({key: size for each in (folder, changes) for key, size in each.sizes().items()})
    for limit, times in ((1 << 20, 1.0), (0, 2.0), (30_000, 1.5)):
        monkeypatch.setattr(held_bytes, "HELD_BYTES", limit)
        read.clear()
        loaded = Store.load(folder)
        assert all(read[key] == sizes[key] for key in read) and sum(read.values()) > 70_000
        read.clear()
        loaded.apply_changes(changes)
        assert rows_of(loaded) == rows_of(store)
        ratio = sum(read.values()) / sum(sizes[key] for key in read)
        assert abs(ratio - times) < (0.35 if times == 1.5 else 0.1), ratio


def test_memory_is_released(tmp_path: Path) -> None:
    folder = open_folder(f"memory://{tmp_path.name}/x")
    folder.write("a", b"\1" * 100_000)
    opened = folder.open("a")
    opened.load(0, 100_000)
    opened.release(5000, 99_000)
    assert set(opened.memory[8192:98304]) == {0} and set(opened.memory[:8192]) == {1}
