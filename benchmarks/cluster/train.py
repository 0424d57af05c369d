"""The kind `train`: whole steps of the light DLRM with its rows on one server, at staleness 0 and 4 in turns, and after
them Paddle's parameter server (`paddle.py`) with the same model and batches, in other processes.

The two modes share the server's rows; each has its own model and batches, and Paddle gets the batches of the first. A
turn ends when its last update is applied.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster.processes import satrap_server
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.record import Rounds
from benchmarks.train.pairs import first_and_last
from benchmarks.workload import SAMPLES, Batches, load_batches, samples_file

TURN = 20
TOP = "light"
STALENESS = {"satrap": 0, "satrap_stale": 4}
STAGES = ("lookup", "update")


@dataclass(kw_only=True)
class Mode:
    """A staleness with its model and batches, and its measurements."""

    staleness: int
    step: Any
    batches: list[Any]
    seconds: list[float] = field(default_factory=list)
    """Seconds of each turn."""
    stages: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each turn by stage, as the stream counts them."""
    losses: list[Any] = field(default_factory=list)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both modes in turns."""
    import torch

    from benchmarks.cluster import tables
    from satrap import Deployment, Embeddings

    rows, dim, num_threads, num_warmup = (int(job[key]) for key in ("rows", "dim", "num_threads", "num_warmup"))
    num_steps = int(job["num_steps"])
    torch.set_num_threads(num_threads)
    tables.require_memory(rows, dim, num_tables=1)
    with satrap_server(num_threads) as (address, pid):
        deployment = Deployment([address])
        embeddings = Embeddings(tables.one_table(rows, dim), seed=1, num_threads=num_threads, deployment=deployment)
        worker = embeddings.worker
        assert worker.servers is not None
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
    }


def batches_of(job: Mapping[str, Any], number: int) -> Batches:
    """Return the batches of one mode in this round; number 0 is Paddle's too."""
    count = int(job["num_warmup"]) + int(job["num_steps"])
    part = len(STALENESS) * int(job["part"]) + number
    return load_batches(samples_file(Path(job["batches"]), int(job["rows"]), count, part))


def make_mode(embeddings: Any, label: str, job: Mapping[str, Any]) -> Mode:
    from benchmarks.contenders.satrap_table import inputs_of
    from benchmarks.train.model import DenseStep, satrap_model

    drawn = batches_of(job, list(STALENESS).index(label))
    batches = [inputs_of(*batch) for batch in zip(drawn.rows, drawn.dense, drawn.labels, strict=True)]
    step = DenseStep(satrap_model(embeddings, TOP), "fp32")
    return Mode(staleness=STALENESS[label], step=step, batches=batches)


def take_turn(embeddings: Any, mode: Mode, begin: int, end: int) -> None:
    """Train on some batches."""
    batches = mode.batches[begin:end]
    embeddings.staleness = mode.staleness
    optimizer = embeddings.optimizer(mode.step.optimizer)
    start = time.perf_counter()
    stream = embeddings.stream(batches)
    mode.losses += mode.step.train(optimizer, stream)
    embeddings.drain()
    mode.seconds.append(time.perf_counter() - start)
    seconds = stream.counters().stages
    mode.stages.append({stage: seconds[stage] for stage in STAGES})


def summarize(mode: Mode, num_steps: int) -> dict[str, Any]:
    """Return the figures of the turns after the first, which was the warm-up."""
    seconds, turns = sum(mode.seconds[1:]), mode.stages[1:]
    return {
        "samples_per_s": round(SAMPLES * num_steps / seconds),
        "step_ms": round(1e3 * seconds / num_steps, 3),
        **{f"{name}_ms": round(1e3 * sum(turn[name] for turn in turns) / num_steps, 3) for name in STAGES},
        **first_and_last(mode.losses),
    }


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the record. A ratio is None, and its target not met, where a side of it was not measured."""
    rates = rounds.values("samples_per_s")
    return {
        "top": TOP,
        **{name: rounds.spreads(name) for name in ("samples_per_s", "step_ms", "lookup_ms", "update_ms")},
        **({"flush_ms": flush["paddle"]} if (flush := rounds.spreads("flush_ms")) else {}),
        "figures": {
            f"ratio{label.removeprefix('satrap')}": rounds.against(label, ("paddle",), rates) or rounds.unmeasured()
            for label in STALENESS
        },
        "loss": rounds.losses(),
    }
