"""What a run shows, written by a thread of its own: a terminal may be paused, and nobody may read a pipe. The run goes
on then. What finds no room is not shown, which is told once there is some; the log files have all of it.
"""

import os
import threading
from typing import TextIO

_MOST_BYTES = 1 << 20
_CLOSE_SECONDS = 2.0  # in which the last of it is read, or never


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
        self._thread = threading.Thread(target=self._write_on, name="satrap-terminal", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        with self._changed:
            if self._waiting_bytes + len(data) > _MOST_BYTES:
                self._missing += len(data)
                return
            if self._missing:
                note = f"\n--- {self._missing} bytes are not shown here: nobody read them; the logs have them\n"
                data, self._missing = note.encode() + data, 0
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._changed.notify()

    def close(self) -> None:
        """Returns once all is written, or nobody reads it."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_ending)
                if not self._waiting:
                    return
                data = b"".join(self._waiting)
                self._waiting.clear()
            self._show(data)
            with self._changed:
                self._waiting_bytes -= len(data)

    def _show(self, data: bytes) -> None:
        left = memoryview(data)
        while self._is_open and left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError:  # its reader is gone
                self._is_open = False
