"""Parts of the tests of forks: runs a body in a fork, and checks that the fork is refused."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

import pytest

from satrap.errors import ForkError
from waiting import DEADLINE_SECONDS


def in_fork(body: Callable[[], None]) -> None:
    """Runs the body in a fork, and fails if the body failed or hung. Its traceback goes to stderr."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(int(DEADLINE_SECONDS))
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert ended == 0, f"the fork ended with {ended}"


def expect_refusal(home: int, call: Callable[[], object]) -> None:
    with pytest.raises(ForkError, match=f"in process {home} and this is its fork {os.getpid()}: .*'spawn'"):
        call()
