"""The pipeline of a stream, with plain numbers in place of batches: order, bounds, errors and shutdown, in every
mode."""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc_parts import DEADLINE_SECONDS, wait_until
from satrap.errors import NonFiniteError, StreamError
from satrap.train.pipeline_stages import Update
from satrap.train.prefetch_pipeline import PrefetchPipeline
from satrap.train.staleness_gate import StalenessGate

each_way = pytest.mark.parametrize("mode", ["inline", "overlap", "remote"])


class Tables:
    """Tables that record the calls, and what each lookup saw."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.looked_up: list[int] = []
        self.seen: dict[int, int] = {}  # step -> updates applied before its lookup
        self.fail_lookup = self.fail_update = 0
        self.hold_lookup, self.hold_update = threading.Event(), threading.Event()
        self.hold_lookup.set()
        self.hold_update.set()
        self.inside: list[str] = []  # calls in progress
        self.met = False  # whether a lookup and an update overlapped

    @contextmanager
    def _recorded(self, what: str) -> Iterator[None]:
        self.inside.append(what)
        if len(self.inside) > 1:
            self.met = True
        try:
            yield
        finally:
            self.inside.remove(what)

    def look_up(self, inputs: int, step: int, oldest_open: int, ahead: tuple[int, int] | None) -> tuple[int, int]:
        assert oldest_open <= step and ahead in (None, (inputs, step))
        with self._recorded("lookup"):
            self.seen[step] = len(self.applied)
            assert self.hold_lookup.wait(DEADLINE_SECONDS)
            if step == self.fail_lookup:
                raise ValueError("no such row")
            self.looked_up.append(step)
        return inputs, step

    def update(self, *steps: int) -> Update:
        def apply() -> None:
            with self._recorded("update"):
                assert self.hold_update.wait(DEADLINE_SECONDS)
                if steps[-1] == self.fail_update:
                    raise NonFiniteError("bad gradient")
                self.applied.extend(steps)

        return Update(steps=steps, apply=apply)


def numbers(num: int, fail_at: int = -1) -> Iterator[int]:
    for i in range(num):
        if i == fail_at:
            raise OSError("torn file")
        yield i


def looked_up(tables: Tables, num: int) -> bool:
    return len(tables.looked_up) >= num


def make(inputs: Iterator[int], gate: StalenessGate, tables: Tables, mode: str) -> PrefetchPipeline[tuple[int, int]]:
    return PrefetchPipeline(
        inputs,  # type: ignore[arg-type]  # plain numbers
        gate,
        tables.look_up,  # type: ignore[arg-type]
        read_ahead=lambda inputs, step: (inputs, step),  # type: ignore[arg-type,return-value]
        overlap=mode != "inline",
        remote=mode == "remote",
    )


@each_way
def test_the_user_is_needed_when_only_a_step_opens_the_gate(mode: str) -> None:
    tables = Tables()
    pipeline = make(numbers(9), StalenessGate(1), tables, mode)
    assert pipeline.next() == (0, 1)
    assert not pipeline.needs_user()
    assert pipeline.next() == (1, 2)
    assert pipeline.needs_user()
    assert pipeline.next() == (2, 3), "returned before its lookup"
    assert not pipeline.wait_for_lookup(lambda: 3 in tables.looked_up) and tables.looked_up == [1, 2]
    pipeline.drop(1)
    assert pipeline.wait_for_lookup(lambda: 3 in tables.looked_up) and tables.looked_up == [1, 2, 3]
    pipeline.close()
    assert tables.applied == []


@each_way
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_batches_may_be_taken_before_the_first_step(
    mode: str, staleness: int, accumulate: int, deterministic: bool
) -> None:
    """Each batch comes once, with its step, and is looked up in order, exactly when the gate allows."""
    tables, gate = Checked(staleness, 0), StalenessGate(staleness, accumulate=accumulate, deterministic=deterministic)
    pipeline = make(numbers(20), gate, tables, mode)
    got = []
    while (item := pipeline.next()) is not None:
        got.append(item)
    assert got == [(i, 1 + i // accumulate) for i in range(20)]
    free = accumulate * (staleness + 1)
    assert tables.looked_up == [1 + i // accumulate for i in range(min(free, 20))]
    for first in range(0, 20, accumulate):
        steps = [step for _, step in got[first : first + accumulate]]
        assert pipeline.wait_for_lookup(partial(looked_up, tables, first + len(steps)))
        if first + free + accumulate <= 20:
            assert not pipeline.wait_for_lookup(partial(looked_up, tables, first + free + 1))
        pipeline.submit(tables.update(*steps))
    assert pipeline.drain()
    pipeline.close()
    assert tables.applied == tables.looked_up == [step for _, step in got]


@each_way
def test_the_last_batch_read_ahead_can_be_taken_back(mode: str) -> None:
    tables = Tables()
    pipeline = make(numbers(9), StalenessGate(0), tables, mode)
    first, second, third = (pipeline.next() for _ in range(3))
    assert first is not None and second is not None and third is not None
    assert not pipeline.return_item(first) and not pipeline.return_item(second) and pipeline.return_item(third)
    pipeline.drop(1)
    assert pipeline.wait_for_lookup(lambda: 2 in tables.looked_up)
    pipeline.close()


def test_lookups_continue_during_the_users_step() -> None:
    tables, gate = Tables(), StalenessGate(3)
    pipeline = make(numbers(100), gate, tables, "overlap")
    assert pipeline.next() == (0, 1)
    wait_until(lambda: set(tables.seen) == {1, 2, 3, 4})  # lookups up to the staleness
    tables.hold_update.clear()
    pipeline.submit(tables.update(1))
    for i in (1, 2, 3):
        assert pipeline.next() == (i, i + 1)
    tables.hold_update.set()
    assert pipeline.next() == (4, 5)
    pipeline.close()


def test_reading_ahead_is_bounded() -> None:
    read = []

    def endless() -> Iterator[int]:
        i = 0
        while True:
            read.append(i)
            yield i
            i += 1

    pipeline = make(endless(), StalenessGate(2), Tables(), "overlap")
    assert pipeline.next() == (0, 1)
    wait_until(lambda: len(read) >= 6)  # reads up to the bound
    pipeline.close()
    assert len(read) <= 7  # three looked up, three waiting, one being read


@each_way
@pytest.mark.parametrize("stage", ["read", "lookup", "update"])
def test_an_error_reaches_the_user_with_its_stage(mode: str, stage: str) -> None:
    tables = Tables()
    if stage == "lookup":
        tables.fail_lookup = 5
    if stage == "update":
        tables.fail_update = 5
    pipeline = make(numbers(50, fail_at=4 if stage == "read" else -1), StalenessGate(2), tables, mode)
    with pytest.raises((OSError, ValueError, NonFiniteError)) as caught:
        while (item := pipeline.next()) is not None:
            pipeline.submit(tables.update(item[1]))
        pipeline.drain()
    assert any(f"in the {stage} stage" in note for note in caught.value.__notes__)
    with pytest.raises(type(caught.value)):
        pipeline.next()
    pipeline.close()
    assert 5 not in tables.applied


@each_way
@pytest.mark.parametrize("interrupted", [False, True])
def test_closing_in_the_middle_stops_all_threads(mode: str, interrupted: bool) -> None:
    """interrupted: a Ctrl-C came between taking the lock and the block that releases it."""
    before = set(threading.enumerate())
    tables = Tables()
    pipeline = make(numbers(1000), StalenessGate(3), tables, mode)
    pipeline.next()
    pipeline.submit(tables.update(1))
    if interrupted:
        pipeline._changed.acquire()
    pipeline.close()
    pipeline.close()
    assert set(threading.enumerate()) == before


def test_a_source_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.train.prefetch_pipeline._CLOSE_SECONDS", 1.0)
    entered, release = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        entered.set()
        assert release.wait(DEADLINE_SECONDS)

    pipeline = make(stuck(), StalenessGate(0), Tables(), "overlap")
    assert pipeline.next() == (0, 1)
    assert entered.wait(DEADLINE_SECONDS)
    with pytest.raises(StreamError, match="satrap-read did not stop"):
        pipeline.close()
    release.set()
    wait_until(lambda: all(thread.name != "satrap-read" for thread in threading.enumerate()))  # the reader's end


Concurrent = tuple[PrefetchPipeline[tuple[int, int]], Tables]


@pytest.fixture
def concurrent() -> Iterator[Concurrent]:
    """Yield a pipeline of staleness 2 with three batches looked up, the lookup of step 4 blocked, and update 1 being
    applied."""
    tables = Tables()
    pipeline = make(numbers(100), StalenessGate(2), tables, "remote")
    assert [pipeline.next() for _ in range(3)] == [(0, 1), (1, 2), (2, 3)]
    tables.hold_lookup.clear()
    pipeline.submit(tables.update(1))
    wait_until(lambda: 4 in tables.seen)  # the lookup of step 4
    yield pipeline, tables
    tables.hold_lookup.set()
    tables.hold_update.set()
    pipeline.close()


def test_updates_and_lookups_do_not_wait_for_each_other(concurrent: Concurrent) -> None:
    pipeline, tables = concurrent
    pipeline.submit(tables.update(2))
    wait_until(lambda: tables.applied == [1, 2])  # an update during a lookup
    assert tables.inside == ["lookup"]
    tables.hold_update.clear()
    pipeline.submit(tables.update(3))
    wait_until(lambda: len(tables.inside) == 2)  # both at once
    tables.hold_lookup.set()
    assert [pipeline.next(), pipeline.next()] == [(3, 4), (4, 5)]
    assert pipeline._gate.oldest_open == 3 and not pipeline._gate.may_look_up(), (
        "the step of an update in progress is open"
    )
    tables.hold_update.set()
    assert pipeline.next() == (5, 6)
    assert tables.seen[6] == 3


def test_a_pause_waits_for_lookups_and_updates(concurrent: Concurrent) -> None:
    pipeline, tables = concurrent
    tables.hold_update.clear()
    pipeline.submit(tables.update(2))
    wait_until(lambda: len(tables.inside) == 2)  # both at once
    found: list[tuple[list[str], list[int]]] = []
    inside, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        with pipeline.pause():
            inside.set()
            assert go_on.wait(DEADLINE_SECONDS)
            found.append((list(tables.inside), list(tables.applied)))

    thread = threading.Thread(target=pause)
    thread.start()
    tables.hold_update.set()
    wait_until(lambda: tables.applied == [1, 2])  # the update
    assert not inside.is_set()
    tables.hold_lookup.set()
    assert inside.wait(DEADLINE_SECONDS)
    pipeline.submit(tables.update(3))
    go_on.set()
    thread.join(DEADLINE_SECONDS)
    assert found == [([], [1, 2])]
    wait_until(lambda: tables.applied == [1, 2, 3])  # the updates submitted meanwhile


def threads_of_tables() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name in ("satrap-lookups", "satrap-updates")]


def test_of_two_errors_the_first_is_raised(concurrent: Concurrent) -> None:
    pipeline, tables = concurrent
    tables.hold_update.clear()
    tables.fail_update, tables.fail_lookup = 2, 4
    pipeline.submit(tables.update(2))
    pipeline.submit(tables.update(3))
    tables.hold_update.set()
    wait_until(lambda: pipeline.num_failed == 1)  # a refused update
    tables.hold_lookup.set()
    wait_until(lambda: not threads_of_tables())  # the end of both
    with pytest.raises(NonFiniteError, match="bad gradient") as caught:
        pipeline.next()
    assert pipeline.drain(), "later submitted updates are applied"
    assert any("in the update stage" in note for note in caught.value.__notes__)
    assert "and then in the lookup stage: ValueError('no such row')" in caught.value.__notes__
    assert tables.applied == [1, 3]


@pytest.mark.parametrize("refused", [False, True])
def test_an_error_of_a_lookup_waits_for_the_concurrent_update(concurrent: Concurrent, refused: bool) -> None:
    pipeline, tables = concurrent
    tables.hold_update.clear()
    tables.fail_lookup, tables.fail_update = 4, 2 if refused else 0
    for step in (2, 3):
        pipeline.submit(tables.update(step))
    wait_until(lambda: len(tables.inside) == 2)  # both at once
    tables.hold_lookup.set()
    wait_until(lambda: threads_of_tables() == ["satrap-updates"])  # the end of one
    with pytest.raises(ValueError, match="no such row"):
        pipeline.next()
    tables.hold_update.set()
    if refused:
        with pytest.raises(NonFiniteError, match="bad gradient"):
            pipeline.finish()
    pipeline.finish()
    assert tables.applied == ([1, 3] if refused else [1, 2, 3]) and pipeline.num_failed == refused


@pytest.fixture
def fast_thread_switches() -> Iterator[None]:
    """Make threads switch often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Checked(Tables):
    """Tables with lookups and updates of random duration, which raise if a lookup starts too early."""

    def __init__(self, staleness: int, seed: int) -> None:
        super().__init__()
        self.settled = {0}
        self._staleness = staleness
        self._draws = {what: random.Random(f"{what} {seed}") for what in ("lookup", "update")}

    def _work(self, what: str) -> None:
        for _ in range(self._draws[what].choice((0, 100, 3_000))):
            pass

    def look_up(self, inputs: int, step: int, oldest_open: int, ahead: tuple[int, int] | None) -> tuple[int, int]:
        assert self.settled >= set(range(step - self._staleness)), f"step {step} was looked up too early"
        assert self.settled >= set(range(oldest_open)), f"of step {step} open ones are not pinned"
        self._work("lookup")
        return super().look_up(inputs, step, oldest_open, ahead)

    def update(self, *steps: int) -> Update:
        inner = super().update(*steps)

        def apply() -> None:
            self._work("update")
            inner.apply()
            self.settled.update(steps)

        return Update(steps=steps, apply=apply)


