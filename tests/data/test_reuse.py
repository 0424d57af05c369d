"""The reuse of ids equals what a loop over sets counts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satrap.data.inputs import Inputs
from satrap.data.reuse import LAGS, measure_reuse


@settings(max_examples=settings().max_examples // 6, deadline=None)
@given(seed=st.integers(0, 2**32), has_bags=st.booleans())
def test_reuse_equals_that_of_sets(seed: int, has_bags: bool) -> None:
    random = np.random.default_rng(seed)
    num_batches, size, names = LAGS[-1] + int(random.integers(1, 8)), 6, ("a", "b")
    drawn = [
        [[list(random.zipf(1.4, random.integers(0, 4) if has_bags else 1) % 40) for _ in range(size)] for _ in names]
        for _ in range(num_batches)
    ]
    batches = []
    for features in drawn:
        bags = [bag for feature in features for bag in feature]
        values = np.array([each for bag in bags for each in bag], np.uint64)
        offsets = np.cumsum([0, *map(len, bags)]).astype(np.int64) if has_bags else None
        batches.append(Inputs(names=names, values=values, offsets=offsets, batch_size=size))
    for number, found in enumerate(measure_reuse(batches)):
        bags = [bag for features in drawn for bag in features[number]]
        held = {each: sum(each in bag for bag in bags) for bag in bags for each in bag}
        assert found.num_ids == len(held)
        assert found.alpha == pytest.approx(max(held.values(), default=0) / len(bags))
        sets = [{each for bag in features[number] for each in bag} for features in drawn]
        hot = {each for each, count in held.items() if count >= 0.01 * len(bags)}
        for lag, at in zip(LAGS, range(len(LAGS)), strict=True):
            for share, chosen in ((found.shares, set(held)), (found.hot, hot), (found.cold, set(held) - hot)):
                repeats = [
                    each in set.union(*sets[batch - lag : batch])
                    for batch in range(LAGS[-1], num_batches)
                    for each in sets[batch] & chosen
                ]
                expected = sum(repeats) / len(repeats) if repeats else math.nan
                assert share[at] == pytest.approx(expected, nan_ok=True)
