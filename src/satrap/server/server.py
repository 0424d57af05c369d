"""The server: owns some buckets of every table and answers the calls of workers. Does not need torch or know sockets.

The first handshake assigns it to a job, unless it recovers the job from the shared-memory file of a killed predecessor.
It keeps a lookup's native ticket under the number that the worker chose, so that the update needs neither to send the
ids nor to search for them again. If the ticket is missing (the server was restarted, or had too many), the update fails
with TicketError and the worker sends the ids. The windows of each bucket record which steps were applied
(core/table/applied_steps.hpp): a duplicate of an update, before or after a restart, has no effect.
"""

import mmap
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from satrap.config.cores import thread_count
from satrap.config.job import Job
from satrap.config.location import local_path
from satrap.config.path_allowlist import PathAllowlist
from satrap.config.validation import LAST_STEP, check_choice, check_integer
from satrap.errors import AttemptError, ConfigError, InputError, MovedError, SatrapError, TicketError
from satrap.rpc import Origin
from satrap.rpc.release import RELEASE
from satrap.server.call_fence import CallFence
from satrap.server.lease import Leases
from satrap.server.migration.calls import MigrationCalls
from satrap.server.protocol import NO_ATTEMPT, WIRES, Coded, Flags, Floats, Ids, Offsets
from satrap.server.row_calls import RowCalls
from satrap.server.save_calls import SaveCalls, require_permitted
from satrap.server.server_log import ServerLog
from satrap.server.state import PendingLookup, ServerState, decode_gradients
from satrap.server.status import server_status
from satrap.server.step_barrier import TrainerPart, concatenate_parts
from satrap.sharding.shard_map import ShardMap
from satrap.table.engine import Slot, attach_engine, open_engine, remove_unfinished, shared_note
from satrap.table.table_group import Chains, TableGroup, transfers_of
from satrap.transfer import Transfers

MAX_TICKETS = 1024
"""Tickets kept for one trainer. Beyond that the oldest is dropped; the worker then sends the ids with the update."""


