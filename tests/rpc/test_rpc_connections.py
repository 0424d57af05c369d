"""Silent connections and incomplete messages: limited in number and bytes, while honest clients are served."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from rpc_parts import LOOPBACK, Calls, Served, resident_bytes, server_process
from satrap.errors import InputError
from satrap.rpc import Client, Keys, Limits, Service
from satrap.rpc.guard import Connections
from satrap.rpc.keys import create_keys
from waiting import DEADLINE_SECONDS, wait_until

MB = 1 << 20


def new_connections(**options: int) -> Connections:
    return Connections(**{"max_connections": 10, "max_silent": 4, "max_unfinished_bytes": 10 * MB} | options)


def test_the_oldest_silent_connections_are_closed() -> None:
    connections = new_connections()
    for fd in range(4):
        connections.record_accepted(fd, 100 + fd)
    assert connections.select_to_close(0.0) == {}
    connections.record_message(0, 10)
    connections.record_accepted(4, 104)
    assert connections.select_to_close(0.1) == {} and len(connections) == 5
    for fd in (5, 6):
        connections.record_accepted(fd, 100 + fd)
    assert connections.select_to_close(0.2) == {1: 101, 2: 102} and len(connections) == 5
    connections.record_closed(3)
    assert connections.select_to_close(0.3) == {} and connections.inode(3) is None and connections.inode(0) == 100


def test_the_newest_connections_are_closed_if_all_have_sent() -> None:
    connections = new_connections(max_connections=3)
    for fd in range(5):
        connections.record_accepted(fd, fd)
        connections.record_message(fd, 1)
    assert set(connections.select_to_close(0.0)) == {3, 4}


def test_overhead_and_heartbeats_do_not_add_up() -> None:
    connections = new_connections()
    connections.record_accepted(1, 1)
    for i in range(1, 10_000):
        connections.record_message(1, 1000)
        connections.record_received(1, i * 1100, float(i))
        assert connections.select_to_close(float(i)) == {}
    assert connections.unfinished_bytes == 0


def test_a_stalled_message_within_the_limit_stays_and_a_gap_between_checks_is_no_stall() -> None:
    connections = new_connections()
    for fd in (1, 2):
        connections.record_accepted(fd, fd)
        connections.record_received(fd, 5 * MB, float(fd))
    assert connections.select_to_close(1000.0) == {}
    connections.record_received(1, 6 * MB, 1000.0)
    assert connections.select_to_close(1000.0) == {2: 2}


def test_under_pressure_stalled_messages_are_dropped_first_and_then_the_last_ones(seed: int) -> None:
    connections = new_connections(max_connections=100, max_silent=100)
    for fd in range(4):
        connections.record_accepted(fd, fd)
        connections.record_message(fd, 1)
        connections.record_received(fd, 2 * MB, fd / 10)
        assert connections.select_to_close(fd / 10) == {}
    connections.record_received(1, 2 * MB + 100, 1.2)  # heartbeats are no progress
    for fd in (0, 2, 3):
        connections.record_received(fd, 3 * MB, 1.2)
    assert connections.select_to_close(1.2) == {1: 1}, "it stalled"
    connections.record_received(0, 5 * MB, 1.3)
    assert set(connections.select_to_close(1.3)) == {3}, "the last one to start"
    assert connections.unfinished_bytes <= 10 * MB


def test_unfinished_bytes_are_bounded_and_the_first_message_finishes(seed: int) -> None:
    """The connection whose message started first is not closed while it makes progress."""
    rng = random.Random(seed)
    for _ in range(30):
        connections = new_connections(max_connections=1000, max_silent=1000)
        connections.record_accepted(0, 0)
        connections.record_message(0, 1)
        sent_bytes = {0: 200_000}
        connections.record_received(0, sent_bytes[0], 0.0)
        for step in range(60):
            now = step * 0.02
            fd = rng.randrange(1, 20)
            if connections.inode(fd) is None:
                connections.record_accepted(fd, fd)
                sent_bytes[fd] = 0
            sent_bytes[fd] += rng.randrange(2 * MB)
            connections.record_received(fd, sent_bytes[fd], now)
            sent_bytes[0] += 150_000
            connections.record_received(0, sent_bytes[0], now)
            assert 0 not in connections.select_to_close(now)
            assert connections.unfinished_bytes <= 10 * MB


# -- live ------------------------------------------------------------------------------------------------------------


def send_half(address: str, num_bytes: int, mechanism: bytes = b"NULL") -> socket.socket:
    """Returns a connection that has sent so many bytes of a frame of twice that length."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)), DEADLINE_SECONDS)
    with suppress(OSError):  # the server closed it
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
        peer.recv(64, socket.MSG_WAITALL)
        if mechanism == b"NULL":
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
            peer.sendall(bytes([4, len(ready)]) + ready)
        peer.sendall(b"\x03" + struct.pack(">Q", 2 * num_bytes))
        for _ in range(num_bytes // MB):
            peer.sendall(bytes(MB))
    return peer


@contextmanager
def closing_all(peers: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in peers:
            each.close()


@pytest.mark.parametrize("secured", [False, True])
def test_half_sent_messages_are_bounded_together(tmp_path: Path, secured: bool) -> None:
    """Eight strangers send 25 MB each of a frame of 50 MB; with keys, before they are authenticated."""
    server, client = create_keys(tmp_path)
    limit = 8 * 5 * MB if secured else 64 * MB  # before authentication a frame has at most 4 MiB
    options = ("files=256", *([f"keys={server}"] if secured else [f"max_partial_bytes={limit}"]))
    peers: list[socket.socket] = []
    with (
        server_process(LOOPBACK, *options) as (process, address),
        Client(Calls, address, Keys.read(client) if secured else None, deadline=DEADLINE_SECONDS) as honest,
        closing_all(peers),
    ):
        assert honest.call.add(1) == 1
        before = resident_bytes(process.pid)
        with ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(send_half, address, 25 * MB, b"CURVE" if secured else b"NULL") for _ in range(8)]
            peers += [each.result() for each in sent]
        assert honest.call.add(1) == 2
        assert resident_bytes(process.pid, field="VmHWM") < before + limit + 40 * MB
        with Client(Calls, address, Keys.read(client) if secured else None) as another:
            assert another.with_deadline(DEADLINE_SECONDS).add(1) == 3


@pytest.mark.parametrize("secured", [False, True])
def test_silent_connections_do_not_shut_out_others(tmp_path: Path, secured: bool) -> None:
    """There are more of them than the server may have file descriptors."""
    server, client = create_keys(tmp_path)
    options = ("files=256", *([f"keys={server}"] if secured else []))
    peers: list[socket.socket] = []
    with server_process(LOOPBACK, *options) as (process, address), closing_all(peers):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        for _ in range(400):
            peers.append(socket.create_connection((host, int(port)), DEADLINE_SECONDS))
        with Client(Calls, address, Keys.read(client) if secured else None) as honest:
            assert honest.with_deadline(8.0).add(1) == 1, "before the handshake timeout"
        files = f"/proc/{process.pid}/fd"
        wait_until(lambda: len(os.listdir(files)) < 128)
        before = _cpu_seconds(process.pid)
        threading.Event().wait(1.0)  # an idle server uses no CPU
        assert _cpu_seconds(process.pid) - before < 0.2


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_honest_clients_that_exceed_the_limit_together_are_all_served() -> None:
    served = Served()
    limits = Limits(max_partial_bytes=12 * MB)
    with ExitStack() as stack:
        service = stack.enter_context(Service(served, Calls, LOOPBACK, insecure=True, limits=limits))
        clients = [
            stack.enter_context(Client(Calls, service.address, deadline=DEADLINE_SECONDS, retry_seconds=0.2))
            for _ in range(6)
        ]
        ids = np.arange(MB, dtype=np.uint64)

        def call(client: Client[Calls]) -> bool:
            return all(np.array_equal(client.call.double(ids), 2 * ids) for _ in range(3))

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(call, clients))


def test_a_message_beyond_every_servers_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.rpc.client._MAX_MESSAGE_BYTES", 100_000)
    words = r"arrays of 160\d{3} bytes; a server accepts at most 100000 bytes in one call"
    with Client(Calls, "tcp://127.0.0.1:1") as client, pytest.raises(InputError, match=words):
        client.call.double(np.zeros(20_000, np.uint64))


def test_connections_are_forgotten_when_they_are_closed() -> None:
    with Service(Served(), Calls, LOOPBACK, insecure=True) as service:
        assert service._guard is not None
        known = service._guard._connections
        for _ in range(3):
            with Client(Calls, service.address) as client:
                assert client.call.add(0) == 0
                wait_until(lambda: len(known) == 1)
            wait_until(lambda: len(known) == 0)
        assert service.counts()["ended_connections"] == 0
