"""What all sources have in common: what a user declares, and `batches`, which sets out on the road of a batch.

A source of files is a frozen declaration: it holds no data and no open file, so it can be compared, changed with
`replace`, and sent to another process. A kind of source adds where its data is and gives blocks of it.
"""

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from satrap.config.columns import Columns, DenseColumn, IdColumn, LabelColumn, as_names, check_column
from satrap.config.cores import thread_count
from satrap.config.features import Features
from satrap.config.validation import (
    Config,
    check_flag,
    check_integer,
    check_name,
    describe,
    known_keys,
    require_mapping,
    set_field,
)
from satrap.data.batch_assembler import BatchAssembler, Batches
from satrap.data.block import Block
from satrap.data.epoch_length import num_batches
from satrap.data.inputs import Position
from satrap.errors import ConfigError, InputError

_MAX_COUNT = 2**63 - 1
_MAX_THREADS = 64
_DEFAULT_THREADS = 4
_CUTS = ("block_rows", "block_bytes", "newlines_in_values", "skip_lines")  # what decides where blocks begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """Training data, declared. Ids are read from the columns that are called as the features are."""

    dense: str | DenseColumn | Sequence[str | DenseColumn] = ()
    """Columns of numbers for the dense network, in this order."""
    label: str | LabelColumn | Sequence[str | LabelColumn] | None = None
    """The column of labels; given a list, labels come as [batch_size, labels]."""
    label_true: str | Sequence[str] | None = None
    """Short for LabelColumn(label, true=...): the texts that stand for 1."""
    ids: Mapping[str, str | IdColumn] = dataclasses.field(default_factory=dict)
    """Of a feature: its column, where that has another name or is not what its type says."""
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Short for IdColumn(weights=...): of a feature, the column with a weight for each id."""
    missing_id: int | None = None
    """Short for IdColumn(missing=...) of every feature: the id that stands for a missing one. None: an empty bag."""
    extra: str | Sequence[str] = ()
    """Further columns, which each batch carries along as Arrow arrays, unchanged."""
    batch_size: int | None = 4096
    """Samples in a batch; the last of an epoch may have fewer."""
    drop_last: bool = False
    """Leave out a last batch that is short."""
    epochs: int | None = 1
    """How often the data is read; None: without end."""
    shuffle: bool = False
    """Read blocks in another order in each epoch, and permute the samples of `shuffle_blocks` at a time."""
    shuffle_blocks: int = 16
    """Blocks (of a long block: its pieces) whose samples are permuted together. They and as many read ahead are in
    memory."""
    seed: int = 0
    """What the orders are a function of, together with the epoch."""
    max_bad_rows: int = 0
    """Malformed rows that may be skipped in an epoch; `Batches.left_out` counts them. One more is an error."""
    num_threads: int | None = None
    """Threads that read ahead and decode; None: half the cores, at most 4. 0: none, the caller's own."""

    def __post_init__(self) -> None:
        where = type(self).__name__
        self._check_columns(where)
        for name, low, high in (
            ("batch_size", 1, 2**30 - 1),
            ("epochs", 1, _MAX_COUNT),
            ("shuffle_blocks", 1, 1 << 16),
            ("seed", 0, 2**64 - 1),
            ("max_bad_rows", 0, _MAX_COUNT),
            ("num_threads", 0, _MAX_THREADS),
        ):
            value = getattr(self, name)
            if value is not None or name not in ("batch_size", "epochs", "num_threads"):
                set_field(self, name, check_integer(where, name, value, low, high))
        for name in ("drop_last", "shuffle"):
            check_flag(where, name, getattr(self, name))
        if self.batch_size is None:
            self._check_no_batch_size(where)

    def _check_columns(self, where: str) -> None:
        dense: Any = self.dense
        if isinstance(dense, str | DenseColumn):
            dense = (dense,)
        set_field(self, "dense", _each(where, "dense", dense, DenseColumn))
        if self.label is not None:
            _labels(where, self.label, self.label_true)
            if isinstance(self.label, Sequence) and not isinstance(self.label, str):
                set_field(self, "label", tuple(self.label))
        elif self.label_true is not None:
            raise ConfigError(f"{where}: label_true is {self.label_true!r} and there is no label: give its column")
        for name in ("ids", "weights"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{where}: {name} is {describe(getattr(self, name))}; wanted a dict by feature")
        ids = {
            check_name(where, feature, "'user_id'"): column if isinstance(column, IdColumn) else IdColumn(column)
            for feature, column in self.ids.items()
        }
        set_field(self, "ids", ids)
        for feature, column in self.weights.items():
            check_column(f"{where}: weights[{feature!r}]", column)
        set_field(self, "weights", dict(self.weights))
        if self.missing_id is not None:
            set_field(self, "missing_id", IdColumn(missing=self.missing_id).missing)
        set_field(self, "extra", as_names(where, "extra", self.extra))

    def _check_no_batch_size(self, where: str) -> None:
        raise ConfigError(f"{where}: batch_size is None; wanted an integer from 1")

    def replace(self, **changes: Any) -> Self:
        """This source with other values for some of its fields."""
        known = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.init}
        known_keys(type(self), type(self).__name__, known | changes)
        new = type(self)(**known | changes)
        object.__setattr__(new, "_origin", self.origin)
        return new

    @property
    def origin(self) -> int:
        """The id() of the source that `replace` was first called on; its own, if it was not made by that."""
        return getattr(self, "_origin", id(self))

    def to_dict(self) -> dict[str, Any]:
        """This declaration as plain JSON types; ConfigError if it holds what they cannot say: tables, a filesystem."""
        return {"type": type(self).__name__} | {
            each.name: _plain(f"{type(self).__name__}: {each.name}", getattr(self, each.name))
            for each in dataclasses.fields(self)
            if each.init
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The source that `to_dict` wrote. Fields that are missing take their defaults."""
        given = dict(require_mapping(cls.__name__, data))
        kind = given.pop("type", cls.__name__)
        if kind != cls.__name__:
            raise ConfigError(f"{cls.__name__}: type is {kind!r}; wanted {cls.__name__!r}, or leave it out")
        known_keys(cls, cls.__name__, given)
        for name, column in (("dense", DenseColumn), ("label", LabelColumn)):
            if name in given:
                each = given[name]
                given[name] = [_read(column, one) for one in each] if isinstance(each, list) else _read(column, each)
        if isinstance(given.get("ids"), Mapping):
            given["ids"] = {feature: _read(IdColumn, each) for feature, each in given["ids"].items()}
        return cls(**given)

    def signature(self) -> dict[str, Any]:
        """What a position depends on, as plain JSON types: where this is equal, and the data is, a position of one
        source holds in another.
        The batch size may change."""
        kept = ["shuffle", *(("shuffle_blocks", "seed") if self.shuffle else ()), *_CUTS]
        fields = {name: getattr(self, name) for name in kept if hasattr(self, name)}
        return {"type": type(self).__name__} | fields

    def batches(
        self,
        features: Features | Sequence[str],
        *,
        position: Position | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> Batches:
        """The batches of these features, in this order.

        position: that of the last batch that was read; None: from the start.
        rank, world: every sample goes to exactly one of `world` ranks, and no rank gets two rows more than another. A
            row that is no sample (malformed, or without a label) counts.
        """
        where = type(self).__name__
        world = check_integer(where, "world", world, 1, 1 << 20)
        rank = check_integer(where, "rank", rank, 0, world - 1)
        if position is not None and not isinstance(position, Position):
            raise InputError(f"{where}: position is {describe(position)}; wanted the position of a batch")
        columns = self._columns(features)
        blocks = self._blocks(columns, position)
        road = BatchAssembler(
            blocks=blocks,
            columns=columns,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            seed=self.seed,
            epochs=self.epochs,
            drop_last=self.drop_last,
            num_pieces=self.shuffle_blocks if self.shuffle else 1,
            num_threads=self._num_threads(),
            max_bad_rows=self.max_bad_rows,
            position=position or Position(0, 0, 0),
            rank=rank,
            world=world,
        )
        return Batches(road, partial(num_batches, road))

    def _columns(self, features: Features | Sequence[str]) -> Columns:
        where = type(self).__name__
        return Columns.settle(
            features,
            ids=self.ids,  # type: ignore[arg-type]  # normalised when made
            weights=self.weights,
            missing_id=self.missing_id,
            dense=self.dense,  # type: ignore[arg-type]  # likewise
            label=None if self.label is None else _labels(where, self.label, self.label_true),
            extra=self.extra,  # type: ignore[arg-type]  # likewise
        )

    def _num_threads(self) -> int:
        if self.num_threads is not None:
            return self.num_threads
        return max(1, min(_DEFAULT_THREADS, thread_count(None) // 2))

    @abstractmethod
    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        """Finds the data, refuses what is missing, and gives its blocks in one order. position: where reading begins,
        for data that can go on by itself."""


def _plain(where: str, value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(where, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(where, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{where} is {describe(value)}, which plain JSON types cannot say; wanted paths or URLs")


def _read(kind: type[Config], given: Any) -> Any:
    """A column that may be named by a text."""
    return kind.from_dict(given) if isinstance(given, Mapping) else given


def _each(where: str, name: str, value: Any, kind: type[Any]) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or not all(isinstance(each, str | kind) for each in value):
        raise ConfigError(f"{where}: {name} is {describe(value)}; wanted names of columns, or {kind.__name__} objects")
    return tuple(each if isinstance(each, kind) else kind(each) for each in value)


def _labels(where: str, label: Any, true: Any) -> LabelColumn | tuple[LabelColumn, ...]:
    if isinstance(label, str):
        return LabelColumn(label, true=true)
    if true is not None:
        raise ConfigError(f"{where}: label_true goes with a label that is named by a text; found {describe(label)}")
    if isinstance(label, LabelColumn):
        return label
    return _each(where, "label", label, LabelColumn)
