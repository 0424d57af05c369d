"""Whole training steps of NVIDIA's small DLRM with rows on a device: a run of the GPU benchmark.

The batches are in host memory, as a loader leaves them. The peer is the same model in plain PyTorch: one `EmbeddingBag`
with sparse gradients and SGD, whose rows are those of all tables, so that its lookup is fused too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import satrap
from benchmarks.contenders import CAPACITY_SLACK
from benchmarks.gpu.cases import BOTTOM, TOP
from benchmarks.gpu.devices import bandwidths, finish
from benchmarks.gpu.sizes import largest, memory_found
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.workload import NUM_DENSE, NUM_FEATURES, hashed_ids, row_numbers, rows_per_feature, total_rows
from satrap.data.inputs import Inputs
from satrap.device.row_layout import DTYPES
from satrap.models import DLRM

LR, RANGE = 0.1, 0.01
RESOLVED = 3  # batches that measure the host alone


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train one contender for some steps."""
    device = torch.device(job["device"])
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    measured: dict[str, Any] = bandwidths(device)
    job = sized(job, device)
    contender = TorchJob(job, device) if job["contender"] == "torch" else SatrapJob(job, device)
    num_steps = job["num_warmup"] + job["num_steps"]
    numbers = row_numbers(job["rows"], job["ids"], num_steps, job["part"], job["samples"])
    rng = np.random.default_rng(job["part"])
    dense = rng.standard_normal((num_steps, job["samples"], NUM_DENSE), np.float32)
    labels = (rng.random((num_steps, job["samples"])) < 0.25).astype(np.float32)
    measured |= contender.host_rate(numbers[: min(RESOLVED, num_steps)])
    steps = contender.steps(list(zip(numbers, dense, labels, strict=True)))
    losses = [next(steps) for _ in range(job["num_warmup"])]
    finish(device)
    moved = contender.moved_rows()
    before, start = read_cpu(), time.perf_counter()
    losses += list(steps)
    finish(device)
    seconds = time.perf_counter() - start
    result = {
        "samples_per_s": round(job["samples"] * job["num_steps"] / seconds),
        "step_ms": round(1e3 * seconds / job["num_steps"], 3),
        "moved_rows_per_step": round((contender.moved_rows() - moved) / job["num_steps"]),
        "unique_per_sample": round(len(np.unique(numbers[-1])) / job["samples"], 3),
        "rows_found": total_rows(job["rows"]),
        "on_device_share": job["share"],
        "loss_first": round(float(losses[0]), 6),
        "loss_last": round(float(losses[-1]), 6),
        **measured,
        **noise_between(before, read_cpu()),
    }
    return {"streams": {f"{job['top']}/{job['precision']}:{job['contender']}": result}}


