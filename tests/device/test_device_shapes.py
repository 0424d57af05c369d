"""Batches and tables of unusual shapes, and states of torch in which a loop may call: rows on a device have the bits of
rows in the core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import UNIVERSE, draw_bags
from cluster import step_both
from device_workers import assert_equal, pair
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from satrap.config.tables import Constant, Table
from satrap.data.inputs import Inputs
from satrap.device.device_worker import device_worker
from satrap.device.torch_device import require_possible
from satrap.errors import ConfigError, InputError


def many_tables() -> Features:
    """Forty tables in three memories, which alternate, so that no two neighbours share one."""
    layouts: list[dict[str, Any]] = [
        {"dim": 4, "optimizer": Adagrad(0.1)},
        {"dim": 4, "optimizer": RowWiseAdagrad(0.1)},
        {"dim": 4, "optimizer": Adagrad(0.1), "dtype": "bfloat16"},
    ]
    return Features({f"f{i}": Table(f"t{i}", **layouts[i % 3], num_buckets=1 << i % 3) for i in range(40)})


def one_layout() -> Features:
    """Tables whose rows one kernel updates, with features that share them."""
    tables = [Table(f"t{i}", dim=3, optimizer=Adam(0.1), capacity=40) for i in range(5)]
    features: dict[str, Any] = {f"one{i}": table for i, table in enumerate(tables)}
    features |= {f"bag{i}": table.bag("mean", weighted=True) for i, table in enumerate(tables)}
    return Features(features | {"path": tables[2].sequence(2), "again": tables[2].sequence(4, keep="first")})


def sequences_only() -> Features:
    """A block without columns."""
    return Features({"path": Table("t", dim=5, optimizer=Adagrad(0.1)).sequence(3)})


def of_dim(dim: int, dtype: Any = "float32") -> Features:
    table = Table("t", dim=dim, optimizer=RowWiseAdagrad(0.1), dtype=dtype)
    return Features({"one": table, "bag": table.bag("sqrtn"), "path": table.sequence(2)})


FEATURES = {
    "many tables": many_tables(),
    "one layout": one_layout(),
    "sequences only": sequences_only(),
    "dim 1": of_dim(1),
    "dim 1, 16 bits": of_dim(1, "float16"),
    "dim 4096": of_dim(4096),
    "dim 4095, 16 bits": of_dim(4095, "bfloat16"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_tables_and_features(name: str, rng: np.random.Generator) -> None:
    workers = pair(FEATURES[name])
    for step, batch_size in enumerate((3, 0, 1, 4, 3), 1):
        step_both(workers, rng, [draw_bags(rng, workers[0].features, batch_size) for _ in range(1 + step % 2)], step)
    assert_equal(workers)


def test_tables_without_an_id(rng: np.random.Generator) -> None:
    """In a batch of empty bags, of one table's ids only, and of ids that all have no row."""
    item, user = (Table(name, dim=3, optimizer=SGD(0.5)) for name in ("item", "user"))
    workers = pair(Features({"item": item.bag("mean"), "user": user.bag("sum"), "path": user.sequence(2)}))
    for step, ids in enumerate(([], [], [1, 1, 2], [3], []), 1):
        offsets = np.zeros(4, np.int64)
        offsets[1 + step % 3 :] = len(ids)
        inputs = Inputs(names=("item", "user", "path"), values=np.array(ids, np.uint64), offsets=offsets, batch_size=1)
        np.testing.assert_array_equal(*(worker.lookup(inputs, train=False).block for worker in workers))
        gradients = rng.normal(size=(1, 6)).astype(np.float32), rng.normal(size=(1, 2, 3)).astype(np.float32)
        for worker in workers:
            looked = worker.lookup(inputs, step=step)
            worker.update([looked.ticket], [gradients[0]], [{"path": gradients[1]}], step=step)
        assert_equal(workers)


