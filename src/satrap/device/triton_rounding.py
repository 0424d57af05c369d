"""Random bits and stochastic rounding in Triton: the bits of `satrap.device.exact`."""

import triton
import triton.language as tl


@triton.jit
def draw(key, element):
    """Return 32 random bits: `draw_element` of the core."""
    x = key.to(tl.uint32) + element.to(tl.uint32) * 0x9E3779B9
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15) ^ (key >> 32).to(tl.uint32)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def mix(x):
    """Return 64 mixed bits: the end of `step_key` of the core."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def to_bfloat16(value, noise):
    """Round up or down to bfloat16, as the noise decides; never up to infinity."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (bits + (noise & 0xFFFF)) >> 16
    cut = bits >> 16
    return tl.where(magnitude > 0x7F800000, cut | 0x40, tl.where(magnitude >= 0x7F7F0000, cut, rounded))


@triton.jit
def to_float16(value, noise):
    """Round up or down to float16, as the noise decides; never up to infinity."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - (112 << 23) + (noise & 0x1FFF)) >> 13
    scaled = tl.where(magnitude < 0x38800000, tl.abs(value), 0.0) * 16777216.0
    whole = scaled.to(tl.int32)
    up = (noise >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 < scaled - whole.to(tl.float32)
    half = tl.where(magnitude >= 0x38800000, normal, (whole + up.to(tl.int32)).to(tl.uint32))
    half = tl.where(magnitude >= 0x477FE000, 0x7BFF, half)
    half = tl.where(magnitude > 0x7F800000, 0x7E00, half)
    return half | ((bits >> 16) & 0x8000)
