"""Every format yields exactly the samples of a plain Python model of the same data, on every filesystem."""

import bz2
import gzip
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from xxhash import xxh64_intdigest as xxh64

import clicks
from clicks import KINDS, OPTIONS, bags_of, expected, make, read, source
from satrap.config.columns import DenseColumn, IdColumn, LabelColumn
from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.arrow import Arrow
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.frame import Frame
from satrap.data.inputs import Inputs
from satrap.data.iterable import IterableSource
from satrap.data.json_lines import JSON
from satrap.data.parquet import Parquet
from satrap.data.source import Source
from satrap.errors import ConfigError, SourceError


@pytest.mark.parametrize("kind", KINDS)
def test_files_without_rows(kind: str, tmp_path: Path) -> None:
    for i, n in enumerate((0, 5, 0)):
        clicks.write(tmp_path / f"{i}.{kind}", make(n, i))
    assert read(source(kind, tmp_path)) == [expected(sample) for sample in make(5, 1)]
    assert read(source(kind, tmp_path / f"0.{kind}")) == []


@pytest.mark.parametrize("block_bytes", [1, 40, 1000, 1 << 20])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_text_is_split_anywhere(block_bytes: int, ending: str, tmp_path: Path, seed: int) -> None:
    samples = make(40, seed)
    clicks.write(tmp_path / "a.csv", samples)
    text = (tmp_path / "a.csv").read_text().replace("\n", ending)
    for name, content in (("whole", text), ("no newline at the end", text.rstrip()), ("bom", "\ufeff" + text)):
        (tmp_path / "a.csv").write_text(content, newline="")
        for option in ({}, {"newlines_in_values": True}):
            data = source("csv", tmp_path / "a.csv", block_bytes=block_bytes, **option)
            assert read(data) == [expected(sample) for sample in samples], name


def test_quoted_newlines_and_other_formats(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(
        b'a comment\nx :: y :: z\n 1 :: "two\nlines" :: ?\n\n 2 :: "say ""hi""" :: caf\xe9\n'
    )
    options: dict[str, Any] = {"delimiter": "::", "strip": True, "skip_lines": 1, "encoding": "latin-1"}
    data = CSV(
        tmp_path / "a.txt", newlines_in_values=True, missing="?", dense="x", extra=["y", "z"], block_bytes=8, **options
    )
    batches = list(data.batches(["y"]))
    assert [x for b in batches for x in b.extra["y"].to_pylist()] == ["two\nlines", 'say "hi"']
    assert [x for b in batches for x in b.extra["z"].to_pylist()] == [None, "café"]
    assert np.concatenate([b.dense for b in batches if b.dense is not None]).tolist() == [[1.0], [2.0]]
    with pytest.raises(SourceError, match=r"a.txt, line 3: .* its quote is not closed in this line"):
        list(data.replace(newlines_in_values=False).batches(["y"]))


def test_other_compressions(tmp_path: Path, seed: int) -> None:
    samples = make(200, seed)
    clicks.write(tmp_path / "a.csv", samples)
    text = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "a.csv.bz2").write_bytes(bz2.compress(text))
    with pa.CompressedOutputStream(str(tmp_path / "a.csv.zst"), "zstd") as file:
        file.write(text)
    for name in ("a.csv.bz2", "a.csv.zst"):
        assert read(source("csv", tmp_path / name)) == [expected(sample) for sample in samples]


def test_columns_in_another_order_and_under_other_names(tmp_path: Path, seed: int) -> None:
    samples = make(50, seed)
    renamed = clicks.table(samples).rename_columns({"user": "uid", "item": "it em"})
    pq.write_table(renamed.select(renamed.schema.names[::-1]), tmp_path / "a.parquet")
    data = Parquet(tmp_path / "a.parquet", **OPTIONS, ids={"user": "uid", "item": IdColumn("it em")})
    assert read(data) == [expected(sample) for sample in samples]


# -- frames ------------------------------------------------------------------------------------------------------------


