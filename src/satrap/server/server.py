"""The server: owns some buckets of every table, and answers the calls of workers. Needs no torch, knows no socket.

It becomes a job's with the first hello, or finds the job in the shared-memory file of a predecessor that was killed. It
keeps a lookup's native ticket under the number that the worker gave it, so that the update need neither bring the ids
nor search for them; a ticket that is not there any more (the server was restarted, or it had too many) is a
TicketError, and the worker sends the ids. The rows' own windows know what was applied
(core/table/applied_steps.hpp): an update that comes again, before or after a restart, is applied once.
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
"""Of a trainer. One that looks up more without updating has its oldest forgotten; its worker sends the ids then."""


class Server(MigrationCalls):
    """Satisfies `satrap.server.protocol.ServerCalls`."""

    def __init__(
        self,
        *,
        shared: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
        checkpoints: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        """shared: the shared-memory file of the rows. One that is there is attached, rows and job; else it is made when
        the job is known.
        checkpoints: below which it writes and reads checkpoints; elsewhere it refuses to."""
        thread_count(num_threads)
        self._permitted = PathAllowlist(checkpoints, "--checkpoints")
        self._shared, self._num_threads = shared, num_threads
        self._leases = Leases()
        super().__init__()
        # A file that is not whole, or names no members, is of one killed in a hello or restore, which will come again.
        if shared is not None and Path(shared).exists() and not remove_unfinished(shared):
            note = shared_note(shared)
            if note.keys() != {"server", "num_servers"}:
                raise ConfigError(
                    f"shared-memory file {os.fspath(shared)!r} is no server's; wanted one that `satrap server` made"
                )
            slots = attach_engine(shared, num_threads=num_threads)
            job = Job(tables=tuple(slot.table for slot in slots), seed=slots[0].seed)
            self._served, self._turn = ServerState.found(job, TableGroup.in_engine(slots), slots[0].engine)
            if self._served is None:
                self._remove_rows()
        elif shared is not None and not os.access(Path(shared).absolute().parent, os.W_OK):
            raise ConfigError(f"shared is {os.fspath(shared)!r}; wanted a file in a folder that can be written to")

    def hello(
        self, origin: Origin, job: dict[str, Any], members: dict[str, Any], server: int, commit: bool
    ) -> dict[str, Any]:
        """See ServerCalls."""
        wanted, given = Job.from_dict(job), ShardMap.from_dict(members)
        server = check_integer("hello", "server", server, 0, len(given.addresses) - 1)
        owners = given.bucket_map.owners
        found, needed = [len(table) for table in owners], [t.resolved_num_buckets for t in wanted.tables]
        if found != needed:
            raise ConfigError(f"hello: the bucket map is of {found} buckets, and the tables have {needed}")
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
        """See ServerCalls."""
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
        """See ServerCalls. Whatever else the server is at."""
        self._leases.renew(origin.attempt, process, where, seconds)

    def begin_attempt(self, origin: Origin) -> None:
        """See ServerCalls."""
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
        """See ServerCalls."""
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
        """See ServerCalls."""
        with self._working(origin) as served:
            if ticket != 0 and len(ids):
                raise InputError(f"update: ticket {ticket} and {len(ids)} ids; wanted one of the two")
            kept = None if ticket == 0 else self._take(served, origin.trainer, ticket)
            gradients = decoded(served.engine, offsets if kept is None else kept.offsets, gradients, coded)
            if kept is None and len(gradients) != num_floats(served.job, ids, offsets):
                raise InputError(f"update: {len(gradients)} gradients of {len(ids)} ids; wanted their rows' floats")
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
        """Notes a trainer's part of a step; whoever brings the last one applies all, as trainer 0's."""
        with self._changed:
            if served.engine.finished(0, origin.step) or served.owns_nothing:
                return None  # its answer was lost
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
        """See ServerCalls."""
        with self._working(origin) as served:
            for ticket in tickets:
                with self._changed:
                    found = served.tickets.get(origin.trainer, OrderedDict()).pop(ticket, None)
                if found is not None:
                    served.engine.drop(found.ticket)

    def read(self, origin: Origin, table: int, ids: Ids) -> tuple[Floats, Floats, Flags]:
        """See ServerCalls."""
        with self._working(origin, reads=True) as served:
            found = served.store(table).read(ids)
            return found.values.reshape(-1), found.state.reshape(-1), found.present

    def stats(self, origin: Origin, table: int) -> dict[str, int]:
        """See ServerCalls."""
        with self._working(origin, reads=True) as served:
            return served.store(table).stats()

    def version(self, origin: Origin, table: int) -> int:
        """See ServerCalls."""
        with self._working(origin, reads=True) as served:
            return served.store(table).version

    def save(self, origin: Origin, table: int, folder: str, since: int | None, version: int) -> int:
        """See ServerCalls."""
        with self._working(origin) as served:
            store = served.store(table)
            part = Path(folder) / part_name(served.number, len(served.members.addresses))
            last = served.saved.get(table)
            if last == (folder, since, version):
                return version  # it came again
            self.require_permitted(origin, os.fspath(part))
            served.engine.reach_table(table, check_integer("save", "version", version, 2, 2**32 - 2) - 1, 0)
            owned = np.array(served.members.bucket_map.owners[table]) == served.number
            made = store.save_part(part, owned, since=since)
            served.saved[table] = folder, since, version
            return made

    def require_permitted(self, origin: Origin, folder: str) -> None:
        """See ServerCalls."""
        if folder != os.path.abspath(folder):
            raise InputError(f"the folder is {folder!r}; wanted its path from the root, without '..'")
        self._permitted.require(folder)

    def verify(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> None:
        """See ServerCalls."""
        self._require_all_permitted(origin, folders)
        with self._working(origin) as served:
            require_same_snapshots(folders, checksums)
            served.tables.verify(dict(zip(served.tables, folders, strict=False)))

    def restore(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> bool:
        """See ServerCalls. The old rows go before the new ones come: memory may not hold both.

        It is done for a map: whoever was told of another meanwhile asks again, in the same attempt."""
        self._require_all_permitted(origin, folders)
        with self._pause():
            served = self._ready()
            self._require_map(served, origin)
            begun = served.restored is not None or served.owns_nothing  # by this very restore, maybe of another map
            again = origin.attempt == served.engine.attempt and begun
            if again and served.restored is not None and served.restored[0] == origin.map_version:
                return served.restored[1]  # it came again
            if not again and origin.attempt == served.engine.attempt:
                raise AttemptError(
                    f"this server was started again while a restore began attempt {origin.attempt}, or after that: "
                    "what it holds is not known to be the checkpoint; resume it again"
                )
            if origin.attempt < served.engine.attempt:
                raise self._other_attempt(served, origin)
            names = list(served.tables)
            if len(folders) not in (0, len(names)):
                raise InputError(f"restore: folders of {len(folders)} tables; wanted of {len(names)}, or none")
            require_same_snapshots(folders, checksums)
            chains = dict(zip(names, folders, strict=False))
            made = self._anew(served, origin)
            made.engine.begin_attempt(origin.attempt)
            answer = self._fill(made, chains) if chains else True
            made.restored = origin.map_version, answer
            self._served = made
            return answer

    def _fill(self, made: ServerState, chains: dict[str, list[str]]) -> bool:
        """What this server owns of them. If that fails, nothing is left of it: the next hello makes a new one."""
        owned = [np.array(table) == made.number for table in made.members.bucket_map.owners]
        try:
            return made.tables.restore(chains, owned)
        except BaseException:
            self._remove_rows()
            raise

    def set_lr(self, origin: Origin, table: int, lr: float) -> None:
        """See ServerCalls."""
        with self._working(origin) as served:
            served.store(table).set_lr(lr)

    def check(self, origin: Origin, table: int) -> None:
        """See ServerCalls."""
        with self._working(origin, reads=True) as served:
            served.store(table).check()

    # -- inside ------------------------------------------------------------------------------------------------------

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
        """The same with empty tables; until it is there, there are none."""
        job, members, number = old.job, old.members, old.number
        self._served = None
        self._let_go(old, origin)
        del old.tables, old.engine, old.moving
        self._remove_rows()
        made = self._empty(job, members, number)
        made.greeted = True
        return made

    def _remove_rows(self) -> None:
        """Of an engine that nobody has any more."""
        if self._shared is not None:
            Path(self._shared).unlink(missing_ok=True)

    def _let_go(self, served: ServerState, origin: Origin) -> None:
        """Of what the attempt before left open."""
        served.tickets.clear()
        served.oldest_open.clear()
        served.meeting.refuse(lambda: AttemptError(f"attempt {origin.attempt} has begun: this process was replaced"))

    def _oldest_open(self, served: ServerState, origin: Origin, given: int) -> int:
        with self._changed:
            served.oldest_open[origin.trainer] = given
            return min(origin.step, *served.oldest_open.values())

    def _agree(self, served: ServerState, job: Job, given: ShardMap, server: int, by_mover: bool) -> None:
        """Raises unless hello is said to the right server, by somebody who knows of its members. A mover may tell one
        that owns nothing of others than one that was replaced did."""
        differences, known = job.differences(served.job), served.members
        idle = served.owns_nothing and server not in given.bucket_map.flat()
        same_map = known.version == given.version
        must_agree = same_map and not (idle and by_mover)
        here, there = (server, len(given.addresses)), (served.number, len(known.addresses))
        if must_agree and here != there:
            differences.append(f"server: number {here[0]} of {here[1]} here, {there[0]} of {there[1]} there")
        elif must_agree and known.bucket_map != given.bucket_map:
            differences.append(f"bucket map {given.version}: other owners")
        if differences:
            raise ConfigError(f"the server belongs to another job: {'; '.join(differences)}")
        if known.version > given.version:
            raise MovedError(f"hello: the bucket map is of version {given.version}; the server's is {known.version}")
        if not same_map and not idle:
            raise MovedError(f"hello: the server has not changed to map {given.version} yet: ask again")

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
