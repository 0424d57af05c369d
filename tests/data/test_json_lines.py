"""JSON lines: what is not said of every format by the tests that all formats share (`clicks.KINDS`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clicks
from satrap import JSON, IdColumn
from satrap.errors import SourceError


@pytest.mark.parametrize("block_bytes", [300, 1000, 1 << 20])
def test_lines_are_split_anywhere(block_bytes: int, tmp_path: Path, seed: int) -> None:
    samples = clicks.make(60, seed, missing=0.0)
    clicks.write(tmp_path / "a.jsonl", samples)
    text = (tmp_path / "a.jsonl").read_text()
    for content in (
        text,
        text.rstrip(),
        text.replace("\n", "\r\n"),
        "\ufeff" + text,
        "\n" + text.replace("\n", "\n\n"),
    ):
        (tmp_path / "a.jsonl").write_text(content, newline="")
        data = clicks.source("jsonl", tmp_path / "a.jsonl", block_bytes=block_bytes, batch_size=7)
        assert clicks.read(data) == [clicks.expected(sample) for sample in samples]


def test_types_of_the_first_block_hold_everywhere(tmp_path: Path) -> None:
    """A number without a fraction, a text that looks like a time, and an id beyond int64."""
    first = '{"x": 1, "t": "2024-01-01", "big": 18446744073709551615, "y": 1}\n'
    (tmp_path / "a.jsonl").write_text(first + '{"x": 0.5, "t": "soon", "big": 7, "y": 0, "more": [{}]}\n')
    data = JSON(tmp_path / "a.jsonl", dense="x", label="y", block_bytes=len(first))
    batch = next(iter(data.batches(["t", "big"])))
    assert batch.dense is not None and batch.dense.tolist() == [[1.0], [0.5]]
    assert batch.values[2:].tolist() == [2**64 - 1, 7] and len(np.unique(batch.values)) == 4


def test_ids_beyond_int64_may_come_after_smaller_ones(tmp_path: Path) -> None:
    first, second = '{"one": 1, "list": [2, -3], "other": -4}', '{"one": 1, "list": [9223372036854775808], "other": -5}'
    (tmp_path / "a.jsonl").write_text(f"{first}\n{second.replace('1', str(2**64 - 1), 1)}\n")
    data = JSON(tmp_path / "a.jsonl", block_bytes=len(first), batch_size=2)
    batch = next(iter(data.batches(["one", "list", "other"])))
    assert batch.values.tolist() == [1, 2**64 - 1, 2, 2**64 - 3, 2**63, 2**64 - 4, 2**64 - 5]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ('{"a": 1}\n{"a": 2\n', {}, "a.jsonl, line 2: JSON parse error"),
        ('{"a": 1}\n\n[1]\n', {}, "a.jsonl, line 3: JSON parse error"),
        ('{"a": 1}\n{"a": "x"}\n', {}, "a.jsonl, line 2|several types"),
        ('{"b": 1}\n', {}, "a.jsonl has no column 'a'"),
        ('{"a": null}\n', {}, "column 'a' is null in the whole first block"),
        ('{"a": []}\n', {}, "column 'a' is null in the whole first block"),
        ('{"a": 1, "y": "no"}\n', {"label": "y"}, "column 'y' is of type string; expected numbers"),
        ('{"a": {"b": 1}}\n', {}, "column 'a' is of type struct"),
        ('{"a": 1.5}\n', {}, "a.jsonl, line 1"),
    ],
)
def test_bad_lines_are_named(text: str, options: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(SourceError, match=message):
        list(JSON(tmp_path / "a.jsonl", **options).batches(["a"]))
    (tmp_path / "a.jsonl").write_text('{"a": null}\n{"a": 3}\n')
    declared = JSON(tmp_path / "a.jsonl", ids={"a": IdColumn(kind="integer", missing=9)}, block_bytes=10)
    assert [batch.values.tolist() for batch in declared.batches(["a"])] == [[9, 3]]


@pytest.mark.parametrize("size", [1, 60, 1 << 20], ids=["lines", "some blocks", "one block"])
@pytest.mark.parametrize(
    "values",
    [
        [1.5, 2.5, None, 3.5],
        [1, 2, None, 2.5],
        [None, None, None, 2.5],
        [[0.5], [], [1.5, 2.0], None],
        [[], [], [1], [2.5]],
        [2**64 - 1, 2**64 - 2, None, 2**64 - 3],
        [None, None, "2024-01-01", "soon"],
        ["2024-01-01", "2024-01-02", "2024-01-03", None],
    ],
    ids=str,
)
def test_columns_that_are_passed_on_hold_what_the_lines_hold(values: list[Any], size: int, tmp_path: Path) -> None:
    text = "".join(json.dumps({"a": i, "p": value}) + "\n" for i, value in enumerate(values))
    (tmp_path / "a.jsonl").write_text(text)
    batches = JSON(tmp_path / "a.jsonl", extra="p", block_bytes=size).batches(["a"])
    assert [value for batch in batches for value in batch.extra["p"].to_pylist()] == values


@pytest.mark.parametrize("bound", [2.0, 2])
@pytest.mark.parametrize("values", [[1.5, 2.5, 2.0], [None, 1, 2.5], [1, 2, 2.5], [None, None, None]], ids=str)
def test_numbers_with_fractions_select_samples(values: list[Any], bound: float, tmp_path: Path) -> None:
    text = "".join(json.dumps({"a": i, "p": value}) + "\n" for i, value in enumerate(values))
    (tmp_path / "a.jsonl").write_text(text)
    batches = JSON(tmp_path / "a.jsonl", since=("p", bound), block_bytes=1).batches(["a"])
    expected = [i for i, value in enumerate(values) if value is not None and value >= bound]
    assert [int(i) for batch in batches for i in batch.values] == expected


def test_times_may_stand_beside_ids(tmp_path: Path) -> None:
    text = '{"a": [1, 2], "w": ["1970-01-02", "1970-01-01 00:00:05"]}\n'
    (tmp_path / "a.jsonl").write_text(text)
    (batch,) = JSON(tmp_path / "a.jsonl", ids={"a": IdColumn(numbers="w")}).batches(["a"])
    assert batch.extra["a[w]"].to_pylist() == [[86400.0, 5.0]]
