"""The table work of a stream, in the order that the gate allows: reads batches, looks them up, applies updates.

    --read--> [waiting] --lookup--> [ready] --next()--> the user's step --submit()--> [updates] --update--> settled
                  \\---next(), where the gate is closed---> [ahead] --lookup, or bring()--> the user's step --> ...

A user who asks for a batch while only his own step could open the gate reads ahead: he gets it without its rows, and
the batch is looked up as soon as the gate allows, in a thread or when he brings it. Lookups keep the order of the
batches, so nothing in `waiting` is looked up before what is in `ahead`.

`Pipeline` either does this work in the caller's thread, inside next() and submit() (`overlap=False`: no core is idle
while the dense network runs, so there is nothing to gain), or in threads of its own: one reads, one does all table
work, updates first. Where the rows are remote and the gate lets them (`Gate.apart`), lookups have a thread and updates
have one, so that rows come while gradients go. All run the same decisions, `_choose`. What is in flight is bounded by
the gate: at most staleness + 1 steps are open, and as many batches wait to be looked up.

An exception of any stage is kept with a note that names the stage, ends the threads, and is raised by the user's next
call; of several the first, and then an update's. Once it was told, `finish` still applies the updates that were handed
over. Knows neither tables nor torch: it is given how to look up, and each update how to apply it.
"""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from satrap.errors import SatrapError, StreamError
from satrap.inputs import Inputs
from satrap.sync import Gate

Item = TypeVar("Item")

_CLOSE_SECONDS = 10.0  # a reader that does not return within it is left to die with the process, and said so


class _Stage(Enum):
    READ = "read"
    LOOKUP = "lookup"
    UPDATE = "update"


_TABLES = (_Stage.UPDATE, _Stage.LOOKUP)


@dataclass(slots=True, kw_only=True)
class Update:
    """What one optimizer step asks of the tables."""

    steps: Sequence[int]
    """Of each batch in it, rising. The update is of the last."""
    apply: Callable[[], None]
    """Brings the gradients to the worker and updates; does nothing if that is done already."""


@dataclass(slots=True)
class Seconds:
    """Time spent per stage so far. Table work in threads of its own overlaps the others, and lookups updates if each
    have one."""

    read: float = 0.0
    lookup: float = 0.0
    update: float = 0.0
    wait: float = 0.0
    """That the user's thread waited for the others."""
    inside: float = 0.0
    """That the user's thread spent in next() and submit(): waiting, or without threads doing all of the above."""

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(slots=True)
class _State(Generic[Item]):
    """What the threads share, under one condition."""

    waiting: deque[Inputs] = field(default_factory=deque)
    ahead: deque[tuple[Inputs, Item]] = field(default_factory=deque)  # handed over, to be looked up
    ready: deque[Item] = field(default_factory=deque)
    updates: deque[Update] = field(default_factory=deque)
    doing: set[_Stage] = field(default_factory=set)  # the table work that threads of ours are at
    exhausted: bool = False
    paused: bool = False
    closed: bool = False
    error: BaseException | None = None
    told: bool = False  # the error was raised to the user
    failed: int = 0  # batches whose update was refused


