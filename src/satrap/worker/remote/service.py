"""The worker's process: reads batches for its trainers, looks them up and updates them. Needs no torch, knows no
sockets.

It has no configuration, and no state that a trainer could not send again: a trainer makes a handshake, opens streams
and requests batches by number. Each trainer's session has a `Worker`, which calls the servers in the trainer's
name, so the windows of the rows' buckets record what was applied, whatever happens here. A batch whose ticket was lost
with an earlier process is read again, and its update sends the ids.
"""

import logging
import math
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from satrap.config.cores import thread_count
from satrap.config.path_allowlist import PathAllowlist
from satrap.data.inputs import Inputs
from satrap.data.registry import restrict, source_from_dict
from satrap.errors import AttemptError, ConfigError, InputError, NotReadyError, SatrapError
from satrap.event_log import LimitedLog, describe_process, event
from satrap.monitor.memory import memory
from satrap.monitor.samples import Sample, memory_samples
from satrap.rpc import Keys, Origin
from satrap.rpc.release import RELEASE
from satrap.worker.remote.batch_reader import BatchReader, HeldBatch, ReadStart
from satrap.worker.remote.protocol import Bytes, Flags, Floats, Ids, PooledCodec, as_one, columns_as_bytes, split_one
from satrap.worker.remote.worker_spec import WorkerSpec
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import ShardedRows
from satrap.worker.sharded_tables import ShardedTables
from satrap.worker.worker import IdGradients, Worker

_LOG = logging.getLogger("satrap.worker")
_READ_SECONDS = 10.0  # after which a trainer that waits for a batch is answered that there is none yet
_CALLS = 8  # concurrent calls of one trainer: two streams, each with one read and two calls to its tables, and its own
_R = TypeVar("_R")


@dataclass(slots=True, eq=False)
class _TrainerSession:
    """One trainer in the current attempt."""

    worker: Worker
    rows: ShardedRows
    codec: PooledCodec
    readers: dict[int, BatchReader] = field(default_factory=dict)
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_CALLS, thread_name_prefix="satrap-trainer")
    )
    open_lock: threading.Lock = field(default_factory=threading.Lock)

    def reader(self, stream: int) -> BatchReader:
        reader = self.readers.get(stream)
        if reader is None:
            raise NotReadyError(f"stream {stream} is not open here: the worker was restarted, or the stream was closed")
        return reader

    def run(self, work: Callable[[], _R]) -> "Future[_R]":
        """Run in a thread of this session: some calls wait for other trainers, and must not block theirs."""
        try:
            return self.executor.submit(work)
        except RuntimeError:  # the session was closed meanwhile
            raise NotReadyError("the trainer's session was replaced here during the call: call hello first") from None

    def close(self, *, wait: bool) -> None:
        """End the session. Calls that wait for a server fail."""
        self.worker.close()
        for reader in list(self.readers.values()):
            self.executor.submit(reader.close)
        self.executor.shutdown(wait=wait)


