"""Several trainers with tables that have `num_rows`: where each row is, what a step costs the host and the network, and
a batch that one of them has and the core refuses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from satrap.config.tables import Table
from satrap.device.asked_rounds import AskedRounds, AskedRows
from satrap.device.direct_ids import OwnerNumbers, RowNumbers, RowRuns, num_with, remainders_of
from satrap.device.group_exchange import lines_of, of_group
from satrap.device.segments import TableGroups
from satrap.device.table_shards import Trainer, owned_buckets
from satrap.errors import StreamError
from trainers import Trainers

CHILD = Path(__file__).parents[1] / "support/direct_collective_child.py"
CPU = torch.device("cpu")
_TABLES = st.lists(
    st.tuples(
        st.integers(1, 40), st.sampled_from([1, 2, 8, 64]), st.sampled_from(["rows", "table"]), st.sampled_from([3, 5])
    ),
    min_size=1,
    max_size=5,
)


@given(_TABLES, st.integers(1, 4))
def test_each_row_has_one_number_at_one_owner(shapes: list[tuple[int, int, Any, int]], world_size: int) -> None:
    """Sorted by number, rows are sorted by owner, group, table and id."""
    tables = [
        Table(f"t{at}", dim=dim, num_rows=rows, num_buckets=buckets, shard=shard)
        for at, (rows, buckets, shard, dim) in enumerate(shapes)
    ]
    groups = TableGroups.of_neighbours(tables)
    assert [table for of_group_ in groups.tables for table in of_group_] == list(range(len(tables)))
    numbers = OwnerNumbers(tables, groups, world_size, CPU)
    pairs = [(at, row) for at, (rows, *_) in enumerate(shapes) for row in range(rows)]
    of_table, ids = torch.tensor(pairs).T.contiguous()
    found = numbers.rows_of(of_table, ids)
    assert sorted(found.tolist()) == list(range(len(pairs))) and numbers.begins[-1] == len(pairs)
    bounds = numbers.bounds.tolist()
    for rank in range(world_size):
        buckets = owned_buckets(tables, Trainer(rank, world_size))
        own = RowNumbers(tables, [], CPU, buckets=buckets)
        rows = own.rows_of(of_table, ids)
        is_here = rows >= 0
        assert ((found >= bounds[rank * len(groups.tables)]) & (found < numbers.begins[rank + 1])).equal(is_here)
        assert rows[is_here].equal(found[is_here] - numbers.begins[rank])
        assert own.ids_of(rows[is_here]).equal(ids[is_here]) and own.tables_of(rows[is_here]).equal(of_table[is_here])
        for at, table in enumerate(tables):
            here = ids[is_here & (of_table == at)]
            assert len(here) == own.num_here(at) == num_with(table, remainders_of(buckets[at], len_of(table)))
            assert own.rows_of(at, here).tolist() == list(range(*own.offsets[at : at + 2])), "in the order of ids"
            for remainder in range(len_of(table)):
                of_bucket = np.arange(own.total)[own.of_bucket(at, remainder)]
                expected = here[here % len_of(table) == remainder]
                assert own.ids_of(torch.from_numpy(of_bucket.copy())).equal(expected)


def len_of(table: Table) -> int:
    return table.resolved_num_buckets


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_lines_are_counted_in_their_group(world_size: int, num_groups: int, data: st.DataObject) -> None:
    sizes = st.lists(st.integers(0, 3), min_size=world_size * num_groups, max_size=world_size * num_groups)
    counts = np.array(data.draw(sizes), np.int64).reshape(world_size, num_groups)
    total = int(counts.sum())
    entries = torch.arange(total + 2)  # two behind the last, which are of no group
    lines = lines_of(entries, counts)
    seen: list[int] = []
    for group in range(num_groups):
        at = of_group(entries, group, counts)
        assert lines[at].tolist() == list(range(int(counts[:, group].sum())))
        seen += at.tolist()
    assert sorted(seen) == list(range(total))


def test_a_row_of_some_buckets_keeps_its_order_in_runs() -> None:
    table = Table("t", dim=2, num_rows=10, num_buckets=4)
    numbers = OwnerNumbers([table], TableGroups.of_neighbours([table]), 2, CPU)
    rows = numbers.rows_of(0, torch.tensor([3, 8, 3, 0, 9, 8])).int()
    runs = RowRuns.of(rows, numbers)
    counts = runs.bounds.diff()
    assert int(counts.sum()) == 4 and runs.rows[:4].unique().numel() == 4
    entries = [runs.order[begin:end].tolist() for begin, end in zip(runs.begin[:4], runs.end[:4], strict=True)]
    assert sorted(entries) == [[0, 2], [1, 5], [3], [4]]


def test_an_update_uses_what_its_lookup_asked_for_if_the_same_trainers_join() -> None:
    rounds = AskedRounds()
    for number, step in ((3, 1), (4, 1), (5, 2)):
        rounds.keep(number, AskedRows(f"round {number}", step, (0, 2)))
    found = rounds.of([4], (0, 2))
    assert found is not None and found.rows == "round 4" and rounds.are_used
    assert rounds.of([4], (0,)) is None and rounds.of([-1], (0, 2)) is None and rounds.of([3, 4], (0, 2)) is None
    assert not rounds.are_used
    rounds.forget(1)
    assert rounds.of([4], (0, 2)) is None and rounds.of([5], (0, 2)) is not None
    rounds.keep(6, AskedRows("late", 1, (0, 2)))  # another trainer may have kept it, and forgotten it, before
    assert rounds.of([6], (0, 2)) is None


def test_an_update_waits_for_its_lookup() -> None:
    """The trainer answers it, and has no batch, so that nothing else makes its update wait."""
    rounds, error = AskedRounds(), StreamError("the lookup failed")
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(rounds.of, [number], (0,)) for number in (2, 3))
        rounds.keep(2, AskedRows("round 2", 1, (0,)))
        found = first.result(60)
        assert found is not None and found.rows == "round 2" and not second.done()
        rounds.fail(error)
        with pytest.raises(StreamError, match="the lookup failed"):
            second.result(60)


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(3, CHILD) as found:
        yield found


@pytest.mark.parametrize(
    ("wrong", "num_users", "world_size", "overlap"),
    [
        ("too large", 30, 2, False),
        ("negative", 30, 3, True),
        ("too large", None, 2, True),
        ("negative", None, 3, False),
    ],
)
def test_a_batch_that_one_trainer_has_and_the_core_refuses_is_an_error_of_all(
    trainers: Trainers, wrong: str, num_users: int | None, world_size: int, overlap: bool, tmp_path: Path
) -> None:
    """Nothing has changed, and all of them train on without it. With a directory, too."""
    how: dict[str, Any] = {"device": "cpu", "num_users": num_users, "overlap": overlap}
    found = trainers.run([], world_size, tmp_path, **how, refuses=wrong)
    plain = trainers.run([], world_size, tmp_path, **how, refuses="nothing")
    errors = {each["error"] for each in found}
    assert len(errors) == 1, errors
    (error,) = errors
    assert error.startswith("trainer 1: feature "), error
    expected = {"too large": ("table 'item'", "1000000", "num_rows=60"), "negative": ("table 'item'", "num_rows=60")}
    assert all(part in error for part in expected[wrong]), error
    assert all(each["rows"] == plain[0]["rows"] and each["dense"] == plain[0]["dense"] for each in found)


def test_a_step_of_any_size_is_two_exchanges_and_waits_three_times(tmp_path: Path) -> None:
    """Ids and rows of 26 tables, then gradients. The host reads how many rows it asks of whom, the verdict about the
    batch, and the largest gradient."""
    with Trainers(1, CHILD) as alone:
        (found,) = alone.run([], 1, tmp_path, costs=[3, 3, 700, 700], stubs=True, device="cpu")
    costs = found["costs"]
    assert costs[1] == costs[3]
    assert costs[3]["ids and rows"] == 3, "ids, rows and gradients"
    assert costs[3]["operations"] <= 250, costs
