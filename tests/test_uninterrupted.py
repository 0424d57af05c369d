"""`Uninterrupted` defers every signal that has a handler in Python: at every moment of a block each signal is handled
once, after the values of the block are consistent, and the handlers are those of before."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import FrameType

import pytest

from interrupts import Interrupts, no_hang, raising
from satrap.device.exchange import RoundThread
from satrap.interrupts import Uninterrupted
from satrap.train.joint_batches import JointBatches

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGRTMIN)


class Came(Exception):
    """Raised by the handlers."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, list[FrameType | None]]]:
    """Count each signal and raise."""
    came: dict[int, list[FrameType | None]] = {number: [] for number in NUMBERS}

    def handle(number: int, frame: FrameType | None) -> None:
        came[number].append(frame)
        raise Came

    before = {number: signal.signal(number, handle) for number in NUMBERS}
    yield came
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert set(after.values()) == {handle}


def moments(number: int, at: int = 0) -> Iterator[Interrupts]:
    """Yield what interrupts at each moment in turn, until there is none."""
    came = True
    while came:
        at += 1
        interrupts = Interrupts(at, number)
        yield interrupts
        came = interrupts.came
    assert at > 10


@pytest.mark.parametrize("number", NUMBERS)
def test_each_moment_of_a_block(number: int, handlers: dict[int, list[FrameType | None]]) -> None:
    for interrupts in moments(number):
        pair, handled = [0, 0], len(handlers[number])
        try:
            with interrupts, Uninterrupted():
                pair[0] += 1
                with Uninterrupted():
                    pair[1] += 1
        except Came:
            pass
        assert pair in ([0, 0], [1, 1]) and len(handlers[number]) == handled + interrupts.came
        assert len({signal.getsignal(each) for each in NUMBERS}) == 1


@pytest.mark.parametrize("number", NUMBERS)
def test_each_moment_of_work_that_may_be_interrupted(number: int, handlers: dict[int, list[FrameType | None]]) -> None:
    for interrupts in moments(number):
        pair, was_interrupted = [0, 0], False
        try:
            with interrupts, Uninterrupted() as held:
                pair[0] += 1
                try:
                    with held.allow(), Uninterrupted():
                        pair[0] += 1
                        pair[1] += 1
                except Came:
                    was_interrupted = held.was_interrupted
                    assert was_interrupted
                pair[1] += 1
        except Came:
            assert not was_interrupted
        assert pair in ([0, 0], [1, 1], [2, 2])
        assert sum(map(len, handlers.values())) > 0 or not interrupts.came


def test_signals_of_several_kinds_are_all_handled() -> None:
    handled: list[int] = []
    before = {each: signal.signal(each, lambda number, _: handled.append(number)) for each in NUMBERS}
    with Uninterrupted():
        for each in [*NUMBERS, *NUMBERS]:
            signal.raise_signal(each)
        assert not handled
    assert handled == sorted(NUMBERS), "as if each came once now"
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_handler_that_replaces_itself_stays_replaced() -> None:
    """Such as one that lets a second Ctrl-C end the process."""

    def second(_: int, frame: FrameType | None) -> None:
        raise Came("second")

    def first(_: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR1, second)

    before = signal.signal(signal.SIGUSR1, first)
    try:
        with Uninterrupted() as held:
            signal.raise_signal(signal.SIGUSR1)
            held.check()
        with pytest.raises(Came, match="second"):
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is second
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_timeout_interrupts_a_wait_for_a_round() -> None:
    """The error of its handler is that of a wait in slices, which must not take it for its own."""
    thread, future = RoundThread("round", lambda error: error), Future[int]()
    with raising(signal.SIGUSR1, TimeoutError("too late")), no_hang(60.0):
        for interrupts in moments(signal.SIGUSR1):
            with interrupts, pytest.raises(TimeoutError, match="too late"):
                thread.wait(future)
            if interrupts.moments >= 100:
                break
    thread.close()
    assert thread.join(60.0)


def test_a_trainer_whose_end_is_interrupted_ends_once() -> None:
    """A second comparison would wait for ever for trainers that have ended."""
    calls: list[Sequence[int]] = []

    def exchange(numbers: Sequence[int], *, patient: bool) -> Callable[[], list[Sequence[int]]]:
        calls.append(numbers)
        return lambda: [numbers, numbers]

    for interrupts in moments(signal.SIGTERM):
        calls.clear()
        batches = JointBatches(iter(()), ("a",), exchange, 0, lambda _: None)
        for _ in range(2):
            try:
                with interrupts:
                    batches.leave()
            except Came:
                continue
            break
        assert len(calls) == 1 and not batches.may_be_awaited
