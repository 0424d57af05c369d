"""Snapshots with right checksums that contradict docs/format.md: refused by name, before a table is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from oracle import as_ids
from satrap.config.optimizers import Ftrl
from satrap.config.tables import LAST_VERSION, Table
from satrap.errors import SnapshotError
from satrap.table.store import Store
from snapshots import (
    crc32c,
    forge,
    forge_file,
    manifest,
    refused,
    save_with_changes,
    seal,
)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Store, Store]:
    return save_with_changes(tmp_path)


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
    ("last version", lambda content: content.update(version=2**32 - 1), ["manifest.json", "'version' is 4294967295"]),
    ("version of float", lambda content: content.update(version=3.0), ["'version' is 3.0", "integer"]),
    ("version of bool", lambda content: content.update(version=True), ["'version' is True"]),
    ("seed", lambda content: content.update(seed=2**64), ["'seed' is 18446744073709551616"]),
    ("latest_step", lambda content: content.update(latest_step=2**32), ["'latest_step'"]),
    ("lr", lambda content: content.update(lr=-0.5), ["'lr' is -0.5"]),
    ("lr above float32", lambda content: content.update(lr=3.5e38), ["'lr' is 3.5e+38"]),
    ("lr of int", lambda content: content.update(lr=10**400), ["'lr' is 1000"]),
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
    ("no buckets", lambda content: content.pop("buckets"), ["'buckets' is missing"]),
    ("no batches", lambda content: content["files"][0].pop("batches"), ["files[0]", "'batches' is missing"]),
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


def with_column(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.column_names.index(name), table.schema.field(name), pa.array(values))


def late(table: Any) -> Any:
    return with_column(table, "step", pa.array([30] * len(table), pa.uint32()))


def twice(table: Any) -> Any:
    ids = table.column("id").to_numpy().copy()
    ids[1] = ids[0]
    return with_column(table, "id", ids)


def with_null(table: Any, name: str) -> Any:
    """Replaces the last number of a column of lists by null."""
    column = table.column(name).combine_chunks()
    items = pa.array([*column.flatten().to_pylist()[:-1], None], column.type.value_type)
    return with_column(table, name, pa.FixedSizeListArray.from_arrays(items, type=column.type))


FORGED_FILES: list[tuple[str, str, Callable[[Any], Any], list[str]]] = [
    ("metadata", "rows", lambda table: table.replace_schema_metadata(None), ["has the schema", "expected"]),
    ("column", "rows", lambda table: table.drop_columns(["step"]), ["has the schema"]),
    ("another kind", "removed", lambda table: table.rename_columns(["ids"]), ["has the schema"]),
    ("lines", "rows", lambda table: table.slice(1), ["lines; expected"]),
    ("lines of sightings", "sightings", lambda table: table.slice(1), ["lines; expected"]),
    ("nulls", "rows", lambda table: with_column(table, "step", pa.array([None] * len(table), pa.uint32())), ["nulls"]),
    ("null in values", "rows", lambda table: with_null(table, "values"), ["nulls"]),
    ("null in state", "rows", lambda table: with_null(table, "state"), ["nulls"]),
    *((f"late {kind}", kind, late, ["latest_step, 29"]) for kind in ("rows", "sightings")),
    *((f"an id twice in {kind}", kind, twice, ["an id twice"]) for kind in ("rows", "sightings", "removed")),
]


@pytest.mark.parametrize(
    ("kind", "change", "words"), [each[1:] for each in FORGED_FILES], ids=[f[0] for f in FORGED_FILES]
)
def test_a_forged_data_file(kind: str, change: Any, words: list[str], saved: Any, tmp_path: Path) -> None:
    name = forge_file(tmp_path / "changes", kind, change)
    with refused(saved[1], str(tmp_path / "changes" / name), *words):
        saved[1].apply_changes(tmp_path / "changes")


def test_ids_of_other_buckets(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.table.snapshot.writer._EXPORT_BYTES", 1)  # two threads: two rows files
    saved[0].save(tmp_path / "two")
    files = [file for file in manifest(tmp_path / "two")["files"] if file["kind"] == "rows"]
    assert len(files) == 2

    def exchange(content: dict[str, Any]) -> None:
        for key in ("name", "bytes", "rows", "crc32c"):
            content["files"][0][key], content["files"][1][key] = content["files"][1][key], content["files"][0][key]
        for own, other in zip(content["files"][0]["batches"], content["files"][1]["batches"], strict=True):
            own[2:], other[2:] = other[2:], own[2:]

    forge(tmp_path / "two", exchange)
    with refused(saved[1], files[1]["name"], "record batch 0 holds ids of the buckets 2 to 2; expected 0 to 0"):
        Store.load(tmp_path / "two", num_threads=1)


def test_one_id_twice(saved: Any, tmp_path: Path) -> None:
    def double(table: Any) -> Any:
        return pa.concat_tables([table.slice(0, 1), table.slice(0, 1), table.slice(2)])

    name = forge_file(tmp_path / "full", "rows", double)
    with refused(saved[1], str(tmp_path / "full" / name), "record batch 0 holds an id twice or out of order at line 1"):
        Store.load(tmp_path / "full", shared=tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


def test_lines_out_of_order(saved: Any, tmp_path: Path) -> None:
    name = forge_file(tmp_path / "full", "rows", lambda table: table.take(list(range(len(table)))[::-1]))
    with refused(saved[1], str(tmp_path / "full" / name), "record batch 0 holds an id twice or out of order at line 1"):
        Store.load(tmp_path / "full")


BATCHES: list[tuple[Callable[[list[list[int]]], Any], str]] = [
    (lambda batches: batches[0].pop(), "'batches' is"),
    (lambda batches: batches[0].__setitem__(4, -1), "expected lists of 5 integers"),
    (lambda batches: batches[0].__setitem__(4, True), "expected lists of 5 integers"),
    (lambda batches: batches.reverse(), "is the next"),
    (lambda batches: batches[1].__setitem__(0, 0), "but 1 is the next"),
    (lambda batches: batches[0].__setitem__(1, 9), "holds the buckets 0 to 9"),
    (lambda batches: batches[0].__setitem__(3, 10**9), "ends at byte 1000000000 of"),
    (lambda batches: batches[1].__setitem__(3, batches[0][3]), "after"),
    (lambda batches: batches[0].__setitem__(2, 0), "with 0 lines"),
    (lambda batches: batches.pop(), "lines; expected"),
    (lambda batches: (batches[0].__setitem__(2, batches[0][2] - 1), batches[1].__setitem__(2, batches[1][2] + 1)),
     "record batch 0 holds"),
    (lambda batches: batches[3].__setitem__(4, 7), "is damaged in record batch 3 (bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BATCHES)
def test_forged_record_batches(change: Any, words: str, saved: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("satrap.table.snapshot.writer.TARGET_BYTES", 1)
    saved[0].save(tmp_path / "cut")
    assert len(file_of(manifest(tmp_path / "cut"), "rows")["batches"]) == 4
    forge(tmp_path / "cut", lambda content: change(file_of(content, "rows")["batches"]))
    with refused(saved[1], str(tmp_path / "cut"), words):
        Store.load(tmp_path / "cut", num_threads=1)


def test_record_batches_that_are_elsewhere(saved: Any, tmp_path: Path) -> None:
    """The checksums are right, but the footer names other bytes than the manifest."""
    folder = tmp_path / "full"
    name = forge_file(folder, "rows", lambda table: table)
    data = (folder / name).read_bytes()

    def longer(content: dict[str, Any]) -> None:
        file = file_of(content, "rows")
        middle = file["batches"][0][3] // 2
        file["batches"][0][3:] = middle, crc32c(data[:middle])

    forge(folder, longer)
    with refused(saved[1], str(folder / name), "record batch 0 has data outside of its bytes, 0 to"):
        Store.load(folder, num_threads=1)


def test_a_rate_that_the_optimizer_cannot_take(tmp_path: Path) -> None:
    Store(Table("item", dim=2, optimizer=Ftrl()), num_threads=1).save(tmp_path / "a")
    forge(tmp_path / "a", lambda content: content.update(lr=1e-39))
    with pytest.raises(SnapshotError, match="the manifest's lr: lr is 1e-39"):
        Store.load(tmp_path / "a", num_threads=1)


def test_a_config_nested_too_deeply(saved: Any, tmp_path: Path) -> None:
    """Nesting that Python still reads, or refuses at some depth."""
    for depth in (100, 400, 700, 900, 960):
        content = manifest(tmp_path / "changes")
        deep: Any = 1
        for _ in range(depth):
            deep = {"a": deep}
        content["config"]["dim"] = deep
        try:
            sealed = seal(content)
        except RecursionError:
            continue
        (tmp_path / "changes" / "manifest.json").write_bytes(sealed)
        with refused(saved[1]):
            saved[1].apply_changes(tmp_path / "changes")


def test_the_last_version(tmp_path: Path) -> None:
    store = Store(Table("item", dim=2), num_threads=1)
    store.lookup(as_ids([1]))
    store.save(tmp_path / "a")
    forge(tmp_path / "a", lambda content: content.update(version=LAST_VERSION - 1))
    store = Store.load(tmp_path / "a", num_threads=1)
    assert store.save(tmp_path / "b") == LAST_VERSION
    with pytest.raises(SnapshotError, match="all 4294967294 versions are used"):
        store.save(tmp_path / "b")
    assert store.version == LAST_VERSION == Store.load(tmp_path / "b", num_threads=1).version
