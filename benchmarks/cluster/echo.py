"""The kind `echo`: bytes per second through satrap.rpc beside a loop over plain sockets, in turns of a few steps.

Each end has a core of its own, as on two machines; and once more (`_free`) all threads may run on any, where it depends
on where Linux puts them.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.cluster import servers
from benchmarks.cluster.cases import ClusterCase
from benchmarks.cluster.raw import RawClient
from benchmarks.machine import versions
from benchmarks.records import clean_rounds, each, judge, processes, spread, streams_of, worst_noise
from benchmarks.runs import Results
from benchmarks.workload import Floats, Ids, hashed_ids, row_numbers

TURN = 10


def unique_ids(rows: int, num_batches: int, part: int) -> list[Ids]:
    """The ids of some batches, each once. Features share no row, so this is the same as feature by feature."""
    return [hashed_ids(np.unique(batch)) for batch in row_numbers(rows, "zipf", num_batches, part)]


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """One round: both contenders in turn on the same batches, with a core for each end and then with any."""
    num_steps, dim = int(job["num_steps"]), int(job["dim"])
    batches = unique_ids(int(job["rows"]), min(num_steps, TURN), int(job["part"]))
    sizes = [len(ids) * (8 + 4 * dim) for ids in batches]
    num_bytes = sum(sizes[i % len(sizes)] for i in range(num_steps))
    every = sorted(os.sched_getaffinity(0))
    streams = {}
    for place, here, there in (("", every[:1], every[-1:]), ("_free", every, every)):
        seconds, noise = beside(job, batches, here, there)
        for name, spent in seconds.items():
            streams[f"echo:{name}{place}"] = summarize(spent, num_bytes) | noise
    return {
        "streams": streams,
        "bytes_per_batch": round(statistics.fmean(sizes)),
        "peak_resident_bytes": peak_resident_bytes(),
        "versions": versions("numpy", "pyzmq"),
    }


def beside(
    job: Mapping[str, Any], batches: list[Ids], here: Sequence[int], there: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The seconds of each contender's steps, and the noise. here, there: the cores of this end and of the servers."""
    from satrap.rpc import Client

    num_warmup, num_steps, dim = int(job["num_warmup"]), int(job["num_steps"]), int(job["dim"])
    told = {**job, "max_ids": max(map(len, batches)), "cores": there}
    os.sched_setaffinity(0, here)  # before the client makes threads
    with ExitStack() as stack:
        (port, raw), (address, rpc) = (stack.enter_context(servers.started(name, told)) for name in ("raw", "rpc"))
        plain = RawClient(port, dim, told["max_ids"])
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
    """The seconds of each batch."""
    seconds = []
    for ids in batches:
        start = time.perf_counter()
        rows = lookup(ids)
        seconds.append(time.perf_counter() - start)
        if len(rows) != len(ids) * dim:
            raise RuntimeError(f"{len(ids)} ids of dim {dim} were answered with {len(rows)} floats")
        del rows  # as a worker does, which copies them; two answers at once are more than malloc keeps at hand
    return seconds


def summarize(seconds: Sequence[float], num_bytes: int) -> dict[str, Any]:
    return {
        "gb_per_s": round(num_bytes / sum(seconds) / 1e9, 3),
        "step_ms": round(1e3 * statistics.median(seconds), 4),
    }


def make_record(case: ClusterCase, results: Results) -> dict[str, Any]:
    """The record of one case, from the results of its rounds."""
    timed = streams_of("echo:", results)
    clean = clean_rounds(timed)
    rates = {name: each(rounds, "gb_per_s") for name, rounds in timed.items()}
    ratios = {
        f"ratio{name}": [
            None if rpc is None else round(rpc / raw, 3)
            for rpc, raw in zip(rates[f"rpc{name}"], rates[f"raw{name}"], strict=True)
        ]
        for name in ("", "_free")
    }
    record: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows, "dim": case.dim}
    record |= {"num_threads": case.num_threads, "bytes_per_batch": each(results["worker"], "bytes_per_batch")}
    record["gb_per_s"] = {name: spread(values, clean) for name, values in rates.items()}
    record["step_ms"] = {name: spread(each(rounds, "step_ms"), clean) for name, rounds in timed.items()}
    record["figures"] = {name: spread(values, clean) for name, values in ratios.items()}
    record |= {"targets": judge(case, record), "clean_rounds": clean, "noise": worst_noise(timed)}
    return record | processes(results)
