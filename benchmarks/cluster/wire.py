"""The kind `bytes`: bytes of one lookup and one update on the wire between worker and server, per sample.

A proxy between the two counts them (`proxy.py`), so headers and framing are included. `share` compares them with a
system that ignores repetition: for each id of each sample 8 bytes, its float32 row and its row's gradient. Between
worker and trainer there are the block and its gradient, whose size is known; in this benchmark both are one process.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster.processes import satrap_server
from benchmarks.cluster.proxy import CountingProxy
from benchmarks.cluster.rows import GRADIENT
from benchmarks.harness.case import Case
from benchmarks.harness.record import Rounds
from benchmarks.workload import NUM_FEATURES, SAMPLES, ids_file


def naive_bytes(dim: int) -> int:
    """Return the bytes of a sample with an id, a float32 row and its gradient for each feature."""
    return NUM_FEATURES * (8 + 4 * dim + 4 * dim)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure each number format with the same batches, each on a new server, where rows are created on first touch."""
    return {
        "streams": {f"bytes:{wire}": count(job, wire) for wire in ("float32", "float16")},
    }


def count(job: Mapping[str, Any], wire: str) -> dict[str, Any]:
    """Return the bytes of a sample, the mean over some steps."""
    from benchmarks.cluster import tables
    from benchmarks.contenders.satrap_table import inputs_of
    from satrap.config.features import Features

    rows, dim, num_threads, num_warmup = (int(job[key]) for key in ("rows", "dim", "num_threads", "num_warmup"))
    num_steps = int(job["num_steps"])
    features = Features(tables.one_table(rows, dim))
    path = ids_file(Path(job["batches"]), rows, "zipf", num_warmup + num_steps, int(job["part"]))
    batches = [inputs_of(numbers) for numbers in np.load(path, mmap_mode="r")]
    gradient = np.full((SAMPLES, features.total_dim), GRADIENT, np.float32)
    counts, blocks = [], []
    with (
        satrap_server(num_threads) as (address, _),
        CountingProxy(address) as proxy,
        tables.connected(features, [proxy.address], num_threads, wire=wire) as worker,
    ):
        for step, batch in enumerate(batches, start=1):
            before = proxy.counts()
            lookup = worker.lookup(batch, step=step)
            assert lookup.ticket is not None
            worker.update([lookup.ticket], [gradient], step=step)
            counts.append({way: total - before[way] for way, total in proxy.counts().items()})
            blocks.append(lookup.block.nbytes + gradient.nbytes)
    ways = {way: statistics.fmean(step[way] for step in counts[num_warmup:]) / SAMPLES for way in ("there", "back")}
    return {
        **{way: round(size, 1) for way, size in ways.items()},
        "share": round(sum(ways.values()) / naive_bytes(dim), 4),
        "trainer": round(statistics.fmean(blocks) / SAMPLES, 1),
    }


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    share = rounds.spreads("share")
    return {
        "naive_bytes_per_sample": naive_bytes(case.dim),
        **{f"{way}_bytes_per_sample": rounds.spreads(way) for way in ("there", "back")},
        "trainer_bytes_per_sample": rounds.values("trainer")["float32"],
        "figures": {"share": share["float32"], "share_float16": share["float16"]},
    }
