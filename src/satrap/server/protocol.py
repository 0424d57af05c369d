"""What a server answers: the calls that cross the network between workers and servers.

`satrap.server.server.Server` does them; `satrap.rpc` carries them. Each may come twice, because an answer may be lost,
and then changes nothing the second time. An `Origin` says of which attempt, trainer, step and bucket map a call is; ids
come table by table, `offsets` says where each table's begin, and rows and gradients lie likewise, side by side. A
caller whose wire is "float16" has them as one array of bytes instead, in the form of core/kernels/fp16_codec.hpp.

A call of `NO_ATTEMPT` comes from a process that does not train. It may read (`lookup` without training, `read`,
`stats`, `version`, `check`) in whatever attempt the server is, and need not say hello.
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
Numbers = NDArray[np.uint32]
NO_ATTEMPT = 0
WIRES = ("float32", "float16")


class ServerCalls(Protocol):
    """See the file's docstring. Tables are numbered as in the job."""

    def hello(
        self, origin: Origin, job: dict[str, Any], members: dict[str, Any], server: int, commit: bool
    ) -> dict[str, Any]:
        """Makes a new server this job's, or raises if one that is so already differs in a field; MovedError if it knows
        of newer members, or may not take these yet.

        server: which of the members this one is. commit: False only asks, and changes nothing. Returns `attempt`,
            `latest_step`, `lrs` and `leases`: of each process that trains where it is, and the seconds that its lease
            has left. The origin says nothing.
        """
        ...

    def members(self, origin: Origin, than: int) -> dict[str, Any]:
        """What this server knows: `version` of the map (0: it has no job), `greeted` (whether it was told of its job
        since it was started), `turn` (of the newest mover); and if that version is higher than `than` the `members`,
        the `job`, and its `state`: `attempt`, whether a restore has begun that (`restored`), `latest_step`, and of each
        table `versions`, `expire_before` and `lrs`. The origin says nothing."""
        ...

    def renew_lease(self, origin: Origin, process: str, where: str, seconds: float) -> None:
        """The process trains in the origin's attempt, for so many seconds from now on."""
        ...

    def begin_attempt(self, origin: Origin) -> None:
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
        first_epoch: bool = True,
    ) -> tuple[Floats | None, Coded | None]:
        """The rows, in the form that `wire` names. ticket: a number of the trainer's own that the update will name; 0:
        none. first_epoch: whether sightings count in tables that count those of the first epoch only."""
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

    def save(self, origin: Origin, table: int, folder: str, since: int | None, version: int) -> int:
        """Writes this server's part of a table into its own folder within this one, which all machines share; returns
        the version, which is to be `version`: the same comes again, another is another save. since: only what changed
        since that version."""
        ...

    def require_permitted(self, origin: Origin, folder: str) -> None:
        """Raises ConfigError unless checkpoints may be written below the folder."""
        ...

    def verify(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> None:
        """Raises unless `restore` could take these; reads them whole, and changes nothing. checksums: of each folder
        `checksum_of`, as the trainer sees it."""
        ...

    def restore(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> bool:
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

    # -- what a `satrap.server.migration.coordinator` calls. Buckets are numbered over all tables; a move is a number
    # that it drew. The step of the origin is the mover's turn: once a later one has begun, calls that change something
    # are refused, hello too.

    def begin_turn(self, origin: Origin, mover: int) -> None:
        """The turn of a mover of that number begins; its step is higher than those before. Returns once no call of an
        earlier one runs."""
        ...

    def freeze(self, origin: Origin, move: int, buckets: Numbers) -> None:
        """Until these have left, or another move begins, calls that would change them are refused (MovedError); returns
        once none runs that does. The origin names the map."""
        ...

    def copy_out(
        self, origin: Origin, buckets: Numbers, table: int, begin: int
    ) -> tuple[Ids, Numbers, Coded, Floats, Ids, Numbers, Numbers, int]:
        """Rows of a table, of buckets that are frozen or were given away: from the one of that number on, as many as
        fit into an answer, and how many there are. Ids, steps, values as bytes, state; and with the last ones the
        sightings: ids, steps, counts."""
        ...

    def companions_out(self, origin: Origin, buckets: Numbers) -> tuple[Numbers, Ids, Ids, Numbers]:
        """Of buckets that were given away: the trainers, and of each in turn its windows; the counters; and in pairs
        the oldest open step of trainers."""
        ...

    def receive(self, origin: Origin, move: int, buckets: Numbers, state: dict[str, Any]) -> None:
        """These will come, from a server of that `state`; what is here of them goes."""
        ...

    def copy_in(
        self,
        origin: Origin,
        move: int,
        table: int,
        ids: Ids,
        steps: Numbers,
        values: Coded,
        state: Floats,
        sighted: Ids,
        sighted_at: Numbers,
        counts: Numbers,
    ) -> None:
        """What `copy_out` gave."""
        ...

    def companions_in(
        self, origin: Origin, move: int, trainers: Numbers, windows: Ids, counters: Ids, oldest_open: Numbers
    ) -> None:
        """What `companions_out` gave; the move's buckets are whole then."""
        ...

    def change(self, origin: Origin, members: dict[str, Any], server: int, move: int) -> None:
        """These are the members from now on, of the next map; this is which of them, -1: none. NotReadyError unless
        what leaves is frozen and what comes is whole, by this move."""
        ...

    def forget(self, origin: Origin) -> None:
        """Every bucket that is another's goes, if the server is of the origin's map: then all of them are."""
        ...

    def load(self, origin: Origin) -> dict[str, float]:
        """What `satrap.sharding.autoscaler` decides by: `rows`, `bytes` of the tables, `memory_bytes` of the machine,
        `calls` under way, `work_seconds` of all calls since the process began, and `latest_step`."""
        ...
