"""The values and states that new rows begin with, computed on the device: a function of (seed, table, id) alone, with
the bits of `initialise` in the core (core/kernels/kernels_body.hpp).

So a new row costs its id and its frame, 12 bytes of the bus, and no wait. `initialise` here is plain torch; a CUDA
device has the kernel of `triton_initial`. The normal quantile and its logarithm are IEEE operations in float64, each
rounded once, and so have the same bits everywhere.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from satrap.config.optimizers import Adagrad, Ftrl, RowWiseAdagrad
from satrap.config.tables import Constant, Normal, Table
from satrap.device.exact import draw_elements, fma, mix_keys, signed, sqrt
from satrap.device.home_memory import RowLayout
from satrap.table.engine import resolved_initial

_MASK_64 = (1 << 64) - 1
KINDS = UNIFORM, NORMAL, CONSTANT = range(3)

CENTRAL = (
    (-3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02, 1.383577518672690e02, -3.066479806614716e01,
     2.506628277459239e00),
    (-5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02, 6.680131188771972e01, -1.328068155288572e01,
     1.0),
)  # fmt: skip
"""Acklam's approximation of the normal quantile: numerator and denominator in the middle."""
TAIL = (
    (-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00, -2.549732539343734e00,
     4.374664141464968e00, 2.938163982698783e00),
    (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0),
)  # fmt: skip
"""The same approximation in the tails."""


@dataclass(frozen=True, slots=True)
class InitialValues:
    """How the rows of a table begin."""

    kind: int
    """UNIFORM, NORMAL or CONSTANT."""
    key: int
    """The core's key of the table, as torch's int64 holds it."""
    numbers: Tensor
    """float64 [2] on the device: low and high, mean and standard deviation, or the value and 0."""
    low: float
    """The first of the numbers as float32."""
    span: float
    """The second minus the first as float32."""
    start: float
    """What each number of an optimizer's state begins with, except Ftrl's."""
    decay: float | None
    """Ftrl's beta / lr + l2: its state begins such that its closed form is the row's value; None: not Ftrl."""
    l1: float

    @classmethod
    def of(cls, table: Table, seed: int, device: torch.device) -> Self:
        """Return the initial values of a table's rows."""
        initial, optimizer = resolved_initial(table), table.optimizer
        match initial:
            case Constant(value=value):
                kind, first, second = CONSTANT, value, 0.0
            case Normal(mean=mean, std=std):
                kind, first, second = NORMAL, mean, std
            case _:
                kind, first, second = UNIFORM, initial.low, initial.high
        start, decay, l1 = 0.0, None, 0.0
        if isinstance(optimizer, Adagrad | RowWiseAdagrad):
            start = _float(optimizer.initial_accumulator_value)
        if isinstance(optimizer, Ftrl):
            decay, l1 = _float(optimizer.beta / optimizer.lr + optimizer.l2), _float(optimizer.l1)
        return cls(
            kind=kind,
            key=signed(_mix(_mix(seed) ^ _hash_of(table.name))),
            numbers=torch.tensor([first, second], dtype=torch.float64, device=device),
            low=_float(first),
            span=_float(second - first),
            start=start,
            decay=decay,
            l1=l1,
        )


def initialise(
    values: Tensor, state: Tensor, frames: Tensor, ids: Tensor, initial: InitialValues, layout: RowLayout
) -> None:
    """Write the initial values and states of the ids' rows into their frames.

    ids: int64, as bit patterns.
    """
    keys = mix_keys(initial.key ^ mix_keys(ids ^ signed(0x9E3779B97F4A7C15)))
    if initial.kind == CONSTANT:
        rows = torch.full((len(ids), layout.dim), initial.low, dtype=torch.float32, device=values.device)
    else:
        drawn = draw_elements(keys, layout.first, layout.dim)
        rows = _normal(drawn, initial) if initial.kind == NORMAL else _uniform(drawn, initial)
    values[frames] = rows.to(values.dtype)
    state[frames] = initial.start
    if initial.decay is not None:
        stored = values[frames].float()
        z = -(stored * initial.decay) - torch.full_like(stored, initial.l1).copysign(stored)
        state[frames, : layout.dim] = torch.where(stored == 0.0, 0.0, z)


def _uniform(drawn: Tensor, initial: InitialValues) -> Tensor:
    low = torch.full(drawn.shape, initial.low, dtype=torch.float32, device=drawn.device)
    return fma(initial.span, (drawn >> 8).float() * 2.0**-24, low)


def _normal(drawn: Tensor, initial: InitialValues) -> Tensor:
    u = (drawn.double() + 0.5) * 2.0**-32
    q = torch.where(u < 0.5, u, 1.0 - u)
    d = u - 0.5
    above, below = (_polynomial(coefficients, d * d) for coefficients in CENTRAL)
    central = above * d / below
    t = sqrt(-2.0 * _log(q))
    above, below = (_polynomial(coefficients, t) for coefficients in TAIL)
    tail = above / below
    quantile = torch.where(q > 0.02425, central, torch.where(u < 0.5, tail, -tail))
    mean, deviation = initial.numbers.unbind()
    return (mean + deviation * quantile).float()


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total = total * x + coefficient
    return total


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal numbers: `portable_log` of the core."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    is_large = m > 1.4142135623730951
    m, exponent = torch.where(is_large, m * 0.5, m), exponent + is_large
    s = (m - 1.0) / (m + 1.0)
    square, series = s * s, torch.zeros_like(s)
    for k in range(21, 0, -2):
        series = series * square + 1.0 / k
    return exponent.double() * 0.6931471805599453 + 2.0 * s * series


def _hash_of(name: str) -> int:
    """Return `hash_name` of the core."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 & _MASK_64
    return _mix(h)


def _mix(x: int) -> int:
    """Return `mix64` of the core."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK_64
    return x ^ x >> 31


def _float(number: float) -> float:
    return float(np.float32(number))
