"""Work that moves many bytes: a save, a restore, a migration. It logs when it starts and when it ends, with bytes and
seconds, and in between, every ten seconds, how far it is and how long it will take.

    with Transfer(_LOG, "save", "save of table 'item'", total=...):    # logs save_begun, then save_done or save_failed
        ...
        advance(num_bytes)                                             # anywhere below, also in threads of `in_context`

A transfer inside another one advances both. If it fails, only the outer one logs the error. The code that moves the
bytes need not know for which transfer it does.
`observe_transfers` has a function called every second, for a terminal. `Transfers` has the same figures for status,
metrics and processes that wait: those of the transfers of one engine.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from satrap.byte_sizes import format_bytes
from satrap.event_log import event

T = TypeVar("T")

_REPORT_SECONDS, _OBSERVED_SECONDS = 10.0, 1.0
Observer = Callable[[str, Mapping[str, Any] | None], None]
"""Called in any thread with the kind of a transfer and its figures; None: it has ended."""
_innermost: contextvars.ContextVar["Transfer | None"] = contextvars.ContextVar("satrap-transfer", default=None)
_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("satrap-transfer-observer", default=None)
_lock = threading.Lock()  # guards the numbers of all transfers


class Transfer:
    """One piece of such work. A context manager."""

    def __init__(
        self,
        logger: logging.Logger,
        kind: str,
        what: str,
        *,
        total: int | None = None,
        among: "Transfers | None" = None,
        **values: object,
    ) -> None:
        """kind: prefix of the events' names. what: in words. total: how much there is to do, in bytes or in the units
        of `reach`; None: not known. among: has the figures of this transfer, too. values: for JSON lines."""
        self.kind = kind
        self._logger, self._what, self._total, self._among, self._values = logger, what, total, among, values
        self._done = self._bytes = 0
        self._remote = _sums([])
        self._outer, self._observer = _innermost.get(), _observer.get()
        self._start = self._reported_at = self._observed_at = time.monotonic()

    def __enter__(self) -> Self:
        self._start = self._reported_at = self._observed_at = time.monotonic()
        self._log(logging.INFO, "begun", " begun", total=self._total)
        self._token = _innermost.set(self)
        if self._among is not None:
            self._among.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        _innermost.reset(self._token)
        if self._observer is not None and self._outer is None:
            self._observer(self.kind, None)
        seconds = time.monotonic() - self._start
        if self._among is not None:
            self._among.end(self, seconds, is_done=kind is None)
        figures = {"bytes": self._bytes, "seconds": round(seconds, 3)}
        if kind is None:
            size = f": {format_bytes(self._bytes)}" if self._bytes else ""
            self._log(logging.INFO, "done", f" done{size} in {seconds:.1f} s", **figures)
        elif self._outer is None:  # which logs the same error
            why = str(error) or kind.__name__
            self._log(logging.WARNING, "failed", f" failed after {seconds:.1f} s: {why}", why=why, **figures)

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were moved."""
        with _lock:
            self._bytes += num_bytes
            self._done += num_bytes
        if self._outer is not None:
            self._outer.advance(num_bytes)
        self._report()

    def observe(self, figures: Sequence[Mapping[str, int]]) -> None:
        """Add what other processes have done for this transfer so far, as `Transfers.running` returns it; replace
        what was added before."""
        with _lock:
            self._remote = _sums(figures)
        self._report()

    def reach(self, done: int, total: int | None, num_bytes: int) -> None:
        """Set how much of how much was done, and how many bytes that were."""
        with _lock:
            self._done, self._total, self._bytes = done, total, num_bytes
        self._report()

    def figures(self) -> dict[str, Any]:
        """Return what was `done`, the `total` (None: not known), the `bytes`, and the `seconds_left` (None: not
        known)."""
        with _lock:
            done, num_bytes = self._done + self._remote["done"], self._bytes + self._remote["bytes"]
            total = self._total or (self._done + self._remote["total"] if self._remote["total"] else None)
        left = None
        if total and done:
            left = round((time.monotonic() - self._start) * max(0, total - done) / done)
        return {"done": done, "total": total, "bytes": num_bytes, "seconds_left": left}

    def _report(self) -> None:
        now = time.monotonic()
        with _lock:
            is_shown = self._observer is not None and self._outer is None
            is_shown = is_shown and now >= self._observed_at + _OBSERVED_SECONDS
            is_due = now >= self._reported_at + _REPORT_SECONDS and not (self._outer is not None and self._outer._total)
            self._observed_at = now if is_shown else self._observed_at
            self._reported_at = now if is_due else self._reported_at
        figures = self.figures() if is_shown or is_due else {}
        if is_shown and self._observer is not None:
            self._observer(self.kind, figures)
        if not is_due:
            return
        self._log(logging.INFO, "progress", f": {format_progress(**figures)}", **figures)

    def _log(self, level: int, name: str, text: str, **figures: object) -> None:
        extra = event(f"{self.kind}_{name}", **self._values, **figures)
        self._logger.log(level, "%s%s", self._what, text, extra=extra)


