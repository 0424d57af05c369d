"""The Triton kernels against the torch reference: the same bits. Compiled on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bag_oracle import UNIVERSE, draw_bags
from cluster import step_both
from device_workers import ArrayWorker, assert_equal
from one_row import OPTIMIZERS, fma, state_dim
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl
from satrap.config.tables import MinCount, Normal, Table
from satrap.device import home_memory, reference
from satrap.device.device_ids import alignment_of
from satrap.device.home_memory import HomeMemory, RowLayout
from satrap.device.runs import PooledFeatures, RowUpdate, Runs
from satrap.worker.local_rows import local_worker

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [1, 5, 16, 37, 64, 128]
FRAMES = 60
RUNS = 45  # more than a tile of any dim has
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """Compiled where there is a CUDA device, else interpreted with an exact fma (Triton's rounds twice) and torch's
    bfloat16 (Triton's is cut off). Where a loop's bound is the result of a reduction, Triton 3.6.0 fails with NumPy
    2.4, which takes no array of one number for an index; 3.7 does what is done here for it. Triton looks for what it
    must replace in its language at each call of a function by a kernel, which takes half the time; here it does so
    once."""
    pytest.importorskip("triton")
    from satrap.device import triton_kernels

    if torch.cuda.is_available():
        yield triton_kernels
        return
    from triton.runtime import interpreter

    def fused(_: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(fma(*np.broadcast_arrays(x.data, y.data, z.data)), z.dtype.scalar)

    prepare_tensors, prepare_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    language = interpreter.tl

    def prepare_once(function: Any) -> Any:
        used = [value for value in function.__globals__.values() if value is language or value is language.core]
        is_done = not any(language.core.is_builtin(module.load) for module in used)
        return interpreter._LangPatchScope() if is_done else prepare_language(function)

    def cast(builder: Any, value: Any, to: Any) -> Any:
        if {value.dtype.scalar.name, to.scalar.name} != {"fp32", "bf16"}:
            return cast_others(builder, value, to)
        numbers = torch.from_numpy(np.ascontiguousarray(value.data))
        if to.scalar.name == "bf16":
            bits = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            bits = numbers.view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(bits, to.scalar)

    cast_others = interpreter.InterpreterBuilder.cast_impl

    def prepare(tensor: Any, scope: Any) -> None:
        prepare_tensors(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    with pytest.MonkeyPatch.context() as patched, np.errstate(all="ignore"):
        patched.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
        patched.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
        patched.setattr(interpreter, "_patch_lang_tensor", prepare)
        patched.setattr(interpreter, "_patch_lang", prepare_once)
        yield triton_kernels


def tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def on(device: str, each: Any) -> Any:
    """Return a copy of a tensor, or of each tensor of Runs or PooledFeatures, on the device."""
    if isinstance(each, Tensor):
        return each.clone().to(device)
    if isinstance(each, Runs | PooledFeatures):
        parts = {field.name: on(device, getattr(each, field.name)) for field in dataclasses.fields(each)}
        return type(each)(**parts)
    return each


def bits(each: Tensor) -> list[Any]:
    found: list[Any] = each.view(torch.int32 if each.dtype == torch.float32 else torch.int16).tolist()
    return found


def draw_numbers(rng: np.random.Generator, shape: Any) -> Tensor:
    """Draw numbers; some are zeros of either sign."""
    numbers = rng.standard_normal(shape)
    numbers[rng.random(shape) < 0.1] = 0.0
    numbers[rng.random(shape) < 0.1] = -0.0
    return tensor(numbers.astype(np.float32))


def draw_dtype(rng: np.random.Generator) -> torch.dtype:
    """Draw the dtype of a block, or of gradients."""
    return DTYPES[int(rng.integers(len(DTYPES)))]


def draw_rows(rng: np.random.Generator, optimizer: Any, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = draw_numbers(rng, (FRAMES, dim)).to(dtype)
    state = tensor(np.abs(rng.standard_normal((FRAMES, state_dim(optimizer, dim)))).astype(np.float32))
    if isinstance(optimizer, Adam | AdamW):
        state[:, -1] = tensor(rng.integers(0, 9, FRAMES).astype(np.float32))
    return values, state


def draw_runs(rng: np.random.Generator, gradients: int, dim: int, *, factors: bool) -> Runs:
    """Draw runs: some are longer than a tile adds, one may be empty, one has no row."""
    lengths = rng.integers(0, 6, RUNS)
    lengths[[0, 7, 8, 30]] = 70, 32, 33, 100
    lengths = rng.permutation(lengths)
    ends = np.cumsum(lengths)
    frames = rng.permutation(FRAMES)[:RUNS].astype(np.int32)
    frames[3] = -1
    alignment = alignment_of(dim)
    places = rng.integers(0, (gradients - dim) // alignment, ends[-1]) * alignment
    return Runs(
        frames=tensor(frames),
        begin=tensor((ends - lengths).astype(np.int32)),
        end=tensor(ends.astype(np.int32)),
        places=tensor(places.astype(np.int32)),
        factors=tensor(rng.standard_normal((ends[-1], 2)).astype(np.float32)) if factors else None,
        keys=tensor(rng.integers(-(2**63), 2**63, RUNS)),
        tables=(0, RUNS),
        alignment=alignment,
    )


@pytest.mark.draw(8)
@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_update(
    kernels: Any, optimizer: Any, dtype: torch.dtype, skip_nonfinite: bool, rng: np.random.Generator
) -> None:
    for dim in (int(rng.choice(DIMS)), 16):
        lr = 0.0 if dim == 1 and not isinstance(optimizer, Ftrl) else 0.03
        how = RowUpdate(optimizer=optimizer, lr=lr, scale=0.7, step=7, skip_nonfinite=skip_nonfinite)
        values, state = draw_rows(rng, optimizer, dim, dtype)
        gradients = draw_numbers(rng, 400)
        if skip_nonfinite:
            gradients[::97], gradients[5::71] = float("nan"), 3e38
        gradients = gradients.to(draw_dtype(rng))
        runs = draw_runs(rng, 400, dim, factors=dim != 16)
        found = []
        for each, device in ((reference, "cpu"), (kernels, DEVICE)):
            own_values, own_state, own_runs, own_gradients = (on(device, x) for x in (values, state, runs, gradients))
            summed = each.update(own_values, own_state, own_runs, own_gradients, how)
            found.append((bits(own_values), bits(own_state), None if summed is None else summed.tolist()))
        assert found[0] == found[1]


def draw_lookup(
    rng: np.random.Generator, dim: int, dtype: torch.dtype, bags: int, *, uniform: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Draw values, initial values of absent ids, the frames of some bags' ids, and offsets of the bags."""
    values, _ = draw_rows(rng, SGD(), dim, dtype)
    absent = tensor(rng.standard_normal((4, dim)).astype(np.float32))
    lengths = np.ones(bags, np.int64) if uniform else rng.integers(0, 6, bags)
    frames = tensor(rng.integers(-5, FRAMES, lengths.sum()).astype(np.int32))
    return values, absent, frames, None if uniform else tensor(np.append(0, np.cumsum(lengths)))


@pytest.mark.draw(8)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_pool(
    kernels: Any, dim: int, dtype: torch.dtype, uniform: bool, weighted: bool, rng: np.random.Generator
) -> None:
    """Every pooling; features with weights beside others without, or none with weights; rows that are absent, with
    initial values and without; columns that begin at multiples of four, or do not."""
    samples, first = 21, int(rng.choice([4, 8])) if dim % 4 == 0 else 2
    rows = draw_lookup(rng, dim, dtype, 3 * samples, uniform=uniform)
    weights = draw_numbers(rng, len(rows[2])) if weighted else None
    lines = ([0, 2, 1], [first, first + 2 * dim, first + dim], [0, 1, 2], [0, int(weighted), 0])
    numbers, columns, poolings, has_weights = (torch.tensor(each, dtype=torch.int32) for each in lines)
    features = PooledFeatures(numbers, columns, poolings, has_weights, alignment=alignment_of(dim, first))
    blocks, block_dtype = [], draw_dtype(rng)
    for each, device in ((reference, "cpu"), (kernels, DEVICE)):
        block = torch.full((samples, first + 3 * dim), 7.0, device=device, dtype=block_dtype)
        given = [on(device, x) for x in (*rows, weights, features)]
        each.pool(*given, samples, block)
        blocks.append(bits(block))
    assert blocks[0] == blocks[1]


def test_a_batch_of_a_model(kernels: Any, rng: np.random.Generator) -> None:
    """26 features over as many tables, some of a few rows, so that one row has hundreds or thousands of gradients:
    pooled, and updated with the gradients of the block. 65,536 samples on a device; the interpreter, which takes
    milliseconds for a program, has 384."""
    samples, features, dim = (65_536 if DEVICE == "cuda" else 384), 26, 16
    sizes = np.array([3, 10, 100, *[2_000] * (features - 3)])
    begins = np.cumsum(sizes) - sizes
    ids = (begins[:, None] + rng.integers(0, sizes[:, None], (features, samples))).ravel()
    values = draw_numbers(rng, (sizes.sum(), dim))
    state = tensor(np.abs(rng.standard_normal((sizes.sum(), dim))).astype(np.float32))
    at = torch.arange(features, dtype=torch.int32)
    pooled = PooledFeatures(at, at * dim, torch.zeros_like(at), torch.zeros_like(at), alignment=4)
    order = np.argsort(ids, kind="stable")
    unique, begin, counts = np.unique(ids[order], return_index=True, return_counts=True)
    assert counts.max() > samples // 4
    feature, sample = np.divmod(order, samples)
    runs = Runs(
        frames=tensor(unique.astype(np.int32)),
        begin=tensor(begin.astype(np.int32)),
        end=tensor((begin + counts).astype(np.int32)),
        places=tensor(((sample * features + feature) * dim).astype(np.int32)),
        factors=None,
        keys=None,
        tables=(0, len(unique)),
        alignment=4,
    )
    gradients = draw_numbers(rng, samples * features * dim)
    ends = []
    for each, device in ((reference, "cpu"), (kernels, DEVICE)):
        own = [on(device, part) for part in (values, state)]
        frames, block = tensor(ids.astype(np.int32)).to(device), torch.empty(samples, features * dim, device=device)
        absent = torch.empty(0, dim, device=device)
        each.pool(own[0], absent, frames, None, None, on(device, pooled), samples, block)
        how = RowUpdate(optimizer=Adagrad(lr=0.1), lr=0.1, step=1)
        each.update(*own, on(device, runs), gradients.to(device), how)
        ends.append([as_integers(part.cpu()) for part in (block, *own)])
    assert all(map(torch.equal, *ends))


@pytest.mark.draw(24)
@pytest.mark.parametrize("state_dim", [0, 1, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [1, 5, 16, 1100])
def test_exchange(
    kernels: Any, dim: int, dtype: Any, state_dim: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any bits, in three segments of home, in every direction or none; what is not named stays. Then without states."""
    layout = RowLayout(dtype, dim, state_dim)
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 10 * layout.row_bytes + 16)
    slots, frames = (rng.permutation(30)[:20].astype(np.int32) for _ in range(2))
    directions = rng.integers(0, 4, 20).astype(np.int32)
    kind = (np.uint32, np.float32) if dtype == "float32" else (np.uint16, np.int16)
    start = (
        tensor(rng.integers(0, 2**16, (30, dim), dtype=kind[0]).view(kind[1])).view(layout.torch_dtype),
        tensor(rng.integers(0, 2**32, (30, state_dim), dtype=np.uint32).view(np.float32)),
    )
    ends = []
    for each, device in ((reference, "cpu"), (kernels, DEVICE)):
        home = HomeMemory(layout, torch.device(device))
        home.reserve(30, ["item"])
        assert len(home.segments) == 3 and home.rows == 10
        for number, segment in enumerate(home.segments):
            segment.copy_(torch.arange(len(segment)) * 7 + number)
        before = at_home(home)
        values, state = (on(device, part) for part in start)
        each.exchange(values, state, home, *(on(device, tensor(array)) for array in (frames, slots, directions)))
        rows = [as_integers(part.cpu()) for part in (values, state)]
        expected = [as_integers(part).clone() for part in start]
        expected_home = [part.clone() for part in before]
        for frame, slot, direction in zip(frames, slots, directions, strict=True):
            for part in range(2):
                if direction & 1:
                    expected[part][frame] = before[part][slot]
                if direction & 2:
                    expected_home[part][slot] = as_integers(start[part])[frame]
        assert all(map(torch.equal, rows, expected)) and all(map(torch.equal, at_home(home), expected_home))
        ends.append([*rows, *at_home(home)])
        into = [on(device, tensor(array)) for array in (frames, slots, np.ones(20, np.int32))]
        each.exchange(values, state[:, :0], home, *into)
        assert torch.equal(as_integers(values.cpu())[frames], expected_home[0][slots])
        assert torch.equal(as_integers(state.cpu()), rows[1])
    assert all(map(torch.equal, *ends))


def as_integers(part: Tensor) -> Tensor:
    return part.view(torch.int32 if part.dtype == torch.float32 else torch.int16)


def at_home(home: HomeMemory) -> list[Tensor]:
    parts = list(home.parts(torch.arange(30, dtype=torch.int32)))
    return [torch.cat([as_integers(each[i]) for each in parts]).clone() for i in (2, 3)]


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_copy_sequence(kernels: Any, dim: int, dtype: torch.dtype, uniform: bool, rng: np.random.Generator) -> None:
    samples, length = 7, 5
    rows = draw_lookup(rng, dim, dtype, 3 * samples, uniform=uniform)
    outs, out_dtype = [], draw_dtype(rng)
    for each, device in ((reference, "cpu"), (kernels, DEVICE)):
        out = torch.full((samples, length, dim), 7.0, device=device, dtype=out_dtype)
        each.copy_sequence(*(on(device, x) for x in rows), 1, out)
        outs.append(bits(out))
    assert outs[0] == outs[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels do not take rows in CPU memory")
@pytest.mark.parametrize("memory", [None, {"item": 2000, "user": "none"}])
def test_a_worker_on_these_kernels_has_the_bits_of_the_core(
    kernels: Any, memory: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels together, with rows at home and without."""
    for module in ("device_rows", "row_memory"):
        monkeypatch.setattr(f"satrap.device.{module}.kernels_of", lambda _: kernels)
    item = Table("item", dim=5, optimizer=Adagrad(lr=0.1), initial=Normal(std=0.5), dtype="bfloat16", num_buckets=2)
    user = Table("user", dim=3, optimizer=Adam(lr=0.1), initial=Normal(std=0.5), admission=MinCount(2))
    declared = Features(
        {"item": item, "bag": item.bag("mean", weighted=True), "path": item.sequence(2), "user": user.bag("sqrtn")}
    )
    workers: list[Any] = [
        local_worker(declared, seed=3, num_threads=1),
        ArrayWorker(declared, "cpu", seed=3, num_threads=1, device_memory=memory),
    ]
    for step in range(1, 4):
        step_both(workers, rng, [draw_bags(rng, declared, 4) for _ in range(1 + step % 2)], step)
    if memory is None:
        assert_equal(workers)
    for name in ("item", "user"):
        expected, found = (worker.tables[name].read(UNIVERSE) for worker in workers)
        assert all(map(np.array_equal, expected, found))
