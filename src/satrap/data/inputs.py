"""A batch as a loader read it: ids of all features, dense numbers, labels, and the loader's position after it.

These classes are plain data. A source creates a batch; `worker` checks it against the features and looks up its ids. It
depends on no particular model, and holds no embeddings.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from satrap.config.array_args import as_ids, as_offsets, as_weights
from satrap.config.tables import Feature
from satrap.config.validation import Serializable, check_integer, kind_of, set_field, suggest
from satrap.errors import InputError
from satrap.hidden_names import internal

_MAX_COUNT = 2**63 - 1


@internal("after")
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
    """The block after the last one that was started; 0 before the first."""
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
        """Return this position as plain JSON types, without fields that have their default."""
        form = super(Position, self).to_dict()
        for name, nothing in (("end", 0), ("rows", 0), ("before", []), ("offset", None)):
            if form[name] == nothing:
                del form[name]
        return form

    @classmethod
    def after(cls, positions: Sequence["Position"]) -> Self:
        """Return the position at which another number of trainers continues after trainers at these positions."""
        epoch = min(position.epoch for position in positions)
        before = next(position.before for position in positions if position.epoch == epoch)
        return cls(epoch, 0, 0, before=(*before, tuple(replace(position, before=()) for position in positions)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
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
    """Further columns that the source declares; and as FEATURE[COLUMN] the numbers beside those ids of a sequence that
    are looked up, a list for each sample."""

    def bags(self, name: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the ids of one feature and their offsets: sample s has ids[offsets[s] : offsets[s + 1]]."""
        first = self.names.index(name) * self.batch_size
        if self.offsets is None:
            return self.values[first : first + self.batch_size], np.arange(self.batch_size + 1)
        offsets = self.offsets[first : first + self.batch_size + 1]
        return self.values[offsets[0] : offsets[-1]], offsets - offsets[0]

    def __repr__(self) -> str:
        parts = [f"{self.batch_size} samples", f"{len(self.values)} ids of {list(self.names)}"]
        parts += [
            f"{name} {list(array.shape)}"
            for name, array in (("dense", self.dense), ("label", self.label))
            if array is not None
        ]
        parts += [f"extra {list(self.extra)}"] if self.extra else []
        return f"Inputs({', '.join(parts)})"


def as_inputs(features: Mapping[str, Feature], ids: object) -> Inputs:
    """Return a batch of ids by feature: for each an array with one id per sample, or (ids, offsets), where sample s has
    ids[offsets[s] : offsets[s + 1]], or (ids, offsets, weights), with a weight for each id. `Inputs` are returned
    unchanged."""
    if isinstance(ids, Inputs):
        return ids
    if not isinstance(ids, Mapping):
        raise InputError(f"a batch is {kind_of(ids)}; expected Inputs, or a mapping from features to ids")
    names = tuple(features)
    for name in ids:
        if name not in names:
            raise InputError(f"a batch has ids of {name!r}, which is no feature; {suggest(name, list(names))}")
    if missing := [name for name in names if name not in ids]:
        raise InputError(f"a batch has no ids of {missing}; expected ids of each feature: {list(names)}")
    values, lengths, weights = [], [], []
    for name in names:
        given = ids[name] if isinstance(ids[name], tuple) else (ids[name], None)
        if len(given) not in (2, 3):
            raise InputError(
                f"a batch has {len(given)} values for {name!r}; expected ids, (ids, offsets) or (ids, offsets, weights)"
            )
        values.append(_feature_ids(name, given[0]))
        lengths.append(_bag_lengths(f"feature {name!r}", given[1], len(values[-1])))
        weights.append(_id_weights(name, features[name], given[2:], len(values[-1])))
    batch_size = len(lengths[0])
    for name, length in zip(names, lengths, strict=True):
        if len(length) != batch_size:
            raise InputError(
                f"a batch has {batch_size} samples of {names[0]!r} and {len(length)} of {name!r}; expected one number"
            )
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    is_weighted = any(feature.weighted for feature in features.values())
    return Inputs(
        names=names,
        values=np.concatenate(values),
        offsets=offsets,
        weights=np.concatenate(weights) if is_weighted else None,
        batch_size=batch_size,
    )


def _feature_ids(name: str, ids: object) -> NDArray[np.uint64]:
    """Return the ids of one feature, flat."""
    try:
        return as_ids(f"feature {name!r}", ids)
    except InputError:
        if not _is_nested(ids):
            raise
    raise InputError(
        f"feature {name!r}: found several ids for one sample in {kind_of(ids)}; expected an array with one id per "
        "sample, or for bags (ids, offsets): all ids in one array, where sample s has ids[offsets[s] : offsets[s + 1]]"
    )


def _is_nested(ids: object) -> bool:
    """Return whether the elements of an array or list are arrays or lists, too."""
    if (num_dims := getattr(ids, "ndim", 1)) != 1 or not (isinstance(ids, Iterable) and isinstance(ids, Sized)):
        return bool(num_dims > 1)
    first = next(iter(ids), None)
    return isinstance(first, Sized) and not isinstance(first, str | bytes) and getattr(first, "ndim", 1) > 0


def _id_weights(name: str, feature: Feature, given: tuple[object, ...], num_ids: int) -> NDArray[np.float32]:
    """Return the weight of each id of a feature; ones, which have no meaning, if it has none."""
    if not given:
        if feature.weighted:
            raise InputError(f"feature {name!r} is weighted and there are no weights; expected (ids, offsets, weights)")
        return np.ones(num_ids, np.float32)
    if not feature.weighted:
        raise InputError(
            f"a batch has weights of feature {name!r}, which is not weighted: leave them out, or declare the feature "
            "with weighted=True"
        )
    weights = as_weights(f"feature {name!r}", given[0])
    if len(weights) != num_ids:
        raise InputError(f"feature {name!r}: found {len(weights)} weights for {num_ids} ids; expected one for each")
    return weights


def _bag_lengths(where: str, offsets: object, num_ids: int) -> NDArray[np.int64]:
    """Return the number of ids in each sample."""
    if offsets is None:
        return np.ones(num_ids, np.int64)
    size = len(offsets) if isinstance(offsets, Sized) else 0
    starts = as_offsets(where, offsets, max(1, size), "one more than there are samples")
    lengths = starts[1:] - starts[:-1]
    if starts[0] != 0 or starts[-1] != num_ids or (lengths < 0).any():
        raise InputError(f"{where}: offsets must rise from 0 to the number of ids, {num_ids}; found {starts}")
    return lengths
