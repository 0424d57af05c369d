"""What decides in exchanges between trainers: which steps a trainer joins when, and where ids are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.config.optimizers import SGD, Adagrad, Adam, Ftrl, RowWiseAdagrad
from satrap.config.tables import Table
from satrap.device.collective_updates import StepOrder
from satrap.device.segments import JoinedIds, TableGroups, send_to_all
from satrap.device.table_shards import ALONE, Columns, Trainer, capacities_of
from satrap.errors import ConfigError, StreamError
from satrap.table.engine import native_config

_CALLS = st.lists(st.tuples(st.sampled_from(["update", "skip", "pass"]), st.integers(1, 12)), max_size=30)


@given(_CALLS)
def test_each_step_is_joined_once_and_in_order(calls: list[tuple[str, int]]) -> None:
    """An update of a step that was passed is refused and changes nothing; a skip waits for the steps before it."""
    order, joined, skipped = StepOrder(), list[int](), set[int]()
    for call, step in calls:
        if call == "update" and step < order.next_step:
            with pytest.raises(StreamError, match=f"step {step} is updated after step {order.next_step - 1}"):
                order.update(step)
        elif call == "update":
            earlier, later = order.update(step)
            assert set(later) <= skipped
            joined += [*earlier, step, *later]
        elif call == "skip":
            skipped.add(step)
            passed = order.skip(step)
            assert set(passed) <= skipped, "a step that may still be updated is not joined with nothing"
            joined += passed
        else:
            joined += order.pass_through(step)
            assert order.next_step > step
        assert joined == list(range(1, order.next_step))
        assert order.next_step not in skipped
    order.start(40)
    assert order.skip(41) == [] and order.update(40) == ([], [41]) and order.next_step == 42


_LAYOUTS = st.lists(
    st.tuples(
        st.sampled_from(["rows", "table", "replicated", "columns"]),
        st.sampled_from(["float32", "bfloat16"]),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=5,
)


@given(
    st.integers(1, 4),
    _LAYOUTS,
    st.data(),
)
def test_ids_are_joined_table_by_table_in_the_order_of_ranks(
    num_trainers: int, layouts: list[tuple[Any, Any, int]], data: st.DataObject
) -> None:
    """Some may have no line: the rows of replicated tables that another trainer has itself."""
    tables = [Table(f"t{n}", dim=dim, dtype=dtype, shard=shard) for n, (shard, dtype, dim) in enumerate(layouts)]
    shape = num_trainers, len(tables)
    counts = np.array(
        data.draw(st.lists(st.integers(0, 4), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])), np.int64
    ).reshape(shape)
    ids = iter(range(1000))
    parts = [[[next(ids) for _ in range(counts[r, t])] for t in range(shape[1])] for r in range(shape[0])]
    received = np.array([each for rank in parts for table in rank for each in table], np.uint64)
    groups = TableGroups.of(tables)
    asked = counts.copy()
    asked[1:, groups.of_kinds("replicated")] = 0
    joined = JoinedIds.join(received, counts, groups, asked)
    of_tables = [[each for rank in parts for each in rank[t]] for t in range(shape[1])]
    assert [joined.ids[slice(*joined.offsets[t : t + 2])].tolist() for t in range(shape[1])] == of_tables
    assert joined.tables().tolist() == [t for t, each in enumerate(of_tables) for _ in each]
    for group, members in enumerate(groups.tables):
        assert {layouts[t][1:] for t in members} == {groups.layouts[group]}
        assert {layouts[t][0].replace("table", "rows") for t in members} == {groups.kinds[group]}
        carried = parts[:1] if groups.kinds[group] == "replicated" else parts
        lines = [each for rank in carried for t in members for each in rank[t]]  # what an exchange carries of the group
        at = np.isin(joined.tables(), members) & (joined.lines >= 0)
        assert [lines[line] for line in joined.lines[at]] == joined.ids[at].tolist() and at.sum() == len(lines)
        assert groups.counts(counts)[group] == [sum(len(rank[t]) for t in members) for rank in parts]


@given(st.integers(1, 4), _LAYOUTS, st.data())
def test_ids_of_shared_tables_go_to_all_trainers(
    num_trainers: int, layouts: list[tuple[Any, Any, int]], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, num_trainers - 1))
    to_all = [t for t, (shard, *_) in enumerate(layouts) if shard in ("replicated", "columns")]
    numbers = iter(range(1000))

    def ids_of(r: int, t: int) -> list[int]:
        length = 0 if t in to_all and r != rank else data.draw(st.integers(0, 3))
        return [next(numbers) for _ in range(length)]

    parts = [[ids_of(r, t) for t in range(len(layouts))] for r in range(num_trainers)]
    counts = np.array([[len(ids) for ids in part] for part in parts], np.int64)
    ids = [np.array([each for of_table in part for each in of_table], np.uint64) for part in parts]
    sent, sent_counts = send_to_all(to_all, rank, ids, counts)
    for r in range(num_trainers):
        expected = [parts[rank if t in to_all else r][t] for t in range(len(layouts))]
        assert sent[r].tolist() == [each for of_table in expected for each in of_table]
        assert sent_counts[r].tolist() == list(map(len, expected))


@pytest.mark.parametrize("optimizer", [SGD(), SGD(momentum=0.9), Adagrad(), Adam(), Ftrl()])
@pytest.mark.parametrize(("dim", "world_size"), [(2, 2), (5, 3), (8, 3), (7, 4)])
def test_the_columns_of_all_trainers_are_the_row(optimizer: Any, dim: int, world_size: int) -> None:
    table = Table("t", dim=dim, optimizer=optimizer, shard="columns")
    state_dim = native_config(table).state_dim
    rng = np.random.default_rng(dim)
    values, state = rng.normal(size=(3, dim)).astype(np.float32), rng.normal(size=(3, state_dim)).astype(np.float32)
    found, found_state = np.zeros_like(values), np.zeros_like(state)
    for rank in range(world_size):
        columns = Columns.of(table, state_dim, rank, world_size)
        part = columns.take(values, state)
        layout = columns.layout("float32")
        alone = Table("t", dim=layout.dim, optimizer=optimizer)
        assert part[0].shape[1] == layout.dim and part[1].shape[1] == layout.state_dim == native_config(alone).state_dim
        assert layout.first == columns.begin
        columns.put(part, found, found_state)
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(found_state, state)


def test_tables_that_cannot_be_divided_by_columns_are_refused() -> None:
    with pytest.raises(ConfigError, match="table 't' has shard='columns', dim 3 and 4 trainers; expected at least one"):
        Columns.of(Table("t", dim=3, shard="columns"), 3, 0, 4)
    with pytest.raises(ConfigError, match="table 't': shard is 'columns' and the optimizer RowWiseAdagrad, whose step"):
        Table("t", dim=3, shard="columns", optimizer=RowWiseAdagrad())


def test_a_trainer_has_memory_for_what_it_can_own() -> None:
    tables = [
        Table("rows", dim=1, capacity=10, num_buckets=4),
        Table("whole", dim=1, capacity=10, shard="table"),
        Table("all", dim=1, capacity=10, num_buckets=4, shard="replicated"),
        Table("unbounded", dim=1, num_buckets=1),
        Table("grows", dim=1, capacity=10, num_buckets=4, on_full="grow"),
    ]
    assert capacities_of(tables, ALONE) == [10, 10, 10, None, None]
    capacities = [capacities_of(tables, Trainer(rank, 2)) for rank in range(2)]
    assert capacities == [[6, 10, 10, None, None], [6, 0, 10, 0, None]]
