"""The use of columns that `satrap train` infers: properties of random frames, typed and as text, and its errors."""

import datetime
import random
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.cli.train_plan import ColumnPlan, Overrides, PlannedColumn, decimal_commas, missing_words, plan_columns
from satrap.data.column_profile import ColumnProfile, labels_of, profile_column, reveals_label, value_at
from satrap.errors import ConfigError, InputError

NUM_ROWS = 400
DAY = datetime.datetime(2024, 1, 1)

Maker = Callable[[random.Random], Any]
KINDS: dict[str, tuple[Maker, str, str]] = {
    "text": (lambda draw: draw.choice(["red", "green", "blue", "deep blue"]), "id", "id"),
    "code": (lambda draw: f"{draw.randrange(50):05}", "id", "id"),
    "text_with_numbers": (lambda draw: draw.choice(["7", "8", "other"]), "id", "id"),
    "real": (lambda draw: draw.random() * 100 + 0.001, "number", "number"),
    "count": (lambda draw: draw.randrange(6), "number and id", "number and id"),
    "amount": (lambda draw: draw.randrange(10**6), "number", "number"),
    "user_id": (lambda draw: draw.randrange(90), "id", "id"),
    "hashed": (lambda draw: draw.randrange(40) * 10**12 + 2**40, "id", "id"),
    "constant": (lambda draw: "same", "ignored", "ignored"),
    "constant_number": (lambda draw: 7, "ignored", "ignored"),
    "empty": (lambda draw: None, "ignored", "ignored"),
    "unique": (lambda draw: f"{draw.getrandbits(64):x}x", "ignored", "ignored"),
    "prose": (lambda draw: " ".join(f"word{draw.randrange(99)}" for _ in range(9)), "ignored", "ignored"),
    "time": (lambda draw: DAY + datetime.timedelta(hours=draw.randrange(9999)), "id", "ignored"),
    "date": (lambda draw: (DAY + datetime.timedelta(days=draw.randrange(99))).date(), "id", "ignored"),
}
"""Columns by name: a maker of values, and the use of the column in a file with types and in a text file."""
CAN_MISS = set(KINDS) - {"constant", "constant_number", "empty"}


def frame(seed: int, kinds: list[str], missing: float) -> dict[str, list[Any]]:
    draw = random.Random(seed)
    columns = {
        name: [None if name in CAN_MISS and draw.random() < missing else KINDS[name][0](draw) for _ in range(NUM_ROWS)]
        for name in kinds
    }
    return {"click": [int(draw.random() < 0.3) for _ in range(NUM_ROWS)], **columns}


def plan_of(columns: dict[str, list[Any]], *, is_typed: bool = True, **overrides: Any) -> ColumnPlan:
    arrays = {name: pa.array(values) for name, values in columns.items()}
    if not is_typed:
        arrays = {name: pa.array([None if v is None else str(v) for v in values]) for name, values in columns.items()}
    return plan_columns(
        [profile_column(name, array, is_typed=is_typed) for name, array in arrays.items()], Overrides(**overrides)
    )


def uses(plan: ColumnPlan) -> dict[str, str]:
    return {each.profile.name: each.use for each in plan.columns}


def planned(plan: ColumnPlan, name: str) -> PlannedColumn:
    return next(each for each in plan.columns if each.profile.name == name)


@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(st.sampled_from(sorted(set(KINDS) - {"text"})), unique=True),
    missing=st.sampled_from([0.0, 0.1, 0.4]),
    is_typed=st.booleans(),
)
def test_each_kind_of_column_has_its_use(seed: int, kinds: list[str], missing: float, is_typed: bool) -> None:
    plan = plan_of(frame(seed, [*kinds, "text"], missing), is_typed=is_typed)
    expected = {name: KINDS[name][1 if is_typed else 2] for name in [*kinds, "text"]}
    assert uses(plan) == {"click": "label", **expected}
    names = [feature.name for feature in plan.features]
    assert len(set(names)) == len(names)
    assert all(feature.dim in (4, 8, 16) for feature in plan.features)
    assert all(column.why for column in plan.columns if column.use != "label")
    lines = list(plan.lines())
    assert len(lines) == 1 + len(plan.columns) and len(set(map(len, (line[:20] for line in lines)))) == 1


def profiles_of(columns: dict[str, list[Any]], missing: Collection[str] = ()) -> list[ColumnProfile]:
    arrays = {name: pa.array([None if v is None else str(v) for v in values]) for name, values in columns.items()}
    return [profile_column(name, array, is_typed=False, missing=missing) for name, array in arrays.items()]


