"""The life of batches in several trainers, threads of this process: random loops over uneven data, which look ahead,
drop, accumulate and end early. All trainers make the same calls, each on its own rows.

The oracle is the data and the calls. A batch is submitted if a step took it, else dropped for a cause. The loss of a
step is the mean over the samples of all trainers, so a row that one sample has becomes minus the number of trainers
over these samples, times the backward passes. All batches of a trainer share another row, whose value at a lookup tells
which updates the lookup saw.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from satrap import SGD, Embeddings, Inputs, StreamError, Table, Zeros
from satrap.train.embeddings import session_of
from satrap.train.joint_batches import Exchange, JointBatches
from satrap.train.joint_calls import Call
from satrap.train.ledger import BatchLedger, State
from satrap.train.stream import Stream
from trainer_threads import TrainerThreads

MOST = 3  # samples of a batch


@dataclass
class Case:
    sizes: list[list[int]]
    """The samples in each batch, by trainer."""
    calls: list[tuple[str, int]]
    """What all loops call, and for which of the possible batches."""
    ends: bool
    """Whether the loops then train on all that is left, or end early."""
    unawaited: list[set[Call]]
    staleness: int
    accumulate: int
    deterministic: bool
    overlap: bool

    def of_step(self, number: int) -> list[int]:
        """Return the samples of each trainer's batch with this number."""
        return [sizes[number] if number < len(sizes) else 0 for sizes in self.sizes]


CASES = st.builds(
    Case,
    sizes=st.lists(st.lists(st.integers(1, MOST), min_size=0, max_size=9), min_size=2, max_size=3),
    calls=st.lists(
        st.tuples(
            st.sampled_from(["next", "next", "use", "use", "backward", "backward", "step", "zero_grad", "release"]),
            st.integers(0, 3),
        ),
        min_size=15,
        max_size=40,
    ),
    unawaited=st.lists(st.sets(st.sampled_from([Call.NEXT, Call.USE, Call.STEP])), min_size=3, max_size=3),
    staleness=st.integers(0, 2),
    accumulate=st.integers(1, 2),
)


@dataclass(eq=False)
class Returned:
    """A batch that the loop received."""

    number: int
    batch: Any
    """None once the loop has released it."""
    record: Any
    leaf: Any = None
    gradient: int = 0
    is_submitted: bool = False

    @property
    def size(self) -> int:
        return int(self.record.inputs.batch_size)

    @property
    def is_settled(self) -> bool:
        return self.is_submitted or self.record.drop_reason is not None

    @property
    def awaits_backward(self) -> bool:
        return self.leaf is not None and not self.gradient and not self.is_settled


