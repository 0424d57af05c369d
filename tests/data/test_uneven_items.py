"""Iterables whose items are not alike: keys that some samples lack, columns of several types, and an iterator that two
sources have."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from satrap.data.inputs import Inputs
from satrap.data.iterable import IterableSource
from satrap.errors import SourceError


def test_an_iterator_is_read_once_whichever_source_has_it() -> None:
    """Such as those that `replace` makes for training and for evaluation."""
    data = IterableSource({"a": [i]} for i in range(9))
    assert len(list(data.replace(share=(0.0, 1.0)).batches(["a"]))) == 9
    for other in (data, data.replace(share=(0.5, 1.0))):
        with pytest.raises(SourceError, match="this generator was read before"):
            other.batches(["a"])
    assert len(list(data.replace(items=[{"a": [1]}]).batches(["a"]))) == 1


@pytest.mark.parametrize("batch_size", [1, 2, 3, 6])
def test_a_missing_key_is_a_missing_value_in_batches_of_any_size(batch_size: int) -> None:
    """Also in the first batch after a run has resumed. A key that the first samples lack may be misspelt."""

    def items(offset: int | None) -> Iterator[Any]:
        samples = [{"a": 1, "x": 2.0}, {"a": 2}, {"a": 3}, {}, {"a": 5, "x": 1.0}, {"x": 4.0}]
        return iter([(sample, i + 1) for i, sample in enumerate(samples)][offset or 0 :])

    data = IterableSource(items, samples=True, offsets=True, batch_size=batch_size, dense="x", epochs=2)
    batches = list(data.batches(["a"]))
    assert [number for batch in batches for number in dense_of(batch)] == [2, 0, 0, 0, 1, 4] * 2
    for number, batch in enumerate(batches, 1):
        rest = list(data.batches(["a"], position=batch.position))
        assert list(map(dense_of, rest)) == list(map(dense_of, batches[number:]))


@pytest.mark.parametrize("shuffle", [False, True])
def test_further_columns_of_several_types_are_joined(shuffle: bool) -> None:
    """Lists have the types of what they hold: nulls, whole numbers and floats here, and texts with an index of them."""
    numbers = [[None, None], [1, None], [0.5, 2], [None]]
    texts: list[Any] = [["a", None], pa.array(["b", "a"]).dictionary_encode(), [None, None], pa.array(["c"])]
    ids = [[0, 1], [2, 3], [4, 5], [6]]
    items = [{"a": a, "n": n, "t": t} for a, n, t in zip(ids, numbers, texts, strict=True)]
    data = IterableSource(items, batch_size=3, extra=("n", "t"), shuffle=shuffle)
    found = {
        int(value): (number, text)
        for batch in data.batches(["a"])
        for value, number, text in zip(
            batch.values, batch.extra["n"].to_pylist(), batch.extra["t"].to_pylist(), strict=True
        )
    }
    expected = zip([None, None, 1, None, 0.5, 2, None], ["a", None, "b", "a", None, None, "c"], strict=True)
    assert found == dict(enumerate(expected))


def test_types_that_nothing_joins_are_an_error() -> None:
    data = IterableSource([{"a": [1], "x": [1]}, {"a": [2], "x": ["b"]}], batch_size=2, extra="x")
    with pytest.raises(
        SourceError, match=r"column 'x' has values of the types int64, string, .*write the column in one"
    ):
        list(data.batches(["a"]))


def dense_of(inputs: Inputs) -> list[float]:
    assert inputs.dense is not None
    numbers: list[float] = inputs.dense[:, 0].tolist()
    return numbers
