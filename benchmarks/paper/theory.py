"""The theory on a problem whose constants are known: logistic regression with k ids and d dense numbers in a sample.

f(w) is the mean of log(1 + exp(-b a.w)) over N samples, where `a` has a one for each id of the sample, and its dense
numbers. A step of hybrid training reads the rows without the last tau updates and the dense weights with all of them;
asynchronous training reads both without the last tau. docs/theory.md derives the bound of `bound`. NumPy in float64; a
test compares `errors` with Satrap's tables at the same staleness.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.cell import Cell, Done, Figures

Floats = NDArray[np.float64]
TAUS = (0, 1, 4, 16, 64, 256)
FIXED_TAUS = (0, 2, 4, 8, 16, 32, 64)
PROBLEMS = ((8, 0.0), (64, 0.0), (512, 0.0), (512, 1.1))
"""Number of ids and Zipf's exponent of each problem."""
IDS_PER_SAMPLE, NUM_DENSE, NUM_SAMPLES = 4, 4, 1500
EVERY = 20
"""Steps from one measurement of the gradient to the next."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The samples and the constants of the bound."""

    inputs: Floats
    """[samples, ids + dense]."""
    signs: Floats
    """The labels, -1 or 1."""
    num_ids: int
    alpha: float
    """The largest share of samples that one id is in."""
    smoothness: float
    """L: the Lipschitz constant of the gradient of f."""
    sample_smoothness: float
    """Ls: that of one sample's gradient."""
    variance: float
    """A bound on the variance of one sample's gradient."""
    distance: float
    """D: f(0) minus the infimum of f."""


def loss(problem: Problem, weights: Floats) -> float:
    """Return f."""
    return float(np.logaddexp(0, -problem.signs * (problem.inputs @ weights)).mean())


def gradient(inputs: Floats, signs: Floats, weights: Floats) -> Floats:
    """Return the mean gradient of some samples."""
    margins = signs * (inputs @ weights)
    result: Floats = -(inputs.T @ (signs * _sigmoid(-margins))) / len(signs)
    return result


def _sigmoid(values: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(values / 2))


@cache
def draw(num_ids: int, zipf: float, num_samples: int = NUM_SAMPLES) -> Problem:
    """Draw a problem: the labels are those of a random true model."""
    random = np.random.default_rng(1)
    shares = np.arange(1.0, num_ids + 1) ** -zipf
    shares /= shares.sum()
    ids = np.stack([random.choice(num_ids, IDS_PER_SAMPLE, replace=False, p=shares) for _ in range(num_samples)])
    dense = random.normal(size=(num_samples, NUM_DENSE)) + 2
    dense /= np.linalg.norm(dense, axis=1, keepdims=True)
    logits = random.normal(size=num_ids)[ids].sum(1) + dense @ (2 * random.normal(size=NUM_DENSE))
    # Half of the labels are 1: with few of one kind the loss is flat, and no delay does any harm.
    signs = np.where(random.random(num_samples) < _sigmoid(logits - logits.mean()), 1.0, -1.0)
    inputs = np.zeros((num_samples, num_ids + NUM_DENSE))
    inputs[np.arange(num_samples)[:, None], ids] = 1
    inputs[:, num_ids:] = dense
    squares = (inputs**2).sum(1)
    problem = Problem(
        inputs, signs, num_ids, alpha=float(inputs[:, :num_ids].mean(0).max()),
        smoothness=float(np.linalg.eigvalsh(inputs.T @ inputs / num_samples)[-1] / 4),
        sample_smoothness=float(squares.max() / 4), variance=float(squares.mean()), distance=0.0,
    )  # fmt: skip
    distance = loss(problem, np.zeros(num_ids + NUM_DENSE)) - _infimum(problem)
    return replace(problem, distance=distance)


def _infimum(problem: Problem) -> float:
    """Return a lower bound of f: Newton's method, less what its last step could still gain."""
    weights, decrement = np.zeros(problem.inputs.shape[1]), 0.0
    for _ in range(60):
        share = _sigmoid(-problem.signs * (problem.inputs @ weights))
        slope = gradient(problem.inputs, problem.signs, weights)
        curvature = (problem.inputs.T * (share * (1 - share))) @ problem.inputs / len(share)
        step = np.linalg.solve(curvature + 1e-6 * np.eye(len(weights)), slope)
        weights -= step / max(1.0, np.abs(step).max())
        decrement = 0.5 * float(slope @ step)
    return loss(problem, weights) - decrement


