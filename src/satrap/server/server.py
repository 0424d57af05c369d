"""The server: owns some buckets of every table and answers the calls of workers. Does not need torch or know sockets.

The first handshake assigns it to a job, unless it recovers the job from the shared-memory file of a killed predecessor.
It keeps a lookup's native ticket under the number that the worker chose, so that the update needs neither to send the
ids nor to search for them again. If the ticket is missing (the server was restarted, or had too many), the update fails
with TicketError and the worker sends the ids. The windows of each bucket record which steps were applied
(core/table/applied_steps.hpp): a duplicate of an update, before or after a restart, has no effect.
"""

import os
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from satrap.config.cores import thread_count
from satrap.config.job import Job
from satrap.config.path_allowlist import PathAllowlist
from satrap.config.validation import check_choice, check_integer
from satrap.errors import AttemptError, ConfigError, InputError, MovedError, TicketError
from satrap.rpc import Origin
from satrap.server.lease import Leases
from satrap.server.migration.calls import MigrationCalls
from satrap.server.protocol import NO_ATTEMPT, WIRES, Coded, Flags, Floats, Ids, Offsets
from satrap.server.state import PendingLookup, ServerState, decoded, num_floats
from satrap.server.step_barrier import TrainerPart, joined
from satrap.sharding.shard_map import ShardMap
from satrap.table.engine import attach_engine, open_engine, remove_unfinished, shared_note
from satrap.table.snapshot.directory import part_name
from satrap.table.snapshot.saved_table import require_same_snapshots
from satrap.table.table_group import TableGroup

MOST_TICKETS = 1024
"""Tickets kept for one trainer. Beyond that the oldest is dropped; the worker then sends the ids with the update."""


