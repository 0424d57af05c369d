"""The table work of a stream, in the order that the staleness gate allows: reads batches, looks them up, applies
updates.

    --read--> [waiting] --lookup--> [ready] --next()--> the user's step --submit()--> [updates] --update--> settled
                  \\---next(), where the gate is closed---> [ahead] --lookup, or bring()--> the user's step --> ...

A user who requests a batch while only the user's own step can open the gate reads ahead: next() returns the batch
without its rows, and the batch is looked up as soon as the gate allows, in a thread or in bring(). Lookups keep the
order of the batches, so nothing in `waiting` is looked up before what is in `ahead`.

`PrefetchPipeline` does this work either in the caller's thread, inside next() and submit() (`overlap=False`: no core is
idle while the dense network runs, so threads would gain nothing), or in its own threads: one reads, one does all table
work, updates first. With remote rows, and if the gate allows it (`StalenessGate.allows_overlap`), lookups and updates
have a thread each, so that rows arrive while gradients are sent. All threads use the same decisions, `_choose`. The
gate bounds what is in flight: at most staleness + 1 steps are open, and as many batches wait for their lookup.

An exception in any stage is kept with a note that names the stage, stops the threads, and is raised by the user's next
call. Of several exceptions the first is raised, then that of an update. After it was raised, `finish` still applies the
submitted updates.

An interrupt (what the handler of a signal raises, such as KeyboardInterrupt; it reaches only the user's thread) is not
such an error: the user's next call resumes where the interrupt came. Items change hands inside `Uninterrupted`; an
interrupted lookup or update in the user's thread is retried, which is idempotent. Only an interrupted source cannot
continue, since a generator has then ended.

The pipeline uses neither tables nor torch: it receives functions that look up and apply updates.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic

from satrap.data.inputs import Inputs
from satrap.errors import ForkError, SatrapError, StreamError
from satrap.interrupts import SLICE_SECONDS, Uninterrupted
from satrap.train.pipeline_stages import Item, Seconds, Stage, State, Update
from satrap.train.staleness_gate import StalenessGate

_INTERRUPTED = (
    "this stream was interrupted while its source read a batch, and an interrupted source cannot continue: start "
    "another stream with embeddings.stream(...)"
)
_CLOSE_SECONDS = 10.0  # a reader that takes longer is reported, and ends with the process
_CLOSED = "this stream was closed: start another one with embeddings.stream(...)"
_TABLES = (Stage.UPDATE, Stage.LOOKUP)


class PrefetchPipeline(Generic[Item]):
    """Runs the reads, lookups and updates of a stream, inline or in threads."""

    def __init__(
        self,
        inputs: Iterator[Inputs],
        gate: StalenessGate,
        look_up: Callable[[Inputs, int, int, Item | None], Item],
        *,
        read_ahead: Callable[[Inputs, int], Item],
        resolve: Callable[[Inputs, int, int], None] = lambda *_: None,
        has_rows: Callable[[Inputs], bool] = lambda _: True,
        overlap: bool,
        remote: bool = False,
    ) -> None:
        """look_up(inputs, step, oldest_open, ahead) creates the item that next() returns, or completes `ahead`, which
        next() has already returned.

        read_ahead(inputs, step) creates the item that next() returns before the lookup of its batch.
        resolve(inputs, step, oldest_open) does the part of a lookup that may run ahead of it, in the thread that reads.
        has_rows(inputs) tells whether the batch has rows: then the staleness of its lookup is counted.
        remote: lookups and updates wait for a network, each mostly in one direction; run both concurrently if the gate
            allows.
        """
        self.seconds = Seconds()
        self._inputs, self._gate, self._look_up, self._read_ahead_of = inputs, gate, look_up, read_ahead
        self._resolve, self._has_rows = resolve, has_rows
        self._state: State[Item] = State()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_alive = 0  # threads that still run
        self._process = os.getpid()
        if overlap:
            work: dict[str, Callable[[], None]] = {"read": self._read_ahead}
            if remote and gate.allows_overlap:
                work |= {f"{stage.value}s": partial(self._work, (stage,)) for stage in _TABLES}
            else:
                work["tables"] = partial(self._work, _TABLES)
            for name, each in work.items():
                target = partial(self._run_thread, each)
                self._threads.append(threading.Thread(target=target, name=f"satrap-{name}", daemon=True))
            self._num_alive = len(self._threads)
            with Uninterrupted():
                for thread in self._threads:
                    thread.start()

    # -- calls of the user -------------------------------------------------------------------------------------------

    def next(self, taken: Callable[[Item], object] = lambda _: None) -> Item | None:
        """Return the next batch, or None at the end; call `taken` with it in the moment it leaves the queue. A batch
        whose lookup needs the user's step first comes without its rows."""
        with self._inside() as held:
            while True:
                self._raise_error()
                if self._state.ready:
                    item = self._state.ready.popleft()
                    taken(item)
                    self._changed.notify_all()
                    return item
                if self._ended():
                    return None
                if self._state.closed:
                    raise StreamError(_CLOSED)
                if self._state.ahead or self._blocked():
                    if self._state.waiting:
                        item = self._hand_ahead()
                        taken(item)
                        return item
                    if not self._threads:
                        self._run(Stage.READ, held)
                        continue
                if self._threads or not self._do_one(held, is_needed=True):  # False: another thread has paused it
                    self._wait(held)

    def wait_for_lookup(self, is_there: Callable[[], bool]) -> bool:
        """Wait until a batch that was returned before its lookup is looked up; return False if the user must step or
        drop another batch first."""
        with self._inside() as held:
            while not is_there():
                self._raise_error()
                if self._state.closed:
                    raise StreamError(_CLOSED)
                if self._stuck():
                    return False
                if self._threads or not self._do_one(held, is_needed=True):
                    self._wait(held)
            return True

    def return_item(self, item: Item) -> bool:
        """Take back the last batch returned; return False if it is already looked up."""
        with self._locked():
            can_return = bool(self._state.ahead) and self._state.ahead[-1][1] is item
            if can_return:
                self._state.ahead.pop()
                self._exhaust_gate()
            return can_return

    def needs_user(self) -> bool:
        """Return whether the user must step or drop a batch before the next lookup."""
        with self._inside() as held:
            if self._threads:
                while not (self._state.ready or self._ended() or self._blocked() or self._state.closed):
                    self._wait(held)
            return not self._state.ready and not self._state.closed and self._blocked()

    def is_last(self) -> bool:
        """Return whether no other batch will come. Reads one batch ahead to find out."""
        state = self._state
        with self._inside() as held:
            while not (state.ready or state.waiting or state.unfinished_lookup or state.closed or self._ended()):
                self._wait(held) if self._threads else self._run(Stage.READ, held)
            return self._ended()

    def submit(self, update: Update, taken: Callable[[], None] = lambda: None) -> None:
        """Take over an update, and call `taken` in that moment. Without threads the update is applied before this
        returns, unless its order makes it wait."""
        with self._inside() as held:
            self._raise_error()
            self._state.updates.append(update)
            taken()
            self._changed.notify_all()
            while not self._threads and self._state.updates:
                if not self._do_one(held, is_needed=False):
                    break
            self._raise_error()

    def drop(self, step: int) -> None:
        """Settle a batch of the step that will not be updated."""
        with self._locked():
            self._gate.settle(step)
            self._changed.notify_all()

    def drain(self) -> bool:
        """Wait until every submitted update is applied; return False if one waits for lookups that wait for the
        user."""
        with self._locked() as held:
            while self._state.updates or self._state.running:
                if self._state.error is not None and not self._state.running:
                    break
                if self._stuck():
                    return False
                if self._threads or not self._do_one(held, is_needed=False):
                    self._wait(held)
        if self._state.error is not None:
            self.finish()
        return True

    def finish(self) -> None:
        """Stop looking up, and apply every submitted update, in order. Raises the first error that the user has not
        seen; the next call continues after the update that was refused."""
        with self._locked() as held:
            self._state.closed = True
            self._changed.notify_all()
            while self._state.running:
                self._wait(held)
            if not self._state.is_reported:
                self._raise_error()
            while self._state.updates:
                self._run(Stage.UPDATE, held)

    @property
    def num_failed(self) -> int:
        """Number of batches whose update was refused."""
        return self._state.num_failed

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Apply every submitted update, then keep table work from running inside the context."""
        self.drain()
        try:
            with self._locked() as held:
                self._state.paused = threading.get_ident()
                while self._state.running or self._state.is_resolving:
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
            self._state.closed = True
            self._changed.notify_all()
            while self._num_alive and time.monotonic() < deadline:
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
        self._state.ahead.clear()
        close = getattr(self._inputs, "close", None)
        if close is not None:
            close()

    @contextmanager
    def _locked(self) -> Iterator[Uninterrupted]:
        """Hold the lock and defer interrupts for a call of the user, so that an interrupt cannot leave the lock
        held."""
        if os.getpid() != self._process:
            raise ForkError(
                f"this stream was started in process {self._process}, and its fork {os.getpid()} has none of its "
                "threads: start a stream in the fork, or start workers with 'spawn'"
            )
        with Uninterrupted() as held, self._changed:
            if self._state.paused == threading.get_ident():  # `pause` exits, or an interrupt cut its exit short
                self._state.paused = None
                self._changed.notify_all()
            yield held

    @contextmanager
    def _inside(self) -> Iterator[Uninterrupted]:
        """Do the same as `_locked`, and count the time."""
        start = time.perf_counter()
        try:
            with self._locked() as held:
                yield held
        finally:
            self.seconds.inside += time.perf_counter() - start

    def _wait(self, held: Uninterrupted) -> None:
        """Wait for a change, but only briefly; raise a deferred interrupt."""
        start = time.perf_counter()
        self._changed.wait(SLICE_SECONDS)
        self.seconds.wait += time.perf_counter() - start
        held.check()

    # -- decisions; the lock is held ---------------------------------------------------------------------------------

    def _choose(self, is_needed: bool, stages: Collection[Stage] = _TABLES) -> Stage | None:
        """Return which of these stages may run now, updates first, or None. is_needed: whether a lookup is needed; a
        deterministic order ignores it."""
        state = self._state
        if state.paused is not None:
            return None
        if state.unfinished_lookup is not None and Stage.LOOKUP in stages:
            return Stage.LOOKUP
        if Stage.UPDATE in stages and state.updates and self._gate.may_update(state.updates[0].steps[0]):
            return Stage.UPDATE
        if Stage.LOOKUP not in stages or not (is_needed or self._gate.deterministic) or not self._gate.may_look_up():
            return None
        if state.ahead or state.waiting:
            return Stage.LOOKUP
        return None if self._threads or state.exhausted else Stage.READ

    def _blocked(self) -> bool:
        """Return whether no batch is ready, and none will be looked up until the user steps or drops one."""
        return not self._state.ready and self._stuck()

    def _stuck(self) -> bool:
        """Return whether neither an update nor a lookup is allowed until the user steps or drops a batch."""
        state = self._state
        if state.running or state.unfinished_lookup is not None:
            return False
        if state.exhausted and not (state.waiting or state.ahead or state.updates):
            return False
        may_update = bool(state.updates) and self._gate.may_update(state.updates[0].steps[0])
        return not may_update and not self._gate.may_look_up()

    def _ended(self) -> bool:
        state = self._state
        looking_up = state.unfinished_lookup is not None or Stage.LOOKUP in state.running
        return state.exhausted and not (state.ready or state.waiting or looking_up)

    def _raise_error(self) -> None:
        if self._state.error is not None:
            self._state.is_reported = True
            raise self._state.error

    # -- work -------------------------------------------------------------------------------------------------------

    def _do_one(self, held: Uninterrupted, is_needed: bool) -> bool:
        """Do one piece of work in the caller's thread, with the lock held; return False if none is allowed."""
        stage = self._choose(is_needed)
        if stage is None:
            return False
        self._run(stage, held)
        return True

    def _run(self, stage: Stage, held: Uninterrupted) -> None:
        state = self._state
        held.check()
        try:
            if stage is Stage.READ:
                with held.allow():
                    inputs = self._read()
                self._admit(inputs)
            elif stage is Stage.LOOKUP:
                state.unfinished_lookup = lookup = state.unfinished_lookup or self._begin_look_up()
                with held.allow():
                    item = self._timed_look_up(*lookup)
                state.unfinished_lookup = None
                self._looked_up(item, lookup[-1])
            else:
                with held.allow():
                    self._apply(state.updates[0])
                self._finish(state.updates.popleft())
        except BaseException as error:
            if isinstance(error, Exception) and not held.was_interrupted:
                self._fail(stage, error)
            elif stage is Stage.READ:
                self._fail(stage, StreamError(_INTERRUPTED))
            state.is_reported = state.error is not None
            raise

    def _admit(self, inputs: Inputs | None) -> None:
        if inputs is not None:
            self._state.waiting.append(inputs)
            return
        self._state.exhausted = True
        self._exhaust_gate()

    def _exhaust_gate(self) -> None:
        if self._state.exhausted and not self._state.waiting and not self._state.ahead:
            self._gate.exhaust()

    def _hand_ahead(self) -> Item:
        inputs = self._state.waiting.popleft()
        item = self._read_ahead_of(inputs, self._gate.step_after(len(self._state.ahead)))
        self._state.ahead.append((inputs, item))
        self._changed.notify_all()  # there is room to read
        return item

    def _begin_look_up(self) -> tuple[Inputs, int, int, Item | None]:
        state = self._state
        inputs, ahead = state.ahead.popleft() if state.ahead else (state.waiting.popleft(), None)
        step = self._gate.look_up(has_rows=self._has_rows(inputs))
        self._exhaust_gate()
        return inputs, step, self._gate.oldest_open, ahead

    def _looked_up(self, item: Item, ahead: Item | None) -> None:
        if ahead is None:
            self._state.ready.append(item)

    def _finish(self, update: Update) -> None:
        for step in update.steps:
            self._gate.settle(step)

    def _fail(self, stage: Stage, error: BaseException) -> None:
        error.add_note(f"in the {stage.value} stage of the stream, near step {self._gate.next_step}")
        if stage is Stage.UPDATE and isinstance(error, SatrapError):  # refused; other errors are retried
            self._state.num_failed += len(self._state.updates.popleft().steps)
        if self._state.error is None or (self._state.is_reported and stage is Stage.UPDATE):
            self._state.error, self._state.is_reported = error, False
        else:
            self._state.error.add_note(f"and then in the {stage.value} stage: {error!r}")
        self._state.closed = True
        self._changed.notify_all()

    def _read(self) -> Inputs | None:
        start = time.perf_counter()
        inputs = next(self._inputs, None)
        self.seconds.read += time.perf_counter() - start
        return inputs

    def _timed_look_up(self, inputs: Inputs, step: int, oldest_open: int, ahead: Item | None) -> Item:
        start = time.perf_counter()
        item = self._look_up(inputs, step, oldest_open, ahead)
        self.seconds.lookup += time.perf_counter() - start
        return item

    def _apply(self, update: Update) -> None:
        start = time.perf_counter()
        update.apply()
        self.seconds.update += time.perf_counter() - start

    # -- the threads --------------------------------------------------------------------------------------------------

    def _run_thread(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._num_alive -= 1
                self._changed.notify_all()

    def _read_ahead(self) -> None:
        try:
            while True:
                with self._changed:
                    bound = (self._gate.staleness + 1) * self._gate.accumulate
                    while len(self._state.waiting) >= bound and not self._state.closed:
                        self._changed.wait()
                    if self._state.closed:
                        return
                    step = self._gate.step_after(len(self._state.ahead) + len(self._state.waiting))
                    oldest_open = self._gate.oldest_open
                inputs = self._read()
                if inputs is not None:
                    with self._changed:
                        self._changed.wait_for(lambda: self._state.paused is None or self._state.closed)
                        self._state.is_resolving = True
                    self._resolve(inputs, step, oldest_open)
                with self._changed:
                    self._state.is_resolving = False
                    self._admit(inputs)
                    self._changed.notify_all()
                    if inputs is None:
                        return
        except BaseException as error:
            with self._changed:
                self._state.is_resolving = False
                self._fail(Stage.READ, error)

    def _work(self, stages: Sequence[Stage]) -> None:
        """Run the given stages as work for them comes, until the pipeline is closed."""
        stage = stages[-1]
        try:
            while True:
                with self._changed:
                    while (choice := self._choose(is_needed=True, stages=stages)) is None and not self._state.closed:
                        self._changed.wait()
                    if self._state.closed or choice is None:
                        return
                    stage = choice
                    self._state.running.add(stage)
                    if stage is Stage.LOOKUP:
                        lookup = self._begin_look_up()
                    else:
                        update = self._state.updates[0]
                    self._changed.notify_all()
                if stage is Stage.LOOKUP:
                    item = self._timed_look_up(*lookup)
                else:
                    self._apply(update)
                with self._changed:
                    if stage is Stage.LOOKUP:
                        self._looked_up(item, lookup[-1])
                    else:
                        self._finish(self._state.updates.popleft())
                    self._state.running.discard(stage)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._state.running.discard(stage)
                self._fail(stage, error)
