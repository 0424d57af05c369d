"""Serves a few pages over HTTP, so that no client can keep another one from its answer.

    client ──GET──> the loop's thread ──/healthz──> answered at once, whatever the other pages do
                           └──────────other pages──> a thread computes the page once for all who wait for it

A client has `EXCHANGE_SECONDS` from its connection to the last byte of its answer, however it spreads them: one byte
now and then does not prolong them. At `MAX_CLIENTS` connections the oldest makes room for a new one, which the loop
reads before it accepts the next. So clients that are slow, silent or gone cost a socket each, for a short time; a
connection serves one request. docs/internals/log.md has what other servers did under the same attacks.
"""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus

_LOG = logging.getLogger("satrap.monitor")
EXCHANGE_SECONDS = 10.0
"""Time of a client to send its request and read the answer."""
PAGE_SECONDS = 4.0
"""Time to compute a page, which is less than the 5 s that rendered probes wait; then the answer is an error."""
MAX_CLIENTS = 64
_MAX_REQUEST_BYTES = 16 << 10
_BACKLOG = 256  # connections that the kernel holds for us; fewer than in a burst would wait for a second
_NO_DESCRIPTOR_SECONDS = 0.1  # before the next try to accept a connection
TEXT = "text/plain; charset=utf-8"
Reply = tuple[int, str, bytes]
"""Status, type and content of an answer."""


class HttpServer:
    """Serves pages until it is closed."""

    def __init__(
        self, host: str, ports: Sequence[int], pages: Mapping[str, Callable[[], Reply]], constant: Mapping[str, Reply]
    ) -> None:
        """host: "" stands for all addresses, of IPv6 too if the system has it.
        ports: the first free one of these.
        pages: by their paths, functions that compute a page. One thread for each path calls them.
        constant: by their paths, answers that are always the same.
        """
        self._pages, self._constant = pages, constant
        self._computing: dict[str, asyncio.Future[Reply]] = {}
        self._clients: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._listener = _listen(host, ports)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._threads = ThreadPoolExecutor(len(pages), "satrap-http-page")
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="satrap-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. A page that is being computed is waited for."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._threads.shutdown()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._loop.add_reader(self._listener, self._accept)
        await self._stop.wait()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, *self._computing.values(), return_exceptions=True)

    def _accept(self) -> None:
        """Accept one connection: the loop then reads what the earlier ones sent before it comes here again."""
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:  # the client has left
            return
        except OSError:  # this process has no descriptor for it
            self._make_room()
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_NO_DESCRIPTOR_SECONDS, self._accept_again)
            return
        if len(self._clients) >= MAX_CLIENTS:
            self._make_room()
        task = self._loop.create_task(self._exchange(client))
        self._clients[task] = None
        task.add_done_callback(partial(self._forget, client))

    def _accept_again(self) -> None:
        if not self._stop.is_set():
            self._loop.add_reader(self._listener, self._accept)

    def _make_room(self) -> None:
        """Disconnect the client that connected first. Idle clients do not go before those that wait for a page: the
        newest one, a probe perhaps, is idle until it is read."""
        oldest = next((task for task in self._clients if not task.cancelling()), None)
        if oldest is not None:
            oldest.cancel()

    def _forget(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        del self._clients[task]
        client.close()  # here, since a task that is cancelled early does not begin

    async def _exchange(self, client: socket.socket) -> None:
        """Read a request and answer it. A client that disconnects or is too slow gets nothing more."""
        with suppress(OSError, TimeoutError):
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the pieces of an answer wait for no other
            async with asyncio.timeout(EXCHANGE_SECONDS):
                head = await self._read_head(client)
                if head is None:
                    return
                for piece in await self._answer(head):  # not joined: all who wait for a large page get the same bytes
                    await self._loop.sock_sendall(client, piece)
                client.shutdown(socket.SHUT_WR)

    async def _read_head(self, client: socket.socket) -> bytes | None:
        """Return the request up to the empty line, or as much of it as is permitted; None if the client left."""
        head = bytearray()
        while b"\r\n\r\n" not in head and len(head) <= _MAX_REQUEST_BYTES:
            data = await self._loop.sock_recv(client, 4096)
            if not data:
                return None
            head += data
        return bytes(head)

    async def _answer(self, head: bytes) -> tuple[bytes, bytes]:
        """Return the head and the content of the answer to a request. That to HEAD has no content."""
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, protocol = rest.rpartition(" ")
        if b"\r\n\r\n" not in head:
            status, kind, content = 431, TEXT, f"expected a request of up to {_MAX_REQUEST_BYTES} bytes\n".encode()
        elif not protocol.startswith("HTTP/1."):
            status, kind, content = 400, TEXT, b"expected a request of HTTP/1.1\n"
        elif method not in ("GET", "HEAD"):
            status, kind, content = 405, TEXT, b"expected the method GET or HEAD\n"
        else:
            status, kind, content = await self._page(target.partition("?")[0])
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}"]
        lines += [f"Content-Length: {len(content)}", "Connection: close", "", ""]
        return "\r\n".join(lines).encode(), b"" if method == "HEAD" else content

    async def _page(self, path: str) -> Reply:
        if path in self._constant:
            return self._constant[path]
        if path not in self._pages:
            paths = sorted({*self._pages, *self._constant})
            return 404, TEXT, f"expected one of {' '.join(paths)}\n".encode()
        if path not in self._computing:
            computing = self._loop.run_in_executor(self._threads, self._compute, path)
            self._computing[path] = computing
            computing.add_done_callback(lambda _: self._computing.pop(path))
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                return await asyncio.shield(self._computing[path])
        except TimeoutError:
            return 503, TEXT, f"{path} is not computed after {PAGE_SECONDS:g} s: the process is too busy\n".encode()

    def _compute(self, path: str) -> Reply:
        try:
            return self._pages[path]()
        except Exception as error:  # it must not end without an answer
            _LOG.exception("%s failed", path)
            return 500, TEXT, f"{type(error).__name__}: {error}\n".encode()


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
    raise AssertionError("no port")
