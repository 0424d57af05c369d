"""How often the ids of a batch occurred in the batches before it: those lookups miss an update if rows are stale.

Pure: batches in, shares out. docs/theory.md says what the shares mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from satrap.data.inputs import Inputs

LAGS = (1, 4, 16)
"""The stalenesses for which reuse is counted."""
_HOT = 0.01  # share of the samples from which an id is hot


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """The repetition of one feature's ids."""

    feature: str
    num_ids: int
    """Distinct ids."""
    alpha: float
    """Share of the samples that the most frequent id is in."""
    shares: tuple[float, ...]
    """For each of `LAGS`, the share of a batch's distinct ids that occurred in so many batches before it."""
    hot: tuple[float, ...]
    """`shares` of the ids that are in at least 1 % of the samples; NaN if there are no such ids."""
    cold: tuple[float, ...]
    """`shares` of all other ids."""


def measure_reuse(batches: Iterable[Inputs]) -> list[Reuse]:
    """Return the reuse of each feature. The first 16 batches only serve as those before the others."""
    names: tuple[str, ...] = ()
    seen: list[list[tuple[NDArray[np.uint64], NDArray[np.int64]]]] = []
    num_samples = 0
    for batch in batches:
        names, size = batch.names, batch.batch_size
        seen = seen or [[] for _ in names]
        num_samples += size
        for feature, parts in enumerate(seen):
            ids, offsets = batch.bags(names[feature])
            if batch.offsets is None:
                parts.append(np.unique(ids, return_counts=True))
            else:
                bags = np.repeat(np.arange(size), np.diff(offsets))
                order = np.lexsort((bags, ids))
                ids, bags = ids[order], bags[order]  # an id counts once in a bag
                is_first = np.append(True, (ids[1:] != ids[:-1]) | (bags[1:] != bags[:-1]))[: len(ids)]
                parts.append(np.unique(ids[is_first], return_counts=True))
    return [_reuse(name, parts, num_samples) for name, parts in zip(names, seen, strict=True)]


def _reuse(name: str, parts: list[tuple[NDArray[np.uint64], NDArray[np.int64]]], num_samples: int) -> Reuse:
    ids = np.concatenate([ids for ids, _ in parts])
    counts = np.concatenate([counts for _, counts in parts])
    numbers = np.repeat(np.arange(len(parts)), [len(ids) for ids, _ in parts])
    values, codes = np.unique(ids, return_inverse=True)
    totals = np.bincount(codes, counts, minlength=len(values))
    order = np.lexsort((numbers, codes))
    codes, numbers = codes[order], numbers[order]
    gaps = np.full(len(codes), np.iinfo(np.int64).max)
    repeats = np.flatnonzero(codes[1:] == codes[:-1]) + 1
    gaps[repeats] = numbers[repeats] - numbers[repeats - 1]
    gaps, codes = gaps[numbers >= LAGS[-1]], codes[numbers >= LAGS[-1]]
    is_hot = totals[codes] >= _HOT * num_samples

    def shares(chosen: NDArray[np.int64]) -> tuple[float, ...]:
        return tuple(float((chosen <= lag).mean()) if len(chosen) else float("nan") for lag in LAGS)

    alpha = float(totals.max() / num_samples) if len(totals) else 0.0
    return Reuse(
        feature=name, num_ids=len(values), alpha=alpha, shares=shares(gaps), hot=shares(gaps[is_hot]),
        cold=shares(gaps[~is_hot]),
    )  # fmt: skip
