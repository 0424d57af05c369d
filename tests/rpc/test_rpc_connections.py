"""Connections that bring nothing, or half a message: bounded in number and bytes, while honest clients are served."""

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

from rpc_parts import DEADLINE_SECONDS, LOOPBACK, Calls, Served, eventually, resident_bytes, server_process
from satrap.errors import InputError
from satrap.rpc import Client, Keys, Limits, Service
from satrap.rpc.connections import Connections
from satrap.rpc.keys import make_keys

MB = 1 << 20


def connections(**options: int) -> Connections:
    return Connections(**{"most": 10, "most_silent": 4, "most_bytes": 10 * MB} | options)


def test_of_silent_connections_the_oldest_go() -> None:
    these = connections()
    for fd in range(4):
        these.accepted(fd, 100 + fd)
    assert these.to_end(0.0) == {}
    these.took(0, 10)
    these.accepted(4, 104)
    assert these.to_end(0.1) == {} and len(these) == 5
    for fd in (5, 6):
        these.accepted(fd, 100 + fd)
    assert these.to_end(0.2) == {1: 101, 2: 102} and len(these) == 5
    these.closed(3)
    assert these.to_end(0.3) == {} and these.file(3) is None and these.file(0) == 100


def test_where_all_have_spoken_the_newest_go() -> None:
    these = connections(most=3)
    for fd in range(5):
        these.accepted(fd, fd)
        these.took(fd, 1)
    assert set(these.to_end(0.0)) == {3, 4}


def test_overhead_and_heartbeats_do_not_add_up() -> None:
    these = connections()
    these.accepted(1, 1)
    for i in range(1, 10_000):
        these.took(1, 1000)
        these.received(1, i * 1100)
        assert these.to_end(float(i)) == {} and not these.is_waiting()
    assert these.unfinished_bytes == 0


def test_a_message_that_stands_still_is_given_up() -> None:
    these = connections()
    these.accepted(1, 1)
    these.received(1, MB)
    now = 0.0
    for now in np.arange(0, 9.9, 0.3):
        assert these.is_waiting() and these.to_end(float(now)) == {}
    these.received(1, MB + (64 << 10))  # some of it comes
    for now in np.arange(10, 19.5, 0.3):
        these.received(1, MB + (64 << 10) + 100)  # heartbeats are none of it
        assert these.to_end(float(now)) == {}
    assert these.to_end(now + 1) == {1: 1} and not these.is_waiting()


def test_time_in_which_nobody_looked_does_not_count() -> None:
    these = connections()
    these.accepted(1, 1)
    these.received(1, MB)
    assert these.to_end(0.0) == {} and these.to_end(1000.0) == {}


def test_under_pressure_those_that_stand_still_go_first_and_then_the_last(seed: int) -> None:
    these = connections(most=100, most_silent=100)
    for fd in range(4):
        these.accepted(fd, fd)
        these.took(fd, 1)
        these.received(fd, 2 * MB)
        assert these.to_end(fd / 10) == {}
    for fd in (0, 2, 3):
        these.received(fd, 3 * MB)
    assert these.to_end(1.2) == {1: 1}, "it stood still"
    these.received(0, 5 * MB)
    assert set(these.to_end(1.3)) == {3}, "the last to begin"
    assert these.unfinished_bytes <= 10 * MB


def test_whatever_comes_the_sum_is_bounded_and_the_first_message_ends(seed: int) -> None:
    """Whoever began first is not ended while it goes on."""
    rng = random.Random(seed)
    for _ in range(30):
        these = connections(most=1000, most_silent=1000)
        these.accepted(0, 0)
        these.took(0, 1)
        got = {0: 200_000}
        these.received(0, got[0])
        for step in range(60):
            now = step * 0.02
            fd = rng.randrange(1, 20)
            if these.file(fd) is None:
                these.accepted(fd, fd)
                got[fd] = 0
            got[fd] += rng.randrange(2 * MB)
            these.received(fd, got[fd])
            got[0] += 150_000
            these.received(0, got[0])
            assert 0 not in these.to_end(now)
            assert these.unfinished_bytes <= 10 * MB


# -- live ------------------------------------------------------------------------------------------------------------


def half_sent(address: str, num_bytes: int, mechanism: bytes = b"NULL") -> socket.socket:
    """A connection on which so many bytes of a frame have come that is longer."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)), DEADLINE_SECONDS)
    with suppress(OSError):  # it was ended
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


def peak_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@pytest.mark.parametrize("secured", [False, True])
def test_half_sent_messages_are_bounded_together(tmp_path: Path, secured: bool) -> None:
    """Eight strangers send 25 MB each of a frame of 50; with keys, before they have shown one."""
    server, client = make_keys(tmp_path)
    limit = 8 * 5 * MB if secured else 64 * MB  # before a key is shown a frame has 4 MiB at most
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
            sent = [pool.submit(half_sent, address, 25 * MB, b"CURVE" if secured else b"NULL") for _ in range(8)]
            peers += [each.result() for each in sent]
        assert honest.call.add(1) == 2
        assert peak_bytes(process.pid) < before + limit + 40 * MB
        with Client(Calls, address, Keys.read(client) if secured else None) as another:
            assert another.within(DEADLINE_SECONDS).add(1) == 3


@pytest.mark.parametrize("secured", [False, True])
def test_silent_connections_shut_nobody_out(tmp_path: Path, secured: bool) -> None:
    """More of them than the server may have file descriptors."""
    server, client = make_keys(tmp_path)
    options = ("files=256", *([f"keys={server}"] if secured else []))
    peers: list[socket.socket] = []
    with server_process(LOOPBACK, *options) as (process, address), closing_all(peers):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        for _ in range(400):
            peers.append(socket.create_connection((host, int(port)), DEADLINE_SECONDS))
        with Client(Calls, address, Keys.read(client) if secured else None) as honest:
            assert honest.within(8.0).add(1) == 1, "sooner than a handshake is given up"
        files = f"/proc/{process.pid}/fd"
        eventually(lambda: len(os.listdir(files)) < 128)
        before = _cpu_seconds(process.pid)
        threading.Event().wait(1.0)  # an idle server idles
        assert _cpu_seconds(process.pid) - before < 0.2


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_honest_clients_that_send_more_together_than_there_may_be_are_all_served() -> None:
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


def test_a_message_that_no_server_takes_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.rpc.client._MOST_MESSAGE_BYTES", 1000)
    words = r"arrays of 16\d\d bytes; a server takes at most 1000 together"
    with Client(Calls, "tcp://127.0.0.1:1") as client, pytest.raises(InputError, match=words):
        client.call.double(np.zeros(200, np.uint64))


def test_connections_are_forgotten_when_they_are_closed() -> None:
    with Service(Served(), Calls, LOOPBACK, insecure=True) as service:
        assert service._guard is not None
        known = service._guard._connections
        for _ in range(3):
            with Client(Calls, service.address) as client:
                assert client.call.add(0) == 0
                eventually(lambda: len(known) == 1)
            eventually(lambda: len(known) == 0)
        assert service.counts()["ended_connections"] == 0
