"""The process of the accuracy benchmark that trains one model: one case, staleness and seed, in one thread, since the
order of torch's sums depends on their number.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.accuracy import adult, flights, synthetic
from benchmarks.harness.ranks import use_threads


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train and test once."""
    use_threads(1)
    staleness, seed = job["staleness"], job["seed"]
    if job["kind"] == "adult":
        outcome = adult.run(staleness, seed)
    elif job["kind"] == "flights":
        outcome = flights.run(staleness, seed)
    else:
        outcome = synthetic.run(staleness, seed, job["num_ids"])
    return {"streams": {f"{job['kind']}:{staleness}": outcome}}


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute in this thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
