"""The table work of a stream: reads batches, looks them up and applies updates, in the order that its ledger allows.

The `BatchLedger` decides what may be done; `PrefetchPipeline` does it, either in the caller's thread, inside next() and
submit() (`overlap=False`: no core is idle while the dense network runs, so threads would gain nothing), or in its own
threads: one reads, one does all table work, updates first. With remote rows, and if the order allows it
(`BatchLedger.allows_overlap`), lookups and updates have a thread each, so that rows arrive while gradients are sent.
The ledger bounds what is in flight: at most staleness + 1 steps are open, and as many batches wait for their lookup.

A user who requests a batch while only the user's own step can open the gate reads ahead: next() returns the batch
without its rows, and the batch is looked up as soon as the gate allows, in a thread or in look_up().

An exception in any stage is kept with a note that names the stage, stops the threads, and is raised by the user's next
call. Of several exceptions the first is raised, then that of an update. After it was raised, `finish` still applies the
submitted updates.

An interrupt (what the handler of a signal raises, such as KeyboardInterrupt; it reaches only the user's thread) is not
such an error: the user's next call resumes where the interrupt came. The ledger changes inside `Uninterrupted`; an
interrupted lookup or update in the user's thread is retried, which is idempotent. Only an interrupted source cannot
continue, since a generator has then ended.

The pipeline uses neither tables nor torch: a `TableWork` looks up batches, and each update applies itself.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Protocol

from satrap.data.inputs import Inputs
from satrap.errors import ForkError, NonFiniteError, SatrapError, SourceError, StreamError
from satrap.interrupts import SLICE_SECONDS, Uninterrupted
from satrap.train.ledger import Action, BatchLedger, Event, Record, Stage, State, Update

_INTERRUPTED = (
    "this stream was interrupted while its source read a batch, and an interrupted source cannot continue: start "
    "another stream with embeddings.stream(...)"
)
_CLOSE_SECONDS = 10.0  # a reader that takes longer is reported, and ends with the process
_CLOSED = "this stream was closed: start another one with embeddings.stream(...)"
_NOT_FINITE = (
    "usual causes are a learning rate that is too large, and large dense values, which reach the model as they are: "
    "see whether the loss is finite, read large amounts with DenseColumn(log1p=True), and make ids features"
)
_READ, _TABLES = (Stage.READ,), (Stage.UPDATE, Stage.LOOKUP)


class TableWork(Protocol[Record]):
    """What a pipeline does with a batch; the caller's thread and the pipeline's threads call it."""

    resolves_ahead: bool
    """Whether `resolve` may have something to do."""

    def new(self, inputs: Inputs) -> Record:
        """Return the record of a batch that was read."""

    def resolve(self, batch: Record, step: int, oldest_open: int) -> None:
        """Do the part of a lookup that needs no row's values, in the thread that reads."""

    def read_ahead(self, batch: Record) -> None:
        """Prepare a batch that is returned before its lookup; called with the pipeline's lock."""

    def look_up(self, batch: Record, oldest_open: int) -> None:
        """Look up the rows of a batch; idempotent."""


