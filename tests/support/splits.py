"""A split and servers for it, for the tests of splits.

Each server is an engine with the same tables; a network would carry what is passed between them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.features import Features
from satrap.config.optimizers import SGD, Adagrad, Adam
from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.table.engine import native_config
from satrap.table.table_group import TableGroup
from satrap.worker.rows import native_features

F32 = NDArray[np.float32]
Given = tuple[F32 | None, list[F32 | None]]  # gradients of a block and of its sequences
SEED = 5


def make_split(features: Features, *, num_threads: int = 1, simd: str = "auto") -> _core.Split:
    tables = [native_config(table) for table in features.tables]
    return _core.Split(tables, native_features(features, features.tables), num_threads, simd)


def given_gradients(features: Features, block: F32 | None, sequences: dict[str, F32]) -> Given:
    return block, [sequences.get(name) for name, each in features.items() if each.pooling == "none"]


class Cluster:
    """A split, and servers that own the rows."""

    def __init__(self, features: Features, owners: NDArray[np.uint32], num_servers: int, **options: Any) -> None:
        self.features, self.owners, self.num_servers = features, owners, num_servers
        self.split = make_split(features, **options)
        self.servers = [TableGroup(features.tables, seed=SEED, num_threads=1) for _ in range(num_servers)]
        self.skipped = np.zeros(len(features.tables), np.int64)
        self._theirs: dict[int, list[Any]] = {}  # the servers' tickets of a split's ticket

    def lookup(self, inputs: Inputs, step: int, *, shift: int = 0) -> tuple[_core.SplitTicket, F32, list[F32]]:
        """Return (ticket, block, sequences). shift: by how many floats rows miss their alignment."""
        size = inputs.batch_size
        ticket = self.split.lookup(inputs.values, inputs.offsets, inputs.weights, size, self.owners, self.num_servers)
        self._check_layout(ticket)
        rows, theirs = [], []
        for s, server in enumerate(self.servers):
            found, own = server.lookup_for_update(ticket.ids(s), ticket.offsets(s), step=step)
            room = np.full(len(found) + shift, np.nan, np.float32)
            room[shift:] = found
            rows.append(room[shift:])
            theirs.append(own)
        self._theirs[id(ticket)] = theirs
        block = self.split.empty(size, self.features.total_dim)
        sequences = [
            self.split.empty(size, (each.max_length or 0) * each.table.dim)
            for each in self.features.values()
            if each.pooling == "none"
        ]
        for room in (block, *sequences):
            room[:] = np.nan
        self.split.fill(ticket, rows, block, sequences)
        return ticket, block, sequences

    def update(self, tickets: list[_core.SplitTicket], gradients: list[Given], scale: float, step: int) -> _core.Sums:
        sums = self.split.sums(tickets, gradients, scale, self.owners, self.num_servers)
        theirs = [self._theirs.pop(id(ticket)) for ticket in tickets]
        self._check_layout(sums)
        for ticket in tickets:
            self._check_layout(ticket)  # unchanged since it was sent
        for s, server in enumerate(self.servers):
            if sums.same_ids:
                assert np.array_equal(sums.ids(s), tickets[0].ids(s))
            own = theirs[0][s] if sums.same_ids else server.prepare(sums.ids(s), sums.offsets(s))
            server.update(own, sums.gradients(s), step=step)
        self.skipped += sums.skipped
        return sums

    def _check_layout(self, shares: _core.SplitTicket | _core.Sums) -> None:
        """Assert that each id is at its bucket's owner, once, sorted by table and there by bucket."""
        assert shares.num_servers == self.num_servers
        begin = np.cumsum([0, *(table.resolved_num_buckets for table in self.features.tables)])
        seen: set[tuple[int, int]] = set()
        for s in range(self.num_servers):
            ids, offsets = shares.ids(s), shares.offsets(s)
            assert len(offsets) == len(self.features.tables) + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
            floats = 0
            for t, table in enumerate(self.features.tables):
                here = ids[offsets[t] : offsets[t + 1]]
                buckets = _core.bucket_of(np.ascontiguousarray(here), table.resolved_num_buckets)
                assert (self.owners[begin[t] + buckets.astype(np.int64)] == s).all()
                assert (np.diff(buckets.astype(np.int64)) >= 0).all()
                floats += len(here) * table.dim
                assert not seen & {(t, each) for each in here.tolist()}
                seen |= {(t, each) for each in here.tolist()}
            assert shares.num_floats(s) == floats


def draw_owners(rng: np.random.Generator, features: Features, num_servers: int) -> NDArray[np.uint32]:
    return rng.integers(num_servers, size=sum(t.resolved_num_buckets for t in features.tables)).astype(np.uint32)


BIG = [Table("x", dim=16, optimizer=Adagrad(lr=0.1)), Table("y", dim=5, optimizer=Adam(), num_buckets=8)]
BIG_FEATURES = Features(
    {"x": BIG[0], "mean": BIG[0].bag("mean", weighted=True), "path": BIG[0].sequence(3), "y": BIG[1].bag("sqrtn")}
)


def big_inputs(rng: np.random.Generator, batch_size: int = 3000) -> Inputs:
    most = ((1, 2), (0, 5), (0, 6), (0, 3))
    lengths = np.concatenate([rng.integers(*each, size=batch_size) for each in most])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = (rng.zipf(1.3, size=offsets[-1]) % 20_000).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return Inputs(
        names=BIG_FEATURES.names,
        values=values,
        offsets=offsets,
        weights=rng.normal(size=len(values)).astype(np.float32),
        batch_size=batch_size,
    )


# A small split, all of whose calls are valid.
ITEM = Table("item", dim=2, num_buckets=2, optimizer=SGD(lr=1.0))
USER = Table("user", dim=3, num_buckets=4, optimizer=SGD(lr=1.0))
FEATURES = Features({"item": ITEM, "seen": ITEM.bag("mean", weighted=True), "path": ITEM.sequence(2), "user": USER})
GOOD: dict[str, Any] = {
    "values": np.arange(1, 10, dtype=np.uint64),
    "offsets": np.array([0, 1, 2, 4, 4, 7, 7, 8, 9]),
    "weights": np.ones(9, np.float32),
    "batch_size": 2,
    "owners": np.array([0, 1, 1, 0, 2, 1], np.uint32),
    "num_servers": 3,
}
BLOCK = np.ones((2, 7), np.float32)
PATH = np.ones((2, 2, 2), np.float32)
WHERE = {key: GOOD[key] for key in ("owners", "num_servers")}


def rows_for(ticket: _core.SplitTicket) -> list[F32]:
    return [np.ones(ticket.num_floats(s), np.float32) for s in range(ticket.num_servers)]


def floats_for(block: F32 = BLOCK, path: F32 = PATH) -> tuple[F32, list[F32]]:
    return np.zeros_like(block), [np.zeros_like(path)]
