"""`share`, `before` and `since` of a source: parts are disjoint and together all samples, in every format."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import satrap
from clicks import KINDS, expected, make, read, source, write
from satrap.data.registry import source_from_dict
from satrap.data.source import Source
from satrap.errors import ConfigError, SourceError

SAMPLES = make(400, 5)
ALL = sorted(expected(each) for each in SAMPLES)


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


def test_a_value_of_another_type_is_an_error(data: Source) -> None:
    with pytest.raises(SourceError, match=r"column 'session' of type .* cannot be compared to 3"):
        read(data.replace(since=("session", 3)))
    with pytest.raises(SourceError, match="no column 'nothing'"):
        read(data.replace(since=("nothing", 3)))


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


@pytest.mark.parametrize("bound", ["day", ("day",), (1, 2), ("day", [1])])
def test_other_bounds_are_refused(bound: Any) -> None:
    with pytest.raises(ConfigError, match="expected a column and a value"):
        satrap.Parquet("a.parquet", since=bound)
