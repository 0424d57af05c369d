"""What a sample of a column's values says about it: kind, distinct values, missing values, mean and deviation.

`satrap train` decides by it which columns are ids and which are numbers. Text files have no types, so the kind of a
column of text is that of all its values; a text that stands for a missing value in many files, such as "NA" or "?", is
missing here and reported, so that a source can declare it.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from satrap.config.optional_deps import pyarrow_for
from satrap.data.decode import is_list, is_time
from satrap.data.hashing import is_text
from satrap.data.id_lists import IdLists, find_lists, lists_by
from satrap.data.whole_numbers import LARGEST_EXACT, is_whole_decimal, whole_decimals

Kind = Literal["integer", "real", "flag", "text", "text time", "time", "text list", "id list", "empty", "other"]
_MISSING = ("?", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "none", "\\N")
_NUMBER = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
_DECIMAL_COMMA = r"^[-+]?\d*,\d+$"
_TIME = r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[-+]\d\d:?\d\d)?)?$"
_DAY_FIRST = r"^\d\d\.\d\d\.\d{4}( \d\d:\d\d(:\d\d)?)?$"
_CODE = r"^[-+]?0\d"  # a leading zero would be lost in a number
_NUM_SHOWN = 20
_LONG_TAIL = 6.0
"""Deviations above the mean beyond which the largest number makes a long tail."""
_LEAST_FOR_LEAK = 20
"""Rows that a column must have to be said to tell the label: fewer agree by chance."""
_REPEATS = 10
"""Rows for each distinct value, on average, of a column whose values are said to tell the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnProfile:
    """A column, as far as the sampled rows show it."""

    name: str
    kind: Kind
    is_typed: bool
    """Whether the file has types; False: the values are text that was read as their kind."""
    num_rows: int
    num_missing: int = 0
    num_distinct: int = 0
    """Distinct values besides missing ones."""
    values: tuple[Any, ...] = ()
    """The most frequent values as text, most frequent first: at most 20."""
    least: float = 0.0
    most: float = 0.0
    is_whole: bool = False
    """Whether all numbers are whole."""
    is_float: bool = False
    """Whether a typed column holds floats."""
    mean: float = 0.0
    deviation: float = 1.0
    log_mean: float = 0.0
    """The mean of ln(1 + x); for numbers of at least 0."""
    log_deviation: float = 1.0
    num_words: float = 0.0
    """Mean number of words of a text."""
    missing_texts: frozenset[str] = field(default_factory=frozenset)
    """Texts that stand for a missing value."""
    is_date: bool = False
    """Whether all times are dates, or begin their day."""
    is_day_first: bool = False
    """Whether times as text are written as in 31.12.2024."""
    has_blanks: bool = False
    """Whether texts, or ids in lists, begin or end with blanks."""
    numbers: "NumbersInText | None" = None
    """The numbers of a column of text."""
    lists: IdLists | None = None
    """The lists of ids in a column of text, which may be in doubt."""

    @property
    def is_number(self) -> bool:
        """Whether all values are numbers."""
        return self.kind in ("integer", "real", "flag")

    @property
    def sure_lists(self) -> IdLists | None:
        """The lists of ids, if there is no doubt that the texts are some."""
        return self.lists if self.lists is not None and self.lists.is_sure else None

    @property
    def has_long_tail(self) -> bool:
        """Whether numbers from 0 have a long tail, as counts and prices do: they are read as ln(1 + x)."""
        return self.least >= 0 and self.most > self.mean + _LONG_TAIL * self.deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersInText:
    """The numbers in a column whose kind is text, since its other values are none."""

    share: float
    """The share of the values that are numbers."""
    num_distinct: int
    """Distinct numbers, also those with a decimal comma."""
    words: tuple[str, ...]
    """The values that are no numbers, with decimal commas either, most frequent first: at most 20."""
    comma_share: float
    """The share of the values that are numbers with a decimal comma."""
    with_comma: str
    """The most frequent number with a decimal comma; empty: there is none."""


