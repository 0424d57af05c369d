"""Initial values: a pure function of (seed, table name, id), with the configured distribution.

Nothing else may matter: the order of lookups, the batch, the number of threads, the SIMD path, capacity, buckets, and
whether the row is read before it exists or after. Statistical bounds are six standard errors wide.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from satrap import _core
from satrap.config.tables import Constant, Initial, Normal, ScaledUniform, Table, Uniform, Zeros
from satrap.table.store import Store

RANDOM: list[Initial] = [Uniform(low=-0.5, high=2.0), Normal(mean=0.25, std=0.5), ScaledUniform()]


def kind(initial: Any) -> str:
    return type(initial).__name__


def values(ids: Any, *, initial: Initial, dim: int = 8, name: str = "item", seed: int = 0, **options: Any) -> Any:
    """Returns the values of new rows of these ids."""
    table_options = {key: options.pop(key) for key in ("capacity", "num_buckets", "dtype") if key in options}
    store = Store(Table(name, dim=dim, initial=initial, **table_options), seed=seed, **{"num_threads": 1, **options})
    return store.lookup(np.asarray(ids, np.uint64))


@pytest.mark.parametrize("initial", RANDOM, ids=kind)
def test_pure_function_of_seed_name_and_id(initial: Initial, rng: np.random.Generator) -> None:
    ids = rng.integers(2**64, size=2000, dtype=np.uint64)
    ids[:4] = [0, 1, 2**63, 2**64 - 1]
    wanted = values(ids, initial=initial)
    order = rng.permutation(len(ids))
    np.testing.assert_array_equal(values(ids[order], initial=initial), wanted[order], "the order matters")
    for num_threads in (2, 5):
        np.testing.assert_array_equal(values(ids, initial=initial, num_threads=num_threads), wanted)
    for simd in _core.simd_paths():
        np.testing.assert_array_equal(values(ids, initial=initial, simd=simd), wanted, simd)
    for buckets in (1, 8, 1024):
        np.testing.assert_array_equal(values(ids, initial=initial, num_buckets=buckets), wanted)
    np.testing.assert_array_equal(values(ids, initial=initial, capacity=100_000), wanted)
    one_by_one = Store(Table("item", dim=8, initial=initial), seed=0, num_threads=1)
    for i in order[:200]:
        np.testing.assert_array_equal(one_by_one.lookup(ids[i : i + 1])[0], wanted[i])
    reader = Store(Table("item", dim=8, initial=initial), seed=0, num_threads=1)
    np.testing.assert_array_equal(reader.lookup(ids, train=False), wanted, "before it exists")
    assert len(reader) == 0


@pytest.mark.parametrize("initial", RANDOM, ids=kind)
def test_names_seeds_ids_and_elements_differ(initial: Initial) -> None:
    ids = np.arange(100, dtype=np.uint64)
    base = values(ids, initial=initial)
    for other in (
        values(ids, initial=initial, name="user"),
        values(ids, initial=initial, name="iten"),
        values(ids, initial=initial, seed=1),
        values(ids, initial=initial, seed=2**63),
        values(ids + np.uint64(2**32), initial=initial),
        values(ids + np.uint64(100), initial=initial),
    ):
        assert np.mean(base == other) < 0.01
    assert len(np.unique(base)) > 0.99 * base.size


@pytest.mark.parametrize("initial", RANDOM, ids=kind)
def test_rows_of_two_widths(initial: Initial) -> None:
    """Every width fills every element, tails of a vector included."""
    for dim in (1, 3, 15, 16, 17, 33, 130):
        rows = values(np.arange(500, dtype=np.uint64), initial=initial, dim=dim)
        assert np.all(np.std(rows, axis=0) > 0)
        assert np.all(np.isfinite(rows))


def test_uniform_fills_its_range_evenly() -> None:
    rows = values(np.arange(100_000, dtype=np.uint64), initial=Uniform(low=-0.5, high=2.0), dim=4)
    assert -0.5 <= rows.min() < -0.4999
    assert 1.9999 < rows.max() <= 2.0
    counts, _ = np.histogram(rows, bins=50, range=(-0.5, 2.0))
    expected = rows.size / 50
    chi2 = float(np.sum((counts - expected) ** 2) / expected)
    assert chi2 < 49 + 6 * math.sqrt(2 * 49)
    assert abs(rows.mean(dtype=np.float64) - 0.75) < 6 * 2.5 / math.sqrt(12 * rows.size)


def test_scaled_uniform_is_one_over_the_root_of_dim() -> None:
    for dim in (1, 4, 25, 64):
        bound = 1 / math.sqrt(dim)
        rows = values(np.arange(100_000 // dim, dtype=np.uint64), initial=ScaledUniform(), dim=dim)
        assert 0.999 * bound < np.abs(rows).max() <= np.float32(bound)
        assert abs(rows.mean(dtype=np.float64)) < 6 * bound / math.sqrt(3 * rows.size)


def test_normal_has_its_moments_and_tails() -> None:
    rows = values(np.arange(125_000, dtype=np.uint64), initial=Normal(mean=0.25, std=0.5)).astype(np.float64)
    z = (rows - 0.25) / 0.5
    n = z.size
    assert abs(z.mean()) < 6 / math.sqrt(n)
    assert abs(z.var() - 1) < 6 * math.sqrt(2 / n)
    assert abs((z**3).mean()) < 6 * math.sqrt(15 / n)
    assert abs((z**4).mean() - 3) < 6 * math.sqrt(96 / n)
    for cut in (1.0, 2.0, 3.0, 4.0):
        p = math.erfc(cut / math.sqrt(2))
        assert abs((np.abs(z) > cut).mean() - p) < 6 * math.sqrt(p / n), f"beyond {cut} sigma"
    assert 4.4 < np.abs(z).max() < 8, "one in a million is beyond 4.9 sigma"


@pytest.mark.parametrize("initial", RANDOM, ids=kind)
def test_neighbouring_ids_and_elements_are_uncorrelated(initial: Initial) -> None:
    rows = values(np.arange(40_000, dtype=np.uint64), initial=initial, dim=16).astype(np.float64)
    rows = (rows - rows.mean()) / rows.std()
    for a, b in ((rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1]), (rows[:, 8:], rows[:, :8])):
        assert abs((a * b).mean()) < 6 / math.sqrt(a.size)


def test_zeros_and_constant() -> None:
    ids = np.arange(50, dtype=np.uint64)
    assert np.all(values(ids, initial=Zeros(), dim=5) == 0.0)
    assert np.all(values(ids, initial=Constant(1.5), dim=5) == 1.5)
    assert np.all(values(ids, initial=Constant(-0.1), dim=5) == np.float32(-0.1))


@pytest.mark.parametrize("initial", [*RANDOM, Constant(0.1)], ids=kind)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_is_the_float32_value_rounded_to_nearest(initial: Initial, dtype: str) -> None:
    ids = np.arange(2000, dtype=np.uint64)
    exact = values(ids, initial=initial)
    rounded = values(ids, initial=initial, dtype=dtype)
    if dtype == "float16":
        wanted = exact.astype(np.float16).astype(np.float32)
    else:
        bits = exact.view(np.uint32)
        wanted = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    np.testing.assert_array_equal(rounded, wanted)
