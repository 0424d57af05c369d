"""Iterables that resume by themselves: positions hold their offsets, which are passed back to them."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from satrap.data.inputs import Position
from satrap.data.iterable import IterableSource
from satrap.errors import ConfigError, SourceError


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.sampled_from([None, 1, 4]),
    st.booleans(),
    st.sampled_from([1, 1, 2, 3]),
    st.data(),
)
def test_data_with_offsets_resumes_by_itself(
    sizes: list[int], batch_size: int | None, samples: bool, world_size: int, draw: st.DataObject
) -> None:
    """The data resumes like a message broker: items before the offset are not returned again."""
    ends = np.cumsum(sizes).tolist()
    requested: list[int] = []

    def items(offset: dict[str, int] | None) -> Iterator[Any]:
        requested.append(0 if offset is None else offset["p0"])
        if samples:
            yield from (({"a": i}, {"p0": i + 1}) for i in range(requested[-1], sum(sizes)))
        else:
            at = ends.index(requested[-1]) + 1 if requested[-1] else 0
            pairs = zip(sizes[at:], ends[at:], strict=True)
            yield from (({"a": np.arange(end - size, end)}, {"p0": end}) for size, end in pairs if size)

    data = IterableSource(items, samples=samples, batch_size=batch_size or (4 if samples else None), offsets=True)
    found = []
    for rank in range(world_size):
        whole = list(data.batches(["a"], rank=rank, world_size=world_size))
        found += [each for inputs in whole for each in inputs.values.tolist()]
        taken = draw.draw(st.integers(0, len(whole)))
        position = None
        if taken and (last := whole[taken - 1].position) is not None:
            position = Position.from_dict(json.loads(json.dumps(last.to_dict())))
        rest = list(data.batches(["a"], position=position, rank=rank, world_size=world_size))
        assert [each.values.tolist() for each in rest] == [each.values.tolist() for each in whole[taken:]]
        assert [each.position for each in rest] == [each.position for each in whole[taken:]]
        if position is not None and not samples and world_size == 1:
            num_returned = sum(inputs.batch_size for inputs in whole[:taken])
            assert requested[-1] == max(end for end in [0, *ends] if end < num_returned), "start of the last item"
    assert sorted(found) == list(range(sum(sizes)))


def read(items: list[Any]) -> list[Any]:
    return list(IterableSource(lambda _: items, offsets=True).batches(["a"]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            lambda: IterableSource([1], offsets=True),
            "offsets is True and items is .*; expected a function of an offset",
        ),
        (
            lambda: IterableSource(lambda _: [], offsets=True, shuffle=True, batch_size=1),
            "offsets and shuffle are True, but",
        ),
        (lambda: read([{"a": [1]}]), "item 0 is .*; expected a pair"),
        (lambda: read([({"a": [1]}, {1})]), "its offset is .*JSON"),
        (lambda: read([({"a": [1]}, None)]), "its offset is None"),
    ],
)
def test_offsets_that_cannot_be_used_are_refused(data: Callable[[], Any], message: str) -> None:
    with pytest.raises((ConfigError, SourceError), match=message):
        data()
