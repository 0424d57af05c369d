"""Frames as sources: pandas and polars DataFrames, Hugging Face datasets, Arrow tables, and dicts of arrays.

A frame is converted to Arrow arrays one range of rows at a time, so memory never holds it twice; polars and most NumPy
columns are not copied at all, and a Hugging Face dataset stays in its files. None of these packages is imported here.
"""

import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import describe, kind_of
from satrap.data.block import Block
from satrap.data.inputs import Position
from satrap.data.source import RowBlockSource
from satrap.data.table_rows import SameKinds, TableDecoder, TableRows, kinds_of, table_blocks
from satrap.errors import ConfigError, SourceError

_LONGEST_DECIMAL = 38  # digits, in Arrow


@dataclass(frozen=True, eq=False, repr=False)
class Frame(RowBlockSource):
    """A DataFrame of pandas or polars, a Hugging Face Dataset, an Arrow table, or a dict of arrays of equal length.

    data: the frame. The selection of a Dataset (`select`, `filter`, `shuffle`) is applied as rows are read. In a dict,
        a column is an array of one or (for lists of one length, or several dense numbers) two dimensions, a list, or
        (values, offsets) for lists of ids.
    """

    data: Any = field(repr=False, compare=False)

    __eq__ = object.__eq__  # rows in memory are not compared
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = type(self.data).__name__
        if kind == "LazyFrame":
            raise ConfigError("Frame: found a LazyFrame; expected rows: call .collect(), or use satrap.IterableSource")
        if kind in ("DatasetDict", "IterableDatasetDict"):
            raise ConfigError(f"Frame: found a {kind} of {list(self.data)}; expected one split: give data['train']")
        if kind == "IterableDataset":
            raise ConfigError(
                "Frame: found an IterableDataset, whose rows have no numbers; give "
                "satrap.IterableSource(data, samples=True, batch_size=...)"
            )
        if isinstance(self.data, str | os.PathLike):
            raise ConfigError(
                f"Frame: found {describe(self.data)}; expected rows in memory. To read files, use satrap.Parquet, "
                "satrap.Arrow, satrap.CSV, JSON, TFRecord or Criteo"
            )
        if not (_is_frame(self.data) or _is_dataset(self.data) or isinstance(self.data, Mapping)):
            raise ConfigError(
                f"Frame: found {describe(self.data)}; expected a DataFrame, a Dataset, an Arrow table or a dict of "
                "arrays"
            )

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        arrow = pyarrow_for("reading frames")
        if isinstance(self.data, arrow.Table | arrow.RecordBatch):
            table = arrow.table(self.data)
            return table_blocks(table, columns, self.block_rows, self.max_bad_rows, "the frame")
        rows = (_DatasetRows if _is_dataset(self.data) else _FrameRows)(self.data, columns)
        decoder = TableDecoder.for_schema(rows.table(0, 0).schema, columns, "the frame", self.max_bad_rows)

        same = SameKinds()

        def read(begin: int, end: int) -> Iterator[TableRows]:
            table = rows.table(begin, end)
            kinds = kinds_of({name: table.schema.field(name).type for name in decoder.names}, columns)
            same.require(f"the frame, rows {begin + 1} to {end}", kinds)
            yield TableRows(decoder, table, begin)

        ranges = [(begin, min(rows.n, begin + self.block_rows)) for begin in range(0, rows.n, self.block_rows)]
        return [Block(read=partial(read, *bounds), is_exact=True, num_rows=bounds[1] - bounds[0]) for bounds in ranges]


class _FrameRows:
    """The rows of a frame or of a dict of columns, as Arrow tables."""

    def __init__(self, data: Any, columns: Columns) -> None:
        names = list(data if isinstance(data, Mapping) else data.columns)
        columns.check_present("the frame", [str(name) for name in names])
        keys = {str(name): name for name in names}  # pandas also has numbers as column names
        self._data = {name: data[keys[name]] for name in columns.required()}
        lengths = {name: column_length("the frame", name, value) for name, value in self._data.items()}
        if len(set(lengths.values())) != 1:
            raise SourceError(f"the frame has columns of different lengths: {lengths}; expected one length")
        self.n = next(iter(lengths.values()))

    def table(self, begin: int, end: int) -> Any:
        arrays = {name: as_arrow("the frame", name, value, begin, end) for name, value in self._data.items()}
        return pyarrow_for("reading frames").table(arrays)


class _DatasetRows:
    """The rows of a Hugging Face dataset, as Arrow tables."""

    def __init__(self, data: Any, columns: Columns) -> None:
        columns.check_present("the frame", data.column_names)
        self._data = data.select_columns(list(columns.required())).with_format("arrow")
        self.n = len(data)

    def table(self, begin: int, end: int) -> Any:
        return self._data[begin:end]


