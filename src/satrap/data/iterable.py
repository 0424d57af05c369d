"""Iterables as sources: of batches (dicts, Arrow data, Inputs or TorchRec's jagged tensors), or of samples (dicts).

Items are taken in the caller's thread, one at a time. An Inputs that is a complete batch is checked and passed on
unchanged; anything else is copied before the next item is taken. TorchRec is not imported: an object with keys(),
values() and offsets() counts as a KeyedJaggedTensor, one with dense_features, sparse_features and labels as a Batch. An
iterable can only be read from its start: to resume, all earlier items are read again, unless the data has offsets.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.columns import Columns, IdColumn
from satrap.config.features import Features
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_flag, describe, kind_of, set_field, suggest
from satrap.data.block import Block, Chunk
from satrap.data.decode import Bag, decode
from satrap.data.file_source import errors_naming
from satrap.data.frame import as_arrow, as_numpy, checked_offsets, column_length
from satrap.data.inputs import Inputs, Position
from satrap.data.source import Source
from satrap.data.table_rows import SameKinds, TableDecoder, TableRows, kinds_of
from satrap.errors import ConfigError, InputError, SourceError

_CHUNK_SAMPLES = 4096  # the most that are converted together where each item is a sample


@dataclass(frozen=True, eq=False, repr=False)
class IterableSource(Source):
    """The items of an iterable, or of the iterable that a function returns.

    An item is a batch: a dict of columns, a RecordBatch, Table or DataFrame (what has Arrow's C interface), an Inputs,
    or (dense, KeyedJaggedTensor, label), where dense and label may be None. A column of a dict is an array of one or
    (for lists of one length) two dimensions, a list, or for a feature (values, offsets) or (values, offsets, weights).

    An Inputs with exactly these features is not copied unless `batch_size` divides it: do not change its arrays until
    its batch has been used. The label of such an item keeps its shape, [n] or [n, 1].

    items: the iterable, or a function that returns one. A function or a list can be read again, an iterator only once.
        Also a pyarrow Dataset, a polars LazyFrame or a DuckDB relation, whose record batches are the items: give one
        that yields its rows in the same order each time, and `batch_size`.
    samples: whether each item is one sample: a dict with a value, or a list of values, for each column. A missing key
        is a missing value; each has to occur in the first items that are converted together. A batch is returned as
        soon as it has its samples, without another item, so items may be live events. Samples are converted a batch at
        a time (with `shuffle`, 4,096 at a time): small batches cost more.
    offsets: whether the data can resume by itself: `items` is a function of an offset (None at the start) that returns
        pairs (item, offset after it). A checkpoint saves the offset before the first item that was not trained on
        completely, and the function is called with it when the run resumes. An offset has plain JSON types: a number, a
        string, a dict by partition.
    batch_size: the number of samples in a batch, whatever the items hold. None: each item is a batch.
    """

    items: Any = field(repr=False, compare=False)
    _: KW_ONLY
    samples: bool = False
    offsets: bool = False
    batch_size: int | None = None
    _optional: ClassVar[tuple[str, ...]] = (*Source._optional, "batch_size")
    _used: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    _stays: Callable[[object], bool] | None = field(default=None, init=False, repr=False, compare=False)

    __eq__ = object.__eq__  # items are not compared
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        for name in ("samples", "offsets"):
            check_flag("IterableSource", name, getattr(self, name))
        super().__post_init__()
        if self.batch_size is None and (self.shuffle or self.samples):
            raise ConfigError("IterableSource: batch_size is None and shuffle or samples is True; set batch_size")
        items = describe(self.items)
        if isinstance(self.items, str | bytes | os.PathLike):
            raise ConfigError(
                f"IterableSource: found {items}; expected batches. To read files, use satrap.Parquet, satrap.Arrow, "
                "satrap.CSV, JSON, TFRecord or Criteo; parse others to dicts, one for each sample, with samples=True"
            )
        if not callable(self.items) and _arrow_batches(self.items) is None and not hasattr(self.items, "__iter__"):
            raise ConfigError(f"IterableSource: found {items}; expected an iterable, or a function that returns one")
        if self.offsets and not callable(self.items):
            raise ConfigError(
                f"IterableSource: offsets is True and items is {items}; expected a function of an offset that returns "
                "pairs (item, offset after it)"
            )
        if self.offsets and self.shuffle:
            raise ConfigError(
                "IterableSource: offsets and shuffle are True, but offsets require a fixed order; leave out one of them"
            )
        if self._is_one_shot() and self.epochs != 1:
            raise ConfigError(
                f"IterableSource: epochs is {self.epochs} and a {type(self.items).__name__} can be read once; give a "
                "list, or a function that returns a new iterator"
            )

    def replace(self, **changes: Any) -> Self:
        new = super().replace(**changes)
        if new.items is self.items:  # an iterator that one of them reads is read for the other
            set_field(new, "_used", self._used)
        return new

    def _num_threads(self) -> int:
        return 0

    def _some_values(self, column: str) -> list[Any]:
        return []  # reading items twice may have effects

    def _columns(self, features: Features | Sequence[str]) -> Columns:
        # Only the names: items may contain the weights of a weighted feature without a column for them.
        if not isinstance(features, Features):
            return super()._columns(features)
        return replace(super()._columns(features.names), declared=features)

    def signature(self) -> dict[str, Any]:
        result = super().signature()
        if self.offsets:
            result["offsets"] = True
        if self.samples and not self.shuffle:  # it decides which samples are read together
            result["batch_size"] = self.batch_size
        return result

    def _is_one_shot(self) -> bool:
        return isinstance(self.items, Iterator)

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        if self._is_one_shot():
            if self._used:
                raise SourceError(
                    f"IterableSource: this {type(self.items).__name__} was read before; give a list, or a function "
                    "that returns a new iterator"
                )
            self._used.append(True)
        is_known = isinstance(self.items, Sized) and (self.samples or self.batch_size is None)
        reader = _ItemReader(self, columns, position)
        return [Block(read=reader.read, is_numbered=True, num_items=len(self.items) if is_known else None)]


class _ItemReader:
    """Reads all items of the iterable."""

    def __init__(self, source: IterableSource, columns: Columns, position: Position | None) -> None:
        """position: where the first epoch continues."""
        self._source, self._columns, self._position = source, columns, position
        self._has_names = False  # whether samples have had all keys
        self._same = SameKinds()

    def read(self) -> Iterator[Chunk]:
        source, position = self._source, self._position or Position(0, 0, 0)
        self._position = None
        if source.offsets:
            self._has_names |= position.offset is not None  # the samples before the offset
            items = iter(source.items(position.offset))
        else:
            given = source.items() if callable(source.items) else source.items
            items = iter(given) if (batches := _arrow_batches(given)) is None else batches()
        return self._sample_chunks(items, position) if source.samples else self._batch_chunks(items)

    def _sample_chunks(self, items: Iterator[Any], position: Position) -> Iterator[Chunk]:
        """Yield chunks that end with a batch, so that no batch waits for a sample of the next one.

        Samples that were consumed before the position are counted from one offset on, so there is no offset among them.
        """
        source, offset, before, num_kept = self._source, None, 0, 0
        size = source.batch_size or 1
        # How far into a batch the first item is: several trainers know how many rows precede it; one knows its samples.
        phase = 0 if position.offset is None else (position.rows or -position.sample) % size
        while True:
            num_missing = _CHUNK_SAMPLES if source.shuffle else min(_CHUNK_SAMPLES, size - (phase + num_kept) % size)
            if not (taken := list(islice(items, num_missing))):
                return
            offsets: list[Any] = []
            if source.offsets:
                pairs = [_unpack_pair(before + i, item) for i, item in enumerate(taken)]
                taken, offsets = [item for item, _ in pairs], [after for _, after in pairs]
                offset = offsets[-1]
            self._require_names(before, taken)
            chunk = _decode_samples(before, taken, self._columns, source.max_bad_rows, self._same)
            numbers = partial(_sample_numbers, chunk.rows, len(chunk), before, offsets)
            before += len(taken)
            num_kept += len(chunk)
            yield replace(chunk, rows=numbers, offset=offset if num_kept >= position.sample else None)

    def _require_names(self, before: int, items: list[Any]) -> None:
        """Raise unless these are samples, and each column occurs in them or has occurred before."""
        for i, item in enumerate(items):
            if not isinstance(item, Mapping):
                raise SourceError(f"item {before + i} is {describe(item)}; expected a dict, one sample")
        if not self._has_names:
            self._columns.check_present(f"items from {before} on", sorted({name for item in items for name in item}))
            self._has_names = True

    def _batch_chunks(self, items: Iterator[Any]) -> Iterator[Chunk]:
        offset = None
        for number, item in enumerate(items):
            if self._source.offsets:
                item, offset = _unpack_pair(number, item)
            chunk = self._kept(number, item)
            if chunk is None:
                chunk = _decode_item(f"item {number}", item, self._columns, self._source.max_bad_rows, self._same)
            if self._source.batch_size is not None:  # it is kept while the next item is generated
                chunk = replace(chunk, samples=chunk.decoded(), ready_batch=None)
            first = _number_of(offset) if self._source.offsets else number << 32
            yield replace(chunk, rows=partial(_sample_numbers, chunk.rows, len(chunk), first), offset=offset)

    def _kept(self, number: int, item: Any) -> Chunk | None:
        """Return an Inputs whose ids stay where they are, if it is a whole batch."""
        stays, columns, where = self._source._stays, self._columns, f"item {number}"
        if stays is None or self._source.batch_size is not None or not isinstance(item, Inputs):
            return None
        names = tuple(column.name for column in columns.ids)
        if not stays(item.values) or not item.names == columns.features == names or columns.extra:
            return None
        _refuse_declared(where, columns)
        dense, label = (_floats(part, stays) for part in (item.dense, item.label))
        if dense is not None and dense.ndim == 1:
            dense = dense[:, None]
        shapes = (dense, (2,)), (label, (1, 2))
        if not all(a is None or (a.ndim in dims and len(a) == item.batch_size) for a, dims in shapes):
            return None
        batch, samples = replace(item, dense=dense, label=label), partial(_samples_of, where, item, columns)
        return Chunk(samples=samples, ready_batch=batch, is_label_flat=label is not None and label.ndim == 1)


def _arrow_batches(items: Any) -> Callable[[], Iterator[Any]] | None:
    """Return a function that reads the record batches of an Arrow stream, a Dataset or a LazyFrame; None: of others."""
    if hasattr(items, "__arrow_c_stream__"):
        return lambda: iter(pyarrow_for("reading Arrow data").RecordBatchReader.from_stream(items))
    if hasattr(items, "collect_batches"):
        return lambda: iter(items.collect_batches(maintain_order=True))
    return (lambda: iter(items.to_batches())) if hasattr(items, "to_batches") else None


def keeping(source: IterableSource, stays: Callable[[object], bool]) -> IterableSource:
    """Return the source such that an Inputs that is a complete batch is passed on unchanged if its ids are some for
    which `stays` returns True: they lie on a device, where they are used."""
    kept = copy(source)
    set_field(kept, "_stays", stays)
    return kept


def _unpack_pair(number: int, item: Any) -> tuple[Any, Any]:
    """Return an item and the offset after it."""
    if not isinstance(item, tuple) or len(item) != 2:
        raise SourceError(f"item {number} is {describe(item)}; expected a pair (item, offset after it)")
    try:
        text = json.dumps(item[1])
    except (TypeError, ValueError):
        text = "null"
    if text == "null":
        raise SourceError(
            f"item {number}: its offset is {describe(item[1])}; expected plain JSON types: a number, a string, a list "
            "or a dict of those"
        )
    return item[0], item[1]


def _number_of(offset: Any) -> int:
    """Return a number that only the offset decides."""
    return int.from_bytes(blake2b(json.dumps(offset, sort_keys=True).encode(), digest_size=8).digest(), "little")


def _sample_numbers(
    rows: Callable[[], NDArray[Any]] | None, num_samples: int, first: int, offsets: Sequence[Any] = ()
) -> NDArray[np.uint64]:
    """Return what identifies each sample of a chunk, however the items are divided into chunks: its number in the data,
    or if there are offsets, the one after it, since a run that resumes does not know numbers.

    rows: `Chunk.rows`. first: the number of the first item. offsets: those after the items; none: they have numbers."""
    kept = np.arange(num_samples) if rows is None else rows()
    if not offsets:
        return kept.astype(np.uint64) + np.uint64(first)
    return np.array([_number_of(offsets[row]) for row in kept.tolist()], np.uint64)


def _decode_samples(before: int, items: list[Any], columns: Columns, max_bad: int, same: SameKinds) -> Chunk:
    where = f"items from {before} on"
    arrays = {name: as_arrow(where, name, [item.get(name) for item in items]) for name in columns.required()}
    same.require(where, kinds_of({name: array.type for name, array in arrays.items()}, columns))
    return decode(arrays, len(items), columns, where=where, row=lambda i: f"item {before + i}", max_bad=max_bad)


def _decode_item(where: str, item: Any, columns: Columns, max_bad: int, same: SameKinds) -> Chunk:
    """Return the samples of a batch, in any of the forms that `IterableSource` accepts."""
    if isinstance(item, Inputs):
        return _decode_inputs(where, item, columns)
    if hasattr(item, "__arrow_c_stream__") or hasattr(item, "__arrow_c_array__"):
        return _decode_arrow(where, item, columns, max_bad, same)
    if all(hasattr(item, name) for name in ("dense_features", "sparse_features", "labels")):
        item = (item.dense_features, item.sparse_features, item.labels)
    if _is_jagged(item):
        item = (None, item, None)
    if isinstance(item, tuple) and len(item) == 3 and _is_jagged(item[1]):
        return _decode_jagged(where, item, columns)
    if isinstance(item, Mapping):
        return _decode_dict(where, item, columns, max_bad, same)
    raise SourceError(
        f"{where} is {kind_of(item)}; expected a dict of columns, Arrow data, an Inputs, or (dense, KeyedJaggedTensor, "
        "label); pass a dict of columns to satrap.Frame"
    )


def _is_jagged(item: Any) -> bool:
    return all(callable(getattr(item, name, None)) for name in ("keys", "values", "offsets"))


def _decode_dict(where: str, item: Mapping[str, Any], columns: Columns, max_bad: int, same: SameKinds) -> Chunk:
    columns.check_present(where, list(item))
    ids, arrays, known = [], {}, {}
    for feature, column in zip(columns.features, columns.ids, strict=True):
        value = item[column.name]
        if (bag := _plain_bag(where, column, value)) is not None:
            known[feature] = bag
        if isinstance(value, tuple) and len(value) not in (2, 3):
            raise SourceError(
                f"{where}: feature {feature!r} has {len(value)} arrays; expected (values, offsets[, weights])"
            )
        if isinstance(value, tuple) and len(value) == 3:
            column = replace(column, weights=f"{column.name}, weights")
            arrays[column.name] = as_arrow(where, column.name, value[:2])
            arrays[str(column.weights)] = as_arrow(where, str(column.weights), (value[2], value[1]))
        ids.append(column)
    resolved = replace(columns, ids=tuple(ids))
    lengths = {
        column.name: column_length(where, column.name, item[column.name])
        for feature, column in zip(columns.features, ids, strict=True)
        if feature in known
    }
    for name in resolved.required(known):
        if name not in arrays:
            arrays[name] = as_arrow(where, name, item[name])
    lengths |= {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise SourceError(f"{where} has columns of different lengths: {lengths}; expected one length")
    n = next(iter(lengths.values()))
    types = dict.fromkeys(lengths, pyarrow_for("reading columns").int64())  # those of ids that need no Arrow
    same.require(where, kinds_of(types | {name: array.type for name, array in arrays.items()}, columns))
    return decode(arrays, n, resolved, where=where, row=lambda i: f"{where}, sample {i}", max_bad=max_bad, known=known)


def _plain_bag(where: str, column: IdColumn, value: Any) -> Bag | None:
    """Return the ids of a feature that are 64-bit integers in NumPy arrays; None if they need Arrow."""
    values, offsets = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if column != IdColumn(column.name) or not _is_vector(values) or values.dtype not in (np.int64, np.uint64):
        return None
    if offsets is not None and not (_is_vector(offsets) and len(offsets)):
        return None
    if offsets is None:
        return np.ascontiguousarray(values).view(np.uint64), None, None
    bounds = checked_offsets(where, column.name, offsets, len(values))
    return np.ascontiguousarray(values[bounds[0] : bounds[-1]]).view(np.uint64), bounds - bounds[0], None


def _is_vector(given: object) -> bool:
    return isinstance(given, np.ndarray) and given.ndim == 1 and not isinstance(given, np.ma.MaskedArray)


def _decode_arrow(where: str, item: Any, columns: Columns, max_bad: int, same: SameKinds) -> Chunk:
    arrow = pyarrow_for("reading Arrow data")
    with errors_naming(where):
        table = arrow.table(item) if hasattr(item, "__arrow_c_stream__") else arrow.record_batch(item)
    decoder = TableDecoder.for_schema(table.schema, columns, where, max_bad)
    same.require(where, decoder.kinds)
    return TableRows(decoder, table.select(decoder.names), 0).decode()


def _decode_inputs(where: str, item: Inputs, columns: Columns) -> Chunk:
    _refuse_declared(where, columns)
    n = item.batch_size
    num_bags = n * len(item.names)
    for name, array, expected in (
        ("offsets", item.offsets, num_bags + 1),
        ("values", item.values if item.offsets is None else None, num_bags),
        ("weights", item.weights, len(item.values)),
    ):
        if array is not None and array.shape != (expected,):
            raise SourceError(
                f"{where}: {name} have the shape {array.shape}; expected ({expected},) for {len(item.names)} features "
                f"of {n} samples"
            )
    missing = [name for name in columns.extra if name not in item.extra]
    if missing:
        raise SourceError(f"{where} has no extra {missing[0]!r}; it has {sorted(item.extra)}")
    extra = {name: as_arrow(where, name, item.extra[name]) for name in columns.extra}
    for name, column in extra.items():
        if len(column) != n:
            raise SourceError(f"{where}: extra {name!r} has {len(column)} values; expected one for each of {n} samples")
    label: Any = item.label
    is_label_flat = np.ndim(label) == 1
    if not _is_batch_of(columns, item):
        return Chunk(samples=_samples_of(where, item, columns), extra=extra, is_label_flat=is_label_flat)
    ready_batch = replace(item, extra={**item.extra, **extra}) if extra else item
    samples = partial(_samples_of, where, item, columns)
    return Chunk(samples=samples, ready_batch=ready_batch, extra=extra, is_label_flat=is_label_flat)


def _is_batch_of(columns: Columns, item: Inputs) -> bool:
    """Return whether an Inputs is a complete batch of these columns: nothing needs to be selected or converted."""
    n, offsets = item.batch_size, item.offsets
    return (
        item.names == columns.features == tuple(column.name for column in columns.ids)
        and all(
            array is None
            or (isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim in ndims and array.flags.carray)
            for array, dtype, ndims in (
                (item.values, np.uint64, (1,)),
                (offsets, np.int64, (1,)),
                (item.weights, np.float32, (1,)),
                (item.dense, np.float32, (2,)),
                (item.label, np.float32, (1, 2)),
            )
        )
        and all(rows is None or len(rows) == n for rows in (item.dense, item.label))
        and (offsets is None or (offsets[0] == 0 and offsets[-1] == len(item.values)))
        and (offsets is None or not np.any(offsets[1:] < offsets[:-1]))
    )


def _samples_of(where: str, item: Inputs, columns: Columns) -> _core.Samples:
    n = item.batch_size
    values = _integers(where, "values", item.values).view(np.uint64)
    offsets = None if item.offsets is None else _integers(where, "offsets", item.offsets).view(np.int64)
    bags: list[Any] = []
    for column in columns.ids:
        begin = _feature_index(where, column, item.names) * n
        if offsets is None:
            weights = None if item.weights is None else item.weights[begin : begin + n]
            bags.append((values[begin : begin + n], None, weights))
        else:
            bags.append((values, offsets[begin : begin + n + 1], item.weights))
    try:
        return _core.Samples(n, bags, _numbers(item.dense), _numbers(item.label))
    except InputError as error:
        raise SourceError(f"{where}: {error}") from error


def _decode_jagged(where: str, item: tuple[Any, Any, Any], columns: Columns) -> Chunk:
    _refuse_declared(where, columns)
    if extra := columns.extra:
        raise SourceError(f"{where}: a KeyedJaggedTensor has no column {extra[0]!r}; leave out extra, before and since")
    dense, jagged, label = item
    keys = list(jagged.keys())
    values = _integers(where, "values", jagged.values()).view(np.uint64)
    offsets = _integers(where, "offsets", jagged.offsets()).view(np.int64)
    weights = jagged.weights_or_none() if hasattr(jagged, "weights_or_none") else None
    weights = None if weights is None else np.asarray(as_numpy(weights), np.float32)
    n, rest = divmod(len(offsets) - 1, max(1, len(keys)))
    if rest or len(offsets) == 0:
        raise SourceError(f"{where}: {len(offsets)} offsets of {len(keys)} keys; expected one batch size for all keys")
    inputs = Inputs(
        names=tuple(keys), values=values, offsets=offsets, weights=weights, batch_size=n, dense=dense, label=label
    )
    return Chunk(samples=_samples_of(where, inputs, columns), is_label_flat=np.ndim(label) == 1)


def _refuse_declared(where: str, columns: Columns) -> None:
    """Raise if columns are declared for an item that contains its own dense numbers, labels and weights."""
    weights = [column.weights for column in columns.ids if column.weights is not None]
    for name, declared in (("dense", columns.dense), ("label", columns.label), ("weights", weights)):
        if declared:
            raise SourceError(f"{where} contains its own {name}; leave out {name}=, or give dicts of columns")


def _feature_index(where: str, column: IdColumn, names: Sequence[str]) -> int:
    if column.name not in names:
        nearest = suggest(column.name, list(names)) if names else "it has none"
        raise SourceError(f"{where} has no feature {column.name!r}; {nearest}")
    return list(names).index(column.name)


def _integers(where: str, name: str, numbers: Any) -> Any:
    """Return integers as uint64 or int64."""
    array = np.asarray(as_numpy(numbers))
    if array.dtype.kind not in "iu":
        raise SourceError(f"{where}: {name} are {array.dtype}; expected integers")
    return array.astype(np.uint64 if array.dtype.kind == "u" else np.int64, copy=False)


def _floats(numbers: Any, stays: Callable[[object], bool]) -> Any:
    """Return numbers as float32, where they stay or on the CPU."""
    if numbers is None or stays(numbers):
        return None if numbers is None else numbers.detach().float()
    return np.ascontiguousarray(as_numpy(numbers), np.float32)


def _numbers(numbers: Any) -> Any:
    """Return numbers of one or two dimensions as [n, width]."""
    if numbers is None:
        return None
    array = np.ascontiguousarray(as_numpy(numbers), np.float32)
    return array[:, None] if array.ndim == 1 else array
