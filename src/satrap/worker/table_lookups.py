"""Lookups of ids in one table at a time, and one update of all tables: for modules that look rows up inside forward.

Several lookups, of one table or of several, belong to a step. They return rows and no ticket: the update of the step
brings the ids with their gradients, so a lookup whose gradient never comes leaves nothing behind. The gradients of an
id are summed in the order in which they are given, and the table's optimizer is applied once.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from satrap.data.inputs import Inputs

if TYPE_CHECKING:
    from satrap.table.table_group import TableGroup
    from satrap.worker.rows import Floats
    from satrap.worker.sharded_rows import ShardedRows
    from satrap.worker.sharded_tables import ShardedTables
    from satrap.worker.worker import Worker

Ids = NDArray[np.uint64]
TableGradients = Mapping[str, "tuple[Ids, Floats]"]
"""For each table that has any: ids, which may repeat, and float32 [ids, dim]."""


class TableLookups(Protocol):
    """Looks up ids of single tables, and updates all tables at once."""

    def look_up(self, table: str, ids: Ids, step: int) -> "Floats":
        """Return the rows of the ids, [ids, dim], for training in this step: ids that have none are admitted and
        inserted. Rows of the step are not evicted."""

    def update(
        self, gradients: TableGradients, step: int, lrs: Mapping[str, float], scale: float
    ) -> Callable[[], None]:
        """Return a function that applies one optimizer step of each table. After an interrupt it may be called again:
        it changes nothing twice.

        scale: factor of each gradient."""


class LocalTableLookups:
    """Implements `TableLookups` on tables in this process."""

    def __init__(self, tables: "TableGroup") -> None:
        self._tables = tables

    def look_up(self, table: str, ids: Ids, step: int) -> "Floats":
        return self._tables[table].lookup(ids, step=step, oldest_open=step)

    def update(
        self, gradients: TableGradients, step: int, lrs: Mapping[str, float], scale: float
    ) -> Callable[[], None]:
        given = [gradients[name] for name in self._tables if name in gradients]
        counts = [len(gradients[name][0]) if name in gradients else 0 for name in self._tables]
        ids = np.concatenate([of_table for of_table, _ in given])
        flat = np.concatenate([of_table.reshape(-1) for _, of_table in given])
        if scale != 1.0:
            flat *= np.float32(scale)
        ticket = self._tables.prepare(ids, np.cumsum([0, *counts], dtype=np.int64))

        def apply() -> None:
            if not ticket.used:
                self._tables.update(ticket, flat, step=step, lrs=lrs)

        return apply


class ShardedTableLookups:
    """Implements `TableLookups` on servers: a lookup calls the owners of its unique ids, the update every owner once.

    The update passes through the core's split as one batch in which each id is a bag, since the core then sums the
    gradients and lays them out for their owners. Its block is as wide as all tables together and as high as the table
    with the most ids, so tables that are looked up much less often than another one cost memory."""

    def __init__(self, rows: "ShardedRows", worker: "Worker", tables: "ShardedTables") -> None:
        """worker: of one feature for each table, with its name, over these rows."""
        self._rows, self._worker, self._tables, self._step = rows, worker, tables, 0

    def look_up(self, table: str, ids: Ids, step: int) -> "Floats":
        if step != self._step:
            self._rows.pad(step, step)
            self._step = step
        unique, lines = np.unique(ids, return_inverse=True)
        rows: Floats = self._tables[table].look_up(unique, step)[lines]
        return rows

    def update(
        self, gradients: TableGradients, step: int, lrs: Mapping[str, float], scale: float
    ) -> Callable[[], None]:
        features = self._worker.features
        none = np.zeros(0, np.uint64), None
        given = {name: gradients.get(name, none) for name in features}
        batch_size = max(len(ids) for ids, _ in given.values())
        lengths = np.zeros((len(features), batch_size), np.int64)
        block = np.zeros((batch_size, features.total_dim), np.float32)
        for number, (ids, of_table) in enumerate(given.values()):
            lengths[number, : len(ids)] = 1
            if of_table is not None:
                begin = features.columns[number]
                block[: len(ids), begin : begin + features.dims[number]] = of_table
        inputs = Inputs(
            names=features.names,
            values=np.concatenate([ids for ids, _ in given.values()]),
            offsets=np.cumsum([0, *lengths.reshape(-1)], dtype=np.int64),
            batch_size=batch_size,
        )
        ticket = self._rows.reissue(self._worker.request(inputs, step, step, train=True))

        def apply() -> None:
            if not ticket.used:
                self._worker.update([ticket], [block], step=step, lrs=lrs, scale=scale)

        return apply
