"""Work that moves many bytes: a save, a restore, a migration. It logs when it starts and when it ends, with bytes and
seconds, and in between, every ten seconds, how far it is and how long it will take.

    with Transfer(_LOG, "save", "save of table 'item'", total=...):    # logs save_begun, then save_done or save_failed
        ...
        advance(num_bytes)                                             # anywhere below, also in threads of `in_context`

A transfer inside another one advances both. The code that moves the bytes need not know for which transfer it does.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar

from satrap.event_log import event

T = TypeVar("T")

_REPORT_SECONDS = 10.0
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_innermost: contextvars.ContextVar["Transfer | None"] = contextvars.ContextVar("satrap-transfer", default=None)
_running: set["Transfer"] = set()  # the outermost transfers of this process
_lock = threading.Lock()  # guards the set, and the numbers of all transfers


class Transfer:
    """One piece of such work. A context manager."""

    def __init__(
        self, logger: logging.Logger, kind: str, what: str, *, total: int | None = None, **values: object
    ) -> None:
        """kind: prefix of the events' names. what: in words. total: how much there is to do, in bytes or in the units
        of `reach`; None: not known. values: for JSON lines."""
        self.logger = logger
        self._kind, self._what, self._total, self._values = kind, what, total, values
        self._done = self._bytes = 0
        self._remote = {"done": 0, "total": 0, "bytes": 0}
        self._outer = _innermost.get()
        self._start = self._reported_at = time.monotonic()

    def __enter__(self) -> Self:
        self._start = self._reported_at = time.monotonic()
        self._log(logging.INFO, "begun", " begun", total=self._total)
        self._token = _innermost.set(self)
        if self._outer is None:
            with _lock:
                _running.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        _innermost.reset(self._token)
        with _lock:
            _running.discard(self)
        seconds = time.monotonic() - self._start
        figures = {"bytes": self._bytes, "seconds": round(seconds, 3)}
        if kind is None:
            size = f": {format_bytes(self._bytes)}" if self._bytes else ""
            self._log(logging.INFO, "done", f" done{size} in {seconds:.1f} s", **figures)
        else:
            why = str(error) or kind.__name__
            self._log(logging.WARNING, "failed", f" failed after {seconds:.1f} s: {why}", why=why, **figures)

    def advance(self, num_bytes: int) -> None:
        """Counts bytes that were moved."""
        with _lock:
            self._bytes += num_bytes
            self._done += num_bytes
        if self._outer is not None:
            self._outer.advance(num_bytes)
        self._report()

    def observe(self, figures: Sequence[Mapping[str, int]]) -> None:
        """Adds what other processes have done for this transfer so far, as `running_figures` returns it; replaces what
        was added before."""
        with _lock:
            self._remote = {key: sum(each[key] for each in figures) for key in ("done", "total", "bytes")}
        self._report()

    def reach(self, done: int, total: int | None, num_bytes: int) -> None:
        """Sets how much was done, of how much, and how many bytes that were."""
        with _lock:
            self._done, self._total, self._bytes = done, total, num_bytes
        self._report()

    @property
    def figures(self) -> tuple[int, int, int]:
        """What was done, the total (0: not known), and the bytes."""
        return self._done, self._total or 0, self._bytes

    def _report(self) -> None:
        now = time.monotonic()
        with _lock:
            if now < self._reported_at + _REPORT_SECONDS or (self._outer is not None and self._outer._total):
                return
            self._reported_at = now
            done, num_bytes = (mine + self._remote[key] for key, mine in (("done", self._done), ("bytes", self._bytes)))
            total = self._total or (self._done + self._remote["total"] if self._remote["total"] else None)
        text, left = f"{format_bytes(num_bytes)} so far", None
        if total and done:
            left = round((now - self._start) * max(0, total - done) / done)
            text = f"{min(100, 100 * done // total)} %, {format_bytes(num_bytes)}, about {format_seconds(left)} left"
        self._log(logging.INFO, "progress", f": {text}", bytes=num_bytes, done=done, total=total, seconds_left=left)

    def _log(self, level: int, name: str, text: str, **figures: object) -> None:
        extra = event(f"{self._kind}_{name}", **self._values, **figures)
        self.logger.log(level, "%s%s", self._what, text, extra=extra)


def advance(num_bytes: int) -> None:
    """Counts bytes for the transfer in progress, if there is one."""
    if (transfer := _innermost.get()) is not None:
        transfer.advance(num_bytes)


def current_transfer() -> "Transfer | None":
    """Returns the transfer in progress in this context."""
    return _innermost.get()


def in_context(work: Callable[..., T]) -> Callable[..., T]:
    """Returns `work` for another thread, where it belongs to the transfer of this one."""
    context = contextvars.copy_context()
    return lambda *arguments: context.copy().run(work, *arguments)


def running_figures(logger: str) -> dict[str, int]:
    """Returns the sums over this process's transfers of a logger, for a process that waits for them."""
    with _lock:
        figures = [transfer.figures for transfer in _running if transfer.logger.name == logger]
    done, total, num_bytes = (sum(each) for each in zip(*figures, strict=True)) if figures else (0, 0, 0)
    return {"done": done, "total": total, "bytes": num_bytes}


def format_bytes(number: float) -> str:
    """Returns bytes in words, such as "1.2 GiB"."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:.0f} bytes"


def format_seconds(seconds: float) -> str:
    """Returns a time in words: "40 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
