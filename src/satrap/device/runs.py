"""What the kernels of a device take: the runs of an update, and the features of a lookup."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from satrap.config.features import Features
from satrap.device.host_copy import to_device

POOLINGS = ("sum", "mean", "sqrtn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A run takes the gradients at places[begin : end], in this order, to the row in its frame."""

    frames: Tensor
    """int32 [runs]; -1: there is no row, or nothing for it."""
    begin: Tensor
    """int32 [runs]: positions in `places`."""
    end: Tensor
    """int32 [runs]."""
    places: Tensor
    """int32 [gradients]: where each gradient begins among the floats of all gradients."""
    factors: Tensor | None
    """float32 [gradients, 2]: the weight and the divisor of each gradient; None: all are 1."""
    keys: Tensor | None
    """int64 [runs]: keys of the random draws of each row; None: no table has 16-bit values."""
    tables: tuple[int, ...]
    """Where the runs of each table begin, and where the last end."""
    ids: NDArray[np.uint64] | None = None
    """[runs], in this process: the id of each run, if gradients may have to be skipped."""
    alignment: int = 1
    """4 if every place is a multiple of 4, so that kernels may load four floats at a time; else 1."""

    @classmethod
    def to_device(cls, arrays: dict[str, Any], device: torch.device) -> Self:
        """Copy what the core returned to the device."""
        names = ("frames", "begin", "end", "places", "factors", "keys")
        tensors: Any = {name: None if arrays[name] is None else to_device(arrays[name], device) for name in names}
        is_aligned = not np.bitwise_or.reduce(arrays["places"]) & 3
        return cls(
            tables=tuple(arrays["tables"].tolist()), ids=arrays["ids"], alignment=4 if is_aligned else 1, **tensors
        )

    def of_tables(self, tables: range) -> Self:
        """Return the runs of some tables."""
        part = slice(self.tables[tables.start], self.tables[tables.stop])
        return replace(
            self,
            frames=self.frames[part],
            begin=self.begin[part],
            end=self.end[part],
            keys=None if self.keys is None else self.keys[part],
            ids=None if self.ids is None else self.ids[part],
        )

    def take(self, runs: NDArray[np.int64]) -> Self:
        """Return some runs, for rows in the frames 0, 1, ..."""
        at = to_device(runs, self.frames.device)
        return replace(
            self,
            frames=torch.arange(len(runs), dtype=torch.int32, device=self.frames.device),
            begin=self.begin[at],
            end=self.end[at],
            keys=None if self.keys is None else self.keys[at],
            ids=None if self.ids is None else self.ids[runs],
        )


@dataclass(frozen=True, slots=True)
class PooledFeatures:
    """The pooled features of one memory, as tensors of int32 on the device."""

    numbers: Tensor
    """Their places in `Features`."""
    columns: Tensor
    """Where their columns begin in a block."""
    poolings: Tensor
    """The index in POOLINGS."""
    weighted: Tensor
    """Whether ids have weights."""
    alignment: int = 1
    """4 if every column is a multiple of 4, so that kernels may store four floats at a time; else 1."""

    @classmethod
    def of(cls, features: Features, tables: Sequence[int], device: torch.device) -> Self:
        """Return the pooled features of some tables."""
        lines = [
            (number, features.columns[number], POOLINGS.index(feature.pooling), feature.weighted)
            for number, feature in enumerate(features.values())
            if feature.pooling != "none" and features.table_index[number] in tables
        ]
        alignment = 1 if any(column % 4 for _, column, *_ in lines) else 4
        numbers, columns, poolings, weighted = (
            torch.tensor(lines, dtype=torch.int32).view(-1, 4).T.contiguous().to(device)
        )
        return cls(numbers, columns, poolings, weighted, alignment)

    def lines(self) -> Iterator[tuple[int, int, str, bool]]:
        """Yield number, column, pooling and whether it is weighted of each."""
        for number, column, pooling, weighted in zip(
            *(each.tolist() for each in (self.numbers, self.columns, self.poolings, self.weighted)), strict=True
        ):
            yield number, column, POOLINGS[pooling], bool(weighted)
