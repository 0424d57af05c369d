"""Decides which calls a server admits, and runs some calls exclusively.

A call that works on rows must belong to the server's attempt and shard map, or is refused; one that only reads may
belong to no attempt. A call that replaces the attempt, the map or all tables waits until no such call is running, and
keeps new ones waiting meanwhile.
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
    """Admission of calls to a `ServerState`, which exists once the server has a job."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0  # admitted calls that have not finished
        self._paused = False  # an exclusive call waits or runs
        self._work_seconds = 0.0
        self._served: ServerState | None = None
        self._turn = FencingToken()

    def _ready(self, greeted: bool = True) -> ServerState:
        if self._served is None or (greeted and not self._served.greeted):
            raise NotReadyError(
                "found a call to a server that was restarted or has no job yet; expected a handshake: call hello first"
            )
        return self._served

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Run the body while no admitted call is running, and admit none meanwhile."""
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
        """Run the body as an admitted call, never together with an exclusive one.

        origin: its attempt and shard map must be the server's. None for a migration's calls, which check otherwise.
        reads: the call changes nothing, so it may belong to no attempt."""
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
        """Raise unless the call belongs to this attempt and shard map. A server that owns nothing follows a newer
        attempt: it may have joined while the attempt started, and has nothing that belongs to the old one."""
        if origin.attempt > served.engine.attempt and served.owns_nothing:
            served.engine.begin_attempt(origin.attempt)
        if origin.attempt != served.engine.attempt:
            raise self._other_attempt(served, origin)
        self._require_map(served, origin)

    def _require_map(self, served: ServerState, origin: Origin) -> None:
        if origin.map_version != served.members.version:
            raise MovedError(
                f"found a call of bucket map {origin.map_version}; expected one of the server's, "
                f"{served.members.version}: take that map and call again"
            )

    def _require_turn(self, origin: Origin) -> None:
        """Raise ConfigError if another coordinator has taken a newer fencing token."""
        if origin.step < self._turn.number:
            raise ConfigError(
                f"another migration is running: it holds fencing token {self._turn.number}, this one {origin.step}; "
                "wait until it has ended, then run `satrap move` again"
            )

    def _other_attempt(self, served: ServerState, origin: Origin) -> AttemptError:
        return AttemptError(
            f"found a call of attempt {origin.attempt}; expected the server's, {served.engine.attempt}: "
            + (
                "this process was replaced"
                if origin.attempt < served.engine.attempt
                else "the server was restarted without its rows; resume the last checkpoint"
            )
        )
