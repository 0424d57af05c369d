"""The CPU time and the memory of a round whose work is done by several processes: what any of them used is no noise."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.clock import CpuCounters, peak_resident_bytes, read_cpu


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
