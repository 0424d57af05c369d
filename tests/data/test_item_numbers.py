"""Numbers beside the ids of a sequence: each stays beside its id through cutting, padding, shuffling and joining."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings

from satrap import CSV, JSON, ConfigError, Embeddings, Frame, IdColumn, IterableSource, Parquet, SourceError, Table
from satrap.config.features import Features
from satrap.data.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:the embeddings are evaluated, but no table has a row yet")
ITEM = Table("item", dim=2)
lists = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=20)
TIMED: dict[str, Any] = {"past": IdColumn(numbers=("time", "rating"))}


def rows(bags: list[list[int]]) -> dict[str, list[Any]]:
    """Return columns whose numbers follow from the id and its place, so that each shows to which id it belongs."""
    return {
        "past": bags,
        "time": [[1_700_000_000 + 100 * id_ + at for at, id_ in enumerate(bag)] for bag in bags],
        "rating": [[id_ + at / 8 for at, id_ in enumerate(bag)] for bag in bags],
        "row": list(range(len(bags))),
    }


def kept(feature: Any, bag: list[int]) -> list[int]:
    """Return the places of the ids that are looked up."""
    at = [i for i, id_ in enumerate(bag) if id_ != feature.padding_id]
    if feature.max_length is None:
        return at
    return at[-feature.max_length :] if feature.keep == "last" else at[: feature.max_length]


@settings(max_examples=settings().max_examples // 4, deadline=None)
@given(
    bags=lists,
    max_length=st.sampled_from([None, 1, 3]),
    keep=st.sampled_from(["last", "first"]),
    padding_id=st.sampled_from([None, 0]),
    jagged=st.booleans(),
    shuffle=st.booleans(),
    form=st.sampled_from(["frame", "items"]),
)
def test_each_number_stays_beside_its_id(
    bags: list[list[int]], max_length: Any, keep: Any, padding_id: Any, jagged: bool, shuffle: bool, form: str
) -> None:
    feature = ITEM.sequence(max_length, keep=keep, padding_id=padding_id, jagged=jagged or max_length is None)
    embeddings = Embeddings({"past": feature}, num_threads=1).eval()
    columns = rows(bags)
    options: dict[str, Any] = {"ids": TIMED, "extra": "row", "batch_size": 3, "shuffle": shuffle, "num_threads": 0}
    source: Source
    if form == "frame":
        source = Frame(pa.table({**columns, "past": pa.array(bags, pa.list_(pa.int64()))}), **options)
    else:
        items = [{name: column[i] for name, column in columns.items()} for i in range(len(bags))]
        source = IterableSource(
            [{**each, "past": np.array(each["past"], np.int64)} for each in items], samples=True, **options
        )
    seen = 0
    for batch in embeddings.stream(source):
        past = batch["past"]
        flat = {name: each if feature.jagged else each[past.mask] for name, each in past.numbers.items()}
        assert all(each.dtype == torch.float64 for each in flat.values())
        if not feature.jagged:
            assert all(not each[~past.mask].any() for each in past.numbers.values())
        for name in ("time", "rating"):
            expected = [
                columns[name][row][at]
                for row in batch.inputs.extra["row"].to_pylist()
                for at in kept(feature, bags[row])
            ]
            assert flat[name].tolist() == expected
        seen += len(batch)
    assert seen == len(bags)


def test_padding_of_a_jagged_sequence_pads_its_numbers() -> None:
    embeddings = Embeddings({"past": ITEM.sequence()}, num_threads=1).eval()
    table = pa.table(rows([[1, 2], [], [3]]))
    padded = next(embeddings.stream(Frame(table, ids=TIMED, batch_size=3)))["past"].padded()
    assert padded.numbers["rating"].tolist() == [[1.0, 2.125], [0.0, 0.0], [3.0, 0.0]]


def test_timestamps_become_seconds(tmp_path: Path) -> None:
    times = pa.array([[0, 1_700_000_000_500], []], pa.list_(pa.timestamp("ms")))
    pq.write_table(pa.table({"past": [[1, 2], []], "time": times}), tmp_path / "a.parquet")
    source = Parquet(tmp_path / "a.parquet", ids={"past": IdColumn(numbers="time")})
    inputs = next(source.batches(Features({"past": ITEM.sequence()})))
    assert inputs.extra["past[time]"].to_pylist() == [[0.0, 1_700_000_000.5], []]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"time": [[1.0, 2.0], [3.0]]}, "column 'time' has 1 numbers and column 'past' has 2 ids"),
        ({"time": [[1.0, 2.0], [3.0, None]]}, "column 'time' holds .*; expected finite numbers"),
        ({"time": [[1.0, 2.0], None]}, "column 'time' has 0 numbers and column 'past' has 2 ids"),
        ({"past": [[1, 2], [3, None]]}, "column 'past' lists a missing id, and its ids have numbers: remove both"),
    ],
)
def test_a_malformed_row_is_named_with_its_line_and_columns(
    tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    columns: dict[str, Any] = {"past": [[1, 2], [3, 4]], "time": [[1.0, 2.0], [3.0, 4.0]]} | changes
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({name: each[i] for name, each in columns.items()}) + "\n" for i in range(2)))
    source = JSON(path, ids={"past": IdColumn(numbers="time")})
    with pytest.raises(SourceError, match=rf"a\.jsonl, from byte 0, row 2: {found}"):
        list(source.batches(Features({"past": ITEM.sequence()})))
    kept = list(source.replace(max_bad_rows=1).batches(Features({"past": ITEM.sequence()})))
    assert [each.extra["past[time]"].to_pylist() for each in kept] == [[[1.0, 2.0]]]


def test_a_row_whose_sequences_are_not_aligned_is_named() -> None:
    """Padding does not count. The worker has the same check for batches without a source."""
    features = Features(
        {"past": ITEM.sequence(padding_id=0), "kinds": Table("kind", dim=3).sequence(aligned_with="past", padding_id=9)}
    )
    table = pa.table({"past": [[1, 0, 2], [3], [0]], "kind": [[7, 8, 9], [7, 7], []]})
    source = Frame(table, ids={"kinds": "kind"}, batch_size=3)
    with pytest.raises(
        SourceError, match=r"row 2: feature 'kinds' \(column 'kind'\) has 2 ids and 'past' \(column 'past'\), .* has 1"
    ):
        list(source.batches(features))
    (batch,) = source.replace(max_bad_rows=1).batches(features)
    assert batch.batch_size == 2 and batch.values.tolist() == [1, 0, 2, 0, 7, 8, 9]


def test_declarations_that_cannot_be_honoured(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("past,time\n1|2,3|4\n")
    sequence, pooled = Features({"past": ITEM.sequence()}), Features({"past": ITEM.bag("sum")})
    table = pa.table({"past": [[1]], "time": [["a"]]})
    numbers = {"past": IdColumn(numbers="time")}
    with pytest.raises(ConfigError, match="text has no lists of numbers: convert the files"):
        CSV(tmp_path / "a.csv", ids={"past": IdColumn(separator="|", numbers="time")}).batches(sequence)
    with pytest.raises(ConfigError, match="feature 'past' is pooled and its IdColumn has numbers"):
        Frame(table, ids=numbers).batches(pooled)
    with pytest.raises(SourceError, match=r"column 'time' is of type list<.*>; expected numbers or timestamps"):
        list(Frame(table, ids=numbers).batches(sequence))
    with pytest.raises(SourceError, match=r"has no column 'time' .the numbers of feature 'past'"):
        list(Frame(pd.DataFrame({"past": [[1]]}), ids=numbers).batches(sequence))
    with pytest.raises(ConfigError, match="crossed and numbers are given"):
        IdColumn("a", crossed="b", numbers="c")
