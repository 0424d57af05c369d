"""Frames in memory as sources: pandas and polars DataFrames, Arrow tables, and dicts of arrays by column name.

A frame is converted to Arrow arrays one range of rows at a time, so memory never holds it twice; polars and most NumPy
columns are not copied at all. Neither pandas nor polars is imported here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_integer, describe, set_field
from satrap.data.arrow import table_blocks
from satrap.data.block import Block, Chunk
from satrap.data.decode import check_types, decode_table
from satrap.data.inputs import Position
from satrap.data.source import Source
from satrap.errors import ConfigError, SourceError


@dataclass(frozen=True, eq=False)
class Frame(Source):
    """A DataFrame of pandas or polars, an Arrow table, or a dict of arrays of equal length."""

    data: Any = field(repr=False, compare=False)
    """The frame. In a dict, a column is an array of one or (for lists of one length, or several dense numbers) two
    dimensions, a list, or (values, offsets) for lists of ids."""
    _: KW_ONLY
    block_rows: int = 32768
    """How many rows are read at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        set_field(self, "block_rows", check_integer("Frame", "block_rows", self.block_rows, 1, 1 << 30))
        if type(self.data).__name__ == "LazyFrame":
            raise ConfigError("Frame: found a LazyFrame; expected rows: call .collect()")
        if not _is_frame(self.data) and not isinstance(self.data, Mapping):
            raise ConfigError(
                f"Frame: found {describe(self.data)}; expected a DataFrame, an Arrow table or a dict of arrays"
            )

    def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
        arrow = pyarrow_for("reading frames")
        if isinstance(self.data, arrow.Table):
            return table_blocks(self.data, columns, self.block_rows, self.max_bad_rows, "the frame")
        rows = _FrameRows(self.data, columns)
        check_types(rows.table(0, 0).schema, columns, "the frame")
        return [
            _FrameBlock(rows, columns, begin, min(rows.n, begin + self.block_rows), self.max_bad_rows)
            for begin in range(0, rows.n, self.block_rows)
        ]


class _FrameRows:
    """The rows of a frame or of a dict of columns, as Arrow tables."""

    def __init__(self, data: Any, columns: Columns) -> None:
        names = list(data if isinstance(data, Mapping) else data.columns)
        columns.check_present("the frame", [str(name) for name in names])
        keys = {str(name): name for name in names}  # pandas also has numbers as column names
        self._data = {name: data[keys[name]] for name in columns.required()}
        lengths = {name: column_length(value) for name, value in self._data.items()}
        if len(set(lengths.values())) != 1:
            raise SourceError(f"the frame has columns of different lengths: {lengths}; expected one length")
        self.n = next(iter(lengths.values()))

    def table(self, begin: int, end: int) -> Any:
        arrays = {name: as_arrow("the frame", name, value, begin, end) for name, value in self._data.items()}
        return pyarrow_for("reading frames").table(arrays)


class _FrameBlock(Block):
    """A range of a frame's rows."""

    is_exact = True

    def __init__(self, rows: _FrameRows, columns: Columns, begin: int, end: int, max_bad: int) -> None:
        self._rows, self._columns, self._max_bad = rows, columns, max_bad
        self._begin, self._end = begin, end
        self.num_rows = end - begin

    def read(self) -> Iterator[tuple[int, int]]:
        yield self._begin, self._end

    def count_rows(self, raw: tuple[int, int]) -> int:
        return raw[1] - raw[0]

    def slice(self, raw: tuple[int, int], begin: int, end: int) -> tuple[int, int]:
        return raw[0] + begin, raw[0] + end

    def decode(self, raw: tuple[int, int]) -> Chunk:
        begin, end = raw
        return decode_table(self._rows.table(begin, end), self._columns, "the frame", begin, self._max_bad)


def column_length(value: Any) -> int:
    """Return the number of samples of a column: one less than offsets, if it is (values, offsets)."""
    return len(value[1]) - 1 if isinstance(value, tuple) else len(value)


def as_arrow(where: str, name: str, value: Any, begin: int = 0, end: int | None = None) -> Any:
    """Return some samples of a column as an Arrow array.

    The column may be an array of one or two dimensions, a torch tensor, an Arrow array, a list, a pandas or polars
    Series, or (values, offsets).
    """
    arrow = pyarrow_for("reading columns")
    end = column_length(value) if end is None else end
    try:
        if isinstance(value, tuple):
            if len(value) != 2:
                raise SourceError(
                    f"{where}: column {name!r} has {len(value)} arrays; expected (values, offsets); put weights in "
                    "another column and name it in weights="
                )
            offsets = np.asarray(as_numpy(value[1]), np.int64)[begin : end + 1]
            if offsets[0] < 0 or np.any(np.diff(offsets) < 0) or offsets[-1] > len(value[0]):
                raise SourceError(
                    f"{where}: column {name!r} has offsets that decrease or exceed its {len(value[0])} values; "
                    "expected them to rise from 0 to that number"
                )
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
            flat = arrow.array(np.ascontiguousarray(part).reshape(-1))
            return arrow.FixedSizeListArray.from_arrays(flat, part.shape[1])
        return _inferred(arrow, part)
    except (arrow.ArrowException, TypeError, ValueError, OverflowError, IndexError) as error:
        if isinstance(error, SourceError):
            raise
        kind = type(value).__name__
        raise SourceError(f"{where}: column {name!r} is a {kind} that cannot be read ({error})") from error


def _inferred(arrow: Any, values: Any) -> Any:
    try:
        return arrow.array(values)
    except OverflowError:  # integers beyond int64, perhaps in lists
        lists = any(isinstance(each, Sequence | np.ndarray) for each in values)
        return arrow.array(values, arrow.list_(arrow.uint64()) if lists else arrow.uint64())


def as_numpy(value: Any) -> Any:
    """Return a torch tensor as a NumPy array, without importing torch; return anything else unchanged."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return value.detach().cpu().numpy()
    return value


def _is_frame(data: Any) -> bool:
    return hasattr(data, "columns") and (hasattr(data, "iloc") or hasattr(data, "to_arrow") or hasattr(data, "schema"))
