"""The kernels of rows on a device in Triton: the bits of `satrap.device.reference`, at the speed of the memory.

Imported only where the rows are on a CUDA device. A program has a tile of rows: as many as give each thread sixteen
numbers, so that rows are read and written by 16 bytes. No kernel contracts a product and a sum
(`enable_fp_fusion=False`); where the core's formula is fused it says `fma`. Division and square root are those of IEEE.
There are no atomics: the gradients of a row are added by one thread for each column, in the order of their places. Sums
begin at -0.0, to which adding any number gives this number, of zero too. tests/device/test_compiled.py compiles every
kernel and says what each may cost.
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
from satrap.device.device_ids import alignment_of
from satrap.device.exact import signed
from satrap.device.home_memory import HomeMemory
from satrap.device.runs import PooledFeatures, RowUpdate, Runs

_LONG = 32  # gradients of a run that a tile adds; longer runs are summed before, by programs of their own
_CHUNK = 128  # bytes of a long run's columns that a program sums: a warp reads them at a time


@triton.jit
def _as_floats(stored, DTYPE: tl.constexpr):
    """Return values as float32. DTYPE: 0 float32, 1 float16, 2 bfloat16, the last two as int16."""
    if DTYPE == 0:
        floats = stored
    elif DTYPE == 1:
        floats = stored.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        floats = (stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return floats


@triton.jit
def _minus_zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return -0.0s, from their bits: Triton takes the number -0.0 for 0.0."""
    return tl.full((ROWS, COLUMNS), 0x80000000, tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _read_rows(values, absent, frame, column, dim: tl.constexpr, DTYPE: tl.constexpr):
    """Load the rows of some ids as float32: `read_rows` of the reference."""
    inside = (column < dim)[None, :]
    frame = frame.to(tl.int64)
    stored = tl.load(values + frame[:, None] * dim + column[None, :], mask=(frame >= 0)[:, None] & inside, other=0)
    without = (frame < -1)[:, None]
    initial = tl.load(absent + (-2 - frame)[:, None] * dim + column[None, :], mask=without & inside, other=0.0)
    return tl.where(without, initial, _as_floats(stored, DTYPE))


@triton.jit
def _add_rows(
    total, values, absent, frames, weights, is_weighted, entry, active, column, dim: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the rows of some entries, times their weights, to the totals of their bags."""
    frame = tl.load(frames + entry, mask=active, other=-1)
    row = _read_rows(values, absent, frame, column, dim, DTYPE)
    if weights is None:
        total = total + row
    else:
        weight = tl.load(weights + entry, mask=active & is_weighted, other=1.0)
        total = tl.fma(weight[:, None], row, total)
    return total


@triton.jit(
    do_not_specialize=["line", "batch_size"],
    do_not_specialize_on_alignment=["frames", "offsets", "weights", "features", "columns", "poolings", "weighted"],
)
def _pool_kernel(
    values, absent, frames, offsets, weights, features, columns, poolings, weighted, out, line, batch_size,
    dim: tl.constexpr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pool the bags of some samples of one feature. ALIGNMENT: lines and columns begin at its multiples."""
    sample = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    which = tl.program_id(1)
    in_batch = sample < batch_size
    bag = tl.load(features + which).to(tl.int64) * batch_size + sample
    is_weighted = tl.load(weighted + which) != 0
    column = tl.arange(0, BLOCK)
    total = _minus_zeros(ROWS, BLOCK)
    if offsets is None:
        total = _add_rows(total, values, absent, frames, weights, is_weighted, bag, in_batch, column, dim, DTYPE)
    else:
        begin = tl.load(offsets + bag, mask=in_batch, other=0)
        length = tl.load(offsets + bag + 1, mask=in_batch, other=0) - begin
        for k in range(tl.max(length)):
            active, entry = k < length, begin + k
            more = _add_rows(total, values, absent, frames, weights, is_weighted, entry, active, column, dim, DTYPE)
            total = tl.where(active[:, None], more, total)
        total = tl.where((length > 0)[:, None], total, 0.0)
        pooling = tl.load(poolings + which)
        if pooling != 0:
            count = tl.maximum(length, 1).to(tl.float64)
            divisor = tl.where(pooling == 1, count, tl.sqrt(count)).to(tl.float32)
            total = tl.where((length > 1)[:, None], tl.div_rn(total, divisor[:, None] + tl.zeros_like(total)), total)
    start = tl.load(columns + which) // ALIGNMENT
    place = out + (sample.to(tl.int64) * line + start)[:, None] * ALIGNMENT + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=in_batch[:, None] & (column < dim)[None, :])


@triton.jit(
    do_not_specialize=["first", "rows", "length"], do_not_specialize_on_alignment=["frames", "offsets"],
)  # fmt: skip
def _sequence_kernel(
    values, absent, frames, offsets, first, out, rows, length, dim: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy some rows of the sequences of a feature, or zeros behind their ends. first: its first bag."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = number < rows
    sample = number // length
    at = number - sample * length
    bag = first + sample.to(tl.int64)
    if offsets is None:
        begin, end = bag, bag + 1
    else:
        begin, end = tl.load(offsets + bag, mask=is_row, other=0), tl.load(offsets + bag + 1, mask=is_row, other=0)
    column = tl.arange(0, BLOCK)
    frame = tl.load(frames + begin + at, mask=is_row & (begin + at < end), other=-1)
    row = _read_rows(values, absent, frame, column, dim, DTYPE)
    place = out + number.to(tl.int64)[:, None] * dim + column[None, :]
    tl.store(place, row.to(out.dtype.element_ty), mask=is_row[:, None] & (column < dim)[None, :])


@triton.jit
def _read_gradients(
    gradients, places, factors, entry, there, column, inside, scale, FACTORS: tl.constexpr, SCALED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Load one gradient of each run as float32, times its factors; -0.0 if there is none."""
    place = tl.multiple_of(tl.load(places + entry, mask=there, other=0), ALIGNMENT).to(tl.int64)
    zeros = _minus_zeros(place.shape[0], column.shape[0])
    none = zeros.to(gradients.dtype.element_ty)
    row = tl.load(gradients + place[:, None] + column[None, :], mask=there[:, None] & inside, other=none).to(tl.float32)
    if SCALED:
        row = row * scale
    if FACTORS:
        weight = tl.load(factors + 2 * entry, mask=there, other=1.0)
        divisor = tl.load(factors + 2 * entry + 1, mask=there, other=1.0)
        row = tl.div_rn(row * weight[:, None], tl.zeros_like(row) + divisor[:, None])
    if SCALED or FACTORS:
        row = tl.where(there[:, None], row, zeros)
    return row


@triton.jit
def _is_finite(rows):
    return tl.max((tl.abs(rows) <= 3.4028234663852886e38).to(tl.int32) ^ 1, axis=1) == 0


@triton.jit
def _add_gradients(g, count, row, there, SKIP: tl.constexpr):
    """Add a gradient to each sum, and count it."""
    if SKIP:
        there = there & _is_finite(row)
        row = tl.where(there[:, None], row, _minus_zeros(g.shape[0], g.shape[1]))
    return g + row, count + there.to(tl.int32)


@triton.jit(do_not_specialize=["num_runs"], do_not_specialize_on_alignment=["begins", "ends", "long_runs"])
def _find_long_runs(begins, ends, long_runs, num_runs, LONG: tl.constexpr, BLOCK: tl.constexpr):
    """Write the number of each long run to its slot. No two have one slot: runs share no place, and they are longer
    than the places of a slot."""
    run = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(begins + run, mask=run < num_runs, other=0)
    length = tl.load(ends + run, mask=run < num_runs, other=0) - begin
    tl.store(long_runs + begin // LONG, run, mask=length > LONG)


@triton.jit(do_not_specialize_on_alignment=["begins", "ends", "long_runs", "places", "factors"])
def _sum_long_runs(
    gradients, places, factors, begins, ends, long_runs, sums, counts, scale, dim: tl.constexpr,
    FACTORS: tl.constexpr, SCALED: tl.constexpr, SKIP: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum some columns of the long run of one slot, and count its gradients."""
    slot = tl.program_id(0)
    run = tl.load(long_runs + slot)
    if run >= 0:
        begin, end = tl.load(begins + run), tl.load(ends + run)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = (column < dim)[None, :]
        g = _minus_zeros(1, BLOCK)
        count = tl.zeros((1,), tl.int32)
        for first in range(begin, end, UNROLL):
            for u in tl.static_range(UNROLL):  # no branches, so that the loads go ahead of the additions
                entry = tl.zeros((1,), tl.int32) + (first + u)
                there = entry < end
                row = _read_gradients(
                    gradients, places, factors, entry, there, column, inside, scale, FACTORS, SCALED, 1
                )
                g, count = _add_gradients(g, count, row, there, SKIP)
        tl.store(sums + slot.to(tl.int64) * dim + column[None, :], g, mask=inside)
        tl.store(counts + slot + tl.zeros((1,), tl.int32), count)


@triton.jit
def _sum_runs(
    gradients, places, factors, sums, counts, begin, length, column, inside, scale, FACTORS: tl.constexpr,
    SCALED: tl.constexpr, SKIP: tl.constexpr, ALIGNMENT: tl.constexpr, LONG: tl.constexpr, dim: tl.constexpr,
):  # fmt: skip
    """Return the sum of each run's gradients in order, and how many were added; 0 if the sum must not be used."""
    is_long = length > LONG
    slot = begin // LONG
    long_sum = sums + slot.to(tl.int64)[:, None] * dim + column[None, :]
    g = tl.load(long_sum, mask=is_long[:, None] & inside, other=_minus_zeros(begin.shape[0], column.shape[0]))
    count = tl.load(counts + slot, mask=is_long, other=0)
    left = tl.where(is_long, 0, length)
    for k in range(tl.max(left)):
        there = k < left
        row = _read_gradients(
            gradients, places, factors, begin + k, there, column, inside, scale, FACTORS, SCALED, ALIGNMENT
        )
        g, count = _add_gradients(g, count, row, there, SKIP)
    if SKIP:
        count = tl.where(_is_finite(tl.where(inside, g, 0.0)), count, 0)
    return g, count


@triton.jit(
    do_not_specialize=["step_mark", "first", "num_runs"],
    do_not_specialize_on_alignment=["frames", "begins", "ends", "places", "factors", "keys", "summed", "counts"],
)
def _update_kernel(
    values, state, frames, begins, ends, places, factors, keys, gradients, summed, sums, counts, num_runs,
    scale, lr: tl.float64, beta1: tl.float64, beta2: tl.float64, momentum, decay, eps, l1, l2, step_mark: tl.int64,
    first,
    KIND: tl.constexpr, NESTEROV: tl.constexpr, DTYPE: tl.constexpr, FACTORS: tl.constexpr, SCALED: tl.constexpr,
    SKIP: tl.constexpr, ALIGNMENT: tl.constexpr, LONG: tl.constexpr, dim: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of some rows in order, and apply the optimizer. first: the element of a whole row in column 0.
    KIND: 0 SGD, 1 SGD with momentum, 2 Adagrad, 3 RowWiseAdagrad, 4 Adam, 5 AdamW, 6 Ftrl."""
    run = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_run = run < num_runs
    begin = tl.load(begins + run, mask=is_run, other=0)
    length = tl.load(ends + run, mask=is_run, other=0) - begin
    frame = tl.load(frames + run, mask=is_run, other=-1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, may_step = (column < dim)[None, :], (frame >= 0) & (length > 0)
    here, at = may_step[:, None] & inside, frame[:, None] * dim + column[None, :]
    stored = tl.load(values + at, mask=here, other=0)  # with the state ahead of the gradients, not to wait twice
    TILES: tl.constexpr = 0 if KIND == 0 or KIND == 3 else 1 if KIND < 3 else 2
    COUNTER: tl.constexpr = 1 if KIND == 3 or KIND == 4 or KIND == 5 else 0
    row_state = state + frame * (TILES * dim + COUNTER)
    state_at = row_state[:, None] + column[None, :]
    if TILES > 0:
        state1 = tl.load(state_at, mask=here, other=1.0)
    if TILES == 2:
        state2 = tl.load(state_at + dim, mask=here, other=1.0)
    if COUNTER == 1:
        counter = tl.load(row_state + TILES * dim, mask=may_step, other=1.0)

    g, count = _sum_runs(
        gradients, places, factors, sums, counts, begin, length, column, inside, scale, FACTORS, SCALED, SKIP,
        ALIGNMENT, LONG, dim,
    )  # fmt: skip
    if SKIP:
        tl.store(summed + run, count, mask=is_run)
        may_step, here = may_step & (count > 0), here & (count > 0)[:, None]

    p, rate = _as_floats(stored, DTYPE), tl.cast(lr, tl.float32)
    if KIND == 0:
        p = optimizers.sgd(p, g, rate, decay)
    elif KIND == 1:
        p, state1 = optimizers.momentum_sgd(p, g, state1, rate, momentum, decay, NESTEROV)
    elif KIND == 2:
        p, state1 = optimizers.adagrad(p, g, state1, rate, decay, eps)
    elif KIND == 3:
        p, counter = optimizers.row_wise_adagrad(p, g, counter, here, rate, decay, eps, dim)
    elif KIND == 6:
        p, state1, state2 = optimizers.ftrl(p, g, state1, state2, lr, momentum, l1, l2)
    else:
        counter += 1.0
        p, state1, state2 = optimizers.adam(p, g, state1, state2, counter, lr, beta1, beta2, decay, eps, KIND == 5)
    if TILES > 0:
        tl.store(state_at, state1, mask=here)
    if TILES == 2:
        tl.store(state_at + dim, state2, mask=here)
    if COUNTER == 1:
        tl.store(row_state + TILES * dim, counter, mask=may_step)
    optimizers.store_values(values + at, p, here, keys, run, is_run, step_mark, first + column, DTYPE)


@triton.jit
def _exchange_part(device_rows, home_rows, is_in, is_out, size: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the values of some rows, or their states, as integers: in, out or both."""
    for first in range(0, size, BLOCK):
        at = (first + tl.arange(0, BLOCK))[None, :]
        goes_in, goes_out = is_in[:, None] & (at < size), is_out[:, None] & (at < size)
        entering = tl.load(home_rows[:, None] + at, mask=goes_in, other=0)
        leaving = tl.load(device_rows[:, None] + at, mask=goes_out, other=0)
        tl.store(device_rows[:, None] + at, entering, mask=goes_in)
        tl.store(home_rows[:, None] + at, leaving, mask=goes_out)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["segments", "frames", "slots", "directions"]
)
def _exchange_kernel(
    values, state, segments, frames, slots, directions, num_rows,
    SEGMENT_ROWS: tl.constexpr, STATE_AT: tl.constexpr, DIM: tl.constexpr, STATE_DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy some rows between their frames and their slots at home, whose memory the device reads and writes itself."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = entry < num_rows
    frame = tl.load(frames + entry, mask=is_row, other=0).to(tl.int64)
    slot = tl.load(slots + entry, mask=is_row, other=0)
    direction = tl.load(directions + entry, mask=is_row, other=0)
    is_in, is_out = (direction & 1) != 0, (direction & 2) != 0
    segment = tl.load(segments + slot // SEGMENT_ROWS, mask=is_row, other=0)
    line = (slot % SEGMENT_ROWS).to(tl.int64)
    if HALF:
        home_values = tl.multiple_of(segment.to(tl.pointer_type(tl.int16)), 16) + line * DIM
    else:
        home_values = tl.multiple_of(segment.to(tl.pointer_type(tl.int32)), 16) + line * DIM
    _exchange_part(values + frame * DIM, home_values, is_in, is_out, DIM, BLOCK)
    if STATE_DIM != 0:
        home_state = tl.multiple_of((segment + STATE_AT).to(tl.pointer_type(tl.int32)), 16) + line * STATE_DIM
        _exchange_part(state + frame * STATE_DIM, home_state, is_in, is_out, STATE_DIM, BLOCK)


_Launch = TypeVar("_Launch", bound=Callable[..., Any])


def _on_its_device(launch: _Launch) -> _Launch:
    """Launch kernels on the device of the rows: Triton takes that of the calling thread."""

    @wraps(launch)
    def run(values: Tensor, *args: Any, **options: Any) -> Any:
        with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
            return launch(values, *args, **options)

    return cast(_Launch, run)


@_on_its_device
def exchange(
    values: Tensor, state: Tensor, home: HomeMemory, frames: Tensor, slots: Tensor, directions: Tensor
) -> None:
    """Copy rows, with their states, between frames and slots at home; see the reference."""
    if len(frames):
        layout, tile = home.layout, _tile(min(512, home.layout.dim))
        _exchange_kernel[(triton.cdiv(len(frames), tile["ROWS"]),)](
            values.view(torch.int32) if values.dtype == torch.float32 else values.view(torch.int16),
            state.view(torch.int32), home.addresses, frames, slots, directions, len(frames),
            SEGMENT_ROWS=home.rows, STATE_AT=home.state_at, DIM=layout.dim, STATE_DIM=state.shape[1],
            HALF=values.dtype != torch.float32, **tile, **_OPTIONS,
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
    if batch_size == 0 or len(features.numbers) == 0:
        return
    dim, line = values.shape[1], block.stride(0)
    tile, alignment = _tile(dim), _alignment(block, features.alignment, line)
    _pool_kernel[(triton.cdiv(batch_size, tile["ROWS"]), len(features.numbers))](
        _as_bits(values), absent, frames, offsets, weights, features.numbers, features.columns, features.poolings,
        features.weighted, block, line // alignment, batch_size, dim, DTYPE=_DTYPES[values.dtype], ALIGNMENT=alignment,
        **tile, **_OPTIONS,
    )  # fmt: skip


@_on_its_device
def copy_sequence(
    values: Tensor, absent: Tensor, frames: Tensor, offsets: Tensor | None, feature: int, out: Tensor
) -> None:
    """Copy the rows of a feature's sequences into out, [samples, length, dim]; see the reference."""
    samples, length, dim = out.shape
    if out.numel():
        tile = _tile(dim)
        _sequence_kernel[(triton.cdiv(samples * length, tile["ROWS"]),)](
            _as_bits(values), absent, frames, offsets, feature * samples, out, samples * length, length, dim,
            DTYPE=_DTYPES[values.dtype], **tile, **_OPTIONS,
        )  # fmt: skip


@_on_its_device
def update(values: Tensor, state: Tensor, runs: Runs, gradients: Tensor, how: RowUpdate) -> Tensor | None:
    """Sum the gradients of each run, and apply the optimizer to its row; see the reference."""
    num_runs, dim, optimizer, scale = len(runs.frames), values.shape[1], how.optimizer, how.scale
    summed = torch.zeros_like(runs.frames) if how.skip_nonfinite else None
    if num_runs == 0:
        return summed
    flags = {"FACTORS": runs.factors is not None, "SCALED": scale != 1.0, "SKIP": how.skip_nonfinite}
    sums, counts = _long_sums(runs, gradients, dim, scale, flags)
    (kind, constants), tile = _constants(optimizer), _tile(dim, skip=how.skip_nonfinite)
    _update_kernel[(triton.cdiv(num_runs, tile["ROWS"]),)](
        _as_bits(values), state, runs.frames, runs.begin, runs.end, runs.places, runs.factors,
        None if values.dtype == torch.float32 else runs.keys, gradients, summed, sums, counts, num_runs,
        _rounded(scale), how.lr, *getattr(optimizer, "betas", (0.0, 0.0)), *map(_rounded, constants),
        signed(0x9E3779B97F4A7C15 * (how.step + 1)), how.first,
        KIND=kind, NESTEROV=getattr(optimizer, "nesterov", False), DTYPE=_DTYPES[values.dtype],
        ALIGNMENT=_alignment(gradients, runs.alignment), LONG=_LONG, dim=dim, **flags, **tile, **_OPTIONS,
    )  # fmt: skip
    return summed


def _long_sums(runs: Runs, gradients: Tensor, dim: int, scale: float, flags: dict[str, bool]) -> tuple[Tensor, Tensor]:
    """Return the sum of each long run, and the number of its gradients, by slot. Which runs are long only the device
    knows, so there is a slot for every _LONG places, and its program ends at once if no long run begins there."""
    places, num_runs = len(runs.places), len(runs.frames)
    slots = places // _LONG + 1
    sums = torch.empty((slots, dim), dtype=torch.float32, device=gradients.device)
    counts = torch.empty(slots, dtype=torch.int32, device=gradients.device)
    if places > _LONG:
        long_runs = torch.full((slots,), -1, dtype=torch.int32, device=gradients.device)
        _find_long_runs[(triton.cdiv(num_runs, 1024),)](
            runs.begin, runs.end, long_runs, num_runs, LONG=_LONG, BLOCK=1024, **_OPTIONS
        )
        block, chunk = triton.next_power_of_2(dim), _CHUNK // gradients.element_size()
        block = block if flags["SKIP"] else min(block, chunk)  # a gradient that is not finite is left out whole
        _sum_long_runs[(slots, triton.cdiv(dim, block))](
            gradients, runs.places, runs.factors, runs.begin, runs.end, long_runs, sums, counts, _rounded(scale), dim,
            UNROLL=max(1, 1024 // max(chunk, block)), BLOCK=block, num_warps=triton.cdiv(block, 512), **flags,
            **_OPTIONS,
        )  # fmt: skip
    return sums, counts


_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_OPTIONS = {"enable_fp_fusion": False}


def _tile(dim: int, *, skip: bool = False) -> dict[str, int]:
    """Return how many rows and columns a program has, and its warps: 16 numbers for each thread; half of them if each
    number has a separate address, and a quarter if gradients are checked, since registers do not suffice for more."""
    block = max(16, triton.next_power_of_2(dim))
    numbers = 128 if skip else 256 if dim % 4 else 512
    return {"ROWS": max(1, numbers // block), "BLOCK": block, "num_warps": max(1, block // 512)}


def _alignment(numbers: Tensor, *strides: int) -> int:
    """Return how many numbers kernels may move at a time, at most 16 bytes. strides: each row begins at a sum of
    multiples of them."""
    return min(alignment_of(*strides), 16 // numbers.element_size())


def _rounded(number: float) -> float:
    """Return the number as float32 holds it: a kernel may take it as float64."""
    return float(np.float32(number))


def _as_bits(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float32 else values.view(torch.int16)


def _constants(optimizer: Optimizer) -> tuple[int, tuple[float, ...]]:
    """Return the kind of an optimizer for the kernel, and its momentum, decay, eps, l1 and l2."""
    match optimizer:
        case SGD():
            return int(optimizer.momentum != 0.0), (optimizer.momentum, optimizer.weight_decay, 0.0, 0.0, 0.0)
        case Adagrad():
            return 2, (0.0, optimizer.weight_decay, optimizer.eps, 0.0, 0.0)
        case RowWiseAdagrad():
            return 3, (0.0, optimizer.weight_decay, optimizer.eps, 0.0, 0.0)
        case Adam() | AdamW():
            return 4 + isinstance(optimizer, AdamW), (0.0, optimizer.weight_decay, optimizer.eps, 0.0, 0.0)
        case Ftrl():
            return 6, (optimizer.beta, 0.0, 0.0, optimizer.l1, optimizer.l2)
