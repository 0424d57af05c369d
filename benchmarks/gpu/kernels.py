"""Every kernel of rows on a device against `satrap.device.reference` on the CPU, bit for bit, on batches of 16,384
samples: a part of the GPU benchmark.

The first failure names the kernel, so an item is one kernel with one dtype. The ids are Zipf's, so that some rows have
thousands of gradients; the values, states and gradients are random. On the CPU the kernels are the reference itself.
"""

import importlib
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import satrap
from benchmarks.gpu.devices import device, sizes
from benchmarks.workload import NUM_FEATURES, row_numbers
from satrap.config.features import Features
from satrap.config.optimizers import Optimizer
from satrap.config.tables import Feature, Pooling, Table
from satrap.data.inputs import Inputs
from satrap.device import reference
from satrap.device.device_worker import device_worker
from satrap.device.home_memory import DTYPES, IN, OUT, HomeMemory, RowLayout
from satrap.device.runs import PooledFeatures, RowUpdate, Runs
from satrap.device.torch_device import kernels_of
from satrap.table.engine import native_config

DIM, ABSENT, LENGTH = 128, 64, 8
TABLE = Table("t", dim=DIM)
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": satrap.SGD(lr=0.1),
    "RowWiseAdagrad": satrap.RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    "Adagrad": satrap.Adagrad(lr=0.1),
    "Adam": satrap.Adam(lr=0.1),
    "AdamW": satrap.AdamW(lr=0.1, weight_decay=0.01),
    "momentum": satrap.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": satrap.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "Ftrl": satrap.Ftrl(lr=0.1, l1=0.01, l2=0.01),
}
INITIAL = {
    "Uniform": Table("t", dim=DIM, initial=satrap.Uniform(-0.1, 0.1), optimizer=satrap.Ftrl(lr=0.1, l1=0.01)),
    "Normal": Table("t", dim=DIM, initial=satrap.Normal(std=0.1), optimizer=satrap.Adagrad(lr=0.1)),
    "Constant": Table("t", dim=DIM, initial=satrap.Constant(0.5), optimizer=satrap.Adam(lr=0.1)),
}
STATES = {"no state": 0, "one number": 1, "two vectors and a number": 2 * DIM + 1}


class WrongKernelError(AssertionError):
    """A kernel has other bits than the reference."""


