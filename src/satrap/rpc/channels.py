"""The channels of one client: one for each thread that calls, all in one ZeroMQ context."""

import os
import threading
from dataclasses import dataclass
from functools import partial

import zmq

from satrap.collected import close_when_collected
from satrap.errors import ForkError, RpcError
from satrap.interrupts import Uninterrupted
from satrap.rpc.channel import Channel
from satrap.rpc.keys import Keys


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Own:
    """What is one thread's own: collected once the thread has ended."""

    channel: Channel


class Channels:
    """The channels of one client. Does not refer to the client, so that they can be closed after it was collected."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self._address, self._keys = address, keys
        self._process = os.getpid()
        self._context = zmq.Context()
        self._local = threading.local()
        self._open: set[Channel] = set()
        self._closed = False
        # ZeroMQ aborts if two threads close one context, and making a socket in a closed one fails.
        self._lock = threading.RLock()

    def own(self, seconds: float) -> Channel:
        """This thread's channel. A new one is given so many seconds to connect, and comes in any case."""
        if os.getpid() != self._process:
            raise ForkError(
                f"this client was made in process {self._process} and this is its fork {os.getpid()}: its "
                "connections belong to the former. Make a client here, or start workers with 'spawn'"
            )
        own: _Own | None = getattr(self._local, "own", None)
        if own is not None and own.channel.refusal is None:
            return own.channel
        channel = self._make()
        channel.connect_within(seconds)
        return channel

    def _make(self) -> Channel:
        with Uninterrupted(), self._lock:
            if self._closed:
                raise RpcError(f"{self._address}: this client is closed; make another")
            channel = Channel(self._context, self._address, self._keys)
            self._open.add(channel)
            self._local.own = own = _Own(channel)
            close_when_collected(own, partial(self._close_one, channel))
            return channel

    def _close_one(self, channel: Channel) -> None:
        self._open.discard(channel)
        channel.close()

    def close(self) -> None:
        """Closes all sockets, then their context; calls that wait raise RpcError. Does nothing twice, or in a fork."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._local = threading.local()  # no thread keeps what was its own
            for channel in list(self._open):
                self._close_one(channel)
            self._context.destroy(0)  # and a socket whose making was interrupted, which would keep the context open