def frames(samples: list[clicks.Sample]) -> dict[str, Any]:
    table = clicks.table(samples)
    pandas = pd.DataFrame(samples, columns=clicks.SCHEMA.names)
    pandas["user"] = pd.array([sample["user"] for sample in samples], "Int64")
    return {
        "pandas": pandas,
        "pandas of Arrow types": table.to_pandas(types_mapper=pd.ArrowDtype),
        "polars": pl.from_arrow(table),
        "table": table,
        "record batch": table.combine_chunks().to_batches()[0] if samples else None,
        "chunked table": pa.concat_tables([table.slice(0, 33), table.slice(33)]),
        "dict of lists": {name: [sample[name] for sample in samples] for name in table.schema.names},
        "dict of Arrow arrays": dict(zip(table.schema.names, table.columns, strict=True)),
        "dict of series": dict(pandas.items()),
    }


@pytest.mark.parametrize("kind", frames([]).keys())
def test_frames_yield_their_samples(kind: str, seed: int) -> None:
    samples = make(150, seed)
    frame = frames(samples)[kind]
    assert read(Frame(frame, batch_size=32, block_rows=40, **OPTIONS)) == [expected(sample) for sample in samples]
    if kind in ("table", "chunked table"):
        data = Arrow(frame, batch_size=32, block_rows=40, **OPTIONS)
        assert read(data) == [expected(sample) for sample in samples]


def test_data_in_memory_is_not_compared() -> None:
    for kind, one, other in ((Frame, {"x": [1]}, {"x": [2]}), (IterableSource, [1], [2])):
        source = kind(one)
        assert source == source and source != kind(other) and len({source, kind(other)}) == 2


def only_batch(data: Source, features: Any) -> Inputs:
    """Return the only batch of a source."""
    (inputs,) = data.batches(features)
    return inputs


def test_a_dict_of_numpy_arrays() -> None:
    frame = {
        "id": np.array([3, -1, 5], np.int32),
        "name": np.array(["a", "bc", ""]),
        "pair": np.arange(6, dtype=np.uint64).reshape(3, 2),
        "bag": (np.array([7, 8, 9], np.uint64), np.array([0, 2, 2, 3])),
        "x": np.array([0.5, np.nan, 2.0]),
        "matrix": np.arange(6, dtype=np.float32).reshape(3, 2),
        "flag": np.array([True, False, True]),
        "click": np.array([True, False, True]),
    }
    data = Frame(frame, dense=["x", "matrix", DenseColumn("flag")], label="click", block_rows=2)
    inputs = only_batch(data, ["id", "name", "pair", "bag"])
    assert clicks.bags_of(inputs) == [
        [[3], [2**64 - 1], [5]],
        [[xxh64(text)] for text in (b"a", b"bc", b"")],
        [[0, 1], [2, 3], [4, 5]],
        [[7, 8], [], [9]],
    ]
    assert inputs.dense is not None and inputs.dense.flags.c_contiguous
    assert inputs.dense.tolist() == [[0.5, 0, 1, 1], [0, 2, 3, 0], [2, 4, 5, 1]]
    assert inputs.label is not None and inputs.label.tolist() == [1, 0, 1]


def test_a_frame_with_numbered_columns() -> None:
    inputs = only_batch(Frame(pd.DataFrame([[1, 2.0], [3, 4.0]], index=[7, 7]), dense="1"), ["0"])
    assert inputs.values.tolist() == [1, 3]
    assert inputs.dense is not None and inputs.dense.tolist() == [[2], [4]]


def test_bags_of_one_id_need_no_offsets() -> None:
    frame = {"a": np.arange(5), "b": np.arange(5, 10), "c": [[1], [2], [3], [4], [5]], "d": [1, None, 3, 4, 5]}
    inputs = only_batch(Frame(frame), ["b", "a", "c"])
    assert inputs.offsets is None and inputs.weights is None and inputs.dense is None and inputs.label is None
    assert inputs.values.tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 1, 2, 3, 4, 5]
    assert only_batch(Frame(frame), ["a", "d"]).offsets is not None
    assert only_batch(Frame(frame, missing_id=-1), ["d"]).values.tolist() == [1, 2**64 - 1, 3, 4, 5]


