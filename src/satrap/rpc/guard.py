"""Limits the TCP connections of a service, so that strangers cannot exhaust its file descriptors or its memory.

ZeroMQ accepts every connection, and tells a thread of each that it accepts or loses. `Connections` selects those to
close, from numbers alone: connections that have sent no message have a lower limit, and are closed first, from the
oldest; then the newest of the others.

With keys this limits bytes too: ZeroMQ takes one frame of at most 4 MiB (`maxmsgsize`) from a peer that is not
authenticated yet. A peer that has the key, or reaches a service without keys, may change all rows anyway; so its
unfinished messages are not limited.

A connection is closed by a shutdown in both directions: Linux takes nothing more from the peer, and ZeroMQ notices the
end, frees what it has of a message and closes its socket. A client connects again.
"""

import logging
import os
import resource
import socket
import threading
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from satrap.event_log import LimitedLog
from satrap.event_log import event as log_event
from satrap.rpc.handshakes import watch_events

_OTHER_FILES = 128  # descriptors other than connections
_MAX_FILES = 1 << 20
_MAX_SILENT = 1024
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.MONITOR_STOPPED
_LOG = logging.getLogger("satrap.rpc")
_NOT_OURS = "a peer was refused in the handshake: it has keys of another pair, or no keys, or is not a satrap client"


class Connections:
    """The TCP connections of one service: their file descriptors, each with its inode, since descriptors are reused."""

    def __init__(self, max_connections: int, max_silent: int) -> None:
        self._max_connections, self._max_silent = max_connections, max_silent
        self._silent, self._senders = dict[int, int](), dict[int, int]()  # in the order of their beginning

    def __len__(self) -> int:
        return len(self._silent) + len(self._senders)

    def record_accepted(self, fd: int, inode: int) -> None:
        self.record_closed(fd)
        self._silent[fd] = inode

    def record_closed(self, fd: int) -> None:
        self._silent.pop(fd, None)
        self._senders.pop(fd, None)

    def record_message(self, fd: int) -> None:
        if (inode := self._silent.pop(fd, None)) is not None:
            self._senders[fd] = inode

    def select_to_close(self) -> dict[int, int]:
        """Return the connections to close, with their inodes, and forget them."""
        surplus = max(0, len(self._silent) - self._max_silent, len(self) - self._max_connections)
        selected = dict([*self._silent.items(), *reversed(self._senders.items())][:surplus])
        for fd in selected:
            self.record_closed(fd)
        return selected


class Guard:
    """The watching thread of one service. Create it before the socket is bound, so that it misses no connection."""

    def __init__(self, router: "zmq.Socket[bytes]") -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        max_connections = max(8, (_MAX_FILES if files == resource.RLIM_INFINITY else files) - _OTHER_FILES)
        self._connections = Connections(max_connections, min(_MAX_SILENT, max_connections // 2))
        self._lock = threading.Lock()  # guards the connections
        self.num_closed = 0
        """Number of connections closed so far."""
        self._router, self._monitor = router, watch_events(router, _EVENTS)
        self._log_refusal = LimitedLog(_LOG.warning)
        self._thread = threading.Thread(target=self._watch, name="satrap-rpc-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Call it in a thread that may use the router, before the router is closed."""
        self._router.disable_monitor()
        self._thread.join()

    def record_message(self, frame: zmq.Frame) -> None:
        """Record that ZeroMQ delivered a message with this frame."""
        fd = int(frame.get("__fd"))
        with self._lock:
            self._connections.record_message(fd)

    def _watch(self) -> None:
        with self._monitor:
            while (event := recv_monitor_message(self._monitor))["event"] != zmq.Event.MONITOR_STOPPED:
                if event["event"] == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:  # the value is the kind of the failure
                    self._log_refusal("%s", _NOT_OURS, extra=log_event("hello_refused", why=_NOT_OURS))
                    continue
                with self._lock:
                    fd = int(event["value"])
                    if event["event"] == zmq.Event.DISCONNECTED:
                        self._connections.record_closed(fd)
                    elif (inode := _inode(fd)) is not None:
                        self._connections.record_accepted(fd, inode)
                    for surplus, its_inode in self._connections.select_to_close().items():
                        self.num_closed += 1
                        _shut_down(surplus, its_inode)


def _inode(fd: int) -> int | None:
    """Return the inode of a descriptor, which ZeroMQ may close at any time; None: it is closed."""
    with suppress(OSError):
        return os.fstat(fd).st_ino
    return None


def _shut_down(fd: int, inode: int) -> None:
    """End a connection through its own descriptor, since there may be none left for a duplicate."""
    with suppress(OSError):
        if os.fstat(fd).st_ino == inode:
            connection = socket.socket(fileno=fd)
            try:
                connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()  # ZeroMQ's socket stays open
