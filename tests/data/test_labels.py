"""A label that is not of its column's declared kind is a malformed row in every source: named, or counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from satrap.config.columns import LabelColumn
from satrap.data.arrow import Arrow
from satrap.data.criteo import Criteo
from satrap.data.delimited import CSV
from satrap.data.frame import Frame
from satrap.data.iterable import Iterable
from satrap.data.parquet import Parquet
from satrap.data.source import Source
from satrap.errors import ConfigError, SourceError

KINDS: dict[Any, tuple[list[float], list[float]]] = {  # what each takes, and what it does not
    "binary": ([0, 1, -0.0], [2, 7, -1, 0.5, np.inf, 1e300]),
    "count": ([0, 1, 7, 2.0**30], [-1, 0.5, -0.25, -np.inf, 1e300]),
    "real": ([0, -1, 0.5, 1e30], [np.inf, -np.inf, -1e300]),
}
WANTED = {
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
    return Iterable([{"click": np.array(labels), "a": np.arange(len(labels))}]), "item 0, sample {}: "


@pytest.mark.parametrize("make", [csv, parquet, arrow, frame, criteo, items])
@pytest.mark.parametrize("kind", KINDS)
def test_a_label_outside_its_kind_is_refused_or_counted(
    kind: Any, make: Callable[[Path, list[float]], tuple[Source, str]], tmp_path: Path
) -> None:
    taken, refused = KINDS[kind]
    name = "label" if make is criteo else "click"
    for bad in refused:
        labels = [*taken, bad, *taken]
        data, where = make(tmp_path / "data", labels)
        data = data.replace(label=LabelColumn(name, kind=kind))
        number = len(taken) + (2 if make is csv else 0 if make is items else 1)
        place = where.format(number)
        wanted = "a finite" if abs(bad) > 3.5e38 else WANTED[kind].replace("click", name)
        with pytest.raises(SourceError, match=f"^{place}column '{name}' holds .*; wanted {wanted}"):
            list(data.batches(["a"]))
        batches = data.replace(max_bad_rows=1).batches(["a"])
        found = [float(label) for inputs in batches if inputs.label is not None for label in inputs.label]
        assert found == np.array(taken * 2, np.float32).tolist() and batches.left_out.malformed == 1, bad


def test_labels_are_binary_unless_declared() -> None:
    """A click of 7 would train in silence."""
    assert LabelColumn("click").kind == "binary"
    for label in ("click", ["other", "click"]):
        data = Frame({"click": [0, 1, 7], "other": [0, 1, 1], "a": [1, 2, 3]}, label=label)
        with pytest.raises(SourceError, match="the frame, row 3: column 'click' holds 7; wanted 0 or 1"):
            list(data.batches(["a"]))


def test_numbers_that_a_declaration_makes_are_of_the_kind() -> None:
    """`true` and `above` give 0 and 1; a missing label is no number of any kind; an infinite one is not `above`."""
    columns: dict[str, Any] = {"n": [3.0, 20.0, None], "t": ["y", "n", None], "a": [1, 2, 3]}
    label = [LabelColumn("n", above=15, missing=0), LabelColumn("t", true="y", missing="drop")]
    batches = Frame(columns, label=label).batches(["a"])
    (inputs,) = batches
    assert inputs.label is not None and inputs.label.tolist() == [[0, 1], [1, 0]] and batches.left_out.no_label == 1
    with pytest.raises(SourceError, match="row 2: column 'n' holds inf; wanted a finite label"):
        list(Frame({"n": [1.0, np.inf], "a": [1, 2]}, label=LabelColumn("n", above=15)).batches(["a"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "click"}, "label column 'y': kind is 'click' .*; expected one of 'binary', 'real', 'count'"),
        ({"values": {"a": 1, "b": 2}}, r"label column 'y': values\['b'\] is 2; wanted 0 or 1, or declare LabelColumn"),
        ({"missing": 0.5}, "label column 'y': missing is 0.5; wanted 0 or 1, or declare"),
        ({"missing": 0.5, "kind": "count"}, "missing is 0.5; wanted a whole number from 0, or declare"),
    ],
)
def test_a_declaration_that_contradicts_its_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LabelColumn("y", **options)
    if "kind" not in options:
        assert LabelColumn.from_dict(LabelColumn("y", kind="real", **options).to_dict()).kind == "real"
