"""Satrap's store, as the store benchmark times it, and batches as its sources return them."""

from collections.abc import Callable
from typing import Any

import numpy as np

import satrap
from benchmarks.contenders import CAPACITY_SLACK, EPS, LR, RANGE
from benchmarks.workload import (
    BATCH_IDS,
    NUM_FEATURES,
    Floats,
    Ids,
    RowNumbers,
    dense_ids,
    gradients,
    hashed_ids,
    total_rows,
)
from satrap.data.inputs import Inputs
from satrap.table.store import Store

IdsOf = Callable[[RowNumbers], Ids]
SizeOf = Callable[[int], dict[str, Any]]
FEATURES = tuple(f"c{number}" for number in range(1, NUM_FEATURES + 1))


def optimizer_of(name: str) -> Any:
    """Return the configuration of an optimizer."""
    return {"adagrad": satrap.Adagrad, "rowwise": satrap.RowWiseAdagrad}[name](lr=LR, eps=EPS)


def hashed_size(rows: int) -> dict[str, Any]:
    """Return what the configuration of a hashed table says of the number of its rows."""
    return {"capacity": int(rows * CAPACITY_SLACK), "on_full": "evict"}


def one_table(rows: int, dim: int, optimizer: Any, size_of: SizeOf = hashed_size) -> dict[str, satrap.Table]:
    """Return the features, as `satrap.Embeddings` accepts them: one id each, all over one table."""
    initial, size = satrap.Uniform(low=-RANGE, high=RANGE), size_of(total_rows(rows))
    return dict.fromkeys(FEATURES, satrap.Table("ids", dim=dim, optimizer=optimizer, initial=initial, **size))


def fill(store: Any, count: int, ids_of: IdsOf = hashed_ids) -> None:
    """Look up every row of a store once."""
    for begin in range(0, count, BATCH_IDS):
        store.lookup(ids_of(np.arange(begin, min(begin + BATCH_IDS, count))))
    if len(store) != count:
        raise RuntimeError(f"expected {count} rows in the store after filling it, found {len(store)}")


def inputs_of(
    rows: RowNumbers, dense: Floats | None = None, label: Floats | None = None, ids_of: IdsOf = hashed_ids
) -> Inputs:
    """Return a batch, given its row numbers feature after feature."""
    size = rows.size // NUM_FEATURES
    return Inputs(names=FEATURES, values=ids_of(rows), batch_size=size, dense=dense, label=label)


class SatrapTable:
    """Satrap's store, with capacity for 1.05 times the rows."""

    ids_of: IdsOf = staticmethod(hashed_ids)
    size_of: SizeOf = staticmethod(hashed_size)

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int, shared: str | None = None) -> None:
        table = satrap.Table("bench", dim=dim, optimizer=optimizer_of(optimizer), **self.size_of(rows))
        self.store = Store(table, seed=1, num_threads=num_threads, shared=shared)
        self.gradients = gradients(dim)
        fill(self.store, total_rows(rows), self.ids_of)

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

    ids_of = staticmethod(dense_ids)

    @staticmethod
    def size_of(rows: int) -> dict[str, Any]:
        return {"num_rows": rows}
