"""Waits for several calls at once, to different servers: a `Gather` returns those that have ended, in any order.

Asking each socket in turn would cost a system call per socket and answer. Instead, all descriptors are watched by one
epoll. ZeroMQ makes a descriptor readable only for what arrives after its socket was found empty, so

1. all sockets are polled before the first wait, after a call was added, and every 0.1 s;
2. in between, a message is received from each socket whose descriptor is readable.

Requests that are due are sent, and deadlines are noticed, in step 1.
"""

import math
import select
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Self

import zmq

from satrap.interrupts import SLICE_SECONDS, Uninterrupted
from satrap.rpc.channel import Channel, PendingCall

_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)


class Gather:
    """The calls of one thread that it waits for. A context manager."""

    def __init__(self, calls: Iterable[PendingCall] = ()) -> None:
        self._calls: dict[PendingCall, Channel] = {}
        self._watched: dict[int, Channel] = {}
        self._epoll = select.epoll()
        self._check_at = -math.inf
        for call in calls:
            self.add(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()

    def add(self, call: PendingCall) -> None:
        """Wait for this call, too."""
        channel = self._calls[call] = call.channel
        if self._watched.get(channel.fileno) is not channel:
            self._watched[channel.fileno] = channel
            self._epoll.register(channel.fileno, select.EPOLLIN)
        self._check_at = -math.inf

    def wait(self, seconds: float) -> list[PendingCall]:
        """Wait until a call has ended, with or without an answer, or so many seconds. Return those that have ended."""
        now = time.monotonic()
        until = now + seconds
        with Uninterrupted() as interrupts:
            while True:
                interrupts.check()
                ended = self._check(now) if now >= self._check_at else self._receive(min(until, self._check_at) - now)
                now = time.monotonic()
                if ended or now >= until:
                    for call in ended:
                        self._calls.pop(call, None)
                    return ended

    def _receive(self, seconds: float) -> list[PendingCall]:
        """Wait for messages, and receive those of each socket that has some. Return the calls that they answer."""
        answered = []
        for descriptor, _ in self._epoll.poll(max(0.0, seconds)):
            channel = self._watched[descriptor]
            with channel.lock:
                call = None if channel.is_closed else channel.receive()
                if call is None or channel.waiting:
                    self._check_at = -math.inf  # there may be more, or the socket has a connection now
            if call in self._calls:
                answered.append(call)
        return answered

    def _check(self, now: float) -> list[PendingCall]:
        """Receive what is there already, and send what is due. Return the calls that have ended."""
        channels = set(self._calls.values())
        with ExitStack() as locks:
            for channel in channels:
                locks.enter_context(channel.lock)
                channel.require_open()
            ready = dict(zmq.zmq_poll([(channel.socket, _IN) for channel in channels], 0))
            for channel in channels:
                if channel.socket in ready:
                    channel.receive()
                    while channel.poll(_IN, 0):
                        channel.receive()
            next_at = now + SLICE_SECONDS
            for call, channel in self._calls.items():
                if call.answer is None and not self._attend(call, channel, now):
                    next_at = min(next_at, now + call.schedule.wait(now))
        self._check_at = next_at
        return [call for call in self._calls if call.answer is not None or call.schedule.is_expired(now)]

    def _attend(self, call: PendingCall, channel: Channel, now: float) -> bool:
        """Send a call if it is due. Return whether it has to wait for a connection."""
        if not channel.send_if_due(call, now):
            return False
        if not channel.poll(_OUT, 0):  # notices a server that refuses this client
            return True
        return channel.send_if_due(call, now)
