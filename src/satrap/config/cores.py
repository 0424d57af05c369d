"""The number of threads of a call."""

import os

from satrap.config.validation import check_integer

_MAX_THREADS = 1024


def thread_count(num_threads: int | None) -> int:
    """Returns the number of threads of a call: `num_threads`, or by default the cores that this process may use."""
    if num_threads is None:
        return min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    return check_integer("store", "num_threads", num_threads, 1, _MAX_THREADS)
