"""Tables with `num_rows`: the bits, counters and files of a table without it, for the same ids; an id out of range is
refused before anything changes. That they train on servers, in several trainers, through checkpoints and migrations is
shown by the tests that use loop.py, one of whose tables has `num_rows`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import running_servers
from contents import counters
from satrap import (
    SGD,
    Adagrad,
    Adam,
    ConfigError,
    Deployment,
    Embeddings,
    Ftrl,
    InputError,
    Inputs,
    MinCount,
    Reader,
    RowWiseAdagrad,
    SnapshotError,
    Store,
    Table,
)
from satrap._core import bucket_of
from satrap.config.tables import Normal, Uniform
from satrap.table.table_group import TableGroup

NUM_ROWS = 700
OPTIMIZERS = (
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    Ftrl(lr=0.1),
)

drawn_tables = st.builds(
    Table,
    st.just("item"),
    dim=st.sampled_from([1, 3, 16, 33]),
    optimizer=st.sampled_from(OPTIMIZERS),
    initial=st.sampled_from([Uniform(), Normal(std=0.5)]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    absent=st.sampled_from(["initial", "zeros"]),
    num_buckets=st.sampled_from([1, 2, 16, 1024]),
)


def content(store: Store) -> list[Any]:
    """Return every row bit for bit, with its step, and the counters."""
    rows = store.read(np.arange(NUM_ROWS, dtype=np.uint64))
    exported = store._engine.export_rows(0, 0, store.table.resolved_num_buckets, 0)
    steps = exported["step"][np.argsort(exported["id"])]
    return [rows.values.tobytes(), rows.state.tobytes(), rows.present.tobytes(), steps.tobytes(), counters(store)]


def call_all(stores: list[Store], rng: np.random.Generator, calls: int) -> None:
    """Make the same calls of each store; the rows that it looks up must be the same bits."""
    for _ in range(calls):
        size, kind = int(rng.integers(0, 200)), rng.integers(4)
        ids = rng.integers(0, int(rng.choice([5, NUM_ROWS])), size).astype(np.uint64)
        gradients = rng.normal(size=(size, stores[0].table.dim)).astype(np.float32)
        seen = set()
        for store in stores:
            if kind == 0:
                seen.add(store.lookup(ids, train=False).tobytes())
            elif kind == 1:
                store.update(ids, gradients)
            else:
                rows, ticket = store.lookup_for_update(ids)
                seen.add(rows.tobytes())
                store.update(ticket, gradients)
        assert len(seen) <= 1


def reopened(table: Table, folders: list[Path]) -> Store:
    """Return the table, filled from a full snapshot and the changes after it, which may be of either kind."""
    group = TableGroup([table], seed=3, num_threads=2)
    group.restore({table.name: folders})
    return group[table.name]


@settings(max_examples=settings().max_examples // 5)
@given(table=drawn_tables, seed=st.integers(0, 2**32 - 1), others=st.tuples(st.booleans(), st.booleans()))
def test_the_same_bits_with_num_rows_and_without(
    table: Table, seed: int, others: tuple[bool, bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Saved in full and as changes, each is opened with `num_rows` or without, and then trains alike."""
    folder, rng = tmp_path_factory.mktemp("direct"), np.random.default_rng(seed)
    kinds = [replace(table, num_rows=NUM_ROWS), table]
    stores = [Store(each, seed=3, num_threads=1 + i) for i, each in enumerate(kinds)]
    call_all(stores, rng, 12)
    assert content(stores[0]) == content(stores[1])
    versions = [store.save(folder / f"full-{i}") for i, store in enumerate(stores)]
    call_all(stores, rng, 4)
    for i, (store, version) in enumerate(zip(stores, versions, strict=True)):
        store.save_changes(folder / f"changes-{i}", since=version)
    again = [
        reopened(kinds[is_other], [folder / f"full-{i}", folder / f"changes-{i}"]) for i, is_other in enumerate(others)
    ]
    call_all(again, rng, 4)
    assert content(again[0]) == content(again[1])


def test_rows_in_shared_memory_are_found_again(tmp_path: Path) -> None:
    table = Table("item", dim=4, num_rows=NUM_ROWS, num_buckets=4)
    store = Store(table, seed=3, shared=tmp_path / "rows", num_threads=1)
    call_all([store], np.random.default_rng(0), 12)
    before = store.read(np.arange(NUM_ROWS, dtype=np.uint64))
    del store
    after = Store.attach(tmp_path / "rows").read(np.arange(NUM_ROWS, dtype=np.uint64))
    assert (after.values.tobytes(), after.state.tobytes()) == (before.values.tobytes(), before.state.tobytes())


