"""Whole training steps of NVIDIA's small DLRM with rows on a device: a run of the GPU benchmark.

The batches are in host memory, as a loader leaves them. The peer is the same model in plain PyTorch: one `EmbeddingBag`
with sparse gradients and SGD, whose rows are those of all tables, so that its lookup is fused too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import satrap
from benchmarks.gpu.cases import BOTTOM, TOP
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.workload import NUM_DENSE, NUM_FEATURES, hashed_ids, row_numbers, rows_per_feature, total_rows
from satrap.data.inputs import Inputs
from satrap.models import DLRM

LR, RANGE = 0.1, 0.01
FLOAT_BYTES = 4


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Train one contender for some steps."""
    device = torch.device(job["device"])
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    contender = TorchJob(job, device) if job["contender"] == "torch" else SatrapJob(job, device)
    num_steps = job["num_warmup"] + job["num_steps"]
    numbers = row_numbers(job["rows"], job["ids"], num_steps, job["part"], job["samples"])
    rng = np.random.default_rng(job["part"])
    dense = rng.standard_normal((num_steps, job["samples"], NUM_DENSE), np.float32)
    labels = (rng.random((num_steps, job["samples"])) < 0.25).astype(np.float32)
    steps = contender.steps(list(zip(numbers, dense, labels, strict=True)))
    losses = [next(steps) for _ in range(job["num_warmup"])]
    _finish(device)
    moved = contender.moved_rows()
    before, start = read_cpu(), time.perf_counter()
    losses += list(steps)
    _finish(device)
    seconds = time.perf_counter() - start
    result = {
        "samples_per_s": round(job["samples"] * job["num_steps"] / seconds),
        "step_ms": round(1e3 * seconds / job["num_steps"], 3),
        "moved_rows_per_step": round((contender.moved_rows() - moved) / job["num_steps"]),
        "loss_first": round(float(losses[0]), 6),
        "loss_last": round(float(losses[-1]), 6),
        **noise_between(before, read_cpu()),
    }
    return {"streams": {f"{job['top']}/{job['precision']}:{job['contender']}": result}}


class Step:
    """The dense network and its step, as NVIDIA trains it: SGD, and with amp in half precision with a scaled loss."""

    def __init__(self, model: nn.Module, precision: str, device: torch.device) -> None:
        self.amp, self.device = precision.startswith("amp"), device
        self.model: Callable[..., Tensor] = model
        if precision.endswith("compile"):
            self.model = torch.compile(model)
        self.dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp and device.type == "cuda")

    def loss(self, dense: Tensor, block: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.amp):
            logits = self.model(dense, block)
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)


class SatrapJob:
    """Satrap: 26 tables on the device, one for each feature; with less than all rows there, the others are at home."""

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        tables = [
            satrap.Table(
                f"c{number}", dim=job["dim"], optimizer=satrap.SGD(lr=LR), initial=satrap.Uniform(-RANGE, RANGE)
            )
            for number in range(NUM_FEATURES)
        ]
        on_device = None if job["share"] == 1.0 else int(job["share"] * job["rows"] * job["dim"] * FLOAT_BYTES)
        features = {table.name: table for table in tables}
        self.embeddings = satrap.Embeddings(features, device=device, device_memory=on_device, seed=1)
        model = DLRM(NUM_DENSE, self.embeddings, bottom=BOTTOM, top=TOP).to(device)
        self.step = Step(model, job["precision"], device)
        self.optimizer = self.embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
        for batch in self.embeddings.stream(self._every_row(job["rows"], job["samples"])):
            del batch  # dropped: its rows are inserted

    def _every_row(self, rows: int, samples: int) -> Iterator[Inputs]:
        """Yield batches of every row, which the peers' tables have from the start."""
        count = rows_per_feature(rows)
        first = np.arange(NUM_FEATURES)[:, None] * count
        for begin in range(0, count, samples):
            numbers = first + np.arange(begin, begin + samples)[None, :] % count
            yield self._inputs(numbers.reshape(-1))

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
        self.step = Step(model, job["precision"], device)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=LR), torch.optim.SGD(self.rows.parameters(), lr=LR)]

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


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
