"""Peers that send garbage, send too much or never read: a live server stays up and within its limits."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import pytest
import zmq

from rpc_parts import LOOPBACK, Calls, Served, raw_peer, received, request, resident_bytes, server_process
from satrap.errors import DeadlineError
from satrap.rpc import Client, Limits, Service
from satrap.rpc.header import Header, Kind
from waiting import DEADLINE_SECONDS, wait_until


def mutated(rng: random.Random) -> list[bytes]:
    """Returns random frames, or a valid request with some damage."""
    if rng.random() < 0.2:
        return [rng.randbytes(rng.choice((0, 1, 63, 64, 65, 300))) for _ in range(rng.randrange(1, 5))]
    ids = np.arange(rng.randrange(50), dtype=np.uint64)
    call = rng.randrange(2**64)
    frames = rng.choice(
        (
            request("double", ids, client=7, call=call),
            request("add", 1, client=7, call=call),
            request("fail", "KeyError", "x", client=7, call=call),
        )
    )
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(frames))
        what = rng.randrange(5)
        if what == 0 and frames[at]:
            damaged = bytearray(frames[at])
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            frames[at] = bytes(damaged)
        elif what == 1:
            frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
        elif what == 2 and len(frames) > 1:
            del frames[at]
        elif what == 3:
            frames.insert(at, rng.randbytes(rng.randrange(100)))
        else:
            frames += [b""] * rng.randrange(1, 200)
    return frames


def test_a_server_that_gets_mutated_frames_serves_a_good_client_in_bounded_memory(seed: int) -> None:
    rng = random.Random(seed)
    with (
        server_process(LOOPBACK, "max_requests=64") as (process, address),
        Client(Calls, address, deadline=DEADLINE_SECONDS) as client,
        raw_peer(address) as peer,
    ):
        ids = np.arange(20_000, dtype=np.uint64)

        def abuse(times: int) -> None:
            for i in range(times):
                peer.send_multipart(mutated(rng))
                while peer.poll(0):
                    peer.recv_multipart()
                if i % 20 == 0:
                    assert np.array_equal(client.call.double(ids), 2 * ids)

        abuse(300)
        before = resident_bytes(process.pid)
        abuse(1500)
        assert client.call.double(ids).size == ids.size
        assert resident_bytes(process.pid) < before + (24 << 20)
        assert process.poll() is None


def test_replies_that_are_never_read_take_bounded_memory() -> None:
    """Large requests whose replies are never read: some are refused as busy, replies are dropped, memory is bounded."""
    with (
        server_process(LOOPBACK, "max_requests=8", f"max_bytes={4 << 20}") as (process, address),
        Client(Calls, address, deadline=DEADLINE_SECONDS, retry_seconds=0.2) as client,
    ):
        assert client.call.add(1) == 1
        before = resident_bytes(process.pid)
        frames = request("double", np.zeros(40_000, np.uint64))
        with raw_peer(address) as peer:
            peer.rcvhwm = 1
            for call in range(1500):  # 480 MB
                good = bytearray(frames[0])
                good[24:32] = call.to_bytes(8, "little")
                peer.send_multipart([bytes(good), *frames[1:]])
            assert client.call.add(1) == 2
            assert resident_bytes(process.pid) < before + (120 << 20)


@pytest.fixture
def small() -> Iterator[tuple[Service, Served]]:
    served = Served()
    limits = Limits(max_requests=3, max_frames=4, max_frame_bytes=1 << 20)
    with Service(served, Calls, LOOPBACK, insecure=True, num_threads=1, limits=limits) as service:
        yield service, served
        served.go.set()


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b""], "a frame of 0 bytes; expected a header of 64"),
        ([b"x" * 64], "the peer is not Satrap"),
        ([*request("add", 1), b"more"], "a message has 2 frames"),
        (request("add", 1)[:1], "a message has 0 frames and 0 bytes; its header declares 1 and"),
        ([*request("add", 1), *[b"x"] * 500], "more than 4 frames: send fewer, larger arrays"),
        ([Header(kind=Kind.REPLY, method=0, client=1, call=1).pack()], None),
        ([Header(kind=Kind.REQUEST, method=5, client=1, call=1, deadline_ms=9).pack()], "the method is unknown here"),
    ],
)
def test_bad_messages_are_answered_and_counted(
    small: tuple[Service, Served], frames: list[bytes], words: str | None
) -> None:
    service, served = small
    with raw_peer(service.address) as peer:
        peer.send_multipart(frames)
        wait_until(lambda: service.counts()["bad"] == 1)
        if words is None:
            assert not peer.poll(0)
        else:
            header, frames = received(peer)
            assert header.kind == Kind.ERROR
            assert words.encode() in frames[0]
        peer.send_multipart(request("add", 1))
        assert received(peer)[1] == [b"[1]"]
    assert served.num_runs == 1


def test_a_body_that_does_not_match_never_reaches_the_object(small: tuple[Service, Served]) -> None:
    service, served = small
    good = request("add", 1)
    with raw_peer(service.address) as peer:
        for body in (b"[2", b"[x", b"{1}", b'"1"'):
            peer.send_multipart([good[0], body])
            assert b"RpcError" in received(peer)[1][0]
    assert service.counts()["bad"] == 4
    assert served.num_runs == 0


def test_a_different_protocol_of_the_same_name_is_refused(small: tuple[Service, Served]) -> None:
    class Calls(Protocol):
        def add(self, amount: float) -> int: ...

    service, _ = small
    with Client(Calls, service.address, deadline=DEADLINE_SECONDS) as client:
        why = r"the method is unknown here; this process, of satrap .*, serves Calls: check"
        with pytest.raises(RuntimeError, match=why) as e:
            client.call.add(1.0)
        assert "raised by Calls.add" in e.value.__notes__[0]


def test_a_frame_beyond_the_limit_closes_only_its_connection(small: tuple[Service, Served]) -> None:
    service, _ = small
    with Client(Calls, service.address, retry_seconds=0.1) as client:
        with pytest.raises(DeadlineError):
            client.with_deadline(0.5).double(np.zeros(1 << 18, np.uint64))
        assert client.with_deadline(DEADLINE_SECONDS).double(np.zeros(1 << 16, np.uint64)).size == 1 << 16


def test_a_peer_that_does_not_speak_zeromq(small: tuple[Service, Served]) -> None:
    service, _ = small
    host, _, port = service.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as plain, Client(Calls, service.address) as client:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
        assert client.with_deadline(DEADLINE_SECONDS).add(1) == 1


def test_a_call_is_retried_until_a_busy_server_has_room(small: tuple[Service, Served]) -> None:
    service, served = small
    with Client(Calls, service.address, deadline=DEADLINE_SECONDS, retry_seconds=DEADLINE_SECONDS) as client:
        filling = [client.start("wait", number) for number in range(3)]
        wait_until(lambda: service.counts()["queued"] + service.counts()["running"] == 3)
        with pytest.raises(DeadlineError, match=r"times refused as busy\)"):
            client.with_deadline(0.3).add(50)
        with ThreadPoolExecutor(8) as pool:
            more = [pool.submit(client.call.add, 1) for _ in range(40)]
            wait_until(lambda: service.counts()["busy"] > 10)
            served.go.set()
            assert sorted(each.result() for each in more) == list(range(1, 41))
        assert [each.result() for each in filling] == [0, 1, 2]


def test_a_peer_that_never_reads_loses_its_replies_and_delays_no_other(small: tuple[Service, Served]) -> None:
    service, _ = small
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.linger, deaf.rcvhwm, deaf.rcvbuf = 0, 1, 4096
    deaf.connect(service.address)
    with Client(Calls, service.address, deadline=DEADLINE_SECONDS) as client:
        for call in range(10**6):
            deaf.send_multipart(request("double", np.zeros(50_000, np.uint64), client=3, call=call))
            if call % 10 == 0 and service.counts()["unsent"]:
                break
        assert service.counts()["unsent"] > 0
        assert client.call.add(1) == 1
    deaf.close()
    context.term()


def test_a_reply_to_a_disconnected_peer_is_dropped(small: tuple[Service, Served]) -> None:
    service, served = small
    with raw_peer(service.address) as peer:
        peer.send_multipart(request("wait", 1))
        wait_until(lambda: service.counts()["running"] == 1)
    with Client(Calls, service.address, deadline=DEADLINE_SECONDS) as client:
        pending = client.start("add", 1)
        served.go.set()
        assert pending.result() == 1
    wait_until(lambda: service.counts()["replied"] + service.counts()["unsent"] == 2)