def sized(job: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the job with as many rows as fit, and the share of them on the device, if it wants the largest model."""
    if not job["sizes_itself"]:
        return job
    row_bytes = job["dim"] * DTYPES[job["dtype"]].itemsize
    found = memory_found(device, job["samples"], job["num_warmup"] + job["num_steps"], job["rows"] * row_bytes)
    sizes = largest(job["rows"], found, row_bytes)
    return {**job, "rows": sizes.rows, "share": sizes.on_device / sizes.rows}


class Step:
    """The dense network and its step, as NVIDIA trains it: SGD, and with amp in half precision with a scaled loss."""

    def __init__(self, model: nn.Module, switches: Sequence[str], device: torch.device) -> None:
        """switches: what is on."""
        self.amp, self.device = "amp" in switches, device
        self.model: Callable[..., Tensor] = model
        if "compile" in switches:
            # Without a GPU the question is only whether the model can be compiled.
            self.model = torch.compile(model, backend="inductor" if device.type == "cuda" else "eager")
        self.dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp and device.type == "cuda")

    def loss(self, dense: Tensor, block: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.amp):
            logits = self.model(dense, block)
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)


class SatrapJob:
    """Satrap: 26 tables on the device, one for each feature; with less than all rows there, the others are at home."""

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        self.rows = rows_per_feature(job["rows"])
        tables = [
            satrap.Table(
                f"c{number}",
                dim=job["dim"],
                dtype=job["dtype"],
                optimizer=satrap.SGD(lr=LR),
                initial=satrap.Uniform(-RANGE, RANGE),
            )
            for number in range(NUM_FEATURES)
        ]
        row_bytes = job["dim"] * DTYPES[job["dtype"]].itemsize
        memory: Any = None if job["share"] == 1.0 else int(job["share"] * NUM_FEATURES * self.rows * row_bytes)
        if job["bounded"]:
            tables = [replace(table, capacity=int(self.rows * CAPACITY_SLACK) + 1) for table in tables]
        if "fused" not in job["switches"]:
            # Tables with memory that is theirs alone have their own kernels for lookups and for updates.
            memory = {table.name: (table.capacity or self.rows) * row_bytes for table in tables}
        features = {table.name: table for table in tables}
        self.embeddings = satrap.Embeddings(features, device=device, device_memory=memory, seed=1)
        model = DLRM(NUM_DENSE, self.embeddings, bottom=BOTTOM, top=TOP).to(device)
        self.step = Step(model, job["switches"], device)
        self.optimizer = self.embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
        for batch in self.embeddings.stream(self._every_row(job["samples"])):
            del batch  # dropped: its rows are inserted

    def _every_row(self, samples: int) -> Iterator[Inputs]:
        """Yield batches of every row, which the peers' tables have from the start."""
        first = np.arange(NUM_FEATURES)[:, None] * self.rows
        for begin in range(0, self.rows, samples):
            numbers = first + np.arange(begin, begin + samples)[None, :] % self.rows
            yield self._inputs(numbers.reshape(-1))

    def host_rate(self, batches: Any) -> dict[str, float]:
        """Return the ids/s that the host resolves, as the thread that reads ahead does, while nothing else runs."""
        worker: Any = self.embeddings.worker
        given, step = [self._inputs(numbers) for numbers in batches], self.embeddings.step + 1
        start = time.perf_counter()
        for inputs in given:
            worker.drop(worker.resolve(inputs, step=step, oldest_open=step).resolved["ticket"])
        return {"resolve_ids_per_s": round(batches.size / (time.perf_counter() - start))}

    def moved_rows(self) -> int:
        """Return how many rows were moved to the device so far."""
        return sum(store.stats().get("moved_in", 0) for store in self.embeddings.tables.values())

    def _inputs(self, numbers: Any, dense: Any = None, labels: Any = None) -> Inputs:
        return Inputs(
            names=self.embeddings.features.names,
            values=hashed_ids(numbers),
            batch_size=len(numbers) // NUM_FEATURES,
            dense=dense,
            label=labels,
        )

    def steps(self, batches: Sequence[Any]) -> Iterator[Tensor]:
        scaler = self.step.scaler
        for batch in self.embeddings.stream([self._inputs(*each) for each in batches]):
            loss = self.step.loss(batch.dense, batch.embeddings, batch.label)
            self.optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            yield loss.detach()


class TorchJob:
    """Plain PyTorch on the same device."""

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        self.device = device
        self.rows = nn.EmbeddingBag(total_rows(job["rows"]), job["dim"], mode="sum", sparse=True, device=device)
        nn.init.uniform_(self.rows.weight, -RANGE, RANGE)
        features = {f"c{number}": satrap.Table(f"c{number}", dim=job["dim"]) for number in range(NUM_FEATURES)}
        model = DLRM(NUM_DENSE, satrap.Embeddings(features), bottom=BOTTOM, top=TOP).to(device)
        self.step = Step(model, job["switches"], device)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=LR), torch.optim.SGD(self.rows.parameters(), lr=LR)]

    def host_rate(self, batches: Any) -> dict[str, float]:
        """Return nothing: the host resolves no ids."""
        return {}

    def moved_rows(self) -> int:
        """Return 0: all rows stay on the device."""
        return 0

    def steps(self, batches: Sequence[Any]) -> Iterator[Tensor]:
        scaler = self.step.scaler
        for numbers, dense, labels in batches:
            by_sample = np.ascontiguousarray(numbers.reshape(NUM_FEATURES, -1).T).reshape(-1, 1)
            ids, floats, wanted = (torch.from_numpy(each).to(self.device) for each in (by_sample, dense, labels))
            block = self.rows(ids).view(len(dense), -1)
            loss = self.step.loss(floats, block, wanted)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            for optimizer in self.optimizers:
                scaler.step(optimizer)
            scaler.update()
            yield loss.detach()
