"""`share`, `before` and `since` of a source: parts are disjoint and together all samples, in every format."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import satrap
from clicks import KINDS, expected, make, read, source, write
from satrap.config.columns import LabelColumn
from satrap.data.registry import source_from_dict
from satrap.data.source import Source
from satrap.errors import ConfigError, SourceError

SAMPLES = make(400, 5)
ALL = sorted(expected(each) for each in SAMPLES)


def ids_of(data: Any, **options: Any) -> list[int]:
    name = "id" if isinstance(data, satrap.CSV) else "a"
    return [int(value) for batch in data.batches((name,), **options) for value in batch.values]


@pytest.fixture(params=KINDS)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    path = tmp_path / f"clicks.{request.param}"
    write(path, SAMPLES)
    return source(request.param, path, batch_size=32)


def test_two_shares_are_disjoint_and_together_all_samples(data: Source) -> None:
    train, test = data.replace(share=(0.0, 0.9)), data.replace(share=(0.9, 1.0))
    held_out = read(test)
    assert sorted(read(train) + held_out) == ALL and 15 <= len(held_out) <= 75
    assert sorted(read(train.replace(shuffle=True))) == sorted(read(train))
    assert sorted(read(test.replace(seed=1))) != sorted(held_out)
    with pytest.raises(TypeError, match="share, before or since select"):
        len(train.batches(()))


def test_the_trainers_of_a_share_divide_its_samples(data: Source) -> None:
    train = data.replace(share=(0.0, 0.7))
    parts = [read(train, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(chain(*parts)) == sorted(read(train)) and all(parts)


@pytest.mark.parametrize("max_bad_rows", [0, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_disjoint_on_any_number_of_trainers_where_rows_are_left_out(
    kind: str, max_bad_rows: int, tmp_path: Path
) -> None:
    """One trainer evaluates on the rest of what several train on: a row that is left out moves no other one."""
    bad = 5 if max_bad_rows else 1
    samples = [
        each | {"click": None if i % 7 == 0 else bad if i % 11 == 0 else each["click"]}
        for i, each in enumerate(SAMPLES)
    ]
    write(path := tmp_path / f"clicks.{kind}", samples)
    data = source(kind, path, batch_size=32, label=LabelColumn("click", missing="drop"), max_bad_rows=max_bad_rows)
    train, test = data.replace(share=(0.0, 0.7)), data.replace(share=(0.7, 1.0))
    held_out = read(test)
    known = sorted(expected(each) for each in samples if each["click"] in (0, 1))
    for world_size in (1, 2, 3):
        parts = [read(train, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sorted(chain(*parts, held_out)) == known and all(parts)


@pytest.mark.parametrize("newlines", [False, True])
def test_shares_of_text_with_blank_lines_are_disjoint_on_any_number_of_trainers(newlines: bool, tmp_path: Path) -> None:
    notes = ["a\n\nb" if newlines and i % 3 == 0 else "c" for i in range(300)]
    rows = [f'{i},"{note}",{"" if i % 5 == 0 else i % 2}' for i, note in enumerate(notes)]
    for at in (250, 251, 170, 20):
        rows.insert(at, "\r" if at % 2 else "")
    rows[90:90] = ["bad,d,1"]
    (path := tmp_path / "rows.csv").write_bytes(("id,note,click\n" + "\n".join(rows)).encode())
    data = satrap.CSV(
        path,
        ids={"id": satrap.IdColumn(kind="integer")},
        label=LabelColumn("click", missing="drop"),
        newlines_in_values=newlines,
        block_bytes=1024,
        max_bad_rows=1,
    )
    train, test = data.replace(share=(0.0, 0.7)), data.replace(share=(0.7, 1.0))
    held_out = ids_of(test)
    for world_size in (1, 2, 3):
        parts = [ids_of(train, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sorted(chain(*parts, held_out)) == [i for i in range(300) if i % 5] and all(parts)


@pytest.mark.parametrize("offsets", [False, True])
def test_shares_of_single_samples_are_disjoint_however_they_are_read(offsets: bool) -> None:
    """Where chunks end depends on the batch size, on shuffle, on dropped samples and on where a run resumes."""

    def items(offset: int | None = None) -> Iterator[Any]:
        for i in range(offset or 0, 600):
            item = {"a": i, "click": None if i % 9 == 0 else i % 2}
            yield (item, i + 1) if offsets else item

    label = LabelColumn("click", missing="drop")
    data = satrap.IterableSource(items, samples=True, batch_size=32, label=label, offsets=offsets)
    train, test = data.replace(share=(0.0, 0.8)), data.replace(share=(0.8, 1.0))
    held_out = ids_of(test)
    others = [train, train.replace(batch_size=7)] + ([] if offsets else [train.replace(shuffle=True)])
    for each in others:
        assert sorted(ids_of(each) + held_out) == [i for i in range(600) if i % 9]
    assert ids_of(test.replace(batch_size=50)) == held_out
    batches = list(train.batches(("a",)))
    for number in range(0, len(batches), 3):
        rest = ids_of(train, position=batches[number].position)
        assert rest == [int(v) for b in batches[number + 1 :] for v in b.values]


@given(
    st.lists(st.booleans(), max_size=60), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 1, 2, 3]), st.data()
)
def test_selected_samples_resume_at_their_offsets(
    selected: list[bool], size: int, later: int, world_size: int, draw: st.DataObject
) -> None:
    """A run that resumes cuts other chunks than before, in which fewer samples may be selected."""

    def items(offset: int | None = None) -> Iterator[Any]:
        yield from (({"a": i, "x": int(selected[i])}, i + 1) for i in range(offset or 0, len(selected)))

    data = satrap.IterableSource(items, samples=True, batch_size=size, offsets=True, since=("x", 1))
    for rank in range(world_size):
        batches = list(data.batches(("a",), rank=rank, world_size=world_size))
        if batches:
            number = draw.draw(st.integers(0, len(batches) - 1))
            start: dict[str, Any] = {"position": batches[number].position, "rank": rank, "world_size": world_size}
            rest = [int(v) for b in batches[number + 1 :] for v in b.values]
            assert ids_of(data, **start) == rest
            if world_size == 1:
                assert ids_of(data.replace(batch_size=later), **start) == rest


def test_reading_resumes_within_a_share(data: Source) -> None:
    train = data.replace(share=(0.2, 0.8), shuffle=True, shuffle_blocks=2)
    batches = list(train.batches(("user",), world_size=1))
    position = batches[1].position
    rest = list(train.batches(("user",), position=position))
    assert [each.extra["session"].to_pylist() for each in rest] == [
        each.extra["session"].to_pylist() for each in batches[2:]
    ]


def test_before_and_since_divide_by_a_column(data: Source) -> None:
    early, late = read(data.replace(before=("age", 60))), read(data.replace(since=("age", 60)))
    assert sorted(early + late) == ALL
    ages = {each["session"]: each["age"] for each in SAMPLES}
    assert late and all(ages[each[0]] >= 60 for each in late)
    assert all(ages[each[0]] is None or ages[each[0]] < 60 for each in early)


def test_text_is_compared_as_text(data: Source) -> None:
    late = read(data.replace(since=("session", "s2")))
    assert sorted(late) == sorted(expected(each) for each in SAMPLES if each["session"] >= "s2")


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.int8()])
def test_integers_of_any_size_are_compared_exactly(kind: pa.DataType) -> None:
    """Such as times in nanoseconds, which no float64 holds."""
    high = 100 if kind == pa.int8() else 2**63 - 4
    data = satrap.Frame({"a": list(range(5)), "at": pa.array([None, *range(high, high + 4)], kind)})
    for bound, least in ((high + 2, 3), (high + 1.5, None), (-5, 1), (2**70, 5), (high, 1)):
        late = ids_of(data.replace(since=("at", bound)))
        assert sorted(late + ids_of(data.replace(before=("at", bound)))) == list(range(5))
        if least is not None:
            assert late == list(range(least, 5))


@pytest.mark.parametrize("values", [[False, True, None], [0, 1, None], [0.5, 1.5, None], ["false", "true", None]])
def test_true_divides_a_column(values: list[Any]) -> None:
    frame = satrap.Frame({"a": [1, 2, 3], "d": values})
    assert ids_of(frame.replace(since=("d", True))) == [2]
    assert ids_of(frame.replace(before=("d", True))) == [1, 3]
    with pytest.raises(SourceError, match="column 'd' of type list<item: bool> cannot be compared to True"):
        ids_of(satrap.Frame({"a": [1], "d": [[True]]}, since=("d", True)))


def test_a_column_of_ids_divides_the_samples(tmp_path: Path) -> None:
    """Parquet files give the strings of ids as a dictionary for each row group."""
    names = ["p", "q", None, "s", "r", "p"]
    pq.write_table(pa.table({"name": names, "n": range(6)}), tmp_path / "a.parquet", row_group_size=2)
    data = satrap.Parquet(tmp_path / "a.parquet", extra=("n", "name"), block_rows=2)
    parts = [
        [n for batch in part.batches(("name",)) for n in batch.extra["n"].to_pylist()]
        for part in (data.replace(since=("name", "r")), data.replace(before=("name", "r")))
    ]
    assert parts == [[3, 4], [0, 1, 2, 5]]
    assert [b.extra["name"].to_pylist() for b in data.batches(("name",))] == [names]


MOMENTS = [datetime(2026, 1, 5, tzinfo=UTC) + timedelta(hours=hours) for hours in (-25, -1, 0, 5, 10, 11)]


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Paris"])
@pytest.mark.parametrize("kind", ["s", "ms", "us", "ns", "date32", "date64"])
def test_times_divide_as_pythons_do(kind: str, zone: str | None) -> None:
    """A date, a time or its ISO text; with a zone or without one, in which case both sides are in UTC."""
    is_date = kind.startswith("date")
    times = pa.array(MOMENTS, pa.timestamp("us", "UTC")).cast(pa.timestamp("s" if is_date else kind, zone))
    held = [at.replace(hour=0) for at in MOMENTS] if is_date else MOMENTS
    if is_date:
        times = pa.array([at.date() for at in MOMENTS], getattr(pa, kind)())
    data = satrap.Frame({"a": list(range(7)), "at": pa.concat_arrays([times, pa.nulls(1, times.type)])})
    paris = timezone(timedelta(hours=1))
    for bound, least in (
        (date(2026, 1, 5), datetime(2026, 1, 5)),
        (datetime(2026, 1, 5, 10), datetime(2026, 1, 5, 10)),
        (datetime(2026, 1, 5, 11, tzinfo=paris), datetime(2026, 1, 5, 10)),
        (datetime(2026, 1, 5, 10, 0, 0, 1), datetime(2026, 1, 5, 10, 0, 0, 1)),
        (np.datetime64("2026-01-05"), datetime(2026, 1, 5)),
        (np.datetime64("2026-01"), datetime(2026, 1, 1)),
        (np.datetime64("2026-01-05T10", "ns"), datetime(2026, 1, 5, 10)),
        (np.datetime64("2026-01-05T10:00:00.000000001"), datetime(2026, 1, 5, 10, 0, 0, 1)),
        ("2026-01-05 10:00", datetime(2026, 1, 5, 10)),
        ("2026-01-05T10:00Z", datetime(2026, 1, 5, 10)),
    ):
        late = data.replace(since=("at", bound))
        assert isinstance(late.since, tuple) and isinstance(late.since[1], str)
        assert json.loads(json.dumps(late.signature()))["since"] == list(late.since)
        assert ids_of(late) == [i for i, at in enumerate(held) if at >= least.replace(tzinfo=UTC)]
        assert sorted(ids_of(data.replace(before=("at", bound))) + ids_of(late)) == list(range(7))


def test_a_date_divides_text_that_begins_with_dates(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,at\n1,2026-01-04 23:00\n2,2026-01-05 00:00\n3,\n")
    data = satrap.CSV(tmp_path / "a.csv", ids={"id": satrap.IdColumn(kind="integer")})
    for bound in (date(2026, 1, 5), datetime(2026, 1, 5), np.datetime64("2026-01-05", "s")):
        assert ids_of(data.replace(since=("at", bound))) == [2]


@pytest.mark.parametrize("bound", [1767571200, 1.5, True, "soon"])
def test_a_column_of_times_says_what_a_bound_may_be(bound: Any) -> None:
    data = satrap.Frame({"a": [1], "at": [datetime(2026, 1, 5)]}, since=("at", bound))
    with pytest.raises(SourceError, match=re.escape("give a date or time, such as '2026-01-25' or datetime.date(")):
        ids_of(data)


def test_a_value_of_another_type_is_an_error(data: Source) -> None:
    with pytest.raises(SourceError, match=r"column 'session' of type .* cannot be compared to 3"):
        read(data.replace(since=("session", 3)))
    for option in ("since", "before"):
        with pytest.raises(SourceError, match=rf"no column 'nothing' \({option}\)"):
            read(data.replace(**{option: ("nothing", 3)}))


def test_batches_of_an_iterable_are_selected() -> None:
    items = [{"a": list(range(i, i + 10)), "click": [0, 1] * 5} for i in range(0, 200, 10)]
    data = satrap.IterableSource(items, label="click", share=(0.0, 0.5))
    other = data.replace(share=(0.5, 1.0))
    parts = [[int(v) for b in each.batches(("a",)) for v in b.values] for each in (data, other)]
    assert sorted(chain(*parts)) == list(range(200)) and all(parts)


def test_a_signature_and_a_form_are_plain_json_types() -> None:
    data = satrap.Parquet("a.parquet", share=(0.0, 0.5), before=("day", 3), since=("day", "2"))
    assert source_from_dict(json.loads(json.dumps(data.to_dict()))) == data
    frame = satrap.Frame({"a": [1, 2]}, share=(0.0, 0.5), since=("a", 2))
    signature = frame.signature()
    assert json.loads(json.dumps(signature)) == signature and signature["share"] == [0.0, 0.5]
    assert signature != frame.replace(seed=1).signature()


@given(st.floats(0.01, 0.99), st.integers(0, 2**64 - 1))
def test_any_cut_divides_a_frame(cut: float, seed: int) -> None:
    data = satrap.Frame({"a": list(range(500)), "b": [[1, 2]] * 500}, batch_size=100, block_rows=64, seed=seed)
    parts: list[Any] = [
        [int(v) for b in data.replace(share=share).batches(("a",)) for v in b.values] for share in ((0, cut), (cut, 1))
    ]
    assert sorted(chain(*parts)) == list(range(500))
    assert abs(len(parts[0]) - 500 * cut) < 6 * (500 * cut * (1 - cut)) ** 0.5 + 1


@pytest.mark.parametrize("share", [0.5, (0.5,), (0.5, 0.5), (0.2, 1.1), (-0.1, 0.5), ("a", 1), "ab"])
def test_other_shares_are_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match="share"):
        satrap.Parquet("a.parquet", share=share)


@pytest.mark.parametrize("bound", ["day", ("day",), (1, 2), ("day", [1]), ("day", np.datetime64("NaT")), ("day", None)])
def test_other_bounds_are_refused(bound: Any) -> None:
    with pytest.raises(ConfigError, match="expected a column and a value"):
        satrap.Parquet("a.parquet", since=bound)
