"""Limits the TCP connections of a service, so that no stranger can exhaust its memory or its file descriptors.

ZeroMQ accepts every connection, and collects all frames of a message before it delivers the first one. So a thread
compares, for each connection, the bytes that TCP has received with those that were delivered as messages: the
difference is buffered in ZeroMQ until its message is complete. `Connections` decides, from numbers alone:

1. If there are too many connections, those that have not sent a message are closed first, from the oldest; then the
   newest. Silent ones have a lower limit.
2. If the unfinished messages are too large together, connections are closed: first those that have received less than
   64 KiB in the last second, then those whose message started last, so that the first one can finish. A client sends
   its message again.

The thread sleeps while nothing is received, and checks at most every 20 ms while something is. To close a connection it
dissolves it (connect to AF_UNSPEC): the peer gets a reset, and ZeroMQ notices and closes its socket. After a shutdown,
ZeroMQ would continue to read for as long as the peer sends.
"""

import ctypes
import logging
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from satrap.event_log import LimitedLog
from satrap.event_log import event as log_event
from satrap.rpc.handshakes import watch_events

_MIN_INTERVAL_SECONDS = 0.02
_OTHER_FILES = 128  # descriptors other than connections
_MAX_FILES = 1 << 20
_MAX_SILENT = 1024
_SLACK_BYTES = 128 << 10  # per connection: frame headers, heartbeats, and small unfinished messages
_PROGRESS_BYTES, _STALL_SECONDS = 64 << 10, 1.0
_RECEIVED_OFFSET = 128  # tcpi_bytes_received in Linux's struct tcp_info
_UNSPECIFIED = socket.AF_UNSPEC.to_bytes(2, sys.byteorder) + bytes(14)  # a struct sockaddr
_WATCHED = select.EPOLLIN | select.EPOLLONESHOT
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_LOG = logging.getLogger("satrap.rpc")
_NOT_OURS = "a peer was refused in the handshake: it has keys of another pair, or no keys, or is not a satrap client"


@dataclass(slots=True, eq=False)
class _Peer:
    inode: int
    """Inode of the descriptor, since descriptor numbers are reused."""
    has_sent: bool = False
    received: int = 0
    delivered: int = 0
    """Received bytes that were delivered, including their overhead."""
    unfinished_since: float | None = None
    """Time at which the unfinished message started; None: there is none."""
    progress_bytes: int = 0
    """Received bytes at the last progress, whose time is `progress_at`."""
    progress_at: float = 0.0

    @property
    def unfinished(self) -> int:
        return max(0, self.received - self.delivered)

    def rank(self, now: float) -> tuple[bool, float]:
        """Return its place in the order in which unfinished messages are dropped."""
        return now - self.progress_at <= _STALL_SECONDS, -(self.unfinished_since or 0.0)


