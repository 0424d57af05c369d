"""The base of all sources: the settings that a user declares, and `batches`, which starts to read.

A source of files is a frozen declaration: it holds no data and no open file, so it can be compared, changed with
`replace`, and sent to another process. Each kind of source adds where its data is, and splits the data into blocks.
"""

import dataclasses
import inspect
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar, Self

import numpy as np

from satrap.config.columns import Columns, DenseColumn, IdColumn, LabelColumn, as_names, check_column
from satrap.config.cores import thread_count
from satrap.config.features import Features
from satrap.config.validation import (
    Config,
    check_flag,
    check_integer,
    check_name,
    describe,
    kind_of,
    set_field,
)
from satrap.data.batch_assembler import BatchAssembler, Batches
from satrap.data.block import Block
from satrap.data.file_source import files_signature
from satrap.data.id_limit import IdLimit, check_max_ids
from satrap.data.inputs import Inputs, Position
from satrap.data.sample_selection import Selection, check_bound, check_share
from satrap.errors import ConfigError, InputError
from satrap.hidden_names import internal

_MAX_COUNT = 2**63 - 1
_MAX_THREADS = 64
_DEFAULT_THREADS = 4
_MANY_SAMPLES = 10_000  # without a label of 1 are probably a mistake
_FIELD = re.compile(r"^(\w+): .*(?:\n    .*)*", re.MULTILINE)  # in a docstring
_LOG = logging.getLogger("satrap.data")


