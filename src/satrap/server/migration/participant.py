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
from satrap.table.engine import native_config

Buckets = NDArray[np.uint32]
MOST_BYTES = 16 << 20
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


@dataclass(frozen=True, slots=True)
class Companions:
    """What migrates with buckets besides their rows."""

    trainers: list[int]
    windows: NDArray[np.uint64]
    counters: NDArray[np.uint64]
    oldest_open: dict[int, int]


@dataclass(slots=True)
class MigrationParticipant:
    """The buckets that a server is giving away and receiving."""

    job: Job
    engine: Engine
    leaving: Buckets = field(default_factory=lambda: _NONE)
    leaving_move: int = 0
    coming: Buckets = field(default_factory=lambda: _NONE)
    coming_move: int = 0
    coming_attempt: int = 0
    coming_whole: bool = False
    _until: float = 0.0
    _drawn: tuple[int, bytes, dict[str, NDArray[Any]]] | None = None  # columns of one table, so that it is read once
    _first: NDArray[np.int64] = field(init=False)  # each table's first bucket, and the number of all buckets

    def __post_init__(self) -> None:
        self._first = np.cumsum([0, *(table.resolved_num_buckets for table in self.job.tables)])

    def check(self, buckets: Buckets) -> None:
        """Raise InputError unless `buckets` are numbers of buckets, each once."""
        if len(buckets) == 0 or int(buckets.max()) >= self._first[-1] or len(np.unique(buckets)) < len(buckets):
            raise InputError(f"{len(buckets)} buckets; expected some of 0..{self._first[-1] - 1}, each once")

    # -- outgoing buckets --------------------------------------------------------------------------------------------

    def freeze(self, move: int, buckets: Buckets, now: float) -> None:
        """Keep these buckets unchanged until they leave, `thaw` is called, or the coordinator is silent for too
        long."""
        self.thaw()
        self.engine.freeze(buckets, True)
        self.leaving, self.leaving_move = buckets, move
        self.renew(now)

    def renew(self, now: float) -> None:
        """Note a call of the coordinator, which extends the freeze."""
        self._until = now + FROZEN_SECONDS

    def thaw_if_left(self, now: float) -> None:
        """Thaw the buckets if the coordinator has been silent for too long, so that training continues. A coordinator
        that returns starts over."""
        if self.leaving_move and now > self._until:
            self.thaw()

    def thaw(self) -> None:
        """Make the frozen buckets usable again."""
        self.engine.freeze(self.leaving, False)
        self.leaving, self.leaving_move, self._drawn = _NONE, 0, None

    def parcel(self, buckets: Buckets, table: int, begin: int) -> tuple[BucketChunk, int]:
        """Return the rows of a table from row `begin` on, as many as fit into an answer, and the number of all rows."""
        columns = self._columns(buckets, table)
        config = native_config(self.job.tables[table])
        row_bytes = 12 + 4 * config.state_dim + columns["values"].shape[1] * columns["values"].itemsize
        total, most = len(columns["id"]), max(1, MOST_BYTES // row_bytes)
        part = slice(begin, begin + most)
        last = slice(0, None) if begin + most >= total else slice(0, 0)
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
        key = table, buckets.tobytes()
        if self._drawn is not None and self._drawn[:2] == key:
            return self._drawn[2]
        self._drawn = None
        first, end = self._first[table], self._first[table + 1]
        own = np.sort(buckets[(first <= buckets) & (buckets < end)]) - first
        rows, sighted = [], []
        for begin, stop in _runs(own.tolist()):
            rows.append(self.engine.export_rows(table, begin, stop, 0, others=True))
            sighted.append(self.engine.export_sightings(table, begin, stop, others=True))
        if not rows:
            rows, sighted = [self.engine.export_rows(table, 0, 0, 0)], [self.engine.export_sightings(table, 0, 0)]
        columns = {name: _joined([each[name] for each in rows]) for name in rows[0]}
        columns |= {
            to: _joined([each[name] for each in sighted])
            for name, to in (("id", "sighted"), ("step", "sighted_at"), ("count", "count"))
        }
        self._drawn = (*key, columns)
        return columns

    def companions(self, buckets: Buckets, oldest_open: dict[int, int]) -> Companions:
        """Return what migrates besides the rows."""
        trainers, windows = self.engine.export_windows(buckets)
        return Companions(trainers, windows, self.engine.export_counters(buckets), dict(oldest_open))

    # -- incoming buckets --------------------------------------------------------------------------------------------

    def receive(self, move: int, buckets: Buckets, attempt: int) -> None:
        """Make room for these buckets, from a server in that attempt. A duplicate is ignored: it would empty them
        again."""
        if move == self.coming_move:
            return
        if attempt < self.engine.attempt:
            raise AttemptError(f"found rows of attempt {attempt}; expected the server's, {self.engine.attempt}")
        self.engine.forget(buckets)
        self.coming, self.coming_move, self.coming_attempt, self.coming_whole = buckets, move, attempt, False

    def require(self, move: int) -> None:
        """Raise NotReadyError unless rows of that migration are expected."""
        if move == 0 or move != self.coming_move:
            raise NotReadyError(f"found rows of migration {move}, which this server does not expect: start over")

    def take(self, table: int, parcel: BucketChunk) -> None:
        """Insert rows and sightings into the table. A duplicate has no effect."""
        config = self.job.tables[table]
        dtype = np.float32 if config.dtype == "float32" else np.uint16
        values = parcel.values.view(dtype).reshape(-1, config.dim)
        state = parcel.state.reshape(len(parcel.ids), -1) if len(parcel.ids) else parcel.state.reshape(0, 1)
        self.engine.import_rows(table, parcel.ids, parcel.steps, values, state)
        self.engine.import_sightings(table, parcel.sighted, parcel.sighted_at, parcel.counts, clear=False)

    def accompany(self, with_them: Companions, oldest_open: dict[int, int]) -> None:
        """Insert the metadata, which completes the buckets; only the change of the map is missing then."""
        self.engine.import_windows(self.coming, with_them.trainers, with_them.windows)
        self.engine.import_counters(self.coming, with_them.counters)
        for trainer, step in with_them.oldest_open.items():
            oldest_open[trainer] = max(step, oldest_open.get(trainer, 0))
        self.coming_whole = True

    # -- the change of the map ---------------------------------------------------------------------------------------

    def require_ready(self, move: int, leaving: Buckets, coming: Buckets) -> None:
        """Raise NotReadyError unless these buckets may leave and arrive now."""
        frozen = set(self.leaving.tolist()) if move == self.leaving_move else set()
        if not set(leaving.tolist()) <= frozen:
            raise NotReadyError(
                "expected frozen outgoing buckets, found some in use: the server may have been restarted"
            )
        received = set(self.coming.tolist()) if move == self.coming_move and self.coming_whole else set()
        if not set(coming.tolist()) <= received:
            raise NotReadyError("expected complete incoming buckets, found others: the server may have been restarted")
        if len(coming) and self.coming_attempt < self.engine.attempt:
            raise NotReadyError(
                f"found rows of attempt {self.coming_attempt}; expected the server's, {self.engine.attempt}: start over"
            )

    def end(self) -> None:
        """Forget the migration after the change of the map."""
        self.leaving = self.coming = _NONE
        self.leaving_move = self.coming_move = 0
        self.coming_whole, self._drawn = False, None


def _runs(buckets: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as half-open ranges."""
    found: list[tuple[int, int]] = []
    for b in buckets:
        if found and found[-1][1] == b:
            found[-1] = found[-1][0], b + 1
        else:
            found.append((b, b + 1))
    return found


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
