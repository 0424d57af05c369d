"""The invariants of a `BatchLedger`, as equations over its parts; for tests, after each event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from satrap.train.ledger import _IN_LOOP, _WITHOUT_ROWS, BatchLedger, Event, State

_NOT_RETURNED = (State.READ, State.LOOKED_UP)


def check(ledger: BatchLedger[Any]) -> None:
    """Assert what the docstring of `BatchLedger` says."""
    unsettled = list(ledger._unsettled.values())
    first_step = ledger.step_of(0)
    assert [each.number for each in unsettled] == sorted(ledger._unsettled)
    assert all(each.step == first_step + each.number // ledger.accumulate for each in unsettled)
    not_started = [each for each in unsettled if each.state in _WITHOUT_ROWS and each is not ledger.looking_up]
    assert list(ledger.to_look_up) == not_started == unsettled[len(unsettled) - len(not_started) :]
    not_returned = [each for each in unsettled if each.state in _NOT_RETURNED]
    assert list(ledger._to_return) == not_returned == unsettled[len(unsettled) - len(not_returned) :]
    assert ledger.in_loop == [each for each in unsettled if each.state in _IN_LOOP]
    open_steps = {each.step for each in unsettled[: len(unsettled) - len(not_started)]}
    assert max(open_steps, default=0) - min(open_steps, default=0) <= ledger.staleness, "a bounded number of open steps"
    submitted = {id(each) for update in ledger.updates for each in update.batches}
    assert submitted == {id(each) for each in unsettled if each.state is State.SUBMITTED}
    resolved = [each.is_resolved for each in ledger.to_look_up]
    assert resolved == sorted(resolved, reverse=True), "the next one is resolved only if all before it are"
    assert ledger.offered is None or ledger.offered is ledger._to_return[0]
    assert max(ledger.seen, default=0) <= ledger.staleness


@contextmanager
def checked() -> Iterator[Counter[str]]:
    """Check every ledger after each event, and that each batch is settled once; yield the number of events by name."""
    events: Counter[str] = Counter()
    handle = BatchLedger.handle

    def checked_handle(ledger: BatchLedger[Any], event: Event, *batches: Any, cause: str = "") -> Any:
        actions = handle(ledger, event, *batches, cause=cause)
        events[event.value] += len(batches)
        check(ledger)
        assert all(each.story.count(Event.SETTLED) <= 1 for each in batches)
        return actions

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BatchLedger, "handle", checked_handle)
        yield events
