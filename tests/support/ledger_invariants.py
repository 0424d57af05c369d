"""The invariants of a `BatchLedger`, as equations over its parts; for tests, after each event."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from satrap.train.ledger import _IN_LOOP, _WITHOUT_ROWS, BatchLedger, Event, State

_NOT_RETURNED = (State.READ, State.LOOKED_UP)


def check(ledger: BatchLedger[Any]) -> None:
    """Assert what the docstring of `BatchLedger` says of one moment."""
    unsettled = list(ledger._unsettled.values())
    first_step = ledger.step_of(0)
    assert [batch.number for batch in unsettled] == sorted(ledger._unsettled)
    assert all(batch.step == first_step + batch.number // ledger.accumulate for batch in unsettled)
    not_started = [batch for batch in unsettled if batch.state in _WITHOUT_ROWS and batch is not ledger.looking_up]
    assert list(ledger.to_look_up) == not_started == unsettled[len(unsettled) - len(not_started) :]
    not_returned = [batch for batch in unsettled if batch.state in _NOT_RETURNED]
    assert list(ledger._to_return) == not_returned == unsettled[len(unsettled) - len(not_returned) :]
    assert ledger.in_loop == [batch for batch in unsettled if batch.state in _IN_LOOP]
    open_steps = {batch.step for batch in unsettled[: len(unsettled) - len(not_started)]}
    assert max(open_steps, default=0) - min(open_steps, default=0) <= ledger.staleness, "a bounded number of open steps"
    submitted = {id(batch) for update in ledger.updates for batch in update.batches}
    assert submitted == {id(batch) for batch in unsettled if batch.state is State.SUBMITTED}
    resolved = [batch.is_resolved for batch in ledger.to_look_up]
    assert resolved == sorted(resolved, reverse=True), "the next one is resolved only if all before it are"
    assert ledger.offered is None or ledger.offered is ledger._to_return[0]
    assert max(ledger.seen, default=0) <= ledger.staleness


@dataclass
class _Tally:
    """The batches with rows of one ledger so far."""

    read: int = 0
    updated: int = 0
    trains: bool = False
    """Whether a batch was used, submitted or dropped, which an evaluation never does."""

    def add(self, event: Event, batches: tuple[Any, ...], cause: str) -> None:
        """Count the batches of an event that was handled."""
        with_rows = [batch for batch in batches if batch.has_rows]
        self.read += len(with_rows) * (event is Event.READ)
        if event is Event.SETTLED and not cause:
            self.updated += sum(Event.SUBMITTED in batch.story for batch in with_rows)
        self.trains |= bool(batches) and (event in (Event.USED, Event.SUBMITTED) or bool(cause))

    def check(self, ledger: BatchLedger[Any]) -> None:
        """Assert that each batch that was read is unsettled, or updated, or dropped for a cause."""
        unsettled = sum(batch.has_rows for batch in ledger._unsettled.values())
        settled = self.updated + ledger.dropped.total()
        assert not self.trains or self.read == unsettled + settled, f"{self}, {unsettled=}, dropped {ledger.dropped}"


@dataclass
class Checks:
    """What was checked."""

    events: Counter[str] = field(default_factory=Counter)
    """The number of events by name."""
    failures: list[AssertionError] = field(default_factory=list)
    """The failures, which a stream that is closed after an error may have discarded."""


@contextmanager
def checked() -> Iterator[Checks]:
    """Check every ledger after each event, and that each batch is settled once; raise the first failure at the end."""
    checks, handle = Checks(), BatchLedger.handle
    tallies: WeakKeyDictionary[BatchLedger[Any], _Tally] = WeakKeyDictionary()

    def checked_handle(ledger: BatchLedger[Any], event: Event, *batches: Any, cause: str = "") -> Any:
        actions = handle(ledger, event, *batches, cause=cause)
        checks.events[event.value] += len(batches)
        tally = tallies.setdefault(ledger, _Tally())
        tally.add(event, batches, cause)
        try:
            check(ledger)
            tally.check(ledger)
            assert all(batch.story.count(Event.SETTLED) <= 1 for batch in batches)
        except AssertionError as failure:
            checks.failures.append(failure)
            raise
        return actions

    with patch.object(BatchLedger, "handle", checked_handle):
        yield checks
    if checks.failures:
        raise checks.failures[0]


def run_jobs(main: Callable[..., None]) -> None:
    """Run a job for each line of the input, as `Trainers` sends them, and check all ledgers meanwhile."""
    with checked():
        for line in sys.stdin:
            main(*json.loads(line))
