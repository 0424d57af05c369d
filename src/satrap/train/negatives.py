"""Negatives of a softmax over many items: those of the batch, uniform draws of a table's ids, and draws by frequency.

A sampled softmax is unbiased if each logit is corrected by log q, the logarithm of the probability that its item was
drawn. `Counts` counts ids for that. `add` puts drawn ids into batches as a feature, so that a stream looks their rows
up and trains them as any other, on servers too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from satrap.config.array_args import as_ids
from satrap.config.validation import check_integer, known_arguments
from satrap.data.inputs import Inputs
from satrap.errors import InputError

_Ids = NDArray[np.uint64]


class Counts:
    """How often each id occurred, exactly: 16 bytes for each distinct id. `Checkpoint(extra_state=...)` saves it. With
    several trainers each counts its own batches, as a sample of all batches."""

    def __init__(self) -> None:
        self._ids, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)

    def add(self, ids: ArrayLike) -> None:
        """Count the ids of a batch; may repeat."""
        new, counts = np.unique(as_ids("Counts", ids), return_counts=True)
        ids_before, at = self._ids, np.searchsorted(self._ids, new)
        known = at < len(ids_before)
        known[known] = ids_before[at[known]] == new[known]
        self._counts[at[known]] += counts[known]
        self._ids = np.insert(ids_before, at[~known], new[~known])
        self._counts = np.insert(self._counts, at[~known], counts[~known])

    def log_q(self, ids: ArrayLike) -> Tensor:
        """Return the logarithm of each id's share of all that were counted, float32 [n]; InputError for a new id."""
        given = as_ids("Counts", ids)
        at = np.minimum(np.searchsorted(self._ids, given), max(0, len(self._ids) - 1))
        unknown = np.ones(len(given), np.bool_) if not len(self._ids) else self._ids[at] != given
        if unknown.any():
            raise InputError(f"Counts: id {given[unknown][0]} was never counted: add the batch's ids before log_q")
        return torch.from_numpy(np.log(self._counts[at] / self._counts.sum()).astype(np.float32))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the counts, for a checkpoint."""
        arrays = {"ids": self._ids.view(np.int64), "counts": self._counts}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}  # `add` counts in place

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the counts from a `state_dict`."""
        self._ids, self._counts = state["ids"].numpy().view(np.uint64).copy(), state["counts"].numpy().copy()

    def by_frequency(self, power: float = 0.75) -> "Draws":
        """Return draws of ids whose probability is proportional to their count so far, raised to this power."""
        if isinstance(power, bool) or not isinstance(power, Real):
            raise InputError(f"Counts: power is {power!r}; expected a number, such as 0.75")
        with np.errstate(over="ignore", under="ignore"):
            weights = self._counts.astype(np.float64) ** float(power)
        if not (np.isfinite(weights.sum()) and (weights > 0).all()):
            raise InputError(
                f"Counts: power is {power}, which float64 cannot raise counts of up to {self._counts.max()} to; "
                "expected a number such as 0.75"
            )
        return Draws(self._ids, weights)


class Listed(Protocol):
    """A table that lists its ids."""

    def ids(self) -> _Ids: ...


class Draws:
    """Draws ids with replacement. Each draw is a function of the seed and its number."""

    def __init__(self, ids: _Ids, weights: NDArray[np.float64] | None = None) -> None:
        """weights: the probability of each id, up to a common factor; None: all ids are equally probable."""
        if not len(ids):
            raise InputError("there are no ids to draw from: train or write rows first, or count some ids")
        self._ids, self._ends = ids, None if weights is None else np.cumsum(weights)
        self._weights = weights

    @classmethod
    def uniform(cls, table: Listed) -> "Draws":
        """Return uniform draws from the ids that have a row now; create others when the table has grown."""
        return cls(np.sort(table.ids()))

    def draw(self, size: int, *, seed: int, number: int) -> tuple[_Ids, Tensor]:
        """Return ids, and log q of each as float32."""
        seed, number = (
            check_integer("draw", name, value, 0, 2**64 - 1, InputError)
            for name, value in (("seed", seed), ("number", number))
        )
        random = np.random.default_rng((seed, number))
        if self._ends is None or self._weights is None:
            at = random.integers(0, len(self._ids), size)
            return self._ids[at], torch.full((size,), -float(np.log(len(self._ids))), dtype=torch.float32)
        at = np.searchsorted(self._ends, random.random(size) * self._ends[-1], side="right").clip(
            max=len(self._ids) - 1
        )
        return self._ids[at], torch.from_numpy(np.log(self._weights[at] / self._ends[-1]).astype(np.float32))


@known_arguments()
def add(
    batches: Iterable[Inputs],
    feature: str,
    draws: Draws | Callable[[], Draws],
    *,
    size: int,
    seed: int = 0,
    shared: bool = False,
) -> Iterator[Inputs]:
    """Yield the batches of a source (`data.batches(names)`) with a further feature of `size` drawn ids for each sample,
    for `IterableSource`. A run that resumes draws the same again if the ids are the same.

    draws: or a function that returns them, called before each batch. seed: another one for each trainer.
    shared: draw `size` ids for the whole batch. The feature is a jagged sequence, in which the first sample has all of
        them; its values are [size, dim]."""
    size = check_integer("negatives.add", "size", size, 1, 2**16, InputError)
    for number, batch in enumerate(batches):
        if feature in batch.names:
            raise InputError(f"a batch has the feature {feature!r} already; name the negatives differently")
        num_drawn = np.minimum(1, np.arange(1, batch.batch_size + 1)) if shared else np.arange(1, batch.batch_size + 1)
        num_ids = size * int(num_drawn[-1]) if len(num_drawn) else 0
        ids, _ = (draws() if callable(draws) else draws).draw(num_ids, seed=seed, number=number)
        before = batch.offsets
        if before is None:
            before = np.arange(len(batch.values) + 1)
        offsets = np.concatenate([before, before[-1] + size * num_drawn])
        weights: Any = batch.weights
        if weights is not None:
            weights = np.concatenate([weights, np.ones(len(ids), np.float32)])
        yield replace(
            batch,
            names=(*batch.names, feature),
            values=np.concatenate([batch.values, ids]),
            offsets=offsets,
            weights=weights,
            position=None,
        )


@known_arguments()
def in_batch(queries: Tensor, items: Tensor, ids: ArrayLike, log_q: Tensor | None = None) -> Tensor:
    """Return logits [n, n] of a softmax over the items of a batch, for `cross_entropy(logits, torch.arange(n))`: each
    query's own item is the target and the others are its negatives, except those with the target's id.

    queries, items: [n, dim]. ids: of the items. log_q: of the ids, such as `Counts.log_q`; subtracted from the logits.
    """
    item_ids = torch.from_numpy(as_ids("in_batch", ids).view(np.int64)).to(queries.device)
    n = len(item_ids)
    if queries.shape != items.shape or len(queries) != n or (log_q is not None and log_q.shape != (n,)):
        shapes = [tuple(queries.shape), tuple(items.shape), n, None if log_q is None else tuple(log_q.shape)]
        raise InputError(f"in_batch: queries, items, ids, log_q are of {shapes}; expected [n, dim] twice, then n twice")
    logits = queries @ items.T
    if log_q is not None:
        logits = logits - log_q.to(logits)
    same = item_ids[:, None] == item_ids[None, :]
    return logits.masked_fill(same & ~torch.eye(n, dtype=torch.bool, device=same.device), -torch.inf)
