"""How long tests wait: for a condition, and at most."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

DEADLINE_SECONDS = 300.0


def wait_until(
    condition: Callable[[], object],
    process: subprocess.Popen[str] | None = None,
    otherwise: Callable[[], object] = lambda: "the condition never held",
) -> None:
    """Wait until the condition holds, and the process, if given, runs; fail at a deadline with the message
    `otherwise()`."""
    pause, until = threading.Event(), time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < until, otherwise()
        assert process is None or process.poll() is None, (process.returncode, *process.communicate())
        pause.wait(0.005)
