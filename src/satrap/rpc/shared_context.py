"""The ZeroMQ context that all clients of a process share: it has few descriptors and threads for any number of servers.

It exists while a client borrows it. A fork has another one than its parent.
"""

import os
import threading

import zmq

Context = zmq.Context[zmq.Socket[bytes]]
_MAX_IO_THREADS = 4  # of a process: encryption takes their time


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


def context_of_clients() -> SharedContext:
    """Return the context of this process."""
    return _context


def _create_context() -> None:
    global _context
    _context = SharedContext()


_context = SharedContext()
os.register_at_fork(after_in_child=_create_context)
