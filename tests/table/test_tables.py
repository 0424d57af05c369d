"""Many tables in one engine: a batch over all does to each what calls of its Store would, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import as_ids
from satrap.config.optimizers import SGD, Adagrad, Adam, Ftrl
from satrap.config.tables import MinCount, Table
from satrap.errors import ConfigError, InputError, SharedMemoryError, SnapshotError, TicketError
from satrap.table.store import Store
from satrap.table.table_group import TableGroup

TABLES = [
    Table("user", dim=4, optimizer=Adam(), num_buckets=2),
    Table("item", dim=7, optimizer=Adagrad(lr=0.5), dtype="bfloat16", capacity=500, num_buckets=8),
    Table("unused", dim=3),
    Table("word", dim=1, optimizer=Ftrl(), absent="zeros"),
]


def batch(rng: np.random.Generator, tables: list[Table]) -> tuple[Any, Any]:
    counts = [0 if table.name == "unused" else int(rng.integers(60)) for table in tables]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return rng.integers(80, size=offsets[-1]).astype(np.uint64), offsets


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_batch_does_to_each_table_what_its_own_calls_do(num_threads: int, rng: np.random.Generator) -> None:
    tables = TableGroup(TABLES, seed=5, num_threads=num_threads)
    alone = {table.name: Store(table, seed=5, num_threads=1) for table in TABLES}
    for step in range(1, 10):
        ids, offsets = batch(rng, TABLES)
        flat, ticket = tables.lookup_for_update(ids, offsets)
        gradients = rng.normal(size=len(flat)).astype(np.float32)
        tables.update(ticket, gradients, lrs={"item": 0.25})
        of_each = tables.split(gradients, offsets)
        for i, (name, rows) in enumerate(zip(tables, tables.split(flat, offsets), strict=True)):
            assert rows.size == 0 or np.shares_memory(rows, flat)
            own = ids[offsets[i] : offsets[i + 1]]
            np.testing.assert_array_equal(alone[name].lookup(own, step=step), rows)
            alone[name].update(own, of_each[i], lr=0.25 if name == "item" else None)
    assert tables.latest_step == 9
    for name, store in tables.items():
        store.check()
        for found, wanted in zip(store.read(as_ids(range(80))), alone[name].read(as_ids(range(80))), strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert store.stats() == alone[name].stats()


def test_prepare_and_out(rng: np.random.Generator) -> None:
    tables = TableGroup(TABLES, num_threads=1)
    ids, offsets = batch(rng, TABLES)
    out = np.full(int(np.dot(np.diff(offsets), [table.dim for table in TABLES])), np.nan, np.float32)
    assert tables.lookup(ids, offsets, out=out) is out
    ticket = tables.prepare(ids, offsets)
    tables.update(ticket, np.ones_like(out), step=1)
    assert not np.array_equal(tables.lookup(ids, offsets, train=False), out) and np.isfinite(out).all()


def test_bad_tables() -> None:
    for bad in ([], [TABLES[0], TABLES[0]], [TABLES[0], "item"], None, (each for each in TABLES)):
        with pytest.raises(ConfigError, match=r"tables are called|expected a satrap\.Table|tables is a (None|gen)"):
            TableGroup(bad)  # type: ignore[arg-type]


def prepared(tables: TableGroup) -> Any:
    tables.lookup(as_ids([]), np.zeros(5, np.int64), step=1)
    return tables.prepare(as_ids([1]), np.array([0, 1, 1, 1, 1]))


BAD_CALLS: list[tuple[Any, str]] = [
    (lambda t: t.lookup(as_ids([1]), np.zeros(4, np.int64)), r"offsets are int64 of shape \(4,\); expected .*\(5,\)"),
    (lambda t: t.lookup(as_ids([1]), np.zeros(5, np.int32)), "offsets are int32"),
    (lambda t: t.lookup(as_ids([1]), np.zeros(5, np.int64)), "offsets run from 0 to 0; expected 0 to the number"),
    (lambda t: t.lookup(as_ids([1]), np.array([0, 1, 0, 1, 1])), "offsets fall from 1 to 0 at table 1; expected"),
    (lambda t: t.lookup(as_ids([1]), np.array([1, 1, 1, 1, 1])), "offsets run from 1 to 1; expected 0 to"),
    (lambda t: t.lookup(as_ids([1]), np.array([0, 1, 1, 1, 1]), out=np.zeros((1, 4), np.float32)), "out is float32"),
    (lambda t: t.lookup(as_ids([1]), np.array([0, 1, 1, 1, 1]), train=1), "train is 1"),
    (lambda t: t.lookup(as_ids([1]), np.array([0, 1, 1, 1, 1]), train=False, step=3), "step is 3 and train=False"),
    (lambda t: t.lookup(as_ids([1]), np.array([0, 1, 1, 1, 1]), step=0), "step is 0"),
    (lambda t: t.lookup(as_ids([1]), np.array([0, 1, 1, 1, 1]), step=3, oldest_open=4), "oldest_open is 4"),
    (lambda t: t.update(as_ids([1]), np.zeros(4, np.float32)), "ticket is a ndarray"),
    (lambda t: t.update(7, np.zeros(4, np.float32)), "ticket is an int; expected one from lookup_for_update"),
    (lambda t: t.update(prepared(t), np.zeros(5, np.float32)), "5 .*expected 4"),
    (lambda t: t.update(prepared(t), np.zeros((1, 4), np.float32)), r"shape \(1, 4\)"),
    (lambda t: t.update(prepared(t), np.zeros(4, np.float32), lrs={"x": 1.0}), "'x'"),
    (lambda t: t.update(prepared(t), np.zeros(4, np.float32), lrs={"user": 1.0, 7: 2.0}), "7"),
    (lambda t: t.update(prepared(t), np.zeros(4, np.float32), lrs=[1.0]), "lrs is a list"),
    (lambda t: t.split(np.zeros(5, np.float32), [0, 1]), "offsets"),
    (lambda t: t.split(np.zeros(5, np.float32), np.array([0, 1, 1, 1, 1])), "flat holds 5 floats"),
    (lambda t: t.split([1.0], np.array([0, 1, 1, 1, 1])), "flat is a list"),
    (lambda t: t.update(prepared(t), np.zeros(4, np.float32), lrs={"word": 0}), "table 'word': lr is 0; .* above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), BAD_CALLS)
def test_bad_calls(call: Any, words: str) -> None:
    tables = TableGroup(TABLES, num_threads=1)
    with pytest.raises(InputError, match=words):
        call(tables)
    assert tables.latest_step <= 1 and not any(len(store) for store in tables.values())


def test_tickets_are_used_once_and_at_home() -> None:
    tables, others = TableGroup(TABLES, num_threads=1), TableGroup(TABLES, num_threads=1)
    flat, ticket = tables.lookup_for_update(as_ids([1]), np.array([0, 1, 1, 1, 1]))
    with pytest.raises(TicketError, match="another store"):
        others.update(ticket, flat, step=1)
    tables.update(ticket, flat)
    with pytest.raises(TicketError, match=r"tables 'user', .* used already"):
        tables.update(ticket, flat)


def test_shared_memory_holds_all_tables(tmp_path: Path, rng: np.random.Generator) -> None:
    tables = TableGroup(TABLES, seed=9, num_threads=1, shared=tmp_path / "shared")
    ids, offsets = batch(rng, TABLES)
    flat = tables.lookup(ids, offsets).copy()
    del tables
    with pytest.raises(SharedMemoryError, match=r"holds 4 tables .*TableGroup\.attach"):
        Store.attach(tmp_path / "shared", num_threads=1)
    attached = TableGroup.attach(tmp_path / "shared", num_threads=2)
    assert [store.table for store in attached.values()] == TABLES and attached["user"].seed == 9
    np.testing.assert_array_equal(attached.lookup(ids, offsets, train=False), flat)
    for store in attached.values():
        store.check()


def test_a_table_has_its_own_learning_rate() -> None:
    """A table's own learning rate is used where a batch names none."""
    tables = TableGroup(
        [Table("a", dim=1, optimizer=SGD(lr=0.5)), Table("b", dim=1, optimizer=SGD(lr=0.25))], num_threads=1
    )
    flat, ticket = tables.lookup_for_update(as_ids([1, 1]), np.array([0, 1, 2]))
    tables["b"].set_lr(2.0)
    tables.update(ticket, np.ones(2, np.float32))
    np.testing.assert_array_equal(
        tables.lookup(as_ids([1, 1]), np.array([0, 1, 2]), train=False), flat - np.array([0.5, 2.0], np.float32)
    )


