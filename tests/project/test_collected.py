"""Resources are closed when their owner is collected: anywhere, in any order, and at the end of a process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from forks import in_fork
from satrap import collected
from satrap.collected import close_when_collected
from waiting import DEADLINE_SECONDS, wait_until


class Owner:
    """Puts the object into a cycle, so that only the collector finds it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collects_when_told() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_thread_that_collects_inside_a_lock_does_not_wait_for_it() -> None:
    lock, closed = threading.Lock(), threading.Event()

    def close() -> None:
        with lock:
            closed.set()

    close_when_collected(Owner(), close)
    with lock:
        gc.collect()
        assert not closed.is_set()
    assert closed.wait(DEADLINE_SECONDS)


def test_each_is_closed_once_in_the_order_in_which_they_were_collected_and_then_forgotten() -> None:
    closed: list[int] = []
    before = len(collected._closer._watches)
    owners = [Owner() for _ in range(100)]
    for number, owner in enumerate(owners):
        close_when_collected(owner, partial(closed.append, number))
        owner.itself = None  # type: ignore[assignment]
    del owner
    assert len(collected._closer._watches) == before + 100
    while owners:
        owners.pop()
    wait_until(lambda: len(collected._closer._watches) == before)
    assert closed == list(range(99, -1, -1))


def test_one_that_fails_is_reported_and_does_not_keep_the_next_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    closed = threading.Event()

    def fail() -> None:
        raise OSError("the disk is full")

    close_when_collected(Owner(), fail)
    gc.collect()
    close_when_collected(Owner(), closed.set)
    gc.collect()
    assert closed.wait(DEADLINE_SECONDS)
    assert [str(each.exc_value) for each in reported] == ["the disk is full"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_closes_what_is_its_own() -> None:
    owner, closed = Owner(), threading.Event()
    close_when_collected(owner, closed.set)

    def body() -> None:
        nonlocal owner
        mine = threading.Event()
        owner = Owner()
        gc.collect()
        close_when_collected(owner, mine.set)
        owner = Owner()
        gc.collect()
        assert mine.wait(DEADLINE_SECONDS) and not closed.is_set()

    in_fork(body)
    assert not closed.is_set()
    del owner
    gc.collect()
    assert closed.wait(DEADLINE_SECONDS)


def test_a_process_closes_what_is_left_at_its_end_the_newest_first() -> None:
    code = (
        "from functools import partial\n"
        "from satrap.collected import close_when_collected\n"
        "class Owner: ...\n"
        "owners = [Owner() for _ in range(3)]\n"
        "for number, owner in enumerate(owners):\n"
        "    close_when_collected(owner, partial(print, number))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (run.returncode, run.stdout, run.stderr) == (0, "2\n1\n0\n", "")
