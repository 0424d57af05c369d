"""Saving and loading: a loaded table is the saved one, bit for bit and from then on; changes lead from one to the next.

Damage, foreign files and failing disks are in test_snapshot_refusals.py; random sequences of saves among all
other calls in test_property.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import as_ids
from satrap import _core
from satrap.config.optimizers import SGD, Adagrad, Adam, Ftrl, RowWiseAdagrad
from satrap.config.tables import MinCount, Table
from satrap.errors import CapacityError, SnapshotError
from satrap.table.snapshot import writer
from satrap.table.snapshot.arrow_files import as_batch, new_file, pyarrow_or_error, schema_of
from satrap.table.snapshot.cut import TableCut
from satrap.table.store import Store
from satrap.table.table_group import TableGroup
from snapshots import assert_same, columns, crc32c, exported, forge, manifest, update_at_random

ROOT = Path(__file__).parents[2]

OPTIMIZERS: list[Any] = [SGD(), SGD(momentum=0.9), Adagrad(), RowWiseAdagrad(), Adam(), Ftrl()]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files and many record batches, even for a small table."""
    monkeypatch.setattr(writer, "_EXPORT_BYTES", 2000)
    monkeypatch.setattr(writer, "_FILE_BYTES", 8000)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_loaded_table_is_the_saved_one_from_then_on(
    dtype: Any, optimizer: Any, tmp_path: Path, seed: int, small_pieces: None
) -> None:
    table = Table(
        "ä b/c", dim=5, dtype=dtype, optimizer=optimizer, capacity=64, num_buckets=2, admission=MinCount(2, window=300),
        expire_after=12,
    )  # fmt: skip
    store = Store(table, seed=2**64 - 1, num_threads=3)
    update_at_random(store, np.random.default_rng(seed), steps=12)
    store.set_lr(0.0625)
    version = store.save(tmp_path / "a")
    loaded = Store.load(tmp_path / "a", num_threads=1, simd="portable")
    assert_same(exported(loaded), exported(store))
    assert_same(exported(Store.load(tmp_path / "a", num_threads=5)), exported(store))
    assert loaded.version == store.version == version
    assert loaded.snapshot_id(version) == store.snapshot_id(version) == manifest(tmp_path / "a")["id"]
    assert store.snapshot_id(version + 1) is None
    assert len(columns(tmp_path / "a", "rows")["id"]) == len(store) == len(loaded) > 0
    for each in (store, loaded):  # stamps and sightings decide what follows: evictions, admissions
        update_at_random(each, np.random.default_rng(seed + 1), steps=12)
        each.check()
    assert_same(exported(loaded), exported(store))
    assert store.stats()["evicted"] > 0


# -- what is in the folder ---------------------------------------------------------------------------------------------


def test_the_files_are_as_specified(tmp_path: Path, rng: np.random.Generator, small_pieces: None) -> None:
    table = Table("item", dim=6, dtype="bfloat16", optimizer=Adam(), num_buckets=16, admission=MinCount(2))
    store = Store(table, seed=7, num_threads=2)
    update_at_random(store, rng)
    store.save(tmp_path / "a")
    found = manifest(tmp_path / "a")
    assert found["format"] == "satrap-table" and found["format_version"] == 1 and found["kind"] == "full"
    assert Table.from_dict(found["config"]) == table and found["seed"] == 7
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        ["manifest.json", *(file["name"] for file in found["files"])]
    )
    for file in found["files"]:
        data = (tmp_path / "a" / file["name"]).read_bytes()
        assert (len(data), crc32c(data)) == (file["bytes"], file["crc32c"])
    rows = columns(tmp_path / "a", "rows")
    assert {name: (column.dtype.name, column.shape[1:]) for name, column in rows.items()} == {
        "id": ("uint64", ()), "step": ("uint32", ()), "values": ("uint16", (6,)), "state": ("float32", (13,))
    }  # fmt: skip
    read = store.read(rows["id"])
    assert read.present.all() and len(rows["id"]) == len(store) == found["rows"]
    np.testing.assert_array_equal((rows["values"].astype(np.uint32) << 16).view(np.float32), read.values)
    np.testing.assert_array_equal(rows["state"], read.state)
    assert len(columns(tmp_path / "a", "sightings")["id"]) == store.stats()["sightings"] == found["sightings"] > 0


