"""The bytes a second that the kernels of rows on a device move, beside a copy: a run of the GPU benchmark.

pool        gather and pool: read a row for each id, write the block
update      sum the gradients of each row in order, and apply SGD
exchange    change places of rows on the device with rows at home; here home is memory of the device, too, so that
            the kernel's limit is that memory
to_home     the same with home in pinned memory of the host, whose limit is the bus
initialise  new rows from the host into their frames
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import satrap
from benchmarks.gpu.devices import bandwidths, seconds_of
from benchmarks.workload import row_numbers
from satrap.device.home_memory import IN, OUT, HomeMemory
from satrap.device.kernels import kernels_of
from satrap.device.row_layout import RowLayout
from satrap.device.row_memory import RowMemory
from satrap.device.runs import PooledFeatures, Runs

FLOAT = 4
EXCHANGED = 1 << 18
"""Rows that change places at a time."""
PASSES = {"exchange": 4, "to_home": 2, "initialise": 1}
"""How often each of these rows crosses what limits the kernel: read and written at both ends, or the bus both ways."""


class DeviceHome(HomeMemory):
    """Rows at home that are in memory of the device."""

    @torch.inference_mode(False)
    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time each kernel, and a copy on the device and over the bus."""
    device = torch.device(job["device"])
    values = torch.zeros(job["rows"], job["dim"], device=device)
    measured: dict[str, Any] = {**bandwidths(device), **_steps(job, device, values), **_moves(job, device, values)}
    for name in ("pool", "update", "exchange"):
        measured[f"{name}_share"] = measured[f"{name}_gb_per_s"] / measured["copy_gb_per_s"]
    for name in ("to_home", "initialise"):
        measured[f"{name}_share_of_bus"] = measured[f"{name}_gb_per_s"] / measured["bus_gb_per_s"]
    return {"streams": {f"{job['ids']}:satrap": {name: round(value, 4) for name, value in measured.items()}}}


def _steps(job: dict[str, Any], device: torch.device, values: Tensor) -> dict[str, float]:
    """Return the GB/s of lookups and updates, and their ids a second, as those of the peers."""
    dim, samples = job["dim"], job["samples"]
    rows = row_numbers(job["rows"], job["ids"], 1, job["part"], samples)[0]
    block = torch.empty(samples, len(rows) // samples * dim, device=device)
    frames = torch.from_numpy(rows.astype(np.int32)).to(device)
    features = _features(len(rows) // samples, dim, device)
    runs, num_rows = _runs(rows, samples, dim, device)
    kernels, absent = kernels_of(device), torch.empty(0, dim, device=device)
    state = torch.empty(len(values), 0, device=device)

    def pool() -> None:
        kernels.pool(values, absent, frames, None, None, features, samples, block)

    def update() -> None:
        kernels.update(values, state, runs, block.view(-1), satrap.SGD(lr=0.1), 0.1, 1.0, 1, skip_nonfinite=False)

    moved = {"pool": 2 * len(rows) * dim * FLOAT, "update": (len(rows) + 2 * num_rows) * dim * FLOAT}
    seconds = {
        name: seconds_of(call, device, job["num_warmup"], job["num_steps"])
        for name, call in (("pool", pool), ("update", update))
    }
    return {
        **{f"{name}_gb_per_s": moved[name] / seconds[name] / 1e9 for name in moved},
        "pool_rows_per_s": len(rows) / seconds["pool"],
        "step_rows_per_s": len(rows) / (seconds["pool"] + seconds["update"]),
    }


def _moves(job: dict[str, Any], device: torch.device, values: Tensor) -> dict[str, float]:
    """Return the GB/s of rows that change places with rows at home, and of new rows."""
    layout = RowLayout("float32", job["dim"], 0)
    count = min(EXCHANGED, job["rows"] // 2)
    rng = np.random.default_rng(job["part"])
    frames = rng.permutation(job["rows"])[:count].astype(np.int32)
    slots, both = rng.permutation(count).astype(np.int32), np.full(count, IN | OUT, np.int32)
    new, no_state = np.zeros((count, job["dim"]), np.float32), np.empty((count, 0), np.float32)
    calls: dict[str, Callable[[], object]] = {}
    for name, home in (("exchange", DeviceHome(layout, device)), ("to_home", HomeMemory(layout, device))):
        home.reserve(count, ["bench"])
        for segment in home.segments:
            segment.zero_()
        at = [torch.from_numpy(each).to(device) for each in (frames, slots, both)]
        state = torch.empty(len(values), 0, device=device)
        calls[name] = partial(kernels_of(device).exchange, values, state, home, *at)
    memory = RowMemory(layout, device, [0])
    memory.values, memory.state = values, torch.empty(len(values), 0, device=device)
    calls["initialise"] = partial(memory.write, frames, new, no_state)
    size = count * layout.row_bytes
    return {
        f"{name}_gb_per_s": PASSES[name] * size / seconds_of(call, device, job["num_warmup"], job["num_steps"]) / 1e9
        for name, call in calls.items()
    }


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
