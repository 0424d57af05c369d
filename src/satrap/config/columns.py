"""What a user says about the columns of a source: which are dense numbers, labels and ids, and what missing means.

Frozen dataclasses, checked when they are made. `Columns` settles them for the features of a model; `sources` reads
data by it. Nothing here reads anything, and no class knows a file format.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from satrap.config.features import Features
from satrap.config.validation import (
    Config,
    check_choice,
    check_flag,
    check_id,
    check_number,
    describe,
    set_field,
    suggest,
)
from satrap.errors import ConfigError, SourceError

LabelKind = Literal["binary", "real", "count"]
_NO_BOUND = float("-inf")


@dataclass(frozen=True, slots=True)
class DenseColumn(Config):
    """A column of numbers for the dense network. A list of fixed size is as many numbers."""

    name: str
    """The column."""
    _: KW_ONLY
    missing: float = 0.0
    """What a missing value reads as; NaN is a missing value. An infinite one is refused."""
    log1p: bool = False
    """Read x as ln(1 + max(x, 0)), what counts are trained on. `missing` is not changed."""

    def __post_init__(self) -> None:
        check_column("DenseColumn", self.name)
        where = f"dense column {self.name!r}"
        set_field(self, "missing", check_number(where, "missing", self.missing, _NO_BOUND))
        check_flag(where, "log1p", self.log1p)


@dataclass(frozen=True, slots=True)
class LabelColumn(Config):
    """A column of what the model learns to tell: a number, or a text that stands for one."""

    name: str
    """The column."""
    _: KW_ONLY
    kind: LabelKind = "binary"
    """Which numbers it may hold: 0 and 1 ("binary"), any finite one ("real"), a whole one from 0 ("count"). A row with
    another number is malformed. Binary by default: a click of 7 is a fault in the data that training would not show."""
    values: Mapping[str, float] | None = None
    """Texts and the numbers that they stand for, e.g. {">50K": 1, "<=50K": 0}. Any other text is refused."""
    true: str | Sequence[str] | None = None
    """The text or texts that stand for 1; any other text stands for 0. Instead of `values`."""
    above: float | None = None
    """A number above this reads as 1, any other as 0."""
    missing: float | Literal["refuse", "drop"] = "refuse"
    """A missing label: its row is refused, dropped and counted, or the label reads as this number."""

    def __post_init__(self) -> None:
        check_column("LabelColumn", self.name)
        where = f"label column {self.name!r}"
        check_choice(where, "kind", self.kind, get_args(LabelKind))
        if self.values is not None:
            if not isinstance(self.values, Mapping) or not self.values or self.true is not None:
                raise ConfigError(
                    f"{where}: values is {describe(self.values)}; wanted texts and numbers, without `true`"
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
                raise ConfigError(f"{where}: above is for numbers, values and true are for texts; give one of them")
            set_field(self, "above", check_number(where, "above", self.above, _NO_BOUND))
        if isinstance(self.missing, str):
            check_choice(where, "missing", self.missing, ("refuse", "drop"))
        else:
            set_field(self, "missing", check_number(where, "missing", self.missing, _NO_BOUND))
            self._check_kind("missing", self.missing)

    def _check_kind(self, name: str, number: float) -> None:
        if self.outside(np.array([number], np.float32))[0]:
            raise ConfigError(f"label column {self.name!r}: {name} is {number:g}; wanted {self.wanted}")

    def outside(self, numbers: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Which numbers are not of its kind; NaN, which is a missing label, is of none."""
        match self.kind:
            case "binary":
                inside = (numbers == 0) | (numbers == 1)
            case "count":
                inside = (numbers >= 0) & (np.floor(numbers) == numbers)
            case "real":
                inside = np.isfinite(numbers)
        return np.asarray(~inside)

    @property
    def wanted(self) -> str:
        """Its kind, for messages, and what to declare instead."""
        match self.kind:
            case "binary":
                return f"0 or 1, or declare LabelColumn({self.name!r}, above=...), kind='real' or kind='count'"
            case "count":
                return f"a whole number from 0, or declare LabelColumn({self.name!r}, kind='real')"
        return "a finite label"

    @property
    def texts(self) -> dict[str, float] | None:
        """The texts that stand for numbers; None: the column holds numbers."""
        if self.true is not None:
            return dict.fromkeys(self.true, 1.0)
        return None if self.values is None else dict(self.values)

    @property
    def other(self) -> float | None:
        """What any other text stands for; None: it is refused."""
        return None if self.true is None else 0.0


