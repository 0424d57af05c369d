"""The server: owns some buckets of every table, and answers the calls of workers. Needs no torch, knows no socket.

It becomes a job's with the first hello, or finds the job in the shared-memory file of a predecessor that was killed. It
keeps a lookup's native ticket under the number that the worker gave it, so that the update need neither bring the ids
nor search for them; a ticket that is not there any more (the server was restarted, or it had too many) is a
TicketError, and the worker sends the ids. What was applied is known to the rows' own windows (core/windows.hpp): so an
update that comes again, before or after a restart, is applied once.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from satrap._core import Engine, Ticket
from satrap.bucketmap import BucketMap
from satrap.calls import WIRES, Coded, Flags, Floats, Ids, Offsets
from satrap.checks import check_choice, check_integer
from satrap.engine import attach_engine, open_engine, shared_note, thread_count
from satrap.errors import AttemptError, ConfigError, InputError, NotReadyError, TicketError
from satrap.folder import part_name
from satrap.job import Job
from satrap.meeting import Meeting, Part, joined
from satrap.rpc import Origin
from satrap.store import Store
from satrap.tables import Tables

MOST_TICKETS = 1024
"""Of a trainer. One that looks up more without updating has its oldest forgotten; its worker sends the ids then."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A lookup that waits for its update."""

    ticket: Ticket
    ids: Ids
    offsets: Offsets


@dataclass(slots=True)
class _Served:
    """What a server is once it has a job."""

    job: Job
    tables: Tables
    engine: Engine
    number: int
    """Which of the bucket map's servers this is."""
    num_servers: int
    bucket_map: BucketMap | None = None
    tickets: dict[int, OrderedDict[int, _Kept]] = field(default_factory=dict)
    """Of each trainer, by their numbers."""
    oldest_open: dict[int, int] = field(default_factory=dict)
    """Of each trainer, as its last lookup said: what any of them has open stays."""
    meeting: Meeting = field(default_factory=Meeting)
    saved: dict[int, tuple[str, int | None, int, int]] = field(default_factory=dict)
    """Of each table the last save: where, since when, its number, and the version it made."""
    restored: bool | None = None
    """What `restore` answered, if that began this attempt."""

    def store(self, table: int) -> Store:
        """The table of that number."""
        names = list(self.tables)
        return self.tables[names[check_integer("a call", "table", table, 0, len(names) - 1, InputError)]]


