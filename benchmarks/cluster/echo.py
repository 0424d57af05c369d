"""The kind `echo`: bytes per second through satrap.rpc beside a loop over plain sockets, in turns of a few steps.

A request has the unique ids of a batch, a reply as many bytes as their float32 rows; no row is looked up, so only the
transport is timed. Bytes are those of ids and rows alone, both directions together. Each end has a core to itself, as
on two machines; and once more (`_free`) all threads may run on any core, where the figure depends on Linux's placement.

`python -m benchmarks.cluster.echo '<job as JSON>'` is a server, whose first line is its address or port. The peer of
satrap.rpc is a request and a reply over one TCP connection, and nothing else: both sides receive into memory that they
allocate once, with one thread and no checks, deadline or second client. A request is its size in 8 bytes and the ids;
the reply's size follows from it.
"""

import json
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np

from benchmarks.cluster.processes import ANYWHERE, receive, talking
from benchmarks.harness.case import Case
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.harness.record import Rounds
from benchmarks.workload import Floats, Ids, hashed_ids, row_numbers
from satrap.rpc import Client, Service

TURN = 10
_SIZE = struct.Struct("<Q")


class Echo(Protocol):
    """The protocol of the servers."""

    def lookup(self, ids: Ids) -> Floats: ...


class SameRows:
    """A server that answers with as many floats as the ids' rows would have, always the same ones."""

    def __init__(self, rows: Floats, dim: int) -> None:
        self._rows, self._dim = rows, dim

    def lookup(self, ids: Ids) -> Floats:
        return self._rows[: len(ids) * self._dim]


def serve_raw(rows: Floats, dim: int) -> None:
    """Print the port, then serve one connection of plain sockets until it ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
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

    def __init__(self, port: int, dim: int, max_ids: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
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
    return connection.recv_into(memory, 0, socket.MSG_WAITALL) == len(memory)


@contextmanager
def server(contender: str, job: Mapping[str, Any]) -> Iterator[tuple[Any, int]]:
    """Start a server; yield its address or port, and its process id."""
    command = [sys.executable, "-m", "benchmarks.cluster.echo", json.dumps({**job, "contender": contender})]
    with talking(command) as process:
        yield receive(process), process.pid


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both contenders in turn on the same batches, with a core for each end and then with any core."""
    drawn = row_numbers(job["rows"], "zipf", min(job["num_steps"], TURN), job["part"])
    batches = [hashed_ids(np.unique(batch)) for batch in drawn]
    sizes = [len(ids) * (8 + 4 * job["dim"]) for ids in batches]
    num_bytes = sum(sizes[i % len(sizes)] for i in range(job["num_steps"]))
    cores = sorted(os.sched_getaffinity(0))
    streams = {}
    for suffix, client_cores, server_cores in (("", cores[:1], cores[-1:]), ("_free", cores, cores)):
        os.sched_setaffinity(0, client_cores)  # before the client starts threads
        seconds, noise = time_contenders({**job, "cores": server_cores}, batches)
        for name, spent in seconds.items():
            rate = {"gb_per_s": round(num_bytes / sum(spent) / 1e9, 3)}
            streams[f"echo:{name}{suffix}"] = rate | {"step_ms": round(1e3 * statistics.median(spent), 4)} | noise
    return {"streams": streams}


def time_contenders(job: Mapping[str, Any], batches: list[Ids]) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of each contender's steps, and the noise."""
    num_warmup, num_steps, dim, max_ids = job["num_warmup"], job["num_steps"], job["dim"], max(map(len, batches))
    with ExitStack() as stack:
        (port, raw), (address, rpc) = (
            stack.enter_context(server(name, {**job, "max_ids": max_ids})) for name in ("raw", "rpc")
        )
        plain = RawClient(port, dim, max_ids)
        stack.callback(plain.close)
        client = stack.enter_context(Client(Echo, address))
        contenders = {"rpc": client.call.lookup, "raw": plain.lookup}
        for lookup in contenders.values():
            run(lookup, (batches * num_warmup)[:num_warmup], dim)
        before = read_cpu((raw, rpc))
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for begin in range(0, num_steps, TURN):
            turn = batches[: num_steps - begin]
            for name in sorted(contenders, reverse=begin // TURN % 2 == 0):
                seconds[name] += run(contenders[name], turn, dim)
        return seconds, noise_between(before, read_cpu((raw, rpc)))


def run(lookup: Callable[[Ids], Floats], batches: Sequence[Ids], dim: int) -> list[float]:
    """Return the seconds of each batch."""
    seconds = []
    for ids in batches:
        start = time.perf_counter()
        rows = lookup(ids)
        seconds.append(time.perf_counter() - start)
        if len(rows) != len(ids) * dim:
            raise RuntimeError(f"expected {len(ids) * dim} floats for {len(ids)} ids of dim {dim}, found {len(rows)}")
        del rows  # as a worker does, which copies them; malloc does not keep enough memory for two replies
    return seconds


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    rates = rounds.values("gb_per_s")
    return {
        **{name: rounds.spreads(name) for name in ("gb_per_s", "step_ms")},
        "figures": {
            f"ratio{suffix}": rounds.against(f"rpc{suffix}", (f"raw{suffix}",), rates) or rounds.unmeasured()
            for suffix in ("", "_free")
        },
    }


def main() -> None:
    """Serve until stdin ends."""
    job = json.loads(sys.argv[1])
    os.sched_setaffinity(0, job["cores"])
    rows = np.random.default_rng(3).random(job["max_ids"] * job["dim"], np.float32)
    if job["contender"] == "raw":
        serve_raw(rows, job["dim"])
        return
    same = SameRows(rows, job["dim"])
    with Service(same, Echo, ANYWHERE, insecure=True, num_threads=job["num_threads"]) as service:
        print(json.dumps(service.address), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
