"""The channels of a client: one for each thread that calls, all in one ZeroMQ context of the process.

The context exists while a client borrows it. It has few descriptors and threads for any number of servers. A fork has
another one than its parent.
"""

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
from satrap.rpc.open_files import FILES_PER_CONNECTION, require_files

Context = zmq.Context[zmq.Socket[bytes]]
_MAX_IO_THREADS = 4  # a process has at most so many: encryption takes their time


class SharedContext:
    """A context that is created for the first borrower and terminated when the last one has given it back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a context must not be closed twice, nor borrowed while it is closed
        self._context: Context | None = None
        self._num_borrowers = 0

    def borrow(self) -> Context:
        """Return the context. Give it back once, after closing all sockets that were created in it."""
        with self._lock:
            if self._context is None:
                num_threads = max(1, min(_MAX_IO_THREADS, len(os.sched_getaffinity(0)) // 2))
                self._context = zmq.Context(num_threads)
                self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
            self._num_borrowers += 1
            return self._context

    def give_back(self) -> None:
        """Terminate the context if this was its last borrower."""
        with self._lock:
            self._num_borrowers -= 1
            if not self._num_borrowers and self._context is not None:
                context, self._context = self._context, None
                context.destroy(0)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _ThreadChannel:
    """The thread-local reference to a channel, which is collected when the thread has ended."""

    channel: Channel


class Channels:
    """The channels of one client. Does not refer to the client, so that they can be closed after its collection."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        self._address, self._keys = address, keys
        self._process = os.getpid()
        self._shared = context_of_clients()
        self._context = self._shared.borrow()
        self._local = threading.local()
        self._open: set[Channel] = set()
        self._closed = self._has_given_back = False
        self._lock = threading.RLock()  # no socket is created after close()

    def for_this_thread(self) -> Channel:
        """Return this thread's channel. A new one starts to connect."""
        if os.getpid() != self._process:
            raise ForkError(
                f"this client was created in process {self._process} and this is its fork {os.getpid()}: a fork cannot "
                "use its connections; create a client here, or start workers with 'spawn'"
            )
        thread_channel: _ThreadChannel | None = getattr(self._local, "thread_channel", None)
        if thread_channel is not None and thread_channel.channel.refusal is None:
            return thread_channel.channel
        return self._new_channel()

    def _new_channel(self) -> Channel:
        with Uninterrupted(), self._lock:
            if self._closed:
                raise RpcError(f"{self._address}: this client is closed; create another")
            require_files(2 * FILES_PER_CONNECTION, f"the connection to {self._address}, with its handshake, would")
            channel = Channel(self._context, self._address, self._keys)
            self._open.add(channel)
            self._local.thread_channel = thread_channel = _ThreadChannel(channel)
            close_when_collected(thread_channel, partial(self._close_one, channel))
            return channel

    def _close_one(self, channel: Channel) -> None:
        self._open.discard(channel)
        channel.close()

    def close(self) -> None:
        """Close all sockets; waiting calls raise RpcError. Idempotent; does nothing in a fork."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._local = threading.local()  # drops the references of all threads
            for channel in list(self._open):
                self._close_one(channel)
            with Uninterrupted():
                if not self._has_given_back:
                    self._has_given_back = True
                    self._shared.give_back()


def context_of_clients() -> SharedContext:
    """Return the context of this process."""
    return _context


def _create_context() -> None:
    global _context
    _context = SharedContext()


_context = SharedContext()
os.register_at_fork(after_in_child=_create_context)
