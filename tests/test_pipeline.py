"""The pipeline of a stream, with plain numbers in place of batches: order, bounds, errors and ends, in both modes."""

import threading
import time
from collections.abc import Iterator

import pytest

from satrap.errors import StreamError
from satrap.pipeline import Pipeline, Update
from satrap.sync import Gate

DEADLINE_SECONDS = 10.0

both = pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])


class Tables:
    """Notes what was asked of it, and what each lookup could see."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.seen: dict[int, int] = {}  # step -> updates applied before its lookup
        self.fail_lookup = self.fail_update = 0
        self.hold_update = threading.Event()
        self.hold_update.set()

    def look_up(self, inputs: int, step: int, oldest_open: int) -> tuple[int, int]:
        assert oldest_open <= step
        if step == self.fail_lookup:
            raise ValueError("no such row")
        self.seen[step] = len(self.applied)
        return inputs, step

    def update(self, *steps: int) -> Update:
        def apply() -> None:
            assert self.hold_update.wait(DEADLINE_SECONDS)
            if steps[-1] == self.fail_update:
                raise ValueError("bad gradient")
            self.applied.extend(steps)

        return Update(steps=steps, apply=apply)


def numbers(num: int, fail_at: int = -1) -> Iterator[int]:
    for i in range(num):
        if i == fail_at:
            raise OSError("torn file")
        yield i


def eventually(what: str, holds: object) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, f"not within {DEADLINE_SECONDS} s: {what}"
        threading.Event().wait(0.001)


def make(inputs: Iterator[int], gate: Gate, tables: Tables, overlap: bool) -> Pipeline[tuple[int, int]]:
    return Pipeline(inputs, gate, tables.look_up, overlap=overlap)  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_batch_is_handed_over_once_in_order(overlap: bool, staleness: int, deterministic: bool) -> None:
    tables, gate = Tables(), Gate(staleness, deterministic=deterministic)
    pipeline = make(numbers(20), gate, tables, overlap)
    got = []
    while (item := pipeline.next()) is not None:
        got.append(item)
        pipeline.submit(tables.update(item[1]))
    pipeline.drain()
    pipeline.close()
    assert got == [(i, i + 1) for i in range(20)]
    assert tables.applied == list(range(1, 21))
    for step, applied in tables.seen.items():
        assert applied >= step - 1 - staleness
        if deterministic:
            assert applied == max(0, step - 1 - staleness)
    assert sum(gate.seen.values()) == 20


@both
def test_an_empty_source_ends_at_once(overlap: bool) -> None:
    pipeline = make(numbers(0), Gate(2), Tables(), overlap)
    assert pipeline.next() is None
    assert pipeline.next() is None
    pipeline.close()


@both
def test_the_user_is_asked_when_only_a_step_opens_the_gate(overlap: bool) -> None:
    tables = Tables()
    pipeline = make(numbers(9), Gate(1), tables, overlap)
    assert pipeline.next() == (0, 1)
    assert not pipeline.needs_user()
    assert pipeline.next() == (1, 2)
    assert pipeline.needs_user()
    with pytest.raises(StreamError, match="gate is closed"):
        pipeline.next()
    pipeline.drop(1)
    assert not pipeline.needs_user()
    assert pipeline.next() == (2, 3)
    pipeline.close()
    assert tables.applied == []


def test_lookups_go_on_while_the_user_is_in_its_step() -> None:
    tables, gate = Tables(), Gate(3)
    pipeline = make(numbers(100), gate, tables, overlap=True)
    assert pipeline.next() == (0, 1)
    eventually("lookups up to the staleness", lambda: set(tables.seen) == {1, 2, 3, 4})
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

    pipeline = make(endless(), Gate(2), Tables(), overlap=True)
    assert pipeline.next() == (0, 1)
    eventually("reads up to the bound", lambda: len(read) >= 6)
    pipeline.close()
    assert len(read) <= 7  # three looked up, three waiting, one in hand


@both
@pytest.mark.parametrize("stage", ["read", "lookup", "update"])
def test_an_error_reaches_the_user_with_its_stage(overlap: bool, stage: str) -> None:
    tables = Tables()
    if stage == "lookup":
        tables.fail_lookup = 5
    if stage == "update":
        tables.fail_update = 5
    pipeline = make(numbers(50, fail_at=4 if stage == "read" else -1), Gate(2), tables, overlap)
    with pytest.raises((OSError, ValueError)) as caught:
        while (item := pipeline.next()) is not None:
            pipeline.submit(tables.update(item[1]))
        pipeline.drain()
    assert any(f"in the {stage} stage" in note for note in caught.value.__notes__)
    with pytest.raises(type(caught.value)):
        pipeline.next()
    pipeline.close()
    assert 5 not in tables.applied


@both
def test_closing_in_the_middle_leaves_no_thread(overlap: bool) -> None:
    before = set(threading.enumerate())
    tables = Tables()
    pipeline = make(numbers(1000), Gate(3), tables, overlap)
    pipeline.next()
    pipeline.submit(tables.update(1))
    pipeline.close()
    pipeline.close()
    assert set(threading.enumerate()) == before


def test_a_source_that_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.pipeline._CLOSE_SECONDS", 1.0)
    entered, release = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        entered.set()
        assert release.wait(DEADLINE_SECONDS)

    pipeline = make(stuck(), Gate(0), Tables(), overlap=True)
    assert pipeline.next() == (0, 1)
    assert entered.wait(DEADLINE_SECONDS)
    with pytest.raises(StreamError, match="satrap-read did not end"):
        pipeline.close()
    release.set()
    eventually("the reader's end", lambda: all(thread.name != "satrap-read" for thread in threading.enumerate()))


@both
def test_one_update_settles_several_batches(overlap: bool) -> None:
    tables, gate = Tables(), Gate(0, accumulate=2)
    pipeline = make(numbers(5), gate, tables, overlap)
    for step in (1, 2):
        assert [pipeline.next(), pipeline.next()] == [(2 * step - 2, step), (2 * step - 1, step)]
        pipeline.submit(tables.update(step, step))
    assert pipeline.next() == (4, 3)
    pipeline.submit(tables.update(3))
    assert pipeline.next() is None
    pipeline.drain()
    pipeline.close()
    assert tables.applied == [1, 1, 2, 2, 3]
