"""The sources whose position a checkpoint saves, and where each has come to."""

import logging
from dataclasses import dataclass
from typing import Any

from satrap.data.inputs import Position
from satrap.data.source import Source
from satrap.errors import StreamError

_LOG = logging.getLogger("satrap.train")


@dataclass(slots=True)
class TrackedSource:
    """A source whose position a checkpoint saves."""

    data: Any
    position: Position | None = None
    resume: bool = False
    """Whether the next stream over it starts at the position."""
    is_read: bool = False
    """Whether a training stream read it."""


def is_same(data: Any, other: Any) -> bool:
    """Return whether a position in `data` is one in `other`: the same object, or an equal source."""
    return data is other or (isinstance(data, Source) and bool(data == other))


class TrackedSources:
    """The sources that were passed to checkpoints."""

    def __init__(self) -> None:
        self._sources: list[TrackedSource] = []
        self._has_warned = False

    def find(self, data: Any) -> TrackedSource | None:
        """Return the tracked source that is `data`; None if there is none."""
        return next((tracked for tracked in self._sources if is_same(data, tracked.data)), None)

    def track(self, data: Any) -> TrackedSource:
        """Return the tracked source that is `data`, from now on if it is new."""
        if (tracked := self.find(data)) is None:
            self._sources.append(tracked := TrackedSource(data))
        return tracked

    def begin(self, data: Any) -> TrackedSource | None:
        """Return the tracked source that a training stream over `data` reads. None if there is none: its position will
        not be saved, which is an error where a checkpoint has a source that `data` was derived from."""
        if (tracked := self.find(data)) is not None:
            tracked.is_read = True
        elif any(getattr(data, "origin", None) == id(other.data) for other in self._sources if other.data is not None):
            raise StreamError(
                "this source is a replace() of the one passed to Checkpoint(...), so its position would not be saved: "
                "stream the source itself (epochs=N with shuffle=True reads it in another order each time, path= "
                "takes a list), or create the Checkpoint without a source and start each stream where you want it"
            )
        return tracked

    def note_save(self, data: Any) -> None:
        """Warn once of a checkpoint after the first step whose data no stream has read."""
        tracked = self.find(data)
        if data is None or tracked is None or tracked.is_read or tracked.position is not None or self._has_warned:
            return
        self._has_warned = True
        _LOG.warning(
            "no stream has read the data passed to Checkpoint(...), so the checkpoint has no position in it, and a "
            "resumed run reads its data from the beginning: pass the source that you stream or the loader of "
            "embeddings.prefetch(...), or no data"
        )
