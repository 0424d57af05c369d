"""The order in which a device moves rows between frames and home, beside what it computes.

Moves run on a stream of their own, so that those for the next batch overlap the present step. A move waits for every
earlier use of frames; the lookup that needs its rows waits for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from satrap.device.device_stream import DeviceStream, Mark


class MoveQueue:
    """The moves of one device. The lock of the rows is held during each call."""

    def __init__(self, rows: DeviceStream, moves: DeviceStream) -> None:
        """rows: where rows are used. moves: where they are moved; the same one, if none ever is."""
        self._rows, self._moves = rows, moves
        self._used: Mark | None = None
        self._moved: Mark | None = None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Put what is inside the block on the device after all earlier uses and moves."""
        self._moves.wait(self._used)
        with self._moves.running():
            yield
        self._moved = self._moves.mark()

    @property
    def moved(self) -> Mark | None:
        """The end of the moves so far."""
        return self._moved

    def wait(self, moved: Mark | None) -> None:
        """Let later uses come after these moves."""
        self._rows.wait(moved)

    def note_use(self) -> None:
        """Let later moves come after all uses so far."""
        if self._moves is not self._rows:
            self._used = self._rows.mark()

    def share(self, memory: Sequence[Tensor]) -> None:
        """Let moves use memory that was allocated for the rows, from now on."""
        self._moves.keep(memory)
        self.note_use()
