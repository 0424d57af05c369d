"""The number of threads of a call."""

import math
import os

from satrap.cgroups import cpu_limit
from satrap.config.validation import check_integer

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
