"""What a server is once it has a job: its tables, the members that it knows of, and what it keeps of calls. No locks,
no calls: `satrap.server.server` has them.

The members are noted beside the rows, in the shared-memory file if that is where those are. So a server that was killed
and started again knows of which map it is and what it owns, and takes no older map from a trainer that slept.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from satrap._core import Engine, Ticket
from satrap.config.job import Job
from satrap.config.validation import check_integer
from satrap.errors import InputError
from satrap.server.migration.participant import MigrationParticipant
from satrap.server.protocol import Coded, Floats, Ids, Offsets
from satrap.server.step_barrier import StepBarrier
from satrap.sharding.shard_map import NO_MEMBER, ShardMap
from satrap.table.store import Store
from satrap.table.table_group import TableGroup

_NOBODY = 2**31 - 1  # the same to an engine


@dataclass(frozen=True, slots=True)
class FencingToken:
    """The newest mover's. Its number alone would not do: two movers may have begun the same one."""

    number: int = 0
    mover: int = 0
    """Drawn at random by the mover, so that a repeat of its call is told from another mover's."""


@dataclass(frozen=True, slots=True)
class PendingLookup:
    """A lookup that waits for its update."""

    ticket: Ticket
    ids: Ids
    offsets: Offsets


@dataclass(slots=True)
class ServerState:
    """See the file's docstring."""

    job: Job
    tables: TableGroup
    engine: Engine
    members: ShardMap
    number: int
    """Which of the members this is."""
    greeted: bool = False
    """Whether somebody of the job has said hello since the process began."""
    tickets: dict[int, OrderedDict[int, PendingLookup]] = field(default_factory=dict)
    """Of each trainer, by their numbers."""
    oldest_open: dict[int, int] = field(default_factory=dict)
    """Of each trainer, as its last lookup said: what any of them has open stays."""
    meeting: StepBarrier = field(default_factory=StepBarrier)
    saved: dict[int, tuple[str, int | None, int]] = field(default_factory=dict)
    """Of each table the last save: where, since when, and the version that it was to make."""
    restored: tuple[int, bool] | None = None
    """Under which map a restore began this attempt, and what it answered."""
    moving: MigrationParticipant = field(init=False)
    owns_nothing: bool = field(init=False)
    """Then every step is finished here."""

    def __post_init__(self) -> None:
        self.moving = MigrationParticipant(self.job, self.engine)
        self._know_owners()

    @classmethod
    def found(cls, job: Job, tables: TableGroup, engine: Engine) -> tuple[Self | None, FencingToken]:
        """What the server before this one was, and its newest mover's turn; None: it had noted nothing yet."""
        if not (note := bytes(engine.note())):
            return None, FencingToken()
        told = json.loads(note)
        turn = FencingToken(told["turn"], told.get("mover", 0))  # files made before movers were noted
        return cls(job, tables, engine, ShardMap.from_dict(told["members"]), told["number"]), turn

    def store(self, table: int) -> Store:
        """The table of that number."""
        names = list(self.tables)
        return self.tables[names[check_integer("a call", "table", table, 0, len(names) - 1, InputError)]]

    def follow(self, members: ShardMap, number: int, turn: FencingToken) -> None:
        """These are the members from now on, this is which of them, and the newest mover's turn. No call may run."""
        changed = self.members.version != members.version
        told = {"members": members.to_dict(), "number": number, "turn": turn.number, "mover": turn.mover}
        self.engine.set_note(json.dumps(told).encode())
        self.members, self.number = members, number
        self._know_owners()
        if changed:
            self.tickets.clear()
            self.saved.clear()
            for store in self.tables.values():
                store.forget_saves()

    def state(self) -> dict[str, Any]:
        """The numbers that a server which takes buckets over, or joins, must reach."""
        engine, tables = self.engine, range(len(self.job.tables))
        return {
            "attempt": engine.attempt,
            "latest_step": engine.latest_step,
            "versions": [engine.version(t) for t in tables],
            "expire_before": [engine.expire_before(t) for t in tables],
            "restored": self.restored is not None,
            "lrs": [engine.lr(t) for t in tables],
        }

    def owned(self) -> NDArray[np.bool_]:
        """Of each bucket of all tables, whether it is this server's."""
        found: NDArray[np.bool_] = np.array(self.members.bucket_map.flat()) == self.number
        return found

    def _know_owners(self) -> None:
        self.owns_nothing = not self.owned().any()
        owners = np.array(self.members.bucket_map.flat(), np.uint32)
        self.engine.set_owners(owners, _NOBODY if self.number == NO_MEMBER else self.number)


def decoded(engine: Engine, offsets: Offsets, gradients: Floats | None, coded: Coded | None) -> Floats:
    """The gradients, in whichever form they came."""
    if coded is not None and gradients is None:
        return np.asarray(engine.decode_rows(offsets, coded))
    if coded is not None or gradients is None:
        raise InputError("update: gradients came in both forms or in none; wanted one of the two")
    return gradients


def num_floats(job: Job, ids: Ids, offsets: Offsets) -> int:
    """Of the ids' rows; refuses offsets that do not cut them by table."""
    at = offsets.tolist() if len(offsets) == len(job.tables) + 1 else []  # so few are quicker than arrays
    if not at or at[0] != 0 or at[-1] != len(ids) or at != sorted(at):
        raise InputError(
            f"{len(ids)} ids come with {len(offsets)} offsets; wanted {len(job.tables) + 1}, from 0 to their number"
        )
    return sum((end - begin) * table.dim for begin, end, table in zip(at, at[1:], job.tables, strict=False))
