"""Reads blocks ahead in background threads, assigns their rows to ranks, and returns decoded chunks in order.

The number of chunks that are in flight or finished and not yet returned is bounded. A chunk takes three steps: a thread
reads it, in order within its block; then, in the order of all chunks, the row assigner decides which of its rows
this rank needs; then any thread decodes those. No thread waits for the consumer or for another block, so to stop means
to start nothing more and to wait for the running threads. An error in a thread is raised in place of its chunk.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from satrap import _core
from satrap.data.block import Block, Chunk, RawChunk
from satrap.data.rank_split import RowAssigner, RowRange
from satrap.interrupts import SLICE_SECONDS, Uninterrupted

AssignedChunk = tuple[int, Chunk | None]
"""How many rows were assigned before a chunk, and the chunk; None where its row range ends."""
_END = object()


class ReadAhead:
    """The chunks of blocks, in order. It owns threads: close it, or iterate in a `with` block."""

    def __init__(
        self, row_ranges: Iterable[tuple[Block, RowRange]], assigner: RowAssigner, *, num_threads: int, num_chunks: int
    ) -> None:
        """Prepare to read; no thread starts before `chunks` is iterated.

        num_threads: 0 reads in the caller's thread, when a chunk is requested.
        num_chunks: how many chunks may be in flight, or finished and not yet returned.
        """
        self._row_ranges = iter(row_ranges)
        self._assigner = assigner
        self._readers: deque[_RangeReader] = deque()  # not returned yet
        self._unassigned: deque[_RangeReader] = deque()  # whose rows are not all assigned yet
        self._num_chunks = num_chunks if num_threads else 1
        self._in_flight = 0
        self._lock = threading.Lock()  # guards the assigner and the chunks that were read and not assigned
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="satrap-source") if num_threads else None
        self._closed = False

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading; return when all threads have ended and every file is closed."""
        with self._lock:
            self._closed = True
        for reader in self._readers:
            reader.stop()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        while self._readers:
            self._readers.popleft().close()

    def chunks(self) -> Iterator[AssignedChunk]:
        """Yield the chunks of each row range, then None."""
        rows = 0
        while self._fill():
            reader = self._readers[0]
            chunk = None
            if reader.max_in_flight(self._num_chunks):
                self._in_flight -= 1
                reader.num_returned += 1
                rows, chunk = reader.results.popleft()()
            if chunk is None:
                self._in_flight -= len(reader.results)  # these were started beyond the end and find nothing either
                self._readers.popleft().close()
            yield rows, chunk

    def _fill(self) -> bool:
        """Start as many chunks as there is room for, first blocks first; return False if all chunks were returned."""
        for reader in self._readers:
            self._start_chunks(reader)
        while self._in_flight < self._num_chunks:
            row_range = next(self._row_ranges, None)
            if row_range is None:
                break
            self._readers.append(_RangeReader(*row_range))
            with self._lock:
                self._unassigned.append(self._readers[-1])
            self._start_chunks(self._readers[-1])
        return bool(self._readers)

    def _start_chunks(self, reader: "_RangeReader") -> None:
        while self._in_flight < self._num_chunks and len(reader.results) < reader.max_in_flight(self._num_chunks):
            self._start(reader)

    def _start(self, reader: "_RangeReader") -> None:
        self._in_flight += 1
        number = reader.next_number()
        if self._pool is None:
            reader.results.append(partial(self._read_now, reader, number))
            return
        future: Future[AssignedChunk] = Future()
        with Uninterrupted():
            self._pool.submit(self._read, reader, number, future)
        reader.results.append(partial(_result, future))

    def _read_now(self, reader: "_RangeReader", number: int) -> AssignedChunk:
        """Run all three steps of a chunk in the caller's thread."""
        raw, num_rows = reader.take(number)
        while self._unassigned[0] is not reader:  # all chunks of the readers before it were returned
            self._unassigned.popleft()
        before, rows = self._assign(reader, raw, num_rows)
        return before, None if raw is _END else _decoded(raw, rows)

    def _read(self, reader: "_RangeReader", number: int, future: "Future[AssignedChunk]") -> None:
        """Run the first step of a chunk, in a thread; then the second step of all chunks that come next."""
        try:
            raw, num_rows = reader.take(number)
        except BaseException as error:
            future.set_exception(error)
            raw, num_rows = _END, None
        assert self._pool is not None
        with self._lock:
            reader.raw[number] = raw, num_rows, future
            for decode, its_future in [] if self._closed else list(self._assign_ready()):
                try:
                    self._pool.submit(decode)
                except RuntimeError as error:  # the interpreter is shutting down
                    its_future.set_exception(error)

    def _assign_ready(self) -> "Iterator[tuple[Callable[[], None], Future[AssignedChunk]]]":
        """Run the second step of the chunks that come next; yield their third step."""
        while self._unassigned:
            reader = self._unassigned[0]
            while not reader.is_assigned and (read := reader.raw.pop(reader.num_assigned, None)) is not None:
                raw, num_rows, future = read
                reader.num_assigned += 1
                before, rows = self._assign(reader, raw, num_rows)
                if raw is not _END:
                    yield partial(_decode, raw, rows, before, future), future
                    continue
                reader.is_assigned = True
                if not future.done():  # it is done if reading raised an error
                    future.set_result((before, None))
            if not reader.is_assigned and not (
                reader.block.is_exact and reader.num_assigned == reader.block.num_chunks
            ):
                return
            self._unassigned.popleft()

    def _assign(self, reader: "_RangeReader", raw: Any, num_rows: int | None) -> tuple[int, tuple[int, int] | None]:
        """Return how many rows were assigned before a chunk, and which of its rows this rank needs; None: all."""
        if not reader.is_started:
            self._assigner.start_range(reader.row_range)
            reader.is_started = True
        before = self._assigner.num_assigned
        if raw is _END or num_rows is None:
            return before, None
        rows = self._assigner.assign_next(num_rows)
        if self._assigner.is_done:
            reader.stop()
        return before, None if rows == (0, num_rows) else rows


