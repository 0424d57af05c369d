"""The kind `rows`: lookup and update through one server beside the same calls on rows in this process, in turns of a
few steps. Paddle's parameter server (`paddle.py`) gets the same batches after them, in other processes.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cluster import ids_of, tables
from benchmarks.cluster.processes import satrap_server
from benchmarks.contenders.satrap_table import inputs_of
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.record import Rounds
from benchmarks.workload import BATCH_IDS
from satrap.config.features import Features
from satrap.worker.local_rows import local_worker

TURN = 5


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both workers in turns."""
    features, num_warmup = Features(tables.one_table(job["rows"], job["dim"])), job["num_warmup"]
    threads = job["num_threads"]
    batches, gradient = [inputs_of(numbers) for numbers in ids_of(job)], tables.gradient_of(features)
    with satrap_server(threads) as (address, pid), tables.connected(features, [address], threads) as remote:
        local = local_worker(features, num_threads=threads)
        workers = {"local": local, "remote": remote}
        for worker in workers.values():
            tables.fill(worker, worker.tables, job["rows"])
            for number, batch in enumerate(batches[:num_warmup], 2):
                tables.step(worker, batch, gradient, number)
        before = read_cpu([pid])
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
        for begin in range(num_warmup, len(batches), TURN):
            for name in sorted(workers, reverse=begin // TURN % 2 == 0):
                turn = enumerate(batches[begin : begin + TURN], 2 + begin)
                seconds[name] += [tables.step(workers[name], batch, gradient, number) for number, batch in turn]
        noise = noise_between(before, read_cpu([pid]))
        peak = peak_resident_bytes([pid])
    return {
        "streams": {f"rows:{name}": {**summarize(spent), **noise} for name, spent in seconds.items()},
        "peak_resident_bytes": peak,
    }


def summarize(seconds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    lookups, updates = zip(*seconds, strict=True)
    medians = {"step_ms": map(sum, seconds), "lookup_ms": lookups, "update_ms": updates}
    rate = {"rows_per_s": round(BATCH_IDS * len(seconds) / (sum(lookups) + sum(updates)))}
    return rate | {name: round(1e3 * statistics.median(spent), 3) for name, spent in medians.items()}


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the record. A ratio is None, and its target not met, where a side of it was not measured."""
    rates = rounds.values("rows_per_s")
    return {
        **{name: rounds.spreads(name) for name in ("rows_per_s", "step_ms", "lookup_ms", "update_ms", "flush_ms")},
        "figures": {
            f"ratio_{peer}": rounds.against("remote", (peer,), rates) or rounds.unmeasured()
            for peer in ("local", "paddle")
        },
    }
