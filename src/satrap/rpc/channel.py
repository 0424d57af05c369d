"""A `Channel`: the socket on which one thread calls one server, and its `Pending` calls.

A channel is used by its own thread only, so nothing is handed between threads; but another thread may close it.
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
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from satrap.errors import ConfigError, DeadlineError, ForkError, InputError, RpcError
from satrap.interrupts import Uninterrupted
from satrap.rpc.address import is_unix, join_address, resolve_host, split_address
from satrap.rpc.faults import decode_error
from satrap.rpc.header import MAX_DEADLINE_MS, Header, Kind, Origin
from satrap.rpc.keys import Keys
from satrap.rpc.methods import Method
from satrap.rpc.schedule import Schedule

_NOTICE_SECONDS = 5.0  # how long a call waits for a connection before it warns
_RECONNECT_SECONDS = 10.0  # how long a socket may be without a connection before it reconnects
_CLOSED_MS = 100  # how soon a waiting call notices that its client was closed
_RECONNECT_MS, _LONGEST_RECONNECT_MS, _CONNECT_TIMEOUT_MS = 50, 200, 5_000
_HEARTBEAT_MS, _SILENCE_MS = 2_000, 10_000
# As numbers: to join two members of zmq.Flag takes as long as to send a header.
_IN, _OUT, _MORE, _NOW = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.SNDMORE), int(zmq.NOBLOCK)


class Channel:
    """One thread's socket, and its calls that have no answer yet."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: Keys | None) -> None:
        self.address, self.has_keys = address, keys is not None
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

    def connect_within(self, seconds: float) -> None:
        """Returns once the connection stands, was refused, or the time has passed."""
        until = time.monotonic() + seconds
        with Uninterrupted() as held, self.lock:
            while not self.poll(_OUT, _CLOSED_MS) and self.refusal is None and time.monotonic() < until:
                held.look()

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

    def try_send(self, pending: "Pending", now: float) -> None:
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

    def _reconnect(self, now: float) -> None:
        """Reconnects, unless the socket is connected and its queue is only full."""
        if sum(each.schedule.num_sent for each in self.waiting.values()) < self.socket.sndhwm:
            self.socket.disconnect(self._endpoint)
            self.socket.connect(self._endpoint)
        self._stood = now

    def wait(self, pending: "Pending", until: float) -> None:
        """Returns once there is an answer, or the deadline or the time given has passed."""
        with Uninterrupted() as held:  # pyzmq can lose an interrupt, and a message must be taken whole
            while pending.answer is None:
                held.look()
                if not self._go_on(pending, until):
                    return

    def _go_on(self, pending: "Pending", until: float) -> bool:
        """Sends what is due, and takes a message if one comes within a while; False: the time is over."""
        schedule = pending.schedule
        self.require_open()
        now = time.monotonic()
        schedule.look(now)
        if schedule.is_due(now):
            self.try_send(pending, now)
        blocked = schedule.is_due(now)
        if blocked and now > max(self._stood, pending.untold_since) + _NOTICE_SECONDS:
            pending.warn_unconnected(_NOTICE_SECONDS)
        if blocked and now > self._stood + _RECONNECT_SECONDS:
            self._reconnect(now)
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


class Pending:
    """A call that was begun."""

    def __init__(
        self,
        client: object,
        channel: Channel,
        method: Method,
        method_number: int,
        origin: Origin,
        frames: Sequence[memoryview],
        schedule: Schedule,
        seconds: float,
    ) -> None:
        self.number = next(channel.numbers)
        self.schedule = schedule
        self.answer: tuple[Kind, Sequence[memoryview]] | RpcError | None = None
        self.frames: Sequence[memoryview] = frames
        self._client = client  # which is not collected before its calls have ended
        self._channel, self._method, self._seconds = channel, method, seconds
        self._method_number, self._origin = method_number, origin
        self._num_bytes = sum(frame.nbytes for frame in frames)
        self.untold_since = schedule.due

    def header(self, now: float) -> Header:
        """Of the request, sent now."""
        left = math.ceil(1000 * (self.schedule.deadline - now))
        return Header(
            kind=Kind.REQUEST,
            method=self._method_number,
            client=self._channel.client,
            call=self.number,
            num_frames=len(self.frames),
            body_bytes=self._num_bytes,
            deadline_ms=min(max(left, 1), MAX_DEADLINE_MS),
            origin=self._origin,
        )

    def wait(self, seconds: float) -> bool:
        """Whether the call has ended, with an answer or without; waits for that no longer than so many seconds."""
        channel = self._channel
        channel.require_own_thread(self._method.name)
        until = time.monotonic() + seconds
        if self.answer is None:
            with channel.lock:
                channel.wait(self, until)
        return self.answer is not None or self.schedule.is_over(time.monotonic())

    def result(self) -> Any:
        """What the method returned; raises what it raised, or DeadlineError. In the thread that began the call."""
        channel = self._channel
        self.wait(math.inf)
        if self.answer is None:
            raise DeadlineError(self._why_late())
        if isinstance(self.answer, RpcError):
            raise self.answer
        kind, frames = self.answer
        if kind == Kind.ERROR:
            raise decode_error(frames, self._method.name, channel.address)
        try:
            return self._method.decode_result(frames)
        except RpcError as error:
            raise RpcError(f"{channel.address} sent a reply that is none: {error}") from None

    def warn_unconnected(self, seconds: float) -> None:
        """Warns, once, that there has been no connection for so many seconds: the deadline may be far."""
        self.untold_since = math.inf
        late = f"{self._unconnected(seconds)} It"
        if self.schedule.num_sent:
            late = f"{self._method.name} at {self._channel.address}: there is no connection any more. Another"
        warnings.warn(f"{late} is waited for until {self._seconds:g} s are over", stacklevel=2)

    def _unconnected(self, seconds: float) -> str:
        where = f"{self._method.name} at {self._channel.address}"
        same = "has it keys of the same `satrap keys`" if self._channel.has_keys else "has it no keys, as this client"
        return f"{where}: no connection within {seconds:g} s; is a server running there, and {same}?"

    def _why_late(self) -> str:
        where, sent = f"{self._method.name} at {self._channel.address}", self.schedule.num_sent
        if not sent:
            return self._unconnected(self._seconds)
        busy = f", {self.schedule.num_busy} times refused as busy" if self.schedule.num_busy else ""
        at_work = f", {self.schedule.num_working} times told that it runs" if self.schedule.num_working else ""
        what = "nothing was heard for" if self.schedule.patience else "no answer within"
        return (
            f"{where}: there was a connection, but {what} {self._seconds:g} s (sent {sent} times{busy}{at_work}); "
            "give it more time, or look at the server"
        )


def _only_v6(host: str) -> bool:
    try:
        return ":" in resolve_host(host)
    except ConfigError:  # with keys a name may become known later
        return False
