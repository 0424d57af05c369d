"""The table work of a stream, in the order that the gate allows: reads batches, looks them up, applies updates.

    --read--> [waiting] --lookup--> [ready] --next()--> the user's step --submit()--> [updates] --update--> settled
                  \\---next(), where the gate is closed---> [ahead] --lookup, or bring()--> the user's step --> ...

A user who asks for a batch while only his own step could open the gate reads ahead: he gets it without its rows, and
the batch is looked up as soon as the gate allows, in a thread or when he brings it. Lookups keep the order of the
batches, so nothing in `waiting` is looked up before what is in `ahead`.

`PrefetchPipeline` either does this work in the caller's thread, inside next() and submit() (`overlap=False`: no core is
idle while the dense network runs, so there is nothing to gain), or in threads of its own: one reads, one does all table
work, updates first. Where the rows are remote and the gate lets them (`StalenessGate.apart`), lookups have a thread and
updates have one, so that rows come while gradients go. All run the same decisions, `_choose`. What is in flight is
bounded by the gate: at most staleness + 1 steps are open, and as many batches wait to be looked up.

An exception of any stage is kept with a note that names the stage, ends the threads, and is raised by the user's next
call; of several the first, and then an update's. Once it was told, `finish` still applies the updates that were handed
over.

An interrupt (KeyboardInterrupt, in the user's thread alone) is no such error: the user's next call goes on where it
came. What is handed over, and what is taken, is so at one moment, `Uninterrupted`; a lookup or an update in the user's
thread that was interrupted is made again, which changes nothing if it had been made. Only a source that was interrupted
cannot go on: a generator has ended then.

Knows neither tables nor torch: it is given how to look up, and each update how to apply it.
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
    "this stream was interrupted while its source read a batch, and a source that was interrupted cannot go on: begin "
    "another stream with embeddings.stream(...)"
)
_CLOSE_SECONDS = 10.0  # a reader that does not return within it is left to die with the process, and said so


_TABLES = (Stage.UPDATE, Stage.LOOKUP)


class PrefetchPipeline(Generic[Item]):
    """See the file's docstring."""

    def __init__(
        self,
        inputs: Iterator[Inputs],
        gate: StalenessGate,
        look_up: Callable[[Inputs, int, int, Item | None], Item],
        *,
        read_ahead: Callable[[Inputs, int], Item],
        overlap: bool,
        remote: bool = False,
    ) -> None:
        """look_up(inputs, step, oldest_open, ahead) makes what next() returns, or completes what it returned: ahead.

        read_ahead(inputs, step) makes what next() returns of a batch that is looked up later.
        remote: lookups and updates wait for a network, most of it one way each; where the gate lets them, both go at
            the same time.
        """
        self.seconds = Seconds()
        self._inputs, self._gate, self._look_up, self._read_ahead_of = inputs, gate, look_up, read_ahead
        self._state: State[Item] = State()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._living = 0  # of them
        self._process = os.getpid()
        if overlap:
            work: dict[str, Callable[[], None]] = {"read": self._read_ahead}
            if remote and gate.apart:
                work |= {f"{stage.value}s": partial(self._work, (stage,)) for stage in _TABLES}
            else:
                work["tables"] = partial(self._work, _TABLES)
            for name, each in work.items():
                target = partial(self._live, each)
                self._threads.append(threading.Thread(target=target, name=f"satrap-{name}", daemon=True))
            self._living = len(self._threads)
            with Uninterrupted():
                for thread in self._threads:
                    thread.start()

    # -- the user's side ----------------------------------------------------------------------------------------------

    def next(self, taken: Callable[[Item], object] = lambda _: None) -> Item | None:
        """The next batch; at the moment that it is taken out `taken` is called with it. None at the end. One that only
        the user's step lets be looked up comes without its rows."""
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
                    raise StreamError("this stream was closed")
                if self._state.ahead or self._blocked():
                    if self._state.waiting:
                        item = self._hand_ahead()
                        taken(item)
                        return item
                    if not self._threads:
                        self._run(Stage.READ, held)
                        continue
                if self._threads or not self._do_one(held, wanted=True):  # False: another thread has paused it
                    self._wait(held)

    def bring(self, is_there: Callable[[], bool]) -> bool:
        """Returns once a batch that was handed over ahead of its lookup is there; False if it cannot be looked up
        before the user steps or drops another."""
        with self._inside() as held:
            while not is_there():
                self._raise_error()
                if self._state.closed:
                    raise StreamError("this stream was closed")
                if self._stuck():
                    return False
                if self._threads or not self._do_one(held, wanted=True):
                    self._wait(held)
            return True

    def take_back(self, item: Item) -> bool:
        """The last batch handed over goes back, if it is not looked up."""
        with self._locked():
            mine = bool(self._state.ahead) and self._state.ahead[-1][1] is item
            if mine:
                self._state.ahead.pop()
                self._exhaust_gate()
            return mine

    def needs_user(self) -> bool:
        """Whether the next batch cannot be looked up before the user steps or drops one."""
        with self._inside() as held:
            if self._threads:
                while not (self._state.ready or self._ended() or self._blocked() or self._state.closed):
                    self._wait(held)
            return not self._state.ready and not self._state.closed and self._blocked()

    def is_last(self) -> bool:
        """Whether no other batch will come. Reads one ahead to know it."""
        with self._inside() as held:
            while not (self._state.ready or self._state.waiting or self._state.exhausted or self._state.closed):
                if self._threads:
                    self._wait(held)
                else:
                    self._run(Stage.READ, held)
            return self._state.exhausted and not self._state.ready and not self._state.waiting

    def submit(self, update: Update, taken: Callable[[], None] = lambda: None) -> None:
        """Takes over an update: at that moment `taken` is called. Without threads it is applied before this returns,
        unless its order must wait."""
        with self._inside() as held:
            self._raise_error()
            self._state.updates.append(update)
            taken()
            self._changed.notify_all()
            while not self._threads and self._state.updates:
                if not self._do_one(held, wanted=False):
                    break
            self._raise_error()

    def drop(self, step: int) -> None:
        """A batch of the step will not be updated."""
        with self._locked():
            self._gate.settle(step)
            self._changed.notify_all()

    def drain(self) -> bool:
        """Returns once every submitted update is applied; False if one waits for lookups that wait for the user."""
        with self._locked() as held:
            while self._state.updates or self._state.doing:
                if self._state.error is not None and not self._state.doing:
                    break
                if self._stuck():
                    return False
                if self._threads or not self._do_one(held, wanted=False):
                    self._wait(held)
        if self._state.error is not None:
            self.finish()
        return True

    def finish(self) -> None:
        """Looks nothing up any more, and applies every submitted update, in order. Of errors that the user does not
        know the first is raised; calling it again goes on behind the update that was refused."""
        with self._locked() as held:
            self._state.closed = True
            self._changed.notify_all()
            while self._state.doing:
                self._wait(held)
            if not self._state.told:
                self._raise_error()
            while self._state.updates:
                self._run(Stage.UPDATE, held)

    @property
    def failed(self) -> int:
        """Batches whose update was refused."""
        return self._state.failed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Every update handed over is applied before, and no table work runs inside."""
        self.drain()
        try:
            with self._locked() as held:
                self._state.paused = threading.get_ident()
                while self._state.doing:
                    self._wait(held)
            yield
        finally:
            with self._locked():
                pass

    def close(self) -> None:
        """Ends the threads; whatever was not updated stays so. Safe to call twice. Does nothing in a fork, which has
        none of the threads."""
        if os.getpid() != self._process:
            return
        until = time.monotonic() + _CLOSE_SECONDS
        with self._locked() as held:
            self._state.closed = True
            self._changed.notify_all()
            while self._living and time.monotonic() < until:
                self._wait(held)
        with Uninterrupted():
            threads, self._threads = self._threads, []
            for thread in threads:  # they have ended, or will not
                thread.join(SLICE_SECONDS)
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            self._inputs = iter(())  # a source that runs cannot be closed
            raise StreamError(f"{', '.join(left)} did not end within {_CLOSE_SECONDS:g} s: the source does not return")
        self._state.ahead.clear()
        close = getattr(self._inputs, "close", None)
        if close is not None:
            close()

    @contextmanager
    def _locked(self) -> Iterator[Uninterrupted]:
        """Around every call of the user's: has the lock, and holds interrupts back until that is given back. So no
        thread waits for a lock that an interrupt made this one forget."""
        if os.getpid() != self._process:
            raise ForkError(
                f"this stream was begun in process {self._process} and this is its fork {os.getpid()}, which has none "
                "of its threads: begin a stream here, or start workers with 'spawn'"
            )
        with Uninterrupted() as held, self._changed:
            if self._state.paused == threading.get_ident():  # it ends now, or an interrupt came when it was to end
                self._state.paused = None
                self._changed.notify_all()
            yield held

    @contextmanager
    def _inside(self) -> Iterator[Uninterrupted]:
        """The same, and counts the time."""
        began = time.perf_counter()
        try:
            with self._locked() as held:
                yield held
        finally:
            self.seconds.inside += time.perf_counter() - began

    def _wait(self, held: Uninterrupted) -> None:
        """For a change, or a little while; raises what was held back."""
        began = time.perf_counter()
        self._changed.wait(SLICE_SECONDS)
        self.seconds.wait += time.perf_counter() - began
        held.look()

    # -- deciding; the lock is held -----------------------------------------------------------------------------------

    def _choose(self, wanted: bool, stages: Collection[Stage] = _TABLES) -> Stage | None:
        """What table work of these stages may be done now: updates first. wanted: whether a lookup is, were the order
        free."""
        state = self._state
        if state.paused is not None:
            return None
        if state.begun is not None and Stage.LOOKUP in stages:
            return Stage.LOOKUP
        if Stage.UPDATE in stages and state.updates and self._gate.may_update(state.updates[0].steps[-1]):
            return Stage.UPDATE
        if Stage.LOOKUP not in stages or not (wanted or self._gate.deterministic) or not self._gate.may_look_up():
            return None
        if state.ahead or state.waiting:
            return Stage.LOOKUP
        return None if self._threads or state.exhausted else Stage.READ

    def _blocked(self) -> bool:
        """Whether there is no batch for the user, and none will be looked up until he steps or drops one."""
        return not self._state.ready and self._stuck()

    def _stuck(self) -> bool:
        """Whether neither an update nor a lookup is allowed until the user steps or drops a batch."""
        state = self._state
        if state.doing or state.begun is not None:
            return False
        if state.exhausted and not (state.waiting or state.ahead or state.updates):
            return False
        may_update = bool(state.updates) and self._gate.may_update(state.updates[0].steps[-1])
        return not may_update and not self._gate.may_look_up()

    def _ended(self) -> bool:
        state = self._state
        looking_up = state.begun is not None or Stage.LOOKUP in state.doing
        return state.exhausted and not (state.ready or state.waiting or looking_up)

    def _raise_error(self) -> None:
        if self._state.error is not None:
            self._state.told = True
            raise self._state.error

    # -- doing --------------------------------------------------------------------------------------------------------

    def _do_one(self, held: Uninterrupted, wanted: bool) -> bool:
        """One piece of work in the caller's thread; False if none may be done. The lock is held and kept."""
        stage = self._choose(wanted)
        if stage is None:
            return False
        self._run(stage, held)
        return True

    def _run(self, stage: Stage, held: Uninterrupted) -> None:
        state = self._state
        held.look()
        try:
            if stage is Stage.READ:
                with held.let_in():
                    inputs = self._read()
                self._admit(inputs)
            elif stage is Stage.LOOKUP:
                state.begun = begun = state.begun or self._begin_look_up()
                with held.let_in():
                    item = self._timed_look_up(*begun)
                state.begun = None
                self._looked_up(item, begun[-1])
            else:
                with held.let_in():
                    self._apply(state.updates[0])
                self._finish(state.updates.popleft())
        except BaseException as error:
            if isinstance(error, Exception):
                self._fail(stage, error)
            elif stage is Stage.READ:
                self._fail(stage, StreamError(_INTERRUPTED))
            state.told = state.error is not None
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
        step = self._gate.look_up()
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
        if stage is Stage.UPDATE and isinstance(error, SatrapError):  # refused; any other is tried again
            self._state.failed += len(self._state.updates.popleft().steps)
        if self._state.error is None or (self._state.told and stage is Stage.UPDATE):
            self._state.error, self._state.told = error, False
        else:
            self._state.error.add_note(f"and then in the {stage.value} stage: {error!r}")
        self._state.closed = True
        self._changed.notify_all()

    def _read(self) -> Inputs | None:
        began = time.perf_counter()
        inputs = next(self._inputs, None)
        self.seconds.read += time.perf_counter() - began
        return inputs

    def _timed_look_up(self, inputs: Inputs, step: int, oldest_open: int, ahead: Item | None) -> Item:
        began = time.perf_counter()
        item = self._look_up(inputs, step, oldest_open, ahead)
        self.seconds.lookup += time.perf_counter() - began
        return item

    def _apply(self, update: Update) -> None:
        began = time.perf_counter()
        update.apply()
        self.seconds.update += time.perf_counter() - began

    # -- the threads --------------------------------------------------------------------------------------------------

    def _live(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._changed:
                self._living -= 1
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
                inputs = self._read()
                with self._changed:
                    self._admit(inputs)
                    self._changed.notify_all()
                    if inputs is None:
                        return
        except BaseException as error:
            with self._changed:
                self._fail(Stage.READ, error)

    def _work(self, stages: Sequence[Stage]) -> None:
        """Does what there is of these."""
        stage = stages[-1]
        try:
            while True:
                with self._changed:
                    while (choice := self._choose(wanted=True, stages=stages)) is None and not self._state.closed:
                        self._changed.wait()
                    if self._state.closed or choice is None:
                        return
                    stage = choice
                    self._state.doing.add(stage)
                    if stage is Stage.LOOKUP:
                        begun = self._begin_look_up()
                    else:
                        update = self._state.updates[0]
                    self._changed.notify_all()
                if stage is Stage.LOOKUP:
                    item = self._timed_look_up(*begun)
                else:
                    self._apply(update)
                with self._changed:
                    if stage is Stage.LOOKUP:
                        self._looked_up(item, begun[-1])
                    else:
                        self._finish(self._state.updates.popleft())
                    self._state.doing.discard(stage)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._state.doing.discard(stage)
                self._fail(stage, error)
