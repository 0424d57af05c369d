"""The service: answers the calls of a Protocol with an object that satisfies it.

All threads are alike and share the ROUTER socket under one lock. An event wakes one of them, which receives a request,
lets the ledger admit it, runs the method and sends the reply, without copying arrays or passing work to another thread.
There is one thread more than may run methods at a time, so that one can always receive.

1. A message is received frame by frame; frames beyond `max_frames` are discarded as they arrive.
2. Header, number of frames and sizes are checked. The ledger queues the request or refuses it as busy. A duplicate of
   an open request gets the reply "working", so a caller that waits for long knows that the server is alive.
3. The arguments are decoded, with every type and size checked, before the object is called.
4. The result is encoded. For a `concurrent.futures.Future` no thread waits: the reply is sent when it is done.
5. The reply is sent to the newest route of the client. The service does not wait for a caller that is disconnected or
   does not read: the caller retries.

**Delivery is at least once.** A request that is still open is not run a second time, but one whose reply was lost is:
the object's methods must be idempotent. Its array arguments are read-only views of the received frames; arrays that it
returns must not be changed afterwards, since they are sent without a copy.

Limited are the requests (see Limits), replies that a connection does not read, frames that are not received yet, and
over TCP also connections, those that are silent most (guard.py). Only this user can reach a Unix socket, so its
connections are not watched.
"""

import logging
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
from satrap.event_log import LimitedLog, event
from satrap.rpc.address import is_unix, is_wildcard, join_address, resolve_host, split_address, unix_path
from satrap.rpc.faults import encode_error
from satrap.rpc.guard import Guard
from satrap.rpc.header import JOINED_BYTES, Header, Kind, Message
from satrap.rpc.keys import Keys
from satrap.rpc.ledger import Admission, CallTimes, Ledger, Limits, Request
from satrap.rpc.methods import Method, methods_of
from satrap.rpc.open_files import raise_limit
from satrap.rpc.release import RELEASE
from satrap.rpc.unix_socket import SocketFile
from satrap.rpc.values import MAX_JSON_BYTES, PIECE_BYTES, Frames, in_pieces

_LOG = logging.getLogger("satrap.rpc")
_MAX_QUEUED_MESSAGES = 64  # one connection queues at most so many in either direction
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
_HANDSHAKE_MS = 10_000
# With keys, arrays arrive in pieces. The limit also holds for frames from peers that are not authenticated yet.
_MAX_KEYED_FRAME_BYTES = max(MAX_JSON_BYTES, PIECE_BYTES) + 1024
_LINGER_MS = 1_000
# Time after the last reply before connections are closed: ZeroMQ discards what a caller has not read by then.
_GRACE_SECONDS = 0.05
_DOMAIN = "satrap"
# Plain integers: combining two members of zmq.Flag takes as long as sending a header.
_MORE, _NOW, _IN, _EVENTS = int(zmq.SNDMORE), int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.EVENTS)
_MAX_JOINED_BYTES = 2 * JOINED_BYTES  # a message of one frame has its header and the sizes besides
_NO_REQUEST = Header(kind=Kind.ERROR, method=0, client=0, call=0)


