"""The state of a server that has a job: its tables, the shard map, and what it remembers of calls.

Has no lock and answers no call; `satrap.server.server` does both. The shard map is stored next to the rows, in the
shared-memory file if they are in one. So a restarted server knows its map and its buckets, and refuses an older map
from a trainer that was suspended.
"""

import json
import threading
import weakref
from collections import Counter, OrderedDict
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from satrap._core import Engine, Ticket
from satrap.config.job import Job
from satrap.config.validation import check_integer
from satrap.errors import ChangesError, InputError, NotReadyError
from satrap.server.migration.participant import MigrationParticipant
from satrap.server.protocol import Coded, Floats, Ids, Offsets
from satrap.server.step_barrier import StepBarrier
from satrap.sharding.shard_map import NO_MEMBER, ShardMap
from satrap.table.engine import RowAccess
from satrap.table.group_cut import GroupCut
from satrap.table.store import Store
from satrap.table.table_group import Chains, TableGroup

CUT_SECONDS = 60.0
"""How long a cut waits for the call that writes it."""
_NO_OWNER = 2**31 - 1  # an owner that no bucket has; the engine's form of NO_MEMBER


@dataclass(frozen=True, slots=True)
class FencingToken:
    """The newest coordinator's token. Two coordinators may draw the same number, so the token also names its holder."""

    number: int = 0
    holder: int = 0
    """A random number of the coordinator, which distinguishes a duplicate of its call from another coordinator's."""


@dataclass(frozen=True, slots=True)
class PendingLookup:
    """A lookup that waits for its update."""

    ticket: Ticket
    ids: Ids
    offsets: Offsets
    others: int
    """Number of updates of other trainers that were applied before."""


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """The folders of a checkpoint, with their checksums, and what this server's buckets need of them, verified."""

    folders: list[list[str]]
    checksums: list[list[int]]
    chains: Chains


