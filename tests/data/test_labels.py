"""In every source, a row whose label is not of the column's declared kind is malformed: refused or counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from logged import logged
from satrap.config.columns import IdColumn, LabelColumn
from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.arrow import Arrow
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.frame import Frame
from satrap.data.iterable import IterableSource
from satrap.data.parquet import Parquet
from satrap.data.source import Source
from satrap.errors import ConfigError, SourceError

KINDS: dict[Any, tuple[list[float], list[float]]] = {  # valid and invalid labels of each kind
    "binary": ([0, 1, -0.0], [2, 7, -1, 0.5, np.inf, 1e300]),
    "count": ([0, 1, 7, 2.0**30], [-1, 0.5, -0.25, -np.inf, 1e300]),
    "real": ([0, -1, 0.5, 1e30], [np.inf, -np.inf, -1e300]),
}
EXPECTED = {
    "binary": r"0 or 1, or declare LabelColumn\('click', above=...\), kind='real' or kind='count'",
    "count": r"a whole number from 0, or declare LabelColumn\('click', kind='real'\)",
    "real": "a finite",
}


def csv(path: Path, labels: list[float]) -> tuple[Source, str]:
    path.write_text("click,a\n" + "".join(f"{label!r},{i}\n" for i, label in enumerate(labels)))
    return CSV(path), f"{path}, line {{}}: "


def parquet(path: Path, labels: list[float]) -> tuple[Source, str]:
    pq.write_table(pa.table({"click": np.array(labels), "a": range(len(labels))}), path, row_group_size=7)
    return Parquet(path, block_rows=5), f"{path}, row {{}}: "


def arrow(path: Path, labels: list[float]) -> tuple[Source, str]:
    table = pa.table({"click": np.array(labels), "a": range(len(labels))})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return Arrow(path), f"{path}, row {{}}: "


def frame(path: Path, labels: list[float]) -> tuple[Source, str]:
    return Frame({"click": np.array(labels), "a": np.arange(len(labels))}), "the frame, row {}: "


def criteo(path: Path, labels: list[float]) -> tuple[Source, str]:
    path.write_text("".join(f"{label!r}\t" + "1\t" * 13 + "\t".join(["a"] * 26) + "\n" for label in labels))
    return Criteo(path, ids={"a": "C1"}), f"{path}, line {{}}: "


def items(path: Path, labels: list[float]) -> tuple[Source, str]:
    return IterableSource([{"click": np.array(labels), "a": np.arange(len(labels))}]), "item 0, sample {}: "


@pytest.mark.parametrize("make", [csv, parquet, arrow, frame, criteo, items])
@pytest.mark.parametrize("kind", KINDS)
def test_a_label_outside_its_kind_is_refused_or_counted(
    kind: Any, make: Callable[[Path, list[float]], tuple[Source, str]], tmp_path: Path
) -> None:
    valid, invalid = KINDS[kind]
    name = "label" if make is criteo else "click"
    for bad in invalid:
        labels = [*valid, bad, *valid]
        data, where = make(tmp_path / "data", labels)
        data = data.replace(label=LabelColumn(name, kind=kind))
        number = len(valid) + (2 if make is csv else 0 if make is items else 1)
        prefix = where.format(number)
        expected = "a finite" if abs(bad) > 3.5e38 else EXPECTED[kind].replace("click", name)
        with pytest.raises(SourceError, match=f"^{prefix}column '{name}' holds .*; expected {expected}"):
            list(data.batches(["a"]))
        batches = data.replace(max_bad_rows=1).batches(["a"])
        found = [float(label) for inputs in batches if inputs.label is not None for label in inputs.label]
        assert found == np.array(valid * 2, np.float32).tolist() and batches.skipped_rows.malformed == 1, bad


@pytest.mark.parametrize(
    "label",
    [
        np.array([[1.0], [0.0]]),
        torch.tensor([[1], [0]]),
        [[True], [False]],
        [torch.tensor([1.0]), torch.tensor([0.0])],
        [[1.0], None],
    ],
    ids=str,
)
def test_labels_may_be_lists_of_one(label: Any) -> None:
    """PyTorch's losses take labels of the shape [batch_size, 1]."""
    column = LabelColumn("y", missing=0)
    for data in (
        Frame({"a": [1, 2], "y": label}, label=column),
        IterableSource([{"a": [1, 2], "y": label}], label=column),
    ):
        (batch,) = data.batches(["a"])
        assert np.asarray(batch.label).tolist() == [1.0, 0.0]
    with pytest.raises(SourceError, match=r"column 'y' is of type .*list.*; expected numbers"):
        list(Frame({"a": [1, 2], "y": [[1.0], [1.0, 0.0]]}, label="y").batches(["a"]))


def test_labels_are_binary_unless_declared() -> None:
    """Training on a click of 7 would raise no error."""
    assert LabelColumn("click").kind == "binary"
    for label in ("click", ["other", "click"]):
        data = Frame({"click": [0, 1, 7], "other": [0, 1, 1], "a": [1, 2, 3]}, label=label)
        with pytest.raises(SourceError, match="the frame, row 3: column 'click' holds 7; expected 0 or 1"):
            list(data.batches(["a"]))


@pytest.mark.parametrize("wrap", [lambda label: label, lambda label: [label]], ids=["bytes", "lists"])
def test_labels_of_bytes_need_not_be_utf8(wrap: Any) -> None:
    """Bytes that are no text are another text: 0 beside `true`, malformed beside `values`."""
    columns: dict[str, Any] = {"y": [wrap(label) for label in (b"0", b"1", b"\xff")], "a": [1, 2, 3]}
    (inputs,) = Frame(columns, label=LabelColumn("y", true="1")).batches(["a"])
    assert inputs.label is not None and inputs.label.tolist() == [0, 1, 0]
    with pytest.raises(SourceError, match=r"row 3: column 'y' holds b'\\xff'; expected one of '0', '1'"):
        list(Frame(columns, label=LabelColumn("y", values={"0": 0, "1": 1})).batches(["a"]))


