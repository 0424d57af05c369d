"""The caller's side: a Protocol's methods, called in another process.

Each thread that calls has a DEALER socket of its own, so nothing is handed between threads. `begin` sends and returns
a `Pending`, so that one thread can ask many servers and then collect; `call` does both. Replies are matched by call
number; one that nobody waits for is ignored.

1. A call has a deadline. Until then a request without an answer is sent again every `retry_seconds`, as the same call.
2. A server that is busy is asked again after a pause that grows.
3. A patient call's deadline counts from the last answer that the server still works at it: for calls that may take
   long, of which only silence says that the server is gone.
4. ZeroMQ connects, and connects anew, by itself. A request is only given to a connection that stands (with keys: to a
   server that proved its own), so DeadlineError can say whether there was one.
5. ZeroMQ does not connect anew to who refused this client's key, or has keys where it has none: the calls end at once,
   and the next one makes another connection. Nor, without a word, to who answered what it cannot read: whoever waits
   for a connection does so every some seconds.

A call that Ctrl-C interrupts is given up, and may still run at the server. A message is sent and taken whole, whatever
comes, so the connection is good for the next call.

Delivery is at least once: a served method must be idempotent. Arrays are sent from where they lie, so leave the arrays
of a call alone until its result came; received ones are read-only views.
"""

import itertools
import math
import os
import random
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from satrap.checks import check_number, suggest
from satrap.errors import ConfigError, DeadlineError, ForkError, InputError, RpcError
from satrap.interrupts import Uninterrupted
from satrap.rpc.address import is_unix, join_address, resolve_host, split_address, unix_path
from satrap.rpc.faults import decode_error
from satrap.rpc.header import MAX_DEADLINE_MS, Header, Kind, Origin
from satrap.rpc.keys import Keys
from satrap.rpc.ledger import Limits
from satrap.rpc.methods import Method, methods_of
from satrap.rpc.schedule import Schedule
from satrap.rpc.unix_socket import require_private
from satrap.rpc.values import in_pieces

P = TypeVar("P")

_CONNECT_SECONDS = 1.0  # that a thread's first call waits for its connection before begin() returns
_NOTICE_SECONDS = 5.0  # after which a call without a connection says so
_ANEW_SECONDS = 10.0  # without a connection, after which it is made anew
_CLOSED_MS = 100  # in which a call that waits notices that its client was closed
_RECONNECT_MS, _LONGEST_RECONNECT_MS, _CONNECT_TIMEOUT_MS = 50, 200, 5_000
_HEARTBEAT_MS, _SILENCE_MS = 2_000, 10_000
_MOST_FRAME_BYTES, _MOST_MESSAGE_BYTES = Limits().max_frame_bytes, Limits().max_partial_bytes
# As numbers: to join two members of zmq.Flag takes as long as to send a header.
_IN, _OUT, _MORE, _NOW = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.SNDMORE), int(zmq.NOBLOCK)