def profile_column(
    name: str, array: Any, *, is_typed: bool, missing: Collection[str] = (), separator: str | None = None
) -> ColumnProfile:
    """Return the profile of an Arrow array.

    missing: further texts that stand for a missing value.
    separator: the character between the ids in each text; empty: each text is one id; None: inferred.
    """
    values = clean_values(array, is_typed=is_typed, missing=missing)
    kind = _kind(values.array, is_typed)
    arrow, num_rows = pyarrow_for("reading data"), len(array)
    about: dict[str, Any] = {
        "name": name,
        "is_typed": is_typed,
        "num_rows": num_rows,
        "num_missing": values.array.null_count,
        "missing_texts": values.missing_texts,
        "has_blanks": values.has_blanks,
    }
    if kind in ("empty", "other", "text list", "id list"):
        return ColumnProfile(kind=kind, **about)
    present = values.array.drop_null()
    counts: Any = present.value_counts().sort(order="descending", by="counts") if len(present) else []
    about |= {"num_distinct": len(counts)}
    about["values"] = tuple(_shown(count["values"].as_py()) for count in counts[:_NUM_SHOWN])
    if kind in ("integer", "real", "flag"):
        about |= _number_facts(_as_floats(present)) | {"is_float": arrow.types.is_floating(array.type)}
    elif kind == "time":
        about["is_date"] = _is_date(present)
    elif kind == "text time":
        about["is_date"] = arrow.compute.max(arrow.compute.binary_length(present)).as_py() == len("2024-12-31")
        about["is_day_first"] = "." in about["values"][0][:4]
    elif kind == "text":
        words = arrow.compute.count_substring_regex(present.cast(arrow.large_binary()), r"\S+")
        about["num_words"] = arrow.compute.mean(words).as_py() or 0.0
        if not is_typed:
            about["numbers"] = _numbers_in(counts)
        texts, strips = counts.field("values"), not is_typed
        lists = lists_by(texts, separator, strips=strips) if separator else None
        about["lists"] = find_lists(texts, strips=strips) if separator is None else lists
        if about["lists"] is not None and about["lists"].is_sure:
            about["has_blanks"] |= about["lists"].has_blanks
    return ColumnProfile(kind=kind, **about)


@dataclass(frozen=True, slots=True)
class CleanValues:
    """An Arrow array without blanks around texts, and with nulls for missing values."""

    array: Any
    missing_texts: frozenset[str] = frozenset()
    has_blanks: bool = False


def clean_values(array: Any, *, is_typed: bool, missing: Collection[str] = ()) -> CleanValues:
    """Return a column as a source reads it that declares the missing texts and strips blanks. missing: further ones."""
    arrow = pyarrow_for("reading data")
    compute, types = arrow.compute, arrow.types
    if types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if is_typed and is_text(arrow, array.type):
        with suppress(arrow.ArrowInvalid):  # bytes may be no UTF-8
            array = array.cast(arrow.large_string())
    if types.is_floating(array.type):
        return CleanValues(compute.if_else(compute.is_finite(array), array, arrow.scalar(None, array.type)))
    if is_typed or not is_text(arrow, array.type):
        return CleanValues(array)
    stripped = compute.utf8_trim_whitespace(array)
    has_blanks = not stripped.equals(array)
    is_missing = compute.is_in(stripped, arrow.array([*_MISSING, *missing], stripped.type))
    texts = frozenset(compute.unique(stripped.filter(is_missing)).to_pylist())
    is_missing = compute.or_(is_missing, compute.equal(stripped, "").fill_null(False))
    return CleanValues(compute.if_else(is_missing, arrow.scalar(None, stripped.type), stripped), texts, has_blanks)


def reveals_label(array: Any, labels: NDArray[np.bool_], *, is_typed: bool) -> bool:
    """Return whether a column tells the label of every row: each of its few values has one label, or all numbers of
    one label are above all numbers of the other."""
    values = clean_values(array, is_typed=is_typed).array
    arrow, kind = pyarrow_for("reading data"), _kind(values, is_typed)
    if len(labels) < _LEAST_FOR_LEAK or kind in ("empty", "other", "text list", "id list"):
        return False
    if labels.all() or not labels.any():
        return False
    codes = np.asarray(values.dictionary_encode().indices.fill_null(-1)) + 1
    totals, positives = np.bincount(codes), np.bincount(codes, labels)
    num_values = int(np.count_nonzero(totals))
    if num_values > 1 and num_values * _REPEATS <= len(labels) and np.all((positives == 0) | (positives == totals)):
        return True
    if kind not in ("integer", "real") or values.null_count * 2 > len(labels):
        return False
    valid = np.asarray(values.is_valid())
    numbers, truth = np.asarray(_as_floats(values.filter(arrow.array(valid)))), labels[valid]
    if truth.all() or not truth.any():
        return False
    low, high = numbers[~truth], numbers[truth]
    return bool(low.max() < high.min() or high.max() < low.min())


def labels_of(
    array: Any, values: Mapping[str, float] | None, *, is_typed: bool, above: float = 0.0
) -> NDArray[np.bool_]:
    """Return which rows have the label 1. values: the texts that stand for 0 and 1; None: numbers above `above` do."""
    arrow, cleaned = pyarrow_for("reading data"), clean_values(array, is_typed=is_typed).array
    if values is None:
        return np.asarray(_as_floats(cleaned)) > above
    ones = [text for text, number in values.items() if number == 1]
    return np.asarray(
        arrow.compute.is_in(cleaned, arrow.array(ones, cleaned.type)).to_numpy(zero_copy_only=False), np.bool_
    )


