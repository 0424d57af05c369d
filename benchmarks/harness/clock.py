"""Time, memory and noise of one process, which a worker reads before and after the steps that it times.

Noise is the load of others: `other_cpu`, the share of all cores that other processes used, and `steal`, the share that
the host took. Both come from Linux's counters, which are sampled every 10 ms, so a few ticks are within their error and
count as none. Without the counters both are None.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.ranks import ALONE, Ranks

Batch = TypeVar("Batch")
OTHER_ERROR_TICKS = 3
STEAL_ERROR_TICKS = 1
NOISY_OTHER_CPU = 0.08
NOISY_STEAL = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuCounters:
    """The CPU time of the machine and of this process so far, in clock ticks."""

    busy: float
    stolen: float
    total: float
    own: float


def read_cpu(others: Sequence[int] = ()) -> CpuCounters | None:
    """Return the counters, None without /proc/stat. others: processes whose time counts as this one's, as does that of
    children that have exited."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, idle, iowait, irq, softirq, stolen = (float(field) for field in fields)
    busy = user + nice + system + irq + softirq
    ended = os.times()
    own = (time.process_time() + ended.children_user + ended.children_system) * os.sysconf("SC_CLK_TCK")
    for other in others:
        fields = Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()
        own += int(fields[11]) + int(fields[12])
    return CpuCounters(busy=busy, stolen=stolen, total=busy + idle + iowait + stolen, own=own)


def noise_between(before: CpuCounters | None, after: CpuCounters | None) -> dict[str, Any]:
    """Return the shares of all cores that other processes and the host took between two readings; noisy: too much."""
    if before is None or after is None:
        return {"other_cpu": None, "steal": None, "noisy": None}
    total = max(1.0, after.total - before.total)
    other = max(0.0, (after.busy - before.busy) - (after.own - before.own) - OTHER_ERROR_TICKS) / total
    steal = max(0.0, after.stolen - before.stolen - STEAL_ERROR_TICKS) / total
    noisy = other > NOISY_OTHER_CPU or steal > NOISY_STEAL
    return {"other_cpu": round(other, 3), "steal": round(steal, 3), "noisy": noisy}


def time_steps(
    step: Callable[[Batch], object],
    batches: Sequence[Batch],
    *,
    num_warmup: int,
    ids_per_step: int,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Run `step` on every batch once, in order; the first `num_warmup` steps are not timed. Rates are ids per second.

    Several ranks start the timed steps together and then do not wait for each other; the slowest one's time counts.
    """
    before = read_cpu(ranks.others)
    for batch in batches[:num_warmup]:
        step(batch)
    ranks.barrier()
    seconds = []
    for batch in batches[num_warmup:]:
        start = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - start)
    return {
        "rows_per_s": round(ids_per_step * len(seconds) / ranks.longest(sum(seconds))),
        "median_step_ms": round(1e3 * statistics.median(seconds), 3),
        "longest_step_ms": round(1e3 * max(seconds), 3),
        **noise_between(before, read_cpu(ranks.others)),
    }


def resident_bytes() -> int:
    """Return this process's resident memory, from the exact page walk (the cheap counter is off by megabytes)."""
    return _kib_field("/proc/self/smaps_rollup", "Rss:")


def peak_resident_bytes(others: Sequence[int] = ()) -> int:
    """Return the sum of the peak resident memory of this process and of each of the others."""
    return sum(_kib_field(f"/proc/{process}/status", "VmHWM:") for process in ("self", *others))


def available_bytes() -> int:
    """Return the memory that the machine has available."""
    return _kib_field("/proc/meminfo", "MemAvailable:")


def _kib_field(path: str, name: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no field {name}")
