"""The step of each optimizer in Triton, on the values of one row: the bits of `satrap.device.reference`.

p: the values. g: the sum of the row's gradients. at: where its elements begin in `values`, by column; state is laid out
as the core's. Each returns the new values and stores the new state.
"""

import triton
import triton.language as tl


@triton.jit
def _power(base, count):
    """Return base ** count by squaring: `power` of the core. base: float64."""
    result = base * 0.0 + 1.0
    while count != 0:
        result = tl.where(count & 1 == 1, result * base, result)
        base = base * base
        count = count >> 1
    return result


@triton.jit
def _row_total(squares, BLOCK: tl.constexpr):
    """Return the sum of squares: element i in lane i % 16, the lanes added as a tree. squares: g, shaped (-1, 16)."""
    lanes = tl.zeros((16,), dtype=tl.float32)
    number = tl.arange(0, BLOCK // 16)[:, None]
    for i in tl.static_range(BLOCK // 16):
        g = tl.sum(tl.where(number == i, squares, 0.0), axis=0)
        lanes = tl.fma(g, g, lanes)
    lanes = tl.sum(tl.reshape(lanes, (2, 8)), axis=0)
    lanes = tl.sum(tl.reshape(lanes, (2, 4)), axis=0)
    lanes = tl.sum(tl.reshape(lanes, (2, 2)), axis=0)
    return tl.sum(lanes, axis=0)


@triton.jit
def sgd(p, g, lr, decay):
    zeros = tl.zeros_like(g)
    g = tl.where(decay == 0.0, g, tl.fma(zeros + decay, p, g))
    return tl.fma(zeros - lr, g, p)


@triton.jit
def momentum_sgd(p, g, state, at, inside, lr, momentum, decay, NESTEROV: tl.constexpr):
    zeros = tl.zeros_like(g)
    g = tl.fma(zeros + decay, p, g)
    buffer = tl.load(state + at, mask=inside, other=0.0) * momentum + g
    tl.store(state + at, buffer, mask=inside)
    if NESTEROV:
        buffer = tl.fma(zeros + momentum, buffer, g)
    return tl.fma(zeros - lr, buffer, p)


@triton.jit
def adagrad(p, g, state, at, inside, lr, decay, eps):
    zeros = tl.zeros_like(g)
    g = tl.fma(zeros + decay, p, g)
    total = tl.load(state + at, mask=inside, other=1.0) + g * g
    tl.store(state + at, total, mask=inside)
    return tl.fma(zeros - lr, tl.div_rn(g, tl.sqrt_rn(total) + eps), p)


@triton.jit
def row_wise_adagrad(p, g, state, inside, lr, decay, eps, dim, BLOCK: tl.constexpr):
    """state: of this row. dim: as float32."""
    zeros = tl.zeros_like(g)
    g = tl.fma(zeros + decay, p, g)
    squares = _row_total(tl.reshape(tl.where(inside, g, 0.0), (BLOCK // 16, 16)), BLOCK)
    total = tl.load(state) + tl.div_rn(squares, dim)
    tl.store(state, total)
    factor = tl.div_rn(tl.cast(lr, tl.float32), tl.sqrt_rn(total) + eps)
    return tl.fma(zeros - factor, g, p)


@triton.jit
def adam(p, g, state, column, inside, dim: tl.constexpr, doubles, decay, eps, DECOUPLED: tl.constexpr):
    """state: of this row. doubles: lr, beta1 and beta2 as float64. DECOUPLED: AdamW."""
    zeros = tl.zeros_like(g)
    steps = tl.load(state + 2 * dim) + 1.0
    tl.store(state + 2 * dim, steps)
    number = steps.to(tl.int32)
    lr, beta1, beta2 = tl.load(doubles), tl.load(doubles + 1), tl.load(doubles + 2)
    step_size = (lr / (1.0 - _power(beta1, number))).to(tl.float32)
    correction = tl.sqrt(1.0 - _power(beta2, number)).to(tl.float32)
    weight = (1.0 - beta1).to(tl.float32)
    average = tl.load(state + column, mask=inside, other=0.0)
    square = tl.load(state + dim + column, mask=inside, other=0.0)
    if DECOUPLED:
        p = p * (1.0 - lr * tl.cast(decay, tl.float64)).to(tl.float32)
        g = tl.fma(zeros, p, g)
    else:
        g = tl.fma(zeros + decay, p, g)
    coefficient = tl.where(weight < 0.5, weight, weight - 1.0)
    average = tl.fma(zeros + coefficient, g - average, tl.where(weight < 0.5, average, g))
    square = tl.fma((1.0 - beta2).to(tl.float32) * g, g, square * beta2.to(tl.float32))
    tl.store(state + column, average, mask=inside)
    tl.store(state + dim + column, square, mask=inside)
    return tl.fma(zeros - step_size, tl.div_rn(average, tl.div_rn(tl.sqrt_rn(square), zeros + correction) + eps), p)


@triton.jit
def ftrl(p, g, state, column, inside, dim: tl.constexpr, doubles, beta, l1, l2):
    """state: of this row. doubles: lr as float64."""
    z = tl.load(state + column, mask=inside, other=0.0)
    n = tl.load(state + dim + column, mask=inside, other=1.0)
    inverse_lr = (1.0 / tl.load(doubles)).to(tl.float32)
    new_n = tl.fma(g, g, n)
    root = tl.sqrt_rn(new_n)
    sigma = (root - tl.sqrt_rn(n)) * inverse_lr
    z = tl.fma(-sigma, p, z + g)
    magnitude = tl.abs(z)
    shrunk = tl.where(z.to(tl.uint32, bitcast=True) >> 31 == 0, 1.0, -1.0) * tl.abs(magnitude - l1)
    tl.store(state + column, z, mask=inside)
    tl.store(state + dim + column, new_n, mask=inside)
    return tl.where(magnitude <= l1, 0.0, tl.div_rn(-shrunk, (beta + root) * inverse_lr + l2))
