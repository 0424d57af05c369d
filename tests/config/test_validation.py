"""The words and limits that all errors of the checks share."""

from __future__ import annotations

import numpy as np

from satrap.config.validation import LARGEST_FLOAT32, flat, kind_of, suggest


def test_kinds_have_their_article() -> None:
    found = [kind_of(1), kind_of("text"), kind_of([1]), kind_of(np.array(0))]
    assert found == ["an int", "a str", "a list", "a ndarray"]


def test_the_nearest_known_name_or_all_of_them() -> None:
    assert suggest("itme", ["user", "item", "items"]) == "the nearest known one is 'item'"
    assert suggest("x", ["user", "item"]) == "known are 'user', 'item'"


def test_nested_mappings_become_flat() -> None:
    found = flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}})
    assert found == {"a": 1, "b.c": 2, "b.d.e": 3}
    assert flat({"a": 1}, "of.") == {"of.a": 1}


def test_the_largest_float32() -> None:
    assert float(np.finfo(np.float32).max) == LARGEST_FLOAT32
