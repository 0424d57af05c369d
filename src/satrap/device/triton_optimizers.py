"""The step of each optimizer in Triton, on a tile of rows, and the stochastic rounding of 16-bit values: the bits of
`satrap.device.reference` and `satrap.device.exact`. The kernels load and store, but for `store_values`.

p: the values, g: the sums of gradients, both [rows, columns]. A state is [rows, columns], too, unless a step says
otherwise. Each step returns the new values and the new state.
"""

import triton
import triton.language as tl


@triton.jit
def sgd(p, g, lr, decay):
    g = tl.where(decay == 0.0, g, tl.fma(decay, p, g))
    return tl.fma(_negative(lr), g, p)


@triton.jit
def momentum_sgd(p, g, buffer, lr, momentum, decay, NESTEROV: tl.constexpr):
    g = tl.fma(decay, p, g)
    buffer = buffer * momentum + g
    change = tl.fma(momentum, buffer, g) if NESTEROV else buffer
    return tl.fma(_negative(lr), change, p), buffer


@triton.jit
def adagrad(p, g, total, lr, decay, eps):
    g = tl.fma(decay, p, g)
    total = total + g * g
    return tl.fma(_negative(lr), tl.div_rn(g, tl.sqrt_rn(total) + eps), p), total


@triton.jit
def row_wise_adagrad(p, g, total, inside, lr, decay, eps, dim: tl.constexpr):
    """total: [rows]. inside: the columns that rows have."""
    g = tl.fma(decay, p, g)
    squares = _row_totals(tl.where(inside, g, 0.0))
    total = total + tl.div_rn(squares, tl.full(squares.shape, dim, tl.float32))
    factor = tl.div_rn(tl.zeros_like(total) + lr, tl.sqrt_rn(total) + eps)
    return tl.fma(_negative(factor)[:, None], g, p), total


@triton.jit
def adam(p, g, average, square, steps, lr, beta1, beta2, decay, eps, DECOUPLED: tl.constexpr):
    """steps: [rows], with this one. lr, beta1, beta2: float64. DECOUPLED: AdamW."""
    power1, power2 = _powers(beta1, beta2, steps.to(tl.int32))
    step_size = (lr / (1.0 - power1)).to(tl.float32)[:, None]
    correction = tl.sqrt(1.0 - power2).to(tl.float32)[:, None]
    weight = tl.cast(1.0 - beta1, tl.float32)
    if DECOUPLED:
        p = p * tl.cast(1.0 - lr * tl.cast(decay, tl.float64), tl.float32)
        g = tl.fma(0.0, p, g)
    else:
        g = tl.fma(decay, p, g)
    coefficient = tl.where(weight < 0.5, weight, weight - 1.0)
    average = tl.fma(coefficient, g - average, tl.where(weight < 0.5, average, g))
    square = tl.fma(tl.cast(1.0 - beta2, tl.float32) * g, g, square * tl.cast(beta2, tl.float32))
    root = tl.div_rn(tl.sqrt_rn(square), tl.zeros_like(square) + correction)
    return tl.fma(_negative(step_size), tl.div_rn(average, root + eps), p), average, square


@triton.jit
def ftrl(p, g, z, n, lr, beta, l1, l2):
    """lr: float64."""
    inverse_lr = tl.cast(1.0 / lr, tl.float32)
    new_n = tl.fma(g, g, n)
    root = tl.sqrt_rn(new_n)
    sigma = (root - tl.sqrt_rn(n)) * inverse_lr
    z = tl.fma(_negative(sigma), p, z + g)
    magnitude = tl.abs(z)
    shrunk = tl.where(z.to(tl.uint32, bitcast=True) >> 31 == 0, 1.0, -1.0) * tl.abs(magnitude - l1)
    p = tl.where(magnitude <= l1, 0.0, tl.div_rn(_negative(shrunk), (beta + root) * inverse_lr + l2))
    return p, z, new_n


@triton.jit
def _negative(x):
    """Return -x, of zero too: Triton computes a unary minus as 0 - x."""
    return x * -1.0


@triton.jit
def _powers(base1, base2, count):
    """Return base1 ** count and base2 ** count of each row by squaring: `power` of the core. The bases are float64."""
    power1 = tl.full(count.shape, 1.0, tl.float64)
    power2 = tl.full(count.shape, 1.0, tl.float64)
    base1 = tl.cast(1.0, tl.float64) * base1  # Triton's interpreter assigns a Python float as float32
    base2 = tl.cast(1.0, tl.float64) * base2
    left = tl.max(count)
    while left != 0:
        power1 = tl.where(count & 1 == 1, power1 * base1, power1)
        power2 = tl.where(count & 1 == 1, power2 * base2, power2)
        base1 = base1 * base1
        base2 = base2 * base2
        count = count >> 1
        left = left >> 1
    return power1, power2


@triton.jit
def _row_totals(g):
    """Return each row's sum of squares: element i is added in lane i % 16, in order, and the lanes as a tree."""
    ROWS: tl.constexpr = g.shape[0]
    parts = tl.permute(tl.reshape(g, (ROWS, g.shape[1] // 16, 16)), (0, 2, 1))
    lanes = _add_squares(tl.zeros((ROWS, 16), dtype=tl.float32), parts)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 8)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 4)), axis=1)
    lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, 2)), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit
def _add_squares(lanes, parts):
    """Add the squares of parts [..., 0], [..., 1] and so on to the lanes, in this order."""
    if parts.shape[2] == 1:
        part = tl.reshape(parts, lanes.shape)
        lanes = tl.fma(part, part, lanes)
    else:
        HALF: tl.constexpr = parts.shape[2] // 2
        halves = tl.permute(tl.reshape(parts, (parts.shape[0], 16, 2, HALF)), (0, 1, 3, 2))
        first, second = tl.split(halves)
        lanes = _add_squares(_add_squares(lanes, first), second)
    return lanes


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


@triton.jit
def store_values(places, p, here, keys, run, is_run, step_mark, element, DTYPE: tl.constexpr):
    """Store the values of rows; round those of 16 bits at random."""
    if DTYPE == 0:
        tl.store(places, p, mask=here)
    else:
        key = tl.load(keys + run, mask=is_run, other=0).to(tl.uint64, bitcast=True)
        noise = draw(mix(key + step_mark.to(tl.uint64, bitcast=True))[:, None], element[None, :])
        bits = to_float16(p, noise) if DTYPE == 1 else to_bfloat16(p, noise)
        tl.store(places, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=here)
