"""The kind `bytes`: bytes of one lookup and one update on the wire between worker and server, per sample.

A proxy between the two counts them (`proxy.py`), so headers and framing are included. `share` compares them with a
system that ignores repetition: for each id of each sample 8 bytes, its float32 row and its row's gradient.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.cluster import ids_of, tables
from benchmarks.cluster.processes import satrap_server
from benchmarks.cluster.proxy import CountingProxy
from benchmarks.contenders.satrap_table import inputs_of
from benchmarks.harness.case import Case
from benchmarks.harness.record import Rounds
from benchmarks.workload import NUM_FEATURES, SAMPLES
from satrap.config.features import Features


def naive_bytes(dim: int) -> int:
    """Return the bytes of a sample with an id, a float32 row and its gradient for each feature."""
    return NUM_FEATURES * (8 + 4 * dim + 4 * dim)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure each number format with the same batches, each on a new server, where rows are created on first touch."""
    return {"streams": {f"bytes:{wire}": count(job, wire) for wire in ("float32", "float16")}}


def count(job: Mapping[str, Any], wire: str) -> dict[str, Any]:
    """Return the bytes of a sample, the mean over some steps."""
    features, threads, counts = Features(tables.one_table(job["rows"], job["dim"])), job["num_threads"], []
    gradient = tables.gradient_of(features)
    with (
        satrap_server(threads) as (address, _),
        CountingProxy(address) as proxy,
        tables.connected(features, [proxy.address], threads, wire=wire) as worker,
    ):
        for number, batch in enumerate(ids_of(job), 1):
            before = proxy.counts()
            tables.step(worker, inputs_of(batch), gradient, number)
            counts.append({way: total - before[way] for way, total in proxy.counts().items()})
    timed = counts[job["num_warmup"] :]
    ways = {way: statistics.fmean(step[way] for step in timed) / SAMPLES for way in ("there", "back")}
    sizes = {way: round(size, 1) for way, size in ways.items()}
    return sizes | {"share": round(sum(ways.values()) / naive_bytes(job["dim"]), 4)}


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    share = rounds.spreads("share")
    return {
        "naive_bytes_per_sample": naive_bytes(case.dim),
        **{f"{way}_bytes_per_sample": rounds.spreads(way) for way in ("there", "back")},
        "figures": {"share": share["float32"], "share_float16": share["float16"]},
    }
