"""The service's ledger and the caller's schedule against plain models, without a socket or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from satrap.errors import ConfigError
from satrap.rpc.header import MAX_FRAMES, Header, Kind
from satrap.rpc.ledger import Admission, Ledger, Limits, Request
from satrap.rpc.schedule import Schedule

LIMITS = Limits(max_requests=4, max_bytes=100)


def header(client: int, call: int, num_bytes: int = 1, deadline_ms: int = 1000) -> Header:
    return Header(kind=Kind.REQUEST, method=0, client=client, call=call, body_bytes=num_bytes, deadline_ms=deadline_ms)


class LedgerMachine(RuleBasedStateMachine):
    """A model of the ledger that searches plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.now = Ledger(LIMITS), 0.0
        self.queued: list[tuple[tuple[int, int], int, float]] = []
        self.running: dict[tuple[int, int], tuple[Request, int]] = {}
        self.routes: dict[int, bytes] = {}
        self.num_routes = self.num_expired = 0
        self.num_arrived = self.num_duplicates = self.num_busy = self.num_dropped = 0
        self.is_closed = False

    def is_full(self, num_bytes: int) -> bool:
        used = sum(size for _, size, _ in self.queued) + sum(size for _, size in self.running.values())
        return len(self.queued) + len(self.running) == LIMITS.max_requests or used + num_bytes > LIMITS.max_bytes

    @rule(client=st.integers(1, 3), call=st.integers(1, 3), num_bytes=st.integers(0, 60), ms=st.integers(1, 40))
    def arrive(self, client: int, call: int, num_bytes: int, ms: int) -> None:
        self.num_routes += 1
        self.routes[client] = route = b"%d" % self.num_routes
        name, until = (client, call), self.now + ms / 1000
        admission = self.ledger.arrive(header(client, call, num_bytes, ms), (), route, self.now)
        self.num_duplicates += admission is Admission.DUPLICATE
        self.num_busy += admission is Admission.BUSY
        self.num_arrived += admission is Admission.QUEUED
        if name in self.running:
            assert admission is Admission.DUPLICATE
        elif any(each == name for each, _, _ in self.queued):
            assert admission is Admission.DUPLICATE
            self.queued = [(n, b, max(u, until)) if n == name else (n, b, u) for n, b, u in self.queued]
        else:
            if self.is_full(num_bytes) and not self.is_closed:
                alive = [each for each in self.queued if self.now < each[2]]
                self.num_expired += len(self.queued) - len(alive)
                self.queued = alive
            assert admission is (Admission.BUSY if self.is_full(num_bytes) or self.is_closed else Admission.QUEUED)
            if admission is Admission.QUEUED:
                self.queued.append((name, num_bytes, until))

    @rule()
    def start_next(self) -> None:
        while self.queued and self.queued[0][2] <= self.now:
            del self.queued[0]
            self.num_expired += 1
        request = self.ledger.start_next(self.now)
        assert (request is None) == (not self.queued)
        if request is not None:
            name, num_bytes, _ = self.queued.pop(0)
            assert request.name == name and request.started_at == self.now
            self.running[name] = request, num_bytes

    @precondition(lambda self: self.running)
    @rule(data=st.data(), sent=st.booleans())
    def finish(self, data: st.DataObject, sent: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        request, _ = self.running.pop(name)
        assert self.ledger.finish(request) == self.routes[name[0]]
        assert self.ledger.finish(request) is None
        if not sent:
            self.ledger.record_unsent()

    @rule(ms=st.integers(1, 30))
    def time_passes(self, ms: int) -> None:
        self.now += ms / 1000

    @precondition(lambda self: self.num_routes > 8)
    @rule()
    def close(self) -> None:
        self.ledger.drop_queued()
        self.num_dropped += len(self.queued)
        self.is_closed = True
        self.queued.clear()

    @invariant()
    def agree(self) -> None:
        self.ledger.check()
        assert self.ledger.num_queued == len(self.queued)
        assert self.ledger.num_running == len(self.running)
        assert self.ledger.closed == self.is_closed
        counts = self.ledger.to_dict()
        assert counts["queued"] == len(self.queued) and counts["running"] == len(self.running)
        assert counts["arrived"] == self.num_arrived and counts["expired"] == self.num_expired
        assert counts["duplicates"] == self.num_duplicates and counts["busy"] == self.num_busy
        assert counts["dropped"] == self.num_dropped
        others = ("bad", "failed", "received_bytes", "sent_bytes")  # the service counts these
        assert not any(counts[each] for each in others)

    def teardown(self) -> None:
        self.ledger.drop_queued()
        self.ledger.drop_running()
        self.ledger.check()
        assert self.ledger.open_bytes == self.ledger.num_running == self.ledger.num_queued == 0
        assert all(self.ledger.finish(request) is None for request, _ in self.running.values())


TestLedger = LedgerMachine.TestCase


@pytest.mark.parametrize(
    ("name", "high"),
    [
        ("max_requests", 1 << 20),
        ("max_bytes", 1 << 62),
        ("max_frame_bytes", 1 << 62),
        ("max_frames", MAX_FRAMES),
    ],
)
def test_limits_are_checked(name: str, high: int) -> None:
    for value in (0, -1, 1.5, high + 1, 2**63):
        with pytest.raises(ConfigError, match=f"Limits: {name} is"):
            Limits(**{name: value})  # type: ignore[arg-type]
    for value in (1, high):
        assert getattr(Limits(**{name: value}), name) == value


@pytest.mark.parametrize("deadline_ms", [1, 1000, 123_456])
def test_a_request_expires_at_its_deadline_and_not_before(deadline_ms: int) -> None:
    ledger, end = Ledger(LIMITS), 5.0 + deadline_ms / 1000
    for call in (1, 2):
        ledger.arrive(header(1, call, deadline_ms=deadline_ms), (), b"", 5.0)
    request = ledger.start_next(end - 0.0001)
    assert request is not None and request.name == (1, 1)
    assert ledger.start_next(end) is None and ledger.counts.expired == 1


def test_a_closed_ledger_refuses_what_would_fit() -> None:
    """Also a request that replaces one whose deadline has passed."""
    ledger = Ledger(LIMITS)
    assert ledger.arrive(header(1, 1), (), b"", 0.0) is Admission.QUEUED
    ledger.drop_queued()
    assert ledger.arrive(header(1, 1), (), b"", 0.0) is Admission.BUSY
    assert ledger.to_dict() | {"arrived": 1, "dropped": 1, "busy": 1} == ledger.to_dict()


@given(
    st.lists(st.tuples(st.sampled_from(["send", "busy", "pass", "working"]), st.floats(0.0, 1.0)), max_size=60),
    st.floats(0.1, 20.0),
    st.floats(0.01, 5.0),
)
def test_a_schedule_keeps_its_invariants(events: list[tuple[str, float]], deadline: float, retry: float) -> None:
    schedule, now = Schedule(deadline=deadline, retry_seconds=retry, due=0.0), 0.0
    last_sent, refused, pauses = -1e9, False, []
    assert schedule.is_due(0.0)
    for kind, amount in events:
        if kind == "pass":
            now += schedule.wait(now) * 1.0001 if amount > 0.5 else amount
        elif kind == "busy" and schedule.num_sent:
            schedule.record_busy(now, amount)
            refused = True
            pauses.append((schedule.due - now) / (0.5 + amount))
        elif kind == "working":
            schedule.record_working(now)
        elif schedule.is_due(now):
            assert refused or now >= last_sent + retry
            schedule.record_sent(now)
            last_sent, refused = now, False
            assert not schedule.is_due(now)
        assert not (schedule.is_due(now) and schedule.is_expired(now))
        assert 0.0 <= schedule.wait(now) <= max(0.0, deadline - now)
    assert schedule.is_expired(now) == (now >= deadline)
    assert pauses == pytest.approx([min(0.005 * 2**i, 0.5) for i in range(len(pauses))])


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 1.9)), max_size=40), st.floats(2.0, 20.0))
def test_a_patient_call_ends_after_silence_and_not_before(events: list[tuple[bool, float]], patience: float) -> None:
    """The model is the time of the last reply."""
    now, last_reply = 0.0, 0.0
    patient = Schedule(deadline=patience, retry_seconds=1.0, due=0.0, patience=patience)
    other = Schedule(deadline=patience, retry_seconds=1.0, due=0.0)
    for replies, seconds in events:
        now += seconds
        for each in (patient, other):
            each.observe(now)
        if patient.is_expired(now):
            break
        if replies:
            patient.record_working(now)
            other.record_working(now)
            last_reply = now
    assert patient.deadline == pytest.approx(last_reply + patience)
    assert other.deadline == patience


