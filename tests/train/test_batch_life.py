"""The life of a batch, as a machine of hypothesis that makes random calls of a training loop: it requests batches
ahead, uses, steps, drops, releases and leaves them out, in any order, and signals interrupt its calls.

The model below says in plain Python what every loop may rely on. A batch is

    returned     by next(), in order; its rows may come later
    used         its rows were read: allowed if all steps up to step - staleness - 1 are settled
    has gradient a backward pass has reached it
    submitted    optimizer.step() has taken it: its rows are updated exactly once
    dropped      for a cause; its rows never change

and it is settled once it is submitted or dropped. Each batch has a row that no other has, whose value is minus the sum
of its gradients, and all share one row, whose value at the lookup tells which updates the lookup saw.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from interrupts import Interrupts, no_hang, raising
from satrap import SGD, Embeddings, Inputs, StreamError, Table, Zeros
from satrap.train.embeddings import session_of

NUM_IDS = 400
moments = st.one_of(st.just(0), st.just(0), st.integers(1, 400))  # 0: no signal


class Stop(BaseException):
    """Raised by the handler of a signal."""


@dataclass(eq=False)
class Modelled:
    """A batch that was returned."""

    id: int
    step: int
    batch: Any
    """None once the loop has released it."""
    leaf: Any = None
    used: bool = False
    gradient: int = 0
    settled: str = ""
    """"submitted", or the cause of its drop."""

    @property
    def may_get_gradient(self) -> bool:
        return self.gradient > 0 or (self.used and self.batch is not None)


@dataclass
class Update:
    """A step that was taken: its first batch's step, and the sum of its gradients."""

    first: int
    gradient: int


