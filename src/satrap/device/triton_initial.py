"""The first values and states of rows in Triton: the bits of `satrap.device.initial_values.initialise`.

A comparison rounds a constant to float32, and a sum or a product does not: so what a float64 is compared with is a sum.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from satrap.device import triton_optimizers as arithmetic
from satrap.device.home_memory import RowLayout
from satrap.device.initial_values import CENTRAL, NORMAL, TAIL, InitialValues

_CENTRAL_ABOVE, _CENTRAL_BELOW = (tl.constexpr(coefficients) for coefficients in CENTRAL)
_TAIL_ABOVE, _TAIL_BELOW = (tl.constexpr(coefficients) for coefficients in TAIL)


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, NUM: tl.constexpr):
    total = tl.zeros_like(x) + COEFFICIENTS[0]
    for k in tl.static_range(1, NUM):
        total = total * x + COEFFICIENTS[k]
    return total


@triton.jit
def _log(x):
    """Return the natural logarithm: `portable_log` of the core."""
    bits = x.to(tl.int64, bitcast=True)
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    is_large = m > tl.zeros_like(m) + 1.4142135623730951
    exponent = ((bits >> 52) - 1023 + is_large.to(tl.int64)).to(tl.float64)
    m = tl.where(is_large, m * 0.5, m)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = tl.zeros_like(s)
    for k in tl.static_range(11):
        series = series * square + 1.0 / (21 - 2 * k)
    return exponent * 0.6931471805599453 + 2.0 * s * series


@triton.jit
def _quantile(u):
    """Return the standard normal quantile: `normal_quantile` of the core."""
    q = tl.where(u < 0.5, u, 1.0 - u)
    d = u - 0.5
    central = _polynomial(d * d, _CENTRAL_ABOVE, 6) * d / _polynomial(d * d, _CENTRAL_BELOW, 6)
    t = tl.sqrt(-2.0 * _log(q))
    tail = _polynomial(t, _TAIL_ABOVE, 6) / _polynomial(t, _TAIL_BELOW, 5)
    return tl.where(q > tl.zeros_like(q) + 0.02425, central, tl.where(u < 0.5, tail, tail * -1.0))


@triton.jit
def _nearest_bfloat16(value):
    bits = value.to(tl.uint32, bitcast=True)
    return arithmetic.to_bfloat16(value, 0x7FFF + ((bits >> 16) & 1))


@triton.jit(
    do_not_specialize=["table_key", "first", "low", "span", "start", "decay", "l1", "num_rows"],
    do_not_specialize_on_alignment=["frames", "ids"],
)
def _initialise_kernel(
    values, state, frames, ids, numbers, table_key, first, low, span, start, decay, l1, num_rows,
    KIND: tl.constexpr, DTYPE: tl.constexpr, FTRL: tl.constexpr, DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of rows. KIND: 0 uniform, 1 normal, 2 constant. first: the element of a whole row that column 0
    is."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    frame = tl.load(frames + row, mask=is_row, other=0).to(tl.int64)
    key = arithmetic.mix((tl.load(ids + row, mask=is_row, other=0) ^ -7046029254386353131).to(tl.uint64, bitcast=True))
    key = arithmetic.mix(table_key.to(tl.int64).to(tl.uint64, bitcast=True) ^ key)
    column = tl.arange(0, BLOCK)
    inside = is_row[:, None] & (column < DIM)[None, :]
    drawn = arithmetic.draw(key[:, None], (first + column)[None, :])
    if KIND == 0:
        value = tl.fma((drawn >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08, span, low)
    elif KIND == 1:
        mean, deviation = tl.load(numbers), tl.load(numbers + 1)
        u = (drawn.to(tl.int64).to(tl.float64) + 0.5) * 2.3283064365386963e-10
        value = (mean + deviation * _quantile(u)).to(tl.float32)
    else:
        value = tl.zeros((ROWS, BLOCK), dtype=tl.float32) + low
    at = values + frame[:, None] * DIM + column[None, :]
    if DTYPE == 0:
        tl.store(at, value, mask=inside)
    elif DTYPE == 1:
        half = value.to(tl.float16)
        value = half.to(tl.float32)
        tl.store(at, half.to(tl.int16, bitcast=True), mask=inside)
    else:
        bits = _nearest_bfloat16(value)
        value = (bits << 16).to(tl.float32, bitcast=True)
        tl.store(at, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)
    of_row = state + frame[:, None] * STATE_DIM + column[None, :]
    if FTRL:
        z = value * decay * -1.0 - tl.where(value < 0.0, l1 * -1.0, l1)
        tl.store(of_row, tl.where(value == 0.0, 0.0, z), mask=inside)
    FROM: tl.constexpr = DIM if FTRL else 0
    for begin in range(FROM, STATE_DIM, BLOCK):
        number = tl.zeros((ROWS, BLOCK), dtype=tl.float32) + start
        tl.store(of_row + begin, number, mask=is_row[:, None] & (begin + column < STATE_DIM)[None, :])


def initialise(
    values: Tensor, state: Tensor, frames: Tensor, ids: Tensor, initial: InitialValues, layout: RowLayout
) -> None:
    """Write the values and states that rows of the ids begin with into their frames; see the reference."""
    if len(frames) == 0:
        return
    block = max(16, triton.next_power_of_2(layout.dim))
    numbers = (
        128 if initial.kind == NORMAL else 256 if layout.dim % 4 else 512
    )  # a warp computes so many: float64 takes registers
    rows = max(1, numbers // block)
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        _initialise_kernel[(triton.cdiv(len(frames), rows),)](
            values if values.dtype == torch.float32 else values.view(torch.int16), state, frames, ids, initial.numbers,
            initial.key, layout.first, initial.low, initial.span, initial.start, initial.decay or 0.0, initial.l1,
            len(frames), KIND=initial.kind, DTYPE=_DTYPES[values.dtype], FTRL=initial.decay is not None,
            DIM=layout.dim, STATE_DIM=layout.state_dim, ROWS=rows, BLOCK=block,
            num_warps=min(32, max(1, block // numbers)), enable_fp_fusion=False,
        )  # fmt: skip


_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
