"""What a server answers: the calls that cross the network between workers and servers.

`satrap.server.Server` does them; `satrap.rpc` carries them. Each may come twice, because an answer may be lost, and
then changes nothing the second time. An `Origin` says of which attempt, trainer, step and bucket map a call is; ids
come table by table, `offsets` says where each table's begin, and rows and gradients lie likewise, side by side.
A caller whose wire is "float16" has them as one array of bytes instead, in the form of core/wire.hpp.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from satrap.rpc import Origin

Ids = NDArray[np.uint64]
Offsets = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Coded = NDArray[np.uint8]
WIRES = ("float32", "float16")


class ServerCalls(Protocol):
    """See the file's docstring. Tables are numbered as in the job."""

    def hello(
        self, origin: Origin, job: dict[str, Any], bucket_map: dict[str, Any], server: int, commit: bool
    ) -> dict[str, Any]:
        """Makes a new server this job's, or raises if one that is so already differs in a field.

        server: which of the map's this one is. commit: False only asks, and changes nothing. Returns `attempt`,
            `latest_step` and `lrs`. The origin says nothing.
        """
        ...

    def begin(self, origin: Origin) -> None:
        """Begins the origin's attempt: calls of older ones are refused from now on, and no update of it was applied."""
        ...

    def lookup(
        self,
        origin: Origin,
        ids: Ids,
        offsets: Offsets,
        oldest_open: int,
        train: bool,
        ticket: int,
        wire: str = "float32",
    ) -> tuple[Floats | None, Coded | None]:
        """The rows, in the form that `wire` names. ticket: a number of the trainer's own that the update will name; 0:
        none."""
        ...

    def update(
        self,
        origin: Origin,
        ticket: int,
        ids: Ids,
        offsets: Offsets,
        gradients: Floats | None,
        lrs: list[float],
        together: int,
        coded: Coded | None = None,
    ) -> None:
        """Steps the rows, once for each origin. ticket: that of a lookup, then there are no ids; or 0.

        coded: the gradients, of a caller whose wire is "float16".
        together: how many trainers' updates make one step; 0: this one alone does. The first ones are answered when the
        last one came and all are applied as one, an id's gradients summed in the order of the trainers.
        """
        ...

    def drop(self, origin: Origin, tickets: list[int]) -> None:
        """These tickets will not be used."""
        ...

    def read(self, origin: Origin, table: int, ids: Ids) -> tuple[Floats, Floats, Flags]:
        """Values, state and presence of rows, as they are."""
        ...

    def stats(self, origin: Origin, table: int) -> dict[str, int]:
        """As `Store.stats`."""
        ...

    def version(self, origin: Origin, table: int) -> int:
        """As `Store.version`."""
        ...

    def save(self, origin: Origin, table: int, folder: str, since: int | None) -> int:
        """Writes this server's part of a table into its own folder within this one, which all machines share; returns
        the version. since: only what changed since that version. The origin's step is the save's number: the same comes
        again, another is another."""
        ...

    def verify(self, origin: Origin, folders: list[list[str]]) -> None:
        """Raises unless `restore` could take these; reads them whole, and changes nothing."""
        ...

    def restore(self, origin: Origin, folders: list[list[str]]) -> bool:
        """Begins the origin's attempt with new tables: empty, or of each table what its buckets here held in the
        folders of a full snapshot and the changes after it, saved by any number of servers. Returns what
        `Tables.restore` does."""
        ...

    def set_lr(self, origin: Origin, table: int, lr: float) -> None:
        """The learning rate that a table is saved with."""
        ...

    def check(self, origin: Origin, table: int) -> None:
        """Walks the table; AssertionError if an invariant is broken."""
        ...
