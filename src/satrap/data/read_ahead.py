"""Reads blocks ahead in background threads, deals their rows out, and hands out decoded pieces in order.

A bounded number of pieces is under way or waits at any time. A piece takes three steps: a thread reads it, in its turn
within its block; then, in the order of all pieces, the dealer says which of its rows are wanted; then any thread
decodes those. No thread waits for the consumer or for another block, so stopping is: start no more, and wait for what
runs. An error in a thread is raised where its piece would have come.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from satrap import _core
from satrap.data.block import Block, Piece
from satrap.data.rank_split import Dealer, Part
from satrap.interrupts import SLICE_SECONDS, Uninterrupted

Dealt = tuple[int, Piece | None]
"""How many rows were dealt out before a piece, and the piece; None where its part ends."""
_END = object()


class ReadAhead:
    """Pieces of blocks, in order. Close it, or iterate in a `with` block: it owns threads."""

    def __init__(
        self, parts: Iterable[tuple[Block, Part]], dealer: Dealer, *, num_threads: int, num_pieces: int
    ) -> None:
        """num_threads: 0 reads in the caller's thread, when a piece is asked for.
        num_pieces: how many may be under way or wait."""
        self._parts = iter(parts)
        self._dealer = dealer
        self._readings: deque[_Reading] = deque()  # not handed out yet
        self._to_deal: deque[_Reading] = deque()  # not dealt out yet
        self._num_pieces = num_pieces if num_threads else 1
        self._under_way = 0
        self._lock = threading.Lock()  # around the dealer and what was read and not dealt out
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="satrap-source") if num_threads else None
        self._closed = False

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Returns when no thread runs any more and every file is closed."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        while self._readings:
            self._readings.popleft().close()

    def pieces(self) -> Iterator[Dealt]:
        """Of each part its pieces, then None."""
        rows = 0
        while self._fill():
            reading = self._readings[0]
            piece = None
            if reading.room(self._num_pieces):
                self._under_way -= 1
                reading.taken += 1
                rows, piece = reading.results.popleft()()
            if piece is None:
                self._under_way -= len(reading.results)  # they were started beyond the end and find nothing either
                self._readings.popleft().close()
            yield rows, piece

    def _fill(self) -> bool:
        """Starts what there is room for, first blocks first; False if everything was handed out."""
        for reading in self._readings:
            self._start_pieces(reading)
        while self._under_way < self._num_pieces:
            part = next(self._parts, None)
            if part is None:
                break
            self._readings.append(_Reading(*part))
            with self._lock:
                self._to_deal.append(self._readings[-1])
            self._start_pieces(self._readings[-1])
        return bool(self._readings)

    def _start_pieces(self, reading: "_Reading") -> None:
        while self._under_way < self._num_pieces and len(reading.results) < reading.room(self._num_pieces):
            self._start(reading)

    def _start(self, reading: "_Reading") -> None:
        self._under_way += 1
        turn = reading.next_turn()
        if self._pool is None:
            reading.results.append(partial(self._read_now, reading, turn))
            return
        future: Future[Dealt] = Future()
        with Uninterrupted():
            self._pool.submit(self._read, reading, turn, future)
        reading.results.append(partial(_result, future))

    def _read_now(self, reading: "_Reading", turn: int) -> Dealt:
        """All three steps of a piece, in the caller's thread."""
        raw, num_rows = reading.take(turn)
        while self._to_deal[0] is not reading:  # those before it are handed out
            self._to_deal.popleft()
        before, wanted = self._dealt(reading, raw, num_rows)
        return before, None if raw is _END else _decoded(reading.block, raw, wanted)

    def _read(self, reading: "_Reading", turn: int, future: "Future[Dealt]") -> None:
        """The first step of a piece, in a thread; then the second of all pieces whose turn it is."""
        try:
            raw, num_rows = reading.take(turn)
        except BaseException as error:
            future.set_exception(error)
            raw, num_rows = _END, None
        assert self._pool is not None
        with self._lock:
            reading.raw[turn] = raw, num_rows, future
            for decode, its_future in [] if self._closed else list(self._deal()):
                try:
                    self._pool.submit(decode)
                except RuntimeError as error:  # the interpreter ends
                    its_future.set_exception(error)

    def _deal(self) -> "Iterator[tuple[Callable[[], None], Future[Dealt]]]":
        """The second step of the pieces whose turn it is; yields their third."""
        while self._to_deal:
            reading = self._to_deal[0]
            while not reading.is_over and (found := reading.raw.pop(reading.dealt, None)) is not None:
                raw, num_rows, future = found
                reading.dealt += 1
                before, wanted = self._dealt(reading, raw, num_rows)
                if raw is not _END:
                    yield partial(_decode, reading.block, raw, wanted, before, future), future
                    continue
                reading.is_over = True
                if not future.done():  # with an error
                    future.set_result((before, None))
            if not reading.is_over and not (reading.block.exact and reading.dealt == reading.block.num_pieces):
                return
            self._to_deal.popleft()

    def _dealt(self, reading: "_Reading", raw: Any, num_rows: int | None) -> tuple[int, tuple[int, int] | None]:
        """How many rows were dealt out before a piece, and which of its own are wanted; None: all."""
        if not reading.is_begun:
            self._dealer.begin(reading.part)
            reading.is_begun = True
        before = self._dealer.rows
        if raw is _END or num_rows is None:
            return before, None
        wanted = self._dealer.wanted(num_rows)
        if self._dealer.is_done:
            reading.stop()
        return before, None if wanted == (0, num_rows) else wanted


