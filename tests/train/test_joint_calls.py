"""Trainers compare their calls: one that leaves out a call is found by all of them, at once and with the same error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from satrap import Inputs
from satrap.errors import StreamError
from satrap.train.joint_batches import JointBatches
from satrap.train.joint_calls import Call, JointCall, require_same
from trainer_threads import TrainerThreads

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


def make_calls(
    joint: JointBatches, joint_size: int, loop: list[str], ends: str, left_out: int | None, read_ahead: int
) -> str:
    """Make the calls of a loop but one; return the error."""
    batch: Any = None
    read: deque[Inputs] = deque()
    try:
        for number, what in enumerate([*loop, ends]):
            if number == left_out:
                continue
            if what == "take":
                if joint.must_compare_request:
                    joint.request()
                while len(read) <= read_ahead:
                    read.append(next(joint))
                leaf = torch.zeros(1, requires_grad=True)
                batch = SimpleNamespace(inputs=read.popleft(), step=number, leaves=[leaf])
                step = joint.take(batch, is_last=False)
                assert step is not None and step.num_samples == batch.inputs.batch_size * joint_size
                joint.watch(batch)
            elif what == "backward":
                batch.leaves[0].sum().backward()
            elif what == "use":
                joint.use(batch)
            elif what == "step":
                joint.step(batch, waits=False)
            elif what == "announce_end":
                joint.announce_end()  # waits for none
                joint.announce_end()  # as after the error of another trainer
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


BATCH = ["use", "backward", "step"]
UNAWAITED = st.sets(st.sampled_from([Call.NEXT, Call.USE, Call.STEP]))


@given(
    st.lists(
        st.sampled_from([BATCH, BATCH, [*BATCH, "save"], ["use", "step"], ["use"], ["evaluate"], ["resume"], []]),
        max_size=5,
    ),
    st.integers(2, 3),
    st.sampled_from(["leave", "announce_end"]),
    st.data(),
)
def test_a_trainer_that_leaves_out_a_call_is_found_by_all(
    batches: list[list[str]], num: int, ends: str, data: st.DataObject
) -> None:
    """Whichever calls wait for no other trainer, and however far each of them has read."""
    loop = [what for each in batches for what in ("take", *each)]
    differing = data.draw(st.integers(0, num - 1))
    possible = [number for number, what in enumerate(loop) if what != "take"]
    left_out = data.draw(st.sampled_from([None, *possible]))
    unawaited = data.draw(st.lists(UNAWAITED, min_size=num, max_size=num))
    ahead = data.draw(st.lists(st.integers(0, 2), min_size=num, max_size=num))
    trainers = TrainerThreads(num)

    def run(rank: int) -> str:
        exchange = trainers.exchange_of(rank)
        joint = JointBatches(repeat(INPUTS), ("a",), exchange, rank, lambda _: None, unawaited[rank])
        return make_calls(joint, num, loop, ends, left_out if rank == differing else None, ahead[rank])

    errors = trainers.run(run)
    assert len(set(errors)) == 1 and bool(errors[0]) == (left_out is not None)
    if left_out is not None:
        assert f"trainer {differing} " in errors[0] or num == 2 or f", {differing} " in errors[0], errors


def test_a_loop_with_staleness_waits_for_others_in_the_backward_pass_alone() -> None:
    waits: list[Call] = []

    def exchange(numbers: Sequence[int], *, patient: bool) -> Callable[[], list[Sequence[int]]]:
        def receive() -> list[Sequence[int]]:
            waits.append(Call(numbers[0]))
            return [numbers, numbers]

        return receive

    joint = JointBatches(repeat(INPUTS), ("a",), exchange, 0, lambda _: None, {Call.NEXT, Call.USE, Call.STEP})
    for number in range(5):
        leaf = torch.zeros(1, requires_grad=True)
        batch: Any = SimpleNamespace(inputs=next(joint), step=number + 1, leaves=[leaf])
        if number == 0:
            next(joint)  # later ones are read before the backward pass of the one before them
        assert joint.take(batch, is_last=False) is not None
        joint.watch(batch)
        joint.use(batch)
        if number >= 2:
            assert waits == []
        leaf.sum().backward()
        if number >= 3:
            assert waits == [Call.STEP, Call.NEXT, Call.USE, Call.BACKWARD]
        waits.clear()
        joint.step(batch, waits=number == 4)
        assert waits == [Call.STEP] * (number in (0, 1, 4))
        waits.clear()