def test_restore_brings_every_table_back_bit_for_bit(tmp_path: Path) -> None:
    configs = [Table("a", dim=4, optimizer=Adagrad(lr=0.1)), Table("b", dim=3, admission=MinCount(2, window=64))]
    tables, rng = TableGroup(configs, seed=3), np.random.default_rng(0)
    folders: dict[str, list[Path]] = {"a": [], "b": []}
    versions: dict[str, int] = {}
    for round_number in range(3):
        ids = rng.integers(0, 50, 60, dtype=np.uint64)
        offsets = np.array([0, 30, 60])
        flat, ticket = tables.lookup_for_update(ids, offsets)
        tables.update(ticket, rng.standard_normal(flat.shape).astype(np.float32))
        for name, store in tables.items():
            to = tmp_path / f"{name}{round_number}"
            folders[name].append(to)
            versions[name] = store.save(to) if round_number == 0 else store.save_changes(to, since=versions[name])
    again = TableGroup(configs, seed=3)
    again.restore(folders)
    everything = np.arange(50, dtype=np.uint64)
    for name in tables:
        again[name].check()
        for one, other in zip(tables[name].read(everything), again[name].read(everything), strict=True):
            np.testing.assert_array_equal(one, other)
        assert again[name].version == versions[name]
    assert again.latest_step == tables.latest_step
    with pytest.raises(SnapshotError, match="was already used"):
        again.restore(folders)
    fresh = TableGroup(configs, seed=3)
    with pytest.raises(SnapshotError, match="continues version"):
        fresh.restore(folders | {"b": [folders["b"][0], folders["b"][2]]})
    with pytest.raises(SnapshotError, match="seed is 4 in the table and 3 in the snapshot"):
        TableGroup(configs, seed=4).restore(folders)
    with pytest.raises(InputError, match="one list for each table"):
        fresh.restore({"a": folders["a"]})
    assert len(fresh["a"]) == 0, "nothing is changed by what is refused"
