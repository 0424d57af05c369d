"""Which calls a server admits, against a table of the rules, and how exclusive calls wait for the others.

No server: a state that only has what the decision needs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.errors import AttemptError, ConfigError, MovedError, NotReadyError, SatrapError
from satrap.rpc import Origin
from satrap.server.call_fence import CallFence
from satrap.server.protocol import NO_ATTEMPT
from satrap.server.server_log import ServerLog, _step
from satrap.server.state import FencingToken, ServerState
from waiting import DEADLINE_SECONDS, wait_until


@dataclass
class FakeEngine:
    attempt: int = 2
    latest_step: int = 7
    begun: list[int] = field(default_factory=list)

    def begin_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.begun.append(attempt)


@dataclass
class FakeState:
    has_handshake: bool = True
    owns_nothing: bool = False
    engine: FakeEngine = field(default_factory=FakeEngine)
    shard_map: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(version=5))


class WatchedCondition(threading.Condition):
    """Counts the threads that wait."""

    num_waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.num_waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.num_waiting -= 1


def fence_of(state: FakeState | None) -> CallFence:
    fence = CallFence()
    fence.condition = WatchedCondition()
    fence.state = cast(ServerState | None, state)
    return fence


def num_waiting(fence: CallFence) -> int:
    return cast(WatchedCondition, fence.condition).num_waiting


def refusal(state: FakeState | None, origin: Origin | None, reads: bool) -> type[SatrapError] | None:
    """The rules, in the order in which a caller learns of them."""
    is_reader = reads and origin is not None and origin.attempt == NO_ATTEMPT
    if state is None or (not state.has_handshake and not is_reader):
        return NotReadyError
    if origin is None:
        return None
    follows = state.owns_nothing and origin.attempt > state.engine.attempt
    if not is_reader and not follows and origin.attempt != state.engine.attempt:
        return AttemptError
    return None if origin.map_version == state.shard_map.version else MovedError


STATES = st.none() | st.builds(FakeState, st.booleans(), st.booleans())
ORIGINS = st.none() | st.builds(Origin, attempt=st.integers(0, 4), map_version=st.integers(4, 6))


@given(STATES, ORIGINS, st.booleans())
def test_which_calls_are_admitted(state: FakeState | None, origin: Origin | None, reads: bool) -> None:
    wanted, fence = refusal(state, origin, reads), fence_of(state)
    if wanted is None:
        with fence.admit(origin, reads=reads) as admitted:
            assert cast(Any, admitted) is state and fence._running == 1
    else:
        with pytest.raises(wanted), fence.admit(origin, reads=reads):
            pytest.fail("the call was admitted")
    assert fence._running == 0
    if state is not None:  # only a newer attempt that the call brought has begun, and once
        assert state.engine.begun == [each for each in [state.engine.attempt] if each != 2]
        newer = origin is not None and origin.attempt > 2 and state.owns_nothing and state.has_handshake
        assert state.engine.begun == ([origin.attempt] if newer and origin is not None else [])


@pytest.mark.parametrize(
    ("origin", "error", "text"),
    [
        (Origin(attempt=1, map_version=5), AttemptError, "found a call of attempt 1; .*, 2: this process was replaced"),
        (Origin(attempt=3, map_version=5), AttemptError, "of attempt 3; .*, 2: the server was restarted without its"),
        (Origin(attempt=2, map_version=4), MovedError, "a call of bucket map 4; expected one of the server's, 5: take"),
    ],
)
def test_a_refusal_says_what_the_caller_does_next(origin: Origin, error: type[SatrapError], text: str) -> None:
    with pytest.raises(error, match=text), fence_of(FakeState()).admit(origin):
        pytest.fail("the call was admitted")


def test_a_state_is_required_before_and_after_the_handshake() -> None:
    for fence in (CallFence(), fence_of(FakeState(has_handshake=False))):
        with pytest.raises(NotReadyError, match="expected a handshake: call hello first"):
            fence.require_state()
    state = FakeState(has_handshake=False)
    assert cast(Any, fence_of(state).require_state(needs_handshake=False)) is state


@given(st.integers(0, 3), st.integers(0, 3))
def test_a_newer_fencing_token_excludes_older_coordinators(held: int, called: int) -> None:
    fence = fence_of(FakeState())
    fence.fencing_token = FencingToken(held, 1)
    if called >= held:
        fence.require_fencing_token(Origin(step=called))
    else:
        with pytest.raises(ConfigError, match=f"it holds fencing token {held}, this one {called}; wait"):
            fence.require_fencing_token(Origin(step=called))


def test_a_server_that_knows_no_coordinator_accepts_any() -> None:
    CallFence().require_fencing_token(Origin(step=0))


def test_the_log_follows_the_state_and_keeps_no_server_alive() -> None:
    fence = CallFence()
    log = ServerLog(fence)
    step = partial(_step, ref(log))
    assert step() is None
    fence.state = cast(ServerState, FakeState())
    assert step() == 7
    del log
    assert step() is None


def test_the_seconds_of_admitted_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a call that fails; a migration spares servers that are busy."""
    clock = itertools.accumulate([10.0, 0.5, 10.0, 0.25])  # two calls, of 0.5 and 0.25 s
    monkeypatch.setattr("satrap.server.call_fence.time.perf_counter", lambda: next(clock))
    fence = fence_of(FakeState())
    assert fence.work_seconds == 0.0
    with fence.admit(None):
        pass
    with pytest.raises(ZeroDivisionError), fence.admit(None):
        raise ZeroDivisionError
    assert fence.work_seconds == 0.75 and fence._running == 0