def test_a_table_without_state_has_no_state_column(tmp_path: Path) -> None:
    store = Store(Table("item", dim=2, optimizer=SGD()), num_threads=1)
    store.lookup(as_ids([1, 2**64 - 1]))
    store.save(tmp_path / "a")
    assert list(columns(tmp_path / "a", "rows")) == ["id", "step", "values"]


def test_crc32c_is_castagnoli(rng: np.random.Generator) -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    assert _core.crc32c(data) == crc32c(data.tobytes()) == 0xE3069283
    data = rng.integers(256, size=4099).astype(np.uint8)
    for cut in (0, 1, 7, 8, 4000, 4099):
        assert _core.crc32c(data[cut:], _core.crc32c(data[:cut])) == crc32c(data.tobytes())


def test_buckets_are_as_specified(rng: np.random.Generator) -> None:
    def mix64(x: int) -> int:
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 % 2**64
        x ^= x >> 27
        x = x * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    ids = [0, 1, 2**63, 2**64 - 1, *rng.integers(2**64, size=100, dtype=np.uint64).tolist()]
    for bits in (0, 1, 7, 16):
        assert np.asarray(_core.bucket_of(as_ids(ids), 1 << bits)).tolist() == [
            mix64(id_) >> (64 - bits) for id_ in ids
        ]


def test_the_manifest_can_be_checked_as_text(tmp_path: Path) -> None:
    """The way that format.md gives programs that cannot print numbers like Python."""
    Store(Table('"crc32c":1,', dim=1, optimizer=Adagrad(lr=1e-5, eps=1e-30)), num_threads=1).save(tmp_path / "a")
    text = (tmp_path / "a" / "manifest.json").read_bytes()
    found = re.search(rb'"crc32c":(\d+),', text)
    assert found is not None and text.endswith(b"\n")
    assert crc32c(text[: found.start()] + text[found.end() : -1]) == int(found[1])


def test_saving_again_replaces_the_snapshot_and_nothing_else(tmp_path: Path, rng: np.random.Generator) -> None:
    store = Store(Table("item", dim=2), num_threads=1)
    (tmp_path / "a").mkdir()
    for name in ("notes.txt", "part-zz-00000.arrow"):
        (tmp_path / "a" / name).write_text("mine")
    (tmp_path / "a" / "part-0123456789abcdef-00000.arrow").write_text("left by a save that was killed")
    for _ in range(3):
        update_at_random(store, rng, steps=1)
        store.save(tmp_path / "a")
        names = {"manifest.json", "notes.txt", "part-zz-00000.arrow"}
        assert {path.name for path in (tmp_path / "a").iterdir()} == names | {
            file["name"] for file in manifest(tmp_path / "a")["files"]
        }
        assert_same(exported(Store.load(tmp_path / "a", num_threads=1)), exported(store))


# -- changes -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., tuple[Store, Store]]:
    def make(table: Table, rng: np.random.Generator, **options: Any) -> tuple[Store, Store]:
        primary = Store(table, num_threads=2)
        update_at_random(primary, rng, **options)
        primary.save(tmp_path / "full")
        return primary, Store.load(tmp_path / "full", num_threads=1)

    return make


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_changes_lead_from_one_snapshot_to_the_next(
    dtype: Any, make_pair: Any, tmp_path: Path, rng: np.random.Generator, small_pieces: None
) -> None:
    table = Table("item", dim=4, dtype=dtype, capacity=64, num_buckets=2, admission=MinCount(2), expire_after=20)
    primary, replica = make_pair(table, rng, steps=20)
    for i in range(4):
        update_at_random(primary, rng, steps=3)
        primary.set_lr(0.5 / (i + 1))
        version = primary.save_changes(tmp_path / str(i), since=replica.version)
        replica.apply_changes(tmp_path / str(i))
        assert replica.version == primary.version == version
        replica.check()
        assert_same(exported(replica), exported(primary))
    assert primary.stats()["evicted"] > 0
    assert_same(exported(replica), exported(primary))
    update_at_random(primary, np.random.default_rng(1))
    update_at_random(replica, np.random.default_rng(1))
    assert_same(exported(replica), exported(primary))