class Trainer:
    """A loop that makes the calls of a case."""

    def __init__(self, case: Case, rank: int, exchange: Exchange) -> None:
        how: dict[str, Any] = {"dim": 1, "optimizer": SGD(lr=1.0), "initial": Zeros()}
        features = {"own": Table("own", **how), "shared": Table("shared", **how)}
        self.case, self.sizes = case, case.sizes[rank]
        self.embeddings = Embeddings(features, staleness=case.staleness, num_threads=1)
        self.optimizer = self.embeddings.optimizer()
        unawaited = case.unawaited[rank] - ({Call.NEXT} if case.accumulate > 1 else set())
        joint = JointBatches(self.read(), tuple(features), exchange, rank, lambda _: None, unawaited)
        ledger: Any = BatchLedger(case.staleness, accumulate=case.accumulate, deterministic=case.deterministic)
        how = {"device": torch.device("cpu"), "overlap": case.overlap, "on_hold": self.optimizer.hold}
        self.stream = Stream(joint, self.embeddings.worker, ledger, train=True, **how)
        session_of(self.embeddings)._training = self.stream
        self.batches: list[Returned] = []
        self.updates: list[tuple[int, float]] = []  # the first step of each, and what it subtracts from the shared row

    def read(self) -> Iterator[Inputs]:
        for number, size in enumerate(self.sizes):
            ids = np.append(number * MOST + np.arange(size), np.zeros(size)).astype(np.uint64)
            yield Inputs(names=("own", "shared"), values=ids, batch_size=size)

    def weight(self, one: Returned) -> float:
        sizes = self.case.of_step(one.number)
        return len(sizes) * one.size / sum(sizes)

    def run(self) -> list[Any]:
        """Make the calls; return what must be the same in all trainers."""
        made: list[Any] = []
        for what, which in self.case.calls:
            try:
                made.append(self.call(what, which))
            except StreamError as error:
                made.append(str(error))
        if self.case.ends:
            self.end()
        self.stream.close()
        self.check()
        # The last step may differ by batches that came ahead of their rows, if the loop closed its stream before a use.
        return made + [(one.record.step, one.gradient, one.is_submitted) for one in self.batches]

    def call(self, what: str, which: int) -> object:
        """Make a call, unless no batch allows it; return what it shows."""
        if what in ("next", "step", "zero_grad"):
            return getattr(self.optimizer if what == "zero_grad" else self, what)()
        if not (possible := self.possible(what)):
            return None
        one = possible[which % len(possible)]
        getattr(self, what)(one)
        return one.number

    def possible(self, what: str) -> list[Returned]:
        """Return the batches for which a call is possible. A batch of other sizes may have another weight, so it is
        refused until all that are used have had their backward passes."""
        if what == "backward":
            return [one for one in self.batches if one.leaf is not None]
        held = [one for one in self.batches if one.batch is not None]
        waiting = [self.case.of_step(one.number) for one in self.batches if one.awaits_backward and what == "use"]
        usable = (one for one in held if one.leaf is None or what == "release")
        return [one for one in usable if all(self.case.of_step(one.number) == sizes for sizes in waiting)]

    def next(self) -> bool:
        batch = next(self.stream, None)
        if batch is not None:
            self.batches.append(Returned(len(self.batches), batch, batch._in_flight))
            assert batch.step == 1 + self.batches[-1].number // self.case.accumulate
        return batch is not None

    def use(self, one: Returned) -> None:
        one.leaf = one.batch.embeddings
        if one.record.has_rows:
            seen, at_most = -float(one.leaf[0, 1].detach()), sum(shared for _, shared in self.updates)
            at_least = sum(shared for first, shared in self.updates if first < one.record.step - self.case.staleness)
            at_most = at_least if self.case.deterministic else at_most
            assert at_least - 1e-4 <= seen <= at_most + 1e-4, f"saw {seen}, expected {at_least} to {at_most}"

    def backward(self, one: Returned) -> None:
        (one.leaf.sum() / len(one.leaf)).backward()
        one.gradient += 1

    def release(self, one: Returned) -> None:
        one.batch = None

    def step(self) -> None:
        taken = [one for one in self.batches if one.gradient and not one.is_settled]
        self.optimizer.step()
        for one in taken:
            one.is_submitted = True
        if taken:
            self.updates.append((taken[0].record.step, sum(one.gradient * self.weight(one) for one in taken)))

    def end(self) -> None:
        """Drop what is left over, and train on all later batches."""
        for one in self.batches:
            if one.awaits_backward:
                self.backward(one)
            self.release(one)
        self.optimizer.zero_grad()
        while self.next():
            one = self.batches[-1]
            self.use(one)
            self.backward(one)
            if one.batch.completes_step:
                self.step()
            self.release(one)
        assert len(self.batches) == max(map(len, self.case.sizes)), "until no trainer has another batch"

    def check(self) -> None:
        """Check the outcome of each batch, the rows and the counters of a stream that is closed."""
        ids = np.arange(len(self.sizes) * MOST + 1, dtype=np.uint64)
        rows = np.zeros(len(ids))
        with_rows = [one for one in self.batches if one.record.has_rows]
        for one in self.batches:
            assert one.record.state is State.SETTLED and bool(one.record.cause) != one.is_submitted, one.record
        for one in with_rows:
            own = slice(one.number * MOST, one.number * MOST + one.size)
            rows[own] -= one.is_submitted * one.gradient * self.weight(one) / one.size
        values = self.embeddings.tables["own"].read(ids).values[:, 0]
        np.testing.assert_allclose(values, rows, atol=1e-5)
        steps = [0, *(one.record.step for one in self.batches)]
        assert self.stream.last_step == max(steps), "it depends on the loop, and not on how fast threads look up"
        counters = self.stream.counters()
        assert counters.lost == Counter(f"batches/{one.record.cause}" for one in with_rows if not one.is_submitted)
        assert sum(counters.staleness.values()) >= sum(one.record.is_used for one in with_rows)
        assert max(counters.staleness, default=0) <= self.case.staleness
        assert len(with_rows) == len(self.sizes) or not self.case.ends


@pytest.fixture(scope="module", autouse=True)
def no_warnings() -> Iterator[None]:
    """Log no warning where batches are left over."""
    logger = logging.getLogger("satrap.train")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@given(CASES)
def test_trainers_agree_on_the_life_of_each_batch(case: Case) -> None:
    num = len(case.sizes)
    threads = TrainerThreads(num)
    trainers = [Trainer(case, rank, threads.exchange_of(rank)) for rank in range(num)]
    try:
        made = threads.run(lambda rank: trainers[rank].run())
        assert all(others == made[0] for others in made), made
        shared = [trainer.embeddings.tables["shared"].read(np.zeros(1, np.uint64)).values[0, 0] for trainer in trainers]
        gradients = sum(one.gradient for one in trainers[0].batches if one.is_submitted)
        assert sum(shared) == pytest.approx(-num * gradients, abs=1e-4), "the weights of a step have the mean 1"
    finally:
        for trainer in trainers:
            trainer.embeddings.close()
