"""One batch as a loader read it: ids of all features, dense numbers, labels, and where the loader stands after it.

Plain data and nothing else. A source makes it, `worker` checks it against its features and looks it up. It fits no
model in particular, and holds no row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from satrap.checks import check_integer, known_keys, set_field

_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a loader stands: it has given every batch before this one."""

    epoch: int
    """How often the data was read whole before."""
    block: int
    """Reading goes on at this block, in the order of the epoch."""
    batch: int
    """How many batches of the epoch were given before."""
    sample: int = 0
    """How many samples were given since that block began. Batches and blocks do not end together, so `batch` alone
    would not say where in the block to go on."""

    def __post_init__(self) -> None:
        for name in ("epoch", "block", "batch", "sample"):
            set_field(self, name, check_integer("Position", name, getattr(self, name), 0, _MAX_COUNT))

    def to_dict(self) -> dict[str, int]:
        """This position as plain JSON types."""
        return {"epoch": self.epoch, "block": self.block, "batch": self.batch, "sample": self.sample}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The position that `to_dict` wrote."""
        return cls(**known_keys(cls, "Position", data))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """One batch. A bag is the ids of one feature in one sample; features stand in the order of `Features`."""

    names: tuple[str, ...]
    """The features."""
    values: NDArray[np.uint64]
    """Ids: feature after feature, of each sample after sample."""
    offsets: NDArray[np.int64] | None = None
    """[features * batch_size + 1]: the bag of feature f in sample s is values[offsets[i] : offsets[i + 1]], where
    i = f * batch_size + s. None: every bag holds exactly one id."""
    weights: NDArray[np.float32] | None = None
    """Like `values`. Those of features that are not weighted mean nothing."""
    batch_size: int
    """Samples."""
    dense: NDArray[np.float32] | None = None
    """[batch_size, num_dense], C-contiguous."""
    label: NDArray[np.float32] | None = None
    """[batch_size] or [batch_size, num_labels]."""
    position: Position | None = None
    """Where the loader stands after this batch: go on here. None: it cannot be resumed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns that the user asked for."""
