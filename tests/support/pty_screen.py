"""A real terminal for a process under test, and what its screen would show: a pseudo-terminal that a thread reads."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from waiting import wait_until

_TOKEN = re.compile(r"\x1b\[K|\r|\n|[^\x00-\x1f\x1b]|.", re.DOTALL)


class PtyScreen:
    """A terminal of some width. Pass `stream` to a process as its standard output or error."""

    def __init__(self, columns: int, encoding: str = "utf-8") -> None:
        self._reader, self.stream = os.openpty()
        self._encoding = encoding
        self.columns = columns
        self.resize(columns)
        self.received = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def resize(self, columns: int) -> None:
        self.columns = max(self.columns, columns)  # what was drawn stays as it is
        fcntl.ioctl(self.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, text: str) -> None:
        """Enter text, as from the keyboard."""
        os.write(self._reader, text.encode(self._encoding))

    def rows(self) -> list[str]:
        """Return the rows, the last one with the cursor. An unknown escape sequence is an error."""
        rows, at = [""], 0
        for token in _TOKEN.findall(self.received.decode(self._encoding, errors="ignore")):
            if token == "\n":
                rows.append("")
            elif token == "\r":
                at = 0
            elif token == "\x1b[K":
                rows[-1] = rows[-1][:at]
            elif token == "\x07":  # the bell
                continue
            else:
                assert token.isprintable(), repr(token)
                if at == self.columns:
                    rows.append("")
                    at = 0
                rows[-1] = rows[-1][:at].ljust(at) + token + rows[-1][at + 1 :]
                at += 1
        return rows

    def wait_for(self, condition: Callable[[list[str]], object]) -> list[str]:
        """Wait until the rows are so, and return them."""
        rows: list[str] = []

        def holds() -> object:
            rows[:] = self.rows()
            return condition(rows)

        wait_until(holds, otherwise=lambda: "\n".join(rows))
        return rows

    def close(self) -> None:
        os.close(self.stream)
        self._thread.join()
        os.close(self._reader)

    def _read(self) -> None:
        try:
            while data := os.read(self._reader, 1 << 16):
                self.received += data
        except OSError:  # the last process has closed the terminal
            return


@contextmanager
def pty_screen(columns: int, encoding: str = "utf-8") -> Iterator[PtyScreen]:
    screen = PtyScreen(columns, encoding)
    try:
        yield screen
    finally:
        screen.close()
