"""A TCP proxy that counts the payload of requests and replies, without the headers of TCP and IP.

It counts data before it forwards them, so a client that has a reply finds all of it counted.
"""

import socket
import threading
from contextlib import suppress
from typing import Self


class CountingProxy:
    """A proxy that listens on a free port of this machine and forwards every connection to one address."""

    def __init__(self, address: str) -> None:
        """address: "tcp://host:port"."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._counts = {"there": 0, "back": 0}
        self._sockets: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def counts(self) -> dict[str, int]:
        """Return the bytes so far: there (to the address) and back."""
        with self._lock:
            return dict(self._counts)

    def note(self, direction: str, data: memoryview) -> None:
        """Count data before they are forwarded."""
        with self._lock:
            self._counts[direction] += len(data)

    def close(self) -> None:
        """Close every connection and wait for the threads."""
        _shut(self._listener)
        self._acceptor.join()
        for connection in self._sockets:
            _shut(connection)
        for pump in self._pumps:
            pump.join()
        for connection in [self._listener, *self._sockets]:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # shut
                return
            self._sockets.append(client)
            try:
                server = socket.create_connection(self._target)
            except OSError:  # no server listens; the client will notice
                _shut(client)
                continue
            self._sockets.append(server)
            for source, target, direction in ((client, server, "there"), (server, client, "back")):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pumps.append(threading.Thread(target=self._pump, args=(source, target, direction)))
                self._pumps[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        memory = memoryview(bytearray(1 << 20))
        with suppress(OSError):  # either side has closed
            while size := source.recv_into(memory):
                self.note(direction, memory[:size])
                target.sendall(memory[:size])
        _shut(source)
        _shut(target)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is shut already, or has no peer
        connection.shutdown(socket.SHUT_RDWR)
