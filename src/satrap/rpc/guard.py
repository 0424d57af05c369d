"""Watches the TCP connections of a service, and ends those that `Connections` finds too many, too slow or too large.

A thread of its own. ZeroMQ's monitor tells it which file descriptors were accepted and closed; the kernel, how many
bytes each has received. It sleeps while nothing comes, and looks at most every 20 ms while something does. To end a
connection it dissolves it (connect to AF_UNSPEC): its peer gets a reset, and ZeroMQ notices and closes its socket.
After a shutdown ZeroMQ would read on for as long as the peer sends.
"""

import ctypes
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from satrap.rpc.connections import Connections

_REST_SECONDS = 0.02
_WATCH_SECONDS = 0.5  # between two looks while something is unfinished, and nothing comes
_OTHER_FILES = 128  # descriptors that are no connections
_MOST_FILES = 1 << 20
_MOST_SILENT = 1024
_RECEIVED_AT = 128  # tcpi_bytes_received in Linux's struct tcp_info
_NOWHERE = socket.AF_UNSPEC.to_bytes(2, sys.byteorder) + bytes(14)  # a struct sockaddr
_WATCHED = select.EPOLLIN | select.EPOLLONESHOT
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED


class Guard:
    """See the file's docstring. Made before the socket is bound, so that no connection is missed."""

    def __init__(self, router: "zmq.Socket[bytes]", most_bytes: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = _MOST_FILES if files == resource.RLIM_INFINITY else files
        most = max(8, files - _OTHER_FILES)
        self._connections = Connections(most=most, most_silent=min(_MOST_SILENT, most // 2), most_bytes=most_bytes)
        self._lock = threading.Lock()  # guards the connections
        self.num_ended = 0
        """Connections, so far."""
        self._router, self._monitor = router, router.get_monitor_socket(_EVENTS)
        self._libc = ctypes.CDLL(None)
        self._bell = os.eventfd(0)
        self._events = select.epoll()
        self._events.register(self._monitor.fileno(), select.EPOLLIN)
        self._events.register(self._bell, select.EPOLLIN)
        self._thread = threading.Thread(target=self._watch, name="satrap-rpc-guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """By whoever may use the router, before it is closed."""
        if self._thread.ident is not None:
            os.eventfd_write(self._bell, 1)
            self._thread.join()
        self._router.disable_monitor()
        self._monitor.close(0)
        self._events.close()
        os.close(self._bell)

    def took(self, frame: zmq.Frame, num_bytes: int) -> None:
        """A message with this frame, of so many bytes, was handed over."""
        fd = int(frame.get("__fd"))
        with self._lock:
            self._connections.took(fd, num_bytes)

    def _watch(self) -> None:
        waits, before = False, set[int]()  # what came on those just before they are watched again is looked at, too
        self._hear()  # ZeroMQ signals what comes after it was asked
        while True:
            ready = {fd for fd, _ in self._events.poll(0 if before else _WATCH_SECONDS if waits else None)}
            if self._bell in ready:
                return
            ready.discard(self._monitor.fileno())
            with self._lock:
                self._hear()
                for fd in ready | before:
                    if _is_open(fd, self._connections.file(fd)):
                        self._connections.received(fd, _received(fd))
                for fd, file in self._connections.to_end(time.monotonic()).items():
                    self._end(fd, file)
                waits = self._connections.is_waiting()
            if ready:
                time.sleep(_REST_SECONDS)
            for fd in ready:
                with suppress(OSError):  # it is gone
                    self._events.modify(fd, _WATCHED)
            before = ready

    def _hear(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            fd = int(event["value"])
            if event["event"] == zmq.Event.DISCONNECTED:
                self._connections.closed(fd)
                continue
            with suppress(OSError):  # it is gone
                self._connections.accepted(fd, os.fstat(fd).st_ino)
                self._events.register(fd, _WATCHED)

    def _end(self, fd: int, file: int) -> None:
        self.num_ended += 1
        if _is_open(fd, file):
            self._libc.connect(fd, _NOWHERE, len(_NOWHERE))


def _is_open(fd: int, file: int | None) -> bool:
    """Whether the descriptor is still the connection's: ZeroMQ may close it at any moment. A copy would keep it open,
    but there may be no descriptors left just when connections have to be ended."""
    with suppress(OSError):
        return os.fstat(fd).st_ino == file
    return False


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """ZeroMQ's socket, which stays open."""
    borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _received(fd: int) -> int:
    """Bytes that TCP has received on it."""
    with suppress(OSError), _borrowed(fd) as connection:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
        return int(struct.unpack_from("Q", found, _RECEIVED_AT)[0])
    return 0