class BatchLife(RuleBasedStateMachine):
    @initialize(
        staleness=st.integers(0, 3), deterministic=st.booleans(), overlap=st.booleans(), accumulate=st.integers(1, 3)
    )
    def create(self, staleness: int, deterministic: bool, overlap: bool, accumulate: int) -> None:
        how: dict[str, Any] = {"dim": 1, "optimizer": SGD(lr=1.0), "initial": Zeros()}
        features = {"own": Table("own", **how), "shared": Table("shared", **how)}
        self.embeddings = Embeddings(features, staleness=staleness, deterministic=deterministic, num_threads=1)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = self.embeddings.optimizer(torch.optim.SGD([self.weight], lr=1.0))
        self.staleness, self.deterministic, self.overlap = staleness, deterministic, overlap
        self.rows = np.zeros(NUM_IDS)
        self.updates: list[Update] = []
        self.lost: Counter[str] = Counter()
        self.dense, self.dense_gradient = 0.0, 0.0
        self.dense_is_known = True
        self.num_ids = 0
        self.begin(accumulate, 8)

    # -- the model -----------------------------------------------------------------------------------------------------

    def unsettled(self) -> list[Modelled]:
        return [each for each in self.returned if not each.settled]

    def waiting(self) -> list[Modelled]:
        return [each for each in self.unsettled() if each.gradient]

    def drop(self, batches: list[Modelled], cause: str) -> None:
        for each in batches:
            each.settled = cause
            self.lost[f"batches/{cause}"] += 1

    def may_use(self, wanted: Modelled) -> bool:
        """Return whether the rows may be used; drop the batches that the loop has passed for that."""
        while not wanted.settled:
            before = [each for each in self.unsettled() if each.step < wanted.step - self.staleness]
            if not before:
                return True
            oldest = [each for each in before if each.step == before[0].step]
            if any(each.may_get_gradient for each in oldest):
                return False
            self.drop(oldest, "unused")
        return False

    def may_step(self) -> bool:
        steps = {each.step for each in self.waiting()}
        whole = self.ended or len(self.returned) == self.total
        return not steps & self.stepped and all(
            whole or sum(each.step == step for each in self.returned) == self.accumulate for step in steps
        )

    @property
    def has_passed_batches(self) -> bool:
        """Whether a batch was left out before a step that was taken. In a fixed order that step's update waits for it:
        what drain() then drops depends on how far the source was read."""
        return self.deterministic and any(each.step < max(self.stepped, default=0) for each in self.unsettled())

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, call: Callable[[], Any], at: int) -> Any:
        """Make a call of the loop. If a signal interrupts it, make it again, as a cell of a notebook is run again."""
        with no_hang(120.0):
            if at:
                try:
                    with raising(signal.SIGTERM, Stop()), Interrupts(at, signal.SIGTERM):
                        return call()
                except Stop as stop:
                    stop.__traceback__ = None  # it refers to batches
                self.was_interrupted = self.source_may_be_interrupted = True
            return call()

    def begin(self, accumulate: int, total: int) -> None:
        first, self.base = self.num_ids, self.embeddings.step
        self.num_ids += total
        self.accumulate, self.total = accumulate, total
        self.returned: list[Modelled] = []
        self.stepped: set[int] = set()
        self.ended = self.closed = self.was_interrupted = False
        self.source_may_be_interrupted = False  # by a step, too, which reads ahead where it has few batches
        self.num_unseen = 0

        def source() -> Iterator[Inputs]:
            for number in range(first, first + total):
                yield Inputs(names=("own", "shared"), values=np.array([number, 0], np.uint64), batch_size=1)

        self.stream = self.embeddings.stream(source(), accumulate=accumulate, overlap=self.overlap)
        self.first_id = first

    @precondition(lambda self: not self.closed)
    @rule(at=moments)
    def next(self, at: int) -> None:
        self.was_interrupted = False
        try:
            batch = self.call(lambda: next(self.stream, None), at)
        except StreamError as error:
            assert self.source_may_be_interrupted and "interrupted while its source read" in str(error), error
            self.num_unseen += 1  # the batch that was about to be returned
            self.close(0)
            return
        found = self.total if batch is None else int(batch.inputs.values[0]) - self.first_id
        if self.was_interrupted and found == len(self.returned) + 1:  # the signal came when the batch was returned
            self.record(None)
        assert found == len(self.returned)
        if batch is None:
            self.ended = True
        else:
            self.record(batch)

    def record(self, batch: Any) -> None:
        number = len(self.returned)
        step = self.base + 1 + number // self.accumulate
        assert batch is None or batch.step == step
        self.returned.append(Modelled(self.first_id + number, step, batch))

    @precondition(lambda self: any(each.batch is not None and not each.used for each in self.returned))
    @rule(data=st.data(), at=moments)
    def use(self, data: st.DataObject, at: int) -> None:
        wanted = data.draw(st.sampled_from([each for each in self.returned if each.batch and not each.used]))
        allowed = self.may_use(wanted)
        try:
            wanted.leaf = self.call(lambda: wanted.batch.embeddings, at)
        except StreamError:
            assert not allowed
            return
        assert allowed
        wanted.used = True
        seen = -float(wanted.leaf[0, 1].detach())
        settled = max(self.base + 1, wanted.step - self.staleness)  # a stream begins after all updates of earlier ones
        at_least = sum(each.gradient for each in self.updates if each.first < settled)
        at_most = at_least if self.deterministic else sum(each.gradient for each in self.updates)
        assert at_least <= seen <= at_most, f"saw {seen}, expected {at_least} to {at_most}"

    @precondition(lambda self: any(each.used for each in self.returned))
    @rule(data=st.data())
    def backward(self, data: st.DataObject) -> None:
        reached = data.draw(st.sampled_from([each for each in self.returned if each.used]))
        if reached.settled:
            with pytest.raises(StreamError, match=f"step {reached.step}: "):
                reached.leaf.sum().backward()
            return
        reached.leaf.sum().backward()
        self.weight.sum().backward()
        reached.gradient += 1
        self.dense_gradient += 1

    @precondition(lambda self: any(each.batch is not None for each in self.returned))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([each for each in self.returned if each.batch is not None])).batch = None

    @rule(at=moments)
    def step(self, at: int) -> None:
        waiting, allowed = self.waiting(), self.may_step()
        self.was_interrupted = False
        try:
            self.call(self.optimizer.step, at)
        except StreamError as error:
            is_repeated = self.stepped.intersection(each.step for each in waiting)
            why = "was already stepped with some" if is_repeated else f"of {self.accumulate} batches; call it after"
            assert not allowed and why in str(error)
            return
        assert allowed
        self.dense_is_known &= not self.was_interrupted  # an interrupted step may not have reached it, or twice
        self.dense -= self.dense_gradient
        if waiting:
            self.updates.append(Update(min(each.step for each in waiting), sum(each.gradient for each in waiting)))
        for each in waiting:
            each.settled = "submitted"
            self.rows[each.id] = -each.gradient
            self.stepped.add(each.step)

    @rule(at=moments)
    def zero_grad(self, at: int) -> None:
        self.call(self.optimizer.zero_grad, at)
        self.dense_gradient = 0.0
        self.drop(self.waiting(), "zero_grad")

    @precondition(lambda self: not self.has_passed_batches)
    @rule(at=moments, pauses=st.booleans())
    def drain(self, at: int, pauses: bool) -> None:
        """Read all rows, as a checkpoint does, or evaluate them."""
        self.call(self._pause if pauses else self.embeddings.drain, at)
        self.check()

    def _pause(self) -> None:
        with session_of(self.embeddings).pause():
            pass

    @precondition(lambda self: self.num_ids < NUM_IDS - 20)
    @rule(accumulate=st.integers(1, 3), total=st.integers(0, 12), at=moments)
    def restart(self, accumulate: int, total: int, at: int) -> None:
        """Close the stream, or let another one end it."""
        self.close(at)
        self.begin(accumulate, total)

    def close(self, at: int) -> None:
        self.call(self.stream.close, at)
        if not self.closed:
            self.closed = True
            waiting = self.waiting()
            self.drop(waiting, "unstepped" if self.ended else "closed")
            self.drop([each for each in self.unsettled() if each.used], "closed")
            self.drop(self.unsettled(), "unused")
            # A batch that came ahead of its rows, and was never used, may not have begun its step.
            last_used = max([self.base, *(each.step for each in self.returned if each.used)])
            assert last_used <= self.embeddings.step <= max([last_used, *(each.step for each in self.returned)])
            self.check_lost()
        self.check()

    def check(self) -> None:
        ids = np.arange(NUM_IDS, dtype=np.uint64)
        np.testing.assert_array_equal(self.embeddings.tables["own"].read(ids).values[:, 0], self.rows)
        shared = self.embeddings.tables["shared"].read(ids[:1]).values[0, 0]
        assert shared == -sum(each.gradient for each in self.updates)
        if self.dense_is_known:
            assert self.weight.item() == self.dense
        seen = self.embeddings.counters().staleness
        assert max(seen, default=0) <= self.staleness

    def check_lost(self) -> None:
        """Compare what was lost once a stream is closed; before, a batch that was left out may not be dropped yet."""
        found = Counter(self.embeddings.counters().lost)
        extra = found - self.lost
        assert not self.lost - found and extra.total() <= self.num_unseen and extra.keys() <= {"batches/unused"}, (
            f"lost {found}, expected {self.lost}"
        )
        self.lost = found

    def teardown(self) -> None:
        if hasattr(self, "stream"):
            self.close(0)
            self.embeddings.close()


# A signal that comes while a generator of the source is freed is swallowed, with this warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_life_of_a_batch() -> None:
    logger, profile = logging.getLogger("satrap.train"), settings()
    before = logger.level
    logger.setLevel(logging.ERROR)  # a warning is logged when batches are left over
    try:
        run_state_machine_as_test(BatchLife, settings=settings(profile, max_examples=profile.max_examples // 3))
    finally:
        logger.setLevel(before)