class Connections:
    """The TCP connections of one service, by file descriptor."""

    def __init__(self, *, max_connections: int, max_silent: int, max_unfinished_bytes: int) -> None:
        self._max_connections, self._max_silent = max_connections, max_silent
        self._max_unfinished_bytes = max_unfinished_bytes
        self._peers: dict[int, _Peer] = {}  # in the order of their creation

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of the unfinished messages of all connections."""
        return sum(peer.unfinished for peer in self._peers.values())

    def record_accepted(self, fd: int, inode: int) -> None:
        self._peers.pop(fd, None)
        self._peers[fd] = _Peer(inode)

    def record_closed(self, fd: int) -> None:
        self._peers.pop(fd, None)

    def inode(self, fd: int) -> int | None:
        """Return the inode of a connection, if it is known."""
        peer = self._peers.get(fd)
        return None if peer is None else peer.inode

    def record_message(self, fd: int, num_bytes: int) -> None:
        """Record that a message of so many bytes was delivered."""
        if (peer := self._peers.get(fd)) is not None:
            peer.has_sent, peer.unfinished_since = True, None
            peer.delivered += num_bytes

    def record_received(self, fd: int, num_bytes: int, now: float) -> None:
        """Record how many bytes TCP has received on a connection in total."""
        peer = self._peers.get(fd)
        if peer is None:
            return
        peer.received = num_bytes
        if peer.unfinished_since is None:
            if peer.unfinished <= _SLACK_BYTES:
                peer.delivered = peer.received if peer.has_sent else 0
                return
            peer.unfinished_since, peer.progress_bytes, peer.progress_at = now, peer.received, now
        elif peer.received - peer.progress_bytes >= _PROGRESS_BYTES:
            peer.progress_bytes, peer.progress_at = peer.received, now

    def select_to_close(self, now: float) -> dict[int, int]:
        """Return the connections to close, with their inodes, and forget them."""
        silent = [fd for fd, peer in self._peers.items() if not peer.has_sent]
        senders = [fd for fd, peer in self._peers.items() if peer.has_sent]
        surplus = max(0, len(silent) - self._max_silent, len(self._peers) - self._max_connections)
        selected = {fd: self._peers.pop(fd).inode for fd in [*silent, *reversed(senders)][:surplus]}
        total = self.unfinished_bytes
        if total > self._max_unfinished_bytes:
            unfinished = [fd for fd in reversed(self._peers) if self._peers[fd].unfinished_since is not None]
            for fd in sorted(unfinished, key=lambda fd: self._peers[fd].rank(now)):
                if total <= self._max_unfinished_bytes:
                    break
                total -= self._peers[fd].unfinished
                selected[fd] = self._peers.pop(fd).inode
        return selected


class Guard:
    """The watching thread of one service. Create it before the socket is bound, so that it misses no connection."""

    def __init__(self, router: "zmq.Socket[bytes]", max_unfinished_bytes: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = _MAX_FILES if files == resource.RLIM_INFINITY else files
        max_connections = max(8, files - _OTHER_FILES)
        self._connections = Connections(
            max_connections=max_connections,
            max_silent=min(_MAX_SILENT, max_connections // 2),
            max_unfinished_bytes=max_unfinished_bytes,
        )
        self._lock = threading.Lock()  # guards the connections
        self.num_closed = 0
        """Number of connections closed so far."""
        self._router, self._monitor = router, watch_events(router, _EVENTS)
        self._libc = ctypes.CDLL(None)
        self._log_refusal = LimitedLog(_LOG.warning)
        self._wakeup = os.eventfd(0)
        self._events = select.epoll()
        self._events.register(self._monitor.fileno(), select.EPOLLIN)
        self._events.register(self._wakeup, select.EPOLLIN)
        self._thread = threading.Thread(target=self._watch, name="satrap-rpc-guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Call it in a thread that may use the router, before the router is closed."""
        if self._thread.ident is not None:
            os.eventfd_write(self._wakeup, 1)
            self._thread.join()
        self._router.disable_monitor()
        self._monitor.close(0)
        self._events.close()
        os.close(self._wakeup)

    def record_message(self, frame: zmq.Frame, num_bytes: int) -> None:
        """Record that ZeroMQ delivered a message with this frame, of so many bytes."""
        fd = int(frame.get("__fd"))
        with self._lock:
            self._connections.record_message(fd, num_bytes)

    def _watch(self) -> None:
        # Descriptors of the previous round are checked again: ZeroMQ may have read bytes, and so have ended the event,
        # before the descriptor was watched.
        previous, monitor = set[int](), int(self._monitor.fileno())
        self._read_monitor()  # ZeroMQ only signals events that come after the monitor was found empty
        while True:
            ready = {fd for fd, _ in self._events.poll(0 if previous else None)}
            if self._wakeup in ready:
                return
            with self._lock:
                now = time.monotonic()
                if monitor in ready:
                    ready.remove(monitor)
                    self._read_monitor()
                for fd in ready | previous:
                    if _is_open(fd, self._connections.inode(fd)):
                        self._connections.record_received(fd, _received_bytes(fd), now)
                for fd, inode in self._connections.select_to_close(now).items():
                    self._reset(fd, inode)
            if ready:
                time.sleep(_MIN_INTERVAL_SECONDS)
            for fd in ready:
                with suppress(OSError):  # the connection is closed
                    self._events.modify(fd, _WATCHED)
            previous = ready

    def _read_monitor(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)
            fd = int(event["value"])
            if event["event"] == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:  # the value is the kind of the failure
                self._log_refusal("%s", _NOT_OURS, extra=log_event("hello_refused", why=_NOT_OURS))
                continue
            if event["event"] == zmq.Event.DISCONNECTED:
                self._connections.record_closed(fd)
                continue
            with suppress(OSError):  # the connection is closed
                self._connections.record_accepted(fd, os.fstat(fd).st_ino)
                self._events.register(fd, _WATCHED)

    def _reset(self, fd: int, inode: int) -> None:
        self.num_closed += 1
        if _is_open(fd, inode):
            self._libc.connect(fd, _UNSPECIFIED, len(_UNSPECIFIED))


def _is_open(fd: int, inode: int | None) -> bool:
    """Return whether the descriptor still belongs to the connection, which ZeroMQ may close at any time. A duplicate
    would keep it open, but when connections must be closed there may be no descriptors left."""
    with suppress(OSError):
        return os.fstat(fd).st_ino == inode
    return False


def _received_bytes(fd: int) -> int:
    """Return the number of bytes that TCP has received on the connection."""
    with suppress(OSError):
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fd)
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_OFFSET + 8)
            return int(struct.unpack_from("Q", info, _RECEIVED_OFFSET)[0])
        finally:
            connection.detach()  # ZeroMQ's socket stays open
    return 0