def test_low_ids_are_spread_over_buckets() -> None:
    """The first B ids are in B buckets, and those of the first servers' buckets are apart."""
    buckets = np.asarray(bucket_of(np.arange(64, dtype=np.uint64), 64, True))
    assert sorted(buckets.tolist()) == list(range(64)) and buckets[:4].tolist() == [0, 32, 16, 48]


def test_memory() -> None:
    """Rows that no one looked up take none; the others at most 8 bytes beyond values and state, and their chunk's."""
    table = Table("item", dim=16, optimizer=RowWiseAdagrad(), num_rows=10**9)
    assert Store(table).stats()["bytes"] < 10**7
    small = Store(replace(table, num_rows=200_000, num_buckets=16), num_threads=1)
    for part in np.array_split(np.arange(200_000, dtype=np.uint64), 20):
        small.lookup(part)
    assert small.stats()["bytes"] <= 200_000 * (4 * 16 + 4 + 8) + 20_000


@pytest.mark.parametrize("option", [{"capacity": 1000}, {"expire_after": 3}, {"admission": MinCount(2)}])
def test_what_removes_rows_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=rf"table 'item': num_rows is 10 and {next(iter(option))}.*leave one of the two"
    ):
        Table("item", dim=4, num_rows=10, **option)


@pytest.mark.parametrize("num_rows", [0, -1, 2.5, "10"])
def test_a_number_of_rows_is_checked(num_rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"table 'item': num_rows is"):
        Table("item", dim=4, num_rows=num_rows)
    with pytest.raises(ConfigError, match=r"num_rows is 8589934592 in 1 buckets; .*give num_buckets=4"):
        Table("item", dim=4, num_rows=2**33, num_buckets=1)


@pytest.mark.parametrize("wrong", [[10], [3, 2**63], [-1, 2]])
def test_an_id_out_of_range_changes_nothing(wrong: list[int]) -> None:
    store = Store(Table("item", dim=4, num_rows=10))
    store.lookup(np.arange(10))
    before, step = store.stats(), store.latest_step
    ids = np.array(wrong, np.uint64 if max(wrong) >= 2**63 else np.int64)
    calls = (
        store.lookup,
        store.read,
        lambda each: store.lookup(each, train=False),
        lambda each: store.update(each, np.zeros((len(each), 4), np.float32)),
    )
    for call in calls:
        with pytest.raises(
            InputError, match=r"table 'item': id \d+.*is not below num_rows=10; expected ids from 0 to 9"
        ):
            call(ids)
    assert store.stats() == before and store.latest_step == step


@pytest.mark.parametrize("num_servers", [0, 2])
def test_a_batch_with_an_id_out_of_range_names_the_feature(num_servers: int) -> None:
    """Also on servers; the padding id, which is dropped, may be out of range."""
    item = Table("item", dim=4, num_rows=10)
    features: dict[str, Any] = {"shown": item.bag("sum", padding_id=99), "clicked": item, "user": Table("user", dim=4)}
    lists = np.array([1, 99, 9, 3, 12345678901], np.uint64)
    with running_servers(num_servers) as servers:
        where = Deployment(servers=[each.address for each in servers]) if servers else None
        embeddings = Embeddings(features, deployment=where)
        offsets = np.array([0, 3, 4, 5])
        inputs = Inputs(names=("shown", "clicked", "user"), values=lists, offsets=offsets, batch_size=1)
        embeddings.eval()
        embeddings(inputs)
        embeddings.train()
        lists[3] = 10
        with pytest.raises(InputError, match=r"feature 'clicked', table 'item': id 10 is not below num_rows=10"):
            embeddings(inputs)
        assert [len(table) for table in embeddings.tables.values()] == [0, 0]
        with pytest.raises(InputError, match=r"table 'item': id 10 is not below num_rows=10"):
            embeddings.tables["item"].read(np.array([10], np.uint64))
        embeddings.worker.close()


def test_a_snapshot_whose_ids_do_not_fit_is_refused(tmp_path: Path) -> None:
    table = Table("item", dim=4)
    store = Store(table, seed=3)
    store.lookup(np.array([5, 12], np.uint64))
    store.save(tmp_path / "full")
    with pytest.raises(SnapshotError, match=r"table 'item'.* id 12, which is not below num_rows=12: .* num_rows=13"):
        reopened(replace(table, num_rows=12), [tmp_path / "full"])
    assert len(reopened(replace(table, num_rows=13), [tmp_path / "full"])) == 2


def test_a_reader_refuses_an_id_out_of_range(tmp_path: Path) -> None:
    store = Store(Table("item", dim=4, num_rows=10))
    rows = store.lookup(np.arange(10))
    store.save(tmp_path)
    with Reader(tmp_path) as reader:
        assert reader.lookup("item", np.arange(10)).tobytes() == rows.tobytes()
        with pytest.raises(InputError, match=r"table 'item': id 10 is not below num_rows=10"):
            reader.lookup("item", np.arange(11))
