"""Reads blocks ahead in background threads, and hands out their pieces in order.

A bounded number of pieces is under way or waits at any time. A thread takes the next raw piece of a block in its turn,
then decodes it while another thread takes the one after it. Nothing waits for the consumer, so stopping is: start no
more, and wait for what runs. An error in a thread is raised where its piece would have come.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from satrap.interrupts import SLICE_SECONDS, Uninterrupted
from satrap.sources.block import Block, Piece

_END = object()


class Ahead:
    """Pieces of blocks, in order. Close it, or iterate in a `with` block: it owns threads."""

    def __init__(self, blocks: Iterable[Block], *, num_threads: int, num_pieces: int) -> None:
        """num_threads: 0 reads in the caller's thread, when a piece is asked for.
        num_pieces: how many may be under way or wait."""
        self._blocks = iter(blocks)
        self._readings: deque[_Reading] = deque()
        self._num_pieces = num_pieces if num_threads else 1
        self._under_way = 0
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="satrap-source") if num_threads else None

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Returns when no thread runs any more and every file is closed."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        while self._readings:
            self._readings.popleft().close()

    def pieces(self) -> Iterator[Piece | None]:
        """Of each block its pieces, then None."""
        while self._fill():
            reading = self._readings[0]
            piece = None
            if reading.room(self._num_pieces):
                self._under_way -= 1
                reading.taken += 1
                piece = reading.results.popleft()()
            if piece is None:
                self._under_way -= len(reading.results)  # they were started beyond the end and find nothing either
                self._readings.popleft().close()
            yield piece

    def _fill(self) -> bool:
        """Starts what there is room for, first blocks first; False if everything was handed out."""
        for reading in self._readings:
            self._start_pieces(reading)
        while self._under_way < self._num_pieces:
            block = next(self._blocks, None)
            if block is None:
                break
            self._readings.append(_Reading(block))
            self._start_pieces(self._readings[-1])
        return bool(self._readings)

    def _start_pieces(self, reading: "_Reading") -> None:
        while self._under_way < self._num_pieces and len(reading.results) < reading.room(self._num_pieces):
            self._start(reading)

    def _start(self, reading: "_Reading") -> None:
        self._under_way += 1
        turn = reading.next_turn()
        if self._pool is None:
            reading.results.append(lambda: reading.step(turn))
        else:
            with Uninterrupted():
                future: Future[Piece | None] = self._pool.submit(reading.step, turn)
            reading.results.append(partial(_result, future))


def _result(future: Future[Piece | None]) -> Piece | None:
    """Waits for it. An interrupt must not come while the future's own lock is held, which its thread waits for."""
    with Uninterrupted() as held:
        while not future.done():
            wait([future], SLICE_SECONDS)
            held.look()
        return future.result()


class _Reading:
    """One block while it is read. Threads take its raw pieces in turn; lock: `_turned` guards the two counts."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.results: deque[Callable[[], Piece | None]] = deque()
        self.taken = 0  # of the results, by the consumer
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

    def step(self, turn: int) -> Piece | None:
        """Takes raw piece number `turn` and decodes it; None behind the last. Turns are started in order, so the one
        that this waits for runs already."""
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
        return None if raw is _END else self.block.decode(raw)

    def close(self) -> None:
        close = getattr(self._raw, "close", None)
        if close is not None:
            close()
