"""Measuring an emulated link: `python -m benchmarks.cluster.probe serve|ask <arguments as JSON>`.

One machine serves the echo of `echo.py` twice, over plain sockets and over `satrap.rpc` with keys, which all traffic
between machines has. Another calls both, once for each line on stdin, and answers with a line of figures.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.cluster.echo import Echo, RawClient, SameRows, serve_raw
from benchmarks.workload import Floats, Ids
from satrap.rpc import Client, Keys, Service

DIM = 64
NUM_IDS = 1 << 15  # their reply has 8 MiB
NUM_TRIPS, NUM_BULKS = 50, 5


def serve(host: str, keys: str) -> None:
    """Serve until the other side disconnects. Prints the address and the port, a line each."""
    rows = np.ones(NUM_IDS * DIM, np.float32)
    with Service(SameRows(rows, DIM), Echo, f"tcp://{host}:0", Keys.read(keys)) as service:
        print(json.dumps(service.address), flush=True)
        serve_raw(rows, DIM, host)


def ask(host: str, port: int, address: str, keys: str) -> None:
    """Measure for each line on stdin."""
    plain = RawClient(port, DIM, NUM_IDS, host)
    with Client(Echo, address, Keys.read(keys)) as client:
        while sys.stdin.readline():
            print(json.dumps(figures({"plain": plain.lookup, "keys": client.call.lookup})), flush=True)


def figures(lookups: dict[str, Callable[[Ids], Floats]]) -> dict[str, float]:
    """Return the median round trip of a few bytes and the rate of a reply of 8 MiB, for each way."""
    ids, measured = np.zeros(NUM_IDS, np.uint64), {}
    for name, lookup in lookups.items():
        measured[f"trip_ms_{name}"] = round(1e3 * median_seconds(lookup, ids[:1], NUM_TRIPS), 3)
        measured[f"gbit_{name}"] = round(NUM_IDS * DIM * 32 / 1e9 / median_seconds(lookup, ids, NUM_BULKS), 3)
    return measured


def median_seconds(lookup: Callable[[Ids], Floats], ids: Ids, times: int) -> float:
    seconds = []
    lookup(ids)
    for _ in range(times):
        start = time.perf_counter()
        lookup(ids)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    commands: dict[str, Callable[..., Any]] = {"serve": serve, "ask": ask}
    commands[sys.argv[1]](**json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
