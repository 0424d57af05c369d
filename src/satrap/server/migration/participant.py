"""A server's part in a migration: its outgoing and incoming buckets. `satrap.server.migration.coordinator` has the
order.

Buckets are numbered over all tables, one after the other. A migration is known by a random number that the coordinator
draws for each try, so that a server refuses what an earlier try sent before the coordinator or the server was killed.
All of this is in memory only: a restarted server has frozen and received nothing, and the coordinator starts over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from satrap._core import Engine
from satrap.config.job import Job
from satrap.errors import AttemptError, InputError, NotReadyError
from satrap.table.engine import state_dim

Buckets = NDArray[np.uint32]
MAX_CHUNK_BYTES = 16 << 20
"""Most bytes of rows in one answer."""
FROZEN_SECONDS = 15.0
"""How long buckets stay frozen without a call of the coordinator."""
_NONE = np.zeros(0, np.uint32)


class BucketChunk(NamedTuple):
    """Some rows of one table in transit; the last chunk also has the sightings."""

    ids: NDArray[np.uint64]
    steps: NDArray[np.uint32]
    values: NDArray[np.uint8]
    state: NDArray[np.float32]
    sighted: NDArray[np.uint64]
    sighted_at: NDArray[np.uint32]
    counts: NDArray[np.uint32]


@dataclass(slots=True)
class MigrationParticipant:
    """The buckets that a server is giving away and receiving."""

    job: Job
    engine: Engine
    outgoing: Buckets = field(default_factory=lambda: _NONE)
    outgoing_migration: int = 0
    incoming: Buckets = field(default_factory=lambda: _NONE)
    incoming_migration: int = 0
    incoming_attempt: int = 0
    is_complete: bool = False
    rows_out: int = 0
    """Rows exported so far."""
    rows_in: int = 0
    """Rows imported so far."""
    _until: float = 0.0
    _cached_columns: tuple[int, bytes, dict[str, NDArray[Any]]] | None = None  # kept so that a table is read once
    _first_buckets: NDArray[np.int64] = field(init=False)  # each table's first bucket, and the number of all buckets

    def __post_init__(self) -> None:
        self._first_buckets = np.cumsum([0, *(table.resolved_num_buckets for table in self.job.tables)])

    def check_buckets(self, buckets: Buckets) -> None:
        """Raise InputError unless `buckets` are numbers of buckets, each once."""
        if len(buckets) == 0 or int(buckets.max()) >= self._first_buckets[-1] or len(np.unique(buckets)) < len(buckets):
            raise InputError(f"{len(buckets)} buckets; expected some of 0..{self._first_buckets[-1] - 1}, each once")

    # -- outgoing buckets --------------------------------------------------------------------------------------------

    def freeze(self, migration: int, buckets: Buckets, now: float) -> None:
        """Keep these buckets unchanged until they leave, are thawed, or the coordinator is silent for too long."""
        self.thaw()
        self.engine.freeze(buckets, True)
        self.outgoing, self.outgoing_migration = buckets, migration
        self.renew(now)

    def renew(self, now: float) -> None:
        """Note a call of the coordinator, which extends the freeze."""
        self._until = now + FROZEN_SECONDS

    def thaw_if_abandoned(self, now: float) -> None:
        """Thaw the buckets if the coordinator has been silent for too long, so that training continues. A coordinator
        that returns starts over."""
        if self.outgoing_migration and now > self._until:
            self.thaw()

    def thaw(self) -> None:
        """Make the frozen buckets usable again."""
        self.engine.freeze(self.outgoing, False)
        self.outgoing, self.outgoing_migration, self._cached_columns = _NONE, 0, None

    def chunk(self, buckets: Buckets, table: int, begin: int) -> tuple[BucketChunk, int]:
        """Return the rows of a table from row `begin` on, as many as fit into an answer, and the number of all rows."""
        columns = self._columns(buckets, table)
        row_bytes = 12 + 4 * state_dim(self.job.tables[table]) + columns["values"].shape[1] * columns["values"].itemsize
        total, most = len(columns["id"]), max(1, MAX_CHUNK_BYTES // row_bytes)
        part = slice(begin, begin + most)
        last = slice(0, None) if begin + most >= total else slice(0, 0)
        self.rows_out += len(columns["id"][part])
        return BucketChunk(
            columns["id"][part],
            columns["step"][part],
            np.ascontiguousarray(columns["values"][part]).view(np.uint8).reshape(-1),
            np.ascontiguousarray(columns["state"][part]).reshape(-1),
            columns["sighted"][last],
            columns["sighted_at"][last],
            columns["count"][last],
        ), total

    def _columns(self, buckets: Buckets, table: int) -> dict[str, NDArray[Any]]:
        key, cached = (table, buckets.tobytes()), self._cached_columns  # which another call may replace at any time
        if cached is not None and cached[:2] == key:
            return cached[2]
        self._cached_columns = cached = None  # frees the memory of the table before
        first, end = self._first_buckets[table], self._first_buckets[table + 1]
        own = np.sort(buckets[(first <= buckets) & (buckets < end)]) - first
        rows, sighted = [], []
        for begin, stop in _runs(own.tolist()) or [(0, 0)]:
            rows.append(self.engine.export_rows(table, begin, stop, 0, others=True))
            sighted.append(self.engine.export_sightings(table, begin, stop, others=True))
        columns = {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}
        columns |= {
            to: np.concatenate([group[name] for group in sighted])
            for name, to in (("id", "sighted"), ("step", "sighted_at"), ("count", "count"))
        }
        self._cached_columns = (*key, columns)
        return columns

    # -- incoming buckets --------------------------------------------------------------------------------------------

    def expect_buckets(self, migration: int, buckets: Buckets, attempt: int) -> None:
        """Make room for these buckets, from a server in that attempt. A duplicate must not empty them again."""
        if migration == self.incoming_migration:
            return
        if attempt < self.engine.attempt:
            raise AttemptError(f"found rows of attempt {attempt}; expected the server's, {self.engine.attempt}")
        self.engine.forget(buckets)
        self.incoming, self.incoming_migration = buckets, migration
        self.incoming_attempt, self.is_complete = attempt, False

    def require_migration(self, migration: int) -> None:
        """Raise NotReadyError unless rows of that migration are expected."""
        if migration == 0 or migration != self.incoming_migration:
            raise NotReadyError(f"found rows of migration {migration}, which this server does not expect: start over")

    def import_chunk(self, table: int, chunk: BucketChunk) -> None:
        """Insert rows and sightings into the table. A duplicate has no effect."""
        config = self.job.tables[table]
        dtype = np.float32 if config.dtype == "float32" else np.uint16
        values = chunk.values.view(dtype).reshape(-1, config.dim)
        state = chunk.state.reshape(len(chunk.ids), -1) if len(chunk.ids) else chunk.state.reshape(0, 1)
        self.engine.import_rows(table, chunk.ids, chunk.steps, values, state)
        self.rows_in += len(chunk.ids)
        self.engine.import_sightings(table, chunk.sighted, chunk.sighted_at, chunk.counts, clear=False)

    def import_metadata(self, trainers: list[int], windows: NDArray[np.uint64], counters: NDArray[np.uint64]) -> None:
        """Insert the metadata, which completes the buckets; only the change of the map is missing then."""
        self.engine.import_windows(self.incoming, trainers, windows)
        self.engine.import_counters(self.incoming, counters)
        self.is_complete = True

    # -- the change of the map ---------------------------------------------------------------------------------------

    def require_ready(self, migration: int, outgoing: Buckets, incoming: Buckets) -> None:
        """Raise NotReadyError unless these buckets may leave and arrive now."""
        frozen = set(self.outgoing.tolist()) if migration == self.outgoing_migration else set()
        if not set(outgoing.tolist()) <= frozen:
            raise NotReadyError(
                "expected frozen outgoing buckets, found some in use: the server may have been restarted"
            )
        received = set(self.incoming.tolist()) if migration == self.incoming_migration and self.is_complete else set()
        if not set(incoming.tolist()) <= received:
            raise NotReadyError("expected complete incoming buckets, found others: the server may have been restarted")
        if len(incoming) and self.incoming_attempt < self.engine.attempt:
            raise NotReadyError(
                f"found rows of attempt {self.incoming_attempt}; expected this server's, {self.engine.attempt}"
            )

    def end(self) -> None:
        """Forget the migration after the change of the map."""
        self.outgoing = self.incoming = _NONE
        self.outgoing_migration = self.incoming_migration = 0
        self.is_complete, self._cached_columns = False, None


def _runs(buckets: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for b in buckets:
        if runs and runs[-1][1] == b:
            runs[-1] = runs[-1][0], b + 1
        else:
            runs.append((b, b + 1))
    return runs
