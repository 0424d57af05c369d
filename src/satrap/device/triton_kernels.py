"""The kernels of rows on a device in Triton: the bits of `satrap.device.reference`, at the speed of the memory.

Imported only where the rows are on a CUDA device. No kernel contracts a product and a sum (`enable_fp_fusion=False`);
where the core's formula is fused it says `fma`. Division and square root are those of IEEE. There are no atomics: one
program owns a row, and adds gradients in the order of their places.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, Optimizer, RowWiseAdagrad
from satrap.device import triton_optimizers as optimizers
from satrap.device import triton_rounding as rounding
from satrap.device.exact import signed
from satrap.device.home_memory import HomeMemory
from satrap.device.host_copy import to_device
from satrap.device.runs import PooledFeatures, Runs

_UNROLL = 8  # gradients of one row whose loads are in flight at a time


@triton.jit
def _values(rows, offsets, mask, DTYPE: tl.constexpr):
    """Load values as float32. DTYPE: 0 float32, 1 float16, 2 bfloat16, the last two as int16."""
    if DTYPE == 0:
        return tl.load(rows + offsets, mask=mask, other=0.0)
    bits = tl.load(rows + offsets, mask=mask, other=0)
    if DTYPE == 1:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    return (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _row_of(values, absent, frame, column, dim: tl.constexpr, DTYPE: tl.constexpr):
    """Load the rows of some ids as float32: `read_rows` of the reference."""
    inside = column[None, :] < dim
    row = _values(values, frame[:, None] * dim + column[None, :], (frame >= 0)[:, None] & inside, DTYPE)
    without = (frame < -1)[:, None]
    initial = tl.load(absent + (-2 - frame)[:, None] * dim + column[None, :], mask=without & inside, other=0.0)
    return tl.where(without, initial, row)


@triton.jit
def _pool_kernel(
    values, absent, frames, offsets, weights, features, columns, poolings, weighted, out, line, batch_size,
    dim: tl.constexpr, DTYPE: tl.constexpr, UNIFORM: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pool the bags of some samples of one feature."""
    sample = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    which = tl.program_id(1)
    feature = tl.load(features + which)
    in_batch = sample < batch_size
    bag = feature.to(tl.int64) * batch_size + sample
    if UNIFORM:
        begin = bag
        end = bag + 1
    else:
        begin = tl.load(offsets + bag, mask=in_batch, other=0)
        end = tl.load(offsets + bag + 1, mask=in_batch, other=0)
    length = tl.where(in_batch, end - begin, 0)
    has_weights = tl.load(weighted + which)
    column = tl.arange(0, BLOCK)
    total = tl.zeros((SAMPLES, BLOCK), dtype=tl.float32)
    for k in range(tl.max(length)):
        active = k < length
        frame = tl.load(frames + begin + k, mask=active, other=-1).to(tl.int64)
        row = _row_of(values, absent, frame, column, dim, DTYPE)
        if has_weights != 0:
            weight = tl.load(weights + begin + k, mask=active, other=0.0)[:, None] + tl.zeros_like(row)
            row = tl.where(k == 0, weight * row, tl.fma(weight, row, total))
        else:
            row = tl.where(k == 0, row, total + row)
        total = tl.where(active[:, None], row, total)
    pooling = tl.load(poolings + which)
    if pooling != 0:
        count = tl.maximum(length, 1).to(tl.float64)
        divisor = tl.where(pooling == 1, count, tl.sqrt(count)).to(tl.float32)
        total = tl.where(length[:, None] > 1, tl.div_rn(total, divisor[:, None] + tl.zeros_like(total)), total)
    start = tl.load(columns + which)
    place = out + sample.to(tl.int64)[:, None] * line + start + column[None, :]
    tl.store(place, total, mask=in_batch[:, None] & (column[None, :] < dim))


