"""The kind `bytes`: what one lookup and one update put on the wire between worker and server, a sample.

Counted by a proxy between the two (`proxy.py`), so headers and framing are in it. `share` is of what a system would
send that knows of no repetition: for each id of each sample 8 bytes, its float32 row and its row's gradient. Between
worker and trainer there are the block and its gradient, whose size is known; here both are one process.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clock import peak_resident_bytes
from benchmarks.cluster.cases import ClusterCase
from benchmarks.cluster.command import satrap_server
from benchmarks.cluster.proxy import CountingProxy
from benchmarks.cluster.rows import GRADIENT
from benchmarks.machine import versions
from benchmarks.records import clean_rounds, each, judge, processes, spread, streams_of
from benchmarks.runs import Results
from benchmarks.workload import NUM_FEATURES, SAMPLES, batch_file

WIRES = ("float32", "float16")


def naive_bytes(dim: int) -> int:
    """Of a sample: an id, a float32 row and its gradient for each feature."""
    return NUM_FEATURES * (8 + 4 * dim + 4 * dim)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """One round: every kind of wire with the same batches, each on a new server, where rows are made on first touch."""
    return {
        "streams": {f"bytes:{wire}": count(job, wire) for wire in WIRES},
        "peak_resident_bytes": peak_resident_bytes(),
        "versions": versions("satrap", "numpy", "pyzmq"),
    }


def count(job: Mapping[str, Any], wire: str) -> dict[str, Any]:
    """Bytes of a sample: the mean over some steps."""
    from benchmarks.cluster import tables
    from satrap.config.features import Features

    rows, dim, num_threads, num_warmup = (int(job[key]) for key in ("rows", "dim", "num_threads", "num_warmup"))
    num_steps = int(job["num_steps"])
    features = Features(tables.one_table(rows, dim))
    path = batch_file(Path(job["batches"]), rows, "zipf", num_warmup + num_steps, int(job["part"]))
    batches = [tables.inputs_of(each) for each in np.load(path, mmap_mode="r")]
    gradient = np.full((SAMPLES, features.total_dim), GRADIENT, np.float32)
    seen, blocks = [], []
    with (
        satrap_server(num_threads) as (address, _),
        CountingProxy(address) as proxy,
        tables.reached(features, proxy.address, num_threads, wire=wire) as worker,
    ):
        for step, batch in enumerate(batches, start=1):
            before = proxy.counts()
            looked = worker.lookup(batch, step=step)
            assert looked.ticket is not None
            worker.update([looked.ticket], [gradient], step=step)
            seen.append({way: total - before[way] for way, total in proxy.counts().items()})
            blocks.append(looked.block.nbytes + gradient.nbytes)
    ways = {way: statistics.fmean(each[way] for each in seen[num_warmup:]) / SAMPLES for way in ("there", "back")}
    return {
        "there": round(ways["there"], 1),
        "back": round(ways["back"], 1),
        "share": round(sum(ways.values()) / naive_bytes(dim), 4),
        "trainer": round(statistics.fmean(blocks) / SAMPLES, 1),
    }


def make_record(case: ClusterCase, results: Results) -> dict[str, Any]:
    """The record of one case."""
    timed = streams_of("bytes:", results)
    clean = clean_rounds(timed)
    record: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows, "dim": case.dim}
    record |= {"num_threads": case.num_threads, "naive_bytes_per_sample": naive_bytes(case.dim)}
    for name in ("there", "back"):
        record[f"{name}_bytes_per_sample"] = {wire: spread(each(rounds, name), clean) for wire, rounds in timed.items()}
    record["trainer_bytes_per_sample"] = each(timed["float32"], "trainer")
    names = {"share": "float32", "share_float16": "float16"}
    record["figures"] = {name: spread(each(timed[wire], "share"), clean) for name, wire in names.items()}
    record |= {"targets": judge(case, record), "clean_rounds": clean}
    return record | processes(results)