# -- declarations of columns -------------------------------------------------------------------------------------------


def test_missing_ids_become_the_declared_id() -> None:
    frame = {"one": [1, None, 3], "many": [[1, None], None, []], "w": [[0.5, 0.25], None, []], "text": ["a", None, "b"]}
    data = Frame(frame, ids={"one": IdColumn(missing=9), "text": IdColumn(missing=7)}, missing_id=5)
    bags = clicks.bags_of(only_batch(data, ["one", "many", "text"]))
    assert bags[:2] == [[[1], [9], [3]], [[1, 5], [5], []]]
    assert bags[2] == [[xxh64(b"a")], [7], [xxh64(b"b")]]
    weighted = only_batch(data.replace(weights={"many": "w"}), ["many"])
    assert clicks.bags_of(weighted, weighted.weights) == [[[0.5, 0.25], [1.0], []]]
    assert clicks.bags_of(only_batch(Frame(frame), ["many"])) == [[[1], [], []]]


def test_integers_may_be_hashed_or_read_as_texts() -> None:
    ids = [0, 7, -3]
    hashed = [[xxh64((i % 2**64).to_bytes(8, "little"))] for i in ids]
    texts = [[xxh64(str(i).encode())] for i in ids]
    frame = {"a": ids, "f": [0.0, 7.0, -3.0]}
    for name, column, expected_samples in (
        ("a", IdColumn(hash=True), hashed),
        ("a", IdColumn(kind="string"), texts),
        ("f", IdColumn(kind="integer"), [[i % 2**64] for i in ids]),
    ):
        assert clicks.bags_of(only_batch(Frame(frame, ids={name: column}), [name])) == [expected_samples]


@pytest.mark.parametrize("decimal", [pa.decimal64(18), pa.decimal128(20), pa.decimal256(60)], ids=str)
def test_decimals_without_a_fraction_are_ids_of_integers(decimal: Any) -> None:
    """Databases export large integers so."""
    large = 10 if decimal == pa.decimal64(18) else 2**63
    ids = [0, 7, -3, None, large, large - 1]
    numbers = pa.array([None if i is None else Decimal(i) for i in ids], decimal)
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 6, 6, 6, 6, 6]), numbers)
    columns = {"f": IdColumn("f"), "hashed": IdColumn("f", hash=True), "text": IdColumn("f", kind="string")}
    columns |= {"list": IdColumn("list"), "crossed": IdColumn("f", crossed=("other",))}
    other = pa.array(range(6))
    as_decimals = Frame({"f": numbers, "list": lists, "other": other}, ids=columns)
    array = np.array([0 if i is None else i % 2**64 for i in ids], np.uint64)
    as_integers = Frame({"f": pa.array(array, mask=np.array([i is None for i in ids])), "other": other}, ids=columns)
    names = ["f", "hashed", "crossed"]
    assert clicks.bags_of(only_batch(as_decimals, names)) == clicks.bags_of(only_batch(as_integers, names))
    assert clicks.bags_of(only_batch(as_decimals, ["list"])) == [
        [[0, 7], [2**64 - 3, large, large - 1], [], [], [], []]
    ]
    texts = [[] if i is None else [xxh64(str(i).encode())] for i in ids]
    assert clicks.bags_of(only_batch(as_decimals, ["text"])) == [texts]


