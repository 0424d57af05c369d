"""Finds columns of text whose values list ids, such as "action|comedy": what a list has between its ids.

A source splits such a text if its column declares the separator, and reads it as one id otherwise. Many distinct texts
made of few distinct parts are lists. Prose, names and dates are, too, by that measure alone: so a space must separate
codes, a comma needs more evidence than "|", and lists differ in length. What is left in doubt is said, not guessed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from satrap.config.optional_deps import pyarrow_for

_SEPARATORS = ("|", ";", ",", " ")
_LEAST_TEXTS = 20
_MANY, _VERY_MANY = 3, 10
"""How many distinct texts there are for each part."""
_MANY_USES = 10
"""In how many distinct texts a part is, on average, where the lists are long and few are equal."""
_MOST_ALIKE = 0.95
"""If at least this share of the texts has the same number of parts, these may be the parts of a key, or of a date."""
_CODE = r"^[\w./:-]*\d[\w./:-]*$"
_GROUPED_NUMBER = r"^[-+]?(\d{0,3}([, ]\d{3})*(\.\d+)?|\d*,\d+)$"
_BRACKET = r"^[\[({]"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdLists:
    """The lists of ids in the texts of a column."""

    separator: str
    num_ids: int
    """Distinct ids."""
    has_blanks: bool = False
    """Whether some have blanks around them."""
    is_sure: bool = True
    """Whether the texts are lists without doubt, or the user said so."""
    is_found: bool = True
    """Whether any text has the separator."""


def find_lists(texts: Any, *, strips: bool) -> IdLists | None:
    """Return the lists in an Arrow array of the distinct texts of a column; None if they are no lists. strips: whether
    blanks around ids are left out."""
    arrow = pyarrow_for("reading data")
    compute, types = arrow.compute, arrow.types
    if len(texts) < _LEAST_TEXTS or not (types.is_string(texts.type) or types.is_large_string(texts.type)):
        return None
    if _share(texts, _BRACKET) >= 0.5:  # a list as Python or JSON writes it
        return None
    are_numbers = _share(texts, _GROUPED_NUMBER) >= 0.9
    characters = [
        character
        for character in _SEPARATORS
        if compute.any(compute.match_substring(texts, character)).as_py() and not (are_numbers and character in ", ")
    ]
    lists = [judged for character in characters if (judged := _judged(texts, character, strips)) is not None]
    return min(lists, key=lambda one: (not one.is_sure, one.num_ids), default=None)


def lists_by(texts: Any, separator: str, *, strips: bool) -> IdLists:
    """Return the lists in an Arrow array of the distinct texts of a column, by a separator that the user gave."""
    compute = pyarrow_for("reading data").compute
    ids, has_blanks = _distinct(_items(texts, separator), strips)
    is_found = bool(compute.any(compute.match_substring(texts, separator)).as_py())
    return IdLists(separator=separator, num_ids=len(ids), has_blanks=has_blanks, is_found=is_found)


def _judged(texts: Any, separator: str, strips: bool) -> IdLists | None:
    """Return the lists by this separator; None if there are none."""
    items = _items(texts, separator)
    ids, has_blanks = _distinct(items, strips)
    texts_per_id, uses = len(texts) / max(1, len(ids)), len(items.flatten()) / max(1, len(ids))
    is_plain = texts_per_id >= _MANY or (texts_per_id >= 1 and uses >= _MANY_USES)
    is_clear = texts_per_id >= _VERY_MANY
    sizes = np.bincount(np.asarray(pyarrow_for("reading data").compute.list_value_length(items)))
    differ = sizes.max() < _MOST_ALIKE * len(texts)
    if separator == ",":
        is_sure, is_likely = differ and is_clear, differ and texts_per_id >= _MANY
    elif separator == " ":
        is_sure, is_likely = differ and is_plain and _share(ids, _CODE) >= 0.99, differ and is_clear
    else:
        is_sure, is_likely = differ and is_plain, is_plain
    if not is_sure and not is_likely:
        return None
    is_sure &= strips or not has_blanks  # "a, b" without: "b" and " b" would be two ids
    return IdLists(separator=separator, num_ids=len(ids), has_blanks=has_blanks, is_sure=bool(is_sure))


def _items(texts: Any, separator: str) -> Any:
    return pyarrow_for("reading data").compute.split_pattern(texts, separator)


def _distinct(items: Any, strips: bool) -> tuple[Any, bool]:
    """Return the distinct items that are not empty, and whether blanks around some were left out."""
    compute = pyarrow_for("reading data").compute
    ids = compute.unique(items.flatten())
    stripped = compute.unique(compute.utf8_trim_whitespace(ids)) if strips else ids
    has_blanks = bool(compute.any(compute.match_substring_regex(ids, r"^\s+\S|\S\s+$")).as_py())
    return stripped.filter(compute.not_equal(stripped, "")), has_blanks


def _share(texts: Any, form: str) -> float:
    return float(np.asarray(pyarrow_for("reading data").compute.match_substring_regex(texts, form)).mean())
