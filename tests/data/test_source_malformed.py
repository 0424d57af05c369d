"""Malformed rows are refused with file and line, or skipped and counted up to the limit; no other row is lost."""

import gzip
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import clicks
from clicks import KINDS, expected, make, source
from satrap.config.columns import DenseColumn, IdColumn, LabelColumn
from satrap.data.arrow import Arrow
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.frame import Frame, as_arrow
from satrap.data.hashing import hash_strings
from satrap.data.parquet import Parquet
from satrap.data.source import Source
from satrap.errors import ConfigError, SourceError

HEADER = "click,age,user,history,w,name\n"
GOOD = "1,30,5,1|2,0.5|1,ann\n"
TEXT: dict[str, Any] = {
    "dense": "age",
    "label": "click",
    "ids": {"user": IdColumn(kind="integer"), "history": IdColumn(kind="integer", separator="|")},
    "weights": {"history": "w"},
    "extra": "name",
}
FEATURES = ["user", "history"]

BAD_ROWS = {
    "1,30,5,1|2,0.5|1": "it has 5 columns; expected 6",
    "1": "it has 1 columns; expected 6",
    "1,30,5,1|2,0.5|1,ann,8,9": "it has 8 columns; expected 6",
    "1,thirty,5,1,1,ann": "column 'age' holds 'thirty'; expected a number",
    "1,1e39,5,1,1,ann": "column 'age' holds '1e39'; expected a finite number that float32 can hold",
    "1,inf,5,1,1,ann": "column 'age' holds 'inf'; expected a finite",
    "yes,30,5,1,1,ann": "column 'click' holds 'yes'; expected a number",
    ",30,5,1,1,ann": "the label, column 'click', is missing; add it, or declare LabelColumn(missing='drop')",
    "1,30,5.0,1,1,ann": "column 'user' holds '5.0'; expected a whole number of 64 bits, or declare kind='string'",
    "1,30,5,1|x,1|1,ann": "column 'history' holds '1|x'; expected a whole number",
    "1,30,5,1|2,1,ann": "column 'w' has 1 weights for 2 ids of feature 'history'",
    "1,30,5,1||2,1|1|1,ann": "column 'history' holds '1||2'; it lists a missing id, and its ids have weights",
    "1,30,5,1,nan,ann": "column 'w' holds 'nan'; expected a finite number",
    '1,30,5,1,1,"ann': "column 'name' holds '\"ann'; its quote is not closed in this line",
    '1,30,5,1,1,"an"n': "column 'name' holds '\"an\"n'; the quoted field continues after its closing quote",
    "1,30,5,1,1,\udcff": "column 'name' holds '\\\\xff'; expected UTF-8: if the file is Latin-1, give "
    "encoding='latin-1'",
    f"1,{'9' * 400}x,5,1,1,ann": "column 'age' holds '" + "9" * 59 + "...; expected a number",
}


def write(path: Path, rows: list[str], text: str = HEADER) -> Path:
    content = (text + "".join(row if row.endswith("\n") else row + "\n" for row in rows)).encode(
        errors="surrogateescape"
    )
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_malformed_row_of_text_is_refused_with_file_and_line(row: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, [GOOD] * 200 + [row] + [GOOD] * 200)
    data = CSV(path, block_bytes=500, batch_size=50, **TEXT)
    with pytest.raises(SourceError) as error:
        list(data.batches(FEATURES))
    assert str(error.value).startswith(f"{path}, line 202: {BAD_ROWS[row]}")
    assert str(error.value).endswith("; fix the row, or allow more with max_bad_rows")
    batches = data.replace(max_bad_rows=1).batches(FEATURES)
    assert sum(inputs.batch_size for inputs in batches) == 400 and batches.skipped_rows.malformed == 1


