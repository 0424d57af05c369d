"""What a run shows reaches whoever reads it, however slowly; what does not is counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from satrap.cluster.terminal import Terminal

TEXT = bytes(range(256)) * 4096


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for each in ends:
        os.close(each)


def shown(fd: int, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        found += os.read(fd, 1000)
    return found


@pytest.mark.parametrize("blocking", [True, False])
def test_all_that_is_read_is_shown(pipe: tuple[int, int], blocking: bool) -> None:
    os.set_blocking(pipe[1], blocking)
    with os.fdopen(pipe[1], "w", closefd=False) as stream:
        terminal = Terminal(stream)
        writer = threading.Thread(target=terminal.write, args=(TEXT,))
        writer.start()
        assert shown(pipe[0], len(TEXT)) == TEXT
        writer.join()
        assert terminal.close() == 0


def test_what_is_not_read_is_counted(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("satrap.cluster.terminal._STALL_SECONDS", 0.1)
    with os.fdopen(pipe[1], "w", closefd=False) as stream:
        terminal = Terminal(stream)
        terminal.write(TEXT)
        left = terminal.close()
        assert 0 < left < len(TEXT), "what is in the pipe may be read yet"
        assert shown(pipe[0], len(TEXT)) == TEXT, "whoever reads late has it, while this process is there"


def test_what_finds_no_room_is_counted() -> None:
    with Path("/dev/full").open("w") as stream:
        terminal = Terminal(stream)
        terminal.write(TEXT)
        assert terminal.close() == len(TEXT)