class Kernels:
    """The part that compiles and checks every kernel."""

    def __init__(self, job: Any) -> None:
        self.kernels = kernels_under_test(job.kernels)
        torch.set_num_threads(max(1, torch.get_num_threads() // job.every))
        self.names = [
            f"{kernel}/{dtype}"
            for dtype in DTYPES
            for kernel in (
                *(f"pool/{form}" for form in ("one id", "bags")),
                *(f"update/{name}" for name in OPTIMIZERS),
                *(f"copy_sequence/{form}" for form in ("one id", "bags")),
                *(f"exchange/{name}" for name in STATES),
                *(f"initial/{name}" for name in INITIAL),
            )
        ]

    @property
    def both(self) -> tuple[tuple[ModuleType, torch.device], ...]:
        """The kernels and the reference, and where they compute."""
        return (self.kernels, device()), (reference, torch.device("cpu"))

    def measure(self, name: str) -> dict[str, Any]:
        """Check one kernel with one dtype; raise WrongKernelError for another bit than the reference's."""
        kernel, form, dtype = name.split("/")
        rng = np.random.default_rng([len(name), *name.encode()])
        checked: dict[str, Any] = getattr(self, f"_{kernel}")(rng, form, dtype)
        return checked

    def _pool(self, rng: np.random.Generator, form: str, dtype: str) -> dict[str, Any]:
        """Every pooling, with weights and without; ids without a row, with initial values and without."""
        samples, bags = sizes().checked_samples, form == "bags"
        frames, offsets = draw_batch(rng, bags=bags)
        values, absent = random_values(dtype, sizes().checked_rows), random_values("float32", ABSENT)
        weights = random_values("float32", len(frames), 1).view(-1) if bags else None
        features = pooled_features(poolings=("sum", "mean", "sqrtn") if bags else ("sum",), weighted=bags)
        blocks = []
        for module, place in self.both:
            block = torch.full((samples, NUM_FEATURES * DIM), 7.0, device=place)
            given = (values, absent, frames, offsets, weights, features)
            module.pool(*(copied(argument, place) for argument in given), samples, block)
            blocks.append(block)
        require_same("the block", *blocks)
        return {"samples": samples, "ids": len(frames)}

    def _copy_sequence(self, rng: np.random.Generator, form: str, dtype: str) -> dict[str, Any]:
        samples = sizes().checked_samples
        frames, offsets = draw_batch(rng, bags=form == "bags")
        values, absent = random_values(dtype, sizes().checked_rows), random_values("float32", ABSENT)
        sequences = []
        for module, place in self.both:
            out = torch.full((samples, LENGTH, DIM), 7.0, device=place)
            given = (values, absent, frames, offsets)
            module.copy_sequence(*(copied(argument, place) for argument in given), 3, out)
            sequences.append(out)
        require_same("the sequences", *sequences)
        return {"samples": samples, "length": LENGTH}

    def _update(self, rng: np.random.Generator, name: str, dtype: str) -> dict[str, Any]:
        """Once plainly, and once with weights, a scale, and gradients that are not finite and are skipped."""
        optimizer, rows = OPTIMIZERS[name], sizes().checked_rows
        state_dim = native_config(Table("t", dim=DIM, optimizer=optimizer)).state_dim
        values, state = random_values(dtype, rows), random_values("float32", rows, state_dim).abs_()
        if isinstance(optimizer, satrap.Adam | satrap.AdamW):
            state[:, -1] = torch.from_numpy(rng.integers(0, 9, rows).astype(np.float32)).to(device())
        frames = row_numbers(rows, "zipf", 1, int(rng.integers(1 << 30)), sizes().checked_samples)[0]
        gradients = random_values("float32", len(frames)).view(-1)
        longest = 0
        for with_all in (False, True):
            runs = draw_runs(rng, frames, dtype, factors=with_all)
            longest = int((runs.end - runs.begin).max())
            if with_all:
                gradients[rng.integers(0, len(gradients), 999)] = float("nan")
            ends = []
            scale = 0.7 if with_all else 1.0
            how = RowUpdate(optimizer=optimizer, lr=0.03, scale=scale, step=7, skip_nonfinite=with_all)
            for module, place in self.both:
                own = copied(values, place), copied(state, place)
                summed = module.update(*own, copied(runs, place), copied(gradients, place), how)
                ends.append((*own, summed))
            form = "with weights, a scale and gradients that are not finite" if with_all else "plain"
            for what, found, expected in zip(("values", "states", "counts"), *ends, strict=True):
                if expected is not None:
                    require_same(f"{what} ({form})", found, expected)
        return {"runs": len(runs.frames), "longest": longest}

    def _exchange(self, rng: np.random.Generator, name: str, dtype: str) -> dict[str, Any]:
        """In, out and both at once."""
        count = sizes().moved_rows
        layout = RowLayout(dtype, DIM, STATES[name])
        frames, slots = (rng.permutation(2 * count)[:count].astype(np.int32) for _ in range(2))
        directions = rng.choice([IN, OUT, IN | OUT], count).astype(np.int32)
        start = [random_values(dtype, 2 * count), random_values("float32", 2 * count, layout.state_dim)]
        bytes_at_home = None
        ends = []
        for module, place in self.both:
            home = HomeMemory(layout, place)
            home.reserve(2 * count, ["bench"])
            if bytes_at_home is None:
                bytes_at_home = [
                    torch.from_numpy(rng.integers(0, 256, len(part), dtype=np.uint8)) for part in home.segments
                ]
            for segment, content in zip(home.segments, bytes_at_home, strict=True):
                segment.copy_(content)
            own = [copied(part, place) for part in start]
            module.exchange(*own, home, *(torch.from_numpy(moves).to(place) for moves in (frames, slots, directions)))
            if place.type == "cuda":
                torch.cuda.synchronize()
            ends.append([*own, *home.segments])
        for number, (found, expected) in enumerate(zip(*ends, strict=True)):
            what = ("values", "states")[number] if number < 2 else f"segment {number - 2} at home"
            require_same(what, as_integers(found), as_integers(expected))
        return {"moved_rows": count}

    def _initial(self, rng: np.random.Generator, name: str, dtype: str) -> dict[str, Any]:
        """The values and states of new rows, beside those of a table in CPU memory."""
        of_dtype: Any = {"dtype": dtype}
        table = replace(INITIAL[name], **of_dtype)
        features = Features({"id": table})
        ids = rng.integers(0, 2**64 - 1, sizes().moved_rows, dtype=np.uint64)
        worker = device_worker(features, device(), seed=5)
        inputs = Inputs(names=features.names, values=ids, batch_size=len(ids))
        worker.lookup(inputs, step=1, oldest_open=1, train=True)
        store = satrap.Store(table, seed=5)
        store.lookup(ids, step=1)
        for what, found, expected in zip(
            ("values", "states"), worker.tables["t"].read(ids), store.read(ids), strict=False
        ):
            require_same(what, torch.from_numpy(found), torch.from_numpy(expected))
        return {"rows": len(ids)}


def kernels_under_test(name: str | None) -> ModuleType:
    """Return the kernels of this machine's device, or the module with this name."""
    return kernels_of(device()) if name is None else importlib.import_module(name)


def draw_batch(rng: np.random.Generator, *, bags: bool) -> tuple[Tensor, Tensor | None]:
    """Draw the frames of a batch, and where its bags begin. Bags have no to four ids, of which some have no row."""
    samples, rows = sizes().checked_samples, sizes().checked_rows
    lengths = rng.integers(0, 5, NUM_FEATURES * samples) if bags else np.ones(NUM_FEATURES * samples, np.int64)
    drawn = row_numbers(rows, "zipf", 2, int(rng.integers(1 << 30)), samples).reshape(-1)
    frames = np.resize(drawn, lengths.sum()).astype(np.int32)
    if bags:
        without = rng.random(len(frames)) < 0.05
        frames[without] = rng.integers(-1 - ABSENT, 0, without.sum())
    offsets = torch.from_numpy(np.append(0, np.cumsum(lengths))).to(device()) if bags else None
    return torch.from_numpy(frames).to(device()), offsets


def pooled_features(poolings: tuple[Pooling, ...] = ("sum",), *, weighted: bool = False) -> PooledFeatures:
    """Return the features of a batch, with these poolings in turn; every second one is weighted."""
    features = {
        f"c{i}": Feature(TABLE, poolings[i % len(poolings)], weighted=weighted and i % 2 == 1)
        for i in range(NUM_FEATURES)
    }
    return PooledFeatures.of(Features(features), [0], device())


def draw_runs(rng: np.random.Generator, frames: Any, dtype: str, *, factors: bool = False) -> Runs:
    """Return the runs of a batch of one id for each feature, as the core prepares them. frames: feature by feature."""
    samples = len(frames) // NUM_FEATURES
    order = np.argsort(frames, kind="stable")
    unique, begin = np.unique(frames[order], return_index=True)
    places = (order % samples * NUM_FEATURES + order // samples) * DIM
    keys = None if dtype == "float32" else rng.integers(-(2**63), 2**63, len(unique))
    arrays = {
        "frames": unique.astype(np.int32),
        "begin": begin.astype(np.int32),
        "end": np.append(begin[1:], len(frames)).astype(np.int32),
        "places": places.astype(np.int32),
        "factors": rng.uniform(0.5, 4.0, (len(frames), 2)).astype(np.float32) if factors else None,
        "keys": keys,
        "ids": None,
        "tables": np.array([0, len(unique)]),
    }
    return Runs.to_device(arrays, device())


def random_values(dtype: str, rows: int, dim: int = DIM) -> Tensor:
    """Return normal numbers on the device."""
    generator = torch.Generator(device()).manual_seed(rows + dim)
    return torch.randn(rows, dim, device=device(), generator=generator).to(DTYPES[dtype])


def copied(each: Any, place: torch.device) -> Any:
    """Return a copy of a tensor, or of the tensors of Runs or PooledFeatures, in another place."""
    if isinstance(each, Tensor):
        return each.to(place, copy=True)
    if not isinstance(each, Runs | PooledFeatures):
        return each
    return replace(each, **{field.name: copied(getattr(each, field.name), place) for field in fields(each)})


def as_integers(part: Tensor) -> Tensor:
    """Return the bits of numbers."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return part.view(widths[part.element_size()])


def require_same(what: str, found: Tensor, expected: Tensor) -> None:
    """Raise WrongKernelError unless both have the same bits; only the payload of a NaN may differ."""
    found, expected = found.cpu(), expected.cpu()
    differs = as_integers(found) != as_integers(expected)
    if found.is_floating_point():
        differs &= ~(found.isnan() & expected.isnan())
    if bool(differs.any()):
        at = tuple(differs.nonzero()[0].tolist())
        raise WrongKernelError(
            f"{int(differs.sum()):,} of {differs.numel():,} numbers of {what} differ from the reference; the first is "
            f"at {list(at)}: found {found[at].item()!r}, expected {expected[at].item()!r}"
        )