class Server:
    """Satisfies `satrap.calls.ServerCalls`."""

    def __init__(
        self, *, shared: str | os.PathLike[str] | None = None, num_threads: int | None = None, simd: str = "auto"
    ) -> None:
        """shared: the shared-memory file of the rows. One that is there is attached, rows and job; else it is made when
        the job is known."""
        thread_count(num_threads)
        self._shared, self._num_threads, self._simd = shared, num_threads, simd
        self._changed = threading.Condition()
        self._running = 0  # calls that work on rows
        self._served: _Served | None = None
        if shared is not None and Path(shared).exists():
            note = shared_note(shared)
            if note.keys() != {"server", "num_servers"}:
                raise ConfigError(
                    f"shared-memory file {os.fspath(shared)!r} is no server's; wanted one that `satrap server` made"
                )
            places = attach_engine(shared, num_threads=num_threads, simd=simd)
            job = Job(tables=tuple(place.table for place in places), seed=places[0].seed)
            self._served = _Served(job, Tables.in_engine(places), places[0].engine, note["server"], note["num_servers"])
        elif shared is not None and not os.access(Path(shared).absolute().parent, os.W_OK):
            raise ConfigError(f"shared is {os.fspath(shared)!r}; wanted a file in a folder that can be written to")

    def hello(
        self, origin: Origin, job: dict[str, Any], bucket_map: dict[str, Any], server: int, commit: bool
    ) -> dict[str, Any]:
        """See ServerCalls."""
        wanted, owners = Job.from_dict(job), BucketMap.from_dict(bucket_map)
        server = check_integer("hello", "server", server, 0, owners.num_servers - 1)
        found, needed = [len(table) for table in owners.owners], [t.resolved_num_buckets for t in wanted.tables]
        if found != needed:
            raise ConfigError(f"hello: the bucket map is of {found} buckets, and the tables have {needed}")
        with self._changed:
            if self._served is None:
                if not commit:
                    return {"attempt": 0, "latest_step": 0, "lrs": [table.optimizer.lr for table in wanted.tables]}
                self._served = self._empty(wanted, server, owners.num_servers)
            served = self._served
            self._agree(served, wanted, owners, server)
            if served.bucket_map is not None and served.bucket_map.version > owners.version:
                raise ConfigError(
                    f"hello: the bucket map is of version {owners.version}; the server's is newer: "
                    f"{served.bucket_map.version}"
                )
            if commit:
                served.bucket_map = owners
        return {
            "attempt": served.engine.attempt,
            "latest_step": served.engine.latest_step,
            "lrs": [table.lr for table in served.tables.values()],
        }

    def begin(self, origin: Origin) -> None:
        """See ServerCalls."""
        with self._changed:
            served = self._ready()
            if origin.attempt == served.engine.attempt:
                return
            if origin.attempt < served.engine.attempt:
                raise self._other_attempt(served, origin)
            self._wait_for_calls()
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
    ) -> tuple[Floats | None, Coded | None]:
        """See ServerCalls."""
        check_choice("lookup", "wire", wire, WIRES)
        with self._working(origin) as served:
            engine = served.engine
            rows = engine.empty(1, _num_floats(served.job, ids, offsets))
            given = (origin.step, self._oldest_open(served, origin, oldest_open)) if train else (0, 0)
            made = engine.lookup(ids, offsets, *given, train, rows, train and ticket != 0)
            if made is not None:
                self._keep(served, origin.trainer, ticket, _Kept(made, ids, offsets))
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
            gradients = _plain(served.engine, offsets if kept is None else kept.offsets, gradients, coded)
            if kept is None and len(gradients) != _num_floats(served.job, ids, offsets):
                raise InputError(f"update: {len(gradients)} gradients of {len(ids)} ids; wanted their rows' floats")
            if together == 0:
                used = served.engine.prepare(ids, offsets) if kept is None else kept.ticket
                served.engine.update(used, gradients, origin.step, lrs, origin.trainer)
                return None
            if kept is not None:
                served.engine.drop(kept.ticket)
                ids, offsets = kept.ids, kept.offsets
            return self._meet(served, origin, Part(ids, offsets, gradients), lrs, together)

    def _meet(
        self, served: _Served, origin: Origin, part: Part, lrs: list[float], together: int
    ) -> "Future[None] | None":
        """Notes a trainer's part of a step; whoever brings the last one applies all, as trainer 0's."""
        with self._changed:
            if served.engine.finished(0, origin.step):
                return None  # its answer was lost
            own, parts, waiting = served.meeting.arrive(origin.step, origin.trainer, part, together)
        if parts is None:
            return own
        try:
            whole = joined(parts, [table.dim for table in served.job.tables])
            ticket = served.engine.prepare(whole.ids, whole.offsets)
            served.engine.update(ticket, whole.gradients, origin.step, lrs, 0)
            served.engine.finish(0, origin.step)
        except Exception as error:
            for each in waiting:
                each.set_exception(error)
        else:
            for each in waiting:
                each.set_result(None)
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
        with self._working(origin) as served:
            found = served.store(table).read(ids)
            return found.values.reshape(-1), found.state.reshape(-1), found.present

    def stats(self, origin: Origin, table: int) -> dict[str, int]:
        """See ServerCalls."""
        with self._working(origin) as served:
            return served.store(table).stats()

    def version(self, origin: Origin, table: int) -> int:
        """See ServerCalls."""
        with self._working(origin) as served:
            return served.store(table).version

    def save(self, origin: Origin, table: int, folder: str, since: int | None) -> int:
        """See ServerCalls."""
        with self._working(origin) as served:
            store = served.store(table)
            assert served.bucket_map is not None
            part = Path(folder) / part_name(served.number, served.bucket_map.num_servers)
            last = served.saved.get(table)
            if last is not None and last[:3] == (folder, since, origin.step):
                return last[3]  # it came again
            version = store.save(part) if since is None else store.save_changes(part, since=since)
            served.saved[table] = folder, since, origin.step, version
            return version

    def verify(self, origin: Origin, folders: list[list[str]]) -> None:
        """See ServerCalls."""
        with self._working(origin) as served:
            served.tables.verify(dict(zip(served.tables, folders, strict=False)))

    def restore(self, origin: Origin, folders: list[list[str]]) -> bool:
        """See ServerCalls. The old rows go before the new ones come: memory may not hold both."""
        with self._changed:
            served = self._ready()
            if origin.attempt == served.engine.attempt and served.restored is not None:
                return served.restored  # it came again
            if origin.attempt == served.engine.attempt:
                raise AttemptError(
                    f"this server was started again while a restore began attempt {origin.attempt}, or after that: "
                    "what it holds is not known to be the checkpoint; resume it again"
                )
            if origin.attempt <= served.engine.attempt:
                raise self._other_attempt(served, origin)
            self._wait_for_calls()
            names = list(served.tables)
            if len(folders) not in (0, len(names)):
                raise InputError(f"restore: folders of {len(folders)} tables; wanted of {len(names)}, or none")
            chains = dict(zip(names, folders, strict=False))
            made = self._anew(served, origin)
            made.engine.begin_attempt(origin.attempt)
            made.restored = True
            if chains:
                made.restored = self._fill(made, chains)
            self._served = made
            return made.restored

    def _fill(self, made: _Served, chains: dict[str, list[str]]) -> bool:
        """What this server owns of them. If that fails, nothing is left of it: the next hello makes a new one."""
        assert made.bucket_map is not None
        owned = [np.array(table) == made.number for table in made.bucket_map.owners]
        try:
            return made.tables.restore(chains, owned)
        except BaseException:
            if self._shared is not None:
                Path(self._shared).unlink(missing_ok=True)
            raise

    def set_lr(self, origin: Origin, table: int, lr: float) -> None:
        """See ServerCalls."""
        with self._working(origin) as served:
            served.store(table).set_lr(lr)

    def check(self, origin: Origin, table: int) -> None:
        """See ServerCalls."""
        with self._working(origin) as served:
            served.store(table).check()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _ready(self) -> _Served:
        if self._served is None or self._served.bucket_map is None:
            raise NotReadyError("this server has no job yet, or was restarted: say hello to it first")
        return self._served

    def _empty(self, job: Job, number: int, num_servers: int) -> _Served:
        places = open_engine(
            job.tables,
            seed=job.seed,
            num_threads=self._num_threads,
            simd=self._simd,
            shared=self._shared,
            note={"server": number, "num_servers": num_servers},
        )
        return _Served(job, Tables.in_engine(places), places[0].engine, number, num_servers)

    def _anew(self, old: _Served, origin: Origin) -> _Served:
        """The same with empty tables; until it is there, there are none."""
        job, owners, number, num_servers = old.job, old.bucket_map, old.number, old.num_servers
        self._served = None
        self._let_go(old, origin)
        del old.tables, old.engine  # and with them the rows
        if self._shared is not None:
            Path(self._shared).unlink(missing_ok=True)
        made = self._empty(job, number, num_servers)
        made.bucket_map = owners
        return made

    def _let_go(self, served: _Served, origin: Origin) -> None:
        """Of what the attempt before left open."""
        served.tickets.clear()
        served.oldest_open.clear()
        served.meeting.refuse(lambda: AttemptError(f"attempt {origin.attempt} has begun: this process was replaced"))

    def _oldest_open(self, served: _Served, origin: Origin, given: int) -> int:
        with self._changed:
            served.oldest_open[origin.trainer] = given
            return min(origin.step, *served.oldest_open.values())

    def _wait_for_calls(self) -> None:
        """Until none works on rows; the lock is held, so none begins."""
        while self._running:
            self._changed.wait()

    def _agree(self, served: _Served, job: Job, owners: BucketMap, server: int) -> None:
        differences = job.differences(served.job)
        here, there = (server, owners.num_servers), (served.number, served.num_servers)
        if here != there:
            differences.append(f"server: number {here[0]} of {here[1]} here, {there[0]} of {there[1]} there")
        elif served.bucket_map is not None and served.bucket_map.version == owners.version:
            differences += [] if served.bucket_map == owners else [f"bucket map {owners.version}: other owners"]
        if differences:
            raise ConfigError(f"the server belongs to another job: {'; '.join(differences)}")

    @contextmanager
    def _working(self, origin: Origin) -> Iterator[_Served]:
        """Around a call that works on rows: of this attempt and map, and none while an attempt begins."""
        with self._changed:
            served = self._ready()
            self._require(served, origin)
            self._running += 1
        try:
            yield served
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _require(self, served: _Served, origin: Origin) -> None:
        """Raises unless the call is of this attempt and bucket map."""
        if origin.attempt != served.engine.attempt:
            raise self._other_attempt(served, origin)
        assert served.bucket_map is not None
        if origin.map_version != served.bucket_map.version:
            raise NotReadyError(
                f"the call is of bucket map {origin.map_version} and the server at {served.bucket_map.version}"
            )

    def _other_attempt(self, served: _Served, origin: Origin) -> AttemptError:
        return AttemptError(
            f"the call is of attempt {origin.attempt} and the server at {served.engine.attempt}: "
            + ("this process was replaced" if origin.attempt < served.engine.attempt else "that one has not begun here")
        )

    def _keep(self, served: _Served, trainer: int, number: int, kept: _Kept) -> None:
        with self._changed:
            tickets = served.tickets.setdefault(trainer, OrderedDict())
            left = [tickets.pop(number)] if number in tickets else []
            tickets[number] = kept
            if len(tickets) > MOST_TICKETS:
                left.append(tickets.popitem(last=False)[1])
        for each in left:
            served.engine.drop(each.ticket)

    def _take(self, served: _Served, trainer: int, number: int) -> _Kept:
        with self._changed:
            kept = served.tickets.get(trainer, OrderedDict()).pop(number, None)
        if kept is None:
            raise TicketError(f"trainer {trainer} has no ticket {number} here: send the ids")
        return kept


def _plain(engine: Engine, offsets: Offsets, gradients: Floats | None, coded: Coded | None) -> Floats:
    """The gradients, in whichever form they came."""
    if coded is not None and gradients is None:
        return np.asarray(engine.decode_rows(offsets, coded))
    if coded is not None or gradients is None:
        raise InputError("update: gradients came in both forms or in none; wanted one of the two")
    return gradients


def _num_floats(job: Job, ids: Ids, offsets: Offsets) -> int:
    """Of the ids' rows; refuses offsets that do not cut them by table."""
    if (
        len(offsets) != len(job.tables) + 1
        or offsets[0] != 0
        or offsets[-1] != len(ids)
        or (np.diff(offsets) < 0).any()
    ):
        raise InputError(
            f"{len(ids)} ids come with {len(offsets)} offsets; wanted {len(job.tables) + 1}, from 0 to their number"
        )
    counts = np.diff(offsets)
    return sum(int(count) * table.dim for count, table in zip(counts, job.tables, strict=True))
