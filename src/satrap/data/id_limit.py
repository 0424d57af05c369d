"""Bounds the number of a feature's ids in a batch, so that batches of samples of uneven lengths take equal work.

With one limit in every trainer, the trainers' batches have about the same number of ids in each step, without reading
each other's data. What is counted is what a lookup reads: without padding, and no more than the feature's `max_length`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from satrap.config.columns import Columns
from satrap.config.validation import check_integer, describe, suggest
from satrap.data.block import Chunk
from satrap.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class IdLimit:
    """The most ids of one feature in a batch."""

    most: int
    feature: int
    """The number of the feature in the batch."""
    padding_id: int | None
    max_length: int | None

    @classmethod
    def resolve(cls, where: str, max_ids: tuple[str, int], columns: Columns) -> Self:
        """Return the limit that a source declares, for the features of a model."""
        name, most = max_ids
        if name not in columns.features:
            raise ConfigError(
                f"{where}: max_ids names {name!r}, which is no feature; {suggest(name, list(columns.features))}"
            )
        declared = None if columns.declared is None else columns.declared[name]
        return cls(
            most=most,
            feature=columns.features.index(name),
            padding_id=None if declared is None else declared.padding_id,
            max_length=None if declared is None else declared.max_length,
        )

    def count(self, chunks: Iterable[Chunk]) -> NDArray[np.int64]:
        """Return how many ids the samples of the chunks have."""
        counts = [
            chunk.decoded().count_ids(self.feature, self.padding_id)[chunk.begin : chunk.stop] for chunk in chunks
        ]
        return np.minimum(
            np.concatenate(counts), np.iinfo(np.int64).max if self.max_length is None else self.max_length
        )

    def num_fitting(self, pending: Iterable[NDArray[np.int64]], batch_size: int) -> int | None:
        """Return how many of the pending samples make the next batch; None if more samples might join it.

        pending: how many ids each sample has, in several arrays. A sample that exceeds the limit is a batch alone."""
        num_samples = num_ids = 0
        for counts in pending:
            sums = num_ids + np.cumsum(counts[: batch_size - num_samples])
            fitting = int(np.searchsorted(sums, self.most, side="right"))
            num_samples += fitting
            if fitting < len(sums):
                return max(1, num_samples)
            if num_samples == batch_size:
                return batch_size
            num_ids = int(sums[-1])
        return None


def check_max_ids(where: str, max_ids: Any, batch_size: int | None) -> tuple[str, int] | None:
    """Return the declared limit; raise if it is not the name of a feature and a number."""
    if max_ids is None:
        return None
    if not isinstance(max_ids, Sequence) or len(max_ids) != 2 or not isinstance(max_ids[0], str):
        raise ConfigError(
            f"{where}: max_ids is {describe(max_ids)}; expected a feature and a number, e.g. ('history', 10_000)"
        )
    if batch_size is None:
        raise ConfigError(
            f"{where}: max_ids is {describe(max_ids)} and batch_size is None, so each item is a batch; set batch_size "
            "to the most samples in a batch"
        )
    return max_ids[0], check_integer(where, "max_ids[1]", max_ids[1], 1, 2**62)
