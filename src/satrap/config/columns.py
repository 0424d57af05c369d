"""Declarations of a source's columns: which hold dense numbers, labels and ids, and what a missing value means.

The classes are frozen dataclasses, checked when they are created. `Columns` resolves them for the features of a model;
the package `data` reads by it. No class here reads data or knows a file format.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from satrap.config.features import Features
from satrap.config.validation import (
    Config,
    check_choice,
    check_flag,
    check_id,
    check_integer,
    check_number,
    describe,
    set_field,
    suggest,
)
from satrap.errors import ConfigError, SourceError
from satrap.hidden_names import internal

LabelKind = Literal["binary", "real", "count"]
Time = Literal["days", "hours", "seconds", "hour_of_day", "weekday"]
_NO_BOUND = float("-inf")


@dataclass(frozen=True, slots=True)
class DenseColumn(Config):
    """A column of numbers for the dense network: one number, or a list of numbers of one length, in each row.

    Texts are read as numbers: "3.5" is 3.5, "" is missing, and another text makes its row malformed.

    name: the name of the column.
    missing: the number that a missing value reads as; NaN is a missing value. An infinite value is malformed.
    log1p: whether to read x as ln(1 + max(x, 0)), as is usual for counts. `missing` is not transformed.
    width: the number of values in each list, where the type of the column does not say it; a list of another length
        makes its row malformed. A missing list reads as that many missing values.
    time: what to read of a column of timestamps or dates, in UTC: the "days", "hours" or "seconds" since 1970, with
        fractions, the "hour_of_day" from 0 or the "weekday" from 0, a Monday. Float32 counts seconds in steps of 128.
    """

    name: str
    _: KW_ONLY
    missing: float = 0.0
    log1p: bool = False
    width: int | None = None
    time: Time | None = None

    def __post_init__(self) -> None:
        check_column("DenseColumn", self.name)
        where = f"dense column {self.name!r}"
        set_field(self, "missing", check_number(where, "missing", self.missing, _NO_BOUND))
        check_flag(where, "log1p", self.log1p)
        if self.width is not None:
            set_field(self, "width", check_integer(where, "width", self.width, 1, 1 << 20))
        _check_time(where, self.time)


@internal("expected find_invalid other_value text_values")
@dataclass(frozen=True, slots=True)
class LabelColumn(Config):
    """A column of the values that the model learns to predict: numbers, or strings that stand for numbers.

    name: the name of the column.
    kind: which numbers the column may hold: 0 and 1 ("binary"), any finite number ("real"), or whole numbers from 0
        ("count"). A row with another number is malformed. The default is binary, since training would not reveal that a
        click of 7 is an error in the data.
    values: texts and the numbers that they stand for, e.g. {">50K": 1, "<=50K": 0}. Any other text is malformed.
    true: the string or strings that stand for 1; any other string stands for 0. An alternative to `values`.
    above: numbers above this read as 1, all others as 0.
    missing: what to do about a missing label: treat its row as malformed ("refuse"), drop and count the row ("drop"),
        or read the label as this number.
    """

    name: str
    _: KW_ONLY
    kind: LabelKind = "binary"
    values: Mapping[str, float] | None = None
    true: str | Sequence[str] | None = None
    above: float | None = None
    missing: float | Literal["refuse", "drop"] = "refuse"

    def __post_init__(self) -> None:
        check_column("LabelColumn", self.name)
        where = f"label column {self.name!r}"
        check_choice(where, "kind", self.kind, get_args(LabelKind))
        if self.values is not None:
            if not isinstance(self.values, Mapping) or not self.values or self.true is not None:
                raise ConfigError(
                    f"{where}: values is {describe(self.values)}; expected strings and numbers, without `true`"
                )
            values = {
                str(text): check_number(where, f"values[{text!r}]", v, _NO_BOUND) for text, v in self.values.items()
            }
            set_field(self, "values", values)
            for text, number in values.items():
                self._check_kind(f"values[{text!r}]", number)
        if self.true is not None:
            set_field(self, "true", as_names(where, "true", self.true))
        if self.above is not None:
            if self.values is not None or self.true is not None:
                raise ConfigError(f"{where}: above is for numbers, values and true are for strings; give one of them")
            set_field(self, "above", check_number(where, "above", self.above, _NO_BOUND))
        if isinstance(self.missing, str):
            check_choice(where, "missing", self.missing, ("refuse", "drop"))
        else:
            set_field(self, "missing", check_number(where, "missing", self.missing, _NO_BOUND))
            self._check_kind("missing", self.missing)

    def _check_kind(self, name: str, number: float) -> None:
        if self.find_invalid(np.array([number], np.float32))[0]:
            raise ConfigError(f"label column {self.name!r}: {name} is {number:g}; expected {self.expected}")

    def find_invalid(self, numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which numbers are not of the column's kind; NaN, which is a missing label, is of no kind."""
        match self.kind:
            case "binary":
                inside = (numbers == 0) | (numbers == 1)
            case "count":
                inside = (numbers >= 0) & (np.floor(numbers) == numbers)
            case "real":
                inside = np.isfinite(numbers)
        return np.asarray(~inside)

    @property
    def expected(self) -> str:
        """The numbers of the column's kind, in words for messages, and what to declare for others."""
        match self.kind:
            case "binary":
                return f"0 or 1, or declare LabelColumn({self.name!r}, above=...), kind='real' or kind='count'"
            case "count":
                return f"a whole number from 0, or declare LabelColumn({self.name!r}, kind='real')"
        return "a finite label"

    @property
    def text_values(self) -> dict[str, float] | None:
        """The strings that stand for numbers, with the numbers; None: the column holds numbers."""
        if self.true is not None:
            return dict.fromkeys(self.true, 1.0)
        return None if self.values is None else dict(self.values)

    @property
    def other_value(self) -> float | None:
        """The number that any other string stands for; None: another string is malformed."""
        return None if self.true is None else 0.0


