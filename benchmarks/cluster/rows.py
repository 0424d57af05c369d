"""The kind `rows`: lookup and update through one server beside the same calls on rows in this process, in turns of a
few steps. Paddle's parameter server (`paddle.py`) gets the same batches after them, in other processes.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.processes import satrap_server
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.record import Rounds, each
from benchmarks.workload import BATCH_IDS, SAMPLES, Floats, ids_file

TURN = 5
GRADIENT = 1e-3


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both workers in turns."""
    from benchmarks.cluster import tables
    from benchmarks.contenders.satrap_table import inputs_of
    from satrap.config.features import Features
    from satrap.worker.local_rows import local_worker

    rows, dim, num_threads, num_warmup = (int(job[key]) for key in ("rows", "dim", "num_threads", "num_warmup"))
    count = num_warmup + int(job["num_steps"])
    tables.require_memory(rows, dim, num_tables=2)
    features = Features(tables.one_table(rows, dim))
    path = ids_file(Path(job["batches"]), rows, "zipf", count, int(job["part"]))
    batches = [inputs_of(numbers) for numbers in np.load(path, mmap_mode="r")]
    gradient = np.full((SAMPLES, features.total_dim), GRADIENT, np.float32)
    with satrap_server(num_threads) as (address, pid), tables.connected(features, [address], num_threads) as remote:
        local = local_worker(features, num_threads=num_threads)
        workers = {"local": local, "remote": remote}
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
    }


def run(worker: Any, batches: Sequence[Any], gradient: Floats, *, step: int) -> list[tuple[float, float]]:
    """Return the seconds of the lookup and of the update of each batch; `step` is the first one's."""
    seconds = []
    for number, batch in enumerate(batches, start=step):
        start = time.perf_counter()
        lookup = worker.lookup(batch, step=number)
        middle = time.perf_counter()
        worker.update([lookup.ticket], [gradient], step=number)
        seconds.append((middle - start, time.perf_counter() - middle))
    return seconds


def summarize(seconds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    lookups, updates = zip(*seconds, strict=True)
    medians = {"step_ms": map(sum, seconds), "lookup_ms": lookups, "update_ms": updates}
    rate = {"rows_per_s": round(BATCH_IDS * len(seconds) / (sum(lookups) + sum(updates)))}
    return rate | {name: round(1e3 * statistics.median(spent), 3) for name, spent in medians.items()}


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the record. A ratio is None, and its target not met, where a side of it was not measured."""
    rates = rounds.values("rows_per_s")
    return {
        "unique_share": each(rounds.results["worker"], "unique_share"),
        **{name: rounds.spreads(name) for name in ("rows_per_s", "step_ms", "lookup_ms", "update_ms")},
        **({"flush_ms": flush["paddle"]} if (flush := rounds.spreads("flush_ms")) else {}),
        "figures": {
            f"ratio_{peer}": rounds.against("remote", (peer,), rates) or rounds.unmeasured()
            for peer in ("local", "paddle")
        },
    }
