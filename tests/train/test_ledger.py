"""The ledger of a stream against its two rules and invariants, over random loops, without threads or clocks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger_invariants import Checks, check
from satrap.train.ledger import BatchLedger, BatchRecord, DropTicket, Event, SkipStep, Stage, State, Update

STAGES = (Stage.UPDATE, Stage.LOOKUP, Stage.READ)


class Loop:
    """A loop that requests, uses, steps and drops batches at random, and a pipeline that does what its ledger allows,
    in any order."""

    def __init__(
        self, ledger: BatchLedger[BatchRecord], num_batches: int, rng: random.Random, drop: float, padding: int = 0
    ) -> None:
        """padding: so many of the last batches have no rows."""
        self.ledger, self.rng, self.drop, self.left, self.padding = ledger, rng, drop, num_batches, padding
        self.first = ledger.last_step + 1
        self.settled = {ledger.last_step}
        self.lookups: list[tuple[int, set[int], list[int]]] = []  # step, and what was settled and applied before
        self.applied: list[int] = []
        self.batches: list[BatchRecord] = []
        self.skipped: list[int] = []
        self.tickets: list[int] = []

    def run(self, num_calls: int = 10**9) -> None:
        calls = [self.request, self.use, self.step, self.leave_out, self.work, self.work, self.work]
        while num_calls and not (self.ledger.has_ended and not self.ledger.in_loop and not self.ledger.updates):
            num_calls -= 1
            if not any(call() for call in self.rng.sample(calls, len(calls))):
                raise AssertionError(f"nothing is allowed after {self.batches}")
            check(self.ledger)

    def request(self) -> bool:
        batch = self.ledger.offer()
        if batch is not None:
            self.ledger.handle(Event.RETURNED, batch)
            assert batch.number == len(self.batches), "in order"
            self.batches.append(batch)
        elif self.ledger.is_over and not self.ledger.has_ended:
            self.ledger.has_ended = True
        else:
            return False
        return True

    def use(self) -> bool:
        held = self.ledger.held()
        if held:
            self.ledger.handle(Event.USED, self.rng.choice(held))
        return bool(held)

    def step(self) -> bool:
        """Step any step whose batches are all used."""
        in_loop = self.ledger.in_loop
        if not in_loop:
            return False
        step = self.rng.choice(in_loop).step
        batches = [each for each in in_loop if each.step == step]
        if any(each.state is not State.USED for each in batches) or not (
            self.ledger.completes_step(batches[-1], lambda: False)
        ):
            return False
        self.ledger.require_whole_steps(batches, lambda: False)
        self.ledger.submit(Update(batches, lambda: self.applied.extend(each.step for each in batches)))
        return True

    def leave_out(self) -> bool:
        held = self.ledger.held()
        if not held or self.rng.random() >= self.drop:
            return False
        batch = self.rng.choice(held)
        for action in self.ledger.handle(Event.SETTLED, batch, cause="unused"):
            match action:
                case DropTicket(dropped):
                    self.tickets.append(dropped.number)
                case SkipStep(step):
                    self.skipped.append(step)
        self._note_settled()
        return True

    def work(self) -> bool:
        """Read, look up or update."""
        ledger = self.ledger
        stage = ledger.choose(STAGES, is_needed=True)
        if stage is None:
            stage = ledger.choose((Stage.READ,), is_needed=True)
        if stage is Stage.READ:
            if self.left:
                ledger.handle(Event.READ, BatchRecord(has_rows=self.left > self.padding))
                self.left -= 1
            else:
                ledger.is_exhausted = True
        elif stage is Stage.LOOKUP:
            batch = ledger.start_lookup()
            if self.rng.random() < 0.3:  # interrupted
                assert ledger.choose(STAGES, is_needed=False) is Stage.LOOKUP and ledger.start_lookup() is batch
            self.lookups.append((batch.step, set(self.settled), list(self.applied)))
            ledger.handle(Event.LOOKED_UP, batch)
        elif stage is Stage.UPDATE:
            ledger.start_update().apply()
            ledger.end_update()
            self._note_settled()
        return stage is not None

    def _note_settled(self) -> None:
        self.settled.update(range(self.first, self.ledger.oldest_open))


@given(
    staleness=st.integers(0, 4),
    accumulate=st.integers(1, 3),
    deterministic=st.booleans(),
    num_batches=st.integers(0, 25),
    last_step=st.sampled_from([0, 7]),
    drop=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_no_lookup_misses_more_than_the_staleness(
    staleness: int, accumulate: int, deterministic: bool, num_batches: int, last_step: int, drop: float, seed: int
) -> None:
    ledger: BatchLedger[BatchRecord] = BatchLedger(
        staleness, accumulate=accumulate, deterministic=deterministic, last_step=last_step
    )
    loop = Loop(ledger, num_batches, random.Random(seed), drop)
    loop.run()
    assert [step for step, _, _ in loop.lookups] == [last_step + 1 + i // accumulate for i in range(num_batches)]
    for step, settled, applied in loop.lookups:
        assert settled >= set(range(last_step + 1, step - staleness)), f"step {step} was looked up too early"
        if deterministic and not drop:
            assert applied == [each for each, _, _ in loop.lookups if each < step - staleness], "exactly these updates"
    causes = Counter(each.cause for each in loop.batches)
    assert {each.state for each in loop.batches} <= {State.SETTLED}
    assert causes[""] == len(loop.applied) and causes["unused"] == ledger.dropped["unused"] == len(loop.tickets)
    updated = {each.step for each in loop.batches if not each.cause}
    assert len(loop.skipped) == len(set(loop.skipped)) and not updated.intersection(loop.skipped)
    assert drop or (sum(ledger.seen.values()) == num_batches == len(loop.applied) and not loop.skipped)
    assert ledger.last_step == last_step + -(-num_batches // accumulate)


@given(
    staleness=st.integers(0, 2),
    accumulate=st.integers(1, 3),
    num_calls=st.integers(0, 60),
    padding=st.integers(0, 12),
    seed=st.integers(0, 2**32),
)
def test_a_stream_may_be_closed_at_any_time(
    staleness: int, accumulate: int, num_calls: int, padding: int, seed: int
) -> None:
    """Each batch that the loop has received ends its step, looked up or not; others are left to the next stream."""
    ledger: BatchLedger[BatchRecord] = BatchLedger(staleness, accumulate=accumulate)
    loop = Loop(ledger, 12, random.Random(seed), 0.2, padding)
    loop.run(num_calls)
    actions = ledger.handle(Event.SETTLED, *ledger.held(), cause="closed")
    actions += ledger.handle(Event.SETTLED, *list(ledger.in_loop), cause="unused")
    check(ledger)
    last_step = max([0, *(batch.step for batch in loop.batches if Event.RETURNED in batch.story)])
    assert all(action.step <= last_step for action in actions if isinstance(action, SkipStep))
    assert ledger.last_step == last_step and not ledger.in_loop
    while (batches := list(ledger._to_return)) and not batches[0].has_rows:
        ledger.handle(Event.SETTLED, batches[0])
        check(ledger)
    while ledger.updates:
        ledger.start_update()
        ledger.end_update("failed")
        check(ledger)
    assert list(ledger._unsettled.values()) == batches and ledger.last_step == last_step
    lost = Counter(batch.cause for batch in loop.batches if batch.cause and batch.has_rows)
    assert ledger.dropped == lost and all(each.state is State.SETTLED for each in loop.batches)


def test_the_staleness_seen_counts_open_steps() -> None:
    ledger: BatchLedger[BatchRecord] = BatchLedger(2, accumulate=2)
    batches = [BatchRecord(has_rows=number != 5) for number in range(7)]
    ledger.handle(Event.READ, *batches)
    while ledger.may_look_up:
        ledger.handle(Event.LOOKED_UP, ledger.start_lookup())
    assert [each.step for each in batches if each.state is State.LOOKED_UP] == [1, 1, 2, 2, 3, 3]
    assert ledger.seen == {0: 2, 1: 2, 2: 1}, "padding has no rows that may miss updates"
    ledger.handle(Event.SETTLED, *batches[2:4])
    assert not ledger.may_look_up, "step 1 is still open"
    ledger.handle(Event.SETTLED, *batches[:2])
    assert ledger.start_lookup().step == 4


def test_lookups_and_updates_may_overlap_unless_deterministic() -> None:
    assert [BatchLedger(staleness).allows_overlap for staleness in (0, 1, 4)] == [False, True, True]
    assert not any(BatchLedger(staleness, deterministic=True).allows_overlap for staleness in (0, 1, 4))


def test_an_impossible_event_tells_the_story_of_its_batch() -> None:
    ledger, batch = BatchLedger[BatchRecord](0), BatchRecord()
    ledger.handle(Event.READ, batch)
    ledger.handle(Event.LOOKED_UP, ledger.start_lookup())
    ledger.handle(Event.RETURNED, batch)
    ledger.handle(Event.SETTLED, batch, cause="unused")
    story = "batch 0 of step 1 (read, lookup started, looked up, returned, settled: unused)"
    for event in (Event.RETURNED, Event.USED, Event.SUBMITTED, Event.SETTLED):
        with pytest.raises(AssertionError) as caught:
            ledger.handle(event, batch)
        assert str(caught.value) == f"{story} is settled, and cannot be {event.value}"
    check(ledger)


def test_a_batch_that_is_dropped_during_its_lookup_keeps_its_cause() -> None:
    ledger, batches = BatchLedger[BatchRecord](0), [BatchRecord(), BatchRecord()]
    ledger.handle(Event.READ, *batches)
    ledger.handle(Event.LOOKED_UP, ledger.start_lookup())
    ledger.handle(Event.RETURNED, batches[0])
    ledger.handle(Event.RETURNED, batches[1])
    ledger.handle(Event.SETTLED, batches[0], cause="closed")
    ahead = ledger.start_lookup()
    ledger.handle(Event.SETTLED, ahead, cause="unused")
    ledger.handle(Event.LOOKED_UP, ahead)
    assert ahead.cause == "unused" and ledger.dropped == {"closed": 1, "unused": 1}


def test_the_invariants_are_checked(ledgers: Checks) -> None:
    ledger, batch = BatchLedger[BatchRecord](0), BatchRecord()
    ledger.handle(Event.READ, batch)
    ledger.to_look_up.clear()
    with pytest.raises(AssertionError) as caught:
        ledger.handle(Event.READ, BatchRecord())
    assert ledgers.events == {"read": 2} and ledgers.failures == [caught.value]
    ledgers.failures.clear()


def test_a_batch_that_a_training_stream_loses_is_noticed(ledgers: Checks) -> None:
    ledger, batches = BatchLedger[BatchRecord](1), [BatchRecord(), BatchRecord()]
    ledger.handle(Event.READ, *batches)
    for batch in batches:
        ledger.handle(Event.LOOKED_UP, ledger.start_lookup())
        ledger.handle(Event.RETURNED, batch)
    ledger.handle(Event.SETTLED, batches[0])  # as in an evaluation
    with pytest.raises(AssertionError, match="read=2, updated=0"):
        ledger.handle(Event.USED, batches[1])
    ledgers.failures.clear()
