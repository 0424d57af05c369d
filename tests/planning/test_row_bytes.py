"""The bytes of a row, against tables that are full."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from satrap.config.optimizers import SGD, Adam, Optimizer, RowWiseAdagrad
from satrap.config.tables import Table
from satrap.planning.input_files import memory_row_bytes
from satrap.table.snapshot.writer import row_bytes
from satrap.table.store import Store


@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad(), Adam()])
@pytest.mark.parametrize("bounded", [True, False])
def test_a_full_table_takes_as_much(optimizer: Optimizer, bounded: bool) -> None:
    rows = 300_000
    table = Table("t", dim=8, optimizer=optimizer, capacity=rows if bounded else None, num_buckets=64)
    store = Store(table, seed=0)
    for part in np.array_split(np.arange((1 + bounded) * rows, dtype=np.uint64), 8):
        store.lookup(part)
    exact = store.stats()["bytes"] / store.stats()["rows"]
    assert memory_row_bytes(table, rows) == pytest.approx(exact, rel=0.06)


def test_a_saved_row_is_what_a_checkpoint_has(tmp_path: Path) -> None:
    table = Table("t", dim=32)
    store = Store(table, seed=0)
    store.lookup(np.arange(50_000, dtype=np.uint64))
    store.save(tmp_path / "saved")
    size = sum(each.stat().st_size for each in (tmp_path / "saved").rglob("*") if each.is_file())
    assert math.isclose(size, 50_000 * row_bytes(table), rel_tol=0.1)


def test_a_table_that_may_grow_beyond_its_capacity_is_measured_as_one_without() -> None:
    one, grows = (Table("t", dim=8, **more) for more in ({}, {"capacity": 10**7, "on_full": "grow"}))  # type: ignore[arg-type]
    assert memory_row_bytes(grows, 10**7) == memory_row_bytes(one, 10**7)


@pytest.mark.parametrize("capacity", [None, 1, 100, 1000])
def test_small_tables_have_a_size(capacity: int | None) -> None:
    """Also if each of their buckets has room for one row only."""
    for rows in (0, 1, capacity or 100):
        assert memory_row_bytes(Table("t", dim=8, capacity=capacity), rows) >= 8 * 4
