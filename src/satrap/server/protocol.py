"""The calls that a server answers: the protocol between workers and servers.

`satrap.server.server.Server` implements the calls and `satrap.rpc` carries them. An answer may be lost, so each call
may arrive twice, and the duplicate changes nothing. An `Origin` names the attempt, trainer, step and bucket map of a
call. The ids of all tables are concatenated, table by table, with the start of each table in `offsets`; rows and
gradients are laid out in the same way. A caller whose wire is "float16" exchanges them as one array of bytes in the
format of core/kernels/fp16_codec.hpp.

A call of `NO_ATTEMPT` comes from a process that does not train. It may read (`lookup` without training, `read`,
`bucket_ids`, `stats`, `version`, `check`) whatever the server's attempt is, and needs no handshake.
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
    """The calls of a server. Tables are numbered as in the job."""

    def hello(
        self, origin: Origin, job: dict[str, Any], shard_map: dict[str, Any], server: int, commit: bool
    ) -> dict[str, Any]:
        """Handshake: assign a new server to this job, or raise ConfigError if the server's job differs in a field.
        MovedError if the server knows a newer shard map, or cannot take this one yet.

        server: the server's number in the shard map.
        commit: False only compares, and changes nothing.
        Returns `attempt`, `latest_step`, `lrs` and `leases`: for each process that trains, its location and the seconds
            until its lease expires. Ignores the origin.
        """

    def get_shard_map(self, origin: Origin, than: int) -> dict[str, Any]:
        """Return what this server knows: `version` of its shard map (0 if it has no job), `has_handshake` (whether
        there was a handshake since the process started), `fencing_token` (the newest) and the `release` of Satrap. If
        the version is higher than `than`, also the `shard_map`, the `job` and its `state`: `attempt`, `restored`
        (whether a restore started that attempt), `latest_step`, and for each table `versions`, `expire_before` and
        `lrs`. Ignores the origin."""

    def renew_lease(self, origin: Origin, process: str, where: str, seconds: float) -> None:
        """Note that the process trains in the origin's attempt, and hold its lease for `seconds` from now on."""

    def begin_attempt(self, origin: Origin) -> None:
        """Start the origin's attempt: calls of older attempts are refused from now on, and none of its updates is
        marked as applied."""

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
        """Return the rows, encoded as `wire` says.

        ticket: a number, unique to the trainer, that the update will name; 0 for none.
        first_epoch: whether to count sightings in tables that count only those of the first epoch."""

    def update(
        self,
        origin: Origin,
        ticket: int,
        ids: Ids,
        offsets: Offsets,
        gradients: Floats | None,
        lrs: list[float],
        barrier_size: int,
        coded: Coded | None = None,
    ) -> None:
        """Apply an optimizer step to the rows, once per origin.

        ticket: the number that a lookup named, in which case there are no ids; or 0.
        coded: the gradients, of a caller whose wire is "float16".
        barrier_size: how many trainers' updates form one step, or 0 if this one does alone. Parts are answered once the
            last part has arrived and all are applied as one update, with each id's gradients summed in rank order.
        """

    def drop(self, origin: Origin, tickets: list[int]) -> None:
        """Forget these tickets: no update will name them."""

    def read(self, origin: Origin, table: int, ids: Ids) -> tuple[Floats, Floats, Flags]:
        """Return the values, state and presence of the rows, never rounded."""

    def write(self, origin: Origin, table: int, ids: Ids, values: Floats, state: Floats, has_state: bool) -> None:
        """Insert or replace rows, as `Store.write` does. The origin's step is the number of the write, which counts the
        writes of its trainer: a server that has done this write, or a later one, ignores the call."""

    def rows_with(self, origin: Origin, table: int, ids: Ids) -> Ids:
        """Return how many rows each of this server's buckets would have with rows of these ids, each given once; 0 for
        a bucket of another server."""

    def bucket_ids(self, origin: Origin, table: int, bucket: int) -> Ids:
        """Return the ids of the rows of one of this server's buckets, numbered within the table."""

    def stats(self, origin: Origin, table: int) -> dict[str, int]:
        """Return the counters of a table on this server, as `Store.stats` does."""

    def version(self, origin: Origin, table: int) -> int:
        """Return the version of a table on this server, as `Store.version` does."""

    def versions(self, origin: Origin) -> list[int]:
        """Return the version of each table, as `version` does of one."""

    def take_cut(
        self, origin: Origin, cut: int, tables: list[int], versions: list[int], since: list[int] | None, memory: int
    ) -> bool:
        """Take the cut of these tables, each at its version, to be written by `write_cut` or released. Calls that come
        later change nothing of what will be written. Waits while another cut is being written. MovedError while buckets
        migrate here; no bucket will until the cut is written. ChangesError if the server has a version already. A cut
        that is not written within a minute is given up.

        cut: a random number that identifies it: a call with the same number is a duplicate.
        since: for each table the version at which changes would start. Returns whether they are all known.
        memory: most bytes of old rows; beyond it calls that change rows wait for `write_cut`."""

    def write_cut(
        self, origin: Origin, cut: int, folders: list[str], is_full: bool, is_beside: bool
    ) -> tuple[list[int], list[str]]:
        """Write this server's part of each table of the cut into a subfolder of its folder, which all machines share or
        which is a URL, in full or the changes; return how many rows each had here, and the ids of the snapshots. A
        duplicate waits for the same result. ChangesError if the server no longer has the cut.

        is_beside: trainers train meanwhile."""

    def release_cut(self, origin: Origin, cut: int) -> None:
        """Release the cut without writing it."""

    def require_permitted(self, origin: Origin, folder: str) -> None:
        """Raise ConfigError unless the server may write checkpoints below the folder; and if it is a URL, SnapshotError
        within seconds unless the server can write, read, list and delete objects there."""

    def verify(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> None:
        """Raise unless `restore` could fill this server's buckets from these folders. Reads what they need of them,
        and keeps it open for `restore`; changes nothing.

        checksums: `checksum_of` each folder, as the trainer sees it."""

    def restore(self, origin: Origin, folders: list[list[str]], checksums: list[list[int]]) -> bool:
        """Start the origin's attempt with new tables: empty ones, or for each table this server's buckets from a full
        snapshot and the changes after it, saved by any number of servers. Returns what `TableGroup.restore` does."""

    def set_lr(self, origin: Origin, table: int, lr: float) -> None:
        """Set the learning rate that is saved with a table."""

    def check(self, origin: Origin, table: int) -> None:
        """Check the table's invariants; AssertionError if one is broken."""

    def status(self, origin: Origin) -> dict[str, Any]:
        """Return the server's state, which `satrap.server.status` describes. Changes nothing, waits for no other
        call, and needs no job, attempt or shard map."""

    # -- calls of `satrap.server.migration.coordinator`. Buckets are numbered over all tables. `migration` is a random
    # number that identifies one run of the migration's steps. The origin's step is the coordinator's fencing token:
    # once a server has seen a newer token, it refuses all calls, hello included, that would change something under an
    # older one.

    def take_fencing_token(self, origin: Origin, holder: int) -> None:
        """Take the origin's step as the newest fencing token, which the coordinator of that random number holds.
        Returns once no call under an older token is running."""

    def freeze(self, origin: Origin, migration: int, buckets: Numbers) -> None:
        """Refuse calls that would change these buckets (MovedError) until they have left or another migration starts.
        Returns once no such call is running. The origin names the shard map."""

    def export_rows(
        self, origin: Origin, buckets: Numbers, table: int, begin: int
    ) -> tuple[Ids, Numbers, Coded, Floats, Ids, Numbers, Numbers, int]:
        """Return rows of a table from buckets that are frozen or were handed over: as many as fit into an answer, from
        row number `begin` on, and the number of all rows. The answer holds ids, steps, values as bytes, state; with the
        last rows also the ids, steps and counts of the sightings."""

    def export_metadata(self, origin: Origin, buckets: Numbers) -> tuple[Numbers, Ids, Ids, Numbers]:
        """Return the metadata of buckets that were handed over: the trainers and, for each, its windows; the counters;
        and pairs of a trainer and its oldest open step."""

    def expect_buckets(self, origin: Origin, migration: int, buckets: Numbers, state: dict[str, Any]) -> None:
        """Prepare to receive these buckets from another server, and discard rows of them that this server has.

        state: the sending server's attempt, latest step and table versions, which this server adopts."""

    def import_rows(
        self,
        origin: Origin,
        migration: int,
        table: int,
        ids: Ids,
        steps: Numbers,
        values: Coded,
        state: Floats,
        sighted: Ids,
        sighted_at: Numbers,
        counts: Numbers,
    ) -> None:
        """Insert what `export_rows` returned."""

    def import_metadata(
        self, origin: Origin, migration: int, trainers: Numbers, windows: Ids, counters: Ids, oldest_open: Numbers
    ) -> None:
        """Insert what `export_metadata` returned, which completes the migration's buckets."""

    def install_map(self, origin: Origin, shard_map: dict[str, Any], server: int, migration: int) -> None:
        """Adopt the next shard map, in which this server has the number `server`, -1 for none. NotReadyError unless the
        outgoing buckets are frozen and the incoming ones complete, both by this `migration`."""

    def discard_buckets(self, origin: Origin) -> None:
        """Discard all buckets that other servers own, if the server is at the origin's shard map."""

    def progress(self, origin: Origin) -> dict[str, int]:
        """Return how far saves and restores in progress are: `done` of `total` (0: not known), and `bytes`."""

    def load(self, origin: Origin) -> dict[str, float]:
        """Return what `satrap.sharding.autoscaler` decides by: `rows`, `bytes` of the tables, `memory_bytes` that it
        may use, `work_seconds` of all calls since the process started, and `latest_step`."""
