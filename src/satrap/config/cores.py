"""How many threads work."""

import os

from satrap.config.validation import check_integer

_MAX_THREADS = 1024


def thread_count(num_threads: int | None) -> int:
    """Threads of a call: as given, or the cores that this process may use."""
    if num_threads is None:
        return min(len(os.sched_getaffinity(0)), _MAX_THREADS)
    return check_integer("store", "num_threads", num_threads, 1, _MAX_THREADS)
