"""The server of a contender of `echo`: `python -m benchmarks.cluster.servers '<job as JSON>'` serves until stdin ends.

Its first line on stdout is its address or port, as JSON.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.cluster import raw
from benchmarks.cluster.processes import receive, talking


class Echo(Protocol):
    """The protocol of the servers of `echo`."""

    def lookup(self, ids: NDArray[np.uint64]) -> NDArray[np.float32]: ...


class SameRows:
    """A server that answers with as many floats as the ids' rows would have, always the same ones."""

    def __init__(self, rows: NDArray[np.float32], dim: int) -> None:
        self._rows, self._dim = rows, dim

    def lookup(self, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
        return self._rows[: len(ids) * self._dim]


@contextmanager
def started(contender: str, job: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """Start a server; yield its address or port, and its process id."""
    command = [sys.executable, "-m", "benchmarks.cluster.servers", json.dumps({**job, "contender": contender})]
    with talking(command) as process:
        yield receive(process), process.pid


def main() -> None:
    job = json.loads(sys.argv[1])
    os.sched_setaffinity(0, job["cores"])
    rows = np.random.default_rng(3).random(int(job["max_ids"]) * int(job["dim"]), np.float32)
    if job["contender"] == "raw":
        raw.serve(rows, int(job["dim"]))
        return
    from satrap.rpc import Service

    same_rows = SameRows(rows, int(job["dim"]))
    with Service(same_rows, Echo, "tcp://127.0.0.1:0", insecure=True, num_threads=int(job["num_threads"])) as service:
        print(json.dumps(service.address), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
