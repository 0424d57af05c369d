"""Satrap's store, as the store benchmark times it, and batches as its sources return them."""

from typing import Any

import numpy as np

import satrap
from benchmarks.contenders import CAPACITY_SLACK, EPS, LR, RANGE
from benchmarks.workload import BATCH_IDS, NUM_FEATURES, Floats, RowNumbers, gradients, hashed_ids, total_rows
from satrap.data.inputs import Inputs
from satrap.table.store import Store

FEATURES = tuple(f"c{number}" for number in range(1, NUM_FEATURES + 1))


def optimizer_of(name: str) -> Any:
    """Return the configuration of an optimizer."""
    return {"adagrad": satrap.Adagrad, "rowwise": satrap.RowWiseAdagrad}[name](lr=LR, eps=EPS)


def one_table(rows: int, dim: int, optimizer: Any) -> dict[str, satrap.Table]:
    """Return the features, as `satrap.Embeddings` accepts them: one id each, all over one table."""
    table = satrap.Table(
        "ids",
        dim=dim,
        optimizer=optimizer,
        initial=satrap.Uniform(low=-RANGE, high=RANGE),
        capacity=int(total_rows(rows) * CAPACITY_SLACK),
        on_full="evict",
    )
    return dict.fromkeys(FEATURES, table)


def fill(store: Any, count: int) -> None:
    """Look up every row of a store once."""
    for begin in range(0, count, BATCH_IDS):
        store.lookup(hashed_ids(np.arange(begin, min(begin + BATCH_IDS, count))))
    if len(store) != count:
        raise RuntimeError(f"expected {count} rows in the store after filling it, found {len(store)}")


def inputs_of(rows: RowNumbers, dense: Floats | None = None, label: Floats | None = None) -> Inputs:
    """Return a batch, given its row numbers feature after feature."""
    size = rows.size // NUM_FEATURES
    return Inputs(names=FEATURES, values=hashed_ids(rows), batch_size=size, dense=dense, label=label)


class SatrapTable:
    """Satrap's store, with capacity for 1.05 times the rows."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int, shared: str | None = None) -> None:
        capacity = int(rows * CAPACITY_SLACK)
        table = satrap.Table("bench", dim=dim, optimizer=optimizer_of(optimizer), capacity=capacity, on_full="evict")
        self.store = Store(table, seed=1, num_threads=num_threads, shared=shared)
        self.gradients = gradients(dim)
        fill(self.store, total_rows(rows))

    def prepare(self, rows: RowNumbers) -> list[Any]:
        return [hashed_ids(batch) for batch in rows]

    def train(self, ids: Any) -> None:
        _, ticket = self.store.lookup_for_update(ids)
        self.store.update(ticket, self.gradients)

    def train_plain(self, ids: Any) -> None:
        self.store.lookup(ids)
        self.store.update(ids, self.gradients)

    def lookup(self, ids: Any) -> None:
        self.store.lookup(ids)

    def lookup_eval(self, ids: Any) -> None:
        self.store.lookup(ids, train=False)

    def probe(self, rows: RowNumbers) -> Floats:
        return np.array(self.store.lookup(hashed_ids(rows), train=False))