@pytest.mark.parametrize(("number", "is_list"), [(2**64, False), (-(2**63) - 1, False), (2**64, True)])
def test_decimals_beyond_64_bits_are_malformed(number: int, is_list: bool) -> None:
    column = pa.array([Decimal(1), Decimal(number)], pa.decimal128(25))
    given = pa.ListArray.from_arrays(pa.array([0, 1, 2]), column) if is_list else column
    with pytest.raises(
        SourceError, match=r"row 2: column 'f' holds .*; expected a whole number from -2\*\*63 to 2\*\*64 - 1"
    ):
        only_batch(Frame({"f": given}), ["f"])
    with pytest.raises(SourceError, match="expected integers or strings for ids"):
        only_batch(Frame({"f": pa.array([Decimal("1.5")])}), ["f"])


@pytest.mark.parametrize("kind", ["csv", "frame"])
def test_labels_dense_and_lists_of_text(kind: str, tmp_path: Path) -> None:
    rows = {
        "income": [">50K", "<=50K", ">50K."],
        "delay": [20, 15, None],
        "count": [0, 5, None],
        "negative": [-2.0, 1e-6, 70000.0],
        "genres": ["b|a", None, "a||b"],
    }
    if kind == "csv":
        pd.DataFrame(rows).astype({"delay": "Int64", "count": "Int64"}).to_csv(tmp_path / "a.csv", index=False)
    options: dict[str, Any] = {
        "dense": [DenseColumn("count", missing=-1, log1p=True), DenseColumn("negative", log1p=True)],
        "label": [
            LabelColumn("income", true=[">50K", ">50K."]),
            LabelColumn("income", kind="count", values={">50K": 2, "<=50K": 3, ">50K.": 4}),
            LabelColumn("delay", kind="real", above=15, missing=0.5),
        ],
        "ids": {"genres": IdColumn(separator="|")},
    }
    data: Source = CSV(tmp_path / "a.csv", **options) if kind == "csv" else Frame(rows, **options)
    inputs = only_batch(data, ["genres"])
    a, b = xxh64(b"a"), xxh64(b"b")
    assert clicks.bags_of(inputs) == [[[b, a], [], [a, b]]]
    assert inputs.label is not None and inputs.label.tolist() == [[1, 2, 1], [0, 3, 0], [1, 4, 0.5]]
    expected_samples = np.array([[0, 0], [np.log(6), np.log1p(1e-6)], [-1, np.log(70001)]], np.float32)
    assert inputs.dense is not None and np.allclose(inputs.dense, expected_samples, rtol=1e-7)
    dropped = data.replace(label=LabelColumn("delay", kind="count", missing="drop"))
    batches = dropped.batches(["genres"])
    inputs = next(batches)
    assert inputs.label is not None and inputs.label.tolist() == [20, 15]
    assert batches.skipped_rows.no_label == 1 and batches.skipped_rows.malformed == 0
    assert clicks.bags_of(inputs) == [[[b, a], []]]


def test_label_true_is_short_for_a_label_column() -> None:
    data = Frame({"income": ["<=50K", ">50K"], "a": [1, 2]}, label="income", label_true=">50K")
    label = only_batch(data, ["a"]).label
    assert label is not None and label.tolist() == [0, 1]


def test_a_misspelt_feature_in_ids_or_weights_causes_a_warning() -> None:
    data = {"user_id": [1, 2], "item": [3, 4], "w": [1.0, 2.0]}
    for options, words in (
        ({"ids": {"user_idd": IdColumn(kind="integer")}}, "ids names 'user_idd', .* did you mean 'user_id'?"),
        ({"ids": {"w": "item"}}, r"ids names 'w', .* did you mean ids={'item': 'w'}"),
        ({"ids": {"item_id": "item"}}, r"ids names 'item_id', .* did you mean ids={'item': 'item_id'}"),
        ({"ids": {"itme": "item"}}, r"ids names 'itme', .* did you mean ids={'item': 'item'}, or to leave it out"),
        ({"weights": {"itemm": "w"}}, "weights names 'itemm', .* did you mean 'item'"),
    ):
        with pytest.warns(UserWarning, match=words):
            Frame(data, batch_size=2, **options).batches(["user_id", "item"]).close()
    unwarned = Frame(data, batch_size=2, ids={"user_id": "user_id", "item": "item", "user_ip": "w", "far": "w"})
    unwarned.batches(["user_id"]).close()  # a model with fewer features: no warning