@given(
    seed=st.integers(0, 2**32),
    words=st.lists(st.sampled_from(["n/a", "-", "unknown", "#", "N. A.", "inf"]), min_size=1, max_size=3, unique=True),
)
def test_a_few_words_among_numbers_count_as_missing(seed: int, words: list[str]) -> None:
    columns = frame(seed, ["text", "real", "amount", "count"], 0.1)
    columns["real"][:8] = columns["amount"][:8] = columns["count"][:8] = [None] * 8
    spoiled = {name: [*words, *words, *columns[name][2 * len(words) :]] for name in ("real", "amount", "count")}
    inferred = missing_words(profiles_of(columns | spoiled), Overrides())
    assert inferred == set(words) - {"n/a"}, "which counts as missing in any column"
    plan = plan_columns(profiles_of(columns | spoiled, inferred), Overrides())
    expected = plan_columns(profiles_of(columns), Overrides())
    assert uses(plan) == uses(expected) and plan.features == expected.features
    assert [c.profile.mean for c in plan.columns] == [c.profile.mean for c in expected.columns]
    shown = f"{', '.join(map(repr, sorted(words)))} count{'s' * (len(words) == 1)} as missing"
    assert all(shown in planned(plan, name).why for name in spoiled)


@pytest.mark.parametrize(
    ("values", "others", "overrides"),
    [
        (["M", *range(50)], ["M", "F"], {}),  # a value of a column of two
        (["-", *range(5)], ["p", "q", "r"], {}),  # a sixth
        (["a", "b", "c", "d", *range(100)], ["p", "q", "r"], {}),  # many words
        (["007", "-", *range(50)], ["p", "q", "r"], {}),  # codes
        (["-", *range(50)], ["p", "q", "r"], {"ids": ("x",)}),
        (["maybe", *[0, 1] * 20], ["p", "q", "r"], {}),  # like a label
    ],
)
def test_words_that_do_not_count_as_missing(values: list[Any], others: list[str], overrides: dict[str, Any]) -> None:
    rows = 20 * len(values)
    columns = {"y": [0, 1] * (rows // 2), "x": values * 20, "other": (others * rows)[:rows]}
    assert missing_words(profiles_of(columns), Overrides(**overrides)) == set()


def test_a_word_among_numbers_that_makes_a_column_text_is_shown() -> None:
    columns = {"y": [0, 1] * 60, "x": ["-", *range(5)] * 20, "price": ["3,5", "4,25", "7"] * 40}
    plan = plan_columns(profiles_of(columns), Overrides())
    assert planned(plan, "x").why == "text, since '-' is no number; dim 4"
    assert decimal_commas(plan) == [("price", "3,5")]
    with pytest.raises(ConfigError, match=r"--numbers: column 'x' holds '-'; .* or --missing - if it stands for"):
        plan_columns(profiles_of(columns), Overrides(numbers=("x",)))


ITEMS = np.random.default_rng(0).integers(0, 2**31, 1700)


@pytest.mark.parametrize(
    ("numbers", "use", "why"),
    [
        (np.arange(6000) % 899 * 3, "number and id", "each number repeats, so it gets an embedding, too; dim 16"),
        (
            ITEMS[np.minimum(np.random.default_rng(1).zipf(1.3, 60_000) - 1, 1699)],
            "number and id",
            "each number repeats, so it gets an embedding, too",
        ),
        (
            np.random.default_rng(2).lognormal(3, 1.5, 60_000).astype(int),
            "number",
            "mostly small with a few large ones, as counts are",
        ),
        (np.random.default_rng(3).integers(0, 10**6, 6000), "number", "too few rows of each number for an embedding"),
        (np.arange(6000) % 2 * 7, "number", "two distinct numbers"),
    ],
)
@pytest.mark.parametrize("is_typed", [True, False])
def test_whole_numbers_that_repeat_are_ids_unless_they_count(numbers: Any, use: str, why: str, is_typed: bool) -> None:
    columns = {"y": [0, 1] * (len(numbers) // 2), "text": ["a", "b"] * (len(numbers) // 2), "item": numbers.tolist()}
    column = planned(plan_of(columns, is_typed=is_typed), "item")
    assert column.use == use and column.why.startswith(why)


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("s"), pa.timestamp("us", "UTC")])
def test_dates_have_a_weekday_and_no_hour(kind: pa.DataType) -> None:
    days = pa.array([86400 * (i % 60) for i in range(100)], pa.timestamp("s")).cast(kind)
    arrays = {"y": pa.array([0, 1] * 50), "day": days}
    plan = plan_columns([profile_column(n, a, is_typed=True) for n, a in arrays.items()], Overrides())
    assert [(feature.name, feature.option) for feature in plan.features] == [("day_weekday", 'time="weekday"')]
    assert planned(plan, "day").why == "its weekday; dim 4"


@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize(
    ("form", "is_date"), [("%Y-%m-%d", True), ("%d.%m.%Y", True), ("%d.%m.%Y %H:%M", False), ("%Y-%m-%dT%H:%MZ", False)]
)
def test_times_as_text_are_found(form: str, is_date: bool, is_noted: bool) -> None:
    times = [format(DAY + datetime.timedelta(hours=7 * i), form) for i in range(100)]
    profile = profile_column("at", pa.array([*times, "" if is_noted else "soon"]), is_typed=False)
    assert profile.kind == ("text time" if is_noted else "text")
    assert not is_noted or (profile.is_date, profile.is_day_first) == (is_date, form.startswith("%d"))


@given(seed=st.integers(0, 2**32), numbers=st.booleans())
def test_overrides_win(seed: int, numbers: bool) -> None:
    columns = frame(seed, ["text", "count", "user_id", "amount"], 0.1)
    columns["outcome"] = columns.pop("click")
    chosen: dict[str, Any] = {"numbers": ("user_id",)} if numbers else {"ids": ("amount",)}
    plan = plan_of(columns, label="outcome", ignore=("count",), dim=5, **chosen)
    assert uses(plan)["count"] == "ignored" and uses(plan)["outcome"] == "label"
    assert uses(plan)["user_id" if numbers else "amount"] == ("number" if numbers else "id")
    assert {feature.dim for feature in plan.features} == {5}


def test_floats_that_are_whole_are_ids_of_integers() -> None:
    """pandas stores integers with missing values as floats."""
    columns: dict[str, list[Any]] = {
        "y": [0, 1] * 50,
        "user_id": [float(i % 20) if i % 7 else None for i in range(100)],
    }
    (feature,) = planned(plan_of(columns), "user_id").features
    assert feature.option == 'kind="integer"'


def test_floats_beyond_2_53_are_no_ids() -> None:
    """The next float is 2 or more away, so several ids have become one; a source refuses them."""
    columns: dict[str, list[Any]] = {"y": [0, 1] * 50, "text": ["a", "b"] * 50}
    columns |= {"user_id": [2.0**53 + 2 * (i % 20) for i in range(100)], "huge": [1e300 * i for i in range(100)]}
    plan = plan_of(columns)
    assert (planned(plan, "user_id").use, planned(plan, "user_id").features) == ("number", ())
    assert "lost digits" in planned(plan, "user_id").why
    assert planned(plan, "huge").use == "ignored"


@pytest.mark.parametrize(("digits", "use"), [(0, "id"), (2, "number")])
def test_decimals_without_a_fraction_are_ids(digits: int, use: str) -> None:
    numbers = pa.array([Decimal(2**63 + i % 20) for i in range(100)], pa.decimal128(30, digits))
    arrays = {"y": pa.array([0, 1] * 50), "text": pa.array(["a", "b"] * 50), "user_id": numbers}
    plan = plan_columns([profile_column(n, a, is_typed=True) for n, a in arrays.items()], Overrides())
    assert planned(plan, "user_id").use == use


@pytest.mark.parametrize("name", ["a\nb", "x" * 300])
def test_a_column_that_cannot_name_a_feature_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"feature: name is .* rename the column, or leave it out with --ignore"):
        plan_of({"y": [0, 1] * 50, "text": ["a", "b"] * 50, name: ["a", "b"] * 50})


def test_lists_are_bags() -> None:
    plan = plan_of({"y": [0, 1] * 20, "tags": [["a", "b"], ["a"]] * 20, "items": [[1, 2], []] * 20})
    assert [(each.name, each.is_bag) for each in plan.features] == [("tags", True), ("items", True)]


def test_a_name_of_a_feature_that_is_taken_gets_another() -> None:
    columns: dict[str, list[Any]] = {"y": [0, 1] * 100, "age": [i % 5 for i in range(200)], "age_id": ["a", "b"] * 100}
    assert [feature.name for feature in plan_of(columns).features] == ["age_id_", "age_id"]


@pytest.mark.parametrize("kind", [pa.binary(), pa.binary(3), pa.binary_view()])
def test_labels_of_bytes(kind: Any) -> None:
    labels = pa.array([b"no!", b"yes"] * 20, kind)
    arrays = {"x": pa.array(["a", "b", "c", "d"] * 10), "y": labels}
    plan = plan_columns([profile_column(n, a, is_typed=True) for n, a in arrays.items()], Overrides())
    assert plan.label.values == {"no!": 0.0, "yes": 1.0}
    assert labels_of(labels, plan.label.values, is_typed=True).tolist() == [False, True] * 20


@pytest.mark.parametrize(
    ("values", "is_typed", "expected"),
    [
        ([0, 1], True, (None, None)),
        ([True, False], True, (None, None)),
        ([1, 2], True, (None, 1.0)),
        ([-1.0, 1.0], True, (None, -1.0)),
        (["no", "yes"], True, ({"no": 0.0, "yes": 1.0}, None)),
        (["0", "1"], False, (None, None)),
        (["False", "True"], False, ({"False": 0.0, "True": 1.0}, None)),
        (["a", "a", "a", "b"], False, ({"a": 0.0, "b": 1.0}, None)),
    ],
)
def test_labels_of_two_values(values: list[Any], is_typed: bool, expected: tuple[Any, Any]) -> None:
    columns = {"x": ["a", "b", "c", "d"] * 10, "target": (values * 40)[:40]}
    arrays = {name: pa.array(column) for name, column in columns.items()}
    plan = plan_columns([profile_column(n, a, is_typed=is_typed) for n, a in arrays.items()], Overrides())
    assert (plan.label.values, plan.label.above) == expected and not plan.label.drops_missing


@pytest.mark.parametrize(
    ("columns", "overrides", "message"),
    [
        ({"a": ["x", "y"]}, {}, "no label was named; name it with --label COLUMN; .* two distinct values: a"),
        ({"y": [0, 1], "label": [1, 0]}, {}, r"several columns may be the label \(y, label\)"),
        ({"y": [1, 1]}, {}, "label 'y' has one value only, '1'; expected two"),
        ({"y": [None, None]}, {}, "label 'y' has no value"),
        ({"y": [1, 2, 3], "b": ["p", "q", "p"]}, {}, r"3 distinct values \('1', .*\); .* two distinct values: b"),
        ({"y": [0, 1], "a": [0.5, 0.7]}, {}, "no column was found that holds ids"),
    ],
)
def test_labels_that_cannot_be_used(columns: dict[str, Any], overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of({name: values * 30 for name, values in columns.items()}, **overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"label": "clik"}, "--label: there is no column 'clik'; the nearest known one is 'click'"),
        ({"ignore": ("nothing",)}, "--ignore: there is no column 'nothing'"),
        ({"ids": ("text",), "ignore": ("text",)}, "'text' is named by --ids and by --ignore"),
        ({"numbers": ("text",)}, "--numbers: column 'text' holds .*; expected numbers"),
        ({"ids": ("time",)}, "--ids: column 'time' is of kind 'time'"),
        ({"ids": ("real",)}, "--ids: column 'real' is of kind 'real'"),
        ({"split_by": "none"}, "--test-after: there is no column 'none'"),
    ],
)
def test_overrides_that_do_not_fit(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(frame(1, ["text", "time", "count", "real"], 0.0), **overrides)


@given(seed=st.integers(0, 2**32), is_typed=st.booleans())
def test_columns_that_tell_the_label_are_found_and_others_are_not(seed: int, is_typed: bool) -> None:
    labels = np.random.default_rng(seed).random(300) < 0.4
    columns = {
        "same": labels.astype(int),
        "text": np.where(labels, "won", "lost"),
        "amount": np.where(labels, 1.5, 0.0) + np.random.default_rng(seed).random(300),
        "noisy": np.where(np.arange(300) < 5, ~labels, labels).astype(int),
        "unique": np.arange(300),
        "random": np.random.default_rng(seed + 1).integers(0, 9, 300),
    }
    arrays = {name: pa.array(values if is_typed else values.astype(str)) for name, values in columns.items()}
    found = {name for name, array in arrays.items() if reveals_label(array, labels, is_typed=is_typed)}
    assert found == {"same", "text", "amount"}


def test_no_column_tells_a_label_of_one_value() -> None:
    assert not reveals_label(pa.array(["a", "b"] * 50), np.zeros(100, np.bool_), is_typed=True)


def test_bytes_that_are_no_text_are_ids() -> None:
    column = profile_column("uuid", pa.array([b"\xff\x00" + bytes([i % 9]) for i in range(99)]), is_typed=True)
    assert (column.kind, column.num_distinct) == ("text", 9)


@given(st.lists(st.integers(-1000, 1000), min_size=1), st.floats(0, 0.99))
def test_the_value_at_a_fraction_divides_a_column(values: list[int], fraction: float) -> None:
    bound = value_at(pa.array(values), fraction, is_typed=True)
    assert isinstance(bound, int) and bound == sorted(values)[int(fraction * len(values))]
    text = pa.array([str(value) for value in values])
    assert value_at(text, fraction, is_typed=False) == bound
