"""What a run shows reaches whoever reads it, however slowly; what does not is counted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from satrap.launch.terminal import Terminal

TEXT = bytes(range(256)) * 4096


class Reader:
    """Of a pipe, a little at a time, until everybody who writes has closed it."""

    def __init__(self) -> None:
        self.found = b""
        self._own, fd = os.pipe()
        self.stream = os.fdopen(fd, "w")
        self._thread = threading.Thread(target=self._read)

    def begin(self) -> None:
        self._thread.start()

    def all(self) -> bytes:
        self.stream.close()
        self._thread.join()
        os.close(self._own)
        return self.found

    def _read(self) -> None:
        while more := os.read(self._own, 1000):
            self.found += more


@pytest.mark.parametrize("blocking", [True, False])
def test_all_that_is_read_is_shown(blocking: bool) -> None:
    reader = Reader()
    os.set_blocking(reader.stream.fileno(), blocking)
    terminal = Terminal(reader.stream)
    reader.begin()
    terminal.write(TEXT)
    assert terminal.close() == 0
    assert reader.all() == TEXT


def test_what_is_not_read_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown yet to whoever reads while this process is there."""
    monkeypatch.setattr("satrap.launch.terminal._STALL_SECONDS", 0.1)
    reader = Reader()
    terminal = Terminal(reader.stream)
    terminal.write(TEXT)
    left = terminal.close()
    assert 0 < left < len(TEXT), "a part is in the pipe"
    reader.begin()
    monkeypatch.setattr("satrap.launch.terminal._STALL_SECONDS", 5.0)
    assert terminal.close() == 0
    assert reader.all() == TEXT


def test_what_finds_no_room_is_counted() -> None:
    with Path("/dev/full").open("w") as stream:
        terminal = Terminal(stream)
        for _ in range(2):
            terminal.write(TEXT)
        assert terminal.close() == 2 * len(TEXT)
