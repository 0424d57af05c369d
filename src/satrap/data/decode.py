"""Converts Arrow columns to samples: whole columns at a time, by pyarrow and the core, never value by value.

This module knows the declarations in `columns` and the types of Arrow. Parquet files, Arrow files, frames and the items
of iterables all pass through it. Malformed rows are found after their columns were converted; they are removed, and
reported by their numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.columns import Columns, DenseColumn, IdColumn, LabelColumn, Time
from satrap.config.optional_deps import pyarrow_for
from satrap.data.block import Chunk
from satrap.data.hashing import hash_integers, hash_strings, is_text, text_buffers
from satrap.data.item_numbers import numbers_beside, unaligned
from satrap.data.whole_numbers import Wrong, is_whole_decimal, whole_decimals, whole_floats
from satrap.errors import SourceError

Bag = tuple[NDArray[np.uint64], NDArray[np.int64] | None, NDArray[np.float32] | None]
"""The ids of a feature; where the ids of each sample begin, and the last end (None: one id each); the weights."""
_FlatIds = tuple[NDArray[np.uint64], NDArray[np.bool_] | None, Wrong | None]
_SECONDS = {"days": 86400, "hours": 3600, "seconds": 1}
_EPOCH_WEEKDAY = 3  # 1 January 1970 was a Thursday


@dataclass(slots=True)
class _Fault:
    """Malformed rows with one cause."""

    rows: NDArray[np.bool_]
    why: Callable[[int], str]
    """Returns what is wrong with a row."""


@dataclass(slots=True)
class _Decoder:
    """Converts the columns of one chunk and collects the faults that it finds."""

    where: str
    n: int
    arrow: Any = field(default_factory=lambda: pyarrow_for("reading data"))
    faults: list[_Fault] = field(default_factory=list)
    dropped: NDArray[np.bool_] | None = None

    # -- ids -----------------------------------------------------------------------------------------------------------

    def bag(self, column: IdColumn, arrays: Mapping[str, Any]) -> tuple[Bag, list[NDArray[np.float64]]]:
        """Return the ids of one feature, and each of the numbers beside them."""
        if column.crossed:
            return self._crossed(column, arrays), []
        array = arrays[column.name]
        array = self._derived(column, self._split(column, array))
        bag: tuple[NDArray[np.uint64], NDArray[np.int64] | None]
        bag = self._list_ids(column, array) if is_list(self.arrow, array.type) else self._single_ids(column, array)
        missing = _numpy(array.is_null())
        weights, numbers = (
            [self._beside(column, name, arrays[name], bag, missing, what) for name in names]
            for what, names in (("weights", [column.weights] if column.weights else []), ("numbers", column.numbers))
        )
        return (*bag, weights[0].astype(np.float32) if weights else None), numbers

    def _crossed(self, column: IdColumn, arrays: Mapping[str, Any]) -> Bag:
        """Return the ids of a feature whose values come from several columns."""
        parts, present = [], np.ones(self.n, np.bool_)
        for name in (column.name, *column.crossed):
            if is_list(self.arrow, arrays[name].type):
                self._refuse_type(name, arrays[name].type, "one integer or string in each row, to cross with others")
            ids, valid, wrong = self._flat_ids(replace(column, name=name, crossed=()), arrays[name])
            if wrong is not None:
                self._fault(name, wrong[0], arrays[name], wrong[1])
            parts.append(ids)
            present &= True if valid is None else valid
        ids = _crossed_ids(parts)
        if present.all():
            return ids, None, None
        if column.missing is not None:
            return np.where(present, ids, np.uint64(column.missing)), None, None
        return ids[present], _offsets(present), None

    def _derived(self, column: IdColumn | DenseColumn, array: Any) -> Any:
        """Return what a column's `time` and `boundaries` make of its values, in lists, too."""
        boundaries = column.boundaries if isinstance(column, IdColumn) else None
        if column.time is None and boundaries is None:
            return array
        arrow, types = self.arrow, self.arrow.types
        if is_list(arrow, array.type):
            lengths = arrow.compute.list_value_length(array).fill_null(0)
            items = self._derived(column, array.flatten())
            return arrow.LargeListArray.from_arrays(arrow.array(_offsets(_numpy(lengths))), items, mask=array.is_null())
        array = self._decoded(array)
        if column.time is not None and not types.is_null(array.type):
            if not is_time(arrow, array.type):
                self._refuse_type(column.name, array.type, "timestamps or dates (datetime objects), as declared (time)")
            array = _time_part(arrow, array, column.time)
            if isinstance(column, IdColumn) and boundaries is None:
                array = arrow.compute.floor(array).cast(arrow.int64())
        if boundaries is not None and not types.is_null(array.type):
            if not _is_number(arrow, array.type):
                self._refuse_type(column.name, array.type, "numbers, as declared (boundaries)")
            array = _buckets(arrow, array, boundaries)
        return array

    def _split(self, column: IdColumn, array: Any) -> Any:
        """Split strings that list ids; an empty item is a missing id."""
        if column.separator is None or self.arrow.types.is_null(array.type):
            return array
        array, arrow = self._decoded(array), self.arrow
        if not is_text(arrow, array.type):
            self._refuse_type(column.name, array.type, f"strings to split at {column.separator!r}")
        is_missing = _numpy(arrow.compute.equal(array, "").fill_null(True))
        lists = arrow.compute.split_pattern(array, column.separator)
        lengths = np.where(is_missing, 0, _numpy(arrow.compute.list_value_length(lists).fill_null(0)))
        items = lists.filter(arrow.array(~is_missing)).flatten()
        items = arrow.compute.if_else(arrow.compute.equal(items, ""), arrow.scalar(None, items.type), items)
        return arrow.LargeListArray.from_arrays(arrow.array(_offsets(lengths)), items, mask=arrow.array(is_missing))

    def _flat_ids(self, column: IdColumn, array: Any) -> _FlatIds:
        """Return ids, which of them are present (None: all), and which values cannot be ids (None: all can)."""
        arrow, kind = self.arrow, array.type
        types = arrow.types
        valid = None if array.null_count == 0 else _numpy(array.is_valid())
        if types.is_null(kind):
            return np.zeros(len(array), np.uint64), valid, None
        if is_text(arrow, kind):
            if column.kind == "integer":
                self._refuse_type(column.name, kind, "integers, as declared: convert it, or declare kind='string'")
            if types.is_dictionary(kind) and array.dictionary.null_count:
                return self._flat_ids(column, array.dictionary_decode())
            return hash_strings(array), valid, None
        if types.is_dictionary(kind):
            return self._flat_ids(column, array.dictionary_decode())
        wrong = None
        is_decimal = is_whole_decimal(arrow, kind)
        if types.is_floating(kind) and column.kind == "integer":
            array, valid, wrong = whole_floats(array)
        elif is_decimal and column.kind != "string":
            array, valid, wrong = whole_decimals(array)
        elif not (types.is_integer(kind) or types.is_boolean(kind) or is_decimal):
            hint = "; convert them, or declare kind='integer' if they are whole" if types.is_floating(kind) else ""
            if types.is_nested(kind):
                hint = "; give the ids of all items one after another, and how many each has as numbers beside them"
            self._refuse_type(column.name, kind, f"integers or strings for ids{hint}", IdColumn)
        if column.kind == "string":
            return hash_strings(array.cast(arrow.string())), valid, wrong
        wide = arrow.uint64() if types.is_unsigned_integer(array.type) else arrow.int64()
        ids = _numpy(array.cast(wide).fill_null(0)).view(np.uint64)
        return (hash_integers(ids) if column.hash else ids), valid, wrong

    def _single_ids(self, column: IdColumn, array: Any) -> tuple[NDArray[np.uint64], NDArray[np.int64] | None]:
        ids, valid, wrong = self._flat_ids(column, array)
        if wrong is not None:
            self._fault(column.name, wrong[0], array, wrong[1])
        if valid is None or valid.all():
            return ids, None
        if column.missing is not None:
            return np.where(valid, ids, np.uint64(column.missing)), None
        return ids[valid], _offsets(valid)

    def _list_ids(self, column: IdColumn, array: Any) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        lengths = _numpy(self.arrow.compute.list_value_length(array).fill_null(0)).astype(np.int64)
        offsets = _offsets(lengths)
        ids, valid, wrong = self._flat_ids(column, array.flatten())
        if wrong is not None:
            self._fault(column.name, np.diff(_offsets(wrong[0])[offsets]) > 0, array, wrong[1])
        if valid is not None and not valid.all():
            if column.missing is not None:
                ids = np.where(valid, ids, np.uint64(column.missing))
            else:
                ends = _offsets(valid)[offsets]
                if column.weights or column.numbers:
                    what = "weights" if column.weights else "numbers"
                    why = f"column {column.name!r} lists a missing id, and its ids have {what}: remove both"
                    self.faults.append(_Fault(np.diff(ends) < lengths, lambda _: why))
                ids, offsets = ids[valid], ends
        is_missing = _numpy(array.is_null())
        if column.missing is not None and is_missing.any():
            ids = np.insert(ids, offsets[:-1][is_missing], np.uint64(column.missing))
            offsets = offsets + _offsets(is_missing)
        return ids, offsets

    def _beside(
        self,
        column: IdColumn,
        name: str,
        given: Any,
        bag: tuple[NDArray[np.uint64], NDArray[np.int64] | None],
        missing: NDArray[np.bool_],
        what: str,
    ) -> NDArray[np.float64]:
        """Return for each id its number in the column `name`. The numbers of a missing bag are ignored, and the id in
        its place has 1. what: "weights", which float32 must hold, or "numbers"."""
        ids, offsets = bag
        if offsets is None:
            offsets = np.arange(self.n + 1, dtype=np.int64)
        if not is_list(self.arrow, given.type):
            lengths, flat = _numpy(given.is_valid()).astype(np.int64), given.drop_null()
        else:
            lengths = _numpy(self.arrow.compute.list_value_length(given).fill_null(0)).astype(np.int64)
            flat = given.flatten()
        if what == "numbers" and is_time(self.arrow, flat.type):
            flat = _time_part(self.arrow, flat, "seconds")
        if not (_is_number(self.arrow, flat.type) or self.arrow.types.is_null(flat.type)):
            self._refuse_type(name, given.type, "numbers for weights" if what == "weights" else "numbers or timestamps")
        numbers = _floats(flat, np.float32 if what == "weights" else np.float64)
        starts, expected = _offsets(lengths)[:-1], np.diff(offsets)
        uneven = ~missing & (lengths != expected)
        if uneven.any():
            self.faults.append(
                _Fault(
                    uneven,
                    lambda i: (
                        f"column {name!r} has {lengths[i]} {what} and column {column.name!r} has {expected[i]} ids"
                    ),
                )
            )
        num_infinite = np.append(0, np.cumsum(~np.isfinite(numbers)))
        infinite = ~missing & (num_infinite[starts + lengths] > num_infinite[starts])
        self._fault(name, infinite, given, f"finite {what}")
        out = np.ones(len(ids))
        good = ~missing & ~uneven & (expected > 0)
        position = np.repeat(np.where(good, starts - offsets[:-1], 0), expected) + np.arange(len(ids))
        taken = np.repeat(good, expected)
        out[taken] = numbers[position[taken]]
        return out

    # -- numbers -------------------------------------------------------------------------------------------------------

    def dense(self, columns: Mapping[DenseColumn, Any]) -> NDArray[np.float32] | None:
        """Return all dense columns side by side, as [n, num_dense]."""
        if not columns:
            return None
        return np.concatenate([self._numbers(column, array) for column, array in columns.items()], axis=1)

    def _numbers(self, column: DenseColumn, array: Any) -> NDArray[np.float32]:
        """Return one dense column, as [n, width]; strings are parsed as in text files."""
        array = self._derived(column, array)
        flat, width = self._decoded(array), self._width(column, array.type)
        has_width: NDArray[np.bool_] = np.ones(self.n, bool)
        if is_list(self.arrow, array.type):
            lengths = _numpy(self.arrow.compute.list_value_length(array).fill_null(-1))
            has_width = lengths == width
            self._fault(column.name, (lengths >= 0) & ~has_width, array, f"a list of {width} numbers")
            flat = (array if has_width.all() else array.filter(self.arrow.array(has_width))).flatten()
        shape = (int(has_width.sum()), width)
        numbers = np.full((self.n, width), np.nan, np.float32)
        if _is_string(self.arrow, flat.type):
            parsed, malformed = _core.parse_numbers(*text_buffers(self.arrow, flat))
            numbers[has_width] = parsed.reshape(shape)
            has_malformed = np.zeros(self.n, bool)
            has_malformed[has_width] = malformed.reshape(shape).any(axis=1)
            self._fault(column.name, has_malformed, array, f"a number, or a feature {column.name!r} for strings")
        elif _is_number(self.arrow, flat.type):
            numbers[has_width] = _floats(flat).reshape(shape)
        elif not self.arrow.types.is_null(flat.type):
            self._refuse_type(column.name, array.type, "numbers, or strings of numbers", DenseColumn)
        self._fault(
            column.name, np.logical_or.reduce(np.isinf(numbers), axis=1), array, "finite numbers that float32 can hold"
        )
        missing = np.isnan(numbers)
        if column.log1p:
            numbers = np.asarray(_core.log1p(numbers.reshape(-1))).reshape(numbers.shape)
        return np.where(missing, np.float32(column.missing), numbers) if missing.any() else numbers

    def _width(self, column: DenseColumn, kind: Any) -> int:
        """Return how many numbers a column of this type has in each row."""
        width = 1
        if self.arrow.types.is_fixed_size_list(kind):
            width = int(kind.list_size)
        elif column.width is not None and (is_list(self.arrow, kind) or self.arrow.types.is_null(kind)):
            return column.width
        elif is_list(self.arrow, kind):
            hint = f"for lists of one length, declare it: DenseColumn({column.name!r}, width=...)"
            self._refuse_type(column.name, kind, f"numbers; {hint}")
        if column.width not in (None, width):
            self._refuse_type(column.name, kind, f"lists of {column.width} numbers, as declared (width)")
        return width

    def label(self, column: LabelColumn, array: Any) -> NDArray[np.float32]:
        """Return the labels, as [n]; they may be lists of one, which PyTorch's losses take."""
        array, compute = self._decoded(array), self.arrow.compute
        if is_list(self.arrow, array.type) and (_numpy(compute.list_value_length(array).fill_null(1)) == 1).all():
            array = self._decoded(compute.list_element(array, 0))
        texts = column.text_values
        if texts is None:
            if not (_is_number(self.arrow, array.type) or self.arrow.types.is_null(array.type)):
                self._refuse_type(
                    column.name, array.type, "numbers; for strings, declare what they stand for (label_true)"
                )
            numbers = _floats(array)
        else:
            numbers = self._text_label(column, array, texts)
        missing, infinite = np.isnan(numbers), np.isinf(numbers)
        self._fault(column.name, infinite, array, "a finite label")
        if column.above is not None:
            numbers = (numbers > np.float32(column.above)).astype(np.float32)
        outside = column.find_invalid(numbers) & ~missing
        self._fault(column.name, outside, array, column.expected)
        if missing.any():
            self._missing_labels(column, missing)
            if not isinstance(column.missing, str):
                numbers = np.where(missing, np.float32(column.missing), numbers)
        return numbers

    def _text_label(self, column: LabelColumn, array: Any, texts: Mapping[str, float]) -> NDArray[np.float32]:
        if not (is_text(self.arrow, array.type) or self.arrow.types.is_null(array.type)):
            self._refuse_type(column.name, array.type, "strings, as label_true or its LabelColumn declares")
        kind = self.arrow.large_binary()  # bytes need not be UTF-8
        labels = self.arrow.array([text.encode() for text in texts], kind)
        index = self.arrow.compute.index_in(array.cast(kind), value_set=labels)
        known = np.array([*texts.values(), np.nan if column.other_value is None else column.other_value], np.float32)
        numbers = known[_numpy(index.fill_null(len(texts)))]
        present = _numpy(array.is_valid())
        if column.other_value is None:
            unknown = np.isnan(numbers) & present
            self._fault(column.name, unknown, array, "one of " + ", ".join(map(repr, texts)))
            numbers = np.where(unknown, np.float32(0), numbers)
        return np.where(present, numbers, np.float32(np.nan))

    def _missing_labels(self, column: LabelColumn, missing: NDArray[np.bool_]) -> None:
        if column.missing == "refuse":
            why = f"the label, column {column.name!r}, is missing; add it, or declare LabelColumn(missing='drop')"
            self.faults.append(_Fault(missing, lambda _: why))
        elif column.missing == "drop":
            self.dropped = missing if self.dropped is None else self.dropped | missing

    def _decoded(self, array: Any) -> Any:
        return array.dictionary_decode() if self.arrow.types.is_dictionary(array.type) else array

    # -- faults --------------------------------------------------------------------------------------------------------

    def _fault(self, name: str | None, rows: NDArray[np.bool_], array: Any, expected: str) -> None:
        """Record the malformed rows, if there are any."""
        if rows.any():
            self.faults.append(
                _Fault(rows, lambda i: f"column {name!r} holds {_abbreviated(array[i])}; expected {expected}")
            )

    def _refuse_type(self, name: str | None, kind: Any, expected: str, of_times: type[Any] | None = None) -> None:
        """of_times: the declaration that says what to read of times."""
        if of_times is not None and is_time(self.arrow, getattr(kind, "value_type", kind)):
            expected += f"; of times, declare what to read: {of_times.__name__}({name!r}, time='days'), e.g."
        raise SourceError(f"{self.where}: column {name!r} is of type {kind}; expected {expected}")