def test_features_decide_the_order_of_the_batch() -> None:
    one, two = Table("one", dim=2), Table("two", dim=2)
    frame = {"a": [1], "b": [2], "c": [3], "w": [0.5]}
    features = Features({"c": one, "a": two, "b": one.bag("sum", weighted=True)})
    inputs = only_batch(Frame(frame, weights={"b": "w"}), features)
    assert inputs.names == ("c", "b", "a") and inputs.values.tolist() == [3, 2, 1]
    assert inputs.weights is not None and inputs.weights.tolist() == [1, 0.5, 1]
    with pytest.raises(ConfigError, match=r"feature 'a' is not weighted and column 'w' is declared .* weighted=True"):
        Frame({}, weights={"a": "w", "b": "w"}).batches(features)
    with pytest.raises(ConfigError, match="feature 'b' is weighted and no column holds its weights"):
        Frame(frame).batches(features)


# -- Criteo ------------------------------------------------------------------------------------------------------------


def criteo_line(draw: np.random.Generator) -> tuple[str, float, list[float], list[str]]:
    counts = [None if draw.random() < 0.2 else int(draw.integers(-2, 2000)) for _ in range(13)]
    texts = ["" if draw.random() < 0.2 else f"{draw.integers(2**32):08x}" for _ in range(26)]
    label = int(draw.integers(2))
    line = "\t".join([str(label), *("" if c is None else str(c) for c in counts), *texts])
    return line, label, [0.0 if c is None else float(np.log1p(max(c, 0))) for c in counts], texts


