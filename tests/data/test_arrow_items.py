"""Arrow data of other libraries as items of an iterable, and arrays of ids, which are read without Arrow."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import clicks
from satrap.config.columns import LabelColumn
from satrap.data.frame import Frame
from satrap.data.hashing import hash_strings
from satrap.data.iterable import IterableSource
from satrap.errors import SourceError


class ArrowStream:
    """What a library exports by Arrow's C interface alone."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(schema)


def arrow_items(samples: list[Any], folder: Path) -> dict[str, Any]:
    table = clicks.table(samples)
    pq.write_table(table, folder / "a.parquet", row_group_size=40)
    lazy = pl.scan_parquet(folder / "a.parquet")
    return {
        "record batches": table.to_batches(max_chunksize=33),
        "tables": [table.slice(0, 50), table.slice(50, 0), table.slice(50)],
        "a table": table,
        "a generator": (batch for batch in table.to_batches(max_chunksize=33)),
        "a reader": table.to_reader(max_chunksize=33),
        "a function": lambda: iter(table.to_batches(max_chunksize=41)),
        "a stream": ArrowStream(table),
        "a dataset": pyarrow.dataset.dataset(folder / "a.parquet"),
        "data frames": [pl.from_arrow(table.slice(begin, 30)) for begin in range(0, 150, 30)],
        "a lazy frame": lazy,
        "a relation": duckdb.sql(f"SELECT * FROM '{folder / 'a.parquet'}'"),
    }


@pytest.mark.parametrize("kind", arrow_items(clicks.make(150, 0), Path(tempfile.mkdtemp())))
def test_arrow_data_is_read_split_and_resumed(kind: str, tmp_path: Path, seed: int) -> None:
    samples = clicks.make(150, seed)
    data = IterableSource(arrow_items(samples, tmp_path)[kind], batch_size=32, **clicks.OPTIONS)
    batches = list(data.batches(clicks.FEATURES))
    expected = [clicks.expected(sample) for sample in samples]
    assert [each for batch in batches for each in clicks.samples_in(batch)] == expected
    if kind in ("a generator", "a reader"):
        with pytest.raises(SourceError, match="was read before"):
            data.batches(clicks.FEATURES)
        return
    assert clicks.read(data, position=batches[1].position) == expected[64:]
    parts = [clicks.read(data, rank=rank, world_size=2) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(expected)


@pytest.mark.parametrize(
    "kind",
    [
        pl.String,
        pl.Binary,
        pl.Categorical,
        pl.Enum(["a", "b", "c"]),
        pl.List(pl.String),
        pl.List(pl.Categorical),
        pl.Array(pl.String, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["frame", "lazy"])
def test_strings_of_polars_are_read_in_every_type(kind: Any, form: str) -> None:
    """Also where a row is left out."""
    texts = ["a", "b", "c", "b"]
    values: list[Any] = [[text] for text in texts] if str(kind).startswith(("List", "Array")) else texts
    values = [text.encode() for text in texts] if kind == pl.Binary else values
    frame = pl.DataFrame({"a": pl.Series(values, dtype=kind)})
    frame = frame.with_columns(y=pl.Series([0, 1, None, 1]))
    data = IterableSource([frame] if form == "frame" else frame.lazy(), label=LabelColumn("y", missing="drop"))
    (batch,) = data.batches(["a"])
    np.testing.assert_array_equal(batch.values, hash_strings(["a", "b", "b"]))


def test_a_data_frame_may_have_any_names() -> None:
    """TorchRec's batches are recognized by such attributes."""
    names = ["keys", "values", "offsets", "dense_features", "sparse_features", "labels"]
    for table in (pd.DataFrame({name: [0, 1] for name in names}), pl.DataFrame({name: [0, 1] for name in names})):
        (batch,) = IterableSource([table], label="labels").batches(["offsets"])
        assert np.asarray(batch.label).tolist() == batch.values.tolist() == [0, 1]


def test_bad_arrow_data_is_named() -> None:
    with pytest.raises(SourceError, match=r"item 0: cannot be read .*pli128"):
        list(IterableSource([pl.DataFrame({"a": [1]}, schema={"a": pl.Int128})]).batches(["a"]))
    table = pa.table({"a": [1, 2], "y": [0.0, 7.0]})
    with pytest.raises(SourceError, match="item 1 has no column 'b'"):
        list(IterableSource([pa.table({"b": [1]}), table]).batches(["b"]))
    with pytest.raises(SourceError, match=r"item 0, row 2: column 'y' holds 7\.0; expected 0 or 1"):
        list(IterableSource([table], label="y").batches(["a"]))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_ids_in_arrays_are_those_of_lists(dtype: Any, rng: np.random.Generator) -> None:
    """Arrays of 64-bit ids are read without Arrow: also a part of larger ones, with a stride, and beside bad rows."""
    lengths = rng.integers(0, 4, 9)
    offsets = 2 + np.append(0, np.cumsum(lengths))
    values = rng.integers(0, 2**63, 2 * (offsets[-1] + 3)).astype(dtype)[::2]
    single = rng.integers(-9, 9, 9).astype(np.int64)
    label = [0, 1, 7, 0, 1, 1, None, 0, 5]  # three rows are left out
    fast = {"bag": (values, offsets), "one": single, "label": label, "n": np.arange(9)}
    bags = [values[begin:end].tolist() for begin, end in pairwise(offsets)]
    slow = {"bag": bags, "one": single.tolist(), "label": label, "n": list(range(9))}
    found, expected = (
        list(IterableSource([item], label="label", extra="n", max_bad_rows=3).batches(["bag", "one", "n"]))
        for item in (fast, slow)
    )
    assert [each.extra["n"].to_pylist() for each in found] == [[0, 1, 3, 4, 5, 7]]
    for name in ("values", "offsets", "label"):
        np.testing.assert_array_equal(getattr(found[0], name), getattr(expected[0], name))


@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_masked_values_of_an_array_are_missing(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    mask = rng.random(shape) < 0.4
    ids = np.ma.array(rng.integers(0, 99, shape), mask=mask)
    dense = np.ma.array(rng.random(shape), mask=mask)
    for read in (lambda columns: Frame(columns, dense="x"), lambda columns: IterableSource([columns], dense="x")):
        (found,) = read({"a": ids, "x": dense}).batches(["a"])
        (expected,) = read({"a": ids.tolist(), "x": dense.filled(0.0)}).batches(["a"])
        for name in ("values", "offsets", "dense"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("samples", [False, True])
def test_integers_of_a_list_are_ids_from_int64_to_uint64(samples: bool) -> None:
    """A table's `write` takes the same; Arrow infers no type for a list of negative numbers and some from 2**63."""

    def ids(numbers: list[int]) -> list[int]:
        items = [{"a": number} for number in numbers] if samples else [{"a": numbers}]
        (inputs,) = IterableSource(items, samples=samples, batch_size=len(numbers)).batches(["a"])
        return [int(number) for number in inputs.values]

    for numbers in ([-1, 2**63 + 4], [-(2**63), 2**64 - 1], [1, 2**63], [-1, 1]):
        assert ids(numbers) == [number % 2**64 for number in numbers]
    for outside in (2**64, -(2**63) - 1):
        message = rf"column 'a' holds .*{outside}.*; expected a whole number from -2\*\*63 to 2\*\*64 - 1"
        with pytest.raises(SourceError, match=message):
            ids([1, outside])
