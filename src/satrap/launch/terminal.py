"""What a run shows, written by a thread of its own: a terminal may be paused, and nobody may read a pipe. Who reads
slowly is waited for; where nothing is read for some seconds, the run goes on. What it says then is not shown, which is
told once somebody reads; the log files have all of it. What a file has no room for is told at the end.
"""

import errno
import os
import select
import threading
from typing import TextIO

_MOST_BYTES = 1 << 20
_PIECE_BYTES = 4096  # a pipe that has room takes it at once
_STALL_SECONDS = 3.0  # in which some of it is read, or nobody reads


class Terminal:
    """One of the streams that this process was given."""

    def __init__(self, stream: TextIO | None) -> None:
        """stream: None, or a closed one: nothing is shown."""
        self._changed = threading.Condition(threading.Lock())
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._missing = self._without_room = 0
        self._is_ending = False
        self._is_open = stream is not None and not stream.closed
        if stream is not None and self._is_open:
            stream.flush()
            self._file = stream.fileno()
        self._thread = threading.Thread(target=self._write_on, name="satrap-terminal", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        with self._changed:
            seconds = 0.0 if self._missing else _STALL_SECONDS
            if not self._changed.wait_for(lambda: self._waiting_bytes < _MOST_BYTES, seconds):
                self._missing += len(data)
                return
            self._tell_missing()
            self._put(data)

    def close(self) -> int:
        """Returns once all is written, or nobody reads it: how many bytes are not."""
        with self._changed:
            self._tell_missing()
            self._is_ending = True
            self._changed.notify_all()
            before = 0
            while self._waiting_bytes not in (0, before):
                before = self._waiting_bytes
                self._changed.wait_for(lambda: self._waiting_bytes < before, _STALL_SECONDS)  # noqa: B023  called here
            left = self._waiting_bytes
        if not left:  # else it waits for a reader that may never come
            self._thread.join()
        return left + self._without_room

    def _tell_missing(self) -> None:
        if self._missing:
            self._put(
                f"\n--- {self._missing} bytes are not shown here: nobody read them; the logs have them\n".encode()
            )
            self._missing = 0

    def _put(self, data: bytes) -> None:
        self._waiting += [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
        self._waiting_bytes += len(data)
        self._changed.notify_all()

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                data = self._waiting.pop(0)
            without_room = self._show(data)
            with self._changed:
                self._without_room += without_room
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _show(self, data: bytes) -> int:
        """Returns how much of it there was no room for."""
        left = memoryview(data)
        while self._is_open and left:
            try:
                left = left[os.write(self._file, left) :]
            except BlockingIOError:  # somebody who has it, too, made it so
                select.select([], [self._file], [])
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return len(left)
                self._is_open = False  # its reader is gone
        return 0
