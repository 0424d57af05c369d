"""What decides in exchanges between trainers: which steps a trainer joins when, and where ids are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.config.tables import Table
from satrap.device.segments import JoinedIds, TableGroups
from satrap.device.step_order import StepOrder
from satrap.errors import StreamError

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


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["float32", "bfloat16"]), st.integers(1, 2)), min_size=1, max_size=5),
    st.data(),
)
def test_ids_are_joined_table_by_table_in_the_order_of_ranks(
    num_trainers: int, layouts: list[tuple[str, int]], data: st.DataObject
) -> None:
    tables = [Table(f"t{n}", dim=dim, dtype=dtype) for n, (dtype, dim) in enumerate(layouts)]  # type: ignore[arg-type]
    shape = num_trainers, len(tables)
    counts = np.array(
        data.draw(st.lists(st.integers(0, 4), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])), np.int64
    ).reshape(shape)
    ids = iter(range(1000))
    parts = [[[next(ids) for _ in range(counts[r, t])] for t in range(shape[1])] for r in range(shape[0])]
    received = np.array([each for rank in parts for table in rank for each in table], np.uint64)
    groups = TableGroups.of(tables)
    joined = JoinedIds.join(received, counts, groups)
    of_tables = [[each for rank in parts for each in rank[t]] for t in range(shape[1])]
    assert [joined.ids[slice(*joined.offsets[t : t + 2])].tolist() for t in range(shape[1])] == of_tables
    assert joined.tables().tolist() == [t for t, each in enumerate(of_tables) for _ in each]
    for group, members in enumerate(groups.tables):
        assert {layouts[t] for t in members} == {groups.layouts[group]}
        lines = [each for rank in parts for t in members for each in rank[t]]  # what an exchange carries of the group
        at = np.isin(joined.tables(), members)
        assert [lines[line] for line in joined.lines[at]] == joined.ids[at].tolist()
        assert groups.counts(counts)[group] == [sum(len(rank[t]) for t in members) for rank in parts]