def decode(
    arrays: Mapping[str, Any],
    n: int,
    columns: Columns,
    *,
    where: str,
    row: Callable[[int], str],
    max_bad: int,
    known: Mapping[str, Bag] = MappingProxyType({}),
) -> Chunk:
    """Return the samples of n rows of Arrow arrays.

    where: the file or frame, for messages about types; row: returns the name of a row.
    max_bad: up to this many bad rows are skipped; the chunk reports at most one more.
    known: features whose ids need no decoding.
    """
    decoder = _Decoder(where, n)
    decoded = [
        (known[feature], []) if feature in known else decoder.bag(column, arrays)
        for feature, column in zip(columns.features, columns.ids, strict=True)
    ]
    bags, numbers = [bag for bag, _ in decoded], [of_items for _, of_items in decoded]
    decoder.faults += [_Fault(*fault) for fault in unaligned(columns, bags)]
    dense = decoder.dense({column: arrays[column.name] for column in columns.dense})
    labels = [decoder.label(column, arrays[column.name]) for column in columns.label]
    skipped_rows = np.zeros(n, bool) if decoder.dropped is None else decoder.dropped
    num_dropped = int(skipped_rows.sum())
    is_bad = np.logical_or.reduce([np.zeros(n, bool), *(fault.rows for fault in decoder.faults)])
    bad = np.flatnonzero(is_bad & ~skipped_rows)[: max_bad + 1]

    def describe_bad(number: int) -> str:
        i = int(bad[number])
        return f"{row(i)}: {next(fault.why for fault in decoder.faults if fault.rows[i])(i)}"

    left_out = partial(Chunk, num_bad=len(bad), describe_bad=describe_bad, num_dropped=num_dropped)
    if len(bad) > max_bad:
        return left_out(samples=_core.Samples(0, [], None, None))
    skipped_rows[bad] = True
    if skipped_rows.any():
        is_kept = pyarrow_for("reading data").array(~skipped_rows)
        kept_arrays = {name: array.filter(is_kept) for name, array in arrays.items()}
        known = {feature: _kept(bag, ~skipped_rows) for feature, bag in known.items()}
        num_kept = n - int(skipped_rows.sum())
        chunk = decode(kept_arrays, num_kept, columns, where=where, row=row, max_bad=0, known=known)
        return left_out(samples=chunk.samples, extra=chunk.extra, rows=partial(np.flatnonzero, ~skipped_rows))
    label = np.ascontiguousarray(np.stack(labels, axis=1)) if labels else None
    extra = {name: arrays[name] for name in columns.extra} | numbers_beside(columns, bags, numbers)
    return Chunk(samples=_core.Samples(n, list(bags), dense, label), extra=extra)


