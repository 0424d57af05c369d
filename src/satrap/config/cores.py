"""The number of threads of a call, and work that is shared by so many."""

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from satrap.cgroups import cpu_limit
from satrap.config.validation import check_integer
from satrap.transfer import in_context

_T = TypeVar("_T")
_R = TypeVar("_R")
_MAX_THREADS = 1024


def num_cores() -> int:
    """Return the cores that this process may use: those of its affinity, or as many as the CPU quota of its container
    pays for, rounded up."""
    available, quota = len(os.sched_getaffinity(0)), cpu_limit()
    return available if quota is None else max(1, min(available, math.ceil(quota)))


def thread_count(num_threads: int | None) -> int:
    """Return the number of threads of a call: `num_threads`, or by default the cores that this process may use."""
    if num_threads is None:
        return min(num_cores(), _MAX_THREADS)
    return check_integer("store", "num_threads", num_threads, 1, _MAX_THREADS)


def in_threads(num_threads: int, work: Callable[[_T], _R], items: Sequence[_T], name: str) -> list[_R]:
    """Return work(item) for each item, in order. After an error no further call starts; it is raised once those that
    had started have returned.

    Not by concurrent.futures, which refuses work as soon as the main thread has ended: a save that then still runs in
    its own thread would fail.
    """
    if num_threads == 1 or len(items) <= 1:
        return [work(item) for item in items]
    results: dict[int, _R] = {}
    errors: dict[int, BaseException] = {}
    left = list(enumerate(items))[::-1]  # `pop` is atomic

    def run() -> None:
        while left and not errors:
            try:
                number, item = left.pop()
            except IndexError:
                return
            try:
                results[number] = work(item)
            except BaseException as error:
                errors[number] = error

    threads = [
        threading.Thread(target=in_context(run), name=f"{name}_{number}")
        for number in range(min(num_threads, len(items)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # an interrupt
        left.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(items))]
