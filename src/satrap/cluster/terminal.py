"""What a run shows, written by a thread of its own: a terminal may be paused, and nobody may read a pipe. Who reads
slowly is waited for; where nothing is read for some seconds, the run goes on. What it says then is not shown, which is
told once somebody reads; the log files have all of it.
"""

import os
import threading
from typing import TextIO

_MOST_BYTES = 1 << 20
_STALL_SECONDS = 5.0  # in which some of it is read, or nobody reads


class Terminal:
    """One of the streams that this process was given."""

    def __init__(self, stream: TextIO | None) -> None:
        """stream: None, or a closed one: nothing is shown."""
        self._changed = threading.Condition(threading.Lock())
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._missing = 0
        self._is_ending = False
        self._is_open = stream is not None and not stream.closed
        if stream is not None and self._is_open:
            stream.flush()
            self._file = stream.fileno()
        threading.Thread(target=self._write_on, name="satrap-terminal", daemon=True).start()

    def write(self, data: bytes) -> None:
        with self._changed:
            seconds = 0.0 if self._missing else _STALL_SECONDS
            if not self._changed.wait_for(lambda: self._waiting_bytes < _MOST_BYTES, seconds):
                self._missing += len(data)
                return
            self._tell_missing()
            self._put(data)

    def close(self) -> int:
        """Returns once all is written, or nobody reads it: how many bytes are left."""
        with self._changed:
            self._tell_missing()
            self._is_ending = True
            self._changed.notify_all()
            before = 0
            while self._waiting_bytes not in (0, before):
                before = self._waiting_bytes
                self._changed.wait_for(lambda: self._waiting_bytes < before, _STALL_SECONDS)  # noqa: B023  called here
            return self._waiting_bytes

    def _tell_missing(self) -> None:
        if self._missing:
            self._put(
                f"\n--- {self._missing} bytes are not shown here: nobody read them; the logs have them\n".encode()
            )
            self._missing = 0

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._changed.notify_all()

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                data = self._waiting.pop(0)
            self._show(data)
            with self._changed:
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _show(self, data: bytes) -> None:
        left = memoryview(data)
        while self._is_open and left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError:  # its reader is gone
                self._is_open = False
