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

from satrap.errors import NonFiniteError
from satrap.train.ledger import BatchLedger, BatchRecord, Event, State, Update
from satrap.train.prefetch_pipeline import PrefetchPipeline
from waiting import DEADLINE_SECONDS, wait_until

each_way = pytest.mark.parametrize("mode", ["inline", "overlap", "remote"])


class Number(BatchRecord):
    """A batch that is a number."""

    def __init__(self, value: int, *, has_rows: bool = True) -> None:
        super().__init__(has_rows=has_rows)
        self.value = value


class Tables:
    """Tables that record the calls, and what each lookup saw."""

    resolves_ahead = True

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

    def new(self, inputs: Any) -> Number:
        return Number(inputs)

    def resolve(self, batch: Number, step: int, oldest_open: int) -> None:
        assert batch.state is State.NEW and oldest_open <= step

    def read_ahead(self, batch: Number) -> None:
        assert batch.state is State.READ

    def look_up(self, batch: Number, oldest_open: int) -> None:
        assert oldest_open <= batch.step and batch.state in (State.READ, State.AHEAD)
        with self._recorded("lookup"):
            self.seen[batch.step] = len(self.applied)
            assert self.hold_lookup.wait(DEADLINE_SECONDS)
            if batch.step == self.fail_lookup:
                raise ValueError("no such row")
            self.looked_up.append(batch.step)

    def update(self, *steps: int) -> None:
        with self._recorded("update"):
            assert self.hold_update.wait(DEADLINE_SECONDS)
            if steps[-1] == self.fail_update:
                raise NonFiniteError("bad gradient")
            self.applied.extend(steps)


class Loop:
    """A loop over a pipeline, that names batches by their number and step."""

    def __init__(self, inputs: Iterator[int], ledger: BatchLedger[Number], tables: Tables, mode: str) -> None:
        self.ledger, self._tables = ledger, tables
        self.pipeline = PrefetchPipeline(
            inputs,  # type: ignore[arg-type]  # plain numbers
            ledger,
            tables,
            overlap=mode != "inline",
            remote=mode == "remote",
        )
        self.batches: list[Number] = []

    def next(self) -> tuple[int, int] | None:
        batch = self.pipeline.next()
        if batch is None:
            return None
        assert self.pipeline.next() is batch, "offered until it is returned"
        self.pipeline.handle(Event.RETURNED, batch)
        self.batches.append(batch)
        return batch.value, batch.step

    def look_up(self, number: int) -> bool:
        return self.pipeline.look_up(self.batches[number])

    def step(self, *steps: int) -> None:
        batches = self._take(*steps)
        self.pipeline.handle(Event.USED, *batches)
        self.pipeline.submit(Update(batches, partial(self._tables.update, *(batch.step for batch in batches))))

    def drop(self, *steps: int) -> None:
        self.pipeline.handle(Event.SETTLED, *self._take(*steps), cause="unused")

    def _take(self, *steps: int) -> list[Number]:
        return [batch for batch in self.batches if batch.step in steps]


def numbers(num: int, fail_at: int = -1) -> Iterator[int]:
    for i in range(num):
        if i == fail_at:
            raise OSError("torn file")
        yield i


@each_way
def test_the_user_is_needed_when_only_a_step_opens_the_gate(mode: str) -> None:
    tables = Tables()
    loop = Loop(numbers(9), BatchLedger(1), tables, mode)
    assert loop.next() == (0, 1)
    assert not loop.pipeline.needs_user()
    assert loop.next() == (1, 2)
    assert loop.pipeline.needs_user()
    assert loop.next() == (2, 3), "returned before its lookup"
    assert not loop.look_up(2) and tables.looked_up == [1, 2]
    loop.drop(1)
    assert loop.look_up(2) and tables.looked_up == [1, 2, 3]
    loop.pipeline.close()
    assert tables.applied == []


@each_way
def test_what_the_user_will_not_have_is_left_out(mode: str) -> None:
    """The end of the data with several trainers is padding, with and without its lookup."""

    class Padded(Tables):
        def new(self, inputs: Any) -> Number:
            return Number(inputs, has_rows=inputs == 0)

    tables = Padded()
    loop = Loop(numbers(4), BatchLedger(0), tables, mode)
    assert loop.next() == (0, 1)
    while (batch := loop.pipeline.next()) is not None:
        loop.pipeline.discard(batch)
    loop.step(1)
    assert loop.pipeline.drain() and tables.applied == [1] and loop.ledger.last_step == 1
    loop.pipeline.close()


