"""The server of `--http` under attack: clients that are slow, silent, gone, huge or many. While each attack lasts, the
probe is answered within its deadline, and so is a scrape; after it nothing is left behind."""

from __future__ import annotations

import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from logged import logged
from satrap.monitor import http_server
from satrap.monitor.http_server import MAX_CLIENTS, TEXT, HttpServer, Reply

PROBE_SECONDS = 5.0
"""`timeoutSeconds` of the rendered probes."""
pytestmark = pytest.mark.alone
GET = b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n"


def page() -> Reply:
    return 200, TEXT, b"numbers\n"


@contextmanager
def served(**pages: Callable[[], Reply]) -> Iterator[HttpServer]:
    found = {"/metrics": page} | {f"/{name}": function for name, function in pages.items()}
    server = HttpServer("127.0.0.1", [0], found, {"/healthz": (200, TEXT, b"alive\n")})
    try:
        yield server
    finally:
        server.close()


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def answer(server: HttpServer, request: bytes) -> bytes:
    with connect(server) as client:
        client.sendall(request)
        return received(client)


def received(client: socket.socket) -> bytes:
    """Return all that a client gets; b"" if the server disconnects it."""
    pieces = []
    try:
        while data := client.recv(1 << 16):
            pieces.append(data)
    except ConnectionError:
        return b""
    return b"".join(pieces)


PAGES = {b"/healthz": b"alive\n", b"/metrics": b"numbers\n"}


def assert_answers_in_time(server: HttpServer) -> None:
    for path, content in PAGES.items():
        start = time.monotonic()
        reply = answer(server, GET % path)
        assert reply.startswith(b"HTTP/1.1 200 OK\r\n") and reply.endswith(b"\r\n\r\n" + content)
        assert time.monotonic() - start < PROBE_SECONDS


def wait_until_closed(client: socket.socket) -> None:
    """Wait until the server has disconnected a client; TimeoutError after a minute."""
    assert received(client) == b""


def test_clients_that_send_a_byte_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them sends for ever, in pieces that come sooner than any limit of one read."""
    monkeypatch.setattr(http_server, "EXCHANGE_SECONDS", PROBE_SECONDS)
    stop = threading.Event()
    with served() as server, ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(MAX_CLIENTS)]

        def drip() -> None:
            while not stop.wait(0.05):
                for client in clients:
                    try:
                        client.send(b"G")
                    except OSError:
                        stop.set()  # the server has disconnected them

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert_answers_in_time(server)
            assert stop.wait(60), "the deadline is that of the whole request"
        finally:
            stop.set()
            dripping.join()
        for client in clients:
            wait_until_closed(client)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost: a\r\n"], ids=["nothing", "half a request"])
def test_more_silent_clients_than_it_holds(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest make room: they are disconnected long before their deadline, and the newest are not."""
    monkeypatch.setattr(http_server, "EXCHANGE_SECONDS", 1e6)
    with served() as server, ExitStack() as stack:
        clients = []
        for _ in range(4 * MAX_CLIENTS):
            clients.append(stack.enter_context(connect(server)))
            clients[-1].sendall(sent)
        assert_answers_in_time(server)
        for client in clients[: 3 * MAX_CLIENTS]:
            wait_until_closed(client)
        newest = clients[-1]
        newest.sendall(GET % b"/healthz" if not sent else b"\r\n")
        assert received(newest).startswith(b"HTTP/1.1 200 OK")


def test_clients_that_vanish_without_a_word() -> None:
    """Half-open connections: one side has closed, or was reset."""
    with served() as server:
        for number in range(4 * MAX_CLIENTS):
            client = connect(server)
            client.sendall(b"GET /met")
            if number % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                client.shutdown(socket.SHUT_WR)
            client.close()
        assert_answers_in_time(server)


def test_clients_that_do_not_read_their_answer() -> None:
    with served(large=lambda: (200, TEXT, bytes(8 << 20))) as server, ExitStack() as stack:
        for _ in range(2 * MAX_CLIENTS):
            client = stack.enter_context(connect(server))
            client.sendall(GET % b"/large")
        assert_answers_in_time(server)


