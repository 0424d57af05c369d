"""The kernels of rows on a device, in plain torch: they run on any device, and the Triton kernels are tested against
them. Bit for bit the kernels of the core (core/kernels/kernels_body.hpp): the same operations in the same order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad
from satrap.device.exact import draw_elements, fma, round_stochastic, sqrt, step_keys
from satrap.device.home_memory import IN, OUT, HomeMemory
from satrap.device.runs import PooledFeatures, RowUpdate, Runs


def read_rows(values: Tensor, absent: Tensor, frames: Tensor) -> Tensor:
    """Return the rows of the frames as float32 [n, dim]: -1 reads zeros, and -2 - k row k of `absent`."""
    has_row = frames >= 0
    if bool(has_row.all()):
        return values[frames].float()
    rows = torch.zeros((len(frames), values.shape[1]), dtype=torch.float32, device=frames.device)
    rows[has_row] = values[frames[has_row]].float()
    without = frames < -1
    rows[without] = absent[-2 - frames[without]]
    return rows


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
    """Pool the rows of all bags of some features, in order, into their columns of the block. They are summed in
    float32, and rounded to the dtype of the block.

    frames: of all ids. offsets: where the bag of each feature and sample begins in them; None: each has one id."""
    if offsets is None:
        offsets = torch.arange(len(frames) + 1, device=frames.device)
    for number, column, pooling, weighted in features.lines():
        first = number * batch_size
        begin, end = offsets[first : first + batch_size], offsets[first + 1 : first + batch_size + 1]
        pooled = torch.zeros((batch_size, values.shape[1]), dtype=torch.float32, device=block.device)
        _pool_bags(values, absent, frames, begin, end, weights if weighted else None, pooling, pooled)
        block[:, column : column + values.shape[1]] = pooled


def _pool_bags(
    values: Tensor,
    absent: Tensor,
    frames: Tensor,
    begin: Tensor,
    end: Tensor,
    weights: Tensor | None,
    pooling: str,
    out: Tensor,
) -> None:
    lengths = end - begin
    longest = int(lengths.max()) if len(lengths) else 0
    for k in range(longest):
        bags = (lengths > k).nonzero()[:, 0]
        ids = begin[bags] + k
        rows = read_rows(values, absent, frames[ids])
        if weights is None:
            out[bags] = rows if k == 0 else out[bags] + rows
        else:
            weight = weights[ids][:, None]
            out[bags] = weight * rows if k == 0 else fma(weight, rows, out[bags])
    if pooling != "sum" and longest > 1:
        several = lengths > 1
        count = lengths[several].double()
        out[several] = out[several] / (count if pooling == "mean" else sqrt(count)).float()[:, None]


def copy_sequence(
    values: Tensor, absent: Tensor, frames: Tensor, offsets: Tensor | None, feature: int, out: Tensor
) -> None:
    """Copy the rows of each bag of a feature into out[i], zeros after the last.

    feature: its number. out: [batch size, length, dim], in which the rows are rounded to its dtype."""
    samples, length, _ = out.shape
    bag = torch.arange(feature * samples, (feature + 1) * samples, device=out.device)
    begin, end = (bag, bag + 1) if offsets is None else (offsets[bag], offsets[bag + 1])
    ids = begin[:, None] + torch.arange(length, device=out.device)
    is_id = ids < end[:, None]
    out.zero_()
    out[is_id] = read_rows(values, absent, frames[ids[is_id]]).to(out.dtype)


def exchange(
    values: Tensor, state: Tensor, home: HomeMemory, frames: Tensor, slots: Tensor, directions: Tensor
) -> None:
    """Copy rows between frames and slots at home, each in its directions; with their states, unless `state` has no
    columns. No frame and no slot that is copied occurs twice."""
    for here, lines, home_values, home_state in home.parts(slots):
        at, is_in, is_out = frames[here], (directions[here] & IN) != 0, (directions[here] & OUT) != 0
        for device_rows, home_rows in ((values, home_values), (state, home_state[:, : state.shape[1]])):
            leaving = device_rows[at[is_out]]
            device_rows[at[is_in]] = home_rows[lines[is_in]]
            home_rows[lines[is_out]] = leaving


def update(values: Tensor, state: Tensor, runs: Runs, gradients: Tensor, how: RowUpdate) -> Tensor | None:
    """Sum the gradients of each run in order, and apply the optimizer to its row, once.

    gradients: flat, of any dtype; runs.places are positions in it. If some may be skipped, return how many of each run
    were summed.
    """
    sums, summed = _sum_runs(runs, gradients, values.shape[1], how.scale, skip_nonfinite=how.skip_nonfinite)
    stepped = (runs.frames >= 0) & (summed > 0)
    if bool(stepped.any()):
        keys = None if runs.keys is None else runs.keys[stepped]
        _step_rows(values, state, runs.frames[stepped], sums[stepped], keys, how)
    return summed if how.skip_nonfinite else None


def _sum_runs(runs: Runs, gradients: Tensor, dim: int, scale: float, *, skip_nonfinite: bool) -> tuple[Tensor, Tensor]:
    """Return the sum of each run, float32 [runs, dim], and how many gradients it has."""
    lines = gradients.as_strided((max(0, len(gradients) - dim + 1), dim), (1, 1))
    lengths = runs.end - runs.begin
    sums = torch.zeros((len(lengths), dim), dtype=torch.float32, device=gradients.device)
    summed = torch.zeros_like(lengths)
    for k in range(int(lengths.max()) if len(lengths) else 0):
        active = (lengths > k).nonzero()[:, 0]
        entries = runs.begin[active] + k
        rows = lines[runs.places[entries]].float()
        if runs.factors is not None or scale != 1.0:
            rows = rows * _tensor(scale, rows)
        if runs.factors is not None:
            weight, divisor = runs.factors[entries].unbind(1)
            rows = rows * weight[:, None] / divisor[:, None]
        if skip_nonfinite:
            kept = rows.isfinite().all(1)
            active, rows = active[kept], rows[kept]
        first = (summed[active] == 0)[:, None]
        sums[active] = torch.where(first, rows, sums[active] + rows)
        summed[active] += 1
    if skip_nonfinite:
        summed[~sums.isfinite().all(1)] = 0
    return sums, summed


def _step_rows(
    values: Tensor, state: Tensor, frames: Tensor, sums: Tensor, keys: Tensor | None, how: RowUpdate
) -> None:
    """Apply one optimizer step to the rows of these frames, each of which occurs once."""
    stored = values[frames]
    of_rows = state[frames]
    new = _STEPS[type(how.optimizer)](stored.float(), of_rows, sums, how.optimizer, how.lr)
    if stored.dtype != torch.float32:
        assert keys is not None
        drawn = draw_elements(step_keys(keys, how.step), how.first, values.shape[1])
        new = round_stochastic(new, stored.dtype, drawn)
    state[frames] = of_rows  # after all that may run out of memory: the step of a call that fails is taken again
    values[frames] = new


def _sgd(p: Tensor, buffer: Tensor, gradient: Tensor, optimizer: SGD, lr: float) -> Tensor:
    momentum, decay = _float(optimizer.momentum), _float(optimizer.weight_decay)
    if momentum == 0.0:
        return fma(-_float(lr), gradient if decay == 0.0 else fma(decay, p, gradient), p)
    g = fma(decay, p, gradient)
    buffer.copy_(buffer * momentum + g)
    return fma(-_float(lr), fma(momentum, buffer, g) if optimizer.nesterov else buffer, p)


def _adagrad(p: Tensor, total: Tensor, gradient: Tensor, optimizer: Adagrad, lr: float) -> Tensor:
    g = fma(_float(optimizer.weight_decay), p, gradient)
    total.copy_(total + g * g)
    return fma(-_float(lr), g / (sqrt(total) + _float(optimizer.eps)), p)


def _row_wise_adagrad(p: Tensor, total: Tensor, gradient: Tensor, optimizer: RowWiseAdagrad, lr: float) -> Tensor:
    dim = p.shape[1]
    g = fma(_float(optimizer.weight_decay), p, gradient)
    lanes = torch.zeros((len(p), 16), dtype=torch.float32, device=p.device)
    for i in range(0, dim, 16):
        part = g[:, i : i + 16]
        width = part.shape[1]
        lanes[:, :width] = fma(part, part, lanes[:, :width])
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    total.copy_(total + lanes / _float(dim))
    factor = _tensor(lr, p) / (sqrt(total) + _float(optimizer.eps))
    return fma(-factor, g, p)


def _adam(p: Tensor, state: Tensor, gradient: Tensor, optimizer: Adam | AdamW, lr: float) -> Tensor:
    dim = p.shape[1]
    average, square, count = state[:, :dim], state[:, dim : 2 * dim], state[:, 2 * dim :]
    beta1, beta2 = optimizer.betas
    count += 1.0
    step_size = (lr / (1.0 - _powers(beta1, count))).float()
    correction = sqrt(1.0 - _powers(beta2, count)).float()
    weight = _float(1.0 - beta1)
    from_average = weight < 0.5
    decay = _float(optimizer.weight_decay)
    decoupled = isinstance(optimizer, AdamW)
    value = p * _tensor(1.0 - lr * decay if decoupled else 1.0, p)
    g = fma(0.0 if decoupled else decay, value, gradient)
    mean = fma(weight if from_average else _float(weight - 1.0), g - average, average if from_average else g)
    mean_square = fma(g * _tensor(1.0 - beta2, p), g, square * _tensor(beta2, p))
    average.copy_(mean)
    square.copy_(mean_square)
    return fma(-step_size, mean / (sqrt(mean_square) / correction + _float(optimizer.eps)), value)


def _ftrl(p: Tensor, state: Tensor, gradient: Tensor, optimizer: Ftrl, lr: float) -> Tensor:
    dim = p.shape[1]
    z, n = state[:, :dim], state[:, dim:]
    inverse_lr, l1 = _tensor(1.0 / lr, p), _float(optimizer.l1)
    new_n = fma(gradient, gradient, n)
    root = sqrt(new_n)
    sigma = (root - sqrt(n)) * inverse_lr
    new_z = fma(-sigma, p, z + gradient)
    magnitude = new_z.abs()
    shrunk = (magnitude - l1).copysign(new_z)
    value = -shrunk / ((_float(optimizer.beta) + root) * inverse_lr + _float(optimizer.l2))
    n.copy_(new_n)
    z.copy_(new_z)
    return torch.where(magnitude <= l1, 0.0, value)


def _powers(base: float, counts: Tensor) -> Tensor:
    """Return base ** count by squaring, in float64: `power` of the core."""
    left = counts.to(torch.int64)
    result = torch.ones_like(counts, dtype=torch.float64)
    for _ in range(int(left.max()).bit_length() if len(left) else 0):
        result = torch.where(left & 1 == 1, result * base, result)
        base *= base
        left = left >> 1
    return result


def _float(number: float) -> float:
    """Return the number rounded to float32."""
    return float(np.float32(number))


def _tensor(number: float, like: Tensor) -> Tensor:
    return torch.tensor(number, dtype=torch.float32, device=like.device)


_STEPS: dict[type, Callable[[Tensor, Tensor, Tensor, Any, float], Tensor]] = {
    SGD: _sgd,
    Adagrad: _adagrad,
    RowWiseAdagrad: _row_wise_adagrad,
    Adam: _adam,
    AdamW: _adam,
    Ftrl: _ftrl,
}
