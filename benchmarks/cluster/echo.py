"""The kind `echo`: bytes per second through satrap.rpc beside a loop over plain sockets, in turns of a few steps.

A request has the unique ids of a batch, a reply as many bytes as their float32 rows; no row is looked up, so only the
transport is timed. Bytes are those of ids and rows alone, both directions together. Each end has a core to itself, as
on two machines; and once more (`_free`) all threads may run on any core, where the figure depends on Linux's placement.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.cluster import servers
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.harness.record import Rounds, each
from benchmarks.workload import Floats, Ids, hashed_ids, row_numbers

TURN = 10


def unique_ids(rows: int, num_batches: int, part: int) -> list[Ids]:
    """Return the unique ids of some batches. Features share no row, so uniqueness by feature is the same."""
    return [hashed_ids(np.unique(batch)) for batch in row_numbers(rows, "zipf", num_batches, part)]


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both contenders in turn on the same batches, with a core for each end and then with any core."""
    num_steps, dim = int(job["num_steps"]), int(job["dim"])
    batches = unique_ids(int(job["rows"]), min(num_steps, TURN), int(job["part"]))
    sizes = [len(ids) * (8 + 4 * dim) for ids in batches]
    num_bytes = sum(sizes[i % len(sizes)] for i in range(num_steps))
    cores = sorted(os.sched_getaffinity(0))
    streams = {}
    for suffix, client_cores, server_cores in (("", cores[:1], cores[-1:]), ("_free", cores, cores)):
        seconds, noise = time_contenders(job, batches, client_cores, server_cores)
        for name, spent in seconds.items():
            rate = {"gb_per_s": round(num_bytes / sum(spent) / 1e9, 3)}
            streams[f"echo:{name}{suffix}"] = rate | {"step_ms": round(1e3 * statistics.median(spent), 4)} | noise
    return {
        "streams": streams,
        "bytes_per_batch": round(statistics.fmean(sizes)),
    }


def time_contenders(
    job: Mapping[str, Any], batches: list[Ids], client_cores: Sequence[int], server_cores: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of each contender's steps, and the noise."""
    from satrap.rpc import Client

    num_warmup, num_steps, dim = int(job["num_warmup"]), int(job["num_steps"]), int(job["dim"])
    server_job = {**job, "max_ids": max(map(len, batches)), "cores": server_cores}
    os.sched_setaffinity(0, client_cores)  # before the client starts threads
    with ExitStack() as stack:
        (port, raw), (address, rpc) = (
            stack.enter_context(servers.started(name, server_job)) for name in ("raw", "rpc")
        )
        plain = servers.RawClient(port, dim, server_job["max_ids"])
        stack.callback(plain.close)
        client = stack.enter_context(Client(servers.Echo, address))
        contenders = {"rpc": client.call.lookup, "raw": plain.lookup}
        for lookup in contenders.values():
            run(lookup, (batches * num_warmup)[:num_warmup], dim)
        before = read_cpu((raw, rpc))
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for begin in range(0, num_steps, TURN):
            turn = batches[: num_steps - begin]
            for name in sorted(contenders, reverse=begin // TURN % 2 == 0):
                seconds[name] += run(contenders[name], turn, dim)
        return seconds, noise_between(before, read_cpu((raw, rpc)))


def run(lookup: Callable[[Ids], Floats], batches: Sequence[Ids], dim: int) -> list[float]:
    """Return the seconds of each batch."""
    seconds = []
    for ids in batches:
        start = time.perf_counter()
        rows = lookup(ids)
        seconds.append(time.perf_counter() - start)
        if len(rows) != len(ids) * dim:
            raise RuntimeError(f"expected {len(ids) * dim} floats for {len(ids)} ids of dim {dim}, found {len(rows)}")
        del rows  # as a worker does, which copies them; malloc does not keep enough memory for two replies
    return seconds


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    rates = rounds.values("gb_per_s")
    ratios = {
        f"ratio{suffix}": [
            None if rpc is None else round(rpc / raw, 3)
            for rpc, raw in zip(rates[f"rpc{suffix}"], rates[f"raw{suffix}"], strict=True)
        ]
        for suffix in ("", "_free")
    }
    return {
        "bytes_per_batch": each(rounds.results["worker"], "bytes_per_batch"),
        "gb_per_s": rounds.spreads("gb_per_s"),
        "step_ms": rounds.spreads("step_ms"),
        "figures": {name: rounds.spread(values) for name, values in ratios.items()},
    }