def _result(future: "Future[AssignedChunk]") -> AssignedChunk:
    """Wait for a chunk. An interrupt must not come while this thread holds the future's own lock, which the reading
    thread needs."""
    with Uninterrupted() as held:
        while not future.done():
            wait([future], SLICE_SECONDS)
            held.check()
        return future.result()


def _decode(raw: RawChunk, rows: tuple[int, int] | None, before: int, future: "Future[AssignedChunk]") -> None:
    """Run the third step of a chunk, in a thread."""
    try:
        future.set_result((before, _decoded(raw, rows)))
    except BaseException as error:
        future.set_exception(error)


def _decoded(raw: RawChunk, rows: tuple[int, int] | None) -> Chunk:
    if rows is not None and rows[0] == rows[1]:
        return Chunk(samples=_core.Samples(0, [], None, None))
    return (raw if rows is None else raw.slice(*rows)).decode()


class _RangeReader:
    """Reads the chunks of one row range. Threads take its raw chunks one after another; `_advanced` wakes the next."""

    def __init__(self, block: Block, row_range: RowRange) -> None:
        self.block, self.row_range = block, row_range
        self.results: deque[Callable[[], AssignedChunk]] = deque()
        self.num_returned = 0  # counts `results`
        self.raw: dict[int, tuple[Any, int | None, Future[AssignedChunk]]] = {}  # by number: read and not assigned
        self.num_assigned = 0  # counts chunks whose rows are assigned
        self.is_started = self.is_assigned = False  # whether the rows of its first chunk, and of all, are assigned
        self._raw: Iterator[Any] = block.read()
        self._num_started = 0  # counts the numbers that `next_number` returned
        self._next = 0
        self._advanced = threading.Condition()
        self._ended = False

    def max_in_flight(self, most: int) -> int:
        """Return how many chunks may be in flight.

        These are as many as the block should still have, and the one that finds its end; `most` if the block had more
        than expected; none if it is known to have ended.
        """
        expected = self.block.num_chunks - self.num_returned
        if self.block.is_exact:
            return expected
        return expected + 1 if expected >= 0 else most

    def next_number(self) -> int:
        self._num_started += 1
        return self._num_started - 1

    def take(self, number: int) -> tuple[Any, int | None]:
        """Take raw chunk `number`, with the number of its rows unless the range has all rows of the block.

        Returns _END after the last chunk. Chunks are started in order, so the one that this call waits for is being
        read, or was cancelled with the pool, after `stop`.
        """
        with self._advanced:
            self._advanced.wait_for(lambda: self._next == number or self._ended)
        raw: Any = _END
        try:
            if not self._ended:
                raw = next(self._raw, _END)
        finally:
            with self._advanced:
                self._ended = self._ended or raw is _END
                self._next += 1
                self._advanced.notify_all()
        return raw, None if raw is _END or self.row_range.is_whole_block else raw.count_rows()

    def stop(self) -> None:
        """Read no further chunk, and wait for none."""
        with self._advanced:
            self._ended = True
            self._advanced.notify_all()

    def close(self) -> None:
        close = getattr(self._raw, "close", None)
        if close is not None:
            close()