@pytest.mark.usefixtures("fast_thread_switches")
@each_way
@given(
    staleness=st.integers(0, 5),
    accumulate=st.integers(1, 3),
    deterministic=st.booleans(),
    num_batches=st.integers(0, 40),
    drop=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_every_batch_comes_once_in_order_and_within_the_staleness(
    mode: str, staleness: int, accumulate: int, deterministic: bool, num_batches: int, drop: float, seed: int
) -> None:
    """The user keeps any number of batches before stepping or dropping them."""
    tables, gate = (
        Checked(staleness, seed),
        StalenessGate(staleness, accumulate=accumulate, deterministic=deterministic),
    )
    draw = random.Random(seed)
    pipeline = make(numbers(num_batches), gate, tables, mode)
    got: list[tuple[int, int]] = []
    held: dict[int, int] = {}
    expected: list[int] = []

    def settle(step: int) -> None:
        count = held.pop(step)
        if draw.random() < drop:
            tables.settled.add(step)
            for _ in range(count):
                pipeline.drop(step)
        else:
            expected.extend([step] * count)
            pipeline.submit(tables.update(*[step] * count))

    while True:
        while held and held[min(held)] == accumulate and (pipeline.needs_user() or draw.random() < 0.5):
            settle(min(held))
        item = pipeline.next()
        if item is None:
            break
        got.append(item)
        held[item[1]] = held.get(item[1], 0) + 1
    assert pipeline.next() is None
    for step in sorted(held):
        settle(step)
    pipeline.drain()
    pipeline.close()
    assert got == [(i, 1 + i // accumulate) for i in range(num_batches)]
    assert tables.applied == expected
    assert sum(gate.seen.values()) == num_batches and max(gate.seen, default=0) <= staleness
    assert not tables.met or (mode == "remote" and staleness and not deterministic)
    if deterministic:
        for step, applied in tables.seen.items():
            assert drop or applied == accumulate * max(0, step - 1 - staleness)


def test_a_batch_that_is_being_looked_up_is_another_batch() -> None:
    """It is neither waiting for its lookup nor ready, and the source has ended."""
    started, may_end = threading.Event(), threading.Event()

    def look_up(inputs: Any, step: int, oldest_open: int, ahead: Any) -> Any:
        if step == 2:
            started.set()
            assert may_end.wait(60.0)
        return inputs, step

    inputs: Any = iter([0, 1])
    pipeline: Any = PrefetchPipeline(
        inputs, StalenessGate(1), look_up, read_ahead=lambda inputs, step: (inputs, step), overlap=True
    )
    assert pipeline.next() == (0, 1)
    assert started.wait(60.0)
    with pipeline._changed:
        assert pipeline._changed.wait_for(lambda: pipeline._state.exhausted, 60.0)
    wait = pipeline._wait

    def end_lookup_and_wait(held: Any) -> None:
        may_end.set()
        wait(held)

    pipeline._wait = end_lookup_and_wait
    try:
        assert not pipeline.is_last()
    finally:
        may_end.set()
    assert pipeline.next() == (1, 2) and pipeline.is_last()
    pipeline.close()
