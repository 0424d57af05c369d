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
        self.condition = threading.Condition()
        """Guards the state against other calls that run at the same time."""
        self._running = 0  # admitted calls that have not finished
        self._paused = False  # an exclusive call waits or runs
        self.work_seconds = 0.0
        """Seconds of all admitted calls."""
        self.state: ServerState | None = None
        """None: there is no job."""
        self.fencing_token = FencingToken()

    def require_state(self, needs_handshake: bool = True) -> ServerState:
        """Return the state; NotReadyError if there is none, or if there was no handshake since the process started."""
        if self.state is None or (needs_handshake and not self.state.has_handshake):
            raise NotReadyError(
                "found a call to a server that was restarted or has no job yet; expected a handshake: call hello first"
            )
        return self.state

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run the body while no admitted call is running, and admit none meanwhile."""
        with self.condition:
            self.condition.wait_for(lambda: not self._paused)
            self._paused = True
            try:
                self.condition.wait_for(lambda: not self._running)
                yield
            finally:
                self._paused = False
                self.condition.notify_all()

    @contextmanager
    def admit(self, origin: Origin | None, *, reads: bool = False) -> Iterator[ServerState]:
        """Run the body as an admitted call, never together with an exclusive one.

        origin: its attempt and shard map must be the server's. None for a migration's calls, which check otherwise.
        reads: the call changes nothing, so it may belong to no attempt."""
        is_reader = reads and origin is not None and origin.attempt == NO_ATTEMPT
        with self.condition:
            self.condition.wait_for(lambda: not self._paused)
            state = self.require_state(needs_handshake=not is_reader)
            if origin is not None and not is_reader:
                self.require_current(state, origin)
            elif origin is not None:
                self.require_map(state, origin)
            self._running += 1
        start_time = time.perf_counter()
        try:
            yield state
        finally:
            with self.condition:
                self._running -= 1
                self.work_seconds += time.perf_counter() - start_time
                if self._paused:
                    self.condition.notify_all()

    def require_current(self, state: ServerState, origin: Origin) -> None:
        """Raise unless the call belongs to this attempt and shard map. A server that owns nothing follows a newer
        attempt: it may have joined while the attempt started, and has nothing that belongs to the old one."""
        if origin.attempt > state.engine.attempt and state.owns_nothing:
            state.engine.begin_attempt(origin.attempt)
        if origin.attempt != state.engine.attempt:
            raise self.attempt_error(state, origin)
        self.require_map(state, origin)

    def require_map(self, state: ServerState, origin: Origin) -> None:
        """Raise MovedError unless the call belongs to this shard map."""
        if origin.map_version != state.shard_map.version:
            raise MovedError(
                f"found a call of bucket map {origin.map_version}; expected one of the server's, "
                f"{state.shard_map.version}: take that map and call again"
            )

    def require_fencing_token(self, origin: Origin) -> None:
        """Raise ConfigError if another coordinator has taken a newer fencing token."""
        if origin.step < self.fencing_token.number:
            raise ConfigError(
                f"another migration is running: it holds fencing token {self.fencing_token.number}, this one "
                f"{origin.step}; wait until it has ended, then run `satrap migrate` again"
            )

    def attempt_error(self, state: ServerState, origin: Origin) -> AttemptError:
        """Return the error for a call of another attempt."""
        return AttemptError(
            f"found a call of attempt {origin.attempt}; expected the server's, {state.engine.attempt}: "
            + (
                "this process was replaced"
                if origin.attempt < state.engine.attempt
                else "the server was restarted without its rows; start the script again to resume the last checkpoint"
            )
        )