def column_length(where: str, name: str, value: Any) -> int:
    """Return the number of samples of a column: an array, or (values, offsets) with one offset more than samples."""
    offsets = value[1] if isinstance(value, tuple) and len(value) > 1 else None
    try:
        return len(value) if not isinstance(offsets, Sized) else len(offsets) - 1
    except (TypeError, RuntimeError) as error:  # a tensor of tensors has no length
        raise SourceError(
            f"{where}: column {name!r} is {kind_of(value)} without a length ({error}); expected an array, a tensor or "
            "a list with a value for each sample, or single samples of satrap.IterableSource(samples=True)"
        ) from error


def as_arrow(where: str, name: str, value: Any, begin: int = 0, end: int | None = None) -> Any:
    """Return some samples of a column as an Arrow array.

    The column may be an array of one or two dimensions, a torch tensor, an Arrow array, a list, a pandas or polars
    Series, or (values, offsets).
    """
    arrow = pyarrow_for("reading columns")
    end = column_length(where, name, value) if end is None else end
    try:
        if isinstance(value, tuple):
            if len(value) != 2:
                raise SourceError(
                    f"{where}: column {name!r} has {len(value)} arrays; expected (values, offsets); put weights in "
                    "another column and name it in weights="
                )
            offsets = checked_offsets(where, name, as_numpy(value[1]), len(value[0]))[begin : end + 1]
            values = as_arrow(where, name, value[0], int(offsets[0]), int(offsets[-1]))
            return arrow.LargeListArray.from_arrays(arrow.array(offsets - offsets[0]), values)
        if isinstance(value, arrow.Array | arrow.ChunkedArray):
            part = value.slice(begin, end - begin)
            return part.combine_chunks() if isinstance(part, arrow.ChunkedArray) else part
        if hasattr(value, "to_arrow"):  # a polars Series
            return value.slice(begin, end - begin).to_arrow()
        value = as_numpy(value)
        if isinstance(value, np.ndarray) and value.ndim not in (1, 2):
            raise SourceError(f"{where}: column {name!r} has the shape {value.shape}; expected one or two dimensions")
        part = value.iloc[begin:end] if hasattr(value, "iloc") else value[begin:end]
        if isinstance(part, np.ndarray) and part.ndim == 2:
            flat = arrow.array(part.reshape(-1))
            return arrow.FixedSizeListArray.from_arrays(flat, part.shape[1])
        return _inferred(arrow, part)
    except (arrow.ArrowException, TypeError, ValueError, OverflowError, IndexError) as error:
        if isinstance(error, SourceError):
            raise
        kind = type(value).__name__
        raise SourceError(
            f"{where}: column {name!r} is a {kind} that cannot be read ({error}); expected values of one type"
        ) from error


def checked_offsets(where: str, name: str, offsets: Any, num_values: int) -> NDArray[np.int64]:
    """Return the offsets of a column; raise if they fall, or leave its values."""
    given = np.asarray(offsets)
    if given.ndim != 1 or len(given) == 0 or given.dtype.kind not in "iu":
        raise SourceError(
            f"{where}: column {name!r} has offsets of type {given.dtype} and shape {given.shape}; expected integers, "
            "one more than samples"
        )
    bounds = given.astype(np.int64)
    if bounds[0] < 0 or np.any(bounds[1:] < bounds[:-1]) or bounds[-1] > num_values:
        raise SourceError(
            f"{where}: column {name!r} has offsets that decrease or exceed its {num_values} values; expected them to "
            "rise within those"
        )
    return bounds


def _inferred(arrow: Any, values: Any) -> Any:
    try:
        return arrow.array(values)
    except OverflowError:  # integers beyond int64, perhaps in lists
        lists = any(isinstance(value, Sequence | np.ndarray) for value in values)
        kinds = [arrow.list_(kind) if lists else kind for kind in (arrow.uint64(), arrow.decimal128(_LONGEST_DECIMAL))]
        try:
            return arrow.array(values, kinds[0])
        except OverflowError:  # negative ones, too, or some beyond uint64
            return arrow.array(values, kinds[1])
    except arrow.ArrowException:
        if not any(map(_is_tensor, values)):
            raise
        return _inferred(arrow, [as_numpy(value)[()] if _is_tensor(value) else value for value in values])


def as_numpy(value: Any) -> Any:
    """Return a torch tensor as a NumPy array, without importing torch; return anything else unchanged."""
    return value.detach().cpu().numpy() if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "cpu")


def _is_frame(data: Any) -> bool:
    return hasattr(data, "columns") and (hasattr(data, "iloc") or hasattr(data, "to_arrow") or hasattr(data, "schema"))


def _is_dataset(data: Any) -> bool:
    return hasattr(data, "column_names") and hasattr(data, "select_columns") and hasattr(data, "with_format")