class Client(Generic[P]):
    """Calls the methods of a Protocol at one address; a context manager. Any number of threads may use it."""

    call: P
    """Its methods are the Protocol's: `client.call.lookup(ids)`."""

    def __init__(
        self,
        protocol: Callable[..., P],
        address: str,
        keys: Keys | None = None,
        *,
        deadline: float = 30.0,
        retry_seconds: float = 2.0,
    ) -> None:
        """Calls are answered at `address`, e.g. "tcp://server:5555"; nothing is sent before the first one.

        keys: `Keys.read("client.key")`, which `satrap keys` wrote. Without them a server at tcp:// is called that does
        without, too: who it is, and who listens, is not known.
        deadline: seconds that a call may take, unless it says otherwise.
        retry_seconds: after which a request without an answer is sent again.
        """
        self._methods = {name: (method, method.number) for name, method in methods_of(protocol).items()}
        self._keys = keys
        if is_unix(address):
            path = unix_path(address)
            require_private(path.parent)
            is_one = path.name != "*"
        else:
            host, port = split_address(address)
            is_one = port != 0 and host not in ("*", "0.0.0.0", "::")
        if not is_one:
            raise ConfigError(f"the address is {address!r}; wanted that of one server: a host and its port, or a path")
        if self._keys is not None:
            self._keys.require_role("client")
        self.address = address
        self._deadline = _check_seconds("deadline", deadline)
        self._retry_seconds = _check_seconds("retry_seconds", retry_seconds)
        self._process = os.getpid()
        self._context = zmq.Context()
        self._own = threading.local()
        self._connections: set[_Connection] = set()
        self._lock, self._ending = threading.Lock(), threading.RLock()
        self._closed = False
        # It keeps all of these until then: a context that is collected before its sockets waits for them for ever.
        self._finalizer = weakref.finalize(self, _end, self._process, self._ending, self._context, self._connections)
        self.call = self.within(self._deadline)

    def within(self, deadline: float) -> P:
        """The same as `call` with another deadline in seconds: `client.within(5).lookup(ids)`."""
        return cast(P, _Calls(self, _check_seconds("deadline", deadline)))

    def begin(
        self, name: str, /, *arguments: Any, deadline: float | None = None, patient: bool = False, **named: Any
    ) -> "Pending":
        """Sends a call of the method of that name; its result is collected later, in this thread.

        patient: it may take as long as the server says that it works at it; `deadline` is for silence. It has to be
        waited for (`Pending.wait`, `Pending.result`) to be kept alive.
        """
        if name not in self._methods:
            raise InputError(f"there is no method {name!r}; {suggest(name, list(self._methods))}")
        method, number = self._methods[name]
        origin, frames = method.encode_arguments(arguments, named)
        most = max((frame.nbytes for frame in frames), default=0)
        if most > _MOST_FRAME_BYTES:
            raise InputError(
                f"{method.name}: an array of {most} bytes; a server takes at most {_MOST_FRAME_BYTES} in one: "
                "smaller batches, or more servers"
            )
        if (size := sum(frame.nbytes for frame in frames)) > _MOST_MESSAGE_BYTES:
            raise InputError(
                f"{method.name}: arrays of {size} bytes; a server takes at most {_MOST_MESSAGE_BYTES} together: "
                "smaller batches, or more servers"
            )
        if self._keys is not None:
            frames = in_pieces(frames)
        seconds = self._deadline
        if deadline is not None and deadline is not seconds:
            seconds = _check_seconds("deadline", deadline)
        now = time.monotonic()
        patience = seconds if patient else 0.0
        schedule = Schedule(deadline=now + seconds, retry_seconds=self._retry_seconds, due=now, patience=patience)
        schedule.look(now)
        connection = self._connection(min(seconds, _CONNECT_SECONDS))
        pending = Pending(self, connection, method, number, origin, frames, schedule, seconds)
        with Uninterrupted(), connection.lock:
            connection.require_open()
            connection.waiting[pending.number] = pending
            connection.try_send(pending, time.monotonic())
        return pending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections of all threads; calls that wait raise RpcError. Does nothing twice, or in a fork. A
        client that is collected, or left at the end of the process, is closed likewise."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _end(self._process, self._ending, self._context, self._connections)
        self._finalizer.detach()  # not before: an interrupt may have come

    def _connection(self, seconds: float) -> "_Connection":
        if os.getpid() != self._process:
            raise ForkError(
                f"this client was made in process {self._process} and this is its fork {os.getpid()}: its "
                "connections belong to the former. Make a client here, or start workers with 'spawn'"
            )
        held: _Held | None = getattr(self._own, "held", None)
        connection = None if held is None else held.connection
        if connection is None or connection.refusal is not None:
            with Uninterrupted(), self._lock:
                if self._closed:
                    raise RpcError(f"{self.address}: this client is closed; make another")
                connection = _Connection(self._context, self.address, self._keys)
                self._connections.add(connection)
                self._own.held = _Held(connection, self._connections)
            until = time.monotonic() + seconds
            with Uninterrupted() as interrupts, connection.lock:
                while not connection.poll(_OUT, _CLOSED_MS) and connection.refusal is None and time.monotonic() < until:
                    interrupts.look()
        return connection


def _end(process: int, lock: "threading.RLock", context: zmq.Context[Any], connections: "set[_Connection]") -> None:
    """Closes the sockets of a client, then their context; a second thread waits, since ZeroMQ aborts if two do it."""
    if os.getpid() != process:
        return
    with lock:
        for connection in list(connections):
            connection.close()
        context.destroy(0)  # and a socket whose making was interrupted, or this would wait for it for ever


class _Calls:
    """Has the methods of the Protocol as attributes."""

    def __init__(self, client: Client[Any], deadline: float) -> None:
        for name in client._methods:
            setattr(self, name, partial(_call, client, name, deadline))


def _call(client: Client[Any], name: str, deadline: float, /, *arguments: Any, **named: Any) -> Any:
    return client.begin(name, *arguments, deadline=deadline, **named).result()