class Transfers:
    """The transfers of one engine's tables: those that are running, and the last one of each kind that was completed.
    Thread-safe."""

    KINDS = ("save", "verify", "restore")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Transfer] = []
        self._completed = {kind: {"number": 0, "bytes": 0, "seconds": 0.0, "ended_at": 0.0} for kind in self.KINDS}

    def begin(self, transfer: Transfer) -> None:
        """Count a transfer as running."""
        with self._lock:
            self._running.append(transfer)

    def end(self, transfer: Transfer, seconds: float, *, is_done: bool) -> None:
        """Count a transfer as completed, or as failed."""
        with self._lock:
            self._running.remove(transfer)
            if is_done:
                completed = self._completed[transfer.kind]
                num_bytes = transfer.figures()["bytes"]
                completed |= {"bytes": num_bytes, "seconds": seconds, "ended_at": time.time()}
                completed["number"] += 1

    def running(self) -> dict[str, int]:
        """Return the sums over the transfers that are running, of all kinds, as `Transfer.observe` takes them."""
        return _sums(self._figures())

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return for each kind: how many are `running`; the `bytes` that they have moved, of a `total` (0: not known),
        and the `seconds_left` (None: not known); how many were `completed` since the process started, and of the last
        of these the `last_bytes`, its `seconds`, and as Unix time when it `ended_at`."""
        totals = {}
        for kind in self.KINDS:
            figures = self._figures(kind)
            sums, left = _sums(figures), [figure["seconds_left"] for figure in figures]
            with self._lock:
                last = dict(self._completed[kind])
            totals[kind] = {
                "running": len(figures),
                "bytes": sums["bytes"],
                "total": sums["total"],
                "seconds_left": None if None in left else max(left, default=None),
                "completed": last["number"],
                "last_bytes": last["bytes"],
                "seconds": last["seconds"],
                "ended_at": last["ended_at"],
            }
        return totals

    def _figures(self, kind: str | None = None) -> list[dict[str, Any]]:
        with self._lock:
            return [transfer.figures() for transfer in self._running if kind in (None, transfer.kind)]


def _sums(figures: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {key: sum(figure[key] or 0 for figure in figures) for key in ("done", "total", "bytes")}


def advance(num_bytes: int) -> None:
    """Count bytes for the transfer in progress, if there is one."""
    if (transfer := _innermost.get()) is not None:
        transfer.advance(num_bytes)


def current_transfer() -> "Transfer | None":
    """Return the transfer in progress in this context."""
    return _innermost.get()


def observe_transfers(observer: Observer) -> None:
    """Have transfers that begin in this context call the observer from now on, instead of the one before."""
    _observer.set(observer)


def stop_observing(observer: Observer) -> None:
    """End `observe_transfers`, unless another observer has replaced this one."""
    if _observer.get() == observer:
        _observer.set(None)


def in_context(work: Callable[..., T]) -> Callable[..., T]:
    """Return `work` for another thread, where it belongs to the transfer of this one."""
    context = contextvars.copy_context()
    return lambda *arguments: context.copy().run(work, *arguments)


def format_progress(done: int, total: int | None, bytes: int, seconds_left: int | None) -> str:
    """Return how far a transfer is, in words: "40 %, 1.2 GiB, about 40 s left", or the bytes if no more is known. The
    arguments are those of `Transfer.figures`."""
    if not total or seconds_left is None:
        return f"{format_bytes(bytes)} so far"
    return f"{min(100, 100 * done // total)} %, {format_bytes(bytes)}, about {format_seconds(seconds_left)} left"


def format_seconds(seconds: float) -> str:
    """Return a time in words: "40 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