@pytest.mark.parametrize("name", ["day_0", "day_0.gz"])
def test_criteo(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    rows = [criteo_line(rng) for _ in range(300)]
    text = "".join(row[0] + "\n" for row in rows).encode()
    (tmp_path / name).write_bytes(text if name == "day_0" else gzip.compress(text))
    data = Criteo(tmp_path / name, batch_size=128, block_bytes=5000)
    features = [f"C{i}" for i in range(1, 27)]
    batches = list(data.batches(features))
    assert [inputs.batch_size for inputs in batches] == [128, 128, 44]
    assert all(inputs.offsets is None for inputs in batches)
    ids = np.concatenate([np.asarray(b.values).reshape(26, -1) for b in batches], axis=1)
    assert ids.T.tolist() == [[xxh64(text.encode()) for text in row[3]] for row in rows]
    dense = np.concatenate([b.dense for b in batches if b.dense is not None])
    assert np.allclose(dense, np.array([row[2] for row in rows], np.float32), rtol=2e-7)
    assert np.concatenate([b.label for b in batches if b.label is not None]).tolist() == [row[1] for row in rows]
    raw = next(data.replace(log1p=False, dense=["I3"], ids={"ad": "C7"}, missing_id=None).batches(["ad"]))
    assert raw.dense is not None and raw.dense.shape == (128, 1) and raw.dense.max() > 8
    assert clicks.bags_of(raw)[0] == [[xxh64(r[3][6].encode())] if r[3][6] else [] for r in rows[:128]]
    (tmp_path / "test.txt").write_bytes(b"".join(line.partition(b"\t")[2] + b"\n" for line in text.splitlines()))
    unlabelled = only_batch(data.replace(path=tmp_path / "test.txt", label=None, batch_size=300), features)
    assert unlabelled.label is None and np.array_equal(unlabelled.values.reshape(26, -1), ids)


def test_criteos_columns_are_fixed() -> None:
    with pytest.raises(ConfigError, match=r"Criteo: columns is .*; the format fixes them: use CSV"):
        Criteo("x", columns=["a", "b"])


# -- filesystems -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_memory_filesystem(kind: str, memory: Any, tmp_path: Path, seed: int) -> None:
    samples = make(600, seed)
    for i in range(2):
        clicks.write(tmp_path / f"a.{kind}", samples[300 * i : 300 * i + 300])
        memory.pipe_file(f"/clicks/{i}/part.{kind}", (tmp_path / f"a.{kind}").read_bytes())
    expected_samples = [expected(sample) for sample in samples]
    assert read(source(kind, "memory://clicks", num_threads=3)) == expected_samples
    assert read(source(kind, f"memory://clicks/*/part.{kind}", num_threads=3)) == expected_samples
    assert read(source(kind, "/clicks", filesystem=memory, num_threads=3)) == expected_samples
    assert read(source(kind, f"memory://clicks/1/part.{kind}")) == expected_samples[300:]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_pyarrow_filesystems(kind: str, tmp_path: Path, seed: int) -> None:
    samples = make(100, seed)
    (tmp_path / "in").mkdir()
    clicks.write(tmp_path / "in" / f"a.{kind}", samples)
    expected_samples = [expected(sample) for sample in samples]
    local = pyarrow.fs.LocalFileSystem()
    assert read(source(kind, str(tmp_path / "in"), filesystem=local)) == expected_samples
    assert read(source(kind, "in", filesystem=pyarrow.fs.SubTreeFileSystem(str(tmp_path), local))) == expected_samples
    assert read(source(kind, f"file://{tmp_path}/in/*.{kind}")) == expected_samples


@pytest.mark.parametrize("block_rows", [2, 3, 1 << 15])
@pytest.mark.parametrize("num_values", [3, 5000])
def test_lists_of_categories_in_several_row_groups(num_values: int, block_rows: int, tmp_path: Path) -> None:
    """The many categories do not fit the dictionary page of their row group."""
    block_rows *= num_values
    texts = [[f"value {i}", f"value {num_values - i}"][: i % 3] for i in range(4 * num_values)]
    lists = pa.array(texts, pa.list_(pa.string())).cast(pa.list_(pa.dictionary(pa.int32(), pa.string())))
    table = pa.table({"a": lists, "n": range(len(texts))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=num_values, dictionary_pagesize_limit=4096)
    batches = Parquet(tmp_path, extra="n", block_rows=block_rows).batches(["a"])
    read = [(batch.extra["n"].to_pylist(), bags_of(batch)[0]) for batch in batches]
    assert [bag for _, bags in read for bag in bags] == [[xxh64(text.encode()) for text in row] for row in texts]
    assert [n for numbers, _ in read for n in numbers] == list(range(len(texts)))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_ids_of_two_types_are_refused(kind: str, tmp_path: Path) -> None:
    """The user 1701 of one file would have another row than the user "1701" of the next."""
    for i, values in enumerate(([1701, 2], ["1701", "x"], [None, None])):
        clicks.write_table(tmp_path / f"{i}.{kind}", pa.table({"a": pa.array(values), "n": [0.5, 0.5]}))
    data = Parquet(tmp_path) if kind == "parquet" else Arrow(tmp_path)
    with pytest.raises(SourceError, match=r"1\.\w+: column 'a' has strings, and .*0\.\w+ has integers; the same value"):
        data.batches(["a"])
    rest = data.replace(path=[str(tmp_path / f"{i}.{kind}") for i in (0, 2)])
    assert sum(inputs.batch_size for inputs in rest.batches(["a"])) == 4


@pytest.mark.parametrize("values", [[5, 5, "5", "5"], [None, 5, "5", "5"], [[5], [5], ["5"], ["5"]]], ids=str)
@pytest.mark.parametrize("form", ["frame", "samples", "dicts", "arrays", "tables"])
def test_ids_of_two_types_in_memory_are_refused(form: str, values: list[Any]) -> None:
    """Also if they are not converted together. A declared kind decides for both types."""
    halves = [{"a": values[:2]}, {"a": values[2:]}]
    data: Source
    match form:
        case "frame":
            data = Frame({"a": values}, block_rows=2)
        case "samples":
            data = IterableSource([{"a": value} for value in values], samples=True, batch_size=2)
        case "dicts":
            data = IterableSource(halves)
        case "arrays":
            data = IterableSource([{"a": np.array([5, 5])}, halves[1]])
        case "tables":
            data = IterableSource([pa.table(half) for half in halves])
    with pytest.raises(SourceError, match=r"column 'a' has strings, and .* has integers; the same value would become"):
        list(data.batches(["a"]))
    declared = data.replace(ids={"a": IdColumn(kind="string")})
    assert {int(value) for batch in declared.batches(["a"]) for value in batch.values} == {xxh64(b"5")}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (([1, 2, 3], [0, 1, 3], [0.5, 0.5, 0.5]), r"column 'a' has 3 arrays; expected \(values, offsets\)"),
        (([1, 2, 3], [-3, -2, -1]), "has offsets that decrease or exceed its 3 values"),
        (([1, 2, 3], [0, 2, 1]), "has offsets that decrease"),
        (([1, 2, 3], [0, 2, 4]), "exceed its 3 values"),
        (([1, 2, 3], [0, 1.7, 3]), r"has offsets of type float64 and shape \(3,\); expected integers, one more than"),
        (([1, 2, 3], np.zeros(0, np.int64)), r"has offsets of type int64 and shape \(0,\); expected integers"),
        (5, "column 'a' is an int without a length"),
        (np.array(5), "column 'a' is a ndarray without a length"),
        (([1, 2], np.array(5)), "column 'a' is a tuple without a length"),
        ((i for i in range(3)), "column 'a' is a generator without a length .*; expected an array, a tensor or a list"),
    ],
)
def test_columns_in_memory_are_checked(column: Any, message: str) -> None:
    for data in (Frame({"a": column}), IterableSource([{"a": column}])):
        if not (isinstance(data, IterableSource) and isinstance(column, tuple) and len(column) == 3):  # it has weights
            with pytest.raises(SourceError, match=message):
                list(data.batches(["a"]))