@contextmanager
def thread(run: Callable[[], None]) -> Iterator[threading.Thread]:
    made = threading.Thread(target=run)
    made.start()
    yield made
    made.join(DEADLINE_SECONDS)
    assert not made.is_alive()


def test_an_exclusive_call_waits_for_admitted_calls_and_keeps_others_waiting() -> None:
    """Two calls run when two exclusive ones and a further call arrive: each waits for those before."""
    fence, order = fence_of(FakeState()), list[str]()
    leave = [threading.Event(), threading.Event()]

    def admitted(name: str, until: threading.Event | None = None) -> None:
        with fence.admit(None):
            order.append(f"{name} begins")
            assert until is None or until.wait(DEADLINE_SECONDS)
            order.append(f"{name} ends")

    def exclusive(name: str) -> None:
        with fence.exclusive():
            order.append(name)

    with thread(lambda: admitted("first", leave[0])), thread(lambda: admitted("second", leave[1])):
        wait_until(lambda: len(order) == 2)
        with thread(lambda: exclusive("exclusive")):
            wait_until(lambda: num_waiting(fence) == 1)
            with thread(lambda: exclusive("another")), thread(lambda: admitted("late")):
                wait_until(lambda: num_waiting(fence) == 3)
                assert len(order) == 2
                for event, name in zip(leave, ("first", "second"), strict=True):
                    event.set()
                    wait_until(lambda name=name: f"{name} ends" in order)  # type: ignore[misc]
    assert order[2:4] == ["first ends", "second ends"], "the exclusive call waits for both"
    assert order[4] == "exclusive" and sorted(order[5:]) == ["another", "late begins", "late ends"]


def test_an_exclusive_call_that_fails_lets_others_run() -> None:
    fence = fence_of(FakeState())
    with pytest.raises(ZeroDivisionError), fence.exclusive():
        raise ZeroDivisionError
    with fence.admit(None):
        assert fence._running == 1


def test_further_calls_do_not_delay_a_second_exclusive_call() -> None:
    """A call that is admitted between two exclusive ones delays the second, and nothing that comes later does."""
    fence, begun, leave, order = fence_of(FakeState()), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        with fence.condition:  # else the second could begin before the call below
            with fence.exclusive():
                order.append("first")
            call = fence.admit(None)
            call.__enter__()
        begun.set()
        assert leave.wait(DEADLINE_SECONDS)
        call.__exit__(None, None, None)

    def second() -> None:
        with fence.exclusive():
            order.append("second")

    running = fence.admit(None)
    running.__enter__()
    with thread(first):
        wait_until(lambda: num_waiting(fence) == 1)
        with thread(second):
            wait_until(lambda: num_waiting(fence) == 2)
            running.__exit__(None, None, None)
            assert begun.wait(DEADLINE_SECONDS)
            wait_until(lambda: fence._paused)
            assert order == ["first"]
            leave.set()
    assert order == ["first", "second"]
