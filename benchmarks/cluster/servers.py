"""The servers of `echo`: `python -m benchmarks.cluster.servers '<job as JSON>'` serves one until stdin ends.

Its first line on stdout is its address or port, as JSON. The peer of satrap.rpc is a request and a reply over one TCP
connection of plain sockets, and nothing else: both sides receive into memory that they allocate once, with one thread
and no checks, deadline or second client. A request is its size in 8 bytes and the ids; the reply's size follows from
it.
"""

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from benchmarks.cluster.processes import receive, talking
from benchmarks.workload import Floats, Ids

_SIZE = struct.Struct("<Q")


class Echo(Protocol):
    """The protocol of the servers of `echo`."""

    def lookup(self, ids: Ids) -> Floats: ...


class SameRows:
    """A server that answers with as many floats as the ids' rows would have, always the same ones."""

    def __init__(self, rows: Floats, dim: int) -> None:
        self._rows, self._dim = rows, dim

    def lookup(self, ids: Ids) -> Floats:
        return self._rows[: len(ids) * self._dim]


def serve_raw(rows: Floats, dim: int, host: str = "127.0.0.1") -> None:
    """Print the port, then serve one connection of plain sockets until it ends."""
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    memory, source = memoryview(bytearray(8 * (rows.size // dim))), rows.view(np.uint8).data
    size = memoryview(bytearray(_SIZE.size))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(connection, size):
            (num_bytes,) = _SIZE.unpack(size)
            _receive(connection, memory[:num_bytes])
            connection.sendall(source[: num_bytes // 8 * dim * 4])


class RawClient:
    """The client of `serve_raw`."""

    def __init__(self, port: int, dim: int, max_ids: int, host: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = np.empty(max_ids * dim, np.float32)
        self._dim = dim

    def lookup(self, ids: Ids) -> Floats:
        """Return as many floats as the ids' rows have."""
        self._socket.sendall(_SIZE.pack(ids.nbytes))
        self._socket.sendall(ids.view(np.uint8).data)
        rows = self._memory[: len(ids) * self._dim]
        _receive(self._socket, rows.view(np.uint8).data)
        return rows

    def close(self) -> None:
        self._socket.close()


def _receive(connection: socket.socket, memory: memoryview) -> bool:
    """Fill the memory; return False if the connection ended."""
    received = 0
    while received < len(memory):
        size = connection.recv_into(memory[received:])
        if not size:
            return False
        received += size
    return True


@contextmanager
def started(contender: str, job: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """Start a server; yield its address or port, and its process id."""
    command = [sys.executable, "-m", "benchmarks.cluster.servers", json.dumps({**job, "contender": contender})]
    with talking(command) as process:
        yield receive(process), process.pid


def main() -> None:
    job = json.loads(sys.argv[1])
    os.sched_setaffinity(0, job["cores"])
    rows = np.random.default_rng(3).random(int(job["max_ids"]) * int(job["dim"]), np.float32)
    if job["contender"] == "raw":
        serve_raw(rows, int(job["dim"]))
        return
    from satrap.rpc import Service

    same_rows = SameRows(rows, int(job["dim"]))
    with Service(same_rows, Echo, "tcp://127.0.0.1:0", insecure=True, num_threads=int(job["num_threads"])) as service:
        print(json.dumps(service.address), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
