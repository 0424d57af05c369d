"""The door of a server: which calls may come in, and when none may.

A call that works on rows is of the server's attempt and of its bucket map, or is refused; one that only reads them may
be of no attempt. What changes the attempt, the map or the tables as a whole waits until no such call runs, and none
begins meanwhile.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from satrap.errors import AttemptError, ConfigError, MovedError, NotReadyError
from satrap.rpc import Origin
from satrap.server.protocol import NO_ATTEMPT
from satrap.server.state import FencingToken, ServerState


class CallFence:
    """See the file's docstring. What is behind it, is a `ServerState` once there is a job."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0  # calls that work on rows
        self._paused = False  # none begins
        self._work_seconds = 0.0
        self._served: ServerState | None = None
        self._turn = FencingToken()

    def _ready(self, greeted: bool = True) -> ServerState:
        if self._served is None or (greeted and not self._served.greeted):
            raise NotReadyError("this server has no job yet, or was restarted: say hello to it first")
        return self._served

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Around what no call that works on rows may see: those that run end first, and none begins."""
        with self._changed:
            while self._paused:
                self._changed.wait()
            self._paused = True
            try:
                while self._running:
                    self._changed.wait()
                yield
            finally:
                self._paused = False
                self._changed.notify_all()

    @contextmanager
    def _working(self, origin: Origin | None, *, reads: bool = False) -> Iterator[ServerState]:
        """Around a call that works on rows: of this attempt and map, and none while an attempt or a map begins. None:
        a mover's, which says otherwise what it is of. reads: it changes nothing, and may be of no attempt."""
        looks = reads and origin is not None and origin.attempt == NO_ATTEMPT
        with self._changed:
            while self._paused:
                self._changed.wait()
            served = self._ready(greeted=not looks)
            if origin is not None and not looks:
                self._require(served, origin)
            elif origin is not None:
                self._require_map(served, origin)
            self._running += 1
        began = time.perf_counter()
        try:
            yield served
        finally:
            with self._changed:
                self._running -= 1
                self._work_seconds += time.perf_counter() - began
                if self._paused:
                    self._changed.notify_all()

    def _require(self, served: ServerState, origin: Origin) -> None:
        """Raises unless the call is of this attempt and bucket map. A server that owns nothing has nothing to begin an
        attempt with: it may have joined while one began."""
        if origin.attempt > served.engine.attempt and served.owns_nothing:
            served.engine.begin_attempt(origin.attempt)
        if origin.attempt != served.engine.attempt:
            raise self._other_attempt(served, origin)
        self._require_map(served, origin)

    def _require_map(self, served: ServerState, origin: Origin) -> None:
        if origin.map_version != served.members.version:
            raise MovedError(
                f"the call is of bucket map {origin.map_version} and the server at {served.members.version}"
            )

    def _require_turn(self, origin: Origin) -> None:
        """Of a mover's call."""
        if origin.step < self._turn.number:
            raise ConfigError(
                f"another mover is at work: turn {self._turn.number} has begun after this one's, {origin.step}"
            )

    def _other_attempt(self, served: ServerState, origin: Origin) -> AttemptError:
        return AttemptError(
            f"the call is of attempt {origin.attempt} and the server at {served.engine.attempt}: "
            + (
                "this process was replaced"
                if origin.attempt < served.engine.attempt
                else "it was started again without its rows; resume the last checkpoint"
            )
        )