def test_lookups_continue_during_the_users_step() -> None:
    tables, ledger = Tables(), BatchLedger[Number](3)
    loop = Loop(numbers(100), ledger, tables, "overlap")
    assert loop.next() == (0, 1)
    wait_until(lambda: set(tables.seen) == {1, 2, 3, 4})  # lookups up to the staleness
    tables.hold_update.clear()
    loop.step(1)
    for i in (1, 2, 3):
        assert loop.next() == (i, i + 1)
    tables.hold_update.set()
    assert loop.next() == (4, 5)
    loop.pipeline.close()


def test_reading_ahead_is_bounded() -> None:
    read = []

    def endless() -> Iterator[int]:
        i = 0
        while True:
            read.append(i)
            yield i
            i += 1

    loop = Loop(endless(), BatchLedger(2), Tables(), "overlap")
    assert loop.next() == (0, 1)
    wait_until(lambda: len(read) >= 6)  # reads up to the bound
    loop.pipeline.close()
    assert len(read) <= 7  # three looked up, three waiting, one being read


@each_way
@pytest.mark.parametrize("stage", ["read", "lookup", "update"])
def test_an_error_reaches_the_user_with_its_stage(mode: str, stage: str) -> None:
    tables = Tables()
    if stage == "lookup":
        tables.fail_lookup = 5
    if stage == "update":
        tables.fail_update = 5
    loop = Loop(numbers(50, fail_at=4 if stage == "read" else -1), BatchLedger(2), tables, mode)
    with pytest.raises((OSError, ValueError, NonFiniteError)) as caught:
        while (item := loop.next()) is not None:
            loop.step(item[1])
        loop.pipeline.drain()
    assert any(f"in the {stage} stage" in note for note in caught.value.__notes__)
    with pytest.raises(type(caught.value)):
        loop.next()
    loop.pipeline.close()
    assert 5 not in tables.applied


@each_way
@pytest.mark.parametrize("interrupted", [False, True])
def test_closing_in_the_middle_stops_all_threads(mode: str, interrupted: bool) -> None:
    """interrupted: a Ctrl-C came between taking the lock and the block that releases it."""
    before = set(threading.enumerate())
    tables = Tables()
    loop = Loop(numbers(1000), BatchLedger(3), tables, mode)
    loop.next()
    loop.step(1)
    if interrupted:
        loop.pipeline._changed.acquire()
    loop.pipeline.close()
    loop.pipeline.close()
    assert set(threading.enumerate()) == before


Concurrent = tuple[Loop, Tables]


@pytest.fixture
def concurrent() -> Iterator[Concurrent]:
    """Yield a pipeline of staleness 2 with three batches looked up, the lookup of step 4 blocked, and update 1 being
    applied."""
    tables = Tables()
    loop = Loop(numbers(100), BatchLedger(2), tables, "remote")
    assert [loop.next() for _ in range(3)] == [(0, 1), (1, 2), (2, 3)]
    tables.hold_lookup.clear()
    loop.step(1)
    wait_until(lambda: 4 in tables.seen)  # the lookup of step 4
    yield loop, tables
    tables.hold_lookup.set()
    tables.hold_update.set()
    loop.pipeline.close()


def test_updates_and_lookups_do_not_wait_for_each_other(concurrent: Concurrent) -> None:
    loop, tables = concurrent
    loop.step(2)
    wait_until(lambda: tables.applied == [1, 2])  # an update during a lookup
    assert tables.inside == ["lookup"]
    tables.hold_update.clear()
    loop.step(3)
    wait_until(lambda: len(tables.inside) == 2)  # both at once
    tables.hold_lookup.set()
    assert [loop.next(), loop.next()] == [(3, 4), (4, 5)]
    assert loop.ledger.oldest_open == 3 and not loop.ledger.may_look_up, "the step of an update in progress is open"
    tables.hold_update.set()
    assert loop.next() == (5, 6)
    assert tables.seen[6] == 3


def test_a_pause_waits_for_lookups_and_updates(concurrent: Concurrent) -> None:
    loop, tables = concurrent
    tables.hold_update.clear()
    loop.step(2)
    wait_until(lambda: len(tables.inside) == 2)  # both at once
    found: list[tuple[list[str], list[int]]] = []
    inside, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        with loop.pipeline.pause():
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
    loop.step(3)
    go_on.set()
    thread.join(DEADLINE_SECONDS)
    assert found == [([], [1, 2])]
    wait_until(lambda: tables.applied == [1, 2, 3])  # the updates submitted meanwhile