@dataclass(slots=True, eq=False, weakref_slot=True)
class HeldCut:
    """The tables at a cut that a trainer has taken and that is not written yet, or the last one that was."""

    number: int
    """A random number, which distinguishes a duplicate of a call from another cut's."""
    tables: GroupCut
    is_begun: bool = False
    """Whether it is being written, or was."""
    written: "Future[tuple[list[int], list[str]]]" = field(default_factory=Future)
    """Once all tables are written: how many rows each had, and the ids of their snapshots."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _timer: threading.Timer = field(init=False)

    def __post_init__(self) -> None:
        own = weakref.ref(self)  # so that the timer does not keep the tables
        self._timer = threading.Timer(CUT_SECONDS, lambda: (held := own()) and held.give_up_unless_begun())
        self._timer.daemon = True
        self._timer.start()

    @property
    def is_pending(self) -> bool:
        """Whether rows must stay in this server until they are written."""
        return not self.written.done()

    def begin(self) -> bool:
        """Return True to the first caller, which writes the cut, and False to all others."""
        with self._lock:
            is_first, self.is_begun = not self.is_begun, True
        self._timer.cancel()
        return is_first

    def give_up(self) -> None:
        """Stop the writer, if there is one, and release the rows that are kept for it."""
        if not self.give_up_unless_begun():
            self.tables.cancel()

    def give_up_unless_begun(self) -> bool:
        """Release the rows that are kept for a writer, unless it has begun; return whether this call released them."""
        if is_first := self.begin():
            self.tables.release()
            self.written.set_exception(ChangesError("the cut was given up before it was written; save again"))
        return is_first


@dataclass(slots=True)
class ServerState:
    """The state of a server that has a job."""

    job: Job
    tables: TableGroup
    engine: Engine
    rows: RowAccess
    shard_map: ShardMap
    number: int
    """This server's number in the shard map."""
    has_handshake: bool = False
    """Whether there was a handshake since the process started."""
    tickets: dict[int, OrderedDict[int, PendingLookup]] = field(default_factory=dict)
    """For each trainer, its pending lookups by ticket number."""
    oldest_open: dict[int, int] = field(default_factory=dict)
    """For each trainer, the oldest open step as of its last lookup. Rows of open steps are never evicted."""
    staleness: dict[int, int] = field(default_factory=dict)
    """For each trainer, the number of earlier steps whose updates its last lookup may have missed."""
    updates: Counter[int] = field(default_factory=Counter)
    """Number of applied updates by trainer, since the process started or was restored."""
    missed: Counter[int] = field(default_factory=Counter)
    """Number of updates by how many of other trainers were applied after their lookup: what their rows had missed."""
    barrier: StepBarrier = field(default_factory=StepBarrier)
    save_folders: dict[str, str] = field(default_factory=dict)
    """For each table, the folder of the last save that was completed, for the status."""
    verified: VerifiedCheckpoint | None = None
    """The checkpoint that the last call of `verify` opened, until a restore takes it or anything else happens to the
    tables: it keeps files open that a later save may remove."""
    cut: HeldCut | None = None
    """The last cut that was taken."""
    restore_folders: tuple[str, ...] = ()
    """For each table, the newest folder that a restore read it from, for the status."""
    restored: tuple[int, bool] | None = None
    """The map version under which a restore started this attempt, and what it returned."""
    participant: MigrationParticipant = field(init=False)
    owns_nothing: bool = field(init=False)
    """Whether no bucket is this server's; every step is finished here then."""

    def __post_init__(self) -> None:
        self.participant = MigrationParticipant(self.job, self.engine)
        self._set_owners()

    @classmethod
    def recover(cls, job: Job, tables: TableGroup, engine: Engine) -> tuple[Self | None, FencingToken]:
        """Return the previous process's state, or None if it stored none yet, and the newest fencing token."""
        if not (note := bytes(engine.note())):
            return None, FencingToken()
        stored = json.loads(note)
        token = FencingToken(stored["fencing_token"], stored["token_holder"])
        return cls(job, tables, engine, engine, ShardMap.from_dict(stored["shard_map"]), stored["number"]), token

    def updates_of_others(self, trainer: int) -> int:
        """Return how many updates of other trainers were applied."""
        return self.updates.total() - self.updates[trainer]

    def store(self, table: int) -> Store:
        names = list(self.tables)
        return self.tables[names[check_integer("a call", "table", table, 0, len(names) - 1, InputError)]]

    def adopt(self, shard_map: ShardMap, number: int, token: FencingToken) -> None:
        """Adopt a shard map and this server's number in it, and store both with the fencing token. Call exclusively."""
        changed = self.shard_map.version != shard_map.version
        self.verified = None
        if changed:
            self.drop_cut()
        stored = {
            "shard_map": shard_map.to_dict(),
            "number": number,
            "fencing_token": token.number,
            "token_holder": token.holder,
        }
        self.engine.set_note(json.dumps(stored).encode())
        self.shard_map, self.number = shard_map, number
        self._set_owners()
        if changed:
            self.tickets.clear()
            for store in self.tables.values():
                store.forget_saves()

    def drop_cut(self) -> None:
        """Give up the cut and wait until nothing writes it."""
        held, self.cut = self.cut, None
        if held is not None:
            held.give_up()
            wait([held.written])

    def require_no_cut(self) -> None:
        """Raise NotReadyError while a checkpoint of this server's buckets is being saved, which needs them here."""
        if self.cut is not None and self.cut.is_pending:
            raise NotReadyError("a checkpoint of this server's buckets is being saved: retry when it is complete")

    def progress(self) -> dict[str, Any]:
        """Return the counters that a server must reach before it takes over buckets or joins."""
        engine, tables = self.engine, range(len(self.job.tables))
        return {
            "attempt": engine.attempt,
            "latest_step": engine.latest_step,
            "versions": [engine.version(t) for t in tables],
            "expire_before": [engine.expire_before(t) for t in tables],
            "restored": self.restored is not None,
            "lrs": [engine.lr(t) for t in tables],
        }

    def verify(self, folders: list[list[str]], checksums: list[list[int]]) -> None:
        """Open what this server's buckets need of a checkpoint; see `TableGroup.verify`."""
        self.verified = None
        owned = [
            (np.array(table) == self.number) | self.engine.shares_buckets(number)
            for number, table in enumerate(self.shard_map.bucket_map.owners)
        ]
        chains = self.tables.verify(dict(zip(self.tables, folders, strict=False)), owned, checksums)
        self.verified = VerifiedCheckpoint(folders, checksums, chains)

    def take_verified(self, folders: list[list[str]], checksums: list[list[int]]) -> Chains:
        """Return what `verify` opened, or open it now: the server was restarted since, or has another shard map."""
        chains = self.verified
        if chains is None or (chains.folders, chains.checksums) != (folders, checksums):
            self.verify(folders, checksums)
            chains = self.verified
        self.verified = None
        assert chains is not None
        return chains.chains

    def owned(self) -> NDArray[np.bool_]:
        """Return for each bucket of all tables whether this server owns it."""
        is_owned: NDArray[np.bool_] = np.array(self.shard_map.bucket_map.flat()) == self.number
        return is_owned

    def _set_owners(self) -> None:
        self.owns_nothing = not self.owned().any()
        owners = np.array(self.shard_map.bucket_map.flat(), np.uint32)
        self.engine.set_owners(owners, _NO_OWNER if self.number == NO_MEMBER else self.number)


def decode_gradients(engine: Engine, offsets: Offsets, gradients: Floats | None, coded: Coded | None) -> Floats:
    """Return the gradients as float32, from whichever of the two forms is present."""
    if coded is not None and gradients is None:
        return np.asarray(engine.decode_rows(offsets, coded))
    if coded is not None or gradients is None:
        raise InputError("update: expected gradients in one of the two forms, found both or none")
    return gradients