def _result(future: "Future[Dealt]") -> Dealt:
    """Waits for it. An interrupt must not come while the future's own lock is held, which its thread waits for."""
    with Uninterrupted() as held:
        while not future.done():
            wait([future], SLICE_SECONDS)
            held.look()
        return future.result()


def _decode(block: Block, raw: Any, wanted: tuple[int, int] | None, before: int, future: "Future[Dealt]") -> None:
    """The third step of a piece, in a thread."""
    try:
        future.set_result((before, _decoded(block, raw, wanted)))
    except BaseException as error:
        future.set_exception(error)


def _decoded(block: Block, raw: Any, wanted: tuple[int, int] | None) -> Piece:
    if wanted is not None and wanted[0] == wanted[1]:
        return Piece(samples=_core.Samples(0, [], None, None))
    return block.decode(raw if wanted is None else block.cut(raw, *wanted))


class _Reading:
    """One part while it is read. Threads take its raw pieces in turn; lock: `_turned` guards the two counts."""

    def __init__(self, block: Block, part: Part) -> None:
        self.block, self.part = block, part
        self.results: deque[Callable[[], Dealt]] = deque()
        self.taken = 0  # of the results, by the consumer
        self.raw: dict[int, tuple[Any, int | None, Future[Dealt]]] = {}  # by turn, read and not dealt out
        self.dealt = 0  # of the turns
        self.is_begun = self.is_over = False  # dealing it out
        self._raw: Iterator[Any] = block.read()
        self._given = 0
        self._turn = 0
        self._turned = threading.Condition()
        self._over = False

    def room(self, most: int) -> int:
        """How many pieces may be under way: as many as the block should still have, the one that finds its end
        included; as many as anywhere once it had more than it should; none if it is known to have ended."""
        expected = self.block.num_pieces - self.taken
        if self.block.exact:
            return expected
        return expected + 1 if expected >= 0 else most

    def next_turn(self) -> int:
        self._given += 1
        return self._given - 1

    def take(self, turn: int) -> tuple[Any, int | None]:
        """Takes raw piece number `turn`, with the number of its rows if not all of them are wanted; _END behind the
        last. Turns are started in order, so the one that this waits for runs already."""
        with self._turned:
            self._turned.wait_for(lambda: self._turn == turn)
        raw = _END
        try:
            if not self._over:
                raw = next(self._raw, _END)
        finally:
            with self._turned:
                self._over = self._over or raw is _END
                self._turn += 1
                self._turned.notify_all()
        return raw, None if raw is _END or self.part.is_whole else self.block.num_rows_of(raw)

    def stop(self) -> None:
        """No other piece is wanted."""
        with self._turned:
            self._over = True

    def close(self) -> None:
        close = getattr(self._raw, "close", None)
        if close is not None:
            close()
