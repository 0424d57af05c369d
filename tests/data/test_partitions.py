"""Hive partitions: columns in the names of folders are columns of every row of the files below."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import satrap
from clicks import write_table
from satrap.data.hashing import hash_strings
from satrap.data.source import FileSource

Rows = list[dict[str, Any]]
KINDS: dict[str, type[FileSource]] = {"parquet": satrap.Parquet, "arrow": satrap.Arrow, "csv": satrap.CSV}


def write(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(path, table, rows=7)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clicks(kind: str, tmp_path: Path) -> Rows:
    """Write files of 20 rows, by day and hour; return all rows in the order of the paths."""
    rows: Rows = []
    for day in ("2024-01-01", "2024-01-02", "__HIVE_DEFAULT_PARTITION__"):
        for hour in ("00", "07", "12"):
            ids = np.arange(len(rows), len(rows) + 20)
            write(pa.table({"item": ids, "x": ids * 0.5}), tmp_path / f"data/day={day}/hour={hour}/0.{kind}")
            rows += [{"item": int(i), "day": None if day[0] == "_" else day, "hour": int(hour)} for i in ids]
    return rows


def samples_of(data: FileSource, features: list[str], **options: Any) -> list[tuple[Any, ...]]:
    """Return (ids of all features, dense, label) of each sample; every bag has at most one id."""
    samples: list[tuple[Any, ...]] = []
    for inputs in data.batches(features, **options):
        n, values = inputs.batch_size, inputs.values.tolist()
        offsets = range(len(values) + 1) if inputs.offsets is None else inputs.offsets.tolist()
        bags = [values[begin:end] for begin, end in pairwise(offsets)]
        dense = [()] * n if inputs.dense is None else map(tuple, inputs.dense.tolist())
        label = [None] * n if inputs.label is None else inputs.label.tolist()
        columns = [bags[f * n : (f + 1) * n] for f in range(len(features))]
        samples += zip(zip(*columns, strict=True), dense, label, strict=True)
    return samples


def hashed(text: str | None) -> list[int]:
    return [] if text is None else hash_strings([text]).tolist()


@pytest.mark.parametrize("path", ["data", "data/", "data/*/*/*", "data/**/0.*", "data/day=*"])
def test_partitions_are_ids_numbers_and_labels(kind: str, clicks: Rows, path: str, tmp_path: Path) -> None:
    if path == "data/day=*":
        path = "data/day=2024-01-02/hour=07/*"  # part of the folders
        clicks = [row for row in clicks if (row["day"], row["hour"]) == ("2024-01-02", 7)]
    data = KINDS[kind](
        tmp_path / path,
        ids={"item": satrap.IdColumn(kind="integer"), "hour": satrap.IdColumn(kind="integer")},
        dense=["hour", "x"],
        label=satrap.LabelColumn("day", true="2024-01-02", missing=0),
        batch_size=16,
        extra="day",
    )
    dense = [(row["hour"], row["item"] / 2) for row in clicks]
    bags = [([row["item"]], hashed(row["day"]), [row["hour"]]) for row in clicks]
    labels = [float(row["day"] == "2024-01-02") for row in clicks]
    unlabelled = data.replace(label=None)
    assert samples_of(unlabelled, ["item", "day", "hour"]) == [*zip(bags, dense, [None] * len(clicks), strict=True)]
    assert samples_of(data, ["item", "hour"]) == [*zip([(bag[0], bag[2]) for bag in bags], dense, labels, strict=True)]
    late = data.replace(dense=(), label=satrap.LabelColumn("hour", above=6)).batches(["item"])
    assert [float(label) for inputs in late for label in inputs.label] == [float(row["hour"] > 6) for row in clicks]  # type: ignore[union-attr]
    extra = [day for inputs in data.batches(["item"]) for day in inputs.extra["day"].to_pylist()]
    assert extra == [row["day"] for row in clicks]


@pytest.mark.parametrize("shuffle", [False, True])
def test_partitions_change_neither_order_nor_positions(kind: str, clicks: Rows, shuffle: bool, tmp_path: Path) -> None:
    data = KINDS[kind](tmp_path / "data", batch_size=16, shuffle=shuffle, epochs=2)
    with_day = samples_of(data, ["item", "day"])
    assert [(sample[0][0],) for sample in with_day] == [sample[0] for sample in samples_of(data, ["item"])]
    whole = list(data.batches(["item", "day"]))
    assert [each.position for each in whole] == [each.position for each in data.batches(["item"])]
    assert samples_of(data, ["item", "day"], position=whole[6].position) == with_day[7 * 16 :]
    parts = [samples_of(data, ["item", "day"], rank=rank, world_size=2) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(with_day)


def test_a_column_that_is_declared_as_text_keeps_its_text(kind: str, clicks: Rows, tmp_path: Path) -> None:
    ids = {"item": satrap.IdColumn(kind="integer"), "hour": satrap.IdColumn(kind="string")}
    data = KINDS[kind](tmp_path / "data", ids=ids)
    assert samples_of(data, ["hour"]) == [((hashed(f"{row['hour']:02}"),), (), None) for row in clicks]
    data = data.replace(label=satrap.LabelColumn("hour", true="07"))
    assert samples_of(data, ["item"]) == [(([row["item"]],), (), float(row["hour"] == 7)) for row in clicks]


def test_the_type_depends_on_the_values_of_all_files(tmp_path: Path) -> None:
    for value in ("1", "2", "x"):
        write(pa.table({"a": [int(value, 36)]}), tmp_path / f"data/k={value}/0.parquet")
    data = satrap.Parquet(tmp_path / "data")
    assert [sample[0] for sample in samples_of(data, ["k"])] == [(hashed(text),) for text in "12x"]
    data = data.replace(path=tmp_path / "data/k=[12]/*")
    assert [sample[0] for sample in samples_of(data, ["k"])] == [([1],), ([2],)]


def test_a_column_of_the_file_takes_precedence(kind: str, tmp_path: Path) -> None:
    write(pa.table({"day": [5, 6]}), tmp_path / f"day=1/0.{kind}")
    data = KINDS[kind](tmp_path / "day=1", ids={"day": satrap.IdColumn(kind="integer")})
    assert [sample[0] for sample in samples_of(data, ["day"])] == [([5],), ([6],)]


def test_escaped_names_and_values(kind: str, tmp_path: Path) -> None:
    write(pa.table({"a": [1]}), tmp_path / f"the%20day=a%2Fb%3D1/0.{kind}")
    data = KINDS[kind](tmp_path, ids={"day": "the day"})
    assert [sample[0] for sample in samples_of(data, ["day"])] == [(hashed("a/b=1"),)]


def test_folders_that_pyarrow_wrote(tmp_path: Path) -> None:
    table = pa.table({"a": range(30), "day": ["x", "y z", None] * 10, "n": [1, -2, 3] * 10})
    hive = ds.partitioning(pa.schema([("day", pa.string()), ("n", pa.int32())]), flavor="hive")
    ds.write_dataset(table, tmp_path, format="parquet", partitioning=hive)
    rows = sorted(ds.dataset(tmp_path, partitioning=hive).to_table().to_pylist(), key=lambda row: row["a"])
    samples = samples_of(satrap.Parquet(tmp_path, dense="n"), ["a", "day"])
    assert sorted(samples) == [(([row["a"]], hashed(row["day"])), (row["n"],), None) for row in rows]


def test_only_partitions_are_required(kind: str, clicks: Rows, tmp_path: Path) -> None:
    data = KINDS[kind](tmp_path / "data", label=satrap.LabelColumn("hour", kind="count"))
    assert samples_of(data, ["day"]) == [((hashed(row["day"]),), (), row["hour"]) for row in clicks]


def test_partitions_on_a_remote_filesystem(kind: str, clicks: Rows, tmp_path: Path, memory: Any) -> None:
    for path in (tmp_path / "data").rglob(f"*.{kind}"):
        memory.pipe_file(f"/{path.relative_to(tmp_path)}", path.read_bytes())
    expected = samples_of(KINDS[kind](tmp_path / "data"), ["item", "day"])
    for url in ("memory://data", f"memory://data/day=*/*/0.{kind}"):
        assert samples_of(KINDS[kind](url, num_threads=2), ["item", "day"]) == expected


ERRORS: list[tuple[Callable[[Any, Path], FileSource], str]] = [
    (lambda kind, path: kind(path, dense="dy"), r"has no column 'dy' \(dense\)"),
    (lambda kind, path: kind([path / "day=a", path / "none"], dense="day"), r"none/0.*has no column 'day' \(dense\)"),
    (lambda kind, path: kind(path / "day=a", dense="day"), "column 'day' holds 'a'; expected a number"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS)
def test_errors_name_the_file(kind: str, make: Any, message: str, tmp_path: Path) -> None:
    for folder in ("day=a", "none"):
        write(pa.table({"a": [1]}), tmp_path / f"{folder}/0.{kind}")
    with pytest.raises(satrap.SourceError, match=message):
        list(make(KINDS[kind], tmp_path).batches(["a"]))
