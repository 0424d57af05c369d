"""Dense columns of texts and of lists: Parquet, Arrow files, frames and dicts yield what text files yield."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

import satrap
from clicks import write_table
from satrap import _core
from satrap.data.source import Source

NUMBERS = st.one_of(
    st.floats(width=32, allow_infinity=False).map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(["", "nan", "NaN", "+1", "1e3", "0.1e-50", ".5", "5.", "-0"]),
)
MALFORMED = st.sampled_from(["x", "1,5", " 1", "1 ", "inf", "-inf", "1e99", "0x10", "--1", "+-1", "é"])


def written(kind: str, table: pa.Table, folder: Path, **options: Any) -> Source:
    """Return a source of this table, in one of the forms that have types."""
    if kind in ("parquet", "arrow"):
        path = folder / f"a.{kind}"
        write_table(path, table, rows=5)
        return (satrap.Parquet if kind == "parquet" else satrap.Arrow)(path, block_rows=5, **options)
    if kind == "items":
        return satrap.IterableSource(
            [table.slice(begin, 5).to_pydict() for begin in range(0, len(table), 5)], **options
        )
    frames: dict[str, Callable[[], Any]] = {
        "table": lambda: table,
        "pandas": lambda: table.to_pandas(types_mapper=pd.ArrowDtype),
        "polars": lambda: pl.from_arrow(table.take(list(range(len(table))))),
        "dict": lambda: table.to_pydict(),
    }
    return satrap.Frame(frames[kind](), block_rows=5, **options)


KINDS = ["parquet", "arrow", "items", "table", "pandas", "polars", "dict"]


def content(data: Source) -> tuple[list[int], bytes, int]:
    """Return the ids, the bits of the dense numbers, and the number of malformed rows."""
    batches = data.batches(["a"])
    found = list(batches)
    dense = b"".join(np.asarray(inputs.dense).tobytes() for inputs in found)
    return [int(i) for inputs in found for i in inputs.values], dense, batches.skipped_rows.malformed


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 5)
@given(st.lists(st.one_of(NUMBERS, NUMBERS, st.none(), MALFORMED), min_size=1, max_size=20), st.booleans())
def test_texts_are_numbers_as_in_csv(kind: str, tmp_path: Path, texts: list[str | None], log1p: bool) -> None:
    column = satrap.DenseColumn("x", missing=-3.5, log1p=log1p)
    options: dict[str, Any] = {"dense": [column, "y"], "max_bad_rows": 100, "batch_size": 7}
    ids = list(range(len(texts)))
    lines = [f'{i},"{"" if text is None else text}",{i}' for i, text in zip(ids, texts, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["a,x,y", *lines, ""]))
    expected = content(satrap.CSV(tmp_path / "a.csv", ids={"a": satrap.IdColumn(kind="integer")}, **options))
    table = pa.table({"a": ids, "x": pa.array(texts, pa.string()), "y": ids})
    assert content(written(kind, table, tmp_path, **options)) == expected


@pytest.mark.parametrize("text_type", [pa.string(), pa.large_string(), pa.string_view()])
def test_every_type_of_text_is_a_number(text_type: Any) -> None:
    texts = pa.array(["9", "3.5", None, "-1", "", "7"], pa.string()).cast(text_type).slice(1, 4)
    for column in (texts, pa.array(texts.to_pylist()).dictionary_encode()):
        (inputs,) = satrap.Frame(pa.table({"a": range(4), "x": column}), dense="x").batches(["a"])
        assert np.asarray(inputs.dense).tolist() == [[3.5], [0], [-1], [0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_text_is_named_with_its_row(kind: str, tmp_path: Path) -> None:
    table = pa.table({"a": range(12), "x": [str(i) for i in range(7)] + ["1,5", "2", "?", "x", "3"]})
    data = written(kind, table, tmp_path, dense="x")
    row = {"items": "item 1, sample 2", "arrow": "record batch 1, row 3"}.get(kind, "row 8")
    expected = "expected a number, or a feature 'x' for strings; fix the row"
    with pytest.raises(satrap.SourceError, match=rf"{row}: column 'x' holds '1,5'; {expected}"):
        list(data.batches(["a"]))
    assert content(data.replace(max_bad_rows=3))[::2] == ([*range(7), 8, 11], 3)


# -- lists -------------------------------------------------------------------------------------------------------------


LISTS = {
    "list": pa.list_(pa.float32()),
    "large list": pa.large_list(pa.float64()),
    "list of integers": pa.list_(pa.int16()),
    "fixed": pa.list_(pa.float64(), 3),
    "list of texts": pa.list_(pa.string()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("list_type", LISTS)
def test_lists_are_as_many_numbers(list_type: str, kind: str, tmp_path: Path) -> None:
    rows: list[Any] = [[i, None, -i] if i % 3 else [i, 2 * i, 7] for i in range(21)]
    rows[4] = rows[20] = None
    expected = [[-1.0] * 3 if row is None else [-1.0 if x is None else float(x) for x in row] for row in rows]
    if list_type == "list of texts":
        rows = [None if row is None else [None if x is None else str(x) for x in row] for row in rows]
    columns = [range(21), pa.array(rows, LISTS[list_type]), range(21)]
    table = pa.table(dict(zip(("a", "x", "y"), columns, strict=True)))
    # What was sliced off must not be read.
    table = pa.concat_tables([table.slice(20), table, table.slice(0, 1)]).combine_chunks().slice(1, 21)
    data = written(kind, table, tmp_path, dense=["y", satrap.DenseColumn("x", missing=-1, width=3)], batch_size=4)
    found = list(itertools.chain(*(np.asarray(inputs.dense).tolist() for inputs in data.batches(["a"]))))
    assert found == [[float(i), *row] for i, row in enumerate(expected)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_another_length_is_named_with_its_row(kind: str, tmp_path: Path) -> None:
    rows: list[Any] = [[float(i), 0.5] for i in range(12)]
    rows[7], rows[9], rows[10] = [1.0], [1.0, 2.0, 3.0], []
    data = written(kind, pa.table({"a": range(12), "x": rows}), tmp_path, dense=satrap.DenseColumn("x", width=2))
    row = {"items": "item 1, sample 2", "arrow": "record batch 1, row 3"}.get(kind, "row 8")
    message = rf"{row}: column 'x' holds .*1.0.*; expected a list of 2 numbers; fix the row, or allow more"
    with pytest.raises(satrap.SourceError, match=message):
        list(data.batches(["a"]))
    ids, dense, num_bad = content(data.replace(max_bad_rows=3))
    assert (ids, num_bad) == ([*range(7), 8, 11], 3)
    assert np.frombuffer(dense, np.float32).reshape(-1, 2).tolist() == [[i, 0.5] for i in ids]


def test_a_fixed_size_needs_no_width() -> None:
    for column in (np.ones((3, 2)), pa.array([[1, 1]] * 3, pa.list_(pa.int8(), 2))):
        for dense in ("x", satrap.DenseColumn("x", width=2)):
            (inputs,) = satrap.Frame({"a": range(3), "x": column}, dense=dense).batches(["a"])
            assert np.asarray(inputs.dense).tolist() == [[1, 1]] * 3


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "tables", "dicts"])
def test_lists_of_another_length_elsewhere_are_refused(kind: str, batch_size: int, tmp_path: Path) -> None:
    tables = [pa.table({"a": [1, 2], "x": pa.array([[0.5] * n] * 2, pa.list_(pa.float64(), n))}) for n in (2, 3)]
    if kind in ("parquet", "arrow"):
        for i, table in enumerate(tables):
            write_table(tmp_path / f"{i}.{kind}", table)
        data: Source = (satrap.Parquet if kind == "parquet" else satrap.Arrow)(tmp_path, dense="x")
    else:
        dicts = [{"a": [1, 2], "x": np.ones((2, n))} for n in (2, 3)]
        data = satrap.IterableSource(tables if kind == "tables" else dicts, dense="x", batch_size=batch_size)
    message = r"1.*: column 'x' has 3 numbers in each row, and .*0.* has 2 numbers in each row; the rows of a batch"
    with pytest.raises(satrap.SourceError, match=message):
        list(data.replace(batch_size=batch_size).batches(["a"]))


def test_widths_are_checked() -> None:
    with pytest.raises(satrap.ConfigError, match="dense column 'x': width is 0"):
        satrap.DenseColumn("x", width=0)
    with pytest.raises(satrap.ConfigError, match=r"CSV: .*'x'.* has a width; expected none, since a field"):
        satrap.CSV("x", dense=["y", satrap.DenseColumn("x", width=2)])
    column = satrap.DenseColumn("x", width=2)
    assert satrap.DenseColumn.from_dict(column.to_dict()) == column


@pytest.mark.parametrize("offsets", [[], [-1, 2], [0, 2, 1], [0, 4]])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_wrong_offsets_of_texts_are_refused(offsets: list[int], dtype: Any) -> None:
    with pytest.raises(satrap.InputError, match="offsets"):
        _core.parse_numbers(np.array(offsets, dtype), np.frombuffer(b"123", np.uint8))


@pytest.mark.parametrize(("line", "column"), [("0, 13,5", "age"), (" 1,13,5", "y"), ("0,13,5\t", "a")])
def test_blanks_around_a_number(line: str, column: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"y,age,a\n1,2,3\n{line}\n")
    ids = {"a": satrap.IdColumn("a", kind="integer")}
    data = satrap.CSV(tmp_path / "a.csv", dense="age", label="y", ids=ids)
    message = rf"line 3: column '{column}' holds .*; expected a number without blanks: give strip=True"
    with pytest.raises(satrap.SourceError, match=message):
        list(data.batches(["a"]))
    assert sum(batch.batch_size for batch in data.replace(strip=True).batches(["a"])) == 2


def test_blanks_within_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age\n 1 3\n")
    with pytest.raises(satrap.SourceError, match=r"holds ' 1 3'; expected a number, or missing=\(' 1 3',\)"):
        list(satrap.CSV(tmp_path / "a.csv", dense="age").batches([]))