@dataclass(frozen=True, slots=True)
class IdColumn(Config):
    """A column with the ids of one feature: one id, or a list of ids, for each sample.

    name: the name of the column; empty: the name of the feature.
    kind: what the column holds: strings, which `satrap.data.hashing` turns into ids, or integers, which are ids
        unchanged. None: the column's type decides; text files have no types, so they hold strings.
    hash: whether to hash integers as well.
    missing: the id that replaces a missing one. None: the sample has an empty bag, or the list is shorter.
    separator: the character between ids, where the column holds strings that list ids.
    weights: the name of the column with a weight for each id.
    numbers: for a sequence, the names of columns that list a number, a date or a timestamp for each id, such as its
        rating or time. A batch has them beside the rows, as `batch[feature].numbers`; times are seconds since 1970.
    boundaries: ascending numbers: a number in the column becomes the id of its bucket, which is how many of these are
        at most the number. NaN is a missing id.
    crossed: further columns, of integers or strings: the id is a hash of the values of all of these columns, each a
        single one, and is missing if one of them is.
    time: what to read of a column of timestamps or dates as ids: see `DenseColumn.time`; without fractions.
    """

    name: str = ""
    _: KW_ONLY
    kind: Literal["string", "integer"] | None = None
    hash: bool = False
    missing: int | None = None
    separator: str | None = None
    weights: str | None = None
    numbers: str | Sequence[str] = ()
    boundaries: Sequence[float] | None = None
    crossed: str | Sequence[str] = ()
    time: Time | None = None

    def __post_init__(self) -> None:
        if self.name != "":
            check_column("IdColumn", self.name)
        where = f"id column {self.name!r}" if self.name else "IdColumn"
        if self.kind is not None:
            check_choice(where, "kind", self.kind, ("string", "integer"))
        check_flag(where, "hash", self.hash)
        if self.hash and self.kind == "string":
            raise ConfigError(f"{where}: hash=True is for integers; strings are always hashed: leave it out")
        if self.missing is not None:
            set_field(self, "missing", check_id(where, "missing", self.missing))
        if self.separator is not None and (
            not isinstance(self.separator, str) or len(self.separator) != 1 or not self.separator.isascii()
        ):
            raise ConfigError(
                f"{where}: separator is {describe(self.separator)}; expected one ASCII character, e.g. '|'"
            )
        if self.weights is not None:
            check_column(where, self.weights)
        _check_time(where, self.time)
        set_field(self, "crossed", as_names(where, "crossed", self.crossed))
        set_field(self, "numbers", as_names(where, "numbers", self.numbers))
        if self.boundaries is not None:
            given: Any = self.boundaries
            if not isinstance(given, Sequence) or isinstance(given, str) or not given:
                raise ConfigError(f"{where}: boundaries is {describe(given)}; expected ascending numbers")
            numbers = [check_number(where, f"boundaries[{i}]", number, _NO_BOUND) for i, number in enumerate(given)]
            if any(low >= high for low, high in pairwise(numbers)):
                raise ConfigError(f"{where}: boundaries is {describe(given)}; expected ascending numbers")
            set_field(self, "boundaries", tuple(numbers))
        derived = [name for name in ("boundaries", "crossed", "time") if getattr(self, name)]
        others = [name for name in ("kind", "hash", "separator") if getattr(self, name)]
        if derived and (others or (len(derived) > 1 and "crossed" in derived)):
            raise ConfigError(
                f"{where}: {derived[0]} and {(others or derived[1:])[0]} are given; leave one of them out"
            )
        for name in ("weights", "numbers"):
            if self.crossed and getattr(self, name):
                raise ConfigError(f"{where}: crossed and {name} are given; leave one of them out")

    @property
    def is_derived(self) -> bool:
        """Whether the ids are computed from the values by `boundaries`, `crossed` or `time`."""
        return self.boundaries is not None or bool(self.crossed) or self.time is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a source, resolved for the features of a model."""

    features: tuple[str, ...]
    """The features, in the order of the batch."""
    ids: tuple[IdColumn, ...]
    """The column of each feature, with its name."""
    dense: tuple[DenseColumn, ...]
    label: tuple[LabelColumn, ...]
    is_single_label: bool
    """Whether the label is returned as [batch_size] and not as [batch_size, number of labels]."""
    extra: tuple[str, ...]
    declared: Features | None = None
    """What is declared of the features, where it is known."""
    selecting: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The columns among `extra` that decide which samples are read, each with the option that names it."""

    @classmethod
    def resolve(
        cls,
        features: Features | Sequence[str],
        *,
        ids: Mapping[str, IdColumn],
        weights: Mapping[str, str],
        missing_id: int | None,
        dense: tuple[DenseColumn, ...],
        label: LabelColumn | tuple[LabelColumn, ...] | None,
        extra: tuple[str, ...],
    ) -> Self:
        """Resolve the declared columns for these features; declarations for other features are ignored."""
        names = as_names("batches", "features", tuple(features) if isinstance(features, Features) else features)
        _warn_of_unused("ids", {name: column.name for name, column in ids.items()}, names)
        _warn_of_unused("weights", weights, names)
        resolved = []
        for name in names:
            column = ids.get(name, IdColumn())
            if name in weights:
                if column.weights not in (None, weights[name]):
                    raise ConfigError(
                        f"feature {name!r}: its weights are {column.weights!r} and {weights[name]!r}; give one column"
                    )
                column = replace(column, weights=weights[name])
            if isinstance(features, Features) and features[name].weighted and column.weights is None:
                raise ConfigError(
                    f"feature {name!r} is weighted and no column holds its weights; name the column, e.g. "
                    f"weights={{{name!r}: '{name}_weight'}}"
                )
            if column.weights is not None and isinstance(features, Features) and not features[name].weighted:
                raise ConfigError(
                    f"feature {name!r} is not weighted and column {column.weights!r} is declared to hold its weights; "
                    "declare the feature with weighted=True, or leave the weights out"
                )
            missing = missing_id if column.missing is None else column.missing
            if column.numbers and isinstance(features, Features) and features[name].pooling != "none":
                raise ConfigError(
                    f"feature {name!r} is pooled and its IdColumn has numbers {list(column.numbers)}, which stand "
                    "beside the rows of a sequence: use table.sequence(), or leave the numbers out"
                )
            resolved.append(replace(column, name=column.name or name, missing=missing))
        labels = () if label is None else label if isinstance(label, tuple) else (label,)
        _refuse_label(names, resolved, [column.name for column in labels])
        is_single_label = not isinstance(label, tuple)
        return cls(
            features=names,
            ids=tuple(resolved),
            dense=dense,
            label=labels,
            is_single_label=is_single_label,
            extra=extra,
            declared=features if isinstance(features, Features) else None,
        )

    @property
    def held(self) -> tuple[str, ...]:
        """The names of the Arrow arrays that a chunk holds: further columns, and numbers beside ids."""
        numbers = (
            numbers_key(feature, name)
            for feature, column in zip(self.features, self.ids, strict=True)
            for name in column.numbers
        )
        return (*self.extra, *numbers)

    def required(self, without: Collection[str] = ()) -> dict[str, str]:
        """Return the names of the required columns, each with what requires it. without: features to leave out."""
        required: dict[str, str] = {}
        for feature, column in zip(self.features, self.ids, strict=True):
            if feature in without:
                continue
            required.setdefault(column.name, f"feature {feature!r}")
            for other in column.crossed:
                required.setdefault(other, f"feature {feature!r}")
            if column.weights is not None:
                required.setdefault(column.weights, f"the weights of feature {feature!r}")
            for name in column.numbers:
                required.setdefault(name, f"the numbers of feature {feature!r}")
        for dense in self.dense:
            required.setdefault(dense.name, "dense")
        for label in self.label:
            required.setdefault(label.name, "label")
        for extra in self.extra:
            required.setdefault(extra, self.selecting.get(extra, "extra"))
        return required

    def check_present(self, where: str, known: Sequence[str], origin: str = "") -> None:
        """Raise if a required column is missing from the known ones, or occurs twice. origin: where these are from."""
        for name, purpose in self.required().items():
            if name not in known:
                nearest = suggest(name, list(known)) if known else "it has no columns"
                raise SourceError(f"{where} has no column {name!r} ({purpose}); {nearest}{origin}")
            if list(known).count(name) > 1:
                raise SourceError(f"{where} has {list(known).count(name)} columns {name!r} ({purpose}); expected one")