class WorkerService:
    """Implements `satrap.worker.remote.protocol.WorkerCalls`. Calls that may take long return a Future."""

    def __init__(
        self, *, keys: Keys | None = None, num_threads: int | None = None, data: Iterable[str | os.PathLike[str]] = ()
    ) -> None:
        """keys: the client's, for the servers. num_threads: of a call. data: folders and URLs below which the worker
        may read."""
        thread_count(num_threads)
        self._permitted = PathAllowlist(data, "--data")
        self._keys, self._num_threads = keys, num_threads
        self._attempt = self._latest_step = 0
        self._log_refusal = LimitedLog(_LOG.warning)
        self._spec: WorkerSpec | None = None
        self._sessions: dict[int, _TrainerSession] = {}
        self._lock = threading.Lock()
        self._handshake_lock = threading.Lock()  # held during a whole handshake, which calls the servers

    def close(self) -> None:
        """End all sessions, and return once their threads have stopped."""
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.close(wait=True)

    def hello(self, origin: Origin, assignment: dict[str, Any], frozen: Ids) -> None:
        try:
            self._hello(origin, assignment, frozen)
        except SatrapError as error:
            refused = event("hello_refused", trainer=origin.trainer, attempt=origin.attempt, why=str(error))
            self._log_refusal("hello refused: %s", error, extra=refused)
            raise

    def _hello(self, origin: Origin, assignment: dict[str, Any], frozen: Ids) -> None:
        spec = WorkerSpec.from_dict(assignment).with_frozen_ids(frozen)
        with self._handshake_lock:
            with self._lock:
                self._require_same_job(origin, spec)
                if origin.attempt == self._attempt and origin.trainer in self._sessions:
                    return
            servers = ServerGroup(
                spec.job,
                spec.servers,
                trainer=origin.trainer,
                barrier_size=spec.barrier_size,
                attempt=origin.attempt,
                keys=self._keys,
                wire=spec.wire,
                is_relay=True,
            )
            if servers.newest_attempt > origin.attempt:
                servers.close()
                raise self._replaced(origin, servers.newest_attempt)
            rows = ShardedRows(spec.features, servers, num_threads=self._num_threads)
            worker = Worker(spec.features, rows, ShardedTables(servers))
            session = _TrainerSession(worker, rows, PooledCodec(spec.features, rows.split, spec.wire))
            with self._lock:
                outdated = list(self._sessions.values()) if origin.attempt != self._attempt else []
                self._log_session(origin, spec)
                self._sessions = ({} if outdated else self._sessions) | {origin.trainer: session}
                self._attempt, self._spec = origin.attempt, spec
        for old in outdated:
            old.close(wait=False)

    def _log_session(self, origin: Origin, spec: WorkerSpec) -> None:
        """Log the trainer's session, and before it the job or the attempt if it is new."""
        job = spec.job.fingerprint
        own = weakref.ref(self)
        describe_process("worker", job=job, step=lambda: None if (me := own()) is None else me._latest_step)
        if self._spec is None:
            servers = len(spec.servers)
            got = event("job", tables=len(spec.job.tables), servers=servers)
            _LOG.info("job: %d tables on %d servers", len(spec.job.tables), servers, extra=got)
        if origin.attempt != self._attempt:
            started = event("attempt", attempt=origin.attempt, previous=self._attempt)
            _LOG.info("attempt %d replaces attempt %d", origin.attempt, self._attempt, extra=started)
        began = event("session", trainer=origin.trainer, attempt=origin.attempt)
        _LOG.info("trainer %d has a session in attempt %d", origin.trainer, origin.attempt, extra=began)

    def _require_same_job(self, origin: Origin, spec: WorkerSpec) -> None:
        """Raise unless the trainer's job is this worker's. A new attempt may bring other features, servers and
        trainers. An older attempt is refused, unless its servers know no newer one: then they were started empty."""
        if self._spec is None:
            return
        if origin.attempt < self._attempt and spec.servers != self._spec.servers:
            raise self._replaced(origin, self._attempt)
        differences = spec.job.differences(self._spec.job)
        if origin.attempt == self._attempt:
            differences += spec.differences(self._spec)
        if differences:
            raise ConfigError(
                f"the worker belongs to another job: {'; '.join(differences)}; name a worker of this job, or "
                "restart this one"
            )

    def open(self, origin: Origin, stream: int, source: dict[str, Any], start: dict[str, Any]) -> "Future[None]":
        session = self._session(origin)

        def work() -> None:
            with session.open_lock:
                if stream not in session.readers:
                    given = restrict(source_from_dict(source), self._permitted)
                    session.readers[stream] = BatchReader(given, session.worker.features, ReadStart.from_dict(start))

        return session.run(work)

    def read(
        self, origin: Origin, stream: int, number: int, settled: int
    ) -> "Future[tuple[dict[str, Any], Floats | None, Floats | None, Bytes | None]]":
        return self._submit(origin, stream, lambda session, reader: _read(session.worker, reader, number, settled))

    def length(self, origin: Origin, stream: int) -> "Future[dict[str, Any]]":
        return self._submit(origin, stream, lambda _, reader: reader.length())

    def lookup(
        self, origin: Origin, stream: int, number: int, settled: int, oldest_open: int, train: bool
    ) -> "Future[tuple[Floats | None, Floats | None, Bytes | None, Flags, list[int]]]":
        def work(
            session: _TrainerSession, reader: BatchReader
        ) -> tuple[Floats | None, Floats | None, Bytes | None, Flags, list[int]]:
            reader.forget(settled)
            held = _require_batch(reader, number)
            with held.lock:
                inputs = held.inputs
                if inputs is None:
                    raise InputError(f"batch {number} was updated or dropped already; expected one in flight")
                step, since = (origin.step, oldest_open) if train else (None, None)
                rows = session.worker.lookup(inputs, step=step, oldest_open=since, train=train)
                if rows.ticket is not None:
                    before, held.ticket = held.ticket, rows.ticket
                    if before is not None:  # its answer was lost, and this is a retry
                        session.worker.drop(before)
            masks, sequences = as_one(list(rows.masks.values()), np.bool_), list(rows.sequences.values())
            codec = session.codec
            if not codec.is_coded:
                return rows.block.reshape(-1), as_one(sequences, np.float32), None, masks, rows.truncated
            flat, present = as_one([rows.block, *sequences], np.float32), [True] * (1 + len(sequences))
            coded = codec.encode(flat, inputs.batch_size, present, rows.offsets)[1]
            return None, None, coded, masks, rows.truncated

        return self._submit(origin, stream, work)

    def send_gradients(
        self,
        origin: Origin,
        stream: int,
        number: int,
        present: list[bool],
        gradients: Floats | None,
        coded: Bytes | None = None,
    ) -> "Future[None]":
        def work(session: _TrainerSession, reader: BatchReader) -> None:
            held = _require_batch(reader, number)
            with held.lock:
                if held.inputs is not None:
                    held.gradients = _split_gradients(session, held.inputs, present, gradients, coded)

        return self._submit(origin, stream, work)

    def update(
        self,
        origin: Origin,
        stream: int,
        numbers: list[int],
        present: list[bool],
        gradients: Floats | None,
        lrs: dict[str, float],
        scale: float,
        coded: Bytes | None = None,
        ids: Ids | None = None,
        id_counts: list[int] | None = None,
        id_gradients: Floats | None = None,
    ) -> "Future[list[int]]":
        def work(session: _TrainerSession, reader: BatchReader) -> list[int]:
            batches = [_require_batch(reader, number) for number in numbers]
            last = batches[-1]
            with ExitStack() as stack:
                for batch in batches:
                    stack.enter_context(batch.lock)
                if all(batch.inputs is None for batch in batches):
                    return last.answer  # a retry: the first answer was lost
                if last.inputs is not None:
                    last.gradients = _split_gradients(session, last.inputs, present, gradients, coded)
                of_ids = _id_gradients(session.worker, ids, id_counts, id_gradients)
                _update(session, batches, origin.step, lrs, scale, of_ids)
            self._latest_step = max(self._latest_step, origin.step)
            return last.answer

        return self._submit(origin, stream, work)

    def drop(self, origin: Origin, stream: int, number: int) -> "Future[None]":
        def work(session: _TrainerSession, reader: BatchReader) -> None:
            held = reader.held_batch(number)
            if held is None:
                return
            with held.lock:
                ticket, held.ticket, held.inputs = held.ticket, None, None
                if ticket is not None:
                    session.worker.drop(ticket)

        return self._submit(origin, stream, work)

    def close_stream(self, origin: Origin, stream: int) -> "Future[None] | None":
        session = self._session(origin)
        reader = session.readers.pop(stream, None)
        return None if reader is None else session.run(reader.close)

    def signature(self, origin: Origin, source: dict[str, Any]) -> "Future[dict[str, Any]]":
        session, given = self._session(origin), restrict(source_from_dict(source), self._permitted)
        return session.run(given.signature)

    def status(self, origin: Origin) -> dict[str, Any]:
        trainers = sorted(self._sessions)
        return {
            "where": f"process {os.getpid()} on {socket.gethostname()}",
            "release": RELEASE,
            "not_ready": "" if trainers else "no trainer has a session with this worker yet",
            "memory": memory(),
            "attempt": self._attempt,
            "trainers": trainers,
        }

    # -- internals ---------------------------------------------------------------------------------------------------

    def _session(self, origin: Origin) -> _TrainerSession:
        with self._lock:
            if origin.attempt < self._attempt:
                raise self._replaced(origin, self._attempt)
            session = self._sessions.get(origin.trainer)
            if session is None or origin.attempt > self._attempt:
                raise NotReadyError(
                    f"trainer {origin.trainer} has no session in attempt {origin.attempt}: call hello first"
                )
            return session

    def _replaced(self, origin: Origin, newer: int) -> AttemptError:
        return AttemptError(
            f"found a call of attempt {origin.attempt}; expected the worker's, {newer}: this process was replaced"
        )

    def _submit(self, origin: Origin, stream: int, work: Callable[[_TrainerSession, BatchReader], _R]) -> "Future[_R]":
        session = self._session(origin)
        return session.run(lambda: work(session, session.reader(stream)))


