"""The kinds `train` and `modules`: whole steps of the light DLRM with its rows on servers, in two modes in turns.

    train    one server: staleness 0 and 4, and after them Paddle's parameter server (`paddle.py`) with the same model
             and the batches of the first mode, in other processes
    modules  two servers: a stream, and modules that look up inside the model

The two modes share the servers' rows; each has its own model and batches. A turn ends when its last update is applied.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.cluster import MODES, TOP, samples_of, tables
from benchmarks.cluster.processes import satrap_server
from benchmarks.contenders.satrap_table import inputs_of
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.record import Rounds
from benchmarks.train.model import DenseStep, WithModules, satrap_model
from benchmarks.train.pairs import first_and_last
from benchmarks.workload import SAMPLES
from satrap import Deployment, Embeddings

TURN = 20
NUM_SERVERS = {"train": 1, "modules": 2}


class Mode:
    """One way to train, with its model and batches, and its measurements."""

    def __init__(self, embeddings: Embeddings, label: str, job: Mapping[str, Any]) -> None:
        drawn = samples_of(job, label)
        self.batches = [inputs_of(*batch) for batch in zip(drawn.rows, drawn.dense, drawn.labels, strict=True)]
        self.embeddings, self.staleness = embeddings, 4 if label == "satrap_stale" else 0
        self.step = DenseStep(satrap_model(embeddings, TOP), "fp32")
        self.modules = WithModules(embeddings, self.step) if label == "satrap_modules" else None
        self.seconds: list[float] = []
        """Seconds of each turn."""
        self.losses: list[Any] = []

    def take_turn(self, begin: int, end: int) -> None:
        """Train on some batches."""
        self.embeddings.staleness = self.staleness
        optimizer, batches = self.embeddings.optimizer(self.step.optimizer), self.batches[begin:end]
        start = time.perf_counter()
        if self.modules is None:
            self.losses += self.step.train(optimizer, self.embeddings.stream(batches))
        else:
            self.modules.optimizer = optimizer
            self.losses += self.modules.train(batches)
        self.embeddings.drain()
        self.seconds.append(time.perf_counter() - start)

    def summarize(self, num_steps: int) -> dict[str, Any]:
        """Return the figures of the turns after the first, which was the warm-up."""
        seconds = sum(self.seconds[1:])
        rates = {"samples_per_s": round(SAMPLES * num_steps / seconds), "step_ms": round(1e3 * seconds / num_steps, 3)}
        return rates | first_and_last(self.losses)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both modes in turns."""
    threads, num_warmup = job["num_threads"], job["num_warmup"]
    torch.set_num_threads(threads)
    with ExitStack() as servers:
        given = [servers.enter_context(satrap_server(threads)) for _ in range(NUM_SERVERS[job["kind"]])]
        addresses, pids = [list(part) for part in zip(*given, strict=True)]
        declared = tables.one_table(job["rows"], job["dim"])
        embeddings = Embeddings(declared, seed=1, num_threads=threads, deployment=Deployment(addresses))
        worker = embeddings.worker
        assert worker.servers is not None
        try:
            tables.fill(worker, worker.tables, job["rows"])
            modes = {label: Mode(embeddings, label, job) for label in MODES[job["kind"]]}
            for mode in modes.values():
                mode.take_turn(0, num_warmup)
            before = read_cpu(pids)
            for begin in range(num_warmup, num_warmup + job["num_steps"], TURN):
                for mode in modes.values():
                    mode.take_turn(begin, begin + TURN)
            noise = noise_between(before, read_cpu(pids))
            peak = peak_resident_bytes(pids)
        finally:
            worker.servers.close()
    return {
        "streams": {
            f"{job['kind']}:{label}": mode.summarize(job["num_steps"]) | noise for label, mode in modes.items()
        },
        "peak_resident_bytes": peak,
    }


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the record. A ratio is None, and its target not met, where a side of it was not measured."""
    rates = rounds.values("samples_per_s")
    if case.kind == "modules":
        figures = {"ratio_stream": rounds.against("satrap_modules", ("satrap",), rates)}
    else:
        figures = {
            f"ratio{label.removeprefix('satrap')}": rounds.against(label, ("paddle",), rates) or rounds.unmeasured()
            for label in MODES["train"]
        }
    return {
        "top": TOP,
        **{name: rounds.spreads(name) for name in ("samples_per_s", "step_ms", "flush_ms")},
        "figures": figures,
        "loss": rounds.losses(),
    }