def rate(problem: Problem, tau: int, alpha: float, num_steps: int, batch: int) -> float:
    """Return the largest rate that satisfies the bound's condition, but no more than suits the noise."""
    smooth, square = problem.smoothness, 2 * alpha * problem.sample_smoothness**2 * tau**2
    largest = 1 / smooth if square == 0 else (np.sqrt(smooth**2 + 4 * square) - smooth) / (2 * square)
    quiet = np.sqrt(2 * problem.distance / (num_steps * smooth * problem.variance / batch))
    return float(min(largest, quiet))


def bound(problem: Problem, gamma: float, tau: int, alpha: float, num_steps: int, batch: int) -> float:
    """Return the bound on the mean of |grad f|^2 over the steps, for a rate that satisfies the condition."""
    noise = problem.variance / batch
    stale = 2 * alpha * problem.sample_smoothness**2 * gamma**2 * tau * noise
    return 2 * problem.distance / (gamma * num_steps) + gamma * problem.smoothness * noise + stale


def errors(
    problem: Problem, gamma: float, tau: int, *, late_dense: bool, num_steps: int, batch: int, seed: int
) -> tuple[float, Floats]:
    """Train; return the mean of |grad f|^2 over the steps and the last weights. late_dense: asynchronous."""
    random, num_ids = np.random.default_rng(seed), problem.num_ids
    weights = np.zeros(problem.inputs.shape[1])
    visible, pending = weights.copy(), deque[Floats]()
    squares = []
    for step in range(num_steps):
        if step % EVERY == 0:
            squares.append(float((gradient(problem.inputs, problem.signs, weights) ** 2).sum()))
        if len(pending) > tau:
            visible = visible - pending.popleft()
        seen = visible if late_dense else np.concatenate([visible[:num_ids], weights[num_ids:]])
        picked = random.integers(0, len(problem.signs), batch)
        change = gamma * gradient(problem.inputs[picked], problem.signs[picked], seen)
        weights = weights - change
        pending.append(change)
    return float(np.mean(squares)), weights


def cells(*, full: bool) -> list[Cell]:
    """Return a cell for each curve: of the bound, and of a fixed rate."""
    curves = []
    for num_ids, zipf in PROBLEMS:
        for mode in ("hybrid", "async"):
            name = f"theory/bound/ids={num_ids},zipf={zipf:g}/{mode}"
            curves.append(Cell(name, 5, "measured", partial(_bound_curve, num_ids, zipf, mode, full)))
    for num_ids, zipf in PROBLEMS[:3]:
        name = f"theory/fixed/ids={num_ids},zipf={zipf:g}"
        curves.append(Cell(name, 3, "measured", partial(_fixed_curves, num_ids, zipf, full)))
    return curves


def _bound_curve(num_ids: int, zipf: float, mode: str, full: bool, done: Done) -> Figures:
    problem, num_steps, batch = draw(num_ids, zipf), 3000, 4
    alpha, is_late = (1.0, True) if mode == "async" else (problem.alpha, False)
    measured, bounds = [], []
    for tau in TAUS:
        gamma = rate(problem, tau, alpha, num_steps, batch)
        seeds = [
            errors(problem, gamma, tau, late_dense=is_late, num_steps=num_steps, batch=batch, seed=seed)[0]
            for seed in range(30 if full else 10)
        ]
        measured.append(float(np.mean(seeds)))
        bounds.append(bound(problem, gamma, tau, alpha, num_steps, batch))
    return {"alpha": problem.alpha, "taus": TAUS, "errors": measured, "bounds": bounds}


def _fixed_curves(num_ids: int, zipf: float, full: bool, done: Done) -> Figures:
    problem, figures = draw(num_ids, zipf), Figures(taus=FIXED_TAUS)
    for mode in ("hybrid", "async"):
        curve = [
            np.mean([
                errors(
                    problem, 1 / problem.smoothness, tau, late_dense=mode == "async", num_steps=1200, batch=128, seed=s
                )[0]
                for s in range(20 if full else 5)
            ])
            for tau in FIXED_TAUS
        ]  # fmt: skip
        figures[mode] = [float(value / curve[0]) for value in curve]
    return {"alpha": problem.alpha, **figures}
