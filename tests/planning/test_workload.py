"""The expected number of different ids, against the sum over all ids and against draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satrap.planning.workload import expected_unique


@given(st.integers(1, 20_000), st.integers(1, 50_000), st.floats(0.0, 2.5))
@settings(max_examples=settings().max_examples // 3)
def test_it_is_the_sum_over_all_ids(draws: int, rows: int, exponent: float) -> None:
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    shares = weights / weights.sum()
    with np.errstate(divide="ignore"):
        exact = -np.expm1(draws * np.log1p(-shares)).sum()
    assert expected_unique(draws, rows, exponent) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 1.6])
def test_it_is_what_draws_have(exponent: float, seed: int) -> None:
    rows, draws = 100_000, 30_000
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    drawn = np.random.default_rng(seed).choice(rows, draws, p=weights / weights.sum())
    found = expected_unique(draws, rows, exponent)
    assert abs(len(np.unique(drawn)) - found) < 6 * np.sqrt(found)  # six deviations, or more


@given(st.floats(1, 1e7), st.integers(1, 10**12), st.floats(0.0, 3.0))
def test_it_is_bounded_and_grows(draws: float, rows: int, exponent: float) -> None:
    found = expected_unique(draws, rows, exponent)
    assert 0 < found <= min(draws, rows)
    assert expected_unique(2 * draws, rows, exponent) >= found
    assert expected_unique(draws, rows, exponent + 0.5) <= found * (1 + 1e-3)


def test_a_table_without_ids_has_none() -> None:
    assert expected_unique(0.0, 1000, 1.05) == 0.0
