"""Batches with a limit on a feature's ids: each sample once, none above the limit, as many as fit, and even ranks."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings

import satrap
from satrap.config.features import Features
from satrap.data.arrow import Arrow
from satrap.data.inputs import Inputs, Position
from satrap.data.iterable import IterableSource
from satrap.errors import ConfigError

ITEM = satrap.Table("item", dim=2, optimizer=satrap.Adagrad(lr=0.1))
PADDING = 7


def source(lengths: Sequence[int], *, blocks: bool, **options: Any) -> Any:
    """Return samples of these lengths, numbered in the column `n`: in blocks of known rows, or one after another."""
    lists = [np.arange(100, 100 + n) for n in lengths]
    if blocks:
        table = pa.table({"h": pa.array(lists, pa.list_(pa.int64())), "n": range(len(lists))})
        return Arrow(table, block_rows=5, extra="n", **options)
    samples = [{"h": ids, "n": n} for n, ids in enumerate(lists)]
    return IterableSource(samples, samples=True, extra="n", **options)


@st.composite
def sources(draw: st.DrawFn) -> tuple[list[int], Any]:
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=60))
    options = {
        "max_ids": ("h", draw(st.integers(1, 80))),
        "batch_size": draw(st.sampled_from([1, 3, 8, 100])),
        "shuffle": draw(st.booleans()),
        "shuffle_blocks": draw(st.integers(1, 3)),
        "num_threads": draw(st.sampled_from([0, 2])),
        "epochs": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 9)),
    }
    return lengths, source(lengths, blocks=draw(st.booleans()), **options)


def numbers(batches: Sequence[Inputs]) -> list[int]:
    return [n for inputs in batches for n in inputs.extra["n"].to_pylist()]


def at(inputs: Inputs) -> Position:
    assert inputs.position is not None
    return Position.from_dict(inputs.position.to_dict())


@given(sources(), st.sampled_from([1, 2, 3]))
@settings(max_examples=settings().max_examples // 2, deadline=None)
def test_each_sample_is_in_one_batch_that_no_other_would_fit_in(given: tuple[list[int], Any], world_size: int) -> None:
    lengths, data = given
    limit = data.max_ids[1]
    ranks = [list(data.batches(["h"], rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert Counter(n for rank in ranks for n in numbers(rank)) == dict.fromkeys(range(len(lengths)), data.epochs)
    for rank in ranks:
        for inputs, following in zip(rank, [*rank[1:], None], strict=False):
            its = [lengths[n] for n in numbers([inputs])]
            assert len(inputs.values) == sum(its)
            assert sum(its) <= limit or len(its) == 1
            if following is not None and at(following).epoch == at(inputs).epoch:
                is_full = len(its) == data.batch_size
                assert is_full or sum(its) + lengths[numbers([following])[0]] > limit


@given(sources(), st.sampled_from([1, 2]))
@settings(max_examples=settings().max_examples // 4, deadline=None)
def test_resuming_continues_the_same_batches(given: tuple[list[int], Any], world_size: int) -> None:
    _, data = given
    for rank in range(world_size):
        whole = list(data.batches(["h"], rank=rank, world_size=world_size))
        for i, inputs in enumerate(whole):
            rest = list(data.batches(["h"], position=at(inputs), rank=rank, world_size=world_size))
            assert [numbers([each]) for each in rest] == [numbers([each]) for each in whole[i + 1 :]]


@given(sources(), st.data())
@settings(max_examples=settings().max_examples // 4, deadline=None)
def test_another_number_of_ranks_continues(given: tuple[list[int], Any], draw: st.DataObject) -> None:
    lengths, data = given
    positions, seen = [], Counter[int]()
    for rank in range(3):
        batches = list(data.batches(["h"], rank=rank, world_size=3))
        taken = draw.draw(st.integers(0, len(batches)))
        seen.update(numbers(batches[:taken]))
        positions.append(at(batches[taken - 1]) if taken else Position(0, 0, 0))
    start = Position.after(positions)
    for rank in range(2):
        seen.update(numbers(list(data.batches(["h"], position=start, rank=rank, world_size=2))))
    assert seen == dict.fromkeys(range(len(lengths)), data.epochs)


@pytest.mark.parametrize("blocks", [True, False])
def test_ranks_have_about_equally_many_ids_in_a_step(blocks: bool) -> None:
    """Lengths of Zipf's law: with a number of samples the longest batch decides, with a limit all are near it."""
    lengths = np.minimum(np.random.default_rng(1).zipf(1.5, 4000), 1000).tolist()

    def imbalance(**options: Any) -> float:
        data = source(lengths, blocks=blocks, shuffle=True, **options)
        ranks = [[len(each.values) for each in data.batches(["h"], rank=r, world_size=4)] for r in range(4)]
        steps = np.array(list(zip(*ranks, strict=False))[:-1])  # the last one of a rank is short
        return float((steps.max(1) / steps.mean(1)).mean())

    num_ids = 50 * round(sum(lengths) / len(lengths))
    by_samples, by_ids = imbalance(batch_size=50), imbalance(batch_size=4000, max_ids=("h", num_ids))
    print(f"ids of the longest batch of a step / mean: {by_samples:.2f} by samples, {by_ids:.2f} by ids")
    assert by_ids - 1 < (by_samples - 1) / 2


def test_the_limit_counts_what_a_lookup_reads() -> None:
    """Padding is not counted, nor ids beyond the feature's max_length."""
    rows = {"h": [[1, 2, 3, 4, PADDING], [PADDING] * 9, [1, 2], [3]], "n": [0, 1, 2, 3]}
    data = Arrow(pa.table(rows), extra="n", batch_size=10, max_ids=("h", 4))
    features = Features({"h": ITEM.sequence(2, jagged=True, padding_id=PADDING)})
    assert [numbers([each]) for each in data.batches(features)] == [[0, 1, 2], [3]]
    assert [numbers([each]) for each in data.batches(["h"])] == [[0], [1], [2, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_ids": ("h", 0)}, r"max_ids\[1\] is 0"),
        ({"max_ids": "h"}, "expected a feature and a number"),
        ({"max_ids": (3, 3)}, "expected a feature and a number"),
    ],
)
def test_a_bad_limit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arrow(pa.table({"h": [1]}), **options)


def test_a_limit_needs_a_batch_size_and_a_known_feature() -> None:
    with pytest.raises(ConfigError, match="batch_size is None, so each item is a batch"):
        IterableSource([{"h": [1]}], max_ids=("h", 3))
    with pytest.raises(ConfigError, match="max_ids names 'hh', which is no feature; the nearest known one is 'h'"):
        Arrow(pa.table({"h": [1]}), max_ids=("hh", 3)).batches(["h"])
    with pytest.raises(TypeError, match="max_ids decides"):
        len(Arrow(pa.table({"h": [1]}), max_ids=("h", 3)).batches(["h"]))
