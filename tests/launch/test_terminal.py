"""The terminal output of a run reaches a slow reader; output that is not read is counted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from satrap.launch.terminal import Terminal

TEXT = bytes(range(256)) * 4096


class Reader:
    """Reads a pipe in small pieces, until all writers have closed it."""

    def __init__(self) -> None:
        self.received = b""
        self._read_fd, fd = os.pipe()
        self.stream = os.fdopen(fd, "w")
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        self._thread.start()

    def read_all(self) -> bytes:
        self.stream.close()
        self._thread.join()
        os.close(self._read_fd)
        return self.received

    def _read(self) -> None:
        while more := os.read(self._read_fd, 1000):
            self.received += more


@pytest.mark.parametrize("blocking", [True, False])
def test_everything_is_written_to_a_slow_reader(blocking: bool) -> None:
    reader = Reader()
    os.set_blocking(reader.stream.fileno(), blocking)
    terminal = Terminal(reader.stream)
    reader.start()
    terminal.write(TEXT)
    assert terminal.close() == 0
    assert reader.read_all() == TEXT


def test_unread_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes later, while the process exists, still gets them."""
    monkeypatch.setattr("satrap.launch.terminal._STALL_SECONDS", 0.1)
    reader = Reader()
    terminal = Terminal(reader.stream)
    terminal.write(TEXT)
    left = terminal.close()
    assert 0 < left < len(TEXT), "the pipe holds a part"
    reader.start()
    monkeypatch.setattr("satrap.launch.terminal._STALL_SECONDS", 5.0)
    assert terminal.close() == 0
    assert reader.read_all() == TEXT


def test_bytes_that_do_not_fit_on_the_disk_are_counted() -> None:
    with Path("/dev/full").open("w") as stream:
        terminal = Terminal(stream)
        for _ in range(2):
            terminal.write(TEXT)
        assert terminal.close() == 2 * len(TEXT)
