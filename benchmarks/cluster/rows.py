"""The kind `rows`: lookup and update through one server beside the same calls on rows in this process, in turns of a
few steps; Paddle's parameter server (`paddle.py`) does the same batches after them, in processes of its own.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.cluster.cases import ClusterCase
from benchmarks.cluster.command import satrap_server
from benchmarks.machine import versions
from benchmarks.records import Figure, against, clean_rounds, each, judge, processes, spread, streams_of, worst_noise
from benchmarks.runs import Results
from benchmarks.workload import BATCH_IDS, SAMPLES, Floats, batch_file

TURN = 5
GRADIENT = 1e-3


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """One round of ours."""
    from benchmarks.cluster import tables
    from satrap.config.features import Features
    from satrap.worker.local_rows import LocalWorker
    from satrap.worker.sharded_rows import ShardedWorker

    rows, dim, num_threads, num_warmup = (int(job[key]) for key in ("rows", "dim", "num_threads", "num_warmup"))
    count = num_warmup + int(job["num_steps"])
    tables.require_memory(rows, dim, num_tables=2)
    features = Features(tables.one_table(rows, dim))
    path = batch_file(Path(job["batches"]), rows, "zipf", count, int(job["part"]))
    batches = [tables.inputs_of(each) for each in np.load(path, mmap_mode="r")]
    gradient = np.full((SAMPLES, features.total_dim), GRADIENT, np.float32)
    with satrap_server(num_threads) as (address, pid), tables.reached(features, address, num_threads) as remote:
        local = LocalWorker(features, num_threads=num_threads)
        workers: dict[str, LocalWorker | ShardedWorker] = {"local": local, "remote": remote}
        for worker in workers.values():
            tables.fill(worker, worker.tables, rows)
            run(worker, batches[:num_warmup], gradient, step=2)
        before = read_cpu([pid])
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
        for begin in range(num_warmup, count, TURN):
            for name in sorted(workers, reverse=begin // TURN % 2 == 0):
                seconds[name] += run(workers[name], batches[begin : begin + TURN], gradient, step=2 + begin)
        noise = noise_between(before, read_cpu([pid]))
        peak = peak_resident_bytes([pid])
    unique = [len(np.unique(batch.values)) for batch in batches[:TURN]]
    return {
        "streams": {f"rows:{name}": {**summarize(spent), **noise} for name, spent in seconds.items()},
        "unique_share": round(statistics.fmean(unique) / BATCH_IDS, 3),
        "peak_resident_bytes": peak,
        "versions": versions("satrap", "numpy", "pyzmq"),
    }


def run(worker: Any, batches: Sequence[Any], gradient: Floats, *, step: int) -> list[tuple[float, float]]:
    """The seconds of the lookup and of the update of each batch; `step` is the first one's."""
    seconds = []
    for number, batch in enumerate(batches, start=step):
        start = time.perf_counter()
        looked = worker.lookup(batch, step=number)
        middle = time.perf_counter()
        worker.update([looked.ticket], [gradient], step=number)
        seconds.append((middle - start, time.perf_counter() - middle))
    return seconds


def summarize(seconds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    lookups, updates = zip(*seconds, strict=True)
    return {
        "rows_per_s": round(BATCH_IDS * len(seconds) / (sum(lookups) + sum(updates))),
        "step_ms": round(1e3 * statistics.median(map(sum, seconds)), 3),
        "lookup_ms": round(1e3 * statistics.median(lookups), 3),
        "update_ms": round(1e3 * statistics.median(updates), 3),
    }


def make_record(case: ClusterCase, results: Results) -> dict[str, Any]:
    """The record of one case. A ratio is None, and its target not met, where a side of it was not measured."""
    timed = streams_of("rows:", results)
    clean = clean_rounds(timed)
    record: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows, "dim": case.dim}
    record |= {"num_threads": case.num_threads, "unique_share": each(results["worker"], "unique_share")}
    for name in ("rows_per_s", "step_ms"):
        record[name] = {label: spread(each(rounds, name), clean) for label, rounds in timed.items()}
    for name in ("lookup_ms", "update_ms"):
        record[name] = {label: spread(each(timed[label], name), clean) for label in ("local", "remote")}
    if "paddle" in timed:
        record["flush_ms"] = spread(each(timed["paddle"], "flush_ms"), clean)
    rates = {label: each(rounds, "rows_per_s") for label, rounds in timed.items()}
    record["figures"] = {
        f"ratio_{peer}": against("remote", (peer,), rates, max, clean) or unmeasured(clean)
        for peer in ("local", "paddle")
    }
    record |= {"targets": judge(case, record), "clean_rounds": clean, "noise": worst_noise(timed)}
    return record | processes(results)


def unmeasured(clean: Sequence[bool]) -> Figure:
    """A figure without a value, so that a record shows what is missing."""
    return {**spread([None] * len(clean), clean), "all_peers_present": False}
