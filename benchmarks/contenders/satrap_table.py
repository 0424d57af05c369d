"""Satrap's store, as the store benchmark times it, and batches as its sources return them."""

from collections.abc import Callable
from typing import Any

import numpy as np

import satrap
from benchmarks.contenders import CAPACITY_SLACK, EPS, LR, RANGE
from benchmarks.workload import BATCH_IDS, NUM_FEATURES, Floats, Ids, RowNumbers, gradients, hashed_ids, total_rows
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


def fill(store: Any, count: int, ids_of: Callable[[RowNumbers], Ids] = hashed_ids) -> None:
    """Look up every row of a store once."""
    for begin in range(0, count, BATCH_IDS):
        store.lookup(ids_of(np.arange(begin, min(begin + BATCH_IDS, count))))
    if len(store) != count:
        raise RuntimeError(f"expected {count} rows in the store after filling it, found {len(store)}")


def inputs_of(rows: RowNumbers, dense: Floats | None = None, label: Floats | None = None) -> Inputs:
    """Return a batch, given its row numbers feature after feature."""
    size = rows.size // NUM_FEATURES
    return Inputs(names=FEATURES, values=hashed_ids(rows), batch_size=size, dense=dense, label=label)


class SatrapTable:
    """Satrap's store, with capacity for 1.05 times the rows."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int, shared: str | None = None) -> None:
        table = satrap.Table("bench", dim=dim, optimizer=optimizer_of(optimizer), **self.size(rows))
        self.store = Store(table, seed=1, num_threads=num_threads, shared=shared)
        self.gradients = gradients(dim)
        fill(self.store, total_rows(rows), self.ids_of)

    @staticmethod
    def ids_of(rows: RowNumbers) -> Ids:
        """Return the ids of rows."""
        return hashed_ids(rows)

    def size(self, rows: int) -> dict[str, Any]:
        """Return what the table's configuration says of the number of its rows."""
        return {"capacity": int(rows * CAPACITY_SLACK), "on_full": "evict"}

    def prepare(self, rows: RowNumbers) -> list[Any]:
        return [self.ids_of(batch) for batch in rows]

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
        return np.array(self.store.lookup(self.ids_of(rows), train=False))


class SatrapDirectTable(SatrapTable):
    """Satrap's store with `num_rows`, whose ids are the numbers of the rows, as those of the peers."""

    @staticmethod
    def ids_of(rows: RowNumbers) -> Ids:
        return rows.astype(np.uint64)

    def size(self, rows: int) -> dict[str, Any]:
        return {"num_rows": rows}
