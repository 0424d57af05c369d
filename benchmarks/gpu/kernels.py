"""The bytes a second that the kernels of rows on a device move, beside a copy: a run of the GPU benchmark."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import satrap
from benchmarks.workload import row_numbers
from satrap.device.kernels import kernels_of
from satrap.device.runs import PooledFeatures, Runs


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time gather and pool, sum and SGD step, and a copy of as many rows."""
    device, dim, samples = torch.device(job["device"]), job["dim"], job["samples"]
    rows = row_numbers(job["rows"], job["ids"], 1, job["part"], samples)[0]
    values = torch.zeros(job["rows"], dim, device=device)
    block = torch.empty(samples, len(rows) // samples * dim, device=device)
    frames = torch.from_numpy(rows.astype(np.int32)).to(device)
    features = _features(len(rows) // samples, dim, device)
    runs, num_rows = _runs(rows, samples, dim, device)
    kernels, absent = kernels_of(device), torch.empty(0, dim, device=device)
    other = torch.empty_like(block)

    def pool() -> None:
        kernels.pool(values, absent, frames, None, None, features, samples, block)

    def update() -> None:
        state = torch.empty(len(values), 0, device=device)
        kernels.update(values, state, runs, block.view(-1), satrap.SGD(lr=0.1), 0.1, 1.0, 1, skip_nonfinite=False)

    def copy() -> None:
        other.copy_(block)

    row_bytes = dim * 4
    moved = {"pool": 2 * len(rows) * row_bytes, "update": (len(rows) + 2 * num_rows) * row_bytes}
    moved["copy"] = 2 * block.numel() * 4
    rates = {}
    for name, call in (("copy", copy), ("pool", pool), ("update", update)):
        rates[f"{name}_gb_per_s"] = moved[name] / _seconds(call, device, job["num_warmup"], job["num_steps"]) / 1e9
    for name in ("pool", "update"):
        rates[f"{name}_share"] = rates[f"{name}_gb_per_s"] / rates["copy_gb_per_s"]
    return {"streams": {f"{job['ids']}:satrap": {name: round(rate, 4) for name, rate in rates.items()}}}


def _features(count: int, dim: int, device: torch.device) -> PooledFeatures:
    lines = torch.arange(count, dtype=torch.int32, device=device)
    zeros = torch.zeros_like(lines)
    return PooledFeatures(lines, lines * dim, zeros, zeros)


def _runs(rows: Any, samples: int, dim: int, device: torch.device) -> tuple[Runs, int]:
    """Return the runs of one batch, as the core prepares them, and how many rows they have."""
    order = np.argsort(rows, kind="stable")
    unique, begin = np.unique(rows[order], return_index=True)
    num_features = len(rows) // samples
    places = (order % samples * num_features + order // samples) * dim
    arrays = {
        "frames": unique.astype(np.int32),
        "begin": begin.astype(np.int32),
        "end": np.append(begin[1:], len(rows)).astype(np.int32),
        "places": places.astype(np.int32),
        "factors": None,
        "keys": None,
        "ids": None,
        "tables": np.array([0, len(unique)]),
    }
    return Runs.to_device(arrays, device), len(unique)


def _seconds(call: Callable[[], None], device: torch.device, num_warmup: int, num_steps: int) -> float:
    """Return the seconds of a call, with a queue of calls on the device."""
    for _ in range(num_warmup):
        call()
    _finish(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        call()
    _finish(device)
    return (time.perf_counter() - start) / num_steps


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