def require_protection(address: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise ConfigError unless a service may listen at this address: with keys, at a Unix socket, or insecurely."""
    (unix_path if is_unix(address) else split_address)(address)
    if not (has_keys or insecure or is_unix(address)):
        raise ConfigError(
            f"{address} would be served without keys: anyone who can reach the port, including other users of this "
            "machine, could read and change the rows. On one machine listen at ipc:///folder/name; otherwise use "
            "keys (keys=, --keys), which `satrap keys DIR` creates, or give up that protection (insecure=True, "
            "--insecure)"
        )


class Service:
    """Serves an object until it is closed. A context manager."""

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
        """Serve `served`, which satisfies `protocol`, at `address`: "ipc:///folder/name", or "tcp://10.0.0.5:0", where
        port 0 is any free one.

        keys: `Keys.read("server.key")`, which `satrap keys` wrote; required for tcp:// unless `insecure`.
        insecure: serve tcp:// without keys: anyone who can reach the port may call, or exhaust this process's memory,
        and traffic is not encrypted.
        num_threads: number of threads that run methods.
        close_seconds: how long close() waits for running methods.
        """
        methods, self._protocol = methods_of(protocol), getattr(protocol, "__name__", "another protocol")
        missing = [name for name in methods if not callable(getattr(served, name, None))]
        if missing:
            raise ConfigError(
                f"{type(served).__name__} has no method {', '.join(missing)}; add what the Protocol names"
            )
        check_integer("Service", "num_threads", num_threads, 1, 1024, ConfigError)
        self._close_seconds = check_number("Service", "close_seconds", close_seconds, 0.0)
        self._methods = {method.number: (method, getattr(served, name)) for name, method in methods.items()}
        self._limits = limits or Limits()
        self._ledger = Ledger(self._limits)
        self._times = CallTimes({method.number: name for name, method in methods.items()})
        self._lock = threading.Lock()  # guards ledger, times, socket, eventfd and these:
        self._busy: set[threading.Thread] = set()  # threads that run methods
        self._is_stopping = self._closed = False
        self._changed = threading.Condition(self._lock)
        self._last_reply = 0.0
        self._process = os.getpid()
        raise_limit()
        self._context = zmq.Context()
        try:
            self._open_sockets(address, keys, insecure)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # A thread that stops polling while work is left wakes another. Edge-triggered: an event wakes one thread.
        self._wakeup = os.eventfd(0)
        self._events = select.epoll()
        for fd in (self._wakeup, self._router.fileno()):
            self._events.register(fd, select.EPOLLIN | select.EPOLLET)
        self._threads = [
            threading.Thread(target=self._serve, name=f"satrap-rpc-{i}", daemon=True) for i in range(num_threads + 1)
        ]
        for thread in self._threads:
            thread.start()

    def _open_sockets(self, address: str, keys: Keys | None, insecure: bool) -> None:
        if keys is not None:
            keys.require_role("server")
        require_protection(address, has_keys=keys is not None, insecure=insecure)
        self._router = router = self._context.socket(zmq.ROUTER)
        router.router_mandatory = True
        max_frame_bytes = self._limits.max_frame_bytes
        router.maxmsgsize = max_frame_bytes if keys is None else min(max_frame_bytes, _MAX_KEYED_FRAME_BYTES)
        router.handshake_ivl = _HANDSHAKE_MS
        router.sndhwm = router.rcvhwm = _MAX_QUEUED_MESSAGES
        router.heartbeat_ivl, router.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        router.linger = _LINGER_MS
        self._socket_file: SocketFile | None = None
        self._authenticator: Any = None
        # Only this user can reach a Unix socket.
        self._guard = None if is_unix(address) else Guard(router)
        try:
            self._authenticator = None if keys is None else _enable_curve(self._context, router, keys)
            self.address = self._bind(address)
            """The address for clients, with the real port; with this machine's name if all its addresses are served."""
        except BaseException:
            self._release_sockets()
            raise

    def _bind(self, address: str) -> str:
        """Bind the socket and return the address for clients."""
        if is_unix(address):
            self._socket_file = SocketFile(address)
            endpoint = self._socket_file.address
        else:
            host, port = split_address(address)
            number = resolve_host(host)
            self._router.ipv6 = ":" in number
            endpoint = join_address(number, port)
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            hint = "another path" if is_unix(address) else "a free port of this machine, or 0"
            raise ConfigError(f"{address} cannot be served: {error}; use {hint}") from None
        if is_unix(address):
            return endpoint
        bound, port = split_address(self._router.getsockopt_string(zmq.LAST_ENDPOINT))
        return join_address(os.uname().nodename if is_wildcard(bound) else bound, port)

    def _release_sockets(self) -> None:
        """Release what closing the sockets does not."""
        if self._guard is not None:
            self._guard.stop()
        if self._authenticator is not None:
            self._authenticator.stop()
        if self._socket_file is not None:
            self._socket_file.release()

    def counts(self) -> dict[str, int]:
        """Return the counters of messages, see Counts, and the numbers of queued and running requests."""
        with self._changed:
            closed = 0 if self._guard is None else self._guard.num_closed
            return {**self._ledger.to_dict(), "ended_connections": closed}

    def call_times(self) -> dict[str, tuple[list[int], float]]:
        """Return for each method the histogram of the seconds from the start of its calls to the reply: the number of
        calls in each bin, see `satrap.rpc.ledger.BOUNDS`, and their sum."""
        with self._changed:
            return self._times.to_dict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all threads. Running calls are finished and answered; calls that are queued or wait for a Future are
        dropped.

        RpcError if a method still runs after `close_seconds`. Idempotent; does nothing in a fork.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._ledger.drop_queued()
            self._changed.wait_for(lambda: not self._busy, self._close_seconds)
            self._is_stopping = True
            still_running = set(self._busy)
            self._events.modify(self._wakeup, select.EPOLLIN)  # level-triggered: wakes all threads
            self._wake()
        for thread in set(self._threads) - still_running:
            thread.join()
        time.sleep(max(0.0, self._last_reply + _GRACE_SECONDS - time.monotonic()))
        with self._changed:
            self._ledger.drop_running()
            self._events.close()
            os.close(self._wakeup)
            if self._guard is not None:
                self._guard.stop()
            self._router.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()  # waits for replies in flight, at most _LINGER_MS
        if self._socket_file is not None:
            self._socket_file.release()
        if still_running:
            raise RpcError(
                f"{self.address}: {len(still_running)} methods still ran {self._close_seconds:g} s after close(); "
                "their replies are lost, and their threads end when they return: let methods end, or return a Future"
            )

    # -- the loop of all threads --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            if (request := self._next_request()) is not None:
                self._run(request)
                del request  # frees its frames while the thread waits for the next request
                self._mark_idle()
            elif self._is_stopping:
                return
            else:
                self._events.poll()

    def _next_request(self) -> Request | None:
        """Receive messages until there is a request for this thread to run; None if there is nothing to do."""
        while True:
            with self._lock:
                if self._is_stopping:
                    return None
                has_room = len(self._busy) + 1 < len(self._threads)
                request = self._ledger.start_next(time.monotonic()) if has_room else None
                has_message = int(self._router.get(_EVENTS)) & _IN  # zmq_poll would let other threads of Python run
                if request is not None:
                    self._busy.add(threading.current_thread())
                    if has_message or self._ledger.num_queued:
                        self._wake()
                    return request
                if not has_message:
                    return None
                self._receive()

    def _mark_idle(self) -> None:
        with self._lock:
            self._busy.remove(threading.current_thread())
            if self._closed:
                self._changed.notify_all()

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _receive(self) -> None:
        """Receive one message. The caller holds the lock, as in the methods below."""
        try:
            first = self._router.recv(_NOW, copy=False)
        except zmq.Again:
            return
        route, num_surplus, num_bytes = first.bytes, 0, 0
        frames: list[memoryview] = []
        more = first.more
        while more:
            frame = self._router.recv(copy=False)
            more, num_bytes = frame.more, num_bytes + len(frame.buffer)
            if len(frames) <= self._limits.max_frames:
                frames.append(frame.buffer)
            else:
                num_surplus += 1
        self._ledger.counts.received_bytes += num_bytes
        if self._guard is not None:
            self._guard.record_message(first)
        header, joined = None, b""
        try:
            if not frames:
                raise RpcError("found an empty message; expected a header")
            if len(frames) == 1 and num_bytes <= _MAX_JOINED_BYTES:
                joined = frames[0].tobytes()
                header = Header.of_joined(joined)
            is_joined = header is not None
            header = header or Header.unpack(frames[0])
            if num_surplus or header.num_frames > self._limits.max_frames:
                frames.clear()
                raise RpcError(f"a message has more than {self._limits.max_frames} frames: send fewer, larger arrays")
            self._admit(header, joined if is_joined else header.frames_of(frames), route)
        except RpcError as error:
            self._ledger.counts.bad += 1
            if header is None or header.kind == Kind.REQUEST:
                self._send(route, _error(header or _NO_REQUEST, error))

    def _admit(self, header: Header, frames: Frames, route: bytes) -> None:
        if header.kind != Kind.REQUEST:
            raise RpcError(f"a message has kind {header.kind.name}; a server expects requests")
        if header.method not in self._methods:
            raise RpcError(
                f"the method is unknown here; this process, of satrap {RELEASE}, serves {self._protocol}: check the "
                "address, and run the same release on both sides"
            )
        if header.body_bytes > self._limits.max_bytes:
            raise RpcError(
                f"a request has {header.body_bytes} bytes; this server accepts at most {self._limits.max_bytes}"
            )
        admission = self._ledger.arrive(header, frames, route, time.monotonic())
        if admission is not Admission.QUEUED:
            self._send(route, _message(Kind.BUSY if admission is Admission.BUSY else Kind.WORKING, header, ()))

    def _send(self, route: bytes, message: Message) -> bool:
        """Send a message. Returns False if the peer is disconnected or does not read, which only the first frame, the
        route, can tell."""
        try:
            self._router.send(route, _MORE | _NOW)
        except zmq.ZMQError:  # EAGAIN, or an unknown route
            return False
        last = len(message) - 1
        for i, frame in enumerate(message):
            self._router.send(frame, _MORE if i < last else 0, copy=i == 0)
        self._last_reply = time.monotonic()
        self._ledger.counts.sent_bytes += sum(map(len, message))
        return True

    # -- running methods, without the lock ---------------------------------------------------------------------------

    def _run(self, request: Request) -> None:
        method, call = self._methods[request.header.method]
        try:
            positional, named = method.decode_arguments(request.header.origin, request.frames)
        except RpcError as error:
            with self._changed:
                self._ledger.counts.bad += 1
            self._reply(request, _error(request.header, error))
            return
        try:
            result = call(*positional, **named)
        except BaseException as error:  # any exception goes to the caller, and the thread continues
            self._fail(request, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(self._on_future_done, request, method))
        else:
            self._succeed(request, method, result)

    def _on_future_done(self, request: Request, method: Method, future: "Future[Any]") -> None:
        error = RpcError(f"{method.name} was cancelled") if future.cancelled() else future.exception()
        if error is not None:
            self._fail(request, error)
        else:
            self._succeed(request, method, future.result())

    def _succeed(self, request: Request, method: Method, result: object) -> None:
        if (packed := method.pack_result(result, request.header)) is not None:
            self._reply(request, [packed])
            return
        try:
            frames = method.encode_result(result)
            if self._authenticator is not None:
                frames = in_pieces(frames)
        except RpcError as error:
            self._fail(request, error)
            return
        self._reply(request, _message(Kind.REPLY, request.header, frames))

    def _fail(self, request: Request, error: BaseException) -> None:
        with self._changed:
            self._ledger.counts.failed += 1
        self._reply(request, _error(request.header, error))

    def _reply(self, request: Request, message: Message) -> None:
        with self._lock:
            if self._is_stopping or (route := self._ledger.finish(request)) is None:
                return
            self._times.record(request.header.method, time.monotonic() - request.started_at)
            if not self._send(route, message):
                self._ledger.record_unsent()
            if threading.current_thread() not in self._busy:  # this thread will not receive what arrived meanwhile
                self._wake()


def _message(kind: Kind, request: Header, frames: Sequence[memoryview]) -> Message:
    header = Header(
        kind=kind,
        method=request.method,
        client=request.client,
        call=request.call,
        num_frames=len(frames),
        body_bytes=sum(frame.nbytes for frame in frames),
    )
    return header.message(frames)


def _error(request: Header, error: BaseException) -> Message:
    return _message(Kind.ERROR, request, encode_error(error))


def _enable_curve(context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]", keys: Keys) -> Any:
    """Enable encryption, and start the authenticator, which accepts only the client's key. Fails closed."""
    from zmq.auth.thread import ThreadAuthenticator  # imports asyncio

    log = LimitedLog(_LOG.warning)

    class OnlyClient:
        def callback(self, domain: str, key: bytes) -> bool:
            if key != keys.peer:
                log("a client with an unknown key was refused", extra=event("hello_refused", why="unknown key"))
            return key == keys.peer

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, OnlyClient())
    router.zap_domain = _DOMAIN.encode()
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = keys.public, keys.secret
    return authenticator
