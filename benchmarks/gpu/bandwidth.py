"""The bytes a second that the kernels of rows on a device move, beside a copy: a part of the GPU benchmark.

pool           gather and pool: read a row for each id, write the block
copy_sequence  the same into sequences
update         sum the gradients of each row in order, and step
exchange       change places of rows on the device with rows at home; here home is memory of the device, too, so that
               the kernel's limit is that memory
to_home        the same with home in pinned memory of the host, whose limit is the bus

The column of three values is one of 26 features of a batch: its runs have 21,845 gradients, while those of the others
have one or two. `without_column_ms` is the update of the same batch where this feature is drawn like the others.

Values are random, and what the first call returns is compared with the reference. A share above 1 is possible: hot rows
of Zipf's ids are read from the cache.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.devices import bandwidths, device, seconds_of, sizes
from benchmarks.gpu.kernels import (
    DIM,
    LENGTH,
    OPTIMIZERS,
    as_integers,
    copied,
    draw_runs,
    kernels_under_test,
    pooled_features,
    random_values,
    require_same,
)
from benchmarks.workload import NUM_FEATURES, row_numbers
from satrap.config.tables import Table
from satrap.device import reference
from satrap.device.home_memory import DTYPES, IN, OUT, HomeMemory, RowLayout
from satrap.device.runs import RowUpdate
from satrap.table.engine import native_config

FLOAT, COMPARED_RUNS = 4, 512
COLUMN = "a column of three values"
"""Ids of which those of the first feature are three."""


class DeviceHome(HomeMemory):
    """Rows at home that are in memory of the device."""

    @torch.inference_mode(False)
    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


class Bandwidth:
    """The part that times kernels."""

    def __init__(self, job: Any) -> None:
        self.kernels = kernels_under_test(job.kernels)
        self.copy: dict[str, float] | None = None
        self.names = [
            "pool/float32/uniform",
            "update/SGD/float32/uniform",
            "exchange/float32",
            "to_home/float32",
            "pool/float32/zipf",
            "update/SGD/float32/zipf",
            f"update/SGD/float32/{COLUMN}",
            "pool/float16/uniform",
            "update/SGD/float16/uniform",
            "update/RowWiseAdagrad/float32/zipf",
            "update/Adam/float32/zipf",
            "copy_sequence/float32/uniform",
        ]

    def measure(self, name: str) -> dict[str, Any]:
        """Check one kernel, time it, and return its share of a copy."""
        self.copy = self.copy or bandwidths()
        kernel, *form = name.split("/")
        call, num_bytes, others = getattr(self, f"_{kernel}")(*form)
        seconds = seconds_of(call, sizes().num_calls)
        rate = num_bytes / seconds / 1e9
        limit = "bus" if kernel == "to_home" else "copy"
        return {
            "gb_per_s": round(rate, 2),
            "ms": round(1e3 * seconds, 4),
            f"share_of_{limit}": round(rate / self.copy[f"{limit}_gb_per_s"], 3),
            f"{limit}_gb_per_s": self.copy[f"{limit}_gb_per_s"],
            **others,
        }

    def _pool(self, dtype: str, ids: str) -> tuple[Callable[[], object], int, dict[str, Any]]:
        values, frames = self._rows(dtype, ids)
        samples, absent = sizes().samples, torch.empty(0, DIM, device=device())
        block = torch.full((samples, NUM_FEATURES * DIM), 7.0, device=device())
        call = partial(self.kernels.pool, values, absent, frames, None, None, pooled_features(), samples, block)
        call()
        gathered = values[frames].float().view(NUM_FEATURES, samples, DIM)
        require_same("the block", block.view(samples, NUM_FEATURES, DIM), gathered.transpose(0, 1))
        del gathered
        peer = seconds_of(partial(torch.nn.functional.embedding, frames, values), sizes().num_calls)
        return (
            call,
            len(frames) * (DIM * (DTYPES[dtype].itemsize + FLOAT) + FLOAT),
            {"ids": len(frames), "torch_embedding_ms": round(1e3 * peer, 4)},
        )

    def _copy_sequence(self, dtype: str, ids: str) -> tuple[Callable[[], object], int, dict[str, Any]]:
        values, frames = self._rows(dtype, ids)
        samples, absent = sizes().samples, torch.empty(0, DIM, device=device())
        offsets = torch.arange(0, len(frames) + 1, LENGTH, device=device())
        samples = min(samples, len(offsets) - 1)
        out = torch.full((samples, LENGTH, DIM), 7.0, device=device())
        call = partial(self.kernels.copy_sequence, values, absent, frames, offsets, 0, out)
        call()
        require_same("the sequences", out.view(-1, DIM), values[frames[: samples * LENGTH]].float())
        return call, samples * LENGTH * (DIM * (DTYPES[dtype].itemsize + FLOAT) + FLOAT), {"samples": samples}

    def _update(self, name: str, dtype: str, ids: str) -> tuple[Callable[[], object], int, dict[str, Any]]:
        values, frames = self._rows(dtype, ids)
        optimizer, rng = OPTIMIZERS[name], np.random.default_rng(1)
        state_dim = native_config(Table("t", dim=DIM, optimizer=optimizer)).state_dim
        state = random_values("float32", len(values), state_dim).abs_()
        if name == "Adam":
            state[:, -1] = 3.0
        gradients = random_values("float32", len(frames)).view(-1) * 1e-3
        runs = draw_runs(rng, frames.cpu().numpy(), dtype)
        lengths = (runs.end - runs.begin).cpu().numpy()
        compared = np.append(lengths.argmax(), rng.permutation(len(lengths))[:COMPARED_RUNS])
        at, cpu = runs.frames[torch.from_numpy(compared).to(device())], torch.device("cpu")
        own = (copied(values[at], cpu), copied(state[at], cpu))
        how = RowUpdate(optimizer=optimizer, lr=0.1, step=1)
        call = partial(self.kernels.update, values, state, runs, gradients, how)
        call()
        here = (copied(runs.take(compared), cpu), copied(gradients, cpu))
        reference.update(*own, *here, how)
        for what, found, expected in zip(("values", "states"), (values[at], state[at]), own, strict=True):
            require_same(what, found, expected)
        row_bytes = DIM * DTYPES[dtype].itemsize + state_dim * FLOAT
        moved = len(frames) * (DIM + 1) * FLOAT + len(lengths) * (2 * row_bytes + 3 * FLOAT)
        others: dict[str, Any] = {"gradients": len(frames), "runs": len(lengths), "longest": int(lengths.max())}
        if ids == COLUMN:
            runs = draw_runs(rng, frames_of("uniform").cpu().numpy(), dtype)
            without = partial(self.kernels.update, values, state, runs, gradients, how)
            others["without_column_ms"] = round(1e3 * seconds_of(without, sizes().num_calls), 4)
        return call, moved, others

    def _exchange(self, dtype: str) -> tuple[Callable[[], object], int, dict[str, Any]]:
        return self._moves(dtype, DeviceHome(RowLayout(dtype, DIM, 0), device()), 4)

    def _to_home(self, dtype: str) -> tuple[Callable[[], object], int, dict[str, Any]]:
        return self._moves(dtype, HomeMemory(RowLayout(dtype, DIM, 0), device()), 2)

    def _moves(self, dtype: str, home: HomeMemory, passes: int) -> tuple[Callable[[], object], int, dict[str, Any]]:
        """passes: how often a row crosses what limits the kernel: read and written at both ends, or sent both ways."""
        count, rng = sizes().moved_rows, np.random.default_rng(1)
        home.reserve(count, ["bench"])
        for segment in home.segments:
            segment.random_(0, 256)
        values = random_values(dtype, 4 * count)
        state = torch.empty(len(values), 0, device=device())
        frames = torch.from_numpy(rng.permutation(4 * count)[:count].astype(np.int32)).to(device())
        slots = torch.from_numpy(rng.permutation(count).astype(np.int32)).to(device())
        both = torch.full((count,), IN | OUT, dtype=torch.int32, device=device())
        call = partial(self.kernels.exchange, values, state, home, frames, slots, both)
        before = values.clone()
        call()
        require_other(before, values, frames)
        call()  # the second exchange brings every row back
        require_same("the values after two exchanges", as_integers(values), as_integers(before))
        return call, passes * count * home.layout.row_bytes, {"moved_rows": count}

    def _rows(self, dtype: str, ids: str) -> tuple[Tensor, Tensor]:
        """Return random values of all rows, and the frames of a batch."""
        return random_values(dtype, sizes().rows), frames_of(ids)


def frames_of(ids: str) -> Tensor:
    """Return the frames of a batch."""
    numbers = row_numbers(sizes().rows, "uniform" if ids == COLUMN else ids, 1, 0, sizes().samples)[0]
    if ids == COLUMN:
        numbers[: sizes().samples] %= 3
    return torch.from_numpy(numbers.astype(np.int32)).to(device())


def require_other(before: Tensor, after: Tensor, frames: Tensor) -> None:
    """Raise AssertionError if a row that was to move did not, or another one did."""
    moved = (before.view(torch.uint8) != after.view(torch.uint8)).any(1)
    expected = torch.zeros_like(moved)
    expected[frames] = True
    require_same("the flags of moved rows", moved.to(torch.int32), expected.to(torch.int32))