class Server(MigrationCalls):
    """Implements `satrap.server.protocol.ServerCalls` on one engine."""

    def __init__(
        self,
        *,
        shared: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
        checkpoints: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        """shared: the shared-memory file of the rows. An existing file is attached, with its rows and job; otherwise it
            is created when the job is known.
        checkpoints: folders below which the server may read and write checkpoints."""
        thread_count(num_threads)
        self._permitted = PathAllowlist(checkpoints, "--checkpoints")
        self._shared, self._num_threads = shared, num_threads
        self._leases = Leases()
        super().__init__()
        # A file that is incomplete or has no shard map is left from a kill during hello or restore, which is retried.
        if shared is not None and Path(shared).exists() and not remove_unfinished(shared):
            note = shared_note(shared)
            if note.keys() != {"server", "num_servers"}:
                raise ConfigError(
                    f"shared-memory file {os.fspath(shared)!r} does not belong to a server; expected one that `satrap "
                    "server` created"
                )
            slots = attach_engine(shared, num_threads=num_threads)
            job = Job(tables=tuple(slot.table for slot in slots), seed=slots[0].seed)
            self._served, self._turn = ServerState.found(job, TableGroup.in_engine(slots), slots[0].engine)
            if self._served is None:
                self._remove_rows()
        elif shared is not None and not os.access(Path(shared).absolute().parent, os.W_OK):
            raise ConfigError(f"shared is {os.fspath(shared)!r}; expected a file in a writable folder")

    def hello(
        self, origin: Origin, job: dict[str, Any], members: dict[str, Any], server: int, commit: bool
    ) -> dict[str, Any]:
        wanted, given = Job.from_dict(job), ShardMap.from_dict(members)
        server = check_integer("hello", "server", server, 0, len(given.addresses) - 1)
        owners = given.bucket_map.owners
        found, needed = [len(table) for table in owners], [t.resolved_num_buckets for t in wanted.tables]
        if found != needed:
            raise ConfigError(f"hello: the bucket map has {found} buckets; expected those of the tables, {needed}")
        with self._changed:
            if by_mover := origin.step > 0:
                self._require_turn(origin)
            if self._served is None:
                if not commit:
                    lrs = [table.optimizer.lr for table in wanted.tables]
                    return {"attempt": NO_ATTEMPT, "latest_step": 0, "lrs": lrs, "leases": self._leases.left()}
                self._served = self._empty(wanted, given, server)
            served = self._served
            self._agree(served, wanted, given, server, by_mover)
            if commit:
                known = served.members
                if known.version != given.version or (by_mover and known != given):
                    served.follow(given, server, self._turn)
                served.greeted = True
        return {
            "attempt": served.engine.attempt,
            "latest_step": served.engine.latest_step,
            "lrs": [table.lr for table in served.tables.values()],
            "leases": self._leases.left(),
        }

    def members(self, origin: Origin, than: int) -> dict[str, Any]:
        with self._changed:
            served = self._served
            if served is None:
                return {"version": 0, "turn": self._turn.number}
            served.moving.thaw_if_left(time.monotonic())
            version, turn = served.members.version, self._turn.number
            found: dict[str, Any] = {"version": version, "greeted": served.greeted, "turn": turn}
            if served.members.version > than:
                found |= {"members": served.members.to_dict(), "job": served.job.to_dict(), "state": served.state()}
            return found

    def renew_lease(self, origin: Origin, process: str, where: str, seconds: float) -> None:
        self._leases.renew(origin.attempt, process, where, seconds)

    def begin_attempt(self, origin: Origin) -> None:
        with self._pause():
            served = self._ready()
            if origin.attempt == served.engine.attempt:
                return
            if origin.attempt < served.engine.attempt:
                raise self._other_attempt(served, origin)
            self._let_go(served, origin)
            served.restored = None
            served.engine.begin_attempt(origin.attempt)

    def lookup(
        self,
        origin: Origin,
        ids: Ids,
        offsets: Offsets,
        oldest_open: int,
        train: bool,
        ticket: int,
        wire: str = "float32",
        first_epoch: bool = True,
    ) -> tuple[Floats | None, Coded | None]:
        check_choice("lookup", "wire", wire, WIRES)
        with self._working(origin, reads=not train) as served:
            engine = served.engine
            rows = engine.empty(1, num_floats(served.job, ids, offsets))
            given = (origin.step, self._oldest_open(served, origin, oldest_open)) if train else (0, 0)
            made = engine.lookup(ids, offsets, *given, train, rows, train and ticket != 0, first_epoch)
            if made is not None:
                self._keep(served, origin.trainer, ticket, PendingLookup(made, ids, offsets))
            if wire == "float16":
                return None, np.asarray(engine.encode_rows(offsets, rows))
            return np.asarray(rows).reshape(-1), None

    def update(
        self,
        origin: Origin,
        ticket: int,
        ids: Ids,
        offsets: Offsets,
        gradients: Floats | None,
        lrs: list[float],
        together: int,
        coded: Coded | None = None,
    ) -> "Future[None] | None":
        with self._working(origin) as served:
            if ticket != 0 and len(ids):
                raise InputError(f"update: expected a ticket or ids, found ticket {ticket} and {len(ids)} ids")
            kept = None if ticket == 0 else self._take(served, origin.trainer, ticket)
            gradients = decoded(served.engine, offsets if kept is None else kept.offsets, gradients, coded)
            if kept is None and len(gradients) != num_floats(served.job, ids, offsets):
                raise InputError(f"update: {len(gradients)} gradients of {len(ids)} ids; expected their rows' floats")
            if together == 0:
                used = served.engine.prepare(ids, offsets) if kept is None else kept.ticket
                served.engine.update(used, gradients, origin.step, lrs, origin.trainer)
                return None
            if kept is not None:
                served.engine.drop(kept.ticket)
                ids, offsets = kept.ids, kept.offsets
            return self._meet(served, origin, TrainerPart(ids, offsets, gradients), lrs, together)

    def _meet(
        self, served: ServerState, origin: Origin, part: TrainerPart, lrs: list[float], together: int
    ) -> "Future[None] | None":
        """Add a trainer's part of a step. The call that completes the step applies it, as an update of trainer 0."""
        with self._changed:
            if served.engine.finished(0, origin.step) or served.owns_nothing:
                return None  # a retry whose first answer was lost
            own, parts = served.meeting.arrive(origin.step, origin.trainer, part, together)
        if parts is None:
            return own
        error: Exception | None = None
        try:
            whole = joined(parts, [table.dim for table in served.job.tables])
            ticket = served.engine.prepare(whole.ids, whole.offsets)
            served.engine.update(ticket, whole.gradients, origin.step, lrs, 0)
            served.engine.finish(0, origin.step)
        except Exception as failed:
            error = failed
        with self._changed:
            waiting = served.meeting.leave(origin.step)
        for each in waiting:
            if error is None:
                each.set_result(None)
            else:
                each.set_exception(error)
        return own

    def drop(self, origin: Origin, tickets: list[int]) -> None:
        with self._working(origin) as served:
            for ticket in tickets:
                with self._changed:
                    found = served.tickets.get(origin.trainer, OrderedDict()).pop(ticket, None)
                if found is not None:
                    served.engine.drop(found.ticket)

    def read(self, origin: Origin, table: int, ids: Ids) -> tuple[Floats, Floats, Flags]:
        with self._working(origin, reads=True) as served:
            found = served.store(table).read(ids)
            return found.values.reshape(-1), found.state.reshape(-1), found.present

    def stats(self, origin: Origin, table: int) -> dict[str, int]:
        with self._working(origin, reads=True) as served:
            return served.store(table).stats()

    def version(self, origin: Origin, table: int) -> int:
        with self._working(origin, reads=True) as served:
            return served.store(table).version

    def save(self, origin: Origin, table: int, folder: str, since: int | None, version: int) -> int:
        with self._working(origin) as served:
            store = served.store(table)
            part = Path(folder) / part_name(served.number, len(served.members.addresses))
            last = served.saved.get(table)
            if last == (folder, since, version):
                return version  # a duplicate
            self.require_permitted(origin, os.fspath(part))
            served.engine.reach_table(table, check_integer("save", "version", version, 2, 2**32 - 2) - 1, 0)
            owned = np.array(served.members.bucket_map.owners[table]) == served.number
            made = store.save_part(part, owned, since=since)
            served.saved[table] = folder, since, version
            return made

    def require_permitted(self, origin: Origin, folder: str) -> None:
        if folder != os.path.abspath(folder):
            raise InputError(f"the folder is {folder!r}; expected an absolute path without '..'")
        self._permitted.require(folder)

    def verify(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> None:
        self._require_all_permitted(origin, folders)
        with self._working(origin) as served:
            require_same_snapshots(folders, checksums)
            served.tables.verify(dict(zip(served.tables, folders, strict=False)))

    def restore(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> bool:
        """Drop the old rows before reading the new ones, because memory may not hold both.

        A restore belongs to a shard map: if the map changes meanwhile, the caller repeats it, in the same attempt."""
        self._require_all_permitted(origin, folders)
        with self._pause():
            served = self._ready()
            self._require_map(served, origin)
            begun = served.restored is not None or served.owns_nothing  # by this restore, maybe under another map
            again = origin.attempt == served.engine.attempt and begun
            if again and served.restored is not None and served.restored[0] == origin.map_version:
                return served.restored[1]  # a duplicate
            if not again and origin.attempt == served.engine.attempt:
                raise AttemptError(
                    f"this server was restarted during or after a restore that started attempt {origin.attempt}, so "
                    "its rows may differ from the checkpoint; resume the checkpoint again"
                )
            if origin.attempt < served.engine.attempt:
                raise self._other_attempt(served, origin)
            names = list(served.tables)
            if len(folders) not in (0, len(names)):
                raise InputError(f"restore: folders of {len(folders)} tables; expected of {len(names)}, or none")
            require_same_snapshots(folders, checksums)
            chains = dict(zip(names, folders, strict=False))
            made = self._anew(served, origin)
            made.engine.begin_attempt(origin.attempt)
            answer = self._fill(made, chains) if chains else True
            made.restored = origin.map_version, answer
            self._served = made
            return answer

    def _fill(self, made: ServerState, chains: dict[str, list[str]]) -> bool:
        """Read this server's buckets. On failure all rows are removed, and the next handshake creates new tables."""
        owned = [np.array(table) == made.number for table in made.members.bucket_map.owners]
        try:
            return made.tables.restore(chains, owned)
        except BaseException:
            self._remove_rows()
            raise

    def set_lr(self, origin: Origin, table: int, lr: float) -> None:
        with self._working(origin) as served:
            served.store(table).set_lr(lr)

    def check(self, origin: Origin, table: int) -> None:
        with self._working(origin, reads=True) as served:
            served.store(table).check()

    # -- internals ---------------------------------------------------------------------------------------------------

    def _require_all_permitted(self, origin: Origin, folders: list[list[str]]) -> None:
        for chain in folders:
            for folder in chain:
                self.require_permitted(origin, folder)

    def _empty(self, job: Job, members: ShardMap, number: int) -> ServerState:
        slots = open_engine(
            job.tables,
            seed=job.seed,
            num_threads=self._num_threads,
            shared=self._shared,
            note={"server": number, "num_servers": len(members.addresses)},
        )
        made = ServerState(job, TableGroup.in_engine(slots), slots[0].engine, members, number)
        try:
            made.follow(members, number, self._turn)
        except BaseException:
            self._remove_rows()
            raise
        return made

    def _anew(self, old: ServerState, origin: Origin) -> ServerState:
        """Replace the tables by empty ones; meanwhile there are none."""
        job, members, number = old.job, old.members, old.number
        self._served = None
        self._let_go(old, origin)
        del old.tables, old.engine, old.moving
        self._remove_rows()
        made = self._empty(job, members, number)
        made.greeted = True
        return made

    def _remove_rows(self) -> None:
        """Remove the shared-memory file of an engine that was released."""
        if self._shared is not None:
            Path(self._shared).unlink(missing_ok=True)

    def _let_go(self, served: ServerState, origin: Origin) -> None:
        """Drop the tickets, open steps and waiting parts of the previous attempt."""
        served.tickets.clear()
        served.oldest_open.clear()
        served.meeting.refuse(lambda: AttemptError(f"attempt {origin.attempt} has begun: this process was replaced"))

    def _oldest_open(self, served: ServerState, origin: Origin, given: int) -> int:
        with self._changed:
            served.oldest_open[origin.trainer] = given
            return min(origin.step, *served.oldest_open.values())

    def _agree(self, served: ServerState, job: Job, given: ShardMap, server: int, by_mover: bool) -> None:
        """Raise unless hello reached the right server and names its shard map. A coordinator may replace the other
        servers in the map of one that owns nothing."""
        differences, known = job.differences(served.job), served.members
        idle = served.owns_nothing and server not in given.bucket_map.flat()
        same_map = known.version == given.version
        must_agree = same_map and not (idle and by_mover)
        here, there = (server, len(given.addresses)), (served.number, len(known.addresses))
        if must_agree and here != there:
            differences.append(f"server: number {here[0]} of {here[1]} here, {there[0]} of {there[1]} there")
        elif must_agree and known.bucket_map != given.bucket_map:
            differences.append(f"bucket map {given.version}: different owners")
        if differences:
            raise ConfigError(f"the server belongs to another job: {'; '.join(differences)}")
        if known.version > given.version:
            raise MovedError(
                f"hello: found bucket map {given.version}; expected the server's, {known.version}: take that map and "
                "call again"
            )
        if not same_map and not idle:
            raise MovedError(
                f"hello: found bucket map {given.version}; the server has not changed to it yet: call again"
            )

    def _keep(self, served: ServerState, trainer: int, number: int, kept: PendingLookup) -> None:
        with self._changed:
            tickets = served.tickets.setdefault(trainer, OrderedDict())
            left = [tickets.pop(number)] if number in tickets else []
            tickets[number] = kept
            if len(tickets) > MOST_TICKETS:
                left.append(tickets.popitem(last=False)[1])
        for each in left:
            served.engine.drop(each.ticket)

    def _take(self, served: ServerState, trainer: int, number: int) -> PendingLookup:
        with self._changed:
            kept = served.tickets.get(trainer, OrderedDict()).pop(number, None)
        if kept is None:
            raise TicketError(f"trainer {trainer} has no ticket {number} here: send the ids")
        return kept