class Pipeline(Generic[Item]):
    """See the file's docstring."""

    def __init__(
        self,
        inputs: Iterator[Inputs],
        gate: Gate,
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
        self._state: _State[Item] = _State()
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
            for thread in self._threads:
                thread.start()
            atexit.register(self.close)  # a script that ends in the middle of a stream

    # -- the user's side ----------------------------------------------------------------------------------------------

    def next(self) -> Item | None:
        """The next batch; None at the end. One that only the user's step lets be looked up comes without its rows."""
        with self._inside():
            while True:
                self._raise_error()
                if self._state.ready:
                    item = self._state.ready.popleft()
                    self._changed.notify_all()
                    return item
                if self._ended():
                    return None
                if self._state.closed:
                    raise StreamError("this stream was closed")
                if self._state.ahead or self._blocked():
                    if self._state.waiting:
                        return self._hand_ahead()
                    if not self._threads:
                        self._run(_Stage.READ)
                        continue
                if self._threads or not self._do_one(wanted=True):  # False: another thread has paused it
                    self._wait()

    def bring(self, is_there: Callable[[], bool]) -> bool:
        """Returns once a batch that was handed over ahead of its lookup is there; False if it cannot be looked up
        before the user steps or drops another."""
        with self._inside():
            while not is_there():
                self._raise_error()
                if self._state.closed:
                    raise StreamError("this stream was closed")
                if self._stuck():
                    return False
                if self._threads or not self._do_one(wanted=True):
                    self._wait()
            return True

    def take_back(self, item: Item) -> bool:
        """The last batch handed over goes back, if it is not looked up."""
        with self._changed:
            mine = bool(self._state.ahead) and self._state.ahead[-1][1] is item
            if mine:
                self._state.ahead.pop()
                self._exhaust_gate()
            return mine

    def needs_user(self) -> bool:
        """Whether the next batch cannot be looked up before the user steps or drops one."""
        with self._inside():
            if self._threads:
                while not (self._state.ready or self._ended() or self._blocked() or self._state.closed):
                    self._wait()
            return not self._state.ready and not self._state.closed and self._blocked()

    def is_last(self) -> bool:
        """Whether no other batch will come. Reads one ahead to know it."""
        with self._inside():
            while not (self._state.ready or self._state.waiting or self._state.exhausted or self._state.closed):
                if self._threads:
                    self._wait()
                else:
                    self._run(_Stage.READ)
            return self._state.exhausted and not self._state.ready and not self._state.waiting

    def submit(self, update: Update) -> None:
        """Takes over an update; without threads it is applied before this returns, unless its order must wait."""
        with self._inside():
            self._raise_error()
            self._state.updates.append(update)
            self._changed.notify_all()
            while not self._threads and self._state.updates:
                if not self._do_one(wanted=False):
                    break
            self._raise_error()

    def drop(self, step: int) -> None:
        """A batch of the step will not be updated."""
        with self._changed:
            self._gate.settle(step)
            self._changed.notify_all()

    def drain(self) -> bool:
        """Returns once every submitted update is applied; False if one waits for lookups that wait for the user."""
        with self._changed:
            while self._state.updates or self._state.doing:
                if self._state.error is not None and not self._state.doing:
                    break
                if self._stuck():
                    return False
                if self._threads or not self._do_one(wanted=False):
                    self._changed.wait()
        if self._state.error is not None:
            self.finish()
        return True

    def finish(self) -> None:
        """Looks nothing up any more, and applies every submitted update, in order. Of errors that the user does not
        know the first is raised; calling it again goes on behind the update that was refused."""
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
            while self._state.doing:
                self._changed.wait()
            if not self._state.told:
                self._raise_error()
            while self._state.updates:
                self._run(_Stage.UPDATE)

    @property
    def failed(self) -> int:
        """Batches whose update was refused."""
        return self._state.failed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Every update handed over is applied before, and no table work runs inside."""
        self.drain()
        with self._changed:
            self._state.paused = True
            while self._state.doing:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._state.paused = False
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads; whatever was not updated stays so. Safe to call twice. Does nothing in a fork, which has
        none of the threads."""
        if os.getpid() != self._process:
            return
        if threading.current_thread() in self._threads:  # which collected the stream, and cannot wait for itself
            threading.Thread(target=self.close, name="satrap-close", daemon=True).start()
            return
        until = time.monotonic() + _CLOSE_SECONDS
        with self._changed:
            self._state.closed = True
            self._changed.notify_all()
            # Waits here, which lets go of the lock altogether: a Ctrl-C may have come when it was just taken.
            self._changed.wait_for(lambda: self._living == 0, _CLOSE_SECONDS)
        atexit.unregister(self.close)
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(max(0.1, until - time.monotonic()))
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            self._inputs = iter(())  # a source that runs cannot be closed
            raise StreamError(f"{', '.join(left)} did not end within {_CLOSE_SECONDS:g} s: the source does not return")
        self._state.ahead.clear()
        close = getattr(self._inputs, "close", None)
        if close is not None:
            close()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with self._changed:
                yield
        finally:
            self.seconds.inside += time.perf_counter() - began

    def _wait(self) -> None:
        began = time.perf_counter()
        self._changed.wait()
        self.seconds.wait += time.perf_counter() - began

    # -- deciding; the lock is held -----------------------------------------------------------------------------------

    def _choose(self, wanted: bool, stages: Collection[_Stage] = _TABLES) -> _Stage | None:
        """What table work of these stages may be done now: updates first. wanted: whether a lookup is, were the order
        free."""
        state = self._state
        if state.paused:
            return None
        if _Stage.UPDATE in stages and state.updates and self._gate.may_update(state.updates[0].steps[-1]):
            return _Stage.UPDATE
        if _Stage.LOOKUP not in stages or not (wanted or self._gate.deterministic) or not self._gate.may_look_up():
            return None
        if state.ahead or state.waiting:
            return _Stage.LOOKUP
        return None if self._threads or state.exhausted else _Stage.READ

    def _blocked(self) -> bool:
        """Whether there is no batch for the user, and none will be looked up until he steps or drops one."""
        return not self._state.ready and self._stuck()

    def _stuck(self) -> bool:
        """Whether neither an update nor a lookup is allowed until the user steps or drops a batch."""
        state = self._state
        if state.doing or (state.exhausted and not (state.waiting or state.ahead or state.updates)):
            return False
        may_update = bool(state.updates) and self._gate.may_update(state.updates[0].steps[-1])
        return not may_update and not self._gate.may_look_up()

    def _ended(self) -> bool:
        state = self._state
        return state.exhausted and not state.ready and not state.waiting and _Stage.LOOKUP not in state.doing

    def _raise_error(self) -> None:
        if self._state.error is not None:
            self._state.told = True
            raise self._state.error

    # -- doing --------------------------------------------------------------------------------------------------------

    def _do_one(self, wanted: bool) -> bool:
        """One piece of work in the caller's thread; False if none may be done. The lock is held and kept."""
        stage = self._choose(wanted)
        if stage is None:
            return False
        self._run(stage)
        return True

    def _run(self, stage: _Stage) -> None:
        try:
            if stage is _Stage.READ:
                self._admit(self._read())
            elif stage is _Stage.LOOKUP:
                begun = self._begin_look_up()
                self._looked_up(self._timed_look_up(*begun), begun[-1])
            else:
                self._apply(self._state.updates[0])
                self._finish(self._state.updates.popleft())
        except BaseException as error:
            self._fail(stage, error)
            self._state.told = True
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

    def _fail(self, stage: _Stage, error: BaseException) -> None:
        error.add_note(f"in the {stage.value} stage of the stream, near step {self._gate.next_step}")
        if stage is _Stage.UPDATE and isinstance(error, SatrapError):  # refused; an interrupted one is tried again
            self._state.failed += len(self._state.updates.popleft().steps)
        if self._state.error is None or (self._state.told and stage is _Stage.UPDATE):
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
                self._fail(_Stage.READ, error)

    def _work(self, stages: Sequence[_Stage]) -> None:
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
                    if stage is _Stage.LOOKUP:
                        begun = self._begin_look_up()
                    else:
                        update = self._state.updates[0]
                    self._changed.notify_all()
                if stage is _Stage.LOOKUP:
                    item = self._timed_look_up(*begun)
                else:
                    self._apply(update)
                with self._changed:
                    if stage is _Stage.LOOKUP:
                        self._looked_up(item, begun[-1])
                    else:
                        self._finish(self._state.updates.popleft())
                    self._state.doing.discard(stage)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._state.doing.discard(stage)
                self._fail(stage, error)
