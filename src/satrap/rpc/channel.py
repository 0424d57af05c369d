"""A `Channel`: the socket on which one thread calls one server, and its `PendingCall` calls.

Only its own thread uses a channel, so no message passes between threads; but another thread may close it.
"""

import itertools
import logging
import math
import os
import random
import secrets
import threading
import time
import weakref
from functools import partial
from typing import Any

import zmq

from satrap._core import read_header
from satrap.errors import ConfigError, DeadlineError, ForkError, InputError, RpcError
from satrap.event_log import event
from satrap.interrupts import Uninterrupted
from satrap.rpc.address import is_unix, join_address, resolve_host, split_address
from satrap.rpc.faults import decode_error
from satrap.rpc.handshakes import Handshakes
from satrap.rpc.header import MAX_DEADLINE_MS, Header, Kind, Message, set_deadline
from satrap.rpc.keys import Keys
from satrap.rpc.methods import Method
from satrap.rpc.schedule import Schedule
from satrap.rpc.values import Frames

_LOG = logging.getLogger("satrap.rpc")
_WARN_SECONDS = 5.0  # a call without a connection is logged after this time
_RECONNECT_SECONDS = 10.0  # a socket without a connection reconnects after this time
_CLOSE_CHECK_MS = 100  # interval at which a waiting call checks whether its client was closed
_MAX_QUEUED_MESSAGES = 64
_RECONNECT_MS, _MAX_RECONNECT_MS, _CONNECT_TIMEOUT_MS = 50, 200, 5_000
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2_000, 10_000
# Plain integers: combining two members of zmq.Flag takes as long as sending a header.
_REQUEST, _ERROR, _BUSY, _WORKING = map(int, (Kind.REQUEST, Kind.ERROR, Kind.BUSY, Kind.WORKING))
_IN, _OUT, _MORE, _NOW = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.SNDMORE), int(zmq.NOBLOCK)


