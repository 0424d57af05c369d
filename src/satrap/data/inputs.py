"""A batch as a loader read it: ids of all features, dense numbers, labels, and the loader's position after it.

These classes are plain data. A source creates a batch; `worker` checks it against the features and looks up its ids. It
depends on no particular model, and holds no embeddings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from satrap.config.validation import Serializable, check_integer, set_field

_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True, order=True)
class Position(Serializable):
    """How far a loader has read. A loader that starts at a batch's position continues with the next batch."""

    epoch: int
    """How many times all data was read before."""
    block: int
    """The block at which reading continues, in the order of the epoch."""
    batch: int
    """How many batches of the epoch were returned."""
    sample: int = 0
    """How many samples were returned from the start of that block on. Batches and blocks do not end together, so
    `batch` alone would not say where in the block to continue."""
    end: int = 0
    """The block after the last one that was started; 0 before the first, and in positions of older releases."""
    rows: int = 0
    """How many rows of the epoch precede that block, where ranks share the chunks of blocks."""
    before: tuple[tuple["Position", ...], ...] = ()
    """Where runs with other numbers of trainers stopped in this epoch: the positions of all trainers of each, oldest
    first."""
    offset: Any = field(default=None, compare=False)
    """The data's own offset from which to continue, if it has offsets: plain JSON types."""

    def __post_init__(self) -> None:
        for name in ("epoch", "block", "batch", "sample", "end", "rows"):
            set_field(self, name, check_integer("Position", name, getattr(self, name), 0, _MAX_COUNT))

    def to_dict(self) -> dict[str, Any]:
        """Return this position as plain JSON types, without fields of later releases that say nothing."""
        form = super(Position, self).to_dict()
        for name, nothing in (("end", 0), ("rows", 0), ("before", []), ("offset", None)):
            if form[name] == nothing:
                del form[name]
        return form

    @property
    def is_of_older_release(self) -> bool:
        """Whether an older release saved it, which split blocks over trainers in another way and left samples out."""
        return self.sample > 0 and self.end == 0

    @classmethod
    def after(cls, positions: Sequence["Position"]) -> Self:
        """Return the position at which another number of trainers continues after trainers at these positions."""
        epoch = min(each.epoch for each in positions)
        before = next(each.before for each in positions if each.epoch == epoch)
        return cls(epoch, 0, 0, before=(*before, tuple(replace(each, before=()) for each in positions)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """One batch. A bag is the ids of one feature in one sample. The features are in the order of `Features`."""

    names: tuple[str, ...]
    """The names of the features."""
    values: NDArray[np.uint64]
    """The ids: feature after feature, and sample after sample within each feature."""
    offsets: NDArray[np.int64] | None = None
    """[features * batch_size + 1]: the bag of feature f in sample s is values[offsets[i] : offsets[i + 1]], where
    i = f * batch_size + s. None: every bag holds exactly one id."""
    weights: NDArray[np.float32] | None = None
    """A weight for each of `values`. The weights of features that are not weighted have no meaning."""
    batch_size: int
    """The number of samples."""
    dense: NDArray[np.float32] | None = None
    """[batch_size, num_dense], C-contiguous."""
    label: NDArray[np.float32] | None = None
    """[batch_size] or [batch_size, num_labels]."""
    position: Position | None = None
    """The loader's position after this batch, from which to resume. None: the loader cannot be resumed."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns that the source declares."""