@internal("origin")
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Source(Config, ABC):
    """A declaration of training data. The ids of a feature are read from the column of the same name.

    dense: the columns of numbers for the dense network, in this order.
    label: the column of labels; for a list of columns, the labels are [batch_size, number of labels].
    label_true: short for LabelColumn(label, true=...): the strings that stand for 1.
    ids: the column of a feature, where its name differs from the feature's or its type does not say how to read it.
    weights: short for IdColumn(weights=...): for a feature, the column with a weight for each id.
    missing_id: short for IdColumn(missing=...) for every feature: the id that replaces a missing one. None: an empty
        bag.
    extra: further columns, which each batch holds as Arrow arrays, unchanged.
    batch_size: the number of samples in a batch; the last batch of an epoch may have fewer.
    max_ids: a feature and the most ids of it in a batch, for samples of uneven lengths: a batch ends before the sample
        that would exceed it, or with `batch_size` samples. Several trainers then have about equally many ids in each
        step. A longer sample is a batch alone. None: no limit.
    drop_last: whether to leave out the last batch of an epoch if it is short.
    epochs: how many times the data is read; None: endlessly.
    shuffle: whether to read the blocks in a different order in each epoch, and to permute the samples of
        `shuffle_blocks` blocks at a time.
    shuffle_blocks: the number of blocks (chunks, where blocks are long) whose samples are permuted together. They are
        held in memory, and as many again that are read ahead.
    seed: the seed of the shuffled orders, which are functions of the seed and the epoch.
    max_bad_rows: how many malformed rows may be skipped in an epoch; `Batches.skipped_rows` counts them. One more is an
        error.
    share: the part of the samples to read, drawn by `seed`: (0.0, 0.9) and (0.9, 1.0) are disjoint, and all samples
        together. None: all.
    before: a column and a value: only samples with a smaller value, or without one, are read. Text is compared as
        numbers to a number. A date or time is a datetime.date, datetime.datetime or numpy.datetime64, or its ISO text,
        such as "2026-01-25": without a zone in UTC; in a column of text, that text.
    since: a column and a value: only samples with at least this value are read, which are all that `before` leaves out.
    num_threads: threads that read ahead and decode; None: half the cores, at most 4. 0: only the caller's thread.
    """

    dense: str | DenseColumn | Sequence[str | DenseColumn] = ()
    label: str | LabelColumn | Sequence[str | LabelColumn] | None = None
    label_true: str | Sequence[str] | None = None
    ids: Mapping[str, str | IdColumn] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
    missing_id: int | None = None
    extra: str | Sequence[str] = ()
    batch_size: int | None = 4096
    max_ids: tuple[str, int] | None = None
    drop_last: bool = False
    epochs: int | None = 1
    shuffle: bool = False
    shuffle_blocks: int = 16
    seed: int = 0
    max_bad_rows: int = 0
    share: tuple[float, float] | None = None
    before: tuple[str, Any] | None = None
    since: tuple[str, Any] | None = None
    num_threads: int | None = None
    _optional: ClassVar[tuple[str, ...]] = ("epochs", "num_threads")  # the integers that may be None

    def __init_subclass__(cls) -> None:
        """Add the fields of the bases to the docstring, since `help` shows no other: the path first, as in a call."""
        super().__init_subclass__()
        texts = [inspect.cleandoc(base.__doc__ or "") for base in cls.__mro__ if issubclass(base, Source)]
        described: dict[str, str] = {}
        for match in chain.from_iterable(map(_FIELD.finditer, texts)):
            described.setdefault(match[1], match[0])  # the nearest base wins
        first = sorted(described, key=lambda name: name != "path")
        summary = _FIELD.split(texts[0], maxsplit=1)[0].rstrip()
        cls.__doc__ = "\n".join([summary, "", *map(described.__getitem__, first)])

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
            if value is not None or name not in self._optional:
                set_field(self, name, check_integer(where, name, value, low, high))
        set_field(self, "max_ids", check_max_ids(where, self.max_ids, self.batch_size))
        set_field(self, "share", check_share(where, self.share))
        for name in ("before", "since"):
            set_field(self, name, check_bound(where, name, getattr(self, name)))
        for name in ("drop_last", "shuffle"):
            check_flag(where, name, getattr(self, name))

    def __repr__(self) -> str:
        """Return the path, or what has the items, then the fields that differ from their defaults."""
        fields = sorted(dataclasses.fields(self), key=lambda field: field.name != "path")
        shown = {field.name: _plain(getattr(self, field.name)) for field in fields if field.init and field.repr}
        texts = [repr(shown.pop("path"))] if "path" in shown else []
        if (items := getattr(self, "items", None)) is not None:
            texts = [getattr(items, "__qualname__", kind_of(items))]
        defaults = {field.name: field.default for field in fields} | {"ids": {}, "weights": {}}
        texts += [f"{name}={value!r}" for name, value in shown.items() if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(texts)})"

    def _check_columns(self, where: str) -> None:
        dense: Any = self.dense
        if isinstance(dense, str | DenseColumn):
            dense = (dense,)
        set_field(self, "dense", _as_columns(where, "dense", dense, DenseColumn))
        if self.label is not None:
            _label_columns(where, self.label, self.label_true)
            if isinstance(self.label, Sequence) and not isinstance(self.label, str):
                set_field(self, "label", tuple(self.label))
        elif self.label_true is not None:
            raise ConfigError(
                f"{where}: label_true is {self.label_true!r} and there is no label; name the label's column"
            )
        labels: Any = self.label if isinstance(self.label, tuple) else (self.label,)
        label_names = [label.name if isinstance(label, LabelColumn) else label for label in labels]
        if both := next((column.name for column in self.dense if column.name in label_names), None):  # type: ignore[union-attr]  # normalised above
            raise ConfigError(
                f"{where}: column {both!r} is in dense and is the label, so the model would read what it has to "
                "predict: leave it out of dense"
            )
        for name in ("ids", "weights"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{where}: {name} is {describe(getattr(self, name))}; expected a dict by feature")
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

    def replace(self, **changes: Any) -> Self:
        """Return this source with other values for some of its fields."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        new = type(self)(**known | changes)
        object.__setattr__(new, "_origin", self.origin)
        return new

    @property
    def origin(self) -> int:
        """The id() of the source on which `replace` was first called; its own id(), if `replace` did not create it."""
        return getattr(self, "_origin", id(self))

    def signature(self) -> dict[str, Any]:
        """Return the settings that a position depends on, as plain JSON types.

        A position of one source is valid in another if their signatures and their data are equal. The batch sizes may
        differ.
        """
        names = ["shuffle", "shuffle_blocks", "seed"] if self.shuffle else ["shuffle"]
        names += ["seed"] if self.share is not None and not self.shuffle else []
        selections = {name: getattr(self, name) for name in ("share", "before", "since")}
        selected = {name: list(value) for name, value in selections.items() if value is not None}
        return {"type": type(self).__name__} | {name: getattr(self, name) for name in names} | selected

    def batches(
        self,
        features: Features | Sequence[str],
        *,
        position: Position | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> Batches:
        """Return an iterator over the batches, with these features in this order.

        position: continue after the batch with this position; None: read from the start.
        rank, world_size: this rank, and the number of ranks. Every sample is assigned to exactly one rank, and the
            ranks' numbers of rows differ by at most one, counting rows that are left out (malformed, or without a
            label).
        """
        where = type(self).__name__
        world_size = check_integer(where, "world_size", world_size, 1, 1 << 20)
        rank = check_integer(where, "rank", rank, 0, world_size - 1)
        if position is not None and not isinstance(position, Position):
            raise InputError(f"{where}: position is {describe(position)}; expected the position of a batch")
        selection = Selection(share=self.share, before=self.before, since=self.since, seed=self.seed)
        columns = self._columns(features)
        held = tuple(dict.fromkeys((*columns.extra, *selection.columns)))
        columns = dataclasses.replace(columns, extra=held, selecting=selection.columns)
        blocks = self._blocks(columns, position)
        blocks = blocks if selection.portion == 1.0 else selection.blocks(blocks)
        return Batches(
            BatchAssembler(
                blocks=blocks,
                columns=columns,
                batch_size=self.batch_size,
                limit=None if self.max_ids is None else IdLimit.resolve(where, self.max_ids, columns),
                shuffle=self.shuffle,
                seed=self.seed,
                epochs=self.epochs,
                drop_last=self.drop_last,
                num_chunks=self.shuffle_blocks if self.shuffle else 1,
                num_threads=self._num_threads(),
                max_bad_rows=self.max_bad_rows,
                portion=selection.portion,
                position=position or Position(0, 0, 0),
                rank=rank,
                world_size=world_size,
            ),
            _TrueLabels(self, columns.label),
        )

    def _some_values(self, column: str) -> list[Any]:
        """Return up to three different values of a column, for a message."""
        reader = self.replace(
            dense=(), label=None, label_true=None, extra=column, max_ids=None, batch_size=4096, shuffle=False, epochs=1
        )
        with reader.batches(()) as batches:
            return next(batches).extra[column].unique()[:3].to_pylist()  # type: ignore[no-any-return]

    def _columns(self, features: Features | Sequence[str]) -> Columns:
        where = type(self).__name__
        return Columns.resolve(
            features,
            ids=self.ids,  # type: ignore[arg-type]  # normalised in __post_init__
            weights=self.weights,
            missing_id=self.missing_id,
            dense=self.dense,  # type: ignore[arg-type]  # normalised in __post_init__
            label=None if self.label is None else _label_columns(where, self.label, self.label_true),
            extra=self.extra,  # type: ignore[arg-type]  # normalised in __post_init__
        )

    def _num_threads(self) -> int:
        if self.num_threads is not None:
            return self.num_threads
        return max(1, min(_DEFAULT_THREADS, thread_count(None) // 2))

    @abstractmethod
    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        """Find the data, raise if it is missing, and return its blocks in a fixed order.

        position: where reading starts, for data that resumes by its own offsets.
        """


@dataclasses.dataclass(frozen=True, repr=False)
class FileSource(Source):
    """A declaration of files.

    path: a file, folder, glob or URL, or a list of those.
    filesystem: the filesystem of the path, from pyarrow.fs or fsspec. None: the path decides.
    """

    path: Any
    _: dataclasses.KW_ONLY
    filesystem: Any = None

    def signature(self) -> dict[str, Any]:
        files = files_signature(self.path, self.filesystem) if self._has_files() else {}
        return super().signature() | files

    def _has_files(self) -> bool:
        """Return whether the path names files, and is not the data itself."""
        return True


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RowBlockSource(Source):
    """A declaration of typed rows, which are read a number of rows at a time.

    block_rows: the approximate number of rows that are read at a time.
    """

    block_rows: int = 32768

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "block_rows", check_integer(type(self).__name__, "block_rows", self.block_rows, 1, 1 << 30))

    def signature(self) -> dict[str, Any]:
        return super().signature() | {"block_rows": self.block_rows}


class _TrueLabels:
    """Warns once if no label is one of the strings that stand for 1: the model would learn 0 without an error."""

    def __init__(self, source: Source, labels: Sequence[LabelColumn]) -> None:
        self._source, self._num_samples = source, 0
        self._unseen = {number: label for number, label in enumerate(labels) if label.true is not None}

    def __call__(self, inputs: Inputs | None) -> None:
        """Note a batch, or None at the end."""
        if not self._unseen:
            return
        if inputs is not None:
            self._num_samples += inputs.batch_size
            labels = np.asarray(inputs.label).reshape(inputs.batch_size, -1)
            self._unseen = {number: label for number, label in self._unseen.items() if not labels[:, number].any()}
        if self._num_samples and (inputs is None or self._num_samples >= _MANY_SAMPLES):
            for label in self._unseen.values():
                self._warn(label)
            self._unseen = {}

    def _warn(self, label: LabelColumn) -> None:
        values: list[Any] = []
        with suppress(Exception):  # they only illustrate the warning
            values = self._source._some_values(label.name)
        _LOG.warning(
            "warning: label column %r: none of %s samples holds %s, so all are 0%s: correct label_true (or true=)",
            label.name,
            f"{self._num_samples:,}",
            " or ".join(map(repr, label.true or ())),
            f"; found {', '.join(map(repr, values))}" if values else "",
        )


def _plain(value: Any) -> Any:
    """Return columns that have all defaults as their names."""
    if isinstance(value, tuple):
        return tuple(_plain(element) for element in value)
    if isinstance(value, dict):
        return {name: _plain(element) for name, element in value.items()}
    is_plain = isinstance(value, DenseColumn | IdColumn) and value == type(value)(value.name)
    return value.name if is_plain else value


def _as_columns(where: str, name: str, value: Any, kind: type[Any]) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or not all(isinstance(column, str | kind) for column in value):
        raise ConfigError(
            f"{where}: {name} is {describe(value)}; expected names of columns, or {kind.__name__} objects"
        )
    return tuple(column if isinstance(column, kind) else kind(column) for column in value)


def _label_columns(where: str, label: Any, true: Any) -> LabelColumn | tuple[LabelColumn, ...]:
    if isinstance(label, str):
        return LabelColumn(label, true=true)
    if true is not None:
        raise ConfigError(
            f"{where}: label_true requires a column's name as label, found {describe(label)}; use LabelColumn(true=...)"
        )
    if isinstance(label, LabelColumn):
        return label
    return _as_columns(where, "label", label, LabelColumn)
