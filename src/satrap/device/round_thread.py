"""A thread that runs the rounds of one exchange in order.

Other trainers wait for each round of this one, so a round that was submitted runs whatever happens to the caller:
Ctrl-C, or an error of the training loop. A caller that gives up leaves its round to the thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from satrap.errors import StreamError
from satrap.interrupts import SLICE_SECONDS, Uninterrupted

_R = TypeVar("_R")


class RoundThread:
    """Runs functions one after another. After one has failed, all later ones fail with the same error."""

    def __init__(
        self,
        name: str,
        explain: Callable[[Exception], Exception],
        *,
        prepare: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """explain: returns the error to raise in place of one that a function raised.
        prepare: called first, in the thread.
        failed: called with the error after the first failure."""
        self._explain, self._prepare, self._failed = explain, prepare, failed
        self._works: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.error: Exception | None = None
        """Why no other function runs; None: none has failed."""
        self.released = threading.Event()
        """Set once callers give up instead of waiting; each stream has another one."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _R]) -> "Future[_R]":
        """Run the function after all earlier ones."""
        future: Future[_R] = Future()
        self._works.put((work, future))
        return future

    def wait(self, future: "Future[_R]") -> _R:
        """Return the result of a submitted function; StreamError if callers give up."""
        released = self.released
        with Uninterrupted() as held:  # a signal must not come while this thread holds the future's own lock
            while not future.done():
                wait([future], SLICE_SECONDS)
                held.check()
                if released.is_set() and not future.done():
                    raise StreamError("this stream ended with an error while other trainers still had to join its step")
            return future.result()

    def close(self) -> None:
        """End the thread after what was submitted. Does not wait for it: another trainer may be missing."""
        self._works.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._prepare()
        while (each := self._works.get()) is not None:
            work, future = each
            try:
                if self.error is not None:
                    raise self.error
                result = work()
            except Exception as error:
                if self.error is None:
                    self.error = self._explain(error)
                    self._failed(self.error)
                future.set_exception(self.error)
            else:
                future.set_result(result)
            del work, future, each