@pytest.mark.parametrize("ending", [b"", b"\r\n\r\n"], ids=["without end", "complete"])
def test_a_huge_header_is_refused_as_soon_as_it_is_too_large(ending: bytes) -> None:
    with served() as server:
        with connect(server) as client:
            with suppress(ConnectionError):  # it does not read on
                client.sendall(b"GET /metrics HTTP/1.1\r\nCookie: " + b"a" * (64 << 20) + ending)
            reply = received(client)
        assert reply == b"" or reply.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert_answers_in_time(server)
        exact = b"GET /metrics HTTP/1.1\r\nCookie: %s\r\n\r\n"
        assert b" 200 OK" in answer(server, exact % (b"a" * ((16 << 10) - len(exact) + 2)))
        assert b" 431 " in answer(server, b"GET /metrics HTTP/1.1\r\nCookie: " + b"a" * ((16 << 10) + 1))


def test_a_page_that_hangs_keeps_no_other_from_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does any number of clients that wait for it: all of them wait for one computation."""
    monkeypatch.setattr(http_server, "PAGE_SECONDS", 2.0)
    computed, may_end = [], threading.Event()

    def hang() -> Reply:
        computed.append(1)
        may_end.wait(60)
        return page()

    with served(readyz=hang) as server, ExitStack() as stack:
        stack.callback(may_end.set)
        clients = [stack.enter_context(connect(server)) for _ in range(2 * MAX_CLIENTS)]
        for client in clients:
            client.sendall(GET % b"/readyz")
        assert_answers_in_time(server)
        reply = received(clients[-1])
        assert reply.startswith(b"HTTP/1.1 503 Service Unavailable") and b"/readyz is not computed after" in reply
        assert computed == [1]


def test_a_flood_of_connections() -> None:
    """Several threads connect, ask for metrics and leave, as fast as they can. A client that sends its request only
    after many others have connected may be disconnected, and tries again; a probe still has its answer in time."""
    stop = threading.Event()

    def flood(server: HttpServer) -> None:
        while not stop.is_set():
            with suppress(OSError), connect(server) as client:
                client.sendall(GET % b"/metrics")

    with served() as server:
        threads = [threading.Thread(target=flood, args=(server,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                start = time.monotonic()
                while not answer(server, GET % b"/healthz").endswith(b"alive\n"):
                    assert time.monotonic() - start < PROBE_SECONDS
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert_answers_in_time(server)


def test_a_process_without_descriptors_still_answers() -> None:
    """The oldest client makes room, so the next is served although no descriptor becomes free elsewhere."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with served() as server, ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(8)]
        assert_answers_in_time(server)  # so those before are accepted
        probe = stack.enter_context(socket.socket())
        probe.settimeout(60)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(probe.fileno()))
        probe.connect(("127.0.0.1", server.port))
        probe.sendall(GET % b"/healthz")
        assert received(probe).endswith(b"alive\n")
        wait_until_closed(clients[0])


@pytest.mark.parametrize(
    ("request_", "status", "content"),
    [
        (GET % b"/healthz?a=b", 200, b"alive\n"),
        (b"HEAD /healthz HTTP/1.0\r\n\r\n", 200, b""),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405, b"expected the method GET or HEAD\n"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, b"expected a request of HTTP/1.1\n"),
        (b"\r\n\r\n", 400, b"expected a request of HTTP/1.1\n"),
        (GET % b"/../etc/passwd", 404, b"expected one of /healthz /metrics\n"),
    ],
)
def test_requests(request_: bytes, status: int, content: bytes) -> None:
    with served() as server:
        head, _, found = answer(server, request_).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status) and found == content
        assert b"Connection: close" in head


def test_a_page_that_fails_is_answered_and_logged() -> None:
    def fail() -> Reply:
        raise ValueError("no such table")

    with served(fails=fail) as server, logged("satrap.monitor", "/fails failed", logging.ERROR):
        assert answer(server, GET % b"/fails").endswith(b"ValueError: no such table\n")
        assert_answers_in_time(server)


def test_a_closed_server_leaves_no_thread_and_no_connection() -> None:
    before = set(threading.enumerate())
    with served() as server:
        assert_answers_in_time(server)
        client = connect(server)
        client.sendall(b"GET ")
    with client:
        wait_until_closed(client)
    assert set(threading.enumerate()) == before
    with pytest.raises(OSError):
        connect(server)
