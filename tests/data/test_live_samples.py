"""Iterables of samples that arrive one by one: when a batch is returned, and where a run resumes."""

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from satrap.data.inputs import Position
from satrap.data.iterable import IterableSource


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_samples_may_hold_tensors(dtype: torch.dtype) -> None:
    """A Dataset of PyTorch returns such samples."""
    samples: list[Any] = [
        {"a": torch.tensor(i, dtype=dtype), "b": torch.tensor([i, 7], dtype=dtype), "x": torch.tensor(i / 2)}
        for i in range(5)
    ]
    plain = [{name: value.tolist() for name, value in sample.items()} for sample in samples]
    del samples[1]["b"], plain[1]["b"]
    options: dict[str, Any] = {"samples": True, "batch_size": 3, "dense": "x"}
    found, expected = (list(IterableSource(items, **options).batches(["a", "b"])) for items in (samples, plain))
    for batch, other in zip(found, expected, strict=True):
        for name in ("values", "offsets", "dense"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(other, name))


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 9), st.sampled_from([1, 1, 2, 3]), st.booleans(), st.data())
def test_a_batch_waits_for_no_further_sample(
    malformed: list[bool], size: int, world_size: int, offsets: bool, draw: st.DataObject
) -> None:
    """Malformed items delay a batch only until its samples have arrived; a resumed run does not wait either."""
    num_taken = 0

    def events(offset: int | None = None) -> Iterator[Any]:
        nonlocal num_taken
        for num_taken, is_bad in enumerate(malformed[offset or 0 :], 1 + (offset or 0)):
            item = {"a": num_taken, "y": 7 if is_bad else 1}
            yield (item, num_taken) if offsets else item

    data = IterableSource(
        events, samples=True, offsets=offsets, batch_size=size, label="y", max_bad_rows=len(malformed)
    )
    good = [i for i, is_bad in enumerate(malformed, 1) if not is_bad]
    found: list[int] = []
    for rank in range(world_size):
        positions = []
        for batch, inputs in enumerate(data.batches(["a"], rank=rank, world_size=world_size), 1):
            found += inputs.values.tolist()
            positions.append(inputs.position)
            if inputs.batch_size == size and batch * size * world_size <= len(good):
                assert num_taken <= good[batch * size * world_size - 1]
        if positions:
            start = draw.draw(st.integers(0, len(positions) - 1))
            rest = data.batches(["a"], position=positions[start], rank=rank, world_size=world_size)
            assert [inputs.position for inputs in rest] == positions[start + 1 :]
            if start + 1 < len(good) // (size * world_size):
                next(data.batches(["a"], position=positions[start], rank=rank, world_size=world_size))
                assert num_taken <= good[(start + 2) * size * world_size - 1]
    assert sorted(found) == good


@given(st.integers(0, 6000), st.integers(1, 5000), st.booleans())
@settings(max_examples=settings().max_examples // 4)
def test_one_trainer_resumes_with_another_batch_size(consumed: int, size: int, offsets: bool) -> None:
    """Also at a position within a group of 4,096 samples that were converted together."""
    n = 6000

    def events(offset: int | None = None) -> Iterator[Any]:
        yield from (({"a": i}, i + 1) if offsets else {"a": i} for i in range(offset or 0, n))

    group = consumed // 4096 * 4096 if offsets else 0
    position = Position(0, 0, 1, consumed - group, 1, offset=group or None)
    data = IterableSource(events, samples=True, offsets=offsets, batch_size=size)
    assert [i for inputs in data.batches(["a"], position=position) for i in inputs.values.tolist()] == [
        *range(consumed, n)
    ]


def test_signatures_keep_the_class_name_of_saved_positions() -> None:
    assert IterableSource([]).signature() == {"type": "IterableSource", "shuffle": False}
    data = IterableSource(lambda _: [], samples=True, offsets=True, batch_size=3)
    assert data.signature() == {"type": "IterableSource", "shuffle": False, "offsets": True, "batch_size": 3}
    shuffled = IterableSource([], samples=True, shuffle=True, batch_size=3).signature()
    assert shuffled == {"type": "IterableSource", "shuffle": True, "shuffle_blocks": 16, "seed": 0}