@dataclass(frozen=True, slots=True)
class IdColumn(Config):
    """A column of ids of one feature: one id, or a list of them, for each sample."""

    name: str = ""
    """The column; empty: it is called as the feature is."""
    _: KW_ONLY
    kind: Literal["string", "integer"] | None = None
    """Texts become ids by `satrap.data.hashing`; integers are ids as they are. None: as the column's type says; in a
    text file, which has no types, texts."""
    hash: bool = False
    """Hash integers too."""
    missing: int | None = None
    """The id that stands for a missing one. None: the sample has an empty bag, and a list is shorter."""
    separator: str | None = None
    """The column is a text that lists ids, with this character between them."""
    weights: str | None = None
    """The column with a weight for each id."""

    def __post_init__(self) -> None:
        if self.name != "":
            check_column("IdColumn", self.name)
        where = f"id column {self.name!r}" if self.name else "IdColumn"
        if self.kind is not None:
            check_choice(where, "kind", self.kind, ("string", "integer"))
        check_flag(where, "hash", self.hash)
        if self.hash and self.kind == "string":
            raise ConfigError(f"{where}: hash is for integers; strings are hashed in any case: leave it out")
        if self.missing is not None:
            set_field(self, "missing", check_id(where, "missing", self.missing))
        if self.separator is not None and (
            not isinstance(self.separator, str) or len(self.separator) != 1 or not self.separator.isascii()
        ):
            raise ConfigError(f"{where}: separator is {describe(self.separator)}; wanted one ASCII character, e.g. '|'")
        if self.weights is not None:
            check_column(where, self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of a source, settled for some features."""

    features: tuple[str, ...]
    """In the order of the batch."""
    ids: tuple[IdColumn, ...]
    """Of each feature; every one names its column."""
    dense: tuple[DenseColumn, ...]
    label: tuple[LabelColumn, ...]
    one_label: bool
    """One label comes as [batch_size], not as [batch_size, 1]."""
    extra: tuple[str, ...]

    @classmethod
    def settle(
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
        """The declared columns for these features; those of other features are left alone."""
        names = as_names("batches", "features", tuple(features) if isinstance(features, Features) else features)
        _warn_of_unused("ids", {name: column.name for name, column in ids.items()}, names)
        _warn_of_unused("weights", weights, names)
        settled = []
        for name in names:
            column = ids.get(name, IdColumn())
            if name in weights:
                if column.weights not in (None, weights[name]):
                    raise ConfigError(
                        f"feature {name!r}: weights are {column.weights!r} and {weights[name]!r}; give one"
                    )
                column = replace(column, weights=weights[name])
            if isinstance(features, Features) and features[name].weighted and column.weights is None:
                raise ConfigError(
                    f"feature {name!r} is weighted and no column holds its weights: name it, e.g. "
                    f"weights={{{name!r}: '{name}_weight'}}"
                )
            missing = missing_id if column.missing is None else column.missing
            settled.append(replace(column, name=column.name or name, missing=missing))
        labels = () if label is None else label if isinstance(label, tuple) else (label,)
        one_label = not isinstance(label, tuple)
        return cls(features=names, ids=tuple(settled), dense=dense, label=labels, one_label=one_label, extra=extra)

    def needed(self) -> dict[str, str]:
        """Each column that must be there, and what needs it."""
        needed: dict[str, str] = {}
        for feature, column in zip(self.features, self.ids, strict=True):
            needed.setdefault(column.name, f"feature {feature!r}")
            if column.weights is not None:
                needed.setdefault(column.weights, f"the weights of feature {feature!r}")
        for dense in self.dense:
            needed.setdefault(dense.name, "dense")
        for label in self.label:
            needed.setdefault(label.name, "label")
        for extra in self.extra:
            needed.setdefault(extra, "extra")
        return needed

    def check(self, where: str, known: Sequence[str]) -> None:
        """Refuses a needed column that is not among the known ones, or is there twice."""
        for name, what in self.needed().items():
            if name not in known:
                nearest = suggest(name, list(known)) if known else "it has no columns"
                raise SourceError(f"{where} has no column {name!r} ({what}); {nearest}")
            if list(known).count(name) > 1:
                raise SourceError(f"{where} has {list(known).count(name)} columns {name!r} ({what}); wanted one")


def _warn_of_unused(what: str, given: Mapping[str, str | None], features: Sequence[str]) -> None:
    """Warns of names that look like mistakes: nearly that of a feature that has no entry, or a column's in its place.

    Other names that are no feature are left alone: the source may serve several models.
    """
    left = [feature for feature in features if feature not in given]
    for name, column in given.items():
        if name in features:
            continue
        if near := get_close_matches(name, left, n=1, cutoff=0.8):
            meant = f"did you mean {near[0]!r}?"
        elif column in left:
            meant = f"it maps features to columns: did you mean {what}={{{column!r}: {name!r}}}?"
        else:
            continue
        warnings.warn(
            f"{what} names {name!r}, which is no feature of this model and is not used; {meant}", stacklevel=2
        )


def check_column(where: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: the column is {describe(name)}; wanted its name")
    return name


def as_names(where: str, name: str, value: object) -> tuple[str, ...]:
    """One text, or several different ones."""
    given: Any = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise ConfigError(f"{where}: {name} is {describe(value)}; wanted texts")
    if len(set(given)) != len(given):
        raise ConfigError(f"{where}: {name} holds {next(each for each in given if given.count(each) > 1)!r} twice")
    return tuple(given)
