"""Hashing: the published vectors of XXH64, every kind of column against value-by-value hashing, and invalid input."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from xxhash import xxh64_intdigest as xxh64

from satrap import _core
from satrap.data.hashing import hash_integers, hash_strings
from satrap.errors import InputError

VECTORS = {"": 0xEF46DB3751D8E999, "a": 0xD24EC4F1A98C6E5B, "abc": 0x44BC2CF5AD770999}
TEXTS = ["", "a", "abc", "ünïcödé", "x" * 31, "y" * 32, "z" * 100]


def test_published_vectors() -> None:
    assert dict(zip(VECTORS, hash_strings(list(VECTORS)).tolist(), strict=True)) == VECTORS


@given(st.lists(st.binary(max_size=80)))
def test_a_column_is_hashed_as_its_values(values: list[bytes]) -> None:
    expected = [xxh64(value) for value in values]
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        assert hash_strings(pa.array(values, kind)).tolist() == expected
        assert hash_strings(pa.array([b"?", *values], kind).slice(1)).tolist() == expected
    assert hash_strings(pa.array(values, pa.binary()).dictionary_encode()).tolist() == expected


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_integers_are_hashed_as_their_bytes(values: list[int]) -> None:
    found = hash_integers(np.array(values, np.uint64))
    assert found.tolist() == [xxh64(value.to_bytes(8, "little")) for value in values]
    assert np.array_equal(hash_integers(np.array(values, np.uint64).view(np.int64)), found)


@pytest.mark.parametrize(
    "column",
    [
        TEXTS,
        np.array(TEXTS),
        np.array(TEXTS, object),
        pa.array(TEXTS),
        pa.array(TEXTS, pa.large_string()),
        pa.array(TEXTS, pa.string_view()),
        pa.chunked_array([TEXTS[:2], TEXTS[2:]]),
        pa.array(TEXTS).dictionary_encode(),
        pa.chunked_array([TEXTS[:3], TEXTS[3:]]).dictionary_encode(),
    ],
    ids=lambda column: str(getattr(column, "type", type(column).__name__)),
)
def test_every_kind_of_column_of_texts(column: Any) -> None:
    assert hash_strings(column).tolist() == [xxh64(text.encode()) for text in TEXTS]


def test_a_missing_text_is_hashed_as_the_empty_text() -> None:
    for column in (pa.array(["a", None]), pa.array(["a", None]).dictionary_encode(), ["a", None]):
        assert hash_strings(column).tolist() == [VECTORS["a"], VECTORS[""]]
    assert hash_strings(pa.nulls(2)).tolist() == [VECTORS[""]] * 2
    many = pa.DictionaryArray.from_arrays(pa.array([0, None, 127], pa.int8()), [f"t{i}" for i in range(128)])
    assert hash_strings(many).tolist() == [xxh64(b"t0"), VECTORS[""], xxh64(b"t127")]


def test_no_values() -> None:
    columns: list[Any] = [[], pa.array([], pa.string()), pa.chunked_array([], pa.string()), np.array([], str)]
    for column in columns:
        assert hash_strings(column).dtype == np.uint64 and len(hash_strings(column)) == 0
    assert len(hash_integers(np.array([], np.uint64))) == 0


def test_fixed_size_bytes() -> None:
    assert hash_strings(pa.array([b"ab", None], pa.binary(2))).tolist() == [xxh64(b"ab"), VECTORS[""]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hash_strings([1, 2]), "found a column of int64; expected strings or bytes"),
        (lambda: hash_strings([["a"]]), "found a column of list"),
        (lambda: hash_strings(object()), "found object .*; expected a column of strings"),
        (lambda: hash_strings(["a", 1]), "found list .*; expected a column of strings"),
        (lambda: hash_integers(np.array([1.0])), "ids are float64"),
        (lambda: hash_integers([1.0]), r"ids\[0\] is 1.0 \(float\); expected an integer"),
        (lambda: _core.hash_texts(np.empty(0, np.int32), np.empty(0, np.uint8)), "offsets are empty"),
        (lambda: _core.hash_texts(np.array([0, 2], np.int32), np.zeros(1, np.uint8)), "offsets must rise within the 1"),
        (lambda: _core.hash_texts(np.array([1, 0], np.int64), np.zeros(1, np.uint8)), "offsets must rise"),
        (lambda: _core.hash_texts(np.array([-1, 0], np.int64), np.zeros(1, np.uint8)), "offsets must rise"),
        (lambda: hash_strings("anna"), r"found 'anna' \(str\); expected a column of strings, such as a list"),
    ],
)
def test_invalid_input_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