class Pending:
    """A call that was begun."""

    def __init__(
        self,
        client: Client[Any],
        connection: "_Connection",
        method: Method,
        method_number: int,
        origin: Origin,
        frames: Sequence[memoryview],
        schedule: Schedule,
        seconds: float,
    ) -> None:
        self.number = next(connection.numbers)
        self.schedule = schedule
        self.answer: tuple[Kind, Sequence[memoryview]] | RpcError | None = None
        self.frames: Sequence[memoryview] = frames
        self._client = client  # which is not collected before its calls have ended
        self._connection, self._method, self._seconds = connection, method, seconds
        self._method_number, self._origin = method_number, origin
        self._num_bytes = sum(frame.nbytes for frame in frames)
        self.untold_since = schedule.due

    def header(self, now: float) -> Header:
        """Of the request, sent now."""
        left = math.ceil(1000 * (self.schedule.deadline - now))
        return Header(
            kind=Kind.REQUEST,
            method=self._method_number,
            client=self._connection.client,
            call=self.number,
            num_frames=len(self.frames),
            body_bytes=self._num_bytes,
            deadline_ms=min(max(left, 1), MAX_DEADLINE_MS),
            origin=self._origin,
        )

    def wait(self, seconds: float) -> bool:
        """Whether the call has ended, with an answer or without; waits for that no longer than so many seconds."""
        connection = self._connection
        connection.require_own_thread(self._method.name)
        until = time.monotonic() + seconds
        if self.answer is None:
            with connection.lock:
                connection.wait(self, until)
        return self.answer is not None or self.schedule.is_over(time.monotonic())

    def result(self) -> Any:
        """What the method returned; raises what it raised, or DeadlineError. In the thread that began the call."""
        connection = self._connection
        self.wait(math.inf)
        if self.answer is None:
            raise DeadlineError(self._why_late())
        if isinstance(self.answer, RpcError):
            raise self.answer
        kind, frames = self.answer
        if kind == Kind.ERROR:
            raise decode_error(frames, self._method.name, connection.address)
        try:
            return self._method.decode_result(frames)
        except RpcError as error:
            raise RpcError(f"{connection.address} sent a reply that is none: {error}") from None

    def tell_unconnected(self) -> None:
        """To whoever watches, once: the deadline may be far."""
        self.untold_since = math.inf
        late = f"{self._unconnected(_NOTICE_SECONDS)} It"
        if self.schedule.num_sent:
            late = f"{self._method.name} at {self._connection.address}: there is no connection any more. Another"
        warnings.warn(f"{late} is waited for until {self._seconds:g} s are over", stacklevel=2)

    def _unconnected(self, seconds: float) -> str:
        where = f"{self._method.name} at {self._connection.address}"
        return (
            f"{where}: no connection within {seconds:g} s; is a server running there, and are the keys of both of one "
            "`satrap keys`?"
        )

    def _why_late(self) -> str:
        where, sent = f"{self._method.name} at {self._connection.address}", self.schedule.num_sent
        if not sent:
            return self._unconnected(self._seconds)
        busy = f", {self.schedule.num_busy} times refused as busy" if self.schedule.num_busy else ""
        at_work = f", {self.schedule.num_working} times told that it runs" if self.schedule.num_working else ""
        what = "nothing was heard for" if self.schedule.patience else "no answer within"
        return (
            f"{where}: there was a connection, but {what} {self._seconds:g} s (sent {sent} times{busy}{at_work}); "
            "give it more time, or look at the server"
        )


