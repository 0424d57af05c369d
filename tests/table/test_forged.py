"""Snapshots whose checksums are right and that contradict docs/format.md: refused by name, before a table is touched.

And the ends of what numbers can say: the last version, rates and initial values that float32 cannot work with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oracle import as_ids
from satrap.config.tables import LAST_VERSION, SGD, Ftrl, MinCount, Normal, Table, Uniform
from satrap.errors import ConfigError, InputError, SatrapError, SnapshotError
from satrap.table.store import Store
from satrap.table.table_group import TableGroup
from snapshots import assert_same, contents, forge, forge_file, manifest, seal

TABLE = Table("item", dim=2, num_buckets=2, capacity=64, expire_after=100, admission=MinCount(2))


@pytest.fixture
def replica(tmp_path: Path) -> Store:
    """A store at its first snapshot (tmp_path/full), and the changes since then (tmp_path/changes)."""
    store = Store(TABLE, num_threads=1)
    for step in range(1, 8):
        store.lookup(as_ids(range(step, step + 12)), step=step)
    version = store.save(tmp_path / "full")
    replica = Store.load(tmp_path / "full", num_threads=1)
    for step in range(8, 120):
        store.lookup(as_ids(range(step, step + 12)), step=step)
    store.save_changes(tmp_path / "changes", since=version)
    return replica


def refuse(replica: Store, folder: Path, *words: str) -> None:
    before, version = contents(replica), replica.version
    with pytest.raises(SnapshotError) as raised:
        replica.apply_changes(folder)
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"
    assert_same(contents(replica), before)
    assert replica.version == version
    replica.check()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": 2**32 - 1}, "'version' is 4294967295"),
        ({"lr": 3.5e38}, "'lr' is 3.5e+38"),
        ({"lr": 10**400}, "'lr' is 1000"),
    ],
)
def test_a_number_of_the_manifest_out_of_range(
    change: dict[str, Any], word: str, replica: Store, tmp_path: Path
) -> None:
    forge(tmp_path / "changes", lambda content: content.update(change))
    refuse(replica, tmp_path / "changes", "manifest.json", word)


def test_a_rate_that_the_optimizer_cannot_take(tmp_path: Path) -> None:
    Store(Table("item", dim=2, optimizer=Ftrl()), num_threads=1).save(tmp_path / "a")
    forge(tmp_path / "a", lambda content: content.update(lr=1e-39))
    with pytest.raises(SnapshotError, match="the manifest's lr: lr is 1e-39"):
        Store.load(tmp_path / "a", num_threads=1)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000], ids=["lists", "objects"])
def test_json_nested_too_deeply(text: bytes, replica: Store, tmp_path: Path) -> None:
    (tmp_path / "changes" / "manifest.json").write_bytes(text)
    refuse(replica, tmp_path / "changes", "manifest.json", "is no JSON")


def test_a_config_nested_too_deeply(replica: Store, tmp_path: Path) -> None:
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
        refuse(replica, tmp_path / "changes")
        del content["config"]["dim"]


@pytest.mark.parametrize("kind", ["rows", "sightings"])
def test_a_step_after_the_latest(kind: str, replica: Store, tmp_path: Path) -> None:
    def late(table: Any) -> Any:
        at = table.schema.get_field_index("step")
        return table.set_column(at, table.schema.field(at), pa.array([120] * len(table), pa.uint32()))

    name = forge_file(tmp_path / "changes", kind, late)
    refuse(replica, tmp_path / "changes", name, "latest_step, 119")


@pytest.mark.parametrize("kind", ["rows", "sightings", "removed"])
def test_an_id_twice(kind: str, replica: Store, tmp_path: Path) -> None:
    def twice(table: Any) -> Any:
        ids = table.column("id").to_numpy().copy()
        ids[1] = ids[0]
        return table.set_column(0, table.schema.field(0), pa.array(ids))

    name = forge_file(tmp_path / "changes", kind, twice)
    refuse(replica, tmp_path / "changes", name, "an id twice")


@pytest.mark.parametrize("column", ["values", "state"])
def test_null_in_a_list(column: str, replica: Store, tmp_path: Path) -> None:
    def with_null(table: Any) -> Any:
        at = table.schema.get_field_index(column)
        field = table.schema.field(at)
        items = table.column(at).combine_chunks().flatten().to_pylist()
        items[-1] = None
        lists = pa.FixedSizeListArray.from_arrays(pa.array(items, field.type.value_type), type=field.type)
        return table.set_column(at, field, lists)

    name = forge_file(tmp_path / "changes", "rows", with_null)
    refuse(replica, tmp_path / "changes", name, "nulls")


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


# -- a table that follows another one ----------------------------------------------------------------------------------


@pytest.mark.parametrize("expires", [True, False])
def test_a_follower_whose_line_has_moved(expires: bool, tmp_path: Path) -> None:
    """Rows that expired are a change. Without any the changes apply, and expire_before stays: it never falls."""
    store = Store(Table("item", dim=2, expire_after=100, num_buckets=2), num_threads=1)
    store.lookup(as_ids(range(300)), step=200)
    version = store.save(tmp_path / "full")
    store.lookup(as_ids(range(10)), step=201)
    store.save_changes(tmp_path / "changes", since=version)
    follower = Store.load(tmp_path / "full", num_threads=1)
    follower.lookup(as_ids([]), step=400 if expires else 250)
    line = follower._engine.expire_before(0)
    assert line == (300 if expires else 150)
    if expires:
        with pytest.raises(SnapshotError, match="was changed after version"):
            follower.apply_changes(tmp_path / "changes")
    else:
        follower.apply_changes(tmp_path / "changes")
        assert len(follower) == len(store)
    assert follower._engine.expire_before(0) == line
    follower.check()


# -- numbers that float32 cannot work with, and arguments of a wrong kind ----------------------------------------------

FTRL = Table("item", dim=2, optimizer=Ftrl())
CALLS: list[tuple[Callable[[], Any], type[SatrapError], str]] = [
    (lambda: Ftrl(lr=1e-40), ConfigError, "lr is 1e-40"),
    (lambda: Ftrl(lr=1e-3, beta=3e38), ConfigError, "beta / lr"),
    (lambda: Store(FTRL).set_lr(1e-39), InputError, "lr is 1e-39"),
    (lambda: Store(FTRL).update(as_ids([]), np.empty((0, 2), np.float32), lr=1e-320), InputError, "at least 1.18e-38"),
    (lambda: Table("item", dim=2, initial=Uniform(low=-3.4e38, high=3.4e38)), ConfigError, "high - low"),
    (lambda: Table("item", dim=2, initial=Normal(std=3.4e38)), ConfigError, "holds at most"),
    (lambda: Table("item", dim=2, dtype="float16", initial=Normal(std=1e6)), ConfigError, "holds at most 65504"),
    (lambda: Store(TABLE, shared="here\0there"), ConfigError, "without NUL"),
    (lambda: Store(TABLE, shared="\udcff"), ConfigError, "Unicode"),
    (lambda: Store.attach("here\0there"), ConfigError, "without NUL"),
    (lambda: Store(TABLE).save("a\0b"), InputError, "path of a snapshot's folder"),
    (lambda: Store(TABLE).save("\udcff"), InputError, "path of a snapshot's folder"),
    (lambda: Store(TABLE).save(""), InputError, "path of a snapshot's folder"),
    (lambda: Store.load("a\0b"), InputError, "path of a snapshot's folder"),
    (lambda: TableGroup(None), ConfigError, "tables is a NoneType"),  # type: ignore[arg-type]
    (lambda: TableGroup(Table(x, dim=2) for x in "ab"), ConfigError, "tables is a generator"),  # type: ignore[arg-type]
    (lambda: tables_update([1.0]), InputError, "lrs is a list"),
    (lambda: tables_update({"a": 1.0, 7: 2.0}), InputError, "7"),
    (lambda: tables().split(np.zeros(5, np.float32), [0, 1]), InputError, "offsets"),
    (lambda: tables().split(np.zeros(5, np.float32), np.array([0, 1, 2])), InputError, "flat holds 5 floats"),
    (lambda: tables().split([1.0], np.array([0, 1, 2])), InputError, "flat is a list"),  # type: ignore[arg-type]
]


def tables() -> TableGroup:
    return TableGroup([Table("a", dim=1, optimizer=SGD()), Table("b", dim=2)], num_threads=1)


def tables_update(lrs: Any) -> None:
    both = tables()
    both.update(both.prepare(as_ids([1]), np.array([0, 1, 1])), np.zeros(1, np.float32), lrs=lrs)


@pytest.mark.parametrize(("call", "error", "words"), CALLS, ids=[words for _, _, words in CALLS])
def test_what_is_refused(
    call: Callable[[], Any], error: type[SatrapError], words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_split_gives_views() -> None:
    flat = np.arange(5, dtype=np.float32)
    first, second = tables().split(flat, np.array([0, 1, 3]))
    assert (first.tolist(), second.tolist()) == ([[0.0]], [[1.0, 2.0], [3.0, 4.0]])
    first[:] = 9.0
    assert flat[0] == 9.0
