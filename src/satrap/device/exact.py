"""Arithmetic on tensors with the bits of the core: fused multiply-add, and rounding to 16 bits.

The core's formulas are IEEE operations, each rounded once, so torch's elementwise operations give the same bits. Torch
has no fused multiply-add and no stochastic rounding; these are built here from operations that it has.
"""

import numpy as np
import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


def fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32 numbers, rounded once.

    The product is exact in float64. The sum is rounded there to odd: if it is not exact, its last bit is set. Then the
    rounding to float32 cannot round a second time at a tie."""
    product = (a.double() if isinstance(a, Tensor) else a) * b.double()
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = (error != 0) & (bits & 1 == 0) & total.isfinite()
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + toward, bits).view(torch.float64).float()


def sqrt(x: Tensor) -> Tensor:
    """Return the square root, rounded correctly. Torch's on a CPU is not: a vector library computes it."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def draw_elements(keys: Tensor, first: int, dim: int) -> Tensor:
    """Return 32 random bits for each of the elements from `first` on of rows with these keys, as int64 [rows, dim]:
    `draw_element` of the core."""
    element = torch.arange(first, first + dim, device=keys.device)
    low, high = keys[:, None] & _LOW_32, (keys[:, None] >> 32) & _LOW_32
    x = (low + element * 0x9E3779B9) & _LOW_32
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW_32
    x = x ^ (x >> 15) ^ high
    x = _times(x, 0x846CA68B)
    return x ^ (x >> 16)


def step_keys(keys: Tensor, step: int) -> Tensor:
    """Return the keys of rows at a step: `step_key` of the core."""
    return mix_keys(keys + signed(0x9E3779B97F4A7C15 * (step + 1)))


def mix_keys(x: Tensor) -> Tensor:
    """Return mixed bits: `mix64` of the core. int64 as bit patterns; its products wrap around."""
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def round_stochastic(values: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Return float32 values rounded up or down to 16 bits, as the noise decides; never up to infinity."""
    bits = values.view(torch.int32).to(torch.int64) & _LOW_32
    rounded = _to_bfloat16(bits, noise) if dtype == torch.bfloat16 else _to_float16(values, bits, noise)
    return rounded.to(torch.int16).view(dtype)


def _to_bfloat16(bits: Tensor, noise: Tensor) -> Tensor:
    magnitude = bits & 0x7FFFFFFF
    cut = bits >> 16
    rounded = (bits + (noise & 0xFFFF)) >> 16
    return torch.where(magnitude > 0x7F800000, cut | 0x40, torch.where(magnitude >= 0x7F7F0000, cut, rounded))


def _to_float16(values: Tensor, bits: Tensor, noise: Tensor) -> Tensor:
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 16) & 0x8000
    normal = (magnitude - (112 << 23) + (noise & 0x1FFF)) >> 13
    scaled = values.abs() * 2.0**24  # subnormal halves are multiples of 2^-24
    whole = scaled.nan_to_num(0.0, 0.0, 0.0).clamp(max=2048.0).to(torch.int64)
    up = (noise >> 8).float() * 2.0**-24 < scaled - whole.float()
    half = torch.where(magnitude >= 0x38800000, normal, whole + up)
    half = torch.where(magnitude >= 0x477FE000, 0x7BFF, half)  # 65504 and above saturate
    return torch.where(magnitude > 0x7F800000, 0x7E00, half) | sign


def _times(x: Tensor, factor: int) -> Tensor:
    """Return the low 32 bits of a product of 32-bit numbers, whose 64 bits may not fit an int64."""
    return ((x & 0xFFFF) * factor + (((x >> 16) * factor & 0xFFFF) << 16)) & _LOW_32


def _shifted(x: Tensor, by: int) -> Tensor:
    """Return the bit pattern shifted right, filled with zeros."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def signed(x: int) -> int:
    """Return the low 64 bits as torch's int64 holds them."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x