class _Connection:
    """One thread's socket, and its calls without an answer."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: Keys | None) -> None:
        self.address = address
        self.client = secrets.randbits(64)
        self.numbers = itertools.count(1)
        self.waiting: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()
        self._thread, self._process = threading.get_ident(), os.getpid()
        self.lock = threading.Lock()  # held while the socket is used; close() takes it from another thread
        self._closed = False
        self.socket = socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.immediate = True
        socket.sndhwm = 64
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _LONGEST_RECONNECT_MS
        socket.connect_timeout = _CONNECT_TIMEOUT_MS
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
        if keys is not None:
            socket.curve_serverkey = keys.peer
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        self.refusal: str | None = None
        self._refusals = socket.get_monitor_socket(
            zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        )
        self._endpoint = address
        if not is_unix(address):
            host, port = split_address(address)
            socket.ipv6 = ":" in host or _only_v6(host)
            self._endpoint = join_address(host, port)
        self._stood = time.monotonic()
        socket.connect(self._endpoint)

    def require_open(self) -> None:
        if self._closed:
            raise RpcError(f"{self.address}: this client is closed; make another")
        if self.refusal is not None:
            raise DeadlineError(self.refusal)

    def require_own_thread(self, method: str) -> None:
        if os.getpid() != self._process:
            raise ForkError(f"{method} was begun in process {self._process} and this is its fork {os.getpid()}")
        if threading.get_ident() != self._thread:
            raise InputError(f"{method}: result() was called in another thread than begin(); call it in that one")

    def try_send(self, pending: Pending, now: float) -> None:
        """Sends the request if the connection stands and has room, else leaves it due."""
        try:
            self.socket.send(pending.header(now).pack(), _MORE | _NOW)
        except zmq.Again:
            return
        last = len(pending.frames) - 1
        for i, frame in enumerate(pending.frames):
            self.socket.send(frame, _MORE if i < last else 0, copy=False)
        pending.schedule.sent(now)
        self._stood = now

    def _connect_anew(self, now: float) -> None:
        """Unless it stands, and is only full."""
        if sum(each.schedule.num_sent for each in self.waiting.values()) < self.socket.sndhwm:
            self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)
        self._stood = now

    def wait(self, pending: Pending, until: float) -> None:
        """Returns once there is an answer, or the deadline or the time given has passed."""
        with Uninterrupted() as held:  # pyzmq can lose an interrupt, and a message must be taken whole
            while pending.answer is None:
                held.look()
                if not self._go_on(pending, until):
                    return

    def _go_on(self, pending: Pending, until: float) -> bool:
        """Sends what is due, and takes a message if one comes within a while; False: the time is over."""
        schedule = pending.schedule
        self.require_open()
        now = time.monotonic()
        schedule.look(now)
        if schedule.is_due(now):
            self.try_send(pending, now)
        blocked = schedule.is_due(now)
        if blocked and now > max(self._stood, pending.untold_since) + _NOTICE_SECONDS:
            pending.tell_unconnected()
        if blocked and now > self._stood + _ANEW_SECONDS:
            self._connect_anew(now)
        seconds = min(until, schedule.deadline if blocked else now + schedule.wait(now)) - now
        wanted = _IN | _OUT if blocked else _IN
        if self.poll(wanted, min(math.ceil(1000 * max(0.0, seconds)), _CLOSED_MS)) & _IN:
            self._receive()
            return True
        return not schedule.is_over(now) and now < until

    def poll(self, wanted: int, milliseconds: int) -> int:
        """What the socket is ready for. A connection that is waited for may be refused meanwhile."""
        polled = [(self.socket, wanted)]
        if wanted & _OUT:
            polled.append((self._refusals, _IN))
        ready = dict(zmq.zmq_poll(polled, milliseconds))
        if self._refusals in ready:
            self._take_refusal()
        return ready.get(self.socket, 0)

    def close(self) -> None:
        self._closed = True
        with self.lock:
            self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self.socket.close(0)
        self._refusals.close(0)

    def _take_refusal(self) -> None:
        if recv_monitor_message(self._refusals)["event"] == zmq.Event.HANDSHAKE_FAILED_AUTH:
            why = "the server there does not know this client's key: take the client.key of its server.key"
        else:
            why = "what listens there has keys and this client has none, or the other way, or it is no satrap server"
        self.refusal = f"{self.address}: no connection: {why}"
        self._fail_all(DeadlineError(self.refusal))

    def _receive(self) -> None:
        """Takes one message."""
        try:
            first = self.socket.recv(_NOW, copy=False)
        except zmq.Again:
            return
        frames, more = [first.buffer], first.more
        while more:
            frame = self.socket.recv(copy=False)
            frames.append(frame.buffer)
            more = frame.more
        try:
            self._take(Header.unpack(frames[0]), frames[1:])
        except RpcError as error:
            self._fail_all(RpcError(f"{self.address} sent a reply that is none: {error}"))

    def _take(self, header: Header, frames: Sequence[memoryview]) -> None:
        header.check_frames([len(frame) for frame in frames])
        if header.kind == Kind.ERROR and header.client == header.call == 0:  # it could not read who asks
            error = decode_error(frames, "a request", self.address)
            self._fail_all(RpcError(f"{self.address} cannot read what this client sends: {error}"))
            return
        pending = self.waiting.get(header.call) if header.client == self.client else None
        if pending is None or header.kind == Kind.REQUEST:
            return
        if header.kind == Kind.WORKING:
            pending.schedule.working(time.monotonic())
            return
        if header.kind == Kind.BUSY:
            pending.schedule.busy(time.monotonic(), random.random())
            return
        pending.answer = header.kind, frames
        pending.frames = ()
        del self.waiting[header.call]

    def _fail_all(self, error: RpcError) -> None:
        for pending in list(self.waiting.values()):
            pending.answer = error
        self.waiting.clear()


class _Held:
    """A thread's connection; closed when the thread ends."""

    def __init__(self, connection: _Connection, connections: set[_Connection]) -> None:
        self.connection, self._connections, self._process = connection, connections, os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._process:
            self._connections.discard(self.connection)
            self.connection.close()


def _check_seconds(name: str, value: float) -> float:
    seconds = check_number("Client", name, value, 0.0)
    if not 0.001 <= seconds <= MAX_DEADLINE_MS / 1000:
        raise ConfigError(f"Client: {name} is {value!r}; wanted 0.001 to {MAX_DEADLINE_MS // 1000} seconds")
    return seconds


def _only_v6(host: str) -> bool:
    try:
        return ":" in resolve_host(host)
    except ConfigError:  # with keys a name may become known later
        return False
