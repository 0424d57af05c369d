"""Trainers compare their calls: one that leaves out a call is found by all of them, at once and with the same error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import DEADLINE_SECONDS
from satrap import Inputs
from satrap.errors import StreamError
from satrap.train.joint_batches import JointBatches
from satrap.train.joint_calls import Call, JointCall, require_same

CALLS = st.builds(
    JointCall, st.sampled_from(Call), st.integers(0, 3), st.integers(0, 3), st.tuples(*[st.integers(-1, 9)] * 4)
)
INPUTS = Inputs(names=("a",), values=np.zeros(1, np.uint64), batch_size=1)


@given(st.lists(CALLS, min_size=1, max_size=5))
def test_calls_differ_by_their_kind_and_batch(calls: list[JointCall]) -> None:
    """Not by the shapes of batches."""
    assert [JointCall.parse(each.line()) for each in calls] == calls
    made = {(each.call, each.number) for each in calls}
    if len(made) == 1:
        require_same(calls)
        return
    with pytest.raises(StreamError, match=r"^step \d+: .*, but .*start all trainers again") as found:
        require_same(calls)
    named = str(found.value).split(". In each")[0]
    assert sum(named.count(what) for what in ("trainer ", "trainers ")) == len(made)


class Together:
    """Exchanges numbers between threads."""

    def __init__(self, num: int) -> None:
        self._numbers: list[Any] = [None] * num
        self._barrier = threading.Barrier(num)

    def of(self, rank: int) -> Callable[..., list[list[int]]]:
        def exchange(numbers: list[int], *, patient: bool) -> list[list[int]]:
            self._numbers[rank] = numbers
            self._barrier.wait(DEADLINE_SECONDS)
            found = list(self._numbers)
            self._barrier.wait(DEADLINE_SECONDS)
            return found

        return exchange


def train(joint: JointBatches, loop: list[str], left_out: int | None) -> str:
    """Make the calls of a loop but one; return the error."""
    batch: Any = None
    try:
        for number, what in enumerate([*loop, "leave"]):
            if number == left_out:
                continue
            if what == "take":
                if joint.must_compare_request:
                    joint.request()
                batch = SimpleNamespace(inputs=INPUTS, step=number)
                assert joint.take(batch, is_last=False) is not None
            elif what in ("use", "step"):
                getattr(joint, what)(batch)
            elif what != "leave" or joint.may_be_awaited:
                getattr(joint, what)()
    except StreamError as error:
        for call in (joint.save, joint.evaluate, joint.request):
            with pytest.raises(StreamError, match="In each of these calls") as again:
                call()
            assert str(again.value) == str(error)
        assert not joint.may_be_awaited
        return str(error)
    return ""


@given(
    st.lists(st.sampled_from([["use", "step"], ["use", "step", "save"], ["use"], ["evaluate"], []]), max_size=4),
    st.integers(2, 3),
    st.data(),
)
def test_a_trainer_that_leaves_out_a_call_is_found_by_all(
    batches: list[list[str]], num: int, data: st.DataObject
) -> None:
    loop = [what for each in batches for what in ("take", *each)]
    differing = data.draw(st.integers(0, num - 1))
    possible = [number for number, what in enumerate(loop) if what != "take"]
    left_out = data.draw(st.sampled_from([None, *possible]))
    together, errors = Together(num), [""] * num

    def run(rank: int) -> None:
        joint = JointBatches(iter([]), ("a",), together.of(rank), rank, lambda _: None)
        errors[rank] = train(joint, loop, left_out if rank == differing else None)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(errors)) == 1 and bool(errors[0]) == (left_out is not None)
    if left_out is not None:
        assert f"trainer {differing} " in errors[0] or num == 2 or f", {differing} " in errors[0], errors
