"""16-bit values are rounded stochastically after an update: without bias, and by a hash, not by a generator's state.

The draw hashes (seed, table, id, step, element), so a repeated run repeats every bit, whatever the batch, the threads
or the SIMD path. Statistical bounds are six standard errors wide.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from one_row import F32, assert_neighbour
from satrap import _core
from satrap.config.optimizers import SGD
from satrap.config.tables import Constant, Table
from satrap.table.store import Store

DTYPES = ["float16", "bfloat16"]
ULP_AT_1 = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def updated(
    delta: float,
    dtype: Any,
    *,
    num: int = 2000,
    dim: int = 16,
    seed: int = 0,
    name: str = "t",
    steps: tuple[int, ...] = (1,),
    order: Any = None,
    start: float = 1.0,
    **options: Any,
) -> F32:
    """Rows of `start` after adding `delta` at each step."""
    table = Table(name, dim=dim, optimizer=SGD(lr=1.0), initial=Constant(start), dtype=dtype)
    store = Store(table, seed=seed, **{"num_threads": 1, **options})
    ids = np.arange(num, dtype=np.uint64)
    store.lookup(ids, step=1)
    sent = ids if order is None else ids[order]
    for step in steps:
        store.update(sent, np.full((num, dim), -delta, np.float32), step=step)
    store.check()
    values: F32 = store.read(ids).values
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [0.0625, 0.25, 0.5, 0.9])
def test_unbiased(dtype: str, part: float) -> None:
    """A `part` of an ulp rounds up in that part of the cases."""
    ulp = ULP_AT_1[dtype]
    values = updated(part * ulp, dtype, num=10_000)
    up = values == np.float32(1 + ulp)
    assert np.all(up | (values == 1))
    assert abs(up.mean() - part) < 6 * math.sqrt(part * (1 - part) / values.size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [-1.0, 3.0, 1e-3, 1e-7, -6e-8])
def test_unbiased_elsewhere(dtype: str, start: float) -> None:
    """Negative, large and subnormal values too: the mean of the rounded values is the exact value."""
    origin = updated(0.0, dtype, num=1, dim=1, start=start)[0, 0]
    delta = np.float32(abs(float(origin)) * ULP_AT_1[dtype] / 3)
    exact = np.float32(float(origin) + float(delta))
    values = updated(float(delta), dtype, num=10_000, start=start)
    assert_neighbour(values.reshape(-1), np.full(values.size, exact), 0.0, dtype)
    spread = max(float(np.ptp(values)), 1e-30)
    assert abs(values.mean(dtype=np.float64) - float(exact)) < 6 * spread / 2 / math.sqrt(values.size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_steps_add_up(dtype: str) -> None:
    """200 steps of 1/32 ulp: rounding to nearest would never move."""
    ulp, num_steps = ULP_AT_1[dtype], 200
    values = updated(ulp / 32, dtype, num=1000, steps=tuple(range(1, num_steps + 1)))
    moved = (values.mean(dtype=np.float64) - 1) / ulp
    assert abs(moved - num_steps / 32) < 6 * math.sqrt(num_steps / 32) / math.sqrt(values.size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_representable_values_stay(dtype: str) -> None:
    for delta in (0.0, ULP_AT_1[dtype], 1.0, -0.5):
        assert np.all(updated(delta, dtype) == 1 + delta)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_draw_is_a_function_of_seed_table_id_step_and_element(dtype: str, rng: np.random.Generator) -> None:
    delta = ULP_AT_1[dtype] / 2
    base = updated(delta, dtype)
    np.testing.assert_array_equal(base, updated(delta, dtype))
    np.testing.assert_array_equal(base, updated(delta, dtype, order=rng.permutation(2000)), "the order matters")
    np.testing.assert_array_equal(base[:50], updated(delta, dtype, num=50), "the batch matters")
    np.testing.assert_array_equal(base, updated(delta, dtype, num_threads=3), "the threads matter")
    for simd in _core.simd_paths():
        np.testing.assert_array_equal(base, updated(delta, dtype, simd=simd), simd)
    for other in (
        updated(delta, dtype, seed=1),
        updated(delta, dtype, name="u"),
        updated(delta, dtype, steps=(2,)),
        np.roll(base, 1, axis=0),
        np.roll(base, 1, axis=1),
    ):
        assert 0.45 < np.mean(base == other) < 0.55, "half of the draws agree by chance"


def test_float16_saturates() -> None:
    """Beyond its range float16 stays at its largest value; it never becomes infinite."""
    assert np.all(updated(1e6, "float16") == 65504)
    assert np.all(updated(-1e6, "float16") == -65504)
    assert np.all(updated(65504.0, "float16", start=0.0) == 65504)
    assert np.all(updated(65519.0, "float16", start=0.0) == 65504)


def test_bfloat16_never_rounds_to_infinity() -> None:
    largest = float(np.uint32(0x7F7F0000).view(np.float32))
    top = np.nextafter(np.float32(np.inf), np.float32(0))
    values = updated(float(top), "bfloat16", start=0.0)
    assert np.all(np.isfinite(values))
    assert np.all(values == np.float32(largest))
