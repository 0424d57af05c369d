"""The server's side: answers the calls of a Protocol with an object that satisfies it.

All threads are alike and share the ROUTER socket under one lock. An event wakes one of them, which receives a request,
has the ledger judge it, runs the method and sends the reply itself, arrays uncopied: nothing is handed between threads.
There is one more than may run methods at a time, so one is always left that receives.

1. A message is received frame by frame; frames beyond `max_frames` are thrown away as they come.
2. Header, number of frames and sizes are checked; the ledger queues the request or says busy, or, of a request that
   came again and is open, working: so whoever waits long hears that the server lives.
3. The arguments are decoded, every type and size checked, and only then the object is called.
4. The result is encoded. A `concurrent.futures.Future` is waited for by nobody: its reply goes when it is done.
5. The reply is sent to the newest route of the client. A caller that is gone or does not read is not waited for: it
   asks again.

**Delivery is at least once.** A request that is still open is not run a second time, but one whose reply was lost is:
the methods of the object must be idempotent. Arrays that it is given are read-only views of what was received; arrays
that it returns must not be changed afterwards, since they are sent from where they lie.

Bounded are the requests (see Limits), replies that a connection does not read, frames that wait to be received, and
over TCP connections that bring nothing and messages that do not end (connections.py). A Unix socket is reached by this
user alone, so its connections are not watched.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import zmq

from satrap.config.validation import check_integer, check_number
from satrap.errors import ConfigError, RpcError
from satrap.rpc.address import is_unix, is_wildcard, join_address, resolve_host, split_address
from satrap.rpc.faults import encode_error
from satrap.rpc.guard import Guard
from satrap.rpc.header import Header, Kind
from satrap.rpc.keys import Keys
from satrap.rpc.ledger import Ledger, Limits, Request, Verdict
from satrap.rpc.methods import Method, methods_of
from satrap.rpc.unix_socket import SocketFile
from satrap.rpc.values import MAX_JSON_BYTES, PIECE_BYTES, in_pieces

_UNREAD = 64  # messages of one connection that wait, in either direction
_HEARTBEAT_MS, _SILENCE_MS = 2_000, 10_000
_HANDSHAKE_MS = 10_000
# With keys arrays come in pieces. What a peer sends before it has shown its key is a frame, too.
_MOST_KEYED_FRAME_BYTES = max(MAX_JSON_BYTES, PIECE_BYTES) + 1024
_LINGER_MS = 1_000
# Of the last reply before the connections are ended: what a caller has not read by then ZeroMQ throws away.
_GRACE_SECONDS = 0.05
_DOMAIN = "satrap"
# As numbers: to join two members of zmq.Flag takes as long as to send a header.
_MORE, _NOW = int(zmq.SNDMORE), int(zmq.NOBLOCK)
_NOBODY = Header(kind=Kind.ERROR, method=0, client=0, call=0)


class Service:
    """Serves an object until it is closed; a context manager."""

    def __init__(
        self,
        served: object,
        protocol: Callable[..., Any],
        address: str,
        keys: Keys | None = None,
        *,
        insecure: bool = False,
        num_threads: int = 2,
        limits: Limits | None = None,
        close_seconds: float = 10.0,
    ) -> None:
        """Serves `served`, which satisfies `protocol`, at `address` ("ipc:///folder/name", "tcp://10.0.0.5:0"; 0 is any
        free port).

        keys: `Keys.read("server.key")`, which `satrap keys` wrote; tcp:// needs them.
        insecure: serve tcp:// without keys: whoever can reach the port may call, and read what others send.
        num_threads: that run the methods.
        close_seconds: how long close() waits for methods that run.
        """
        methods, self._protocol = methods_of(protocol), getattr(protocol, "__name__", "another protocol")
        missing = [name for name in methods if not callable(getattr(served, name, None))]
        if missing:
            raise ConfigError(f"{type(served).__name__} has no method {', '.join(missing)}, which it is to serve")
        check_integer("Service", "num_threads", num_threads, 1, 1024, ConfigError)
        self._close_seconds = check_number("Service", "close_seconds", close_seconds, 0.0)
        self._methods = {method.number: (method, getattr(served, name)) for name, method in methods.items()}
        self._limits = limits or Limits()
        self._ledger = Ledger(self._limits)
        self._changed = threading.Condition(threading.Lock())  # guards the ledger, the socket, the bell and these
        self._at_work: set[threading.Thread] = set()  # those that run methods
        self._ending = self._closed = False
        self._last_reply = 0.0
        self._process = os.getpid()
        self._context = zmq.Context()
        try:
            self._open_sockets(address, keys, insecure)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # Whoever stops looking while there is something left to do, rings. By edge: an event wakes one thread.
        self._bell = os.eventfd(0)
        self._events = select.epoll()
        for heard in (self._bell, self._router.fileno()):
            self._events.register(heard, select.EPOLLIN | select.EPOLLET)
        self._threads = [
            threading.Thread(target=self._serve, name=f"satrap-rpc-{i}", daemon=True) for i in range(num_threads + 1)
        ]
        for thread in self._threads:
            thread.start()

    def _open_sockets(self, address: str, keys: Keys | None, insecure: bool) -> None:
        if keys is not None:
            keys.require_role("server")
        elif not is_unix(address) and not insecure:
            split_address(address)
            raise ConfigError(
                f"{address} is to be served without keys: everybody who can reach the port, other users of this "
                "machine too, could read and change the rows. On one machine listen at ipc:///folder/name; else make "
                "keys with `satrap keys FOLDER` and give them (keys=, --keys), or give that protection up "
                "(insecure=True, --insecure)"
            )
        self._router = router = self._context.socket(zmq.ROUTER)
        self._heard = [(router, zmq.POLLIN)]  # Socket.poll takes twice as long
        router.router_mandatory = True
        most = self._limits.max_frame_bytes
        router.maxmsgsize = most if keys is None else min(most, _MOST_KEYED_FRAME_BYTES)
        router.handshake_ivl = _HANDSHAKE_MS
        router.sndhwm = router.rcvhwm = _UNREAD
        router.heartbeat_ivl, router.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
        router.linger = _LINGER_MS
        self._file: SocketFile | None = None
        self._gatekeeper: Any = None
        # A Unix socket is reached by this user alone.
        self._guard = None if is_unix(address) else Guard(router, self._limits.max_partial_bytes)
        try:
            self._gatekeeper = None if keys is None else _let_in(self._context, router, keys)
            self._address = self._bind(address)
        except BaseException:
            self._let_go()
            raise
        if self._guard is not None:
            self._guard.start()

    def _bind(self, address: str) -> str:
        """Where clients connect."""
        if is_unix(address):
            self._file = SocketFile(address)
            endpoint = self._file.address
        else:
            host, port = split_address(address)
            number = resolve_host(host)
            self._router.ipv6 = ":" in number
            endpoint = join_address(number, port)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            what = "another path" if is_unix(address) else "a free port of this machine, or 0"
            raise ConfigError(f"{address} cannot be served: {error}; give {what}") from None
        if is_unix(address):
            return endpoint
        bound, port = split_address(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        return join_address(os.uname().nodename if is_wildcard(bound) else bound, port)

    def _let_go(self) -> None:
        """Of what the sockets leave when they are closed."""
        if self._guard is not None:
            self._guard.stop()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        if self._file is not None:
            self._file.release()

    @property
    def address(self) -> str:
        """Where clients connect: with the real port, and this machine's name where all its addresses are served."""
        return self._address

    def counts(self) -> dict[str, int]:
        """What became of the messages so far, see Counts; and the requests that are queued and running now."""
        with self._changed:
            ended = 0 if self._guard is None else self._guard.num_ended
            return {**self._ledger.to_dict(), "ended_connections": ended}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all threads. Calls that run are finished and answered; what is queued or awaits a Future is dropped.

        RpcError if a method still runs after `close_seconds`. Does nothing the second time, or in a fork.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._ledger.drop_queued()
            self._changed.wait_for(lambda: not self._at_work, self._close_seconds)
            self._ending = True
            left = set(self._at_work)
            self._events.modify(self._bell, select.EPOLLIN)  # not by edge: wakes all
            self._ring()
        for thread in set(self._threads) - left:
            thread.join()
        time.sleep(max(0.0, self._last_reply + _GRACE_SECONDS - time.monotonic()))
        with self._changed:
            self._ledger.drop_running()
            self._events.close()
            os.close(self._bell)
            if self._guard is not None:
                self._guard.stop()
            self._router.close()
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.term()  # waits for replies on their way, at most _LINGER_MS
        if self._file is not None:
            self._file.release()
        if left:
            raise RpcError(
                f"{self._address}: {len(left)} methods still ran {self._close_seconds:g} s after close(); their "
                "replies are lost and their threads end when they return: let methods end, or return a Future"
            )

    # -- what all threads do -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            if (request := self._next()) is not None:
                self._run(request)
                del request  # its frames are not kept while the thread waits for the next
                self._rest()
            elif self._ending:
                return
            else:
                self._events.poll()

    def _next(self) -> Request | None:
        """The request that this thread is to run; None: there is nothing to do for it."""
        while True:
            with self._changed:
                if self._ending:
                    return None
                has_room = len(self._at_work) + 1 < len(self._threads)
                request = self._ledger.begin(time.monotonic()) if has_room else None
                comes = bool(zmq.zmq_poll(self._heard, 0))
                if request is not None:
                    self._at_work.add(threading.current_thread())
                    if comes or self._ledger.num_queued:
                        self._ring()
                    return request
                if not comes:
                    return None
                self._receive()

    def _rest(self) -> None:
        with self._changed:
            self._at_work.remove(threading.current_thread())
            if self._closed:
                self._changed.notify_all()

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _receive(self) -> None:
        """Takes one message. Like what follows, under the lock."""
        try:
            first = self._router.recv(_NOW, copy=False)
        except zmq.Again:
            return
        route, num_surplus, num_bytes = bytes(first.buffer), 0, 0
        frames: list[memoryview] = []
        more = first.more
        while more:
            frame = self._router.recv(copy=False)
            more, num_bytes = frame.more, num_bytes + len(frame.buffer)
            if len(frames) <= self._limits.max_frames:
                frames.append(frame.buffer)
            else:
                num_surplus += 1
        if self._guard is not None:
            self._guard.took(first, num_bytes)
        header = None
        try:
            if not frames:
                raise RpcError("an empty message")
            header = Header.unpack(frames[0])
            if num_surplus:
                frames.clear()
                raise RpcError(f"more than {self._limits.max_frames} frames: send fewer, larger arrays")
            header.check_frames([len(frame) for frame in frames[1:]])
            self._judge(header, frames[1:], route)
        except RpcError as error:
            self._ledger.counts.bad += 1
            if header is None or header.kind == Kind.REQUEST:
                self._send(route, *_error(header or _NOBODY, error))

    def _judge(self, header: Header, frames: Sequence[memoryview], route: bytes) -> None:
        if header.kind != Kind.REQUEST:
            raise RpcError(f"a message of kind {header.kind.name}; a server takes requests")
        if header.method not in self._methods:
            raise RpcError(
                f"there is no such method here, which serves {self._protocol}: another address was meant, or both "
                "sides are of different releases"
            )
        if header.body_bytes > self._limits.max_bytes:
            raise RpcError(f"a request of {header.body_bytes} bytes; this server takes {self._limits.max_bytes}")
        verdict = self._ledger.arrive(header, frames, route, time.monotonic())
        if verdict is not Verdict.QUEUED:
            self._send(route, *_message(Kind.BUSY if verdict is Verdict.BUSY else Kind.WORKING, header, ()))

    def _send(self, route: bytes, header: Header, frames: Sequence[memoryview]) -> bool:
        """False if the peer is gone or does not read. Once the route is taken, nothing of the rest is refused."""
        try:
            self._router.send(route, _MORE | _NOW)
        except zmq.ZMQError:  # EAGAIN, or no such route
            return False
        self._router.send(header.pack(), _MORE if frames else 0)
        for i, frame in enumerate(frames, 1):
            self._router.send(frame, _MORE if i < len(frames) else 0, copy=False)
        self._last_reply = time.monotonic()
        return True

    # -- running methods, without the lock ---------------------------------------------------------------------------

    def _run(self, request: Request) -> None:
        method, call = self._methods[request.header.method]
        try:
            positional, named = method.decode_arguments(request.header.origin, request.frames)
        except RpcError as error:
            with self._changed:
                self._ledger.counts.bad += 1
            self._answer(request, *_error(request.header, error))
            return
        try:
            result = call(*positional, **named)
        except BaseException as error:  # whatever it is, the caller is told and the thread lives on
            self._fail(request, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(self._settle, request, method))
        else:
            self._succeed(request, method, result)

    def _settle(self, request: Request, method: Method, done: "Future[Any]") -> None:
        error = RpcError(f"{method.name} was cancelled") if done.cancelled() else done.exception()
        if error is not None:
            self._fail(request, error)
        else:
            self._succeed(request, method, done.result())

    def _succeed(self, request: Request, method: Method, result: object) -> None:
        try:
            frames = method.encode_result(result)
            if self._gatekeeper is not None:
                frames = in_pieces(frames)
        except RpcError as error:
            self._fail(request, error)
            return
        self._answer(request, *_message(Kind.REPLY, request.header, frames))

    def _fail(self, request: Request, error: BaseException) -> None:
        with self._changed:
            self._ledger.counts.failed += 1
        self._answer(request, *_error(request.header, error))

    def _answer(self, request: Request, header: Header, frames: Sequence[memoryview]) -> None:
        with self._changed:
            if self._ending or (route := self._ledger.finish(request)) is None:
                return
            if not self._send(route, header, frames):
                self._ledger.unsent()
            if threading.current_thread() not in self._at_work:  # it looks for nothing that came meanwhile
                self._ring()


def _message(kind: Kind, request: Header, frames: Sequence[memoryview]) -> tuple[Header, Sequence[memoryview]]:
    header = Header(
        kind=kind,
        method=request.method,
        client=request.client,
        call=request.call,
        num_frames=len(frames),
        body_bytes=sum(frame.nbytes for frame in frames),
    )
    return header, frames


def _error(request: Header, error: BaseException) -> tuple[Header, Sequence[memoryview]]:
    return _message(Kind.ERROR, request, encode_error(error))


def _let_in(context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]", keys: Keys) -> Any:
    """Makes the socket encrypt and authenticate, and starts what decides whose key is let in; fails closed."""
    from zmq.auth.thread import ThreadAuthenticator  # brings asyncio

    class OnlyClient:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == keys.peer

    gatekeeper = ThreadAuthenticator(context)
    gatekeeper.start()
    gatekeeper.configure_curve_callback(_DOMAIN, OnlyClient())
    router.zap_domain = _DOMAIN.encode()
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.public, keys.secret
    return gatekeeper
