"""Sends several calls and waits for all of them at once: a `Gather` returns those that have ended, in any order.

Asking each socket in turn would cost a system call per socket and answer. Instead, all descriptors are watched by one
epoll, which a thread keeps for its next calls, since registering a socket costs about as much as sending to it. ZeroMQ
makes a descriptor readable only for what arrives after its socket was found empty, so

1. all sockets are polled before the first wait, after a call was added, and every 0.1 s;
2. in between, a message is received from each socket whose descriptor has become readable (edge-triggered: a fork may
   keep the descriptor of a closed socket open, and it may stay readable).

Requests that are due are sent, and deadlines are noticed, in step 1.
"""

import math
import select
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import zmq

from satrap.interrupts import SLICE_SECONDS, Uninterrupted
from satrap.rpc.channel import Channel, PendingCall

_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)


def send_all(calls: Iterable[PendingCall]) -> None:
    """Send several calls as `PendingCall.send` does; a Ctrl-C takes effect when all are sent."""
    with Uninterrupted():
        for call in calls:
            call.send_uninterrupted()


class Gather:
    """The calls of one thread that it waits for."""

    def __init__(self) -> None:
        self._calls: dict[PendingCall, Channel] = {}
        self._watched: dict[int, Channel] = {}
        self._epoll = select.epoll()
        self._check_at = -math.inf

    def add(self, call: PendingCall) -> None:
        """Wait for this call, too."""
        channel = call.channel
        if self._watched.get(channel.fileno) is not channel:
            self._watched = {number: watched for number, watched in self._watched.items() if not watched.is_closed}
            with channel.lock:  # another thread may close it
                channel.require_open()
                self._epoll.register(channel.fileno, select.EPOLLIN | select.EPOLLET)
            self._watched[channel.fileno] = channel
        self._calls[call] = channel
        self._check_at = -math.inf

    def forget_all(self) -> None:
        """Wait for none of the calls any longer."""
        self._calls.clear()

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
            channel = self._watched.get(descriptor)
            if channel is None:
                continue
            with channel.lock:
                call = None if channel.is_closed else channel.receive()
                if call is None or channel.waiting:
                    self._check_at = -math.inf  # there may be more, or the socket has a connection now
            if call in self._calls:
                answered.append(call)
        return answered

    def _check(self, now: float) -> list[PendingCall]:
        """Receive what is there already, and send what is due. Return the calls that have ended."""
        channels, locked = set(self._calls.values()), list[Channel]()
        try:
            for channel in channels:
                channel.lock.acquire()
                locked.append(channel)
                channel.require_open()
            ready = dict(zmq.zmq_poll([(channel.socket, _IN) for channel in channels], 0))
            for channel in channels:
                if channel.socket in ready:
                    channel.receive()
                    while channel.poll(_IN, 0):
                        channel.receive()
            self._check_at = self._send_due(now)
        finally:
            for channel in locked:
                channel.lock.release()
        return [call for call in self._calls if call.answer is not None or call.schedule.is_expired(now)]

    def _send_due(self, now: float) -> float:
        """Send the calls that are due. Return when to check again."""
        next_at = now + SLICE_SECONDS
        for call, channel in self._calls.items():
            if call.answer is None:
                schedule = call.schedule
                schedule.observe(now)
                if schedule.due > now or not self._attend(call, channel, now):
                    next_at = min(next_at, now + schedule.wait(now))
        return next_at

    def _attend(self, call: PendingCall, channel: Channel, now: float) -> bool:
        """Send a call if it is due. Return whether it has to wait for a connection."""
        if not channel.send_if_due(call, now):
            return False
        if not channel.poll(_OUT, 0):  # notices a server that refuses this client
            return True
        return channel.send_if_due(call, now)


class Gathers(threading.local):
    """A `Gather` of each thread, for one use after another."""

    _idle: Gather | None = None

    @contextmanager
    def waiting_for(self, calls: Iterable[PendingCall]) -> Iterator[Gather]:
        """Yield a `Gather` of these calls: this thread's, or a new one if that is in use or was interrupted."""
        gather, self._idle = self._idle or Gather(), None
        for call in calls:
            gather.add(call)
        yield gather
        gather.forget_all()
        self._idle = gather
