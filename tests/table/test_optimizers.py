"""Every optimizer against its reference (one_row.py), over many steps and random hyperparameters.

Rows are stepped in batches with duplicates; each row is compared after each step and the reference starts again from
the store's row, so the bound is 2 ulp a step (plain SGD: bit for bit), not 2 ulp in the end. Each parameter is shown
to have an effect, row-wise Adagrad and FTRL are also written out by hand on one small row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_row import F32, OPTIMIZERS, assert_step, fma, state_dim
from satrap import _core
from satrap.config.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, RowWiseAdagrad
from satrap.config.tables import Constant, Normal, Table
from satrap.table.store import Store

OpenStore = Callable[..., Store]


def names(kind: Any) -> str:
    changed = {
        name: getattr(kind, name) for name in kind.__slots__ if getattr(kind, name) != getattr(type(kind)(), name)
    }
    return type(kind).__name__ + "".join(f",{name}={value}" for name, value in changed.items())


def follow(
    store: Store, rng: np.random.Generator, *, num_steps: int, num_ids: int = 8, lr: float | None = None
) -> None:
    """Trains with random gradients of many sizes; checks each row after each step."""
    table, ids = store.table, np.arange(num_ids, dtype=np.uint64)
    store.lookup(ids)
    assert store.state_dim == state_dim(table.optimizer, table.dim)
    for _ in range(num_steps):
        before = store.read(ids)
        some = rng.integers(num_ids, size=num_ids).astype(np.uint64)
        shape = (len(some), table.dim)
        gradients = (rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 1, size=(len(some), 1))).astype(np.float32)
        gradients[rng.random(shape) < 0.05] = 0.0
        store.lookup(some)
        store.update(some, gradients, lr=lr)
        after = store.read(ids)
        for id_ in range(num_ids):
            old, new = (before.values[id_], before.state[id_]), (after.values[id_], after.state[id_])
            mine = gradients[some == id_]
            if len(mine) == 0:
                np.testing.assert_array_equal(
                    np.concatenate(old), np.concatenate(new), "a row without a gradient moved"
                )
                continue
            total = mine[0]
            for gradient in mine[1:]:
                total = total + gradient
            assert_step(table.optimizer, table.optimizer.lr if lr is None else lr, old, total, new, table.dtype)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=names)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_follows_the_reference(optimizer: Any, dtype: Any, open_store: OpenStore, rng: np.random.Generator) -> None:
    dim = int(rng.integers(1, 40))
    follow(
        open_store(Table("t", dim=dim, optimizer=optimizer, initial=Normal(std=0.5), dtype=dtype)), rng, num_steps=40
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=names)
def test_every_simd_path_and_tail(optimizer: Any, open_store: OpenStore, rng: np.random.Generator) -> None:
    """Dims around the vector widths, so that no tail is forgotten."""
    for simd in _core.simd_paths():
        for dim in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100):
            follow(open_store(Table("t", dim=dim, optimizer=optimizer), simd=simd), rng, num_steps=3, num_ids=4)


small = st.floats(1e-6, 0.5)
decay = st.one_of(st.just(0.0), small)
beta = st.one_of(st.just(0.0), st.floats(0.01, 0.9999))
epsilon = st.floats(1e-10, 1e-2)
lr = st.floats(1e-4, 2.0)
ANY: st.SearchStrategy[Any] = st.one_of(
    st.builds(SGD, lr=lr),
    st.builds(SGD, lr=lr, momentum=st.floats(0.01, 0.999), nesterov=st.booleans(), weight_decay=decay),
    st.builds(Adagrad, lr=lr, weight_decay=decay, initial_accumulator_value=decay, eps=epsilon),
    st.builds(RowWiseAdagrad, lr=lr, weight_decay=decay, initial_accumulator_value=decay, eps=epsilon),
    st.builds(Adam, lr=lr, betas=st.tuples(beta, beta), eps=epsilon, weight_decay=decay),
    st.builds(AdamW, lr=lr, betas=st.tuples(beta, beta), eps=epsilon, weight_decay=decay),
    st.builds(Ftrl, lr=lr, beta=st.floats(0.01, 2.0), l1=decay, l2=decay),
)


@settings(max_examples=settings().max_examples // 2)
@given(ANY, st.integers(1, 20), st.integers(0, 2**32 - 1), st.one_of(st.none(), st.just(0.0), lr))
def test_random_hyperparameters(optimizer: Any, dim: int, draw: int, other_lr: float | None) -> None:
    store = Store(Table("t", dim=dim, optimizer=optimizer, initial=Normal(std=0.3)), num_threads=1)
    lr_is_zero = other_lr == 0.0 and isinstance(optimizer, Ftrl)  # by which it divides
    follow(store, np.random.default_rng(draw), num_steps=6, num_ids=4, lr=None if lr_is_zero else other_lr)
    store.check()


def trained(optimizer: Any, *, initial: float = 0.5) -> F32:
    """Returns one row after three steps."""
    store = Store(Table("t", dim=4, optimizer=optimizer, initial=Constant(initial)), num_threads=1)
    ids = np.array([7], np.uint64)
    store.lookup(ids)
    for gradient in ([1.0, -0.5, 0.25, 0.01], [0.5, 0.5, -0.5, 0.02], [0.1, 0.2, 0.3, -0.01]):
        store.update(ids, np.array([gradient], np.float32))
    values: F32 = store.read(ids).values[0]
    return values


EFFECTS: list[tuple[Any, str, Any]] = [
    *((kind(), "lr", 0.5) for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, Ftrl)),
    *((kind(), "weight_decay", 0.3) for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW)),
    (SGD(), "momentum", 0.5),
    (SGD(momentum=0.5), "nesterov", True),
    *((kind(), "initial_accumulator_value", 0.5) for kind in (Adagrad, RowWiseAdagrad)),
    *((kind(), "eps", 0.1) for kind in (Adagrad, RowWiseAdagrad, Adam, AdamW)),
    *((kind(), "betas", betas) for kind in (Adam, AdamW) for betas in ((0.5, 0.999), (0.9, 0.5))),
    *((Ftrl(), name, 0.3) for name in ("beta", "l1", "l2")),
]


@pytest.mark.parametrize(("optimizer", "name", "value"), EFFECTS)
def test_every_parameter_has_an_effect(optimizer: Any, name: str, value: Any) -> None:
    assert not np.array_equal(trained(optimizer), trained(replace(optimizer, **{name: value})))


def test_the_table_of_effects_is_complete() -> None:
    listed = {(type(optimizer).__name__, name) for optimizer, name, _ in EFFECTS}
    assert listed == {(type(kind).__name__, name) for kind in OPTIMIZERS for name in kind.__slots__}


def test_the_fma_of_the_reference() -> None:
    """The reference itself, against exact integers: rounding once differs from rounding twice."""
    a, c = np.float32(1 + 2**-12), np.float32(-1)
    exact = fma(np.array([a]), np.array([a]), np.array([c]))[0]
    assert exact == np.float32(2**-11 + 2**-24) != np.float32(a * a) + c


def test_rowwise_adagrad_as_fbgemm_defines_it(open_store: OpenStore) -> None:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD: one accumulator per row, the mean over it of the squared gradient; eps is added
    to the root, not under it; L2 weight decay goes into the gradient first. Written out for a row of two."""
    optimizer = RowWiseAdagrad(lr=0.5, weight_decay=0.1, initial_accumulator_value=1.0, eps=0.25)
    store = open_store(Table("t", dim=2, optimizer=optimizer, initial=Constant(1.0)))
    ids = np.array([3], np.uint64)
    store.lookup(ids)
    store.update(ids, np.array([[2.9, -4.1]], np.float32))  # with decay: [3, -4]
    accumulator = 1.0 + (9 + 16) / 2
    step = 0.5 / (math.sqrt(accumulator) + 0.25)
    read = store.read(ids)
    np.testing.assert_allclose(read.state[0], [accumulator], rtol=3e-7)
    np.testing.assert_allclose(read.values[0], [1 - 3 * step, 1 + 4 * step], rtol=3e-7)
    assert store.state_dim == 1