class PrefetchPipeline(Generic[Record]):
    """Does the reads, lookups and updates of a stream, inline or in threads."""

    def __init__(
        self,
        inputs: Iterator[Inputs],
        ledger: BatchLedger[Record],
        tables: TableWork[Record],
        *,
        overlap: bool,
        remote: bool = False,
    ) -> None:
        """remote: lookups and updates wait for a network, each mostly in one direction; run both concurrently if the
        order allows."""
        self.seconds = dict.fromkeys(("read", "lookup", "update", "wait"), 0.0)
        """Time spent in each stage so far, and time that the user's thread waited for other threads. Table work in
        its own threads overlaps the other stages; with a thread each, lookups and updates overlap, too."""
        self.seconds_inside = 0.0
        """Time that the user's thread spent in next() and submit(): waiting, or without threads doing all the work."""
        self._inputs, self._ledger, self._tables = inputs, ledger, tables
        self._changed = threading.Condition()  # guards the ledger and all that follows
        self._running: set[Stage] = set()  # table work that the pipeline's threads are doing
        self._is_resolving = False  # in the thread that reads
        self._paused: int | None = None  # ident of the thread that paused table work
        self._is_closed = False
        self._error: BaseException | None = None
        self._is_reported = False  # whether the error was raised to the user
        self._threads: list[threading.Thread] = []
        self._num_alive = 0  # threads that still run
        self._process = os.getpid()
        if overlap:
            work: dict[str, Sequence[Stage]] = {"read": _READ, "tables": _TABLES}
            if remote and ledger.allows_overlap:
                work = {"read": _READ, "lookups": (Stage.LOOKUP,), "updates": (Stage.UPDATE,)}
            for name, stages in work.items():
                thread = threading.Thread(target=self._run_thread, args=(stages,), name=f"satrap-{name}", daemon=True)
                self._threads.append(thread)
            self._num_alive = len(self._threads)
            with Uninterrupted():
                for thread in self._threads:
                    thread.start()

    # -- calls of the user -------------------------------------------------------------------------------------------

    def next(self) -> Record | None:
        """Return the next batch, or None at the end: the same one until its event says that the user has it. A batch
        whose lookup needs the user's step first comes without its rows."""
        ledger = self._ledger
        with self._locked(is_timed=True) as held:
            while True:
                if ledger.offered is None:
                    self._raise_error()
                if batch := ledger.offer():
                    if batch.state is State.READ:
                        self._tables.read_ahead(batch)
                    return batch
                if ledger.is_over:
                    return None
                if self._is_closed:
                    raise StreamError(_CLOSED)
                if ledger.returns_ahead and not self._threads:
                    self._run(Stage.READ, held)
                elif self._threads or not self._do_one(held, is_needed=True):  # False: another thread has paused it
                    self._wait(held)

    def handle(self, event: Event, *batches: Record, cause: str = "") -> list[Action]:
        """Record an event of these batches in the ledger; return what must be done about it."""
        with self._locked():
            actions = self._ledger.handle(event, *batches, cause=cause)
            self._changed.notify_all()
            return actions

    def discard(self, batch: Record) -> None:
        """Leave out a batch that `next` returned and that the user will not have; `next` returns it again if its lookup
        is in progress."""
        with self._locked():
            self._ledger.offered = None
            if batch is not self._ledger.looking_up:
                self._ledger.handle(Event.SETTLED, batch)
            self._changed.notify_all()

    def look_up(self, batch: Record) -> bool:
        """Wait until a batch that was returned before its lookup is looked up; return False if the user must step or
        drop another batch first."""
        with self._locked(is_timed=True) as held:
            while batch.state is State.AHEAD:
                self._raise_error()
                if self._is_closed:
                    raise StreamError(_CLOSED)
                if self._ledger.is_stuck:
                    return False
                if self._threads or not self._do_one(held, is_needed=True):
                    self._wait(held)
            return True

    def oldest_open(self) -> int:
        """Return the oldest step whose rows are in use."""
        with self._locked():
            return self._ledger.oldest_open

    def needs_user(self) -> bool:
        """Return whether the user must step or drop a batch before the next lookup."""
        ledger = self._ledger
        with self._locked(is_timed=True) as held:
            while self._threads and not (ledger.is_ready or ledger.is_over or ledger.is_stuck or self._is_closed):
                self._wait(held)
            return ledger.is_stuck and not ledger.is_ready and not self._is_closed

    def is_last(self) -> bool:
        """Return whether no batch with rows comes after the one that was returned last, or is about to be. Reads one
        batch ahead to find out."""
        ledger = self._ledger
        with self._locked(is_timed=True) as held:
            while ledger.another is None and not (ledger.is_exhausted or self._is_closed):
                self._wait(held) if self._threads else self._run(Stage.READ, held)
            return ledger.is_exhausted if ledger.another is None else not ledger.another.has_rows

    def submit(self, update: Update[Record], taken: Callable[[], None] = lambda: None) -> None:
        """Take over an update, and call `taken` in that moment. Without threads the update is applied before this
        returns, unless its order makes it wait."""
        with self._locked(is_timed=True) as held:
            self._raise_error()
            self._ledger.submit(update)
            taken()
            self._changed.notify_all()
            while not self._threads and self._ledger.updates:
                if not self._do_one(held, is_needed=False):
                    break
            self._raise_error()

    def drain(self) -> bool:
        """Wait until every submitted update is applied; return False if one waits for lookups that wait for the
        user."""
        with self._locked() as held:
            while self._ledger.updates or self._running:
                if self._error is not None and not self._running:
                    break
                if self._ledger.is_stuck:
                    return False
                if self._threads or not self._do_one(held, is_needed=False):
                    self._wait(held)
        if self._error is not None:
            self.finish()
        return True

    def finish(self) -> None:
        """Stop looking up, and apply every submitted update, in order. Raises the first error that the user has not
        seen; the next call continues after the update that was refused."""
        with self._locked() as held:
            self._is_closed = True
            self._changed.notify_all()
            while self._running:
                self._wait(held)
            if not self._is_reported:
                self._raise_error()
            while self._ledger.updates:
                self._run(Stage.UPDATE, held)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Apply every submitted update, then keep table work from running inside the context."""
        self.drain()
        try:
            with self._locked() as held:
                self._paused = threading.get_ident()
                while self._running or self._is_resolving:
                    self._wait(held)
            yield
        finally:
            with self._locked():
                pass

    def close(self) -> None:
        """Stop the threads; what was not updated stays so. Idempotent. Does nothing in a fork, which has none of the
        threads."""
        if os.getpid() != self._process:
            return
        deadline = time.monotonic() + _CLOSE_SECONDS
        with self._locked() as held:
            self._is_closed = True
            self._changed.notify_all()
            while self._threads and self._num_alive and time.monotonic() < deadline:
                self._wait(held)
        with Uninterrupted():
            threads, self._threads = self._threads, []
            for thread in threads:  # they have ended, or are blocked
                thread.join(SLICE_SECONDS)
        blocked = [thread.name for thread in threads if thread.is_alive()]
        if blocked:
            self._inputs = iter(())  # a source that is running cannot be closed
            raise StreamError(
                f"{', '.join(blocked)} did not stop within {_CLOSE_SECONDS:g} s: the source's read does not return"
            )
        close = getattr(self._inputs, "close", None)
        if close is not None:
            close()

    def _locked(self, *, is_timed: bool = False) -> "_UserCall":
        """Hold the lock and defer interrupts for a call of the user, so that an interrupt cannot leave the lock
        held. is_timed: add the time to `seconds_inside`."""
        if os.getpid() != self._process:
            raise ForkError(
                f"this stream was started in process {self._process}, and its fork {os.getpid()} has none of its "
                "threads: start a stream in the fork, or start workers with 'spawn'"
            )
        return _UserCall(self, is_timed)

    def _enter(self) -> None:
        """Begin a call of the user, with the lock held."""
        if self._paused == threading.get_ident():  # `pause` exits, or an interrupt cut its exit short
            self._paused = None
            self._changed.notify_all()

    def _wait(self, held: Uninterrupted) -> None:
        """Wait for a change, but only briefly; raise a deferred interrupt."""
        start = time.perf_counter()
        self._changed.wait(SLICE_SECONDS)
        self.seconds["wait"] += time.perf_counter() - start
        held.check()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._is_reported = True
            raise self._error

    # -- work; the lock is held, except inside `allow` and where a thread says so --------------------------------------

    def _choose(self, stages: Sequence[Stage], *, is_needed: bool) -> Stage | None:
        may_work = self._paused is None or stages is _READ  # a pause keeps table work from running
        return self._ledger.choose(stages, is_needed=is_needed) if may_work else None

    def _do_one(self, held: Uninterrupted, is_needed: bool) -> bool:
        """Do one piece of work in the caller's thread; return False if none is allowed."""
        stage = self._choose((*_TABLES, *_READ), is_needed=is_needed)
        if stage is None:
            return False
        self._run(stage, held)
        return True

    def _run(self, stage: Stage, held: Uninterrupted) -> None:
        held.check()
        try:
            work = self._start(stage)
            with held.allow():
                result = self._timed(stage, work)
            self._end(stage, result)
        except BaseException as error:
            if isinstance(error, Exception) and not held.was_interrupted:
                self._fail(stage, error)
            elif stage is Stage.READ:
                self._fail(stage, StreamError(_INTERRUPTED))
            self._is_reported = self._error is not None
            raise

    def _start(self, stage: Stage) -> Callable[[], Any]:
        """Return the work of a stage, which may run without the lock."""
        if stage is Stage.READ:
            return self._read
        if stage is Stage.UPDATE:
            return self._ledger.start_update().apply
        batch = self._ledger.start_lookup()
        return partial(self._tables.look_up, batch, self._ledger.oldest_open)

    def _end(self, stage: Stage, result: Any) -> None:
        """Record that the work of a stage is done."""
        if stage is Stage.READ and result is None:
            self._ledger.is_exhausted = True
        elif stage is Stage.READ:
            self._ledger.handle(Event.READ, result)
        elif stage is Stage.UPDATE:
            self._ledger.end_update()
        else:
            assert self._ledger.looking_up is not None
            self._ledger.handle(Event.LOOKED_UP, self._ledger.looking_up)

    def _read(self) -> Record | None:
        inputs = next(self._inputs, None)
        return None if inputs is None else self._tables.new(inputs)

    def _timed(self, stage: Stage, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.seconds[stage.value] += time.perf_counter() - start
        return result

    def _fail(self, stage: Stage, error: BaseException) -> None:
        error.add_note(f"in the {stage.value} stage of the stream, near step {self._ledger.next_step}")
        if isinstance(error, NonFiniteError):
            error.add_note(_NOT_FINITE)
        if isinstance(error, SourceError):
            error.__traceback__ = None  # leads through readers; the message says where in the data
        if stage is Stage.UPDATE and isinstance(error, SatrapError):  # refused; other errors are retried
            self._ledger.end_update("failed")
        if self._error is None or (self._is_reported and stage is Stage.UPDATE):
            self._error, self._is_reported = error, False
        else:
            self._error.add_note(f"and then in the {stage.value} stage: {error!r}")
        self._is_closed = True
        self._changed.notify_all()

    # -- the threads --------------------------------------------------------------------------------------------------

    def _run_thread(self, stages: Sequence[Stage]) -> None:
        try:
            self._work(stages)
        finally:
            with self._changed:
                self._num_alive -= 1
                self._changed.notify_all()

    def _work(self, stages: Sequence[Stage]) -> None:
        """Run the given stages as work for them comes, until the pipeline is closed."""
        stage = stages[-1]
        try:
            while True:
                with self._changed:
                    while (choice := self._choose(stages, is_needed=True)) is None and not self._is_closed:
                        self._changed.wait()
                    if self._is_closed or choice is None:
                        return
                    stage = choice
                    if stage is not Stage.READ:
                        self._running.add(stage)
                    work = self._start(stage)
                    self._changed.notify_all()
                result = self._timed(stage, work)
                if stage is Stage.READ and result is not None and self._tables.resolves_ahead:
                    self._resolve(result)
                with self._changed:
                    self._end(stage, result)
                    self._running.discard(stage)
                    self._is_resolving &= stage is not Stage.READ
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._running.discard(stage)
                self._is_resolving &= stage is not Stage.READ
                self._fail(stage, error)

    def _resolve(self, batch: Record) -> None:
        """Resolve a batch unless an earlier one must be looked up as a whole, or the pipeline is closed."""
        ledger = self._ledger
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._paused is None and not ledger.must_wait_to_resolve)
            )
            self._is_resolving = ledger.may_resolve and not self._is_closed
            at = ledger.step_read_next, ledger.oldest_open
        if self._is_resolving:
            self._tables.resolve(batch, *at)


class _UserCall:
    """Holds a pipeline's lock and defers interrupts. A class and not a generator, since each step makes several."""

    __slots__ = ("_held", "_is_timed", "_pipeline", "_start")

    def __init__(self, pipeline: PrefetchPipeline[Any], is_timed: bool) -> None:
        self._pipeline, self._is_timed = pipeline, is_timed
        self._start, self._held = time.perf_counter(), Uninterrupted()

    def __enter__(self) -> Uninterrupted:
        self._held.__enter__()
        self._pipeline._changed.acquire()
        self._pipeline._enter()
        return self._held

    def __exit__(self, *_: object) -> None:
        if self._is_timed:
            self._pipeline.seconds_inside += time.perf_counter() - self._start
        self._pipeline._changed.release()
        self._held.__exit__()
