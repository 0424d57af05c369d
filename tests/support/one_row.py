"""The reference of one optimizer step on one row, for every optimizer of the table.

`assert_step` takes a row before and after a step and raises unless the step is right:
 1. plain SGD is an exact fma, bit for bit;
 2. SGD with momentum or decay, Adagrad, Adam, AdamW: the state is within 2 ulp of what torch.optim makes of a one-row
    `torch.nn.Parameter`; the values are within these 2 ulp and those of 4, beyond torch's own rounding (torch's
    vectorised sqrt is an ulp off at times);
 3. row-wise Adagrad and FTRL-proximal: the state is within 2 ulp of the papers' formulas in float64;
 4. all but plain SGD: the values are those of the formula in float64, evaluated on the row's new state, but for the
    roundings that float32 must make on the way (3.5 ulp at most).
An ulp is one of the largest operand: old value, new value or their difference. Where a formula itself loses more, the
place says so. 16-bit values must be one of the two neighbours of the exact result. It knows nothing of ids, buckets
or stores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad

OPTIMIZERS: list[Any] = [
    SGD(lr=0.1),
    SGD(lr=0.1, weight_decay=0.1),
    SGD(lr=0.1, momentum=0.9),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
    RowWiseAdagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1, weight_decay=0.2),
    Adam(lr=0.01),
    Adam(lr=0.1, betas=(0.3, 0.9), weight_decay=0.1),
    AdamW(lr=0.01),
    Ftrl(lr=0.1, l1=0.01),
    Ftrl(lr=0.05, l2=0.1),
]
"""Every optimizer, with each option that changes its formula."""

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

FORMULA_ULPS = 3.5  # the longest formulas round seven times, by half an ulp each; torch's own float32 does the same


def state_dim(optimizer: Any, dim: int) -> int:
    """Returns the number of floats of state in a row."""
    match optimizer:
        case SGD():
            return dim if optimizer.momentum > 0 else 0
        case Adagrad():
            return dim
        case RowWiseAdagrad():
            return 1
        case Adam() | AdamW():
            return 2 * dim + 1
        case Ftrl():
            return 2 * dim
    raise AssertionError(f"no reference for {optimizer!r}")


def initial_state(optimizer: Any, values: F32, lr: float) -> F64:
    """Returns the state of a row just inserted with these values."""
    match optimizer:
        case Adagrad() | RowWiseAdagrad():
            start = np.float32(optimizer.initial_accumulator_value)
            return np.full(state_dim(optimizer, len(values)), start, np.float64)
        case Ftrl():
            w = values.astype(np.float64)
            z = -(w * (optimizer.beta / lr + optimizer.l2)) - np.sign(w) * optimizer.l1
            return np.concatenate([z, np.zeros_like(z)])
    return np.zeros(state_dim(optimizer, len(values)), np.float64)


def fma(a: F32, b: F32, c: F32) -> F32:
    """Returns a * b + c rounded once. The product is exact in float64; a sum rounded to odd can be rounded again."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    with np.errstate(over="ignore"):
        odd = np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total)
        return odd.astype(np.float32)


def ulp(*operands: Any) -> F64:
    """Returns a unit in the last place of the largest of the operands: 2**-23 of it."""
    largest = np.maximum.reduce(np.broadcast_arrays(*(np.abs(np.asarray(each, np.float64)) for each in operands)))
    return np.asarray(np.maximum(largest * 2.0**-23, 2.0**-149), np.float64)


def torch_optimizer(optimizer: Any, row: torch.nn.Parameter, lr: float) -> torch.optim.Optimizer:
    """Returns torch's optimizer of a Parameter that holds only this row."""
    options: dict[str, Any] = {"lr": lr, "weight_decay": optimizer.weight_decay}
    match optimizer:
        case SGD():
            return torch.optim.SGD([row], momentum=optimizer.momentum, nesterov=optimizer.nesterov, **options)
        case Adagrad():
            start = optimizer.initial_accumulator_value
            return torch.optim.Adagrad([row], eps=optimizer.eps, initial_accumulator_value=start, **options)
        case Adam() | AdamW():
            kind = torch.optim.AdamW if isinstance(optimizer, AdamW) else torch.optim.Adam
            return kind([row], betas=optimizer.betas, eps=optimizer.eps, **options)
    raise AssertionError(f"torch has no {optimizer!r}")