def test_converted_labels_are_of_the_kind() -> None:
    """`true` and `above` yield 0 and 1; a missing label is of no kind; an infinite label is not `above`."""
    columns: dict[str, Any] = {"n": [3.0, 20.0, None], "t": ["y", "n", None], "a": [1, 2, 3]}
    label = [LabelColumn("n", above=15, missing=0), LabelColumn("t", true="y", missing="drop")]
    batches = Frame(columns, label=label).batches(["a"])
    (inputs,) = batches
    assert inputs.label is not None and inputs.label.tolist() == [[0, 1], [1, 0]] and batches.skipped_rows.no_label == 1
    with pytest.raises(SourceError, match="row 2: column 'n' holds inf; expected a finite label"):
        list(Frame({"n": [1.0, np.inf], "a": [1, 2]}, label=LabelColumn("n", above=15)).batches(["a"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "click"}, "label column 'y': kind is 'click' .*; expected one of 'binary', 'real', 'count'"),
        (
            {"values": {"a": 1, "b": 2}},
            r"label column 'y': values\['b'\] is 2; expected 0 or 1, or declare LabelColumn",
        ),
        ({"missing": 0.5}, "label column 'y': missing is 0.5; expected 0 or 1, or declare"),
        ({"missing": 0.5, "kind": "count"}, "missing is 0.5; expected a whole number from 0, or declare"),
    ],
)
def test_a_declaration_that_contradicts_its_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LabelColumn("y", **options)
    if "kind" not in options:
        assert LabelColumn.from_dict(LabelColumn("y", kind="real", **options).to_dict()).kind == "real"


def test_a_text_for_1_that_never_occurs_is_a_warning(tmp_path: Path) -> None:
    """Labels that are all 0 train without an error."""
    (tmp_path / "data.csv").write_text("click,a\n" + "yes,1\nno,2\n" * 50)
    table = pa.table({"click": ["yes", "no"] * 50, "a": range(100)})
    pq.write_table(table, tmp_path / "data.parquet")
    files = [CSV(tmp_path / "data.csv"), Parquet(tmp_path / "data.parquet")]
    for data in [*files, Frame(table), IterableSource(lambda: iter([table]))]:
        data = data.replace(label="click", label_true=["Yes", "YES"], batch_size=8)
        values = "" if isinstance(data, IterableSource) else "; found 'yes', 'no'"
        with logged(
            "satrap.data", "^warning: label column 'click': none of 100 samples holds 'Yes' or 'YES'"
        ) as records:
            batches = data.batches(["a"])
            assert len(list(batches)) == 13 and next(batches, None) is None
        (record,) = records
        assert record.getMessage().endswith(f", so all are 0{values}: correct label_true (or true=)")
        list(data.replace(label_true="yes").batches(["a"]))
        label = [LabelColumn("a", kind="real"), LabelColumn("click", true="no")]
        list(data.replace(label=label, label_true=None).batches([]))


def test_the_warning_comes_before_the_end_of_much_data() -> None:
    data = Frame({"y": ["n"] * 6_000, "a": range(6_000)}, label=LabelColumn("y", true="Y"), epochs=None)
    with data.batches(["a"]) as batches, logged("satrap.data", "none of 10,096 samples") as records:
        while not records:
            next(batches)


def test_texts_in_a_column_of_numbers_name_the_option(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("bought,price,a\nno,1.5,1\n1,n/a,2\n")
    message = r"line 2: column 'bought' holds 'no'; expected a number, or label_true=... for a column of strings; fix"
    with pytest.raises(SourceError, match=message):
        list(CSV(path, label="bought").batches(["a"]))
    message = (
        r"line 3: column 'price' holds 'n/a'; expected a number, or missing=\('n/a',\) if it means no value, or a "
        "feature 'price' for strings; fix"
    )
    with pytest.raises(SourceError, match=message):
        list(CSV(path, dense="price").batches(["a"]))


def test_a_label_among_the_dense_columns_is_refused() -> None:
    frame = {"y": [0, 1], "z": [1, 0], "a": [1, 2]}
    for label in ("y", ["z", "y"], [LabelColumn("z"), LabelColumn("y")]):
        with pytest.raises(
            ConfigError, match=r"Frame: column 'y' is in dense and is the label, .*: leave it out of dense"
        ):
            Frame(frame, dense=["a", "y"], label=label)


@pytest.mark.parametrize("label", ["y", ["z", "y"], [LabelColumn("z"), LabelColumn("y")]])
@pytest.mark.parametrize(
    ("feature", "ids"), [("y", {}), ("f", {"f": "y"}), ("f", {"f": IdColumn("z1", crossed=("a", "y"))})]
)
def test_a_feature_that_reads_the_label_is_refused(feature: str, ids: Any, label: Any) -> None:
    frame = {"y": [0, 1], "z": [1, 0], "z1": [1, 1], "a": [1, 2]}
    message = f"column 'y' is read by feature '{feature}' and is the label, so the model would read what it has to "
    data = Frame(frame, label=label, ids=ids)
    for features in (["a", feature], Features({"a": Table("a", dim=2), feature: Table("t", dim=2)})):
        for source in (data, IterableSource([frame], label=label, ids=ids)):
            with pytest.raises(ConfigError, match=message):
                source.batches(features)
    data.batches(["a"]).close()  # a model without the feature