@pytest.mark.parametrize("num_threads", [0, 2])
def test_the_limit_of_bad_rows_applies_to_an_epoch(num_threads: int, tmp_path: Path) -> None:
    rows = list(itertools.islice(itertools.cycle([GOOD, "1,x,5,1,1,ann", GOOD, GOOD]), 100))
    path = write(tmp_path / "a.csv", rows)
    data = CSV(path, block_bytes=200, epochs=2, max_bad_rows=25, num_threads=num_threads, **TEXT)
    batches = data.batches(FEATURES)
    assert sum(inputs.batch_size for inputs in batches) == 150 and batches.skipped_rows.malformed == 50
    with pytest.raises(
        SourceError, match=r"line 99: column 'age' holds 'x'.*; only 24 bad rows are allowed in an epoch"
    ):
        list(data.replace(max_bad_rows=24).batches(FEATURES))


def test_lines_are_counted_through_quoted_newlines_and_headers(tmp_path: Path) -> None:
    rows = ['1,1,5,1,1,"two\nlines"', "1,1,5,1,1,ann", "1,x,5,1,1,ann"]
    path = write(tmp_path / "a.csv", rows, "first\nsecond\n" + HEADER)
    data = CSV(path, skip_lines=2, newlines_in_values=True, block_bytes=30, **TEXT)
    with pytest.raises(SourceError, match=r"a.csv, line 7: column 'age' holds 'x'"):
        list(data.batches(FEATURES))


def test_text_labels_that_are_not_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [">50K,1", ">50k,1"], "income,a\n")
    label = LabelColumn("income", values={">50K": 1, "<=50K": 0})
    with pytest.raises(SourceError, match=r"line 3: column 'income' holds '>50k'; expected one of '>50K', '<=50K'"):
        list(CSV(path, label=label).batches(["a"]))


def test_criteo_lines(tmp_path: Path) -> None:
    line = "1\t" + "\t".join(["3"] * 13 + ["68fd1e64"] * 26)
    for bad, why in (
        (line.rpartition("\t")[0], "it has 39 columns; expected 40"),
        (line.replace("3", "three", 1), "column 'I1' holds 'three'; expected a number"),
        (line.replace("1\t", "\t", 1), "the label, column 'label', is missing"),
    ):
        path = write(tmp_path / "day_0", [line, bad, line], "")
        with pytest.raises(SourceError, match=f"day_0, line 2: {why}"):
            list(Criteo(path).batches(["C1"]))


# -- incomplete files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrows", "csv.gz"])
def test_an_incomplete_file_is_refused_with_its_name(kind: str, tmp_path: Path) -> None:
    """The file may be cut anywhere, and the samples before the cut are correct."""
    samples = make(300, 0)
    clicks.write(tmp_path / f"whole.{kind}", samples)
    whole = (tmp_path / f"whole.{kind}").read_bytes()
    path = tmp_path / f"incomplete.{kind}"
    expected_samples = [expected(sample) for sample in samples]
    cuts = {1, 7, 8, 40, len(whole) // 3, len(whole) // 2, len(whole) - 9, len(whole) - 1}
    for content in (b"this is not what the name says, " * 100, *(whole[:cut] for cut in cuts)):
        path.write_bytes(content)
        found: list[Any] = []
        with pytest.raises(SourceError, match=rf"incomplete\.{kind}.*it is incomplete"):
            for inputs in source(kind, path, batch_size=16).batches(clicks.FEATURES):
                found += clicks.samples_in(inputs)
        assert found == expected_samples[: len(found)]


@pytest.mark.parametrize("times", [0.5, 2])
def test_a_file_that_changes_while_it_is_read_is_refused(times: float, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    clicks.write(path, make(500, 0))
    text = path.read_bytes()
    size = int(times * len(text))
    batches = source("csv", path, batch_size=10, num_threads=0).batches(clicks.FEATURES)
    found = clicks.samples_in(next(batches))
    path.write_bytes((text * 2)[:size])
    with pytest.raises(SourceError, match=rf"a\.csv has {size} bytes and had {len(text)} when reading began"):
        for inputs in batches:
            found += clicks.samples_in(inputs)
    assert found == [expected(sample) for sample in make(500, 0)[: len(found)]]


# -- rows of typed data ------------------------------------------------------------------------------------------------

TYPED_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "label": ({"click": None}, "the label, column 'click', is missing"),
    "nan label": ({"click": float("nan")}, "the label, column 'click', is missing"),
    "infinite label": ({"click": float("inf")}, "column 'click' holds inf; expected a finite label"),
    "dense": ({"age": 1e39}, "column 'age' holds 1e\\+39; expected finite numbers that float32 can hold"),
    "wide dense": ({"wide": [1.0, float("-inf")]}, r"column 'wide' holds \[1.0, -inf\]; expected finite"),
    "weights": ({"w": [1.0]}, "column 'w' has 1 weights and column 'history' has 2 ids"),
    "no weights": ({"w": None}, "column 'w' has 0 weights and column 'history' has 2 ids"),
    "weight": ({"w": [1.0, float("nan")]}, "column 'w' holds .*; expected finite weights"),
    "missing id": ({"history": [1, None]}, "column 'history' lists a missing id, and its ids have weights"),
    "float id": ({"user": 0.5}, "column 'user' holds 0.5; expected a whole number"),
    "float ids": ({"pair": [1.0, 2.5]}, r"column 'pair' holds \[1.0, 2.5\]; expected a whole number"),
    "text label": ({"income": "50K"}, "column 'income' holds '50K'; expected one of '>50K', '<=50K'"),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "frame", "dict"])
