"""The other processes of a round: they are told lines of JSON and answer with such; and the CPU time and the memory of
all together: what any of them used is no noise.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.clock import CpuCounters, peak_resident_bytes, read_cpu
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


def read_cpu_of(others: Sequence[int]) -> CpuCounters | None:
    """The counters now, the time of the other processes and of children that ended counted as our own; None without
    /proc."""
    now = read_cpu()
    if now is None:
        return None
    fields = [Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split() for other in others]
    ended = os.times()
    children = (ended.children_user + ended.children_system) * os.sysconf("SC_CLK_TCK")
    return replace(now, own=now.own + children + sum(int(times[11]) + int(times[12]) for times in fields))


def peak_resident_with(others: Sequence[int]) -> int:
    """The most memory that this process had, and that of each of the others."""
    lines = [line for other in others for line in Path(f"/proc/{other}/status").read_text().splitlines()]
    return peak_resident_bytes() + sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
