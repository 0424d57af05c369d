"""Work that threads share: results in order, the first error after all calls have returned, and after the main thread's
end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.config.cores import in_threads

LATE = """
import concurrent.futures.thread, threading, time
from satrap.config.cores import in_threads

def late():
    while not concurrent.futures.thread._shutdown:  # it refuses work from now on
        time.sleep(0.001)
    print(in_threads(2, str, [1, 2, 3], "late"), flush=True)

threading.Thread(target=late).start()
"""


@given(st.integers(1, 5), st.lists(st.integers(), max_size=20))
def test_results_are_in_order(num_threads: int, items: list[int]) -> None:
    assert in_threads(num_threads, str, items, "test") == list(map(str, items))


@given(st.integers(2, 5), st.sets(st.integers(0, 19), min_size=1))
def test_an_error_is_raised_once_all_calls_have_returned(num_threads: int, wrong: set[int]) -> None:
    began, ended = set[int](), set[int]()

    def work(item: int) -> None:
        began.add(item)
        try:
            if item in wrong:
                raise ValueError(item)
        finally:
            ended.add(item)

    with pytest.raises(ValueError, match=r"^\d+$") as caught:
        in_threads(num_threads, work, range(20), "test")
    assert began == ended and caught.value.args[0] == min(wrong & began)


def test_calls_are_beside_each_other() -> None:
    barrier = threading.Barrier(3)  # which breaks unless three calls wait together
    assert sorted(in_threads(3, lambda _: barrier.wait(60), range(3), "test")) == [0, 1, 2]


def test_after_the_end_of_the_main_thread() -> None:
    """A save may still run when the script ends."""
    run = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout, run.stderr) == (0, "['1', '2', '3']\n", "")