@pytest.mark.parametrize("case", TYPED_ROWS)
def test_a_malformed_typed_row_is_refused_with_its_number(case: str, kind: str, tmp_path: Path) -> None:
    good = {
        "click": 1.0,
        "income": ">50K",
        "age": 30.0,
        "wide": [1.0, 2.0],
        "user": 5.0,
        "history": [1, 2],
        "w": [0.5, 1.0],
        "pair": [1.0, 2.0],
    }
    changes, why = TYPED_ROWS[case]
    rows = [dict(good) for _ in range(30)]
    rows[20] |= changes
    schema = pa.schema({"wide": pa.list_(pa.float64(), 2), "click": pa.float64()})
    names = [name for name in good if name not in schema.names]
    table = pa.Table.from_pylist(
        rows, schema=pa.schema([*schema, *(pa.Table.from_pylist([good]).schema.field(n) for n in names)])
    )
    options: dict[str, Any] = {
        "dense": ["age", "wide"],
        "label": ["click", LabelColumn("income", values={">50K": 1, "<=50K": 0})],
        "ids": {"user": IdColumn(kind="integer"), "pair": IdColumn(kind="integer")},
        "weights": {"history": "w"},
        "block_rows": 7,
    }
    path = tmp_path / f"a.{kind}"
    data: Source
    match kind:
        case "parquet":
            clicks.write_table(path, table, rows=12)
            data, where = Parquet(path, **options), f"{path}, row 21: "
        case "arrow":
            clicks.write_table(path, table, rows=12)
            data, where = Arrow(path, **options), f"{path}, record batch 1, row 9: "
        case _:
            frame = table if kind == "frame" else dict(zip(table.schema.names, table.columns, strict=True))
            data, where = Frame(frame, **options), "the frame, row 21: "
    features = ["user", "history", "pair"]
    with pytest.raises(SourceError, match=f"^{where}{why}"):
        list(data.batches(features))
    batches = data.replace(max_bad_rows=1).batches(features)
    (inputs,) = batches
    assert inputs.batch_size == 29 and batches.skipped_rows.malformed == 1
    assert inputs.values.tolist() == [5] * 29 + [1, 2] * 58