def torch_step(optimizer: Any, values: F32, state: F32, gradient: F32, lr: float) -> tuple[F32, F32]:
    """Applies one step of torch.optim to a Parameter that holds only this row."""
    dim = len(values)
    row = torch.nn.Parameter(torch.from_numpy(values.copy()))
    row.grad = torch.from_numpy(gradient.copy())
    before = torch.from_numpy(state.copy())
    stepper = torch_optimizer(optimizer, row, lr)
    kept: dict[str, torch.Tensor] = {}
    match optimizer:
        case SGD() if optimizer.momentum > 0:
            kept = {"momentum_buffer": before}
        case Adagrad():
            kept = {"sum": before}
        case Adam() | AdamW():
            kept = {"exp_avg": before[:dim], "exp_avg_sq": before[dim : 2 * dim], "step": before[2 * dim].clone()}
    stepper.state[row].update(kept)
    stepper.step()
    after = [stepper.state[row][name].reshape(-1) for name in kept]
    return row.detach().numpy(), torch.cat(after).numpy() if after else np.zeros(0, np.float32)


def rowwise_state(optimizer: RowWiseAdagrad, values: F32, state: F32, gradient: F32) -> tuple[F64, F64]:
    """FBGEMM's exact row-wise Adagrad (EXACT_ROWWISE_ADAGRAD, weight decay mode L2), the state's half:
    g' = g + wd p;  s += mean(g'^2). A float32 sum over a row rounds once more for each level of its tree."""
    g = decayed(optimizer, values, gradient)
    new = state.astype(np.float64) + np.mean(g * g)
    return new, (2 + 0.5 * np.ceil(np.log2(len(values)))) * ulp(new)


def ftrl_state(optimizer: Ftrl, values: F32, state: F32, gradient: F32, lr: float) -> tuple[F64, F64]:
    """FTRL-proximal (McMahan et al. 2013, algorithm 1), the state's half: (state, what float32 may lose).

    sigma = (sqrt(n + g^2) - sqrt(n)) / lr cancels when g^2 << n; z += g - sigma p loses what the largest term loses."""
    dim = len(values)
    p, g, old = values.astype(np.float64), gradient.astype(np.float64), state.astype(np.float64)
    z, n = old[:dim], old[dim:]
    root = np.sqrt(n + g * g)
    sigma = (root - np.sqrt(n)) / lr
    new = np.concatenate([z + g - sigma * p, n + g * g])
    slack_z = 2 * ulp(z, g, sigma * p, new[:dim]) + 3 * ulp(root) / lr * np.abs(p)
    return new, np.concatenate([slack_z, 2 * ulp(new[dim:])])


def decayed(optimizer: Any, values: F32, gradient: F32) -> F64:
    """Returns the gradient with weight decay. Parameters are float32, as in torch's kernels; this sum is exact."""
    return gradient.astype(np.float64) + float(np.float32(optimizer.weight_decay)) * values.astype(np.float64)


def closed_form(optimizer: Any, values: F32, new_state: F32, gradient: F32, lr: float) -> tuple[F64, F64]:
    """Returns the new values in float64, from the old ones and the new state: (values, float32's possible error)."""
    dim, p, state = len(values), values.astype(np.float64), new_state.astype(np.float64)
    match optimizer:
        case SGD():
            g = decayed(optimizer, values, gradient)
            momentum = float(np.float32(optimizer.momentum))
            if momentum > 0:
                g = g + momentum * state if optimizer.nesterov else state
            new = p - lr * g
        case Adagrad() | RowWiseAdagrad():
            new = p - lr * decayed(optimizer, values, gradient) / (np.sqrt(state) + np.float32(optimizer.eps))
        case Adam() | AdamW():
            (beta1, beta2), count = optimizer.betas, state[2 * dim]
            rate, correction = lr / (1 - beta1**count), np.sqrt(1 - beta2**count)
            start = p * (1 - lr * optimizer.weight_decay) if isinstance(optimizer, AdamW) else p
            denominator = np.sqrt(state[dim : 2 * dim]) / correction + np.float32(optimizer.eps)
            new = start - rate * state[:dim] / denominator
        case Ftrl():
            z, n = state[:dim], state[dim:]
            scale = (optimizer.beta + np.sqrt(n)) / lr + optimizer.l2
            new = np.where(np.abs(z) <= optimizer.l1, 0.0, -(z - np.sign(z) * optimizer.l1) / scale)
            return new, FORMULA_ULPS * ulp(new) + ulp(z, optimizer.l1) / scale  # |z| - l1 cancels
        case _:
            raise AssertionError(f"no reference for {optimizer!r}")
    return new, FORMULA_ULPS * ulp(p, new, new - p) + nesterov_loss(optimizer, values, new_state, gradient, lr)


