"""Helpers of the tests of snapshots: a table's content as plain arrays, and an independent reader of docs/format.md.

The reader here knows the specification and pyarrow, and nothing of `satrap`'s own code, so that a test of the files
does not believe what it tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oracle import as_ids
from satrap.config.tables import MinCount, Table
from satrap.errors import SnapshotError
from satrap.table.store import Store

Columns = dict[str, NDArray[Any]]
TABLE = Table("item", dim=3, capacity=64, num_buckets=4, admission=MinCount(2), expire_after=15)


def update_at_random(
    store: Store, rng: np.random.Generator, steps: int = 5, universe: int = 400, batch: int = 30
) -> None:
    """Looks up and updates random ids."""
    for _ in range(steps):
        ids = rng.integers(universe, size=batch).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        store.lookup(ids)
        store.update(ids, rng.normal(size=(batch, store.table.dim)).astype(np.float32))


def save_with_changes(folder: Path) -> tuple[Store, Store]:
    """Returns a store, and its replica at its first snapshot (`folder`/full); saves the changes since (.../changes)."""
    store = Store(TABLE, num_threads=2)
    for step in range(1, 8):
        store.lookup(as_ids(range(step, step + 12)), step=step)
    version = store.save(folder / "full")
    replica = Store.load(folder / "full", num_threads=1)
    for step in range(8, 30):
        store.lookup(as_ids(range(step, step + 12)), step=step)
    store.save_changes(folder / "changes", since=version)
    return store, replica


def exported(store: Store) -> dict[str, Any]:
    """Returns rows with their stamps and exact bits, sightings, and the numbers of a snapshot; no counters."""
    engine = store._engine
    buckets = engine.num_buckets(0)
    return {
        "rows": by_id(store._slot.rows.export_rows(0, 0, buckets, 0)),
        "sightings": by_id(engine.export_sightings(0, 0, buckets)),
        "lr": store.lr,
        "latest_step": store.latest_step,
        "seed": store.seed,
        "table": store.table,
    }


def by_id(columns: Columns) -> Columns:
    """Returns copies of the columns in order of id."""
    order = np.argsort(columns["id"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Checks that two contents are equal bit for bit."""
    assert found.keys() == wanted.keys()
    for name in found:
        if isinstance(found[name], dict):
            for column in found[name]:
                a, b = found[name][column], wanted[name][column]
                assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), f"{name}.{column}: {a} is not {b}"
        else:
            assert found[name] == wanted[name], name


@contextmanager
def refused(replica: Store, *words: str) -> Iterator[None]:
    """Checks that the call raises a SnapshotError with these words and leaves the replica unchanged."""
    before, version = exported(replica), replica.version
    with pytest.raises(SnapshotError) as raised:
        yield
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"
    assert_same(exported(replica), before)
    assert replica.version == version
    replica.check()


def manifest(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return loaded


def columns(folder: Path, kind: str) -> Columns:
    """Returns all lines of the files of one kind, in order of id."""
    parts: list[Columns] = []
    for file in manifest(folder)["files"]:
        if file["kind"] == kind:
            table = read_file(folder / file["name"])
            parts.append({name: as_numpy(table.column(name)) for name in table.column_names})
    return by_id({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def read_file(path: Path) -> Any:
    """Returns the Arrow table of a data file."""
    import pyarrow as pa  # rows on a GPU are also tested where there is none

    return pa.ipc.open_file(pa.py_buffer(path.read_bytes())).read_all()


def as_numpy(chunks: Any) -> NDArray[Any]:
    import pyarrow as pa

    column = chunks.combine_chunks()
    if pa.types.is_fixed_size_list(column.type):
        array: NDArray[Any] = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
        return array
    array = column.to_numpy()
    return array


def crc32c(data: bytes) -> int:
    """Computes CRC-32C by its definition: polynomial 0x1EDC6F41, reflected, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def seal(content: dict[str, Any]) -> bytes:
    """Returns the content as a manifest with a right checksum."""
    content = {name: value for name, value in content.items() if name != "crc32c"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(content | {"crc32c": crc32c(canonical)}).encode()


def forge(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest and its checksum, as a faulty program would write it."""
    content = manifest(folder)
    change(content)
    (folder / "manifest.json").write_bytes(seal(content))


def forge_file(folder: Path, kind: str, change: Callable[[Any], Any]) -> str:
    """Replaces the first file of that kind, of one record batch, by `change` of its Arrow table, with right checksums;
    returns its name."""
    import pyarrow as pa

    content = manifest(folder)
    file = next(file for file in content["files"] if file["kind"] == kind)
    path = folder / file["name"]
    table = change(read_file(path)).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
        end = sink.tell()
    data = sink.getvalue().to_pybytes()
    path.write_bytes(data)
    file |= {"bytes": len(data), "crc32c": crc32c(data)}
    for batch in file["batches"]:
        batch[3:] = end, crc32c(data[:end])
    (folder / "manifest.json").write_bytes(seal(content))
    return str(file["name"])
