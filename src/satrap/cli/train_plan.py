"""What `satrap train` makes of the columns of a file: which are ids, numbers, the label, or ignored, and why.

Pure: profiles of columns in, a plan out. `train_script` writes the plan as a script.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from satrap.config.validation import check_name, suggest
from satrap.data.column_profile import ColumnProfile
from satrap.errors import ConfigError, InputError

Use = Literal["label", "id", "number", "number and id", "ignored"]
LABEL_NAMES = ("label", "click", "clicked", "target", "y")
_POSITIVE = ("1", "yes", "true", "y", "t", "positive", "click", "clicked")
_ID_NAME = re.compile(r"(^|_)(id|ids|code|zip|zipcode|postcode|uuid|hash|key|number)$|[a-z]I[dD]$", re.IGNORECASE)
_MOST_BUCKETS = 128
"""Up to this many distinct whole numbers, each gets an embedding as well: their effect is seldom linear."""
_LEAST_REPEATS = 10
"""With this many rows for each distinct value, on average, embeddings can be learned for them."""
_LEAST_REPEATS_OF_MANY = 5
"""This many are enough for more than `_MOST_BUCKETS` distinct whole numbers, which are often the keys of items, unless
they have a long tail."""
_MOST_COUNT = 2**31
"""Whole numbers beyond it are keys or hashes, and float32 could not tell them apart."""
_LARGEST_FLOAT32 = 3.4028234e38
_DIMS = ((16, 4), (256, 8), (1 << 62, 16))
"""Pairs: a column with at most so many distinct ids gets embeddings of this dim."""
_LISTS = ("text list", "id list")
_WORDS = 4
"""Texts with at least this many words, on average, are prose and not names."""
_LEAST_ROWS = 20
_MOST_MISSING_WORDS = 3
"""Distinct words that may stand for a missing value in a column of numbers."""
_LEAST_NUMBERS = 3
"""A column of text with this many distinct numbers may be a column of numbers; fewer may be the values of a label."""
_NUMBER_SHARE = 0.9
"""If at least this share of a column's values are numbers, its words stand for a missing value."""
TEXT_TIME = "times as text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the user says about columns."""

    label: str | None = None
    ids: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    split: Mapping[str, str] = field(default_factory=dict)
    """The character between the ids in each text of a column; empty: each text is one id."""
    dim: int | None = None
    split_by: str | None = None
    """The column whose later values are held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdFeature:
    """A feature that a column becomes."""

    name: str
    column: str
    dim: int
    is_bag: bool = False
    """Whether the column holds lists."""
    option: str = ""
    """A keyword argument of IdColumn, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedColumn:
    """A column with its use."""

    profile: ColumnProfile
    use: Use
    why: str
    features: tuple[IdFeature, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelPlan:
    """How the label is read."""

    column: str
    values: Mapping[str, float] | None = None
    """Texts that stand for 0 and 1; None: the column holds numbers."""
    above: float | None = None
    """Numbers above it are 1; None: the numbers are 0 and 1."""
    drops_missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlan:
    """The use of every column."""

    columns: tuple[PlannedColumn, ...]
    label: LabelPlan

    @property
    def used(self) -> tuple[ColumnProfile, ...]:
        """The columns that are not ignored."""
        return tuple(column.profile for column in self.columns if column.use != "ignored")

    @property
    def features(self) -> tuple[IdFeature, ...]:
        """The features of ids, in the order of the columns."""
        return tuple(feature for column in self.columns for feature in column.features)

    @property
    def numbers(self) -> tuple[ColumnProfile, ...]:
        """The columns of numbers."""
        return tuple(column.profile for column in self.columns if column.use in ("number", "number and id"))

    @property
    def missing_texts(self) -> frozenset[str]:
        """The texts that stand for a missing value in the columns that are used."""
        return frozenset().union(*(profile.missing_texts for profile in self.used))

    def lines(self) -> Iterator[str]:
        """Yield the table that shows the plan."""
        rows = [("column", "type", "distinct", "missing", "use", "")]
        for column in self.columns:
            about = column.profile
            missing = f"{100 * about.num_missing / about.num_rows:.0f} %" if about.num_missing else ""
            distinct = "" if about.kind in _LISTS else f"{about.num_distinct:,}"
            rows.append((about.name, about.kind, distinct, missing, column.use, column.why))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        for name, kind, distinct, missing, use, why in rows:
            left, right = f"{name:{widths[0]}}  {kind:{widths[1]}}", f"{distinct:>{widths[2]}}  {missing:>{widths[3]}}"
            yield f"{left}  {right}  {use:{widths[4]}}  {why}".rstrip()

    def hints(self) -> Iterator[str]:
        """Yield a line for each column whose texts may be lists of ids, and are read as one id each, or ignored."""
        for column in self.columns:
            if column.use in ("id", "ignored") and not column.why.startswith(("by --ignore", "by --test-after")):
                yield from list_hint(column.profile)


def list_hint(profile: ColumnProfile) -> Iterator[str]:
    """Yield how to read texts as lists of ids, if it is in doubt whether they are any."""
    lists = profile.lists
    if lists is not None and not lists.is_sure:
        option = shlex.quote(f"{profile.name}={lists.separator}")
        yield (
            f"({profile.name} has {profile.num_distinct:,} texts made of {lists.num_ids:,} parts, separated by "
            f"{lists.separator!r}; for an embedding of each part instead of each text: --split {option})"
        )


def require_lists(profile: ColumnProfile) -> None:
    """Raise ConfigError if --split names the column, and it has no texts with that separator."""
    if profile.kind != "text":
        raise ConfigError(f"--split: column {profile.name!r} is of kind {profile.kind!r}; expected text that lists ids")
    if profile.lists is not None and not profile.lists.is_found:
        raise ConfigError(
            f"--split: no text of column {profile.name!r} has {profile.lists.separator!r}; expected the character "
            "between its ids: correct it, or leave the option out to have it inferred"
        )


def described_lists(profile: ColumnProfile) -> str:
    """Return how texts are split into ids, in words; empty: each is one id."""
    lists = profile.sure_lists
    return "" if lists is None else f"{lists.num_ids:,} ids separated by {lists.separator!r}"


def missing_words(profiles: Sequence[ColumnProfile], overrides: Overrides) -> frozenset[str]:
    """Return the words that stand for a missing value: the few words in columns that otherwise hold numbers. A source
    reads them as missing in all columns, so a value of a column with two values, such as a label, is never such a
    word."""
    words: set[str] = set()
    for profile in profiles:
        numbers = profile.numbers
        if numbers is None or numbers.num_distinct < _LEAST_NUMBERS:
            continue
        if numbers.share + numbers.comma_share < _NUMBER_SHARE:
            continue
        if len(numbers.words) <= _MOST_MISSING_WORDS and profile.name not in (*overrides.ids, *overrides.ignore):
            words.update(numbers.words)
    return frozenset(words.difference(*(profile.values for profile in profiles if profile.num_distinct == 2)))


def decimal_commas(plan: ColumnPlan) -> list[tuple[str, str]]:
    """Return the names of the columns that hold numbers with decimal commas, each with such a number."""
    return [
        (column.profile.name, numbers.with_comma)
        for column in plan.columns
        if column.use != "ignored" and (numbers := column.profile.numbers) is not None
        if numbers.with_comma and numbers.share + numbers.comma_share >= _NUMBER_SHARE
    ]


def plan_columns(profiles: Sequence[ColumnProfile], overrides: Overrides) -> ColumnPlan:
    """Return the use of every column; raise if there is no label, no id, or an override that does not fit."""
    by_name = {profile.name: profile for profile in profiles}
    _check_overrides(by_name, overrides)
    label = _plan_label(by_name, overrides)
    columns: list[PlannedColumn] = []
    taken = set(by_name)
    for profile in profiles:
        if profile.name == label.column:
            why = _label_reason(label, profile)
            columns.append(PlannedColumn(profile=profile, use="label", why=_with_missing(why, profile)))
            continue
        use, why = _use(profile, overrides)
        features = _features(profile, use, overrides.dim, taken)
        _check_names(features)
        taken |= {feature.name for feature in features}
        if features:
            dims = f"dim {features[0].dim}"
            why = f"{why}; {dims}" if why else dims
        why = _with_missing(why, profile)
        columns.append(PlannedColumn(profile=profile, use=use, why=why, features=features))
    plan = ColumnPlan(columns=tuple(columns), label=label)
    if not plan.features:
        raise InputError(
            "no column was found that holds ids; expected at least one, since embeddings are what Satrap trains: name "
            "columns with --ids"
        )
    return plan


def _with_missing(why: str, profile: ColumnProfile) -> str:
    """Add the texts that stand for a missing value."""
    if not profile.missing_texts:
        return why
    texts = sorted(profile.missing_texts)
    text = f"{', '.join(map(repr, texts))} {'counts' if len(texts) == 1 else 'count'} as missing"
    return f"{why}; {text}" if why else text


def label_candidates(profiles: Sequence[ColumnProfile]) -> list[str]:
    """Return the columns with two distinct values."""
    return [profile.name for profile in profiles if profile.num_distinct == 2]


# -- the label ---------------------------------------------------------------------------------------------------------


def _plan_label(profiles: Mapping[str, ColumnProfile], overrides: Overrides) -> LabelPlan:
    candidates = label_candidates(list(profiles.values()))
    shown = f"columns with two distinct values: {', '.join(candidates) or 'none'}"
    name = overrides.label
    if name is None:
        named = [column for column in profiles if column.lower() in LABEL_NAMES and column not in overrides.ignore]
        if len(named) != 1:
            problem = f"several columns may be the label ({', '.join(named)})" if named else "no label was named"
            raise InputError(f"{problem}; name it with --label COLUMN; {shown}")
        name = named[0]
    profile = profiles[name]
    if profile.num_distinct != 2:
        if profile.num_distinct < 2:
            contents = f"one value only, {profile.values[0]!r}" if profile.values else "no value"
        else:
            values = ", ".join(map(repr, profile.values[:5]))
            contents = (
                f"{profile.num_distinct:,} distinct values ({values}{', ...' if profile.num_distinct > 5 else ''})"
            )
        raise InputError(f"label {name!r} has {contents}; expected two, such as 0 and 1; {shown}")
    drops_missing = profile.num_missing > 0
    if profile.is_number:
        above = None if (profile.least, profile.most) == (0.0, 1.0) else profile.least
        return LabelPlan(column=name, above=above, drops_missing=drops_missing)
    if profile.kind != "text":
        raise InputError(f"label {name!r} holds values of kind {profile.kind!r}; expected numbers or text; {shown}")
    positive = next((text for text in profile.values if text.lower() in _POSITIVE), profile.values[1])
    texts = sorted(profile.values, key=lambda text: text == positive)
    return LabelPlan(column=name, values={text: float(text == positive) for text in texts}, drops_missing=drops_missing)


def _label_reason(label: LabelPlan, profile: ColumnProfile) -> str:
    why = ""
    if label.values is not None:
        why = f"1 is {next(text for text, number in label.values.items() if number == 1)!r}"
    elif label.above is not None:
        why = f"1 is {profile.most:g}"
    if label.drops_missing:
        why += ("; " if why else "") + "rows without a label are left out"
    return why


# -- the other columns -------------------------------------------------------------------------------------------------


def _check_overrides(profiles: Mapping[str, ColumnProfile], overrides: Overrides) -> None:
    named: dict[str, str] = {}
    options = {
        "--label": () if overrides.label is None else (overrides.label,),
        "--ids": overrides.ids,
        "--numbers": overrides.numbers,
        "--ignore": overrides.ignore,
        "--split": tuple(name for name in overrides.split if name not in overrides.ids),
        "--test-after": () if overrides.split_by is None else (overrides.split_by,),
    }
    for option, names in options.items():
        for name in names:
            if name not in profiles:
                raise ConfigError(f"{option}: there is no column {name!r}; {suggest(name, list(profiles))}")
            if name in named:
                raise ConfigError(f"column {name!r} is named by {named[name]} and by {option}; name it once")
            named[name] = option
    for name in overrides.numbers:
        if not profiles[name].is_number:
            profile = profiles[name]
            values = profile.values if profile.numbers is None else profile.numbers.words
            hint = ""
            if profile.numbers and values:
                hint = f", or --missing {shlex.quote(values[0])} if it stands for a missing value"
            elif profile.numbers:
                values = (profile.numbers.with_comma,)
            shown = repr(values[0]) if values else "no value"
            raise ConfigError(f"--numbers: column {name!r} holds {shown}; expected numbers in every row{hint}")
    for name in overrides.split:
        require_lists(profiles[name])
    for name in overrides.ids:
        kind = profiles[name].kind
        if (kind in ("time", "flag", "real") and profiles[name].is_typed) or kind in ("other", "empty"):
            raise ConfigError(
                f"--ids: column {name!r} is of kind {kind!r}; expected integers or text, or lists of them"
            )


def _use(profile: ColumnProfile, overrides: Overrides) -> tuple[Use, str]:
    """Return the use of a column that is not the label, and why."""
    if profile.name in overrides.ignore:
        return "ignored", "by --ignore"
    if profile.name == overrides.split_by:
        return "ignored", "by --test-after: it divides training from test"
    lists = described_lists(profile)
    if profile.name in overrides.ids:
        return "id", f"by --ids; {lists}" if lists else "by --ids"
    if profile.name in overrides.numbers:
        return "number", "by --numbers"
    if lists:
        return "id", lists
    if not profile.name:
        return "ignored", "it has no name, like the index that pandas writes"
    if profile.kind == "empty":
        return "ignored", "all values are missing"
    if profile.kind == "other":
        return "ignored", "its type is neither numbers, text nor times"
    if profile.kind in _LISTS:
        return "id", "a list of ids: the mean of their embeddings"
    if profile.num_distinct == 1 and not profile.num_missing:
        return "ignored", f"constant: {profile.values[0]}"
    match profile.kind:
        case "time":
            return "id", f"its {' and its '.join(parts_of_time(profile))}"
        case "text time":
            return "ignored", TEXT_TIME
        case "text":
            return _use_of_text(profile)
        case "integer":
            return _use_of_integers(profile)
    if max(profile.most, -profile.least) > _LARGEST_FLOAT32:
        return "ignored", "numbers too large for float32"
    if profile.is_float and profile.is_whole:
        return "number", "as ids, floats above 2**53 have lost digits"
    return "number", "true or false" if profile.kind == "flag" else "numbers with fractions"


def _use_of_text(profile: ColumnProfile) -> tuple[Use, str]:
    if _is_different_in_each_row(profile):
        return "ignored", "another text in each row"
    if profile.num_words >= _WORDS and profile.num_distinct * _LEAST_REPEATS > profile.num_rows:
        return "ignored", f"prose: {profile.num_words:.0f} words on average"
    numbers = profile.numbers
    if numbers is None or numbers.with_comma or numbers.share < 0.5 or numbers.num_distinct < _LEAST_NUMBERS:
        return "id", ""
    return "id", f"text, since {numbers.words[0]!r} is no number"


def _use_of_integers(profile: ColumnProfile) -> tuple[Use, str]:
    repeats = (profile.num_rows - profile.num_missing) / profile.num_distinct
    spread = profile.most - profile.least + 1
    is_named = _ID_NAME.search(profile.name) is not None
    if _is_different_in_each_row(profile) and (is_named or spread < 2 * profile.num_distinct):
        return "ignored", "another number in each row"
    if is_named:
        return "id", "by its name"
    if profile.most >= _MOST_COUNT or profile.least < -_MOST_COUNT:
        return "id", "too large to count something: keys or hashes"
    if profile.num_distinct > 1000 and repeats >= 2 and profile.least >= 0 and spread <= 4 * profile.num_distinct:
        return "id", "many numbers without gaps, as keys have"
    if profile.num_distinct <= 2:
        return "number", "two distinct numbers"
    if _needs_declared_kind(profile):
        return "number", "whole numbers in a column of floats"
    is_few = profile.num_distinct <= _MOST_BUCKETS
    if repeats < (_LEAST_REPEATS if is_few else _LEAST_REPEATS_OF_MANY):
        return "number", "too few rows of each number for an embedding"
    if is_few:
        return "number and id", "few numbers, so each gets an embedding, too"
    if profile.has_long_tail:
        return "number", "mostly small with a few large ones, as counts are"
    return "number and id", "each number repeats, so it gets an embedding, too"


def _is_different_in_each_row(profile: ColumnProfile) -> bool:
    return profile.num_rows >= _LEAST_ROWS and profile.num_distinct == profile.num_rows - profile.num_missing


def parts_of_time(profile: ColumnProfile) -> dict[str, str]:
    """Return the parts of a time that become ids, with their names in IdColumn."""
    return {"weekday": "weekday"} if profile.is_date else {"hour": "hour_of_day", "weekday": "weekday"}


def _needs_declared_kind(profile: ColumnProfile) -> bool:
    """Return whether the ids are whole numbers in a column of floats, which a source refuses unless their kind is
    declared."""
    return profile.is_typed and profile.is_float


def _features(profile: ColumnProfile, use: Use, dim: int | None, taken: set[str]) -> tuple[IdFeature, ...]:
    """Return the features of a column; taken: names that no other feature may have."""
    if use not in ("id", "number and id"):
        return ()
    name = profile.name
    if profile.kind == "time":
        return tuple(
            IdFeature(name=_free(f"{name}_{part}", taken), column=name, dim=dim or 4, option=f'time="{option}"')
            for part, option in parts_of_time(profile).items()
        )
    is_bag = profile.sure_lists is not None or profile.kind in _LISTS
    if dim is None:
        dim = 16 if is_bag else next(dim for limit, dim in _DIMS if profile.num_distinct <= limit)
    option = 'kind="integer"' if _needs_declared_kind(profile) else ""
    if profile.sure_lists is not None:
        option = f"separator={json.dumps(profile.sure_lists.separator)}"
    feature = name if use == "id" else _free(f"{name}_id", taken)
    return (IdFeature(name=feature, column=name, dim=dim, is_bag=is_bag, option=option),)


def _check_names(features: Sequence[IdFeature]) -> None:
    for feature in features:
        try:
            check_name("feature", feature.name, "'item'")
        except ConfigError as error:
            raise ConfigError(f"{error}: rename the column, or leave it out with --ignore") from error


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
