"""The moment that a save saves: tables of one engine as they were at it, whatever changes them while they are written.

`take_cuts` marks all of them in the engine at once, in a time that does not depend on their rows (core/engine/
engine_cut.cpp); `writer` then exports each bucket once. Rows that change before their bucket is exported are copied, up
to a bound of bytes, beyond which calls that change rows wait for the writer.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from satrap.errors import ChangesError, InputError, SnapshotError
from satrap.table.engine import Slot
from satrap.table.snapshot.manifest import Since

OLD_ROWS_BYTES = 1 << 30
"""The default bound of copies."""
PATIENCE_SECONDS = 60.0
"""How long calls wait at the bound for a writer that writes nothing, before the save is given up."""


class TablesCut(Protocol):
    """All tables of a job at a cut, until they are written or released."""

    changes_known: bool
    """Whether the changes since the versions that the cut was given can be written."""

    @property
    def versions(self) -> dict[str, int]:
        """The version at which the cut fixes each table, by name."""

    @property
    def map_version(self) -> int:
        """The version of the bucket map at the cut."""

    def write(self, folders: Mapping[str, str | os.PathLike[str]], *, is_full: bool, is_beside: bool) -> dict[str, int]:
        """Write each table, or what had changed in it, into its folder, and release the cut; return how many rows each
        table had. Raise ChangesError if the cut can no longer be written; the caller then takes another one.

        is_beside: whether training continues meanwhile, so that only few threads should write.
        """

    def release(self) -> None:
        """Give the cut up, unless it was written. Idempotent."""


class TablesToCut(Protocol):
    """All tables of a job, by name."""

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str) -> Any: ...

    @property
    def map_version(self) -> int:
        """A number that changes when rows migrate to other servers."""

    def take_cut(self, since: Mapping[str, int] | None = None, *, memory: int) -> TablesCut:
        """Take the cut of all tables at once; no call may run meanwhile."""


@dataclass(frozen=True, kw_only=True)
class TableCut:
    """One table at a cut."""

    slot: Slot
    owned: NDArray[np.bool_] | None
    """For each bucket whether it is saved; None: all. The engine knows it too, and exports no other."""
    version: int
    expire_before: int
    latest_step: int
    lr: float
    rows: int
    """Number of rows, those that had expired and were not removed yet among them."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set to make the writer give up."""

    def last_step(self) -> int:
        """Return a step after which no row of the cut is stamped. It is known once all rows were exported."""
        return self.latest_step if self.slot.keeps_cuts else self.slot.engine.latest_step

    def require_not_cancelled(self) -> None:
        """Raise ChangesError if the save was cancelled: a save that may take another cut does."""
        if self.cancelled.is_set():
            raise ChangesError(
                f"table {self.slot.table.name!r}: the save was cancelled, because the rows that it saves are being "
                "replaced or migrate; save again, the whole table"
            )

    def end(self) -> None:
        """Release what the engine keeps for the cut."""
        self.slot.engine.end_cut(self.slot.index)


def require_changes(slot: Slot, since: Since) -> None:
    """Raise ChangesError unless the changes since a snapshot are all known: one process remembers the ids of
    removed rows, up to a bound. What was known at the cut is known until its table is exported."""
    oldest = slot.engine.removed_since(slot.index)
    if since.version < oldest:
        # The id of a snapshot is known unless an earlier process saved it.
        why = (
            "the ids of removed rows do not survive the process"
            if since.id is None
            else f"so many rows were removed that their ids are remembered since version {oldest} only"
        )
        raise ChangesError(
            f"table {slot.table.name!r}: the changes since version {since.version} are not all known: "
            f"{why}: save the whole table"
        )


def take_cuts(
    slots: Sequence[Slot], owned: Sequence[NDArray[np.bool_]] | None = None, memory: int = OLD_ROWS_BYTES
) -> list[TableCut]:
    """Take the cut of some tables of one engine. For a cut between two steps, no other call may run meanwhile.

    memory: most bytes of copies, for all tables together."""
    engine = slots[0].engine
    try:
        figures = engine.begin_cut([slot.index for slot in slots], memory, PATIENCE_SECONDS)
    except InputError as error:
        raise SnapshotError(f"{error}: they cannot be saved") from None
    latest_step = engine.latest_step  # read last, so that no stamp in the files is later
    try:
        return [
            TableCut(
                slot=slot,
                owned=None if owned is None else owned[i],
                version=cut["version"],
                expire_before=cut["expire_before"],
                latest_step=latest_step,
                lr=cut["lr"],
                rows=cut["rows"] if slot.keeps_cuts else slot.directory.num_rows(slot.index),
            )
            for i, (slot, cut) in enumerate(zip(slots, figures, strict=True))
        ]
    except BaseException:  # such as of a device without memory: no other save could begin
        for slot in slots:
            engine.end_cut(slot.index)
        raise
