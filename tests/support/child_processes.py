"""Child processes of tests, none of which outlives its test, and servers that do not answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from waiting import DEADLINE_SECONDS

SATRAP = Path(sys.executable).with_name("satrap")


@contextmanager
def child_process(command: Sequence[str], seconds: float = DEADLINE_SECONDS, **options: Any) -> Iterator[Any]:
    """Start a process. It is killed when the context ends, and by a timer if it hangs. options: of `Popen`."""
    process: subprocess.Popen[Any] = subprocess.Popen(command, **options)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        timer.join()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@contextmanager
def silent_server() -> Iterator[tuple[socket.socket, str]]:
    """Yield a socket that accepts connections and does not reply, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"
