"""Watches the TCP connections of a service in a thread, and closes those that `Connections` selects.

ZeroMQ's monitor reports which file descriptors were accepted and closed; the kernel, how many bytes each has received.
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

import zmq
from zmq.utils.monitor import recv_monitor_message

from satrap.event_log import LimitedLog
from satrap.event_log import event as log_event
from satrap.rpc.connections import Connections
from satrap.rpc.socket_events import watch_events

_MIN_INTERVAL_SECONDS = 0.02
_CHECK_SECONDS = 0.5  # interval of checks while a message is unfinished and nothing is received
_OTHER_FILES = 128  # descriptors other than connections
_MAX_FILES = 1 << 20
_MAX_SILENT = 1024
_RECEIVED_OFFSET = 128  # tcpi_bytes_received in Linux's struct tcp_info
_UNSPECIFIED = socket.AF_UNSPEC.to_bytes(2, sys.byteorder) + bytes(14)  # a struct sockaddr
_WATCHED = select.EPOLLIN | select.EPOLLONESHOT
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_LOG = logging.getLogger("satrap.rpc")
_NOT_OURS = "a peer was refused in the handshake: it has keys of another pair, or no keys, or is not a satrap client"


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
        is_waiting, previous, monitor = False, set[int](), int(self._monitor.fileno())
        self._read_monitor()  # ZeroMQ only signals events that come after the monitor was found empty
        while True:
            ready = {fd for fd, _ in self._events.poll(0 if previous else _CHECK_SECONDS if is_waiting else None)}
            if self._wakeup in ready:
                return
            with self._lock:
                if monitor in ready:
                    ready.remove(monitor)
                    self._read_monitor()
                for fd in ready | previous:
                    if _is_open(fd, self._connections.inode(fd)):
                        self._connections.record_received(fd, _received_bytes(fd))
                for fd, inode in self._connections.select_to_close(time.monotonic()).items():
                    self._reset(fd, inode)
                is_waiting = self._connections.is_waiting()
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
