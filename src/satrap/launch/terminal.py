"""A terminal stream of a run, written by a thread: a terminal may be paused, and a pipe may have no reader.

A slow reader is waited for. If nothing is read for some seconds, the run continues and drops its output; a line reports
the dropped bytes as soon as something is read again, and the log files have all output. Bytes for which a file has no
space are reported at the end.

On a terminal one more line may be shown below the output, which is erased before more output and then drawn again. It
is not queued: a terminal that was paused gets the newest. Nothing is drawn behind output that does not end its line,
nor while another program is in the foreground.
"""

import errno
import os
import select
import threading
from contextlib import suppress
from typing import TextIO

from satrap.monitor.status_line import marks_of

_MAX_QUEUED_BYTES = 1 << 20
_CHUNK_BYTES = 4096  # a pipe that has room accepts it at once
_STALL_SECONDS = 3.0  # a stream of which nothing is read for this long has no reader
_ERASE = b"\r\x1b[K"


class Terminal:
    """Writes to standard output or standard error in the background."""

    def __init__(self, stream: TextIO | None) -> None:
        """stream: if it is None or closed, nothing is written."""
        self._changed = threading.Condition(threading.Lock())
        self._queue: list[bytes] = []
        self._queued_bytes = self._dropped_bytes = self._no_space_bytes = 0
        self._is_closing = False
        self._line = self._drawn_line = b""
        self._is_at_start = True  # whether a line begins
        self.marks = marks_of(stream)
        """Characters of a full and of an empty part of a bar."""
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._is_open = stream is not None and not stream.closed
        if stream is not None and self._is_open:
            stream.flush()
            self._file = stream.fileno()
        self._thread = threading.Thread(target=self._write_loop, name="satrap-terminal", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        with self._changed:
            seconds = 0.0 if self._dropped_bytes else _STALL_SECONDS
            if not self._changed.wait_for(lambda: self._queued_bytes < _MAX_QUEUED_BYTES, seconds):
                self._dropped_bytes += len(data)
                return
            self._report_dropped()
            self._enqueue(data)

    def show(self, line: str) -> None:
        """Show this line below the output, instead of the one before."""
        with self._changed:
            self._line = line.encode(self._encoding, errors="replace")
            self._changed.notify_all()

    def columns(self) -> int:
        """Return how wide a line may be; 0 if none can be shown: the stream is no terminal, or this process runs in its
        background."""
        try:
            columns = os.get_terminal_size(self._file).columns or 80
        except (OSError, AttributeError):
            return 0
        with suppress(OSError):  # it is not the terminal that controls this process
            if os.tcgetpgrp(self._file) != os.getpgrp():
                return 0
        return columns - 1

    def close(self) -> int:
        """Wait until everything is written or nothing is read any more. Returns the number of bytes not written."""
        with self._changed:
            self._report_dropped()
            self._is_closing = True
            self._changed.notify_all()
            before = 0
            while self._queued_bytes not in (0, before):
                before = self._queued_bytes
                self._changed.wait_for(lambda: self._queued_bytes < before, _STALL_SECONDS)  # noqa: B023  called here
            remaining = self._queued_bytes
        if not remaining:  # otherwise the thread waits for a reader that may never come
            self._thread.join(_STALL_SECONDS)
        return remaining + self._no_space_bytes

    def _report_dropped(self) -> None:
        if self._dropped_bytes:
            self._enqueue(
                f"\n--- {self._dropped_bytes} bytes are missing here: they were not read; see the logs\n".encode()
            )
            self._dropped_bytes = 0

    def _enqueue(self, data: bytes) -> None:
        self._queue += [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
        self._queued_bytes += len(data)
        self._changed.notify_all()

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing or self._has_new_line())
                if not self._queue:
                    if not self._has_new_line():
                        break
                    self._drawn_line = self._line
                data, line = self._queue.pop(0) if self._queue else b"", self._drawn_line
            if not data:
                self._write_out(_ERASE + line)
                continue
            no_space_bytes = self._write_out((_ERASE if line else b"") + data)
            self._drawn_line, self._is_at_start = b"", data.endswith(b"\n")
            with self._changed:
                self._no_space_bytes += no_space_bytes
                self._queued_bytes -= len(data)
                self._changed.notify_all()
        if self._drawn_line:
            self._write_out(b"\n")

    def _has_new_line(self) -> bool:
        return self._line != self._drawn_line and self._is_at_start

    def _write_out(self, data: bytes) -> int:
        """Write the data. Returns the number of bytes for which the file has no space."""
        remaining = memoryview(data)
        while self._is_open and remaining:
            try:
                remaining = remaining[os.write(self._file, remaining) :]
            except BlockingIOError:  # another process that shares the file made it non-blocking
                select.select([], [self._file], [])
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    return len(remaining)
                self._is_open = False  # the reader closed it
        return 0