def test_an_update_without_any_gradient() -> None:
    """It uses the tickets, and changes nothing."""
    workers = pair(sequences_only())
    inputs = Inputs(names=("path",), values=UNIVERSE[:3], offsets=np.array([0, 3]), batch_size=1)
    for worker in workers:
        looked = worker.lookup(inputs, step=1)
        worker.update([looked.ticket], [None], step=1)
        assert looked.ticket.used
    assert_equal(workers)


def test_a_block_of_the_caller(rng: np.random.Generator) -> None:
    worker: Any = device_worker(of_dim(3), "cpu", num_threads=1)
    inputs = draw_bags(rng, worker.features, 4).inputs()
    expected = worker.lookup(inputs, step=1).block
    block = torch.full((4, 6), 7.0)
    assert worker.lookup(inputs, step=2, block=block).block is block
    assert torch.equal(block, expected)
    with pytest.raises(InputError, match=r"block has the strides \(1, 4\); expected a contiguous tensor"):
        worker.lookup(inputs, step=3, block=torch.empty(6, 4).T)
    assert worker.tables.latest_step == 2


@pytest.mark.parametrize("strides", ["transposed", "expanded", "every second"])
def test_gradients_of_any_strides(strides: str, rng: np.random.Generator) -> None:
    numbers = torch.from_numpy(rng.normal(size=(6, 8)).astype(np.float32))
    gradient = {
        "transposed": numbers[:, :4].T,
        "expanded": numbers[0, :6].expand(4, 6),
        "every second": torch.cat([numbers, numbers])[::3, 1:7],
    }[strides]
    worker, other = (device_worker(of_dim(3), "cpu", num_threads=1) for _ in range(2))
    inputs = draw_bags(rng, worker.features, 4).inputs()
    for each, given in ((worker, gradient), (other, gradient.contiguous())):
        looked = each.lookup(inputs, step=1)
        assert looked.ticket is not None
        each.update([looked.ticket], [given], step=1)
    assert_equal([worker, other])


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, Any] = {
    "float64": float64,
    "a default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("state", STATES)
def test_torch_in_another_state(state: str, rng: np.random.Generator) -> None:
    """Some steps in the state and some not: what one inserts the other updates."""
    workers = pair(one_layout())
    for step in range(1, 7):
        bags = [draw_bags(rng, workers[0].features, 5)]
        if step % 2:
            with STATES[state]():
                step_both(workers, rng, bags, step)
        else:
            step_both(workers, rng, bags, step)
    assert_equal(workers)


def test_features_and_dims_are_checked() -> None:
    features: Any = {"item": Table("item", dim=3)}
    with pytest.raises(ConfigError, match=r"features is a dict; expected a satrap\.config\.features\.Features"):
        device_worker(features, "cpu")
    wide = [Table("wide", dim=4097)]
    with pytest.raises(ConfigError, match="table 'wide' has dim 4097; expected at most 4096, for rows on cuda:0"):
        require_possible(wide, torch.device("cuda:0"))
    require_possible(wide, torch.device("cpu"))


def test_rows_that_overflow(rng: np.random.Generator) -> None:
    """Finite gradients whose steps leave infinities and NaNs in the rows: the same ones."""
    table = Table("t", dim=3, optimizer=SGD(1e30, momentum=0.9), initial=Constant(1e30))
    workers = pair(Features({"one": table}))
    inputs = Inputs(names=("one",), values=UNIVERSE[:4], batch_size=4)
    found = []
    for step in range(1, 6):
        gradient = rng.choice([-1e30, 1e30, 0.0], (4, 3)).astype(np.float32)
        for worker in workers:
            looked = worker.lookup(inputs, step=step)
            worker.update([looked.ticket], [gradient], step=step)
        found.append([worker.tables["t"].read(UNIVERSE[:4]) for worker in workers])
    for here, there in found:
        np.testing.assert_array_equal(there.values, here.values)
        np.testing.assert_array_equal(there.state, here.state)
    everything = np.concatenate([here.values for here, _ in found])
    assert np.isinf(everything).any() and np.isnan(everything).any()
