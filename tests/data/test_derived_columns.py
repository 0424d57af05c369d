"""Buckets, crosses and times against Python's own: bisect, a dict of tuples, datetime."""

from __future__ import annotations

from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap import CSV, JSON, DenseColumn, Frame, IdColumn, IterableSource, Parquet
from satrap.config.columns import Time
from satrap.errors import ConfigError, SourceError

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOMENTS = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))


def bags(table: pa.Table, feature: str, column: IdColumn) -> list[list[int]]:
    (batch,) = Frame(table, ids={feature: column}, batch_size=10**6).batches([feature])
    offsets = np.arange(batch.batch_size + 1) if batch.offsets is None else batch.offsets
    return [batch.values[a:b].tolist() for a, b in pairwise(offsets)]


@given(
    st.lists(st.one_of(st.none(), st.floats(width=32)), min_size=1),
    st.sets(st.floats(-1e6, 1e6), min_size=1),
)
def test_buckets(values: list[float | None], boundaries: set[float]) -> None:
    ascending = sorted(boundaries)
    found = bags(pa.table({"x": pa.array(values, pa.float64())}), "x", IdColumn(boundaries=ascending))
    assert found == [[] if x is None or x != x else [bisect_right(ascending, x)] for x in values]
    lists = pa.table({"x": pa.array([values, None, []], pa.list_(pa.float64()))})
    assert bags(lists, "x", IdColumn(boundaries=ascending)) == [[i for bag in found for i in bag], [], []]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", None]), st.integers(0, 2)), min_size=1))
def test_crosses(rows: list[tuple[int, str | None, int]]) -> None:
    table = pa.table(
        {
            "a": [a for a, _, _ in rows],
            "b": pa.array([b for _, b, _ in rows], pa.string()),
            "c": [c for _, _, c in rows],
        }
    )
    found = bags(table, "a", IdColumn(crossed=("b", "c")))
    ids: dict[Any, list[int]] = {}
    for row, bag in zip(rows, found, strict=True):
        assert bag == ([] if row[1] is None else ids.setdefault(row, bag))
    assert len({each[0] for each in ids.values()}) == len(ids)
    for row, bag in zip(rows, bags(table, "a", IdColumn(crossed=("b", "c"), missing=5)), strict=True):
        assert bag == ids.get(row, [5])


@given(st.lists(st.one_of(st.none(), MOMENTS), min_size=1), st.sampled_from(["s", "ms", "us", "ns"]), st.booleans())
def test_times(moments: list[datetime | None], unit: str, has_zone: bool) -> None:
    whole = [None if each is None else each.replace(microsecond=0) for each in moments]
    zone = "America/New_York" if has_zone else None
    array = pa.array(
        [each if has_zone or each is None else each.replace(tzinfo=None) for each in whole], pa.timestamp(unit, zone)
    )
    parts: dict[Time, Any] = {
        "seconds": lambda at: (at - EPOCH) // timedelta(seconds=1),
        "hours": lambda at: (at - EPOCH) // timedelta(hours=1),
        "days": lambda at: (at - EPOCH).days,
        "hour_of_day": lambda at: at.hour,
        "weekday": lambda at: at.weekday(),
    }
    for name, part in parts.items():
        expected = [[] if at is None else [part(at) % 2**64] for at in whole]
        assert bags(pa.table({"at": array}), "at", IdColumn(time=name)) == expected
    (batch,) = Frame(
        pa.table({"at": array, "i": range(len(whole))}), dense=DenseColumn("at", time="days", missing=-1)
    ).batches(["i"])
    expected_days = [[-1.0 if at is None else (at - EPOCH) / timedelta(days=1)] for at in whole]
    np.testing.assert_array_equal(batch.dense, np.array(expected_days, np.float32))


def test_files_have_them(tmp_path: Path) -> None:
    table = pa.table(
        {"day": pa.array([0, 19000], pa.date32()), "at": pa.array([1, 2], pa.timestamp("ns")), "x": [1.0, 5.0]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    columns = {"day": IdColumn(time="days"), "at": IdColumn(time="seconds"), "x": IdColumn(boundaries=(2, 7))}
    (batch,) = Parquet(tmp_path / "a.parquet", ids=columns).batches(list(columns))
    assert batch.values.tolist() == [0, 19000, 0, 0, 0, 1]
    (tmp_path / "a.jsonl").write_text(
        '{"at": "2024-05-01 13:00:00", "x": 3}\n{"at": "2024-05-02 14:00:00", "x": 9.5}\n'
    )
    columns = {"at": IdColumn(time="hour_of_day"), "x": IdColumn(boundaries=(2, 7))}
    (batch,) = JSON(tmp_path / "a.jsonl", ids=columns, block_bytes=20).batches(list(columns))
    assert batch.values.tolist() == [13, 14, 1, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IdColumn("x", boundaries=(2, 1)), "expected ascending numbers"),
        (lambda: IdColumn("x", boundaries=()), "expected ascending numbers"),
        (
            lambda: IdColumn("x", boundaries=(1,), kind="integer"),
            "boundaries and kind are given",
        ),
        (lambda: IdColumn("x", crossed="y", time="days"), "crossed and time are given; leave one of them out"),
        (lambda: IdColumn("x", crossed="y", weights="w"), "crossed and weights are given"),
        (lambda: IdColumn("x", time="minute"), "time is 'minute'"),  # type: ignore[arg-type]
        (lambda: CSV("a.csv", ids={"x": IdColumn(boundaries=(1,))}), "'x' has boundaries, crossed or time"),
        (lambda: CSV("a.csv", dense=DenseColumn("x", time="days")), "'x' has boundaries, crossed or time"),
    ],
)
def test_impossible_declarations_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (IdColumn(time="days"), r"expected timestamps or dates \(datetime objects\), as declared"),
        (IdColumn(crossed="list"), "expected one integer or string in each row"),
        (IdColumn(crossed="no"), "has no column 'no'"),
        (IdColumn("text", boundaries=(1,)), "expected numbers, as declared"),
    ],
)
def test_columns_of_another_type_are_refused(column: IdColumn, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        bags(pa.table({"x": [1], "list": [[1]], "text": ["a"]}), "x", column)


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.date32(), pa.list_(pa.date32())])
def test_times_that_are_read_as_they_are_name_the_declaration(kind: pa.DataType) -> None:
    table = pa.table({"id": [1], "x": pa.nulls(1, kind)})
    with pytest.raises(SourceError, match=r"ids; of times, declare what to read: IdColumn\('x', time='days'\)"):
        bags(table, "x", IdColumn())
    dense = DenseColumn("x", width=1) if pa.types.is_list(kind) else "x"
    with pytest.raises(SourceError, match=r"numbers; of times, declare what to read: DenseColumn\('x', time='days'\)"):
        list(Frame(table, dense=dense).batches(["id"]))


def test_a_time_as_text_names_what_to_pass() -> None:
    def data(time: Any) -> IterableSource:
        return IterableSource([{"x": time, "a": 1}], samples=True, batch_size=1, dense=DenseColumn("x", time="days"))

    with pytest.raises(SourceError, match=r"'x' is of type string; expected timestamps or dates \(datetime objects\)"):
        list(data("2024-01-01").batches(["a"]))
    (inputs,) = data(datetime(1970, 1, 3)).batches(["a"])
    assert inputs.dense is not None and inputs.dense.tolist() == [[2]]