def test_a_snapshot_from_before_a_field_was_added(make_pair: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    """A missing field means its default: a table loads it, applies its changes, and may be saved in its place."""
    primary, replica = make_pair(Table("item", dim=4, admission=MinCount(2)), rng)
    primary.save_changes(tmp_path / "changes", since=replica.version)
    for name in ("full", "changes"):
        forge(tmp_path / name, lambda content: content["config"]["admission"].pop("first_epoch_only"))
    replica = Store.load(tmp_path / "full", num_threads=1)
    assert replica.table == primary.table
    replica.apply_changes(tmp_path / "changes")
    assert_same(exported(replica), exported(primary))
    replica.save(tmp_path / "full")


def test_changes_are_only_what_changed(tmp_path: Path) -> None:
    store = Store(Table("item", dim=2, capacity=100, num_buckets=1), num_threads=1)
    store.lookup(as_ids(range(100)))
    version = store.save(tmp_path / "full")
    store.lookup(as_ids([50, 51]))  # stamps
    store.lookup(as_ids([50, 99]), train=False)
    store.lookup(as_ids([1000, 1001]))  # evicts the smallest ids of the oldest step
    store.update(as_ids([7, 2000]), np.ones((2, 2), np.float32))
    store.save_changes(tmp_path / "changes", since=version)
    assert columns(tmp_path / "changes", "rows")["id"].tolist() == [7, 50, 51, 1000, 1001]
    assert columns(tmp_path / "changes", "removed")["id"].tolist() == [0, 1]
    found = manifest(tmp_path / "changes")
    assert (found["kind"], found["since"], found["version"]) == ("changes", version, version + 1)
    assert found["since_id"] == manifest(tmp_path / "full")["id"]


def test_changes_since_the_same_snapshot_are_replaced(make_pair: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    """The new changes include the old ones."""
    primary, replica = make_pair(Table("item", dim=3, capacity=64, num_buckets=2), rng)
    for _ in range(2):
        update_at_random(primary, rng)
        primary.save_changes(tmp_path / "changes", since=replica.version)
    replica.apply_changes(tmp_path / "changes")
    assert_same(exported(replica), exported(primary))


def test_changes_are_exact_once_training_has_paused(tmp_path: Path) -> None:
    """A snapshot taken in the middle of training may be a blur; the changes that follow it must settle every row."""
    primary = Store(Table("item", dim=8, capacity=3000, num_buckets=32), num_threads=1)
    update_at_random(primary, np.random.default_rng(0), steps=20, universe=5000, batch=500)

    def train_meanwhile(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):  # few enough that the ids of evicted rows are all remembered
            try:
                update_at_random(primary, rng, steps=1, universe=5000, batch=50)
            except CapacityError:  # the other thread's open step holds the bucket
                continue

    @contextmanager
    def in_training(seed: int) -> Iterator[None]:
        with ThreadPoolExecutor(2) as pool:
            threads = [pool.submit(train_meanwhile, seed + i) for i in range(2)]
            yield
        for each in threads:
            each.result()

    with in_training(10):
        primary.save(tmp_path / "full")
    replica = Store.load(tmp_path / "full", num_threads=2)
    for i in range(5):
        with in_training(20 + 2 * i):
            primary.save_changes(tmp_path / str(i), since=replica.version)
            replica.apply_changes(tmp_path / str(i))
            replica.check()
    primary.save_changes(tmp_path / "last", since=replica.version)
    replica.apply_changes(tmp_path / "last")
    assert_same(exported(replica), exported(primary))


def test_too_many_rows_went_for_changes(tmp_path: Path) -> None:
    store = Store(Table("item", dim=1, capacity=10, num_buckets=1), num_threads=1)
    store.lookup(as_ids(range(10)))
    version = store.save(tmp_path / "full")
    for first in range(0, 10_000, 10):
        store.lookup(as_ids(range(first, first + 10)) + np.uint64(100))
    with pytest.raises(
        SnapshotError, match=f"since version {version} .*remembered since version .*: save the whole table"
    ):
        store.save_changes(tmp_path / "changes", since=version)
    assert not (tmp_path / "changes").exists()
    version = store.save(tmp_path / "full")
    store.save_changes(tmp_path / "changes", since=version)


# -- around it ---------------------------------------------------------------------------------------------------------


def test_changes_do_not_set_the_line_of_expiry_back(tmp_path: Path) -> None:
    """A copy with a later expire_before keeps it: expired rows stay expired for its readers."""
    store = Store(Table("item", dim=1, expire_after=10), num_threads=1)
    store.lookup(as_ids([1]), step=95)
    store.save(tmp_path / "full")
    copy = Store.load(tmp_path / "full", num_threads=1)
    copy.lookup(as_ids([]), step=100)
    assert len(copy) == 1, "rows before 90 were looked for, and there are none"
    store.lookup(as_ids([2]), step=96)
    store.save_changes(tmp_path / "changes", since=copy.version)
    copy.apply_changes(tmp_path / "changes")
    for each, line in ((store, 86), (copy, 90)):
        assert each._engine.expire_before(0) == line
        each.lookup(as_ids([3]), step=20)  # stamped with the line
        each.lookup(as_ids([]), step=98)  # its line is 88
        assert len(each) == 2 + (line > 88) == each.read(as_ids([1, 2, 3])).present.sum()
        each.check()


def test_rows_that_expired_in_a_copy_are_a_change(tmp_path: Path) -> None:
    store = Store(Table("item", dim=1, expire_after=100), num_threads=1)
    store.lookup(as_ids(range(300)), step=200)
    version = store.save(tmp_path / "full")
    store.save_changes(tmp_path / "changes", since=version)
    copy = Store.load(tmp_path / "full", num_threads=1)
    copy.lookup(as_ids([]), step=400)
    with pytest.raises(SnapshotError, match="was changed after version"):
        copy.apply_changes(tmp_path / "changes")
    assert copy._engine.expire_before(0) == 300
    copy.check()


def test_a_line_of_expiry_beyond_the_latest_step() -> None:
    """A foreign snapshot may have it: rows are stamped with expire_before, so the latest step follows it."""
    store = Store(Table("item", dim=1, expire_after=10), num_threads=1)
    store._engine.restore(0, version=2, latest_step=10, expire_before=18, lr=0.1)
    store.lookup(as_ids([1]), step=11)
    assert (len(store), store.latest_step) == (1, 18)
    store.check()


def test_a_table_among_others_is_saved_alone(tmp_path: Path) -> None:
    tables = TableGroup([Table("a", dim=2), Table("b", dim=3)], num_threads=1)
    tables.lookup(as_ids([1, 2, 3]), np.array([0, 1, 3]))
    version = tables["b"].save(tmp_path / "b")
    loaded = Store.load(tmp_path / "b", num_threads=1)
    assert (len(loaded), loaded.version, tables["a"].version) == (2, version, 1)
    np.testing.assert_array_equal(loaded.read(as_ids([2, 3])).values, tables["b"].read(as_ids([2, 3])).values)


def test_loading_into_shared_memory(tmp_path: Path, rng: np.random.Generator) -> None:
    store = Store(Table("item", dim=4, capacity=64, admission=MinCount(2)), num_threads=1)
    update_at_random(store, rng)
    version = store.save(tmp_path / "a")
    Store.load(tmp_path / "a", num_threads=1, shared=tmp_path / "shared")
    attached = Store.attach(tmp_path / "shared", num_threads=1)
    assert attached.version == version
    assert_same(exported(attached), exported(store))
    with pytest.raises(SnapshotError, match="removed rows do not survive the process: save the whole table"):
        attached.save_changes(tmp_path / "b", since=version)
    attached.save(tmp_path / "a")


def test_saving_from_several_threads(tmp_path: Path, rng: np.random.Generator) -> None:
    store = Store(Table("item", dim=4), num_threads=2)
    update_at_random(store, rng)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(store.save, [tmp_path / str(i % 2) for i in range(6)]))
    for i in range(2):
        assert_same(exported(Store.load(tmp_path / str(i), num_threads=1)), exported(store))


def test_without_pyarrow_saving_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(Table("item", dim=4), num_threads=1)
    store.save(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (lambda: store.save(tmp_path / "b"), lambda: Store.load(tmp_path / "a")):
        with pytest.raises(SnapshotError, match=r"pip install 'satrap\[arrow\]'"):
            call()
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_tools_open_it_as_the_format_says(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the examples of docs/format.md, with pyarrow, polars and DuckDB."""
    monkeypatch.chdir(tmp_path)
    store = Store(Table("items", dim=3, dtype=dtype, optimizer=Adagrad()))
    for step in (1000, 1001):
        store.lookup(np.arange(step, step + 5, dtype=np.uint64), step=step)
    store.save("items")
    section = (ROOT / "docs/format.md").read_text().partition("## Opening one without Satrap")[2].partition("\n## ")[0]
    lines = [text[4:] for text in section.splitlines() if text.startswith("    ")]
    cut = next(i for i, line in enumerate(lines) if "import numpy" in line)
    opening = [line.replace("duckdb.sql(", "top = duckdb.sql(") for line in lines[:cut]]
    found: dict[str, Any] = {}
    exec("\n".join(opening), found)
    assert found["rows"].num_rows == len(store) == 6
    assert sorted(found["frame"]["id"].to_list()) == [1001, 1002, 1003, 1004, 1005]
    assert [row[1] for row in found["top"].fetchall()] == [1001] * 5 + [1000]
    values = np.stack(found["rows"]["values"].to_numpy())
    wanted = store.read(found["rows"]["id"].to_numpy()).values
    if dtype == "float32":
        np.testing.assert_array_equal(values, wanted)
    else:
        assert values.dtype == np.uint16
        as_float: Any = values.view(np.float16) if dtype == "float16" else (values.astype(np.uint32) << 16).view("f4")
        np.testing.assert_array_equal(as_float.astype(np.float32), wanted)


def test_a_bucket_may_have_more_than_2_31_numbers() -> None:
    """A bucket is one record batch. Nothing here is stored, nor touched."""
    arrow = pyarrow_or_error()
    table, lines = Table("t", dim=65536, dtype="float16", optimizer=SGD()), 2**15 + 1
    schema = schema_of(arrow, "rows", "full", "0" * 16, table, 0)
    columns: Any = {"id": np.zeros(lines, np.uint64), "step": np.zeros(lines, np.uint32)}
    columns["values"] = np.zeros((lines, table.dim), np.uint16)
    sink = arrow.MockOutputStream()
    with new_file(arrow, sink, schema) as writer:
        writer.write_batch(as_batch(arrow, columns, schema))
    assert sink.size() > 2 * lines * table.dim > 2**32


def test_a_cut_that_fails_while_it_is_taken_does_not_exclude_later_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Store(Table("t", dim=2))

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(TableCut, "__init__", fail)
        store.save(tmp_path / "a")
    assert store.save(tmp_path / "a") == 3
