"""The ledger of a server's requests, from arrival to reply: queued, running, refused, and the route of each reply.

Pure: no socket, no thread, no lock; time is passed in. The service calls it under its lock.

(client, call) identifies a request. Invariants, verified by `check`:

    every open request is queued or running, never both; an identity is open once
    bytes of the open requests = open_bytes <= max_bytes;  open requests <= max_requests
    a client has a route exactly as long as it has an open request
    arrived = queued + running + replied + unsent + expired + dropped

A duplicate of an open request is not queued again; its caller gets the reply "working". Every arrival, including a
duplicate, makes its route the newest of its client, and replies take that route. A request whose deadline passed in the
queue is dropped: its caller has given up.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

from satrap.config.validation import check_integer
from satrap.rpc.header import MAX_FRAMES, Header
from satrap.rpc.values import Frames

BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
"""Upper bounds of the bins in seconds: 100 us to 100 s. One more bin holds longer calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of the memory that callers can make a service use."""

    max_requests: int = 1024
    """Requests that are queued, running, or waiting for their Future. Further ones get the reply "busy"."""
    max_bytes: int = 1 << 30
    """Bytes of those requests."""
    max_frame_bytes: int = 256 << 20
    """Bytes of one array. A connection that sends a larger frame is closed before the frame is in memory."""
    max_frames: int = 2500
    """Frames of one message. Further frames are discarded as they arrive, and the request is refused."""

    def __post_init__(self) -> None:
        for name, high in (
            ("max_requests", 1 << 20),
            ("max_bytes", 1 << 62),
            ("max_frame_bytes", 1 << 62),
            ("max_frames", MAX_FRAMES),
        ):
            check_integer("Limits", name, getattr(self, name), 1, high)


@dataclass(slots=True)
class Counts:
    """Counters of messages and replies."""

    arrived: int = 0
    """Requests that were accepted."""
    duplicates: int = 0
    """Duplicates of open requests; not run again."""
    busy: int = 0
    """Requests refused because a limit was reached or the service was closing; the caller retries."""
    bad: int = 0
    """Messages that were not readable, or named an unknown method."""
    expired: int = 0
    """Requests whose deadline passed in the queue; not run."""
    dropped: int = 0
    """Requests that were open when the service closed."""
    replied: int = 0
    """Replies sent, including errors."""
    failed: int = 0
    """Calls that ended with an exception."""
    unsent: int = 0
    """Replies whose caller was disconnected or did not read; it retries."""
    received_bytes: int = 0
    """Bytes of all messages received."""
    sent_bytes: int = 0
    """Bytes of all messages sent."""


@dataclass(slots=True, eq=False)
class Request:
    """An open request."""

    header: Header
    frames: Frames
    deadline: float
    started_at: float = 0.0
    """When it started to run."""

    @property
    def name(self) -> tuple[int, int]:
        return self.header.client, self.header.call


class Admission(Enum):
    """The decision about an arrival."""

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    BUSY = "busy"


@dataclass(slots=True)
class _Caller:
    route: bytes
    num_open: int = 0


@dataclass(slots=True)
class Ledger:
    """The open requests of one service."""

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

    def arrive(self, header: Header, frames: Frames, route: bytes, now: float) -> Admission:
        """Queue a request, unless it is a duplicate or there is no room."""
        deadline = now + header.deadline_ms / 1000
        caller = self._callers.get(header.client)
        if caller is not None:
            caller.route = route
        request = self._open.get((header.client, header.call))
        if request is not None:
            request.deadline = max(request.deadline, deadline)
            self.counts.duplicates += 1
            return Admission.DUPLICATE
        if not self._has_room(header.body_bytes, now):
            self.counts.busy += 1
            return Admission.BUSY
        request = Request(header, frames, deadline)
        self._queued.append(request)
        self._open[request.name] = request
        self.open_bytes += header.body_bytes
        self._callers.setdefault(header.client, _Caller(route)).num_open += 1
        self.counts.arrived += 1
        return Admission.QUEUED

    def start_next(self, now: float) -> Request | None:
        """Return the next request to run; None if none is queued. Drops requests past their deadline."""
        while self._queued:
            request = self._queued.popleft()
            if now < request.deadline:
                request.started_at = now
                return request
            self._expire(request)
        return None

    def finish(self, request: Request) -> bytes | None:
        """End a running request. Returns the route of its reply, or None if it was dropped meanwhile."""
        if self._open.get(request.name) is not request:
            return None
        self.counts.replied += 1
        return self._remove(request)

    def record_unsent(self) -> None:
        """Record that the reply of a finished request could not be sent."""
        self.counts.replied -= 1
        self.counts.unsent += 1

    def drop_queued(self) -> None:
        """Drop all queued requests, and refuse new ones from now on."""
        self.closed = True
        while self._queued:
            self._remove(self._queued.popleft())
            self.counts.dropped += 1

    def drop_running(self) -> None:
        """Drop the running requests, whose Future is not done when the service ends."""
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
        self.open_bytes -= request.header.body_bytes
        caller = self._callers[request.header.client]
        caller.num_open -= 1
        if not caller.num_open:
            del self._callers[request.header.client]
        return caller.route

    def to_dict(self) -> dict[str, int]:
        """Return the counters, and the numbers of queued and running requests."""
        return {**asdict(self.counts), "queued": self.num_queued, "running": self.num_running}

    def check(self) -> None:
        queued = {id(request) for request in self._queued}
        assert len(queued) == len(self._queued) <= len(self._open) <= self.limits.max_requests
        assert queued <= {id(request) for request in self._open.values()}
        num_bytes = sum(request.header.body_bytes for request in self._open.values())
        assert self.open_bytes == num_bytes <= self.limits.max_bytes
        assert all(name == request.name for name, request in self._open.items())
        clients = [client for client, _ in self._open]
        assert {client: caller.num_open for client, caller in self._callers.items()} == {
            client: clients.count(client) for client in clients
        }
        ended = self.counts.replied + self.counts.unsent + self.counts.expired + self.counts.dropped
        assert self.counts.arrived == len(self._open) + ended


class CallTimes:
    """The time that the calls of a service take: a histogram of seconds for each method."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """names: the name of each method, by its number."""
        self._names = names
        self._counts = {number: [0] * (len(BOUNDS) + 1) for number in names}
        self._totals = dict.fromkeys(names, 0.0)

    def record(self, method: int, seconds: float) -> None:
        """Add a call of a method."""
        self._counts[method][bisect_left(BOUNDS, seconds)] += 1
        self._totals[method] += seconds

    def to_dict(self) -> dict[str, tuple[list[int], float]]:
        """Return, by name of the method, the number of calls in each bin and their sum in seconds."""
        return {name: (list(self._counts[code]), self._totals[code]) for code, name in self._names.items()}