def test_ftrl_as_its_paper_defines_it(open_store: OpenStore) -> None:
    """McMahan et al. 2013, algorithm 1, written out for one element from the initial value 0."""
    alpha, beta_, l1, l2 = 0.3, 1.0, 0.4, 0.2
    store = open_store(Table("t", dim=1, optimizer=Ftrl(lr=alpha, beta=beta_, l1=l1, l2=l2), initial=Constant(0.0)))
    ids = np.array([3], np.uint64)
    store.lookup(ids)
    w = z = n = 0.0
    for g in (0.3, -1.5, 2.0, -0.7, -0.05, 1.0):
        store.update(ids, np.array([[g]], np.float32))
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / alpha
        z += g - sigma * w
        n += g * g
        w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((beta_ + math.sqrt(n)) / alpha + l2)
        read = store.read(ids)
        np.testing.assert_allclose(read.values[0], [w], rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(read.state[0], [z, n], rtol=2e-5, atol=1e-6)


def test_ftrl_l1_makes_exact_zeros(open_store: OpenStore, rng: np.random.Generator) -> None:
    store = open_store(Table("t", dim=16, optimizer=Ftrl(lr=0.1, l1=5.0), initial=Constant(0.0)))
    ids = np.arange(20, dtype=np.uint64)
    store.lookup(ids)
    for _ in range(5):
        store.update(ids, rng.normal(size=(20, 16)).astype(np.float32))
    values = store.read(ids).values
    assert np.mean(values == 0.0) > 0.5
