"""The step barrier: parts are joined by rank in any order of arrival, and no trainer is left waiting."""

from __future__ import annotations

import numpy as np
import pytest

from satrap.errors import AttemptError
from satrap.server.step_barrier import StepBarrier, TrainerPart, concatenate_parts


def part(ids: list[list[int]], lrs: tuple[float, ...] = (0.1, 0.1)) -> TrainerPart:
    """Return a part of two tables of dims 1 and 2; an id's gradient is the id."""
    flat = [id_ for table in ids for id_ in table]
    gradients = [float(id_) for t, table in enumerate(ids) for id_ in table for _ in range(t + 1)]
    counts = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    return TrainerPart(np.array(flat, np.uint64), counts, np.array(gradients, np.float32), list(lrs))


def test_parts_are_joined_table_by_table_in_the_order_of_ranks() -> None:
    barrier = StepBarrier()
    parts = {1: part([[5], [6, 7]]), 0: part([[1, 2], [9]]), 2: part([[], [8]])}
    waiting = []
    for rank, each in parts.items():
        own, whole = barrier.arrive(4, rank, each, 3)
        waiting.append(own)
    assert whole is not None and barrier.leave(4) == waiting and not own.done()
    one = concatenate_parts(whole, [1, 2])
    assert one.ids.tolist() == [1, 2, 5, 9, 6, 7, 8] and one.offsets.tolist() == [0, 3, 7]
    assert one.gradients.tolist() == [1, 2, 5, 9, 9, 6, 6, 7, 7, 8, 8]


def test_the_rates_are_those_of_a_trainer_that_has_gradients() -> None:
    """A trainer that skips the step sends the rates that the tables have, which a schedule may have changed."""
    parts = [part([[], []]), part([[1], []], (0.5, 0.25)), part([[], []])]
    assert concatenate_parts(parts, [1, 2]).lrs == [0.5, 0.25]


def test_a_duplicate_part_replaces_the_first() -> None:
    barrier = StepBarrier()
    first = barrier.arrive(1, 0, part([[1], []]), 2)[0]
    again = barrier.arrive(1, 0, part([[3], []]), 2)[0]
    last, whole = barrier.arrive(1, 1, part([[2], []]), 2)
    assert whole is not None and [each.ids.tolist() for each in whole] == [[3], [2]]
    late, nothing = barrier.arrive(1, 1, part([[2], []]), 2)
    assert nothing is None, "the step is being applied"
    barrier.refuse(lambda: AttemptError("attempt 2 has started"))
    assert barrier.leave(1) == [first, again, last, late] and not late.done()
    assert barrier.arrive(1, 1, part([[2], []]), 2)[1] is None, "a finished step is forgotten"


def test_other_world_sizes_and_attempts_that_end() -> None:
    barrier = StepBarrier()
    waiting = barrier.arrive(1, 0, part([[1], []]), 2)[0]
    for trainer, barrier_size in ((1, 3), (2, 2)):
        with pytest.raises(ValueError, match=f"trainer {trainer} of {barrier_size}; expected one of 2"):
            barrier.arrive(1, trainer, part([[1], []]), barrier_size)
    barrier.refuse(lambda: AttemptError("attempt 2 has started"))
    assert isinstance(waiting.exception(), AttemptError)
    assert barrier.arrive(1, 0, part([[1], []]), 2)[1] is None
