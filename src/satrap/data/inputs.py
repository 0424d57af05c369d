"""One batch as a loader read it: ids of all features, dense numbers, labels, and where the loader stands after it.

Plain data and nothing else. A source makes it, `worker` checks it against its features and looks it up. It fits no
model in particular, and holds no row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from satrap.config.validation import check_integer, known_keys, set_field

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
    end: int = 0
    """The block behind the last one that was begun; 0 before the first, and in positions of older releases."""
    rows: int = 0
    """How many rows of the epoch lie before that block, where ranks share its pieces."""
    before: tuple[tuple["Position", ...], ...] = ()
    """Where earlier numbers of trainers stopped in this epoch: the positions of all of them, oldest first."""
    offset: Any = field(default=None, compare=False)
    """What the data itself gave to go on from, where it does: plain JSON types."""

    def __post_init__(self) -> None:
        for name in ("epoch", "block", "batch", "sample", "end", "rows"):
            set_field(self, name, check_integer("Position", name, getattr(self, name), 0, _MAX_COUNT))

    def to_dict(self) -> dict[str, Any]:
        """This position as plain JSON types."""
        told: dict[str, Any] = {"epoch": self.epoch, "block": self.block, "batch": self.batch, "sample": self.sample}
        told |= {name: value for name in ("end", "rows") if (value := getattr(self, name))}
        if self.before:
            told["before"] = [[each.to_dict() for each in positions] for positions in self.before]
        return told if self.offset is None else told | {"offset": self.offset}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The position that `to_dict` wrote."""
        given = known_keys(cls, "Position", data)
        before = tuple(tuple(cls.from_dict(each) for each in positions) for positions in given.get("before", ()))
        return cls(**given | {"before": before})

    @property
    def is_of_older_release(self) -> bool:
        """Whether it counts blocks as they were dealt out to several trainers before every sample was trained on."""
        return self.sample > 0 and self.end == 0

    @classmethod
    def after(cls, positions: Sequence["Position"]) -> Self:
        """Where another number of trainers goes on behind trainers at these positions."""
        epoch = min(each.epoch for each in positions)
        before = next(each.before for each in positions if each.epoch == epoch)
        return cls(epoch, 0, 0, before=(*before, tuple(replace(each, before=()) for each in positions)))


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
