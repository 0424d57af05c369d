"""The kind `train`: whole steps of the light DLRM with its rows on one server, at staleness 0 and 4 in turns, and after
them Paddle's parameter server (`paddle.py`) with the same model and batches, in processes of its own.

The two modes share the server's rows and have each a model and batches of their own; Paddle gets the batches of the
first. A turn ends when its last update is applied.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.cluster.cases import ClusterCase
from benchmarks.cluster.command import satrap_server
from benchmarks.cluster.rows import unmeasured
from benchmarks.machine import versions
from benchmarks.records import against, clean_rounds, each, judge, processes, spread, streams_of, worst_noise
from benchmarks.runs import Results
from benchmarks.train.cases import BOTTOM, TOPS
from benchmarks.train.workload import NUM_DENSE, Batches, batches_file, load_batches
from benchmarks.workload import SAMPLES, hashed_ids

TURN = 20
TOP = "light"
STALENESS = {"satrap": 0, "satrap_stale": 4}
LOSS_STEPS = 4  # averaged at either end
STAGES = ("lookup", "update")


@dataclass(kw_only=True)
class Mode:
    """A staleness with its model and batches, and what was measured of it."""

    staleness: int
    step: Any
    batches: list[Any]
    seconds: list[float] = field(default_factory=list)
    """Of each turn."""
    stages: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each turn by stage, as the stream counts them."""
    losses: list[Any] = field(default_factory=list)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """One round of ours."""
    import torch

    from benchmarks.cluster import tables
    from satrap import Embeddings
    from satrap.worker.sharded_rows import ShardedWorker

    rows, dim, num_threads, num_warmup = (int(job[key]) for key in ("rows", "dim", "num_threads", "num_warmup"))
    num_steps = int(job["num_steps"])
    torch.set_num_threads(num_threads)
    tables.require_memory(rows, dim, num_tables=1)
    with satrap_server(num_threads) as (address, pid):
        embeddings = Embeddings(tables.one_table(rows, dim), seed=1, num_threads=num_threads, servers=[address])
        worker = embeddings.worker
        assert isinstance(worker, ShardedWorker)
        try:
            tables.fill(worker, worker.tables, rows)
            modes = {label: make_mode(embeddings, label, job) for label in STALENESS}
            for mode in modes.values():
                take_turn(embeddings, mode, 0, num_warmup)
            before = read_cpu([pid])
            for begin in range(num_warmup, num_warmup + num_steps, TURN):
                for mode in modes.values():
                    take_turn(embeddings, mode, begin, begin + TURN)
            noise = noise_between(before, read_cpu([pid]))
            peak = peak_resident_bytes([pid])
        finally:
            worker.servers.close()
    return {
        "streams": {f"train:{label}": {**summarize(mode, num_steps), **noise} for label, mode in modes.items()},
        "peak_resident_bytes": peak,
        "versions": versions("satrap", "torch", "numpy", "pyzmq"),
    }


def batches_of(job: Mapping[str, Any], number: int) -> Batches:
    """The batches of one mode in this round; number 0 is Paddle's too."""
    count = int(job["num_warmup"]) + int(job["num_steps"])
    part = len(STALENESS) * int(job["part"]) + number
    return load_batches(batches_file(Path(job["batches"]), int(job["rows"]), count, part))


def make_mode(embeddings: Any, label: str, job: Mapping[str, Any]) -> Mode:
    import torch

    from benchmarks.train.contenders import FEATURES
    from benchmarks.train.model import SEED, DenseStep
    from satrap.data.inputs import Inputs
    from satrap.models import DLRM

    torch.manual_seed(SEED)
    model = DLRM(NUM_DENSE, embeddings, bottom=BOTTOM, top=TOPS[TOP])
    drawn = batches_of(job, list(STALENESS).index(label))
    batches = [
        Inputs(names=FEATURES, values=hashed_ids(rows), batch_size=SAMPLES, dense=dense, label=labels)
        for rows, dense, labels in zip(drawn.rows, drawn.dense, drawn.labels, strict=True)
    ]
    return Mode(staleness=STALENESS[label], step=DenseStep(model, "fp32"), batches=batches)


def take_turn(embeddings: Any, mode: Mode, begin: int, end: int) -> None:
    """Some batches, in the loop that a user writes."""
    batches = mode.batches[begin:end]
    embeddings.staleness = mode.staleness
    optimizer = embeddings.optimizer(mode.step.optimizer)
    start = time.perf_counter()
    stream = embeddings.stream(batches)
    for batch in stream:
        loss = mode.step.loss(batch.dense, batch.embeddings, batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mode.losses.append(loss.detach())
    embeddings.drain()
    mode.seconds.append(time.perf_counter() - start)
    mode.stages.append({stage: getattr(stream.seconds, stage) for stage in STAGES})


def summarize(mode: Mode, num_steps: int) -> dict[str, Any]:
    """The first turn was the warm-up."""
    seconds, stages = sum(mode.seconds[1:]), mode.stages[1:]
    losses = [float(loss) for loss in mode.losses]
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"the loss is not finite: {losses}")
    return {
        "samples_per_s": round(SAMPLES * num_steps / seconds),
        "step_ms": round(1e3 * seconds / num_steps, 3),
        **{f"{name}_ms": round(1e3 * sum(each[name] for each in stages) / num_steps, 3) for name in STAGES},
        **first_and_last(losses),
    }


def first_and_last(losses: Sequence[float]) -> dict[str, float]:
    """The loss at both ends, so that a contender that does not train is seen."""
    ends = {"loss_first": losses[:LOSS_STEPS], "loss_last": losses[-LOSS_STEPS:]}
    return {name: round(statistics.fmean(some), 4) for name, some in ends.items()}


def make_record(case: ClusterCase, results: Results) -> dict[str, Any]:
    """The record of one case. A ratio is None, and its target not met, where a side of it was not measured."""
    timed = streams_of("train:", results)
    clean = clean_rounds(timed)
    record: dict[str, Any] = {"case": case.name, "kind": case.kind, "rows": case.rows, "dim": case.dim}
    record |= {"num_threads": case.num_threads, "top": TOP}
    for name in ("samples_per_s", "step_ms"):
        record[name] = {label: spread(each(rounds, name), clean) for label, rounds in timed.items()}
    for name in ("lookup_ms", "update_ms"):
        record[name] = {label: spread(each(timed[label], name), clean) for label in STALENESS}
    if "paddle" in timed:
        record["flush_ms"] = spread(each(timed["paddle"], "flush_ms"), clean)
    rates = {label: each(rounds, "samples_per_s") for label, rounds in timed.items()}
    record["figures"] = {
        f"ratio{label.removeprefix('satrap')}": against(label, ("paddle",), rates, max, clean) or unmeasured(clean)
        for label in STALENESS
    }
    record["loss"] = {
        label: [None if result is None else [result["loss_first"], result["loss_last"]] for result in rounds]
        for label, rounds in timed.items()
    }
    record |= {"targets": judge(case, record), "clean_rounds": clean, "noise": worst_noise(timed)}
    return record | processes(results)