class Server:
    """Implements `satrap.server.protocol.ServerCalls` on one engine."""

    def __init__(
        self,
        *,
        shared: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
        checkpoints: Iterable[str | os.PathLike[str]] = (),
        open_tables: Callable[[Job], list[Slot]] | None = None,
    ) -> None:
        """shared: the shared-memory file of the rows. An existing file is attached, with its rows and job; otherwise it
            is created when the job is known.
        checkpoints: folders below which the server may read and write checkpoints.
        open_tables: creates the tables of a job; None: in the memory of this process, or in `shared`."""
        thread_count(num_threads)
        self._open_tables = open_tables
        self._permitted = PathAllowlist(checkpoints, "--checkpoints")
        shared = None if shared is None else local_path(shared, "shared")
        self._shared, self._num_threads = shared, num_threads
        self._leases, self._fence = Leases(), CallFence()
        self._log = ServerLog(self._fence)
        self._restoring: ServerState | None = None  # the new tables while a restore fills them
        self.leaves = False
        """Whether this server was asked to stop, and moves its buckets to other servers first."""
        saves = SaveCalls(self._fence, self._permitted)
        self.versions, self.require_permitted = saves.versions, saves.require_permitted
        self.take_cut, self.write_cut, self.release_cut = saves.take_cut, saves.write_cut, saves.release_cut
        rows = RowCalls(self._fence)
        self.write, self.rows_with, self.bucket_ids = rows.write, rows.rows_with, rows.bucket_ids
        moves = MigrationCalls(self._fence, self._log, shared)
        self.take_fencing_token, self.freeze, self.load = moves.take_fencing_token, moves.freeze, moves.load
        self.export_rows, self.export_metadata = moves.export_rows, moves.export_metadata
        self.expect_buckets, self.install_map = moves.expect_buckets, moves.install_map
        self.import_rows, self.import_metadata = moves.import_rows, moves.import_metadata
        self.discard_buckets = moves.discard_buckets
        # A file that is incomplete or has no shard map is left from a kill during hello or restore, which is retried.
        if shared is not None and os.path.exists(shared) and not remove_unfinished(shared):
            note = shared_note(shared)
            if note.keys() != {"server", "num_servers"}:
                raise ConfigError(
                    f"shared-memory file {os.fspath(shared)!r} does not belong to a server; expected one that `satrap "
                    "server` created"
                )
            slots = attach_engine(shared, num_threads=num_threads)
            job = Job(tables=tuple(slot.table for slot in slots), seed=slots[0].seed)
            self._fence.state, self._fence.fencing_token = ServerState.recover(
                job, TableGroup.in_engine(slots), slots[0].engine
            )
            if self._fence.state is None:
                self._remove_rows()
        elif shared is not None:
            _require_creatable(os.fspath(shared))
        self._log.record_start(shared)

    def hello(
        self, origin: Origin, job: dict[str, Any], shard_map: dict[str, Any], server: int, commit: bool
    ) -> dict[str, Any]:
        try:
            return self._hello(origin, job, shard_map, server, commit)
        except MovedError:
            raise  # the caller takes the newer map, and calls again
        except SatrapError as error:
            self._log.record_refusal(origin, error)
            raise

    def _hello(
        self, origin: Origin, job: dict[str, Any], shard_map: dict[str, Any], server: int, commit: bool
    ) -> dict[str, Any]:
        own_job, new_map = Job.from_dict(job), ShardMap.from_dict(shard_map)
        server = check_integer("hello", "server", server, 0, len(new_map.addresses) - 1)
        owners = new_map.bucket_map.owners
        num_buckets, expected = [len(table) for table in owners], [t.resolved_num_buckets for t in own_job.tables]
        if num_buckets != expected:
            raise ConfigError(
                f"hello: the bucket map has {num_buckets} buckets; expected those of the tables, {expected}"
            )
        with self._fence.condition:
            if by_coordinator := origin.step > 0:
                self._fence.require_fencing_token(origin)
            if self._fence.state is None:
                if not commit:
                    lrs = [table.optimizer.lr for table in own_job.tables]
                    return {"attempt": NO_ATTEMPT, "latest_step": 0, "lrs": lrs, "leases": self._leases.remaining()}
                self._fence.state = self._create_tables(own_job, new_map, server)
                self._log.record_job(self._fence.state)
            state = self._fence.state
            self._require_same_job(state, own_job, new_map, server, by_coordinator)
            if commit:
                known = state.shard_map
                if known.version != new_map.version or (by_coordinator and known != new_map):
                    state.adopt(new_map, server, self._fence.fencing_token)
                state.has_handshake = True
        return {
            "attempt": state.engine.attempt,
            "latest_step": state.engine.latest_step,
            "lrs": [table.lr for table in state.tables.values()],
            "leases": self._leases.remaining(),
        }

    def get_shard_map(self, origin: Origin, than: int) -> dict[str, Any]:
        with self._fence.condition:
            state = self._fence.state
            if state is None:
                return {"version": 0, "fencing_token": self._fence.fencing_token.number, "release": RELEASE}
            state.participant.thaw_if_abandoned(time.monotonic())
            version, token = state.shard_map.version, self._fence.fencing_token.number
            answer: dict[str, Any] = {"version": version, "has_handshake": state.has_handshake, "fencing_token": token}
            answer["release"] = RELEASE
            if state.shard_map.version > than:
                answer |= {
                    "shard_map": state.shard_map.to_dict(),
                    "job": state.job.to_dict(),
                    "state": state.progress(),
                }
            return answer

    def renew_lease(self, origin: Origin, process: str, where: str, seconds: float) -> None:
        self._leases.renew(origin.attempt, process, where, seconds)

    def begin_attempt(self, origin: Origin) -> None:
        with self._fence.exclusive():
            state = self._fence.require_state()
            if origin.attempt == state.engine.attempt:
                return
            if origin.attempt < state.engine.attempt:
                raise self._fence.attempt_error(state, origin)
            self._discard_calls(state, origin)
            state.drop_cut()
            state.restored = state.verified = None
            self._log.record_attempt(state, origin.attempt)
            state.engine.begin_attempt(origin.attempt)

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
        if train:  # the core would take the next step for 0
            check_integer("lookup", "step", origin.step, 1, LAST_STEP)
            check_integer("lookup", "oldest_open", oldest_open, 1, LAST_STEP)  # the last: none is open
        with self._fence.admit(origin, reads=not train) as state:
            engine = state.engine
            rows = engine.empty(1, engine.num_floats(offsets, len(ids)))
            steps = (origin.step, self._oldest_open(state, origin, oldest_open)) if train else (0, 0)
            others = state.updates_of_others(origin.trainer)
            native_ticket = state.rows.lookup(ids, offsets, *steps, train, rows, train and ticket != 0, first_epoch)
            if native_ticket is not None:
                self._keep_ticket(state, origin.trainer, ticket, PendingLookup(native_ticket, ids, offsets, others))
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
        barrier_size: int,
        coded: Coded | None = None,
    ) -> "Future[None] | None":
        with self._fence.admit(origin) as state:
            if ticket != 0 and len(ids):
                raise InputError(f"update: expected a ticket or ids, found ticket {ticket} and {len(ids)} ids")
            kept = None if ticket == 0 else self._take_ticket(state, origin.trainer, ticket)
            gradients = decode_gradients(state.engine, offsets if kept is None else kept.offsets, gradients, coded)
            if kept is None and len(gradients) != state.engine.num_floats(offsets, len(ids)):
                raise InputError(f"update: {len(gradients)} gradients of {len(ids)} ids; expected their rows' floats")
            if barrier_size == 0:
                used = state.rows.prepare(ids, offsets) if kept is None else kept.ticket
                state.engine.update(used, gradients, origin.step, lrs, origin.trainer)
                self._count_update(state, origin.trainer, kept)
                return None
            if kept is not None:
                state.engine.drop(kept.ticket)
                ids, offsets = kept.ids, kept.offsets
            return self._join_barrier(state, origin, TrainerPart(ids, offsets, gradients, lrs), barrier_size)

    def _count_update(self, state: ServerState, trainer: int, kept: PendingLookup | None) -> None:
        """kept: its lookup; None: the ticket was lost, or the update is a duplicate."""
        with self._fence.condition:
            if kept is not None:
                state.missed[state.updates_of_others(trainer) - kept.others] += 1
            state.updates[trainer] += 1

    def _join_barrier(
        self, state: ServerState, origin: Origin, part: TrainerPart, barrier_size: int
    ) -> "Future[None] | None":
        """Add a trainer's part of a step. The call that completes the step applies it, as an update of trainer 0."""
        with self._fence.condition:
            if state.engine.finished(0, origin.step) or state.owns_nothing:
                return None  # a retry whose first answer was lost
            future, parts = state.barrier.arrive(origin.step, origin.trainer, part, barrier_size)
        if parts is None:
            return future
        error: Exception | None = None
        try:
            step_part = concatenate_parts(parts, [table.dim for table in state.job.tables])
            ticket = state.rows.prepare(step_part.ids, step_part.offsets)
            state.engine.update(ticket, step_part.gradients, origin.step, step_part.lrs, 0)
            state.engine.finish(0, origin.step)
        except Exception as failed:
            error = failed
        with self._fence.condition:
            waiting = state.barrier.leave(origin.step)
        for reply in waiting:
            if error is None:
                reply.set_result(None)
            else:
                reply.set_exception(error)
        return future

    def drop(self, origin: Origin, tickets: list[int]) -> None:
        with self._fence.admit(origin) as state:
            for ticket in tickets:
                with self._fence.condition:
                    pending = state.tickets.get(origin.trainer, OrderedDict()).pop(ticket, None)
                if pending is not None:
                    state.engine.drop(pending.ticket)

    def read(self, origin: Origin, table: int, ids: Ids) -> tuple[Floats, Floats, Flags]:
        with self._fence.admit(origin, reads=True) as state:
            stored = state.store(table).read(ids)
            return stored.values.reshape(-1), stored.state.reshape(-1), stored.present

    def stats(self, origin: Origin, table: int) -> dict[str, int]:
        with self._fence.admit(origin, reads=True) as state:
            return state.store(table).stats()

    def version(self, origin: Origin, table: int) -> int:
        with self._fence.admit(origin, reads=True) as state:
            return state.store(table).version

    def verify(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> None:
        self._require_all_permitted(folders)
        with self._fence.admit(origin) as state:
            self._require_all_tables(state, folders)
            state.verify(folders, checksums)

    def restore(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> bool:
        """Drop the old rows before inserting the new ones, because memory may not hold both.

        A restore belongs to a shard map: if the map changes meanwhile, the caller repeats it, in the same attempt."""
        self._require_all_permitted(folders)
        with self._fence.exclusive():
            state = self._fence.require_state()
            self._fence.require_map(state, origin)
            is_started = state.restored is not None or state.owns_nothing  # by this restore, maybe under another map
            is_repeat = origin.attempt == state.engine.attempt and is_started
            if is_repeat and state.restored is not None and state.restored[0] == origin.map_version:
                return state.restored[1]  # a duplicate
            if not is_repeat and origin.attempt == state.engine.attempt:
                raise AttemptError(
                    f"this server was restarted during or after a restore that started attempt {origin.attempt}, so "
                    "its rows may differ from the checkpoint; resume the checkpoint again"
                )
            if origin.attempt < state.engine.attempt:
                raise self._fence.attempt_error(state, origin)
            if folders:
                self._require_all_tables(state, folders)
            chains = state.take_verified(folders, checksums) if folders else None
            self._log.record_attempt(state, origin.attempt, ", to restore rows" if chains else ", with empty tables")
            new_state = self._recreate_tables(state, origin)
            new_state.engine.begin_attempt(origin.attempt)
            answer = self._fill_tables(new_state, chains) if chains else True
            new_state.restored = origin.map_version, answer
            new_state.restore_folders = tuple(chain[-1] for chain in folders)
            self._fence.state = new_state
            return answer

    def _fill_tables(self, state: ServerState, chains: Chains) -> bool:
        """Insert this server's rows. On failure all rows are removed, and the next handshake creates new tables."""
        self._restoring = state
        try:
            return state.tables.fill(chains)
        except BaseException:
            self._remove_rows()
            raise
        finally:
            self._restoring = None

    def set_lr(self, origin: Origin, table: int, lr: float) -> None:
        with self._fence.admit(origin) as state:
            state.store(table).set_lr(lr)

    def check(self, origin: Origin, table: int) -> None:
        with self._fence.admit(origin, reads=True) as state:
            state.store(table).check()

    def progress(self, origin: Origin) -> dict[str, int]:
        state = self._restoring or self._fence.state
        tables: TableGroup | None = getattr(state, "tables", None)  # a restore may just have removed them
        return (Transfers() if tables is None else transfers_of(tables)).running()

    def status(self, origin: Origin) -> dict[str, Any]:
        restoring = self._restoring
        return server_status(
            restoring or self._fence.state,
            is_restoring=restoring is not None,
            leaves=self.leaves,
            leases=self._leases.remaining(),
            shared=self._shared,
        )

    # -- internals ---------------------------------------------------------------------------------------------------

    def _require_all_permitted(self, folders: list[list[str]]) -> None:
        for chain in folders:
            for folder in chain:
                require_permitted(self._permitted, folder)

    def _require_all_tables(self, state: ServerState, folders: list[list[str]]) -> None:
        if len(folders) != len(state.tables):
            raise InputError(f"found folders of {len(folders)} tables; expected those of all {len(state.tables)}")

    def _create_tables(self, job: Job, shard_map: ShardMap, number: int) -> ServerState:
        if self._open_tables is not None:
            slots = self._open_tables(job)
        else:
            note = {"server": number, "num_servers": len(shard_map.addresses)}
            slots = open_engine(
                job.tables, seed=job.seed, num_threads=self._num_threads, shared=self._shared, note=note
            )
        state = ServerState(job, TableGroup.in_engine(slots), slots[0].engine, slots[0].rows, shard_map, number)
        try:
            state.adopt(shard_map, number, self._fence.fencing_token)
        except BaseException:
            self._remove_rows()
            raise
        return state

    def _recreate_tables(self, old: ServerState, origin: Origin) -> ServerState:
        """Replace the tables by empty ones; meanwhile there are none."""
        job, shard_map, number = old.job, old.shard_map, old.number
        self._fence.state = None
        self._discard_calls(old, origin)
        old.drop_cut()
        del old.tables, old.engine, old.rows, old.participant
        self._remove_rows()
        new_state = self._create_tables(job, shard_map, number)
        new_state.has_handshake = True
        return new_state

    def _remove_rows(self) -> None:
        """Remove the shared-memory file of an engine that was released."""
        if self._shared is not None:
            Path(self._shared).unlink(missing_ok=True)

    def _discard_calls(self, state: ServerState, origin: Origin) -> None:
        """Drop the tickets, open steps and waiting parts of the previous attempt."""
        state.tickets.clear()
        state.oldest_open.clear()
        state.staleness.clear()
        state.barrier.refuse(lambda: AttemptError(f"attempt {origin.attempt} has started: this process was replaced"))

    def _oldest_open(self, state: ServerState, origin: Origin, given: int) -> int:
        with self._fence.condition:
            state.oldest_open[origin.trainer] = given
            state.staleness[origin.trainer] = max(origin.step - given, 0)
            return min(origin.step, *state.oldest_open.values())

    def _require_same_job(
        self, state: ServerState, job: Job, shard_map: ShardMap, server: int, by_coordinator: bool
    ) -> None:
        """Raise unless hello reached the right server and names its shard map. A coordinator may replace the other
        servers in the map of one that owns nothing."""
        differences, known = job.differences(state.job), state.shard_map
        idle = state.owns_nothing and server not in shard_map.bucket_map.flat()
        same_map = known.version == shard_map.version
        must_agree = same_map and not (idle and by_coordinator)
        here, there = (server, len(shard_map.addresses)), (state.number, len(known.addresses))
        if must_agree and here != there:
            differences.append(f"server: number {here[0]} of {here[1]} here, {there[0]} of {there[1]} there")
        elif must_agree and known.bucket_map != shard_map.bucket_map:
            differences.append(f"bucket map {shard_map.version}: different owners")
        if differences:
            raise ConfigError(
                f"the server belongs to another job: {'; '.join(differences)}; name the servers of this job, in order, "
                "or restart this server without the rows of the other job"
            )
        if known.version > shard_map.version:
            raise MovedError(
                f"hello: found bucket map {shard_map.version}; expected the server's, {known.version}: take that map "
                "and call again"
            )
        if not same_map and not idle:
            raise MovedError(
                f"hello: found bucket map {shard_map.version}; the server has not changed to it yet: call again"
            )

    def _keep_ticket(self, state: ServerState, trainer: int, number: int, kept: PendingLookup) -> None:
        with self._fence.condition:
            tickets = state.tickets.setdefault(trainer, OrderedDict())
            left = [tickets.pop(number)] if number in tickets else []
            tickets[number] = kept
            if len(tickets) > MAX_TICKETS:
                left.append(tickets.popitem(last=False)[1])
        for lookup in left:
            state.engine.drop(lookup.ticket)

    def _take_ticket(self, state: ServerState, trainer: int, number: int) -> PendingLookup:
        with self._fence.condition:
            kept = state.tickets.get(trainer, OrderedDict()).pop(number, None)
        if kept is None:
            raise TicketError(f"trainer {trainer} has no ticket {number} here: send the ids")
        return kept


def _require_creatable(path: str) -> None:
    """Raise ConfigError unless a shared-memory file can be created at the path, in whose folder one is created now."""
    try:
        if not path:
            raise ValueError("the path is empty")
        with suppress(FileNotFoundError):
            os.lstat(path)  # raises if the name is too long
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.abspath(path))) as file:
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"shared is {path!r}, and no shared-memory file can be created there: "
            f"{getattr(error, 'strerror', error)}; expected a file in a writable folder, such as /dev/shm/rows"
        ) from None