@triton.jit
def _sequence_kernel(
    values, absent, frames, offsets, first, out, length, dim: tl.constexpr, DTYPE: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one row of one sample's sequence, or zeros behind its end."""
    sample, at = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if UNIFORM:
        begin = first + sample
        end = begin + 1
    else:
        begin = tl.load(offsets + first + sample)
        end = tl.load(offsets + first + sample + 1)
    column = tl.arange(0, BLOCK)
    frame = tl.load(frames + begin + at, mask=begin + at < end, other=-1).to(tl.int64)
    row = _row_of(values, absent, frame[None], column, dim, DTYPE)
    tl.store(out + (sample * length + at) * dim + column, tl.reshape(row, (BLOCK,)), mask=column < dim)


@triton.jit
def _sum_of_run(
    gradients, places, factors, begin, end, column, inside, scale, FACTORS: tl.constexpr, SCALED: tl.constexpr,
    SKIP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of a run's gradients in order, and how many were added."""
    g = tl.zeros((BLOCK,), dtype=tl.float32)
    count = begin * 0
    for first in range(begin, end, UNROLL):
        for u in tl.static_range(UNROLL):  # no branches, so that the loads go ahead of the additions
            entry = first + u
            there = entry < end
            place = tl.load(places + entry, mask=there, other=0).to(tl.int64)
            row = tl.load(gradients + place + column, mask=inside & there, other=0.0)
            if SCALED:
                row = row * scale
            if FACTORS:
                row = row * tl.load(factors + 2 * entry, mask=there, other=1.0)
                row = tl.div_rn(row, tl.load(factors + 2 * entry + 1, mask=there, other=1.0) + tl.zeros_like(row))
            if SKIP:
                there = there & _is_finite(row)
            g = tl.where(there, tl.where(count == 0, row, g + row), g)
            count += there.to(tl.int32)
    if SKIP:
        count = tl.where(_is_finite(g), count, 0)
    return g, count


@triton.jit
def _is_finite(row):
    return tl.max((tl.abs(row) <= 3.4028234663852886e38).to(tl.int32) ^ 1) == 0


@triton.jit(do_not_specialize=["step_mark"])
def _update_kernel(
    values, state, frames, begins, ends, places, factors, keys, gradients, summed, doubles,
    scale, lr, momentum, decay, eps, l1, l2, step_mark, first,
    KIND: tl.constexpr, NESTEROV: tl.constexpr, DTYPE: tl.constexpr, FACTORS: tl.constexpr, SCALED: tl.constexpr,
    SKIP: tl.constexpr, UNROLL: tl.constexpr, dim: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of one row in order, and apply the optimizer.

    KIND: 0 SGD, 1 SGD with momentum, 2 Adagrad, 3 RowWiseAdagrad, 4 Adam, 5 AdamW, 6 Ftrl.
    doubles: lr, beta1, beta2. first: the element of the whole row that column 0 is."""
    run = tl.program_id(0)
    begin, end = tl.load(begins + run), tl.load(ends + run)
    if begin == end:
        return
    column = tl.arange(0, BLOCK)
    inside = column < dim
    g, count = _sum_of_run(
        gradients, places, factors, begin, end, column, inside, scale, FACTORS, SCALED, SKIP, UNROLL, BLOCK
    )
    if SKIP:
        tl.store(summed + run, count)
    frame = tl.load(frames + run).to(tl.int64)
    if (frame < 0) | (count == 0):
        return
    at = frame * dim + column
    p = _values(values, at, inside, DTYPE)
    if KIND == 0:
        p = optimizers.sgd(p, g, lr, decay)
    elif KIND == 1:
        p = optimizers.momentum_sgd(p, g, state, at, inside, lr, momentum, decay, NESTEROV)
    elif KIND == 2:
        p = optimizers.adagrad(p, g, state, at, inside, lr, decay, eps)
    elif KIND == 3:
        p = optimizers.row_wise_adagrad(p, g, state + frame, inside, lr, decay, eps, l1, BLOCK)  # l1 is the dim
    elif KIND == 4 or KIND == 5:
        row = state + frame * (2 * dim + 1)
        p = optimizers.adam(p, g, row, column, inside, dim, doubles, decay, eps, KIND == 5)
    else:
        p = optimizers.ftrl(p, g, state + frame * (2 * dim), column, inside, dim, doubles, momentum, l1, l2)
    if DTYPE == 0:
        tl.store(values + at, p, mask=inside)
    else:
        key = tl.load(keys + run).to(tl.uint64, bitcast=True)
        noise = rounding.draw(rounding.mix(key + step_mark.to(tl.uint64, bitcast=True)), first + column)
        bits = rounding.to_float16(p, noise) if DTYPE == 1 else rounding.to_bfloat16(p, noise)
        tl.store(values + at, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)


_Launch = TypeVar("_Launch", bound=Callable[..., Any])


def _on_its_device(launch: _Launch) -> _Launch:
    """Launch kernels on the device of the rows: Triton takes that of the calling thread."""

    @wraps(launch)
    def run(values: Tensor, *args: Any, **options: Any) -> Any:
        with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
            return launch(values, *args, **options)

    return cast(_Launch, run)


@triton.jit
def _exchange_part(device_row, home_row, direction, size: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one row's values, or its state, as integers: in, out or both."""
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_in = (at < size) & ((direction & 1) != 0)
        is_out = (at < size) & ((direction & 2) != 0)
        entering = tl.load(home_row + at, mask=is_in, other=0)
        leaving = tl.load(device_row + at, mask=is_out, other=0)
        tl.store(device_row + at, entering, mask=is_in)
        tl.store(home_row + at, leaving, mask=is_out)


@triton.jit
def _exchange_kernel(
    values, state, segments, frames, slots, directions,
    ROWS: tl.constexpr, STATE_AT: tl.constexpr, DIM: tl.constexpr, STATE_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one row between its frame and its slot at home, whose memory the device reads and writes itself."""
    entry = tl.program_id(0)
    frame = tl.load(frames + entry).to(tl.int64)
    slot = tl.load(slots + entry)
    direction = tl.load(directions + entry)
    segment = tl.load(segments + slot // ROWS)
    line = (slot % ROWS).to(tl.int64)
    if HALF:
        home_values = segment.to(tl.pointer_type(tl.int16)) + line * DIM
        _exchange_part(values + frame * DIM, home_values, direction, DIM, BLOCK)
    else:
        home_words = segment.to(tl.pointer_type(tl.int32)) + line * DIM
        _exchange_part(values + frame * DIM, home_words, direction, DIM, BLOCK)
    if STATE_DIM != 0:
        home_state = (segment + STATE_AT).to(tl.pointer_type(tl.int32))
        _exchange_part(state + frame * STATE_DIM, home_state + line * STATE_DIM, direction, STATE_DIM, BLOCK)


@_on_its_device
def exchange(
    values: Tensor, state: Tensor, home: HomeMemory, frames: Tensor, slots: Tensor, directions: Tensor
) -> None:
    """Copy rows with their states between frames and slots at home; see the reference."""
    if len(frames):
        layout = home.layout
        _exchange_kernel[(len(frames),)](
            values.view(torch.int32) if values.dtype == torch.float32 else values.view(torch.int16),
            state.view(torch.int32), home.addresses, frames, slots, directions,
            ROWS=home.rows, STATE_AT=home.state_at, DIM=layout.dim, STATE_DIM=layout.state_dim,
            HALF=values.dtype != torch.float32, BLOCK=min(1024, triton.next_power_of_2(layout.dim)), **_OPTIONS,
        )  # fmt: skip


@_on_its_device
def pool(
    values: Tensor,
    absent: Tensor,
    frames: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    features: PooledFeatures,
    batch_size: int,
    block: Tensor,
) -> None:
    """Pool the rows of all bags of some features into their columns of the block."""
    dim, samples = values.shape[1], 8
    if batch_size == 0 or len(features.numbers) == 0:
        return
    _pool_kernel[(triton.cdiv(batch_size, samples), len(features.numbers))](
        _as_bits(values), absent, frames, offsets, weights, features.numbers, features.columns, features.poolings,
        features.weighted, block, block.stride(0), batch_size, dim, DTYPE=_DTYPES[values.dtype],
        UNIFORM=offsets is None, SAMPLES=samples, BLOCK=triton.next_power_of_2(dim), **_OPTIONS,
    )  # fmt: skip


@_on_its_device
def copy_sequence(
    values: Tensor,
    absent: Tensor,
    frames: Tensor,
    offsets: Tensor | None,
    feature: int,
    out: Tensor,
) -> None:
    """Copy the rows of a feature's sequences into out, float32 [samples, length, dim]; see the reference."""
    samples, length, dim = out.shape
    if out.numel():
        _sequence_kernel[(samples, length)](
            _as_bits(values), absent, frames, offsets, feature * samples, out, length, dim,
            DTYPE=_DTYPES[values.dtype], UNIFORM=offsets is None, BLOCK=triton.next_power_of_2(dim), **_OPTIONS,
        )  # fmt: skip


@_on_its_device
def update(
    values: Tensor,
    state: Tensor,
    runs: Runs,
    gradients: Tensor,
    optimizer: Optimizer,
    lr: float,
    scale: float,
    step: int,
    *,
    skip_nonfinite: bool,
    first: int = 0,
) -> Tensor | None:
    """Sum the gradients of each run, and apply the optimizer to its row; see the reference."""
    dim = values.shape[1]
    kind, constants = _constants(optimizer, dim)
    summed = torch.zeros_like(runs.frames) if skip_nonfinite else None
    if len(runs.frames) == 0:
        return summed
    doubles = to_device(np.array([lr, *getattr(optimizer, "betas", (0.0, 0.0))], np.float64), values.device)
    mark = signed(0x9E3779B97F4A7C15 * (step + 1))
    _update_kernel[(len(runs.frames),)](
        _as_bits(values), state, runs.frames, runs.begin, runs.end, runs.places, runs.factors, runs.keys, gradients,
        summed, doubles, _rounded(scale), _rounded(lr), *map(_rounded, constants), mark, first,
        KIND=kind, NESTEROV=getattr(optimizer, "nesterov", False), DTYPE=_DTYPES[values.dtype],
        FACTORS=runs.factors is not None, SCALED=scale != 1.0, SKIP=skip_nonfinite, UNROLL=_UNROLL,
        dim=dim, BLOCK=max(16, triton.next_power_of_2(dim)), **_OPTIONS,
    )  # fmt: skip
    return summed


_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_OPTIONS = {"enable_fp_fusion": False}


def _rounded(number: float) -> float:
    """Return the number as float32 holds it: a kernel may take it as float64."""
    return float(np.float32(number))


def _as_bits(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float32 else values.view(torch.int16)


def _constants(optimizer: Optimizer, dim: int) -> tuple[int, tuple[float, ...]]:
    """Return the kind of an optimizer for the kernel, and its momentum, decay, eps, l1 and l2."""
    match optimizer:
        case SGD():
            return int(optimizer.momentum != 0.0), (optimizer.momentum, optimizer.weight_decay, 0.0, 0.0, 0.0)
        case Adagrad():
            return 2, (0.0, optimizer.weight_decay, optimizer.eps, 0.0, 0.0)
        case RowWiseAdagrad():
            return 3, (0.0, optimizer.weight_decay, optimizer.eps, float(dim), 0.0)
        case Adam() | AdamW():
            return 4 + isinstance(optimizer, AdamW), (0.0, optimizer.weight_decay, optimizer.eps, 0.0, 0.0)
        case Ftrl():
            return 6, (optimizer.beta, 0.0, 0.0, optimizer.l1, optimizer.l2)
