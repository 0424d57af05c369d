"""The peer of satrap.rpc: a request and a reply over one TCP connection, and nothing else.

Both sides receive into memory that they allocate once. A request is its size in 8 bytes and the ids; the reply's size
follows from it, as in the case that is measured. One thread on each side; no checks, no deadline, no second client.
"""

import socket
import struct

import numpy as np

from benchmarks.workload import Floats, Ids

_SIZE = struct.Struct("<Q")


def serve(rows: Floats, dim: int, host: str = "127.0.0.1") -> None:
    """Print the port, then serve one connection until it ends."""
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
    """The client."""

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
