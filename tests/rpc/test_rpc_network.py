"""Networks that lose, repeat and delay messages or eavesdrop: no call is lost, and keys keep strangers out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zmq
from benchmarks.cluster.proxy import CountingProxy

from child_processes import silent_server
from logged import logged
from rpc_parts import LOOPBACK, Calls, FrameProxy, Served
from satrap.errors import DeadlineError
from satrap.rpc import Client, Keys, Service
from satrap.rpc.handshakes import Handshakes, expects_keys
from satrap.rpc.keys import create_keys
from satrap.rpc.values import PIECE_BYTES
from waiting import DEADLINE_SECONDS

MARK = b"the ids of this batch, sixty-four bytes that must stay unread!!!"


class Listener(CountingProxy):
    """A proxy that records all bytes."""

    def __init__(self, address: str) -> None:
        self.recorded = bytearray()
        super().__init__(address)

    def note(self, direction: str, data: memoryview) -> None:
        self.recorded += data


@pytest.mark.parametrize(
    ("drop", "repeat", "hold"), [(0.2, 0.0, 0.0), (0.0, 0.4, 0.0), (0.0, 0.0, 0.4), (0.15, 0.2, 0.2)]
)
def test_no_call_is_lost_in_a_network_that_loses(seed: int, drop: float, repeat: float, hold: float) -> None:
    served = Served()
    with (
        Service(served, Calls, LOOPBACK, insecure=True) as service,
        FrameProxy(service.address, seed, drop, repeat, hold) as proxy,
        Client(Calls, proxy.address, deadline=DEADLINE_SECONDS, retry_seconds=0.05) as client,
    ):

        def work(number: int) -> None:
            for step in range(15):
                ids = np.arange(number * 100 + step, dtype=np.uint64)
                pending_calls = [client.start("double", ids), client.start("add", 1)]
                assert np.array_equal(pending_calls[0].result(), 2 * ids)
                assert pending_calls[1].result() > 0

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert served.num_runs >= 60


@pytest.mark.parametrize("secured", [True, False])
def test_what_an_eavesdropper_sees(tmp_path: Path, secured: bool) -> None:
    keys = [Keys.read(path) for path in create_keys(tmp_path)] if secured else [None, None]
    ids = np.frombuffer(MARK * 2000, np.uint64)
    with (
        Service(Served(), Calls, LOOPBACK, keys[0], insecure=not secured) as service,
        Listener(service.address) as proxy,
        Client(Calls, proxy.address, keys[1], deadline=DEADLINE_SECONDS) as client,
    ):
        assert np.array_equal(client.call.double(ids), 2 * ids)
        assert len(proxy.recorded) > 2 * ids.nbytes
        for secret in (MARK, (2 * ids[:8]).tobytes(), b"STRP"):
            assert (secret in proxy.recorded) == (not secured)


def test_arrays_of_all_lengths_cross_in_pieces(tmp_path: Path) -> None:
    server, key = (Keys.read(path) for path in create_keys(tmp_path))
    piece = PIECE_BYTES // 8
    with (
        Service(Served(), Calls, LOOPBACK, server) as service,
        Client(Calls, service.address, key, deadline=DEADLINE_SECONDS) as client,
    ):
        for size in (0, 1, piece - 1, piece, piece + 1, 2 * piece, 40 * piece + 7):
            ids = np.arange(size, dtype=np.uint64)
            assert np.array_equal(client.call.double(ids), 2 * ids)


def test_only_the_client_key_is_accepted(tmp_path: Path) -> None:
    server, client = (Keys.read(path) for path in create_keys(tmp_path / "ours"))
    foreign, stranger = (Keys.read(path) for path in create_keys(tmp_path / "theirs"))
    knows_the_server = Keys(role="client", secret=stranger.secret, public=stranger.public, peer=server.public)
    takes_another = Keys(role="client", secret=client.secret, public=client.public, peer=foreign.public)
    served = Served()
    with logged("satrap.rpc", match="refused") as records, Service(served, Calls, LOOPBACK, server) as service:
        with Client(Calls, service.address, client, deadline=DEADLINE_SECONDS) as good:
            assert good.call.add(1) == 1
            refusals = {
                "no connection: only one of the two has keys": None,
                "no connection: the server there does not know this client's key": knows_the_server,
                "no connection: the server there has keys of another pair": stranger,
                "no connection: the server there has keys of another pair; use the client.key": takes_another,
            }
            for message, keys in refusals.items():
                with Client(Calls, service.address, keys, deadline=DEADLINE_SECONDS) as refused:
                    for _ in range(2):
                        with pytest.raises(DeadlineError, match=message):
                            refused.call.add(100)
            assert good.call.add(1) == 2
        assert served.num_runs == 2
    messages = {record.getMessage() for record in records}
    assert any("unknown key" in each for each in messages) and any("keys of another pair" in each for each in messages)


def test_a_client_that_was_refused_connects_to_the_next_server(tmp_path: Path) -> None:
    server, key = (Keys.read(path) for path in create_keys(tmp_path))
    served = Served()
    with Service(served, Calls, LOOPBACK, insecure=True) as other:
        address = other.address
        client = Client(Calls, address, key, deadline=DEADLINE_SECONDS)
        with pytest.raises(DeadlineError, match="no connection: only one of the two has keys"):
            client.call.add(1)
        assert served.num_runs == 0 and other.counts()["bad"] == 0
    with client, Service(Served(), Calls, address, server):
        assert client.call.add(1) == 1


def test_a_port_that_closes_every_connection_is_waited_for(tmp_path: Path) -> None:
    """A proxy without a server behind it does so; it has no keys of another pair."""
    server, key = (Keys.read(path) for path in create_keys(tmp_path))
    with (
        ThreadPoolExecutor(1) as pool,
        silent_server() as (listener, address),
        Client(Calls, address, key, deadline=DEADLINE_SECONDS) as waiting,
    ):
        call = pool.submit(waiting.call.add, 1)
        for _ in range(45):
            listener.accept()[0].close()
        listener.close()
        with Service(Served(), Calls, address, server):
            assert call.result() == 1


@pytest.mark.parametrize("secured", [True, False])
@pytest.mark.parametrize("listen", [LOOPBACK, "unix"])
def test_the_greeting_tells_whether_a_server_has_keys(tmp_path: Path, secured: bool, listen: str) -> None:
    server, _ = (Keys.read(path) for path in create_keys(tmp_path / "keys"))
    at = f"ipc://{tmp_path / 'sockets' / '0'}" if listen == "unix" else listen
    with Service(Served(), Calls, at, server if secured else None, insecure=True) as service:
        assert expects_keys(service.address, DEADLINE_SECONDS) is secured
    assert not expects_keys(service.address, DEADLINE_SECONDS)


def test_a_server_that_replaces_another_program_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ silently abandons a peer that gives such an answer."""
    monkeypatch.setattr("satrap.rpc.channel._RECONNECT_SECONDS", 0.5)
    server, key = (Keys.read(path) for path in create_keys(tmp_path))
    with (
        ThreadPoolExecutor(1) as pool,
        silent_server() as (listener, address),
        Client(Calls, address, key, deadline=DEADLINE_SECONDS) as waiting,
    ):
        call = pool.submit(waiting.call.add, 1)
        peer, _ = listener.accept()
        with peer, suppress(ConnectionResetError):
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            while peer.recv(1000):
                pass
        listener.close()
        with Service(Served(), Calls, address, server):
            assert call.result() == 1


def test_a_connection_may_be_lost_at_any_time_after_it_came_back() -> None:
    """ZeroMQ frees the address of a closed monitor late, so that watching the same socket at once again could fail."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as watched:
        for _ in range(50):
            Handshakes(watched, "tcp://127.0.0.1:1", has_keys=False).close()