class Channel:
    """The socket of one thread, and its calls that have no answer yet."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: Keys | None) -> None:
        self.address, self.has_keys = address, keys is not None
        self.client = secrets.randbits(64)
        self.numbers = itertools.count(1)
        self.waiting: dict[int, weakref.ref[PendingCall]] = {}  # an abandoned call removes itself
        self._thread, self._process = threading.get_ident(), os.getpid()
        self.lock = threading.Lock()  # held while the socket is used; close() takes it from another thread
        self.is_closed, self._is_new = False, True
        self.refusal: str | None = None
        self._handshakes: Handshakes | None = None  # while there is no connection
        self._endpoint = address
        self._last_connected = time.monotonic()
        self.socket = context.socket(zmq.DEALER)
        try:
            self._connect(keys)
        except BaseException:
            self.close()  # an open socket would keep the context open
            raise

    def _connect(self, keys: Keys | None) -> None:
        socket = self.socket
        socket.linger = 0
        socket.immediate = True
        socket.sndhwm = _MAX_QUEUED_MESSAGES
        socket.reconnect_ivl, socket.reconnect_ivl_max = _RECONNECT_MS, _MAX_RECONNECT_MS
        socket.connect_timeout = _CONNECT_TIMEOUT_MS
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        if keys is not None:
            socket.curve_serverkey = keys.peer
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        if not is_unix(self.address):
            host, port = split_address(self.address)
            socket.ipv6 = ":" in host or _is_only_ipv6(host)
            self._endpoint = join_address(host, port)
        self._handshakes = Handshakes(socket, self._endpoint, self.has_keys)
        socket.connect(self._endpoint)
        self.fileno: int = socket.fileno()
        """The descriptor that is readable when messages arrive after `poll` found none."""

    def connect_within(self, seconds: float) -> None:
        """Wait until a new channel has its connection or is refused, at most so many seconds."""
        if not self._is_new:
            return
        self._is_new = False
        until = time.monotonic() + seconds
        with Uninterrupted() as interrupts, self.lock:
            while not (self.is_closed or self.refusal or time.monotonic() >= until or self.poll(_OUT, _CLOSE_CHECK_MS)):
                interrupts.check()

    def require_open(self) -> None:
        if self.is_closed:
            raise RpcError(f"{self.address}: this client is closed; create another")
        if self.refusal is not None:
            raise DeadlineError(self.refusal)

    def require_own_thread(self, method: str) -> None:
        if os.getpid() != self._process:
            raise ForkError(f"{method} was started in process {self._process} and this is its fork {os.getpid()}")
        if threading.get_ident() != self._thread:
            raise InputError(f"{method}: result() was called in another thread than start(); call both in one thread")

    def try_send(self, pending: "PendingCall", now: float) -> None:
        """Send the request if there is a connection with room for it; otherwise leave it due."""
        message, socket = pending.message, self.socket
        pending.set_deadline(now)
        last = len(message) - 1
        try:
            socket.send(message[0], _MORE | _NOW if last else _NOW)
        except zmq.Again:
            return
        for i in range(1, last + 1):
            socket.send(message[i], _MORE if i < last else 0, copy=False)
        pending.schedule.record_sent(now)
        self._last_connected = now
        if self._handshakes is not None:
            self._end_handshakes()

    def _calls(self) -> "list[PendingCall]":
        return [call for reference in list(self.waiting.values()) if (call := reference()) is not None]

    def _watch_handshakes(self) -> None:
        """Watch the handshakes of a connection that was lost. Connects again, since ZeroMQ would not do so if the
        server refused one before. Does nothing if the socket is connected and merely has a full queue."""
        num_unanswered = sum(call.schedule.num_sent for call in self._calls())
        if self._handshakes is None and num_unanswered < _MAX_QUEUED_MESSAGES:
            self._handshakes = Handshakes(self.socket, self._endpoint, self.has_keys)
            self._reconnect(self._last_connected)

    def _end_handshakes(self) -> None:
        if self._handshakes is not None:
            handshakes, self._handshakes = self._handshakes, None
            handshakes.close()

    def _reconnect(self, now: float) -> None:
        self.socket.disconnect(self._endpoint)
        self.socket.connect(self._endpoint)
        self._last_connected = now

    def wait(self, pending: "PendingCall", until: float) -> None:
        """Wait for the answer, at most until the call's deadline or the time `until`."""
        with Uninterrupted() as interrupts:  # pyzmq can lose an interrupt, and a message must be received whole
            while pending.answer is None:
                interrupts.check()
                if not self._poll_once(pending, until):
                    return

    def _poll_once(self, pending: "PendingCall", until: float) -> bool:
        """Send the request if it is due, and receive at most one message. Return False when the time is over."""
        self.require_open()
        now = time.monotonic()
        blocked = self.send_if_due(pending, now)
        schedule = pending.schedule
        seconds = min(until, schedule.deadline if blocked else now + schedule.wait(now)) - now
        events = _IN | _OUT if blocked else _IN
        if self.poll(events, min(math.ceil(1000 * max(0.0, seconds)), _CLOSE_CHECK_MS)) & _IN:
            self.receive()
            return True
        return not schedule.is_expired(now) and now < until

    def send_if_due(self, pending: "PendingCall", now: float) -> bool:
        """Send the request if it is due. Returns whether it has to wait for a connection with room for it."""
        schedule = pending.schedule
        schedule.observe(now)
        if not schedule.is_due(now):
            return False
        self.try_send(pending, now)
        if not schedule.is_due(now):
            return False
        self._watch_handshakes()
        if now > max(self._last_connected, pending.unwarned_since) + _WARN_SECONDS:
            pending.warn_unconnected(_WARN_SECONDS)
        if now > self._last_connected + _RECONNECT_SECONDS and self._handshakes is not None:
            self._reconnect(now)
        return True

    def poll(self, events: int, milliseconds: int) -> int:
        """Return the events that the socket is ready for. Also notices a connection that is refused meanwhile."""
        polled = [(self.socket, events)]
        if self._handshakes is not None and events & _OUT:
            polled.append((self._handshakes.monitor, _IN))
        ready = dict(zmq.zmq_poll(polled, milliseconds))
        flags = ready.pop(self.socket, 0)
        if flags & _OUT:
            self._end_handshakes()
        elif ready and self._handshakes is not None and (reason := self._handshakes.read()) is not None:
            self.refusal = f"{self.address}: no connection: {reason}"
            self._fail_all(DeadlineError(self.refusal))
        return flags

    def close(self) -> None:
        self.is_closed = True
        with self.lock:
            self._end_handshakes()
            self.socket.close(0)

    def receive(self) -> "PendingCall | None":
        """Receive one message, if there is one. Returns the call that it answers, if it does."""
        try:
            first = self.socket.recv(_NOW, copy=False)
        except zmq.Again:
            return None
        if first.more:
            frames = [first.buffer]
            more = True
            while more:
                frame = self.socket.recv(copy=False)
                frames.append(frame.buffer)
                more = frame.more
        else:
            # pyzmq swallows an interrupt that is pending while it frees a frame: it frees that of a small message here.
            message = first.bytes
            if (fields := read_header(message)) is not None:
                return self._handle_message(fields[0], fields[2], fields[3], message)
            frames = [memoryview(message)]
        try:
            header = Header.unpack(frames[0])
            return self._handle_message(header.kind, header.client, header.call, header.frames_of(frames))
        except RpcError as error:
            self._fail_all(RpcError(f"{self.address} sent an invalid reply: {error}"))
            return None

    def _handle_message(self, kind: int, client: int, number: int, frames: Frames) -> "PendingCall | None":
        if kind == _ERROR and client == number == 0:  # the server could not read the sender
            error = decode_error(frames, "a request", self.address)
            self._fail_all(RpcError(f"{self.address} cannot read what this client sends: {error}"))
            return None
        known = self.waiting.get(number) if client == self.client else None
        pending = None if known is None else known()
        if pending is None or kind == _REQUEST:
            return None
        if kind == _WORKING:
            pending.schedule.record_working(time.monotonic())
            return None
        if kind == _BUSY:
            pending.schedule.record_busy(time.monotonic(), random.random())
            return None
        pending.answer = kind, frames
        pending.message = []
        self.waiting.pop(number, None)
        return pending

    def _fail_all(self, error: RpcError) -> None:
        for pending in self._calls():
            pending.answer = error
        self.waiting.clear()


