"""Rows in this process: one call to a native engine does a whole lookup or update."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from satrap import _core
from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.table.engine import Slot, open_engine
from satrap.table.table_group import TableGroup
from satrap.worker.rows import BagRequest, Floats, Ids, Rows, UpdateRequest, id_features, id_request, native_features
from satrap.worker.worker import Worker, require_features


class LocalRows(Rows):
    """Implements `satrap.worker.rows.Rows` on one engine."""

    takes_interleaved = True

    def __init__(self, features: Features, engine: _core.Engine, tables: Sequence[Table]) -> None:
        """engine: of these tables."""
        self.num_threads = int(engine.num_threads)
        self._features, self._id_features = native_features(features, tables), id_features(features)
        self._of_ids = native_features(self._id_features, tables)
        self._numbers = {table.name: (number, table.dim) for number, table in enumerate(tables)}
        self._num_tables = len(tables)
        self.use(engine)

    def use(self, engine: _core.Engine) -> None:
        """Look up and update the rows of this engine from now on."""
        self._engine, self._bags = engine, _core.Bags(engine, self._features)
        self._id_bags = _core.Bags(engine, self._of_ids)

    @property
    def latest_step(self) -> int:
        return self._engine.latest_step

    @property
    def truncated(self) -> list[int]:
        return self._bags.truncated

    def empty(self, lines: int, floats: int) -> Floats:
        return np.asarray(self._engine.empty(lines, floats))

    def lookup(self, request: BagRequest, block: Floats, sequences: list[Floats]) -> _core.Ticket | None:
        """Let the engine assign a step if none was given, after it has checked all values."""
        bags = self._id_bags if request.of_tables else self._bags
        return self._engine.lookup_bags(bags, *request.native, block, sequences, request.first_epoch)

    def owns_ticket(self, ticket: object) -> bool:
        return isinstance(ticket, _core.Ticket) and (self._bags.made(ticket) or self._id_bags.made(ticket))

    def update(self, request: UpdateRequest) -> None:
        self._engine.update_bags(request.tickets, request.gradients, request.step, request.lrs, request.scale)

    def drop(self, ticket: _core.Ticket) -> None:
        self._engine.drop(ticket)

    def look_up(self, ids: Mapping[str, Ids], step: int, oldest_open: int) -> dict[str, Floats]:
        in_order = sorted((*self._numbers[name], name) for name in ids)
        offsets = np.zeros(self._num_tables + 1, np.int64)
        for number, _, name in in_order:
            offsets[number + 1 :] += len(ids[name])
        values = [ids[name] for *_, name in in_order]
        flat = self.empty(1, sum(len(ids[name]) * dim for _, dim, name in in_order)).reshape(-1)
        of_all = values[0] if len(values) == 1 else np.concatenate(values)
        self._engine.lookup(of_all, offsets, step, oldest_open, True, flat, False)
        rows, end = {}, 0
        for _, dim, name in in_order:
            begin, end = end, end + len(ids[name]) * dim
            rows[name] = flat[begin:end].reshape(-1, dim)
        return rows

    def id_ticket(self, ids: Mapping[str, Ids]) -> _core.Ticket:
        values, offsets, *_ = id_request(self._id_features, ids, None, None).native
        return self._engine.bag_ticket(self._id_bags, values, offsets, None, 1)


def local_worker(
    features: Features,
    *,
    seed: int = 0,
    num_threads: int | None = None,
    simd: str = "auto",
    shared: str | os.PathLike[str] | None = None,
) -> Worker:
    """Return a worker that owns the tables of its features, empty ones. The options are those of `Store`."""
    require_features(features)
    create = partial(open_engine, features.tables, seed=seed, num_threads=num_threads, simd=simd, shared=shared)
    slots = create()
    rows = LocalRows(features, slots[0].engine, features.tables)

    def renew() -> list[Slot]:  # must not refer to the worker or the tables: they would keep each other alive
        if shared is not None:
            Path(shared).unlink(missing_ok=True)
        slots = create()
        rows.use(slots[0].engine)
        return slots

    return Worker(features, rows, TableGroup.in_engine(slots, renew))
