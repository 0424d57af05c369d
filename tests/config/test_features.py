"""Features and their order, and positions: every check fires, and the dict forms restore equal objects."""

import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from satrap.config.features import Features
from satrap.config.optimizers import Adagrad, Adam
from satrap.config.tables import Feature, Table
from satrap.data.inputs import Position
from satrap.errors import ConfigError

USER, ITEM, WORD = Table("user", dim=3), Table("item", dim=5, optimizer=Adam()), Table("word", dim=2)


def test_the_short_forms() -> None:
    assert ITEM.bag("mean") == Feature(ITEM, "mean")
    assert ITEM.bag("sum", weighted=True) == Feature(ITEM, "sum", weighted=True)
    assert ITEM.sequence(7) == Feature(ITEM, "none", max_length=7)
    assert ITEM.sequence(7, keep="first", padding_id=-1) == Feature(
        ITEM, "none", max_length=7, keep="first", padding_id=2**64 - 1
    )
    assert ITEM.sequence(7).keep == "last" and ITEM.bag("sum").keep is None, "a history ends with what is newest"
    assert ITEM.bag("sum", padding_id=0).padding_id == 0
    assert Features({"x": ITEM})["x"] == Features(features={"x": ITEM})["x"] == Feature(ITEM, "sum")


BAD_FEATURES: list[tuple[Any, str]] = [
    (lambda: Feature("item"), r"Feature: table is 'item' \(str\); expected an object of one of Table"),  # type: ignore[arg-type]
    (lambda: Feature(Table), "table is the class Table; expected an object"),  # type: ignore[arg-type]
    (lambda: ITEM.bag("max"), "a feature of table 'item': pooling is 'max' .*expected one of 'sum', 'mean', 'sqrtn'"),  # type: ignore[arg-type]
    (lambda: ITEM.bag("sum", weighted=1), r"weighted is 1 \(int\); expected True or False"),  # type: ignore[arg-type]
    (lambda: Feature(ITEM, "mean", max_length=3), r"max_length is 3 \(int\) and pooling 'mean'.*table\.sequence"),
    (lambda: Feature(ITEM, "mean", keep="last"), "keep is 'last' .* and pooling 'mean', which takes bags"),
    (lambda: ITEM.sequence(2, keep="newest"), "keep is 'newest' .*; expected one of 'last', 'first'"),  # type: ignore[arg-type]
    (lambda: ITEM.bag("sum", padding_id=2**64), "padding_id is 18446744073709551616; expected an integer from"),
    (lambda: ITEM.sequence(2, padding_id="0"), r"padding_id is '0' \(str\); expected an integer"),  # type: ignore[arg-type]
    (lambda: ITEM.bag("none"), "pooling is 'none' and there is no max_length: use table.sequence"),
    (lambda: ITEM.sequence(0), "max_length is 0; expected an integer from 1 to 65536"),
    (lambda: ITEM.sequence(2.0), r"max_length is 2\.0 \(float\); expected an integer"),  # type: ignore[arg-type]
    (lambda: Feature(ITEM, "none", weighted=True, max_length=2), "weighted is True and pooling 'none'"),
    (lambda: Feature.from_dict({"table": ITEM.to_dict(), "poling": "sum"}), "unknown key 'poling'; .* 'pooling'"),
    (lambda: Feature.from_dict({"pooling": "sum"}), "the key 'table' is missing"),
    (lambda: Feature.from_dict([]), r"Feature: found \[\] \(list\); expected a dict"),  # type: ignore[arg-type]
    (lambda: Features({}), "expected a dict of at least one"),
    (lambda: Features([USER]), "expected a dict of at least one"),  # type: ignore[arg-type]
    (lambda: Features({1: USER}), r"Feature: name is 1 \(int\); expected a string"),  # type: ignore[dict-item]
    (lambda: Features({"": USER}), "expected 1 to 255 bytes of printable text"),
    (lambda: Features({"u": "user"}), r"feature 'u' is 'user' \(str\); expected a satrap.Table"),  # type: ignore[dict-item]
    (
        lambda: Features({"a": USER, "b": Table("user", dim=4)}),
        r"feature 'b': its table 'user' is configured differently .*\(dim: 3 and 4\)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), BAD_FEATURES)
def test_bad_features(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_features_of_a_table_stand_side_by_side() -> None:
    features = Features(
        {"item": ITEM, "user": USER, "seen": ITEM.bag("mean"), "path": ITEM.sequence(4), "word": WORD, "liked": ITEM}
    )
    assert features.names == tuple(features) == ("item", "seen", "path", "liked", "user", "word")
    assert features.pooled == {name: features[name].table.dim for name in ("item", "seen", "liked", "user", "word")}
    assert features.tables == (ITEM, USER, WORD)
    assert features.table_index == (0, 0, 0, 0, 1, 2)
    assert features.dims == (5, 5, 5, 5, 3, 2)
    assert features.columns == (0, 5, -1, 10, 15, 18)
    assert features.total_dim == 20
    assert len(features) == 6


pooled = st.builds(Feature, st.sampled_from([USER, ITEM, WORD]), st.sampled_from(["sum", "mean", "sqrtn"]))
sequences = st.builds(Table.sequence, st.sampled_from([USER, ITEM, WORD]), st.integers(1, 9))


@given(st.dictionaries(st.text("abcdef", min_size=1), st.one_of(pooled, sequences), min_size=1))
def test_any_features_have_one_order(given_: dict[str, Feature]) -> None:
    features = Features(given_)
    assert dict(features) == given_
    assert list(features.table_index) == sorted(features.table_index)
    assert [features.tables[t] for t in features.table_index] == [each.table for each in features.values()]
    for table in features.tables:  # the user's order within a table
        mine = [name for name, each in given_.items() if each.table == table]
        assert [name for name in features.names if features[name].table == table] == mine
    spans = [(c, c + d) for c, d in zip(features.columns, features.dims, strict=True) if c >= 0]
    ends = [0] + [end for _, end in spans]
    assert [begin for begin, _ in spans] == ends[:-1] and ends[-1] == features.total_dim


@pytest.mark.parametrize("feature", [Feature(ITEM), ITEM.bag("sqrtn", weighted=True), USER.sequence(3, padding_id=5)])
def test_dict_form(feature: Feature) -> None:
    assert Feature.from_dict(feature.to_dict()) == feature == pickle.loads(pickle.dumps(feature))
    assert hash(feature) == hash(Feature.from_dict(feature.to_dict()))


def test_equal_tables_are_one() -> None:
    again = Table("user", dim=3, optimizer=Adagrad())
    assert Features({"a": USER, "b": again}).tables == (USER,)


def test_positions_are_ordered_and_go_round() -> None:
    assert Position(0, 9, 9) < Position(1, 0, 0) < Position(1, 0, 1) < Position(1, 1, 0)
    position = Position(3, 2, 1)
    assert Position.from_dict(position.to_dict()) == position


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"epoch": -1, "block": 0, "batch": 0}, "Position: epoch is -1; expected an integer from 0"),
        ({"epoch": 0, "block": True, "batch": 0}, "Position: block is True"),
        ({"epoch": 0, "block": 0}, "Position: the key 'batch' is missing"),
        ({"epoch": 0, "block": 0, "batch": 0, "row": 1}, "Position: unknown key 'row'"),
        (None, "Position: found None"),
    ],
)
def test_bad_positions(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Position.from_dict(data)
