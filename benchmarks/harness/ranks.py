"""Several processes that measure one contender together, each with a rank, a share of the features and cores.

The worker that the harness starts is rank 0. It starts the other ranks, which do the same job, and reports for all of
them. They communicate through torch's gloo on loopback; a file in a temporary folder is their rendezvous.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(minutes=5)
CORES = sorted(os.sched_getaffinity(0))
"""The cores of this process before it pins itself to some of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The rank of this process and the world size."""

    rank: int = 0
    size: int = 1
    others: tuple[int, ...] = ()
    """Process ids of the other ranks, on rank 0 only."""

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            import torch.distributed

            torch.distributed.barrier()

    def longest(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers."""
        if self.size == 1:
            return seconds
        import torch.distributed

        number = torch.tensor(seconds, dtype=torch.float64)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return float(number)


ALONE = Ranks()


def run_ranks(job: dict[str, Any], run: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of rank 0, which runs here; the other ranks are processes that end with it."""
    with tempfile.TemporaryDirectory(prefix="satrap-bench-") as folder:
        job = {**job, "rendezvous": str(Path(folder) / "rendezvous")}
        others: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, job["num_processes"]):
                command = [sys.executable, "-m", "benchmarks.harness.worker", json.dumps({**job, "rank": rank})]
                others.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            return run({**job, "rank": 0, "others": [other.pid for other in others]})
        finally:
            for other in others:
                other.kill()
                other.wait()


def join(job: dict[str, Any]) -> Ranks:
    """Return the ranks of a job after their rendezvous; ALONE if the job is for one process."""
    if "rank" not in job:
        return ALONE
    import torch.distributed

    ranks = Ranks(rank=job["rank"], size=job["num_processes"], others=tuple(job.get("others", ())))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{job['rendezvous']}", rank=ranks.rank, world_size=ranks.size, timeout=TIMEOUT
    )
    return ranks


def use_threads(num_threads: int, rank: int = 0) -> None:
    """Pin this thread, and the threads it will start, to the cores of its rank, and give torch as many threads."""
    cores = CORES[rank * num_threads : (rank + 1) * num_threads]
    if len(cores) < num_threads:
        raise RuntimeError(
            f"rank {rank} needs {num_threads} threads and this process may use {len(CORES)} cores; use fewer --threads"
        )
    os.sched_setaffinity(0, cores)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(num_threads)