def test_dropped_and_bad_rows_in_one_chunk() -> None:
    frame = {"click": [1, None, 0, None], "age": [1.0, 2.0, np.inf, np.inf], "a": [1, 2, 3, 4]}
    data = Frame(frame, dense="age", label=LabelColumn("click", missing="drop"), max_bad_rows=1)
    batches = data.batches(["a"])
    assert [inputs.values.tolist() for inputs in batches] == [[1]]
    assert (batches.skipped_rows.malformed, batches.skipped_rows.no_label) == (1, 2)


# -- types and names ---------------------------------------------------------------------------------------------------

WIDE = DenseColumn("x", width=2)
WRONG_TYPES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"a": [0.5]}, {}, "column 'a' is of type double; expected integers or strings for ids; convert them, or declare"),
    (
        {"a": ["x"]},
        {"ids": {"a": IdColumn(kind="integer")}},
        "column 'a' is of type string; expected integers, as declared",
    ),
    (
        {"a": pa.array([1], pa.timestamp("ms"))},
        {},
        r"column 'a' is of type timestamp\[ms\]; expected integers or strings for ids",
    ),
    ({"a": [[[1]]]}, {}, "column 'a' is of type list"),
    (
        {"a": [1]},
        {"ids": {"a": IdColumn(separator="|")}},
        "column 'a' is of type int64; expected strings to split at '|'",
    ),
    ({"a": [1], "x": [b"1"]}, {"dense": "x"}, "column 'x' is of type binary; expected numbers, or strings of numbers"),
    ({"a": [1], "x": [[b"1"]]}, {"dense": WIDE}, "column 'x' is of type list<.*>; expected numbers, or strings of"),
    (
        {"a": [1], "x": [[1.0]]},
        {"dense": "x"},
        r"column 'x' is of type list<.*>; expected numbers; for lists of one .*: DenseColumn\('x', width=...\)",
    ),
    (
        {"a": [1], "x": [1.0]},
        {"dense": WIDE},
        r"column 'x' is of type double; expected lists of 2 numbers, as declared",
    ),
    (
        {"a": [1], "x": np.ones((1, 3))},
        {"dense": WIDE},
        "column 'x' is of type fixed_size_list<.*; expected lists of 2",
    ),
    ({"a": [1], "x": ["1"]}, {"label": "x"}, "column 'x' is of type string; expected numbers; for strings"),
    (
        {"a": [1], "x": [1]},
        {"label": "x", "label_true": "1"},
        "column 'x' is of type int64; expected strings, as label_true",
    ),
    ({"a": [1], "x": ["1"]}, {"weights": {"a": "x"}}, "column 'x' is of type string; expected numbers for weights"),
]


