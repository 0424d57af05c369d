"""A server's requests from arrival to reply: what is queued, what runs, whom to answer, what is refused.

Pure: no socket, no thread, no lock; time is passed in. The service calls it under its lock.

A request is named by (client, call). Invariants, walked by `check`:

    every open request is queued or running, never both; one name is open once
    bytes of the open requests = open_bytes <= max_bytes;  open requests <= max_requests
    a client has a route exactly as long as it has an open request
    arrived = queued + running + replied + unsent + expired + dropped

A duplicate of an open request is not queued again; its caller is told that it is known. Every arrival, duplicates
included, makes its route the newest of its client, and replies go there. A request whose deadline passed in the queue
is dropped: nobody waits for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum

from satrap.config.validation import check_integer
from satrap.errors import ConfigError
from satrap.rpc.header import MAX_FRAMES, Header
from satrap.rpc.values import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What bounds the memory that callers can make a service use."""

    max_requests: int = 1024
    """Queued, running, or waiting for their Future. One more is told that the server is busy."""
    max_bytes: int = 1 << 30
    """Of those requests."""
    max_frame_bytes: int = 256 << 20
    """Of one array. A connection that sends a larger frame is cut before it is in memory."""
    max_partial_bytes: int = 1 << 30
    """Of messages that have come in part, over TCP, of all connections together; and so of any one message. Beyond it
    connections are ended: see connections.py."""
    max_frames: int = 2500
    """Of one message. The surplus is thrown away as it comes, and the request refused."""

    def __post_init__(self) -> None:
        for name, high in (
            ("max_requests", 1 << 20),
            ("max_bytes", 1 << 62),
            ("max_frame_bytes", 1 << 62),
            ("max_partial_bytes", 1 << 62),
        ):
            check_integer("Limits", name, getattr(self, name), 1, high, ConfigError)
        check_integer("Limits", "max_frames", self.max_frames, 1, MAX_FRAMES, ConfigError)


@dataclass(slots=True)
class Counts:
    """What became of the messages that came, and of the replies."""

    arrived: int = 0
    """Requests that were taken in."""
    duplicates: int = 0
    """Of requests that were open; not run again."""
    busy: int = 0
    """Requests refused because a limit was reached or the service was closing; the caller tries again."""
    bad: int = 0
    """Messages that could not be read, or are of no method here."""
    expired: int = 0
    """Requests whose deadline passed in the queue; not run."""
    dropped: int = 0
    """Requests that were open when the service closed."""
    replied: int = 0
    """Replies sent, errors included."""
    failed: int = 0
    """Calls that ended with an exception."""
    unsent: int = 0
    """Replies whose caller was gone or did not read; it asks again."""


@dataclass(slots=True, eq=False)
class Request:
    """An open request."""

    header: Header
    frames: Sequence[Buffer]
    num_bytes: int
    deadline: float

    @property
    def name(self) -> tuple[int, int]:
        return self.header.client, self.header.call


class Verdict(Enum):
    """What is to be done about an arrival."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    BUSY = "busy"


@dataclass(slots=True)
class _Caller:
    route: bytes
    num_open: int = 0


@dataclass(slots=True)
class Ledger:
    """See the file's docstring."""

    limits: Limits
    counts: Counts = field(default_factory=Counts)
    open_bytes: int = 0
    closed: bool = False
    _queued: deque[Request] = field(default_factory=deque)
    _open: dict[tuple[int, int], Request] = field(default_factory=dict)
    _callers: dict[int, _Caller] = field(default_factory=dict)

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_running(self) -> int:
        return len(self._open) - len(self._queued)

    def arrive(self, header: Header, frames: Sequence[Buffer], route: bytes, now: float) -> Verdict:
        """Takes a request in, unless it is open or there is no room."""
        deadline = now + header.deadline_ms / 1000
        caller = self._callers.get(header.client)
        if caller is not None:
            caller.route = route
        known = self._open.get((header.client, header.call))
        if known is not None:
            known.deadline = max(known.deadline, deadline)
            self.counts.duplicates += 1
            return Verdict.DUPLICATE
        if not self._has_room(header.body_bytes, now):
            self.counts.busy += 1
            return Verdict.BUSY
        request = Request(header, frames, header.body_bytes, deadline)
        self._queued.append(request)
        self._open[request.name] = request
        self.open_bytes += request.num_bytes
        self._callers.setdefault(header.client, _Caller(route)).num_open += 1
        self.counts.arrived += 1
        return Verdict.QUEUED

    def begin(self, now: float) -> Request | None:
        """The next request to run; None if none is queued that anybody waits for."""
        while self._queued:
            request = self._queued.popleft()
            if now < request.deadline:
                return request
            self._expire(request)
        return None

    def finish(self, request: Request) -> bytes | None:
        """Ends a request that was begun; the route of its reply, or None if it was dropped meanwhile."""
        if self._open.get(request.name) is not request:
            return None
        self.counts.replied += 1
        return self._remove(request)

    def unsent(self) -> None:
        """The reply of a finished request could not be sent."""
        self.counts.replied -= 1
        self.counts.unsent += 1

    def drop_queued(self) -> None:
        """Nothing is taken in from here on, and what is queued is dropped."""
        self.closed = True
        while self._queued:
            self._remove(self._queued.popleft())
            self.counts.dropped += 1

    def drop_running(self) -> None:
        """Forgets what runs: whose Future is not done when the service ends."""
        for request in list(self._open.values()):
            self._remove(request)
            self.counts.dropped += 1

    def _has_room(self, num_bytes: int, now: float) -> bool:
        if self.closed:
            return False
        if self._fits(num_bytes):
            return True
        expired = [request for request in self._queued if now >= request.deadline]
        for request in expired:
            self._queued.remove(request)
            self._expire(request)
        return self._fits(num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return len(self._open) < self.limits.max_requests and self.open_bytes + num_bytes <= self.limits.max_bytes

    def _expire(self, request: Request) -> None:
        self._remove(request)
        self.counts.expired += 1

    def _remove(self, request: Request) -> bytes:
        del self._open[request.name]
        self.open_bytes -= request.num_bytes
        caller = self._callers[request.header.client]
        caller.num_open -= 1
        if not caller.num_open:
            del self._callers[request.header.client]
        return caller.route

    def to_dict(self) -> dict[str, int]:
        """The counts, and what is queued and running now."""
        return {**asdict(self.counts), "queued": self.num_queued, "running": self.num_running}

    def check(self) -> None:
        """Walks the invariants."""
        queued = {id(request) for request in self._queued}
        assert len(queued) == len(self._queued) <= len(self._open) <= self.limits.max_requests
        assert queued <= {id(request) for request in self._open.values()}
        assert self.open_bytes == sum(request.num_bytes for request in self._open.values()) <= self.limits.max_bytes
        assert all(name == request.name for name, request in self._open.items())
        clients = [client for client, _ in self._open]
        assert {client: caller.num_open for client, caller in self._callers.items()} == {
            client: clients.count(client) for client in clients
        }
        ended = self.counts.replied + self.counts.unsent + self.counts.expired + self.counts.dropped
        assert self.counts.arrived == len(self._open) + ended