def numbers_key(feature: str, column: str) -> str:
    """Return the name in `Inputs.extra` of the numbers beside a feature's ids."""
    return f"{feature}[{column}]"


def _refuse_label(features: Sequence[str], ids: Sequence[IdColumn], labels: Sequence[str]) -> None:
    """Raise ConfigError if a feature reads a label."""
    for feature, column in zip(features, ids, strict=True):
        if both := next((name for name in (column.name, *column.crossed) if name in labels), None):
            raise ConfigError(
                f"column {both!r} is read by feature {feature!r} and is the label, so the model would read what it has "
                "to predict: leave the feature out, or give it another column"
            )


def _warn_of_unused(option: str, declared: Mapping[str, str | None], features: Sequence[str]) -> None:
    """Warn about names that are probably mistakes: close to a feature without an entry, or a column in its place.

    Other names that are not features are ignored, since the source may serve several models.
    """
    unassigned = [feature for feature in features if feature not in declared]
    for name, column in declared.items():
        if name in features:
            continue
        if near := get_close_matches(name, unassigned, n=1, cutoff=0.8):
            hint = f"did you mean {near[0]!r}?"
        elif column in unassigned and _is_misspelt(name, column):
            hint = f"did you mean {option}={{{column!r}: {column!r}}}, or to leave it out?"
        elif column in unassigned:
            hint = f"it maps features to columns: did you mean {option}={{{column!r}: {name!r}}}?"
        else:
            continue
        warnings.warn(
            f"{option} names {name!r}, which is not a feature of this model and is ignored; {hint}", stacklevel=2
        )


def _is_misspelt(name: str, column: str) -> bool:
    """Return whether a name is probably the column's with a mistake, and not another's, as "user" and "user_id" are."""
    return name not in column and column not in name and bool(get_close_matches(name, [column]))


def _check_time(where: str, time: object) -> None:
    if time is not None:
        check_choice(where, "time", time, get_args(Time))


def check_column(where: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: the column is {describe(name)}; expected its name")
    return name


def as_names(where: str, name: str, value: object) -> tuple[str, ...]:
    """Return one text, or several different ones, as a tuple."""
    names: Any = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: {name} is {describe(value)}; expected strings")
    if len(set(names)) != len(names):
        raise ConfigError(f"{where}: {name} holds {next(name for name in names if names.count(name) > 1)!r} twice")
    return tuple(names)