def _kept(bag: Bag, is_kept: NDArray[np.bool_]) -> Bag:
    """Return some samples of a bag without weights."""
    ids, offsets, _ = bag
    if offsets is None:
        return ids[is_kept], None, None
    lengths = np.diff(offsets)
    return ids[np.repeat(is_kept, lengths)], _offsets(lengths[is_kept]), None


def concatenated(arrays: list[Any]) -> Any:
    """Concatenate Arrow arrays."""
    return arrays[0] if len(arrays) == 1 else pyarrow_for("joining columns").concat_arrays(arrays)


def is_list(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def is_time(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_timestamp(kind) or arrow.types.is_date(kind))


def _is_number(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind))


def _is_string(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _floats(array: Any, dtype: type[Any] = np.float32) -> NDArray[Any]:
    """Return numbers as floats: NaN where missing, infinite where they are beyond the type."""
    arrow = pyarrow_for("reading data")
    kind = array.type
    if arrow.types.is_boolean(kind) or arrow.types.is_decimal(kind) or arrow.types.is_null(kind):
        array = array.cast(arrow.uint8() if arrow.types.is_boolean(kind) else arrow.float64())
    with np.errstate(over="ignore"):
        numbers = array.to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(numbers, dtype=dtype)


def _numpy(array: Any) -> NDArray[Any]:
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def _offsets(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the offsets of items of these lengths: where each begins, and where the last one ends."""
    return np.append(0, np.cumsum(lengths, dtype=np.int64)).astype(np.int64, copy=False)


def _abbreviated(scalar: Any) -> str:
    text = repr(scalar.as_py())
    return text if len(text) <= 60 else text[:60] + "..."


# -- what is computed from a column's values ------------------------------------------------------------------------


def _time_part(arrow: Any, array: Any, part: Time) -> Any:
    """Return what `part` names of timestamps or dates, as float64; null where there is none."""
    nanoseconds = arrow.types.is_timestamp(array.type) and array.type.unit == "ns"
    unit = "ns" if nanoseconds else "us"
    counts = array.cast(arrow.timestamp(unit, "UTC" if getattr(array.type, "tz", None) else None)).cast(arrow.int64())
    valid = counts.is_valid().to_numpy(zero_copy_only=False)
    ticks, second = counts.fill_null(0).to_numpy(), 10**9 if nanoseconds else 10**6
    if part in _SECONDS:
        length = _SECONDS[part] * second
        numbers = ticks // length + (ticks % length) / length  # exact to the tick, as a quotient of floats is not
    elif part == "hour_of_day":
        numbers = ticks // (3600 * second) % 24
    else:
        numbers = (ticks // (86400 * second) + _EPOCH_WEEKDAY) % 7
    return arrow.array(numbers.astype(np.float64), mask=~valid)


def _buckets(arrow: Any, array: Any, boundaries: Sequence[float]) -> Any:
    """Return how many of the boundaries are at most each number, as int64; null where there is no number."""
    numbers = array.cast(arrow.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
    counts = np.searchsorted(np.array(boundaries), numbers, side="right")
    return arrow.array(counts.astype(np.int64), mask=np.isnan(numbers))


def _crossed_ids(columns: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return one id for the ids of each line; another order gives other ids."""
    ids = columns[0]
    for other in columns[1:]:
        ids = hash_integers(hash_integers(ids) ^ other)
    return ids