class PendingCall:
    """A call that was started. Its result is collected later, in the same thread."""

    __slots__ = (
        "__weakref__",
        "_client",
        "_method",
        "answer",
        "channel",
        "message",
        "number",
        "schedule",
        "seconds",
        "unwarned_since",
    )

    def __init__(
        self,
        client: object,
        channel: Channel,
        method: Method,
        number: int,
        message: Message,
        schedule: Schedule,
        seconds: float,
    ) -> None:
        """message: the frames of the request, the first of which begins with its header."""
        self.number, self.message, self.schedule = number, message, schedule
        self.answer: tuple[int, Frames] | RpcError | None = None
        self._client = client  # keeps the client from being collected before its calls have ended
        self.channel, self._method, self.seconds = channel, method, seconds
        self.unwarned_since = schedule.due

    def set_deadline(self, now: float) -> None:
        """Set the deadline in the request, which is sent now."""
        left = math.ceil(1000 * (self.schedule.deadline - now))
        set_deadline(self.message, min(max(left, 1), MAX_DEADLINE_MS))

    def send(self) -> None:
        """Send the request for the first time, if there is a connection; otherwise it is sent while it is waited
        for."""
        with Uninterrupted():
            self.send_uninterrupted()

    def send_uninterrupted(self) -> None:
        """Send the request, where the caller is inside a block of `Uninterrupted` already."""
        channel = self.channel
        with channel.lock:
            channel.require_open()
            # Called by the weak reference itself: a destructor in Python could lose a Ctrl-C.
            channel.waiting[self.number] = weakref.ref(self, partial(channel.waiting.pop, self.number))
            channel.try_send(self, time.monotonic())

    def wait(self, seconds: float) -> bool:
        """Wait at most so many seconds for the call to end. Returns whether it ended, with or without an answer."""
        channel = self.channel
        channel.require_own_thread(self._method.name)
        until = time.monotonic() + seconds
        if self.answer is None:
            with channel.lock:
                channel.wait(self, until)
        return self.answer is not None or self.schedule.is_expired(time.monotonic())

    def result(self) -> Any:
        """Return the method's result; raise its exception, or DeadlineError. Call it in the thread of `start`."""
        channel = self.channel
        if self.answer is None:
            self.wait(math.inf)
        else:
            channel.require_own_thread(self._method.name)
        if self.answer is None:
            raise DeadlineError(self._timeout_message())
        if isinstance(self.answer, RpcError):
            raise self.answer
        if self.unwarned_since == math.inf:
            back = event("peer_back", peer=self.channel.address, method=self._method.name)
            _LOG.info("%s answers again", self.channel.address, extra=back)
        kind, frames = self.answer
        if kind == _ERROR:
            raise decode_error(frames, self._method.name, channel.address)
        try:
            return self._method.decode_result(frames)
        except RpcError as error:
            raise RpcError(f"{channel.address} sent an invalid reply: {error}") from None

    def warn_unconnected(self, seconds: float) -> None:
        """Log once that there has been no connection for so many seconds, since the deadline may be far away."""
        self.unwarned_since = math.inf
        late = f"{self._no_connection_message(seconds)} It"
        if self.schedule.num_sent:
            late = f"{self._method.action} at {self.channel.address}: the connection was lost. A new one"
        lost = event("peer_lost", peer=self.channel.address, method=self._method.name)
        _LOG.warning("%s is waited for until %g s have passed", late, self.seconds, extra=lost)

    def _no_connection_message(self, seconds: float) -> str:
        where = f"{self._method.action} at {self.channel.address}"
        same = (
            "does it have keys of the same `satrap keys`"
            if self.channel.has_keys
            else "does it have no keys, like this client"
        )
        return f"{where}: no connection within {seconds:g} s; is a server running there, and {same}?"

    def _timeout_message(self) -> str:
        where, sent = f"{self._method.action} at {self.channel.address}", self.schedule.num_sent
        if not sent:
            return self._no_connection_message(self.seconds)
        busy = f", {self.schedule.num_busy} times refused as busy" if self.schedule.num_busy else ""
        running = f", {self.schedule.num_working} times reported as running" if self.schedule.num_working else ""
        what = "nothing was received for" if self.schedule.patience else "no answer within"
        return (
            f"{where}: there was a connection, but {what} {self.seconds:g} s (sent {sent} times{busy}{running}); see "
            "in its log what that process does: start it again if it is suspended or was killed, or repair the network"
        )


def _is_only_ipv6(host: str) -> bool:
    try:
        return ":" in resolve_host(host)
    except ConfigError:  # with keys, the name may become resolvable later
        return False
