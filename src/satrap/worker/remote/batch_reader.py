"""Reads a source for one trainer, in the worker's process: batches by number, kept until they are settled.

A thread takes the next batch only on request: the trainer decides how far to read ahead. A repeated request returns the
same batch. After a restart, reading starts at the position before the oldest batch in flight, and yields the same
batches under the same numbers. Samples that were left out before then are not counted again.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from satrap.config.features import Features
from satrap.config.validation import check_integer, known_keys
from satrap.data.inputs import Inputs, Position
from satrap.data.skipped_rows import SkippedRows
from satrap.data.source import Source
from satrap.errors import InputError, NotReadyError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStart:
    """Where reading starts."""

    number: int
    """Number of the first batch."""
    position: Position | None
    """Position of the source before it."""
    skipped_rows: SkippedRows | None = None
    """What was left out up to the end of that batch, if it was read before."""
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_integer("ReadStart", "number", self.number, 1, 2**63 - 1)

    def to_dict(self) -> dict[str, Any]:
        """Return this start as plain JSON types."""
        return {
            "number": self.number,
            "position": self.position and self.position.to_dict(),
            "skipped_rows": self.skipped_rows and self.skipped_rows.to_list(),
            "rank": self.rank,
            "world_size": self.world_size,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ReadStart":
        """Return the start that `to_dict` wrote."""
        given = known_keys(cls, "ReadStart", data)
        if given["position"] is not None:
            given["position"] = Position.from_dict(given["position"])
        if given["skipped_rows"] is not None:
            given["skipped_rows"] = SkippedRows.from_list(given["skipped_rows"])
        return cls(**given)


@dataclass(slots=True, eq=False)
class HeldBatch:
    """A batch that was read and is not settled yet."""

    inputs: Inputs | None
    """None once it is updated or dropped."""
    skipped_rows: SkippedRows
    """What the source left out up to the end of the batch."""
    ticket: Any = None
    """The `ShardedTicket` of its training lookup."""
    gradients: Any = None
    """Gradients that wait for the last batch of the update."""
    answer: list[int] = field(default_factory=list)
    """The answer to its update."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during a lookup, update or drop of the batch; locks of several batches are taken in the order of numbers."""


class BatchReader:
    """The batches of one stream by number."""

    def __init__(self, source: Source, features: Features, start: ReadStart) -> None:
        self._batches = source.batches(features, position=start.position, rank=start.rank, world_size=start.world_size)
        self._first = self._next = start.number
        self._skipped_rows = start.skipped_rows
        self._skipped_before = SkippedRows()  # what was left out before, without what is counted again
        self._held: dict[int, HeldBatch] = {}
        self._ended = self._closed = False
        self._pending_read: Future[None] | None = None  # the read in flight, or the error that ended reading
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="satrap-reading")

    def length(self) -> dict[str, Any]:
        """Return what `WorkerCalls.length` does."""
        try:
            return {"batches": self._first - 1 + len(self._batches)}
        except TypeError as error:
            length: dict[str, Any] = {"why": str(error)}
        with suppress(TypeError):
            length["about"] = self._first - 1 + self._batches.about_length()
        return length

    @property
    def skipped_rows(self) -> SkippedRows:
        """What was left out so far."""
        return self._skipped_before + self._batches.skipped_rows

    def batch(self, number: int, seconds: float | None = None) -> HeldBatch | None:
        """Return the batch of that number; None after the end. TimeoutError if there is none after `seconds`,
        NotReadyError after `close`."""
        while True:
            with self._lock:
                if number in self._held:
                    return self._held[number]
                if number < self._next:
                    raise InputError(f"batch {number} was settled already; the next to be read is {self._next}")
                if self._ended:
                    return None
                if self._closed:
                    raise NotReadyError("the stream was closed here while its batches were requested: open it again")
                if self._pending_read is None:
                    self._pending_read = self._thread.submit(self._read)
                pending = self._pending_read
            if not wait([pending], seconds).done:
                raise TimeoutError
            pending.result()  # an error is kept, and raised to every caller
            with self._lock:
                if self._pending_read is pending:
                    self._pending_read = None

    def held_batch(self, number: int) -> HeldBatch | None:
        with self._lock:
            return self._held.get(number)

    def forget(self, settled: int) -> None:
        """Drop all batches below this number, which are settled."""
        with self._lock:
            for number in [held for held in self._held if held < settled]:
                del self._held[number]

    def close(self) -> None:
        """Stop reading, and return once the read in flight has ended. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._thread.submit(self._batches.close)
        self._thread.shutdown()

    def _read(self) -> None:
        inputs = next(self._batches, None)
        with self._lock:
            if self._skipped_rows is not None:
                self._skipped_before, self._skipped_rows = self._skipped_rows - self._batches.skipped_rows, None
            if inputs is None:
                self._ended = True
                return
            self._held[self._next] = HeldBatch(inputs, self.skipped_rows)
            self._next += 1