def nesterov_loss(optimizer: Any, values: F32, new_state: F32, gradient: F32, lr: float) -> Any:
    """Returns float32's possible error in Nesterov's sum, whose terms may cancel; 0 otherwise."""
    if not (isinstance(optimizer, SGD) and optimizer.nesterov):
        return 0.0
    return lr * ulp(decayed(optimizer, values, gradient), optimizer.momentum * new_state.astype(np.float64))


def _within(found: F32, expected: Any, slack: Any, what: str) -> None:
    difference = np.abs(found.astype(np.float64) - np.asarray(expected, np.float64))
    if not np.all(difference <= slack):
        worst = int(np.argmax(difference - slack))
        raise AssertionError(
            f"{what}[{worst}]: found {found[worst]!r}, expected {np.asarray(expected)[worst]!r} "
            f"+- {np.broadcast_to(slack, found.shape)[worst]:.3g}, off by {difference[worst]:.3g}"
        )


def _grid_below(x: F64, dtype: str) -> F64:
    """Returns the largest value of the 16-bit type that is not above x."""
    bits, least = (11, -24) if dtype == "float16" else (8, -133)
    _, exponent = np.frexp(x)
    unit = np.exp2(np.maximum(exponent - bits, least).astype(np.float64))
    grid: F64 = np.floor(x / unit) * unit
    return grid


def assert_neighbour(found: F32, expected: Any, slack: Any, dtype: str) -> None:
    """Checks that `found` is a 16-bit value next to `expected`, which is known only to within `slack`."""
    limit = 65504.0 if dtype == "float16" else float(np.finfo(np.float32).max)
    low = np.clip(_grid_below(np.asarray(expected, np.float64) - slack, dtype), -limit, limit)
    high = np.clip(-_grid_below(-(np.asarray(expected, np.float64) + slack), dtype), -limit, limit)
    got = found.astype(np.float64)
    assert np.array_equal(_grid_below(got, dtype), got), f"not a {dtype}: {found}"
    assert np.all((low <= got) & (got <= high)), f"{dtype}: found {found}, expected a neighbour of {expected}"


def is_exact(optimizer: Any) -> bool:
    """Returns whether the step must be exact bit for bit, as of plain SGD."""
    return isinstance(optimizer, SGD) and optimizer.momentum == 0 and optimizer.weight_decay == 0


def reference_state(optimizer: Any, values: F32, state: F32, gradient: F32, lr: float) -> tuple[Any, Any]:
    """Returns the state after the step: (state, float32's possible error)."""
    match optimizer:
        case Ftrl():
            return ftrl_state(optimizer, values, state, gradient, lr)
        case RowWiseAdagrad():
            return rowwise_state(optimizer, values, state, gradient)
    _, expected = torch_step(optimizer, values, state, gradient, lr)
    slack = 2 * ulp(state, expected)
    if optimizer.weight_decay > 0 and not isinstance(optimizer, AdamW):  # torch rounds wd p, and g + wd p may cancel
        lost = np.abs(optimizer.weight_decay * values) * 2.0**-24 * np.maximum(1, 2 * np.abs(gradient))
        lost = np.tile(lost, -(-len(state) // len(values)))[: len(state)]
        slack = slack + lost
    return expected, slack


def assert_step(
    optimizer: Any, lr: float, before: tuple[F32, F32], gradient: F32, after: tuple[F32, F32], dtype: str = "float32"
) -> None:
    """Checks that the step from `before` to `after` (values, state) is the optimizer's; the module says how exactly."""
    (values, state), (new_values, new_state) = before, after
    bounds: list[tuple[Any, Any]] = []
    if is_exact(optimizer):  # 1.
        assert new_state.size == 0
        bounds.append((fma(np.full_like(values, -np.float32(lr)), gradient, values), 0.0))
    else:
        _within(new_state, *reference_state(optimizer, values, state, gradient, lr), "state")
        bounds.append(closed_form(optimizer, values, new_state, gradient, lr))  # 4.
    if not is_exact(optimizer) and not isinstance(optimizer, RowWiseAdagrad | Ftrl):  # 2.
        expected, torch_state = torch_step(optimizer, values, state, gradient, lr)
        exact, _ = closed_form(optimizer, values, torch_state, gradient, lr)
        slack = (2 + FORMULA_ULPS) * ulp(values, expected, expected - values)
        slack = slack + nesterov_loss(optimizer, values, new_state, gradient, lr)
        bounds.append((expected, slack + np.abs(expected - exact)))
    for expected, slack in bounds:
        if dtype == "float32":
            _within(new_values, expected, slack, "values")
        else:
            assert_neighbour(new_values, expected, slack, dtype)