def value_at(array: Any, fraction: float, *, is_typed: bool) -> str | int | float:
    """Return the value below which this fraction of a column's values is; a time as ISO 8601 text."""
    values = clean_values(array, is_typed=is_typed).array
    if not is_typed and _kind(values, is_typed) in ("integer", "real"):
        values = _as_floats(values)
    values = values.drop_null()
    at = min(len(values) - 1, int(fraction * len(values)))
    value = values.take(pyarrow_for("reading data").compute.sort_indices(values)[at : at + 1])[0].as_py()
    if isinstance(value, float) and value.is_integer() and not is_typed:
        return int(value)
    return value if isinstance(value, str | int | float) else str(value.isoformat())


def _kind(values: Any, is_typed: bool) -> Kind:
    """Return the kind of cleaned values."""
    arrow = pyarrow_for("reading data")
    types, kind = arrow.types, values.type
    if values.null_count == len(values):
        return "empty"
    if is_list(arrow, kind):
        return "text list" if is_text(arrow, kind.value_type) else "id list" if _is_int(kind.value_type) else "other"
    if types.is_boolean(kind):
        return "flag"
    if types.is_integer(kind):
        return "integer"
    if types.is_decimal(kind):
        return "integer" if is_whole_decimal(arrow, kind) and not whole_decimals(values)[2][0].any() else "real"
    if types.is_floating(kind):
        numbers = values.drop_null()
        return _number_kind(numbers) if np.all(np.abs(np.asarray(numbers)) <= LARGEST_EXACT) else "real"
    if is_time(arrow, kind):
        return "time"
    if not is_text(arrow, kind):
        return "other"
    if is_typed:
        return "text"
    present = values.drop_null()
    compute = arrow.compute
    if any(compute.all(compute.match_substring_regex(present, form)).as_py() for form in (_TIME, _DAY_FIRST)):
        return "text time"
    if compute.any(compute.match_substring_regex(present, _CODE)).as_py():
        return "text"
    try:
        return _number_kind(present.cast(arrow.float64()))
    except arrow.ArrowException:
        return "text"


def _number_kind(numbers: Any) -> Kind:
    """Return "integer" for whole numbers, which pandas writes as 12.0 where values are missing."""
    values = np.asarray(numbers)
    if not np.isfinite(values).all():
        return "text"
    return "integer" if np.all(values == np.floor(values)) else "real"


def _numbers_in(counts: Any) -> NumbersInText | None:
    """Return the numbers among texts, given with their counts in descending order; None: some are codes, as 007 is."""
    compute = pyarrow_for("reading data").compute
    texts, numbers = counts.field("values"), np.asarray(counts.field("counts"))
    if compute.any(compute.match_substring_regex(texts, _CODE)).as_py():
        return None
    is_number = compute.match_substring_regex(texts, _NUMBER)
    has_comma = compute.match_substring_regex(texts, _DECIMAL_COMMA)
    with_comma = texts.filter(has_comma)
    return NumbersInText(
        share=float(numbers[np.asarray(is_number)].sum() / numbers.sum()),
        num_distinct=compute.sum(is_number).as_py() + len(with_comma),
        words=tuple(texts.filter(compute.invert(compute.or_(is_number, has_comma)))[:_NUM_SHOWN].to_pylist()),
        comma_share=float(numbers[np.asarray(has_comma)].sum() / numbers.sum()),
        with_comma=with_comma[0].as_py() if len(with_comma) else "",
    )


def _is_date(times: Any) -> bool:
    compute = pyarrow_for("reading data").compute
    return bool(compute.all(compute.equal(times, compute.floor_temporal(times, unit="day"))).as_py())


def _number_facts(numbers: Any) -> dict[str, Any]:
    values = np.asarray(numbers)
    logs = np.log1p(np.maximum(values, 0))
    with np.errstate(over="ignore"):
        deviation = float(values.std())
    return {
        "least": float(values.min()),
        "most": float(values.max()),
        "is_whole": bool(np.all(values == np.floor(values))),
        "mean": float(values.mean()),
        "deviation": deviation or 1.0,
        "log_mean": float(logs.mean()),
        "log_deviation": float(logs.std()) or 1.0,
    }


def _as_floats(values: Any) -> Any:
    arrow = pyarrow_for("reading data")
    if arrow.types.is_boolean(values.type):
        values = values.cast(arrow.uint8())
    return values.cast(arrow.float64(), safe=not arrow.types.is_integer(values.type))


def _is_int(kind: Any) -> bool:
    return bool(pyarrow_for("reading data").types.is_integer(kind))


def _shown(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
