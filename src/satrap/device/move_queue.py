"""The order in which a device moves rows between frames and home, beside what it computes.

On a CUDA device moves run on a stream of their own, so that those for the next batch overlap the present step. A move
waits for every earlier use of frames; the lookup that needs its rows waits for it. Other devices have one queue.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class MoveQueue:
    """The stream of the moves of one device. The lock of the rows is held during each call."""

    def __init__(self, device: torch.device | None) -> None:
        """device: None: no row is moved."""
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._device = device
        self._used: torch.cuda.Event | None = None
        self._moved: torch.cuda.Event | None = None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Run what is put on the device inside the block after all earlier uses and moves."""
        if self._stream is None:
            yield
            return
        if self._used is not None:
            self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            yield
            self._moved = self._stream.record_event()

    @property
    def moved(self) -> "torch.cuda.Event | None":
        """The end of the moves so far."""
        return self._moved

    def wait(self, moved: "torch.cuda.Event | None") -> None:
        """Let what the current stream does from now on come after these moves."""
        if moved is not None:
            torch.cuda.current_stream(self._device).wait_event(moved)

    def note_use(self) -> None:
        """Let later moves come after what is on the current stream by now."""
        if self._stream is not None:
            self._used = torch.cuda.current_stream(self._device).record_event()

    def share(self, memory: list[Tensor]) -> None:
        """Keep freed memory from being used again while a move still uses it."""
        if self._stream is not None:
            for tensor in memory:
                tensor.record_stream(self._stream)