def worker_samples(status: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of a worker's status."""
    sessions = Sample("satrap_sessions", len(status["trainers"]))
    return [*memory_samples(status["memory"]), Sample("satrap_attempt", status["attempt"]), sessions]


def _read(
    worker: Worker, reader: BatchReader, number: int, settled: int
) -> tuple[dict[str, Any], Floats | None, Floats | None, Bytes | None]:
    reader.forget(settled)
    try:
        held = reader.batch(number, _READ_SECONDS)
    except TimeoutError:
        return {"found": "nothing"}, None, None, None
    if held is None:
        return {"found": "end", "skipped_rows": reader.skipped_rows.to_list()}, None, None, None
    inputs = held.inputs
    if inputs is None:
        raise InputError(f"batch {number} was updated or dropped already; expected one in flight")
    assert inputs.position is not None
    description = {
        "found": "batch",
        "size": inputs.batch_size,
        "labels": [] if inputs.label is None else list(inputs.label.shape[1:]),
        "position": inputs.position.to_dict(),
        "skipped_rows": held.skipped_rows.to_list(),
        "jagged": {name: np.diff(offsets).tolist() for name, offsets in worker.jagged_offsets(inputs).items()},
    }
    dense = None if inputs.dense is None else np.ascontiguousarray(inputs.dense).reshape(-1)
    label = None if inputs.label is None else np.ascontiguousarray(inputs.label).reshape(-1)
    return description, dense, label, columns_as_bytes(inputs.extra)


def _require_batch(reader: BatchReader, number: int) -> HeldBatch:
    held = reader.batch(number)
    if held is None:
        raise InputError(f"the source has no batch {number} any more: it was changed while it was read")
    return held


def _id_gradients(
    worker: Worker, ids: Ids | None, counts: list[int] | None, gradients: Floats | None
) -> IdGradients | None:
    """Return the gradients of ids that the trainer's modules have looked up, by table."""
    if ids is None or counts is None or gradients is None:
        return None
    tables = worker.features.tables
    sizes = [count * table.dim for count, table in zip(counts, tables, strict=False)]
    if len(counts) != len(tables) or min(counts) < 0 or sum(counts) != len(ids) or sum(sizes) != len(gradients):
        raise InputError(
            f"{len(ids)} ids, {counts} of each table, with {len(gradients)} numbers; expected ids of {len(tables)} "
            f"tables and {sum(sizes)} numbers"
        )
    of_table = dict(zip((table.name for table in tables), np.split(ids, np.cumsum(counts)[:-1]), strict=True))
    shapes = [(count, table.dim) for count, table in zip(counts, tables, strict=True)]
    return IdGradients(worker.id_ticket(of_table), dict(zip(of_table, split_one(gradients, shapes), strict=True)))


def _update(
    session: _TrainerSession,
    batches: list[HeldBatch],
    step: int,
    lrs: dict[str, float],
    scale: float,
    of_ids: IdGradients | None,
) -> None:
    worker = session.worker
    for batch in batches:
        if batch.inputs is None or batch.gradients is None:
            raise NotReadyError(
                "this process lacks the gradients of a batch of this step: send those of all batches again"
            )
        if batch.ticket is None:  # an earlier process looked the batch up
            batch.ticket = session.rows.reissue(worker.request(batch.inputs))
    tickets = [batch.ticket for batch in batches]
    blocks, sequences = zip(*(batch.gradients for batch in batches), strict=True)
    worker.update(tickets, blocks, sequences, of_ids=of_ids, step=step, lrs=lrs, scale=scale)
    answer = tickets[0].num_skipped
    for batch in batches:
        batch.inputs = batch.ticket = batch.gradients = None
        batch.answer = answer


def _split_gradients(
    session: _TrainerSession, inputs: Inputs, present: list[bool], gradients: Floats | None, coded: Bytes | None
) -> tuple[Floats | None, dict[str, Floats]]:
    batch_size, features = inputs.batch_size, session.worker.features
    jagged = session.worker.jagged_offsets(inputs)
    flat = session.codec.decode(gradients, coded, batch_size, present, jagged)
    shapes: dict[str, tuple[int, ...]] = {"": (batch_size, features.total_dim)}
    for name, feature in features.items():
        if feature.jagged:
            shapes[name] = int(jagged[name][-1]), feature.table.dim
        elif feature.max_length is not None:
            shapes[name] = batch_size, feature.max_length, feature.table.dim
    sent = {name: shape for (name, shape), is_sent in zip(shapes.items(), present, strict=False) if is_sent}
    if len(present) != len(shapes) or sum(map(math.prod, sent.values())) != len(flat):
        raise InputError(f"gradients of {len(flat)} numbers in {len(present)} parts; expected {len(shapes)} parts")
    split = dict(zip(sent, split_one(flat, list(sent.values())), strict=True))
    return split.pop("", None), split
