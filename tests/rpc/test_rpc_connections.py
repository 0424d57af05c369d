"""Silent connections and incomplete messages: limited in number and bytes, while honest clients are served."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from rpc_parts import LOOPBACK, Calls, Served, resident_bytes, server_process
from satrap.errors import InputError
from satrap.rpc import Client, Keys, Service
from satrap.rpc.guard import Connections
from satrap.rpc.keys import create_keys
from waiting import DEADLINE_SECONDS, wait_until

MB = 1 << 20


def test_the_oldest_silent_connections_are_closed_first_and_then_the_newest(seed: int) -> None:
    """After any events: no limit is exceeded, and what was closed is what a list of all connections would say."""
    rng = random.Random(seed)
    connections, known = Connections(max_connections=10, max_silent=4), dict[int, tuple[int, bool]]()
    for inode in range(3000):
        fd = rng.randrange(20)
        event = rng.choice(("accepted", "accepted", "message", "closed"))
        if event == "accepted":
            connections.record_accepted(fd, inode)
            known.pop(fd, None)
            known[fd] = inode, True
        elif event == "message":
            connections.record_message(fd)
            if fd in known and known[fd][1]:
                known[fd] = known.pop(fd)[0], False
        else:
            connections.record_closed(fd)
            known.pop(fd, None)
        silent, senders = ([fd for fd in known if known[fd][1] == is_silent] for is_silent in (True, False))
        expected = dict[int, int]()
        while len(silent) > 4 or len(silent) + len(senders) > 10:
            fd = silent.pop(0) if silent else senders.pop()
            expected[fd] = known.pop(fd)[0]
        assert connections.select_to_close() == expected and len(connections) == len(known)


# -- live ------------------------------------------------------------------------------------------------------------


def connect(address: str, mechanism: bytes = b"NULL") -> socket.socket:
    """Returns a connection that has sent its greeting, and, without keys, all of the handshake."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)), DEADLINE_SECONDS)
    with suppress(OSError):  # the server closed it
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
        peer.recv(64, socket.MSG_WAITALL)
        if mechanism == b"NULL":
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
            peer.sendall(bytes([4, len(ready)]) + ready)
    return peer


def send_half(address: str, num_bytes: int) -> socket.socket:
    """Returns a connection that has sent so many bytes of a frame that is nearly twice as long, before a handshake."""
    peer = connect(address, b"CURVE")
    with suppress(OSError):  # the server closed it
        peer.sendall(b"\x06" + struct.pack(">Q", 2 * num_bytes - 1))
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


def test_half_sent_messages_of_strangers_are_bounded_together(tmp_path: Path) -> None:
    """With keys, 100 strangers send half of the largest frame that is accepted before authentication, and eight send
    half of a larger one. There may be 16 silent connections."""
    server, client = create_keys(tmp_path)
    peers: list[socket.socket] = []
    with (
        server_process(LOOPBACK, "files=160", f"keys={server}") as (process, address),
        Client(Calls, address, Keys.read(client), deadline=DEADLINE_SECONDS) as honest,
        closing_all(peers),
    ):
        assert honest.call.add(1) == 1
        before = resident_bytes(process.pid)
        with ThreadPoolExecutor(8) as pool:
            sent = [pool.submit(send_half, address, size * MB) for size in (*[2] * 100, *[25] * 8)]
            peers += [job.result() for job in sent]
        assert honest.call.add(1) == 2
        assert resident_bytes(process.pid, field="VmHWM") < before + 16 * 4 * MB + 40 * MB
        with Client(Calls, address, Keys.read(client)) as another:
            assert another.with_deadline(DEADLINE_SECONDS).add(1) == 3


def test_a_connection_is_closed_while_its_peer_sends() -> None:
    """A message without an end, and four silent connections, of which there may be four: what the message took is
    free again, though its peer continues."""
    peers: list[socket.socket] = []
    with server_process(LOOPBACK, "files=136") as (process, address), closing_all(peers):
        before = resident_bytes(process.pid)

        def send_without_end(peer: socket.socket) -> None:
            with suppress(OSError):  # the server closed it, or the test has ended
                while True:
                    peer.sendall(b"\x03" + struct.pack(">Q", MB) + bytes(MB))

        with connect(address) as endless, ThreadPoolExecutor(1) as pool:
            pool.submit(send_without_end, endless)
            wait_until(lambda: resident_bytes(process.pid) > before + 150 * MB)
            peers += [connect(address) for _ in range(4)]
            wait_until(lambda: resident_bytes(process.pid) < before + 50 * MB)
            with Client(Calls, address) as honest:
                assert honest.with_deadline(DEADLINE_SECONDS).add(1) == 1
            assert resident_bytes(process.pid) < before + 50 * MB
            with suppress(OSError):  # it was reset
                endless.shutdown(socket.SHUT_RDWR)


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