@pytest.mark.parametrize("kind", ["parquet", "table", "dict"])
@pytest.mark.parametrize(("columns", "options", "message"), WRONG_TYPES)
def test_types_that_do_not_fit_are_refused_with_the_column(
    columns: dict[str, Any], options: dict[str, Any], message: str, kind: str, tmp_path: Path
) -> None:
    data = Frame(columns, **options)
    table = pa.table({name: as_arrow("a dict", name, column) for name, column in columns.items()})
    if kind == "dict":
        with pytest.raises(SourceError, match=message):
            list(data.batches(["a"]))
        return
    pq.write_table(table, tmp_path / "a.parquet")
    typed: Source = Parquet(tmp_path / "a.parquet", **options) if kind == "parquet" else Arrow(table, **options)
    with pytest.raises(SourceError, match=rf"{'a.parquet' if kind == 'parquet' else 'the table'}: {message}"):
        typed.batches(["a"])  # before any row is read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense": ["age", "prize"]}, "has no column 'prize' (dense); the nearest known one is 'price'"),
        ({"label": "clicks"}, "has no column 'clicks' (label); the nearest known one is 'click'"),
        ({"ids": {"user": "usr"}}, "has no column 'usr' (feature 'user'); the nearest known one is 'user'"),
        ({"weights": {"tags": "history_wait"}}, "has no column 'history_wait' (the weights of feature 'tags')"),
        ({"extra": "sesion"}, "has no column 'sesion' (extra); the nearest known one is 'session'"),
    ],
)
def test_a_misspelt_column_is_refused_with_the_nearest_name(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{kind}"
    clicks.write(path, make(3, 0))
    with pytest.raises(SourceError) as error:
        source(kind, path, **changes).batches(clicks.FEATURES)
    assert str(error.value).startswith(f"{path} {message}")


def test_headers_must_exist_and_agree(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", ["1,2"], "a,b\n")
    write(tmp_path / "2.csv", ["1,2"], "b,a\n")
    write(tmp_path / "3.csv.gz", ["1,2"], "b,a\n")
    for second in ("2.csv", "3.csv.gz"):
        data = CSV([tmp_path / "1.csv", tmp_path / second])
        with pytest.raises(
            SourceError, match=rf"{second}: its header names the columns \['b', 'a'\]; the first file has"
        ):
            list(data.batches(["a"]))
    for content, message in (
        (b"", "it is empty; expected a header that names its columns, or give columns="),
        (b"\xff\n1\n", "its header is not utf-8 .*; give columns="),
        (b"a,b\r1,2\r", "its header cannot be read .*; expected lines that end with LF or CR LF"),
        (b"a,a\n1,2\n", "has 2 columns 'a' .*; expected one"),
    ):
        (tmp_path / "4.csv").write_bytes(content)
        with pytest.raises(SourceError, match=rf"4.csv:? {message}"):
            CSV(tmp_path / "4.csv").batches(["a"])


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_line_that_never_ends(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, ["1", "2" * 100_000, "3"], "a\n")
    data = CSV(path, block_bytes=1000, max_line_bytes=20_000, ids={"a": IdColumn(kind="string")})
    with pytest.raises(SourceError, match=f"{name}, line 3: it is longer than max_line_bytes=20000; allow more"):
        list(data.batches(["a"]))
    assert sum(b.batch_size for b in data.replace(max_line_bytes=200_000).batches(["a"])) == 3
    path = write(tmp_path / name, ["1"], "a" * 100_000 + "\n")
    with pytest.raises(SourceError, match=f"{name}, line 1: it is longer"):
        data.replace(path=path).batches(["a"])


# -- paths -------------------------------------------------------------------------------------------------------------


def test_globs_folders_and_lists(tmp_path: Path) -> None:
    for i, name in enumerate(["b/1.csv", "b/2.csv", "a/x/3.csv", "a/y.csv", "_tmp/4.csv", "a/.h.csv", "a/[z].csv"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, [str(i)], "a\n")
    (tmp_path / "empty").mkdir()

    def found(path: Any) -> list[int]:
        data = CSV(path, ids={"a": IdColumn(kind="integer")})
        return [int(i) for inputs in data.batches(["a"]) for i in inputs.values]

    assert found(tmp_path) == [6, 2, 3, 0, 1]
    assert found(f"{tmp_path}/b/*.csv") == [0, 1]
    assert found(f"{tmp_path}/*/[x2]*") == [1]
    assert found(f"{tmp_path}/*/[!x2y]*.csv") == [6, 0]
    assert found(f"{tmp_path}/**/?.csv") == [2, 3, 0, 1]
    assert found(f"{tmp_path}/_tmp/*.csv") == [4] == found(f"{tmp_path}/_*/*")
    assert found(f"{tmp_path}/a/[z].csv") == [6]
    assert found([tmp_path / "b/2.csv", f"{tmp_path}/b/1.csv", tmp_path / "b"]) == [1, 0, 0, 1]
    for path, message in (
        (tmp_path / "none.csv", "none.csv: there is no such file or folder"),
        (tmp_path / "empty", "empty: the folder holds no file"),
        (f"{tmp_path}/*.txt", r"\*.txt: the glob matches no file"),
    ):
        with pytest.raises(SourceError, match=message):
            CSV(path).batches(["a"])
    wrong: list[tuple[Any, str]] = [
        ([], "path is an empty list"),
        ("nowhere://x", "nowhere://x cannot be opened: Protocol not known: nowhere; correct the URL, or install what"),
        ("s3:///", "path is 's3:///', which names no bucket; expected e.g. 's3://bucket/run'"),
        (3, r"path is 3 \(int\); expected a file, a folder, a glob or a URL"),
        ("", "path is ''"),
    ]
    for path, message in wrong:
        with pytest.raises(ConfigError, match=message):
            CSV(path).batches(["a"])
    with pytest.raises(ConfigError, match=r"filesystem is .*; expected one of pyarrow.fs or fsspec"):
        CSV("x", filesystem=3).batches(["a"])


# -- declarations ------------------------------------------------------------------------------------------------------

BAD_DECLARATIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: CSV("x", batch_size=0), "CSV: batch_size is 0; expected an integer from 1"),
    (lambda: CSV("x", batch_size=None), "CSV: batch_size is None .*; expected an integer from 1"),
    (lambda: CSV("x", epochs=0), "CSV: epochs is 0"),
    (lambda: CSV("x", shuffle_blocks=0), "shuffle_blocks is 0"),
    (lambda: CSV("x", shuffle=1), r"shuffle is 1 \(int\); expected True or False"),  # type: ignore[arg-type]
    (lambda: CSV("x", seed=-1), "seed is -1"),
    (lambda: CSV("x", max_bad_rows=-1), "max_bad_rows is -1"),
    (lambda: CSV("x", num_threads=65), "num_threads is 65"),
    (lambda: CSV("x", dense=3), "CSV: dense is 3 .*; expected names of columns, or DenseColumn objects"),  # type: ignore[arg-type]
    (lambda: CSV("x", label=["a", 3]), "CSV: label is .*; expected names of columns, or LabelColumn objects"),  # type: ignore[list-item]
    (lambda: CSV("x", label_true="a"), "label_true is 'a' and there is no label"),
    (lambda: CSV("x", label=LabelColumn("a"), label_true="a"), "label_true requires a column's name as label, found"),
    (lambda: CSV("x", ids=["a"]), "CSV: ids is .*; expected a dict by feature"),  # type: ignore[arg-type]
    (lambda: CSV("x", ids={"a": 3}), r"IdColumn: the column is 3 \(int\); expected its name"),  # type: ignore[dict-item]
    (lambda: CSV("x", weights={"a": ""}), r"CSV: weights\['a'\]: the column is ''"),
    (lambda: CSV("x", weights="w"), "CSV: weights is 'w'"),  # type: ignore[arg-type]
    (
        lambda: CSV("x", missing_id=2**64),
        "missing is 18446744073709551616; expected an integer from -9223372036854775808",
    ),
    (lambda: CSV("x", extra=["a", "a"]), "CSV: extra holds 'a' twice"),
    (lambda: CSV("x", delimiter=""), r"CSV: delimiter is '' \(str\); expected 1 to 8 ASCII characters"),
    (lambda: CSV("x", delimiter="é"), "CSV: delimiter is 'é'"),
    (lambda: CSV("x", quote="''"), "CSV: quote is .*; expected one ASCII character, or None"),
    (lambda: CSV("x", quote=","), "CSV: quote ',' is part of delimiter ','"),
    (lambda: CSV("x", columns=["a", "a"]), "CSV: columns holds 'a' twice"),
    (lambda: CSV("x", columns=3), "CSV: columns is 3"),  # type: ignore[arg-type]
    (lambda: CSV("x", missing=[1]), "CSV: missing is"),  # type: ignore[list-item]
    (lambda: CSV("x", encoding="utf-16"), "CSV: encoding is 'utf-16'.*; expected one of 'utf-8', 'latin-1'"),
    (lambda: CSV("x", strip=1), "CSV: strip is 1"),  # type: ignore[arg-type]
    (lambda: CSV("x", skip_lines=-1), "CSV: skip_lines is -1"),
    (lambda: CSV("x", block_bytes=0), "CSV: block_bytes is 0"),
    (lambda: Criteo("x", log1p=1), "Criteo: log1p is 1"),  # type: ignore[arg-type]
    (lambda: Parquet("x", block_rows=0), "Parquet: block_rows is 0"),
    (lambda: Arrow("x", block_rows=0), "Arrow: block_rows is 0"),
    (lambda: Frame({}, block_rows=0), "Frame: block_rows is 0"),
    (lambda: Frame(3), r"Frame: found 3 \(int\); expected a DataFrame, a Dataset, an Arrow table or a dict"),
    (lambda: Frame(type("LazyFrame", (), {})()), r"Frame: found a LazyFrame; expected rows: call .collect\(\)"),
    (
        lambda: Frame({"a": [1]}, ids={"a": IdColumn(weights="v")}, weights={"a": "w"}).batches(["a"]),
        "feature 'a': its weights are 'v' and 'w'; give one column",
    ),
]


def test_replace_refuses_an_unknown_field_as_the_constructor_does() -> None:
    for call in (partial(CSV, "x"), CSV("x").replace):
        with pytest.raises(
            TypeError, match=r"^CSV got an unexpected .* 'batchsize': the nearest known one is 'batch_size'"
        ):
            call(batchsize=3)


@pytest.mark.parametrize(("call", "message"), BAD_DECLARATIONS)
def test_invalid_declarations_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_replace_keeps_the_other_fields() -> None:
    data = Criteo("a", batch_size=7, dense=["I1"], ids={"ad": "C1"}, label_true="1")
    assert data.replace() == data and data.replace(path="b").replace(path="a") == data
    assert data.replace(batch_size=8).batch_size == 8 and data.replace(batch_size=8).dense == data.dense
    assert data.replace(label=None, label_true=None).columns == data.columns[1:]  # type: ignore[index]


def test_frames_of_uneven_columns() -> None:
    with pytest.raises(SourceError, match=r"columns of different lengths: {'a': 2, 'x': 1}; expected one length"):
        Frame({"a": [1, 2], "x": [1.0]}, dense="x").batches(["a"])
    with pytest.raises(SourceError, match=r"column 'a' has the shape \(1, 1, 1\); expected one or two dimensions"):
        list(Frame({"a": np.zeros((1, 1, 1), int)}).batches(["a"]))
    with pytest.raises(SourceError, match="the frame: column 'a' is a list that cannot be read"):
        list(Frame({"a": [1, "x"]}).batches(["a"]))
    with pytest.raises(SourceError, match=r"the frame has no column 'b' .*; known are 'a'"):
        Frame(pd.DataFrame({"a": [1]})).batches(["b"])
    with pytest.raises(SourceError, match=r"the frame has no column 'b' .*; it has no columns"):
        Frame({}).batches(["b"])


def test_a_tab_between_fields_is_not_a_blank(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('a\ty\n "1" \t "0"\n2\t1\n \t0\n')
    data = CSV(path, delimiter="\t", strip=True, label="y", missing_id=7)
    (inputs,) = data.batches(["a"])
    assert inputs.label is not None and inputs.label.tolist() == [0, 1, 0]
    assert inputs.values.tolist() == [*hash_strings(["1", "2"]), 7]


@pytest.mark.parametrize("kind", [CSV, Parquet, Arrow, Criteo])
def test_a_fifo_or_a_device_is_no_file(kind: Callable[..., Source], tmp_path: Path) -> None:
    """Opening a FIFO, or reading a device to its end, would wait for ever; in a folder both are passed over."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("fifo", "device"):
        with pytest.raises(SourceError, match=f"{name} is a FIFO, a socket or a device; expected a file or a folder"):
            kind(path=tmp_path / name).signature()
    with pytest.raises(SourceError, match="the folder holds no file"):
        kind(path=tmp_path).signature()