def test_busy_pauses_double_up_to_half_a_second() -> None:
    schedule, pauses = Schedule(deadline=100.0, retry_seconds=1.0, due=0.0), []
    assert (schedule.num_sent, schedule.num_busy, schedule.num_working) == (0, 0, 0)
    schedule.record_sent(0.0)
    schedule.record_working(0.0)
    for _ in range(9):
        schedule.record_busy(0.0, 0.5)
        pauses.append(schedule.due)
    assert pauses == pytest.approx([0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5])
    assert (schedule.num_sent, schedule.num_busy, schedule.num_working) == (1, 9, 1)


@pytest.mark.parametrize(("away", "deadline"), [(2.0, 10.0), (2.25, 12.25)])
def test_gaps_of_up_to_two_seconds_count_as_waiting(away: float, deadline: float) -> None:
    schedule = Schedule(deadline=10.0, retry_seconds=2.0, due=0.0)
    schedule.observe(1.0)
    schedule.observe(1.0 + away)
    assert schedule.deadline == deadline


def test_time_that_was_not_observed_does_not_count() -> None:
    """The caller was suspended for 100 s, and its answer may be in flight."""
    schedule = Schedule(deadline=10.0, retry_seconds=2.0, due=0.0)
    for now in (0.0, 1.0, 2.5, 102.5):
        schedule.observe(now)
    assert not schedule.is_expired(102.5) and schedule.is_expired(110.0)
    assert schedule.wait(102.5) == 0.0 and schedule.is_due(102.5)
