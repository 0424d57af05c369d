"""The other processes of a round: those that exchange lines of JSON, and the command `satrap server`."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import ROOT

ANYWHERE = "tcp://127.0.0.1:0"
Process = subprocess.Popen[str]


@contextmanager
def talking(command: Sequence[str], **options: Any) -> Iterator[Process]:
    """Start a process that reads lines and answers with lines; it ends when its stdin does, or is killed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, **options)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        wait_or_kill(process)


def wait_or_kill(process: Process, seconds: float = 30) -> None:
    """Wait for a process to exit; kill it if it does not."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def send(process: Process, message: Any) -> None:
    """Send a message as a line of JSON."""
    assert process.stdin is not None
    print(json.dumps(message), file=process.stdin, flush=True)


def receive(process: Process) -> Any:
    """Return the next line of a process, as JSON."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"expected a line from {process.args!r}, found that it exited with status {process.wait()}")
    return json.loads(line)


@contextmanager
def satrap_server(
    num_threads: int,
    listen: str = ANYWHERE,
    options: Sequence[str] = (),
    wrap: Callable[[Sequence[str]], Sequence[str]] = list,
) -> Iterator[tuple[str, int]]:
    """Start `satrap server` without rows; yield its address and process id, and stop it afterwards.

    options: more options of the command; without --keys every process on this machine may call it. wrap: turns a
    command into one that runs on another machine.
    """
    command = [str(Path(sys.executable).with_name("satrap")), "server", "--listen", listen, *options]
    command += ["--threads", str(num_threads), *([] if "--keys" in options else ["--insecure"])]
    process = subprocess.Popen(wrap(command), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        if not words:
            raise RuntimeError(f"satrap server exited with status {process.wait()} before it listened")
        yield words[-1], process.pid
    finally:
        process.terminate()
        process.stdout.close()
        wait_or_kill(process)
