"""The other processes of a round: they read lines of JSON and answer with such."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.machine import ROOT


@contextmanager
def talking(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process that is told lines and answers with lines; it ends when its stdin does, or is killed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, **options)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.stdout.close()
        end(process)


def end(process: "subprocess.Popen[str]") -> None:
    """Waits for a process that was told to end; kills it if it does not."""
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def tell(process: "subprocess.Popen[str]", what: Any) -> None:
    """A line of JSON to a process."""
    assert process.stdin is not None
    print(json.dumps(what), file=process.stdin, flush=True)


def told(process: "subprocess.Popen[str]") -> Any:
    """What the next line of a process says, as JSON."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended, with exit status {process.wait()}")
    return json.loads(line)