def test_advice_about_text_works_when_it_is_followed(tmp_path: Path) -> None:
    """The word that `missing` is compared with, and `columns` for a file without a header."""
    path = tmp_path / "a.csv"
    path.write_text("39, State-gov\n40, 13\n")
    with pytest.raises(SourceError, match=r"no column 'age' .*; known are '39', 'State-gov' \(the first line; without"):
        CSV(path).batches(["age"])
    data = CSV(path, columns=["age", "work"], dense="work", strip=True)
    with pytest.raises(SourceError, match=r"holds 'State-gov'; expected a number, or missing=\('State-gov',\)"):
        list(data.batches(["age"]))
    (inputs,) = data.replace(missing=("State-gov",)).batches(["age"])
    assert inputs.dense is not None and inputs.dense.tolist() == [[0], [13]]


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
def test_a_header_that_no_delimiter_divides_names_the_delimiter(delimiter: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"user{delimiter}click\nu1{delimiter}1\n")
    with pytest.raises(SourceError) as caught:
        CSV(tmp_path / "a.csv", delimiter=":").batches(["user"])
    assert f"(the first line, which ':' does not divide: give delimiter={delimiter!r})" in str(caught.value)


@pytest.mark.parametrize(
    ("make_source", "message"),
    [
        (lambda path: Frame(str(path)), r"Frame: found .*a.csv' \(str\); .* use satrap.Parquet, .*satrap.CSV"),
        (Frame, "Frame: found .*; expected rows in memory. To read files, use"),
        (JSON, "a.csv, line 1: .*; expected an object .* use satrap.CSV for delimited text"),
        (Criteo, "a.csv, line 1: it has 2 columns; expected 40, as in Criteo's logs: use CSV for others"),
    ],
)
def test_files_of_another_format_lead_to_csv(make_source: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,click\nu1,1\n".replace(",", "\t" if make_source is Criteo else ","))
    with pytest.raises((ConfigError, SourceError), match=message):
        list(make_source(tmp_path / "a.csv").batches(["C1"]))