def threads_of_tables() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name in ("satrap-lookups", "satrap-updates")]


def test_of_two_errors_the_first_is_raised(concurrent: Concurrent) -> None:
    loop, tables = concurrent
    tables.hold_update.clear()
    tables.fail_update, tables.fail_lookup = 2, 4
    loop.step(2)
    loop.step(3)
    tables.hold_update.set()
    wait_until(lambda: loop.ledger.dropped["failed"] == 1)  # a refused update
    tables.hold_lookup.set()
    wait_until(lambda: not threads_of_tables())  # the end of both
    with pytest.raises(NonFiniteError, match="bad gradient") as caught:
        loop.next()
    assert loop.pipeline.drain(), "later submitted updates are applied"
    assert any("in the update stage" in note for note in caught.value.__notes__)
    assert any("see whether the loss is finite" in note for note in caught.value.__notes__)
    assert "and then in the lookup stage: ValueError('no such row')" in caught.value.__notes__
    assert tables.applied == [1, 3]


@pytest.mark.parametrize("refused", [False, True])
def test_an_error_of_a_lookup_waits_for_the_concurrent_update(concurrent: Concurrent, refused: bool) -> None:
    loop, tables = concurrent
    tables.hold_update.clear()
    tables.fail_lookup, tables.fail_update = 4, 2 if refused else 0
    for step in (2, 3):
        loop.step(step)
    wait_until(lambda: len(tables.inside) == 2)  # both at once
    tables.hold_lookup.set()
    wait_until(lambda: threads_of_tables() == ["satrap-updates"])  # the end of one
    with pytest.raises(ValueError, match="no such row"):
        loop.next()
    tables.hold_update.set()
    if refused:
        with pytest.raises(NonFiniteError, match="bad gradient"):
            loop.pipeline.finish()
    loop.pipeline.finish()
    assert tables.applied == ([1, 3] if refused else [1, 2, 3]) and loop.ledger.dropped["failed"] == refused


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

    def look_up(self, batch: Number, oldest_open: int) -> None:
        assert self.settled >= set(range(batch.step - self._staleness)), f"step {batch.step} was looked up too early"
        assert self.settled >= set(range(oldest_open)), f"of step {batch.step} open ones are not pinned"
        self._work("lookup")
        super().look_up(batch, oldest_open)

    def update(self, *steps: int) -> None:
        self._work("update")
        super().update(*steps)
        self.settled.update(steps)


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
    tables, draw = Checked(staleness, seed), random.Random(seed)
    ledger: BatchLedger[Number] = BatchLedger(staleness, accumulate=accumulate, deterministic=deterministic)
    loop = Loop(numbers(num_batches), ledger, tables, mode)
    got: list[tuple[int, int]] = []
    held: dict[int, int] = {}
    expected: list[int] = []

    def settle(step: int) -> None:
        count = held.pop(step)
        assert all(loop.look_up((step - 1) * accumulate + number) for number in range(count))
        if draw.random() < drop:
            tables.settled.add(step)
            loop.drop(step)
        else:
            expected.extend([step] * count)
            loop.step(step)

    while True:
        while held and held[min(held)] == accumulate and (loop.pipeline.needs_user() or draw.random() < 0.5):
            settle(min(held))
        item = loop.next()
        if item is None:
            break
        got.append(item)
        held[item[1]] = held.get(item[1], 0) + 1
    assert loop.next() is None
    for step in sorted(held):
        settle(step)
    loop.pipeline.drain()
    loop.pipeline.close()
    assert got == [(i, 1 + i // accumulate) for i in range(num_batches)]
    assert tables.applied == expected
    assert sum(ledger.seen.values()) == num_batches and max(ledger.seen, default=0) <= staleness
    assert not tables.met or (mode == "remote" and staleness and not deterministic)
    if deterministic:
        for step, applied in tables.seen.items():
            assert drop or applied == accumulate * max(0, step - 1 - staleness)


def test_a_batch_that_is_being_looked_up_is_another_batch() -> None:
    """It is neither waiting for its lookup nor ready, and the source has ended."""
    tables = Tables()
    loop = Loop(numbers(2), BatchLedger(0), tables, "overlap")
    assert loop.next() == (0, 1)
    tables.hold_lookup.clear()
    loop.step(1)
    wait_until(lambda: 2 in tables.seen and loop.ledger.is_exhausted)
    assert not loop.pipeline.is_last()
    tables.hold_lookup.set()
    assert loop.next() == (1, 2) and loop.pipeline.is_last()
    loop.pipeline.close()
