"""Satrap's native table; satrap.Store is the interface that users call."""

from collections.abc import Sequence
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray


def simd_paths() -> list[str]:
    """The SIMD paths of this machine, best first."""

WINDOW_STEPS: int = 32

def borrow_threads(openmp: str | None) -> None:
    """
    Runs calls of this thread on the threads of the OpenMP library at this path, which must be loaded; None: on the core's threads again.
    """

def crc32c(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], crc: int = 0) -> int:
    """Returns the CRC-32C of a byte buffer, chained from `crc`."""

def bucket_of(ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_buckets: int, direct: bool = False) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C')]:
    """Returns the bucket of each id. direct: in a table with num_rows."""

def hash_order(ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], direct: bool = False) -> int:
    """
    Returns how many of the first ids are in rising order of their hashes, none twice.
    """

def hash_integers(values: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C')]:
    """XXH64 (seed 0) of each integer's 8 bytes, the lowest first."""

@overload
def hash_texts(offsets: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C')]: ...

@overload
def hash_texts(offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C')]:
    """XXH64 (seed 0) of each text: data[offsets[i]:offsets[i + 1]]."""

class TableConfig:
    """A table's configuration in the core."""

    def __init__(self, table: dict[str, Any], frame_pool: int | None = None, frozen_ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None:
        """
        table: what satrap.Table.to_dict() returns, with its num_buckets, and a range of frozen ids as the first and the last one. frame_pool: of rows on a device. frozen_ids: a set of frozen ids, which rise.
        """

    @property
    def state_dim(self) -> int:
        """Number of floats of optimizer state in a row."""

class Ticket:
    """
    A looked-up batch that waits for its gradients; pass it to update() once.
    """

    @property
    def n(self) -> int: ...

    @property
    def batch_size(self) -> int:
        """The number of samples of a batch of bags; else 0."""

    @property
    def sequence_floats(self) -> list[int]:
        """The number of floats of each sequence of a batch of bags."""

    def only_of(self, table: int) -> bool:
        """Whether all ids are that table's."""

    @property
    def used(self) -> bool: ...

class Engine:
    """Many tables in one memory; satrap.Store is its interface to one table."""

    def __init__(self, tables: Sequence[TableConfig], seed: int, num_threads: int, simd: str = 'auto', shared_path: str = '', shared_config: bytes = ..., complete: bool = True) -> None: ...

    @staticmethod
    def attach(path: str, tables: Sequence[TableConfig], seed: int, num_threads: int, simd: str = 'auto') -> Engine: ...

    @staticmethod
    def shared_unfinished(path: str) -> bool: ...

    @staticmethod
    def shared_config(path: str) -> bytes: ...

    def set_complete(self, complete: bool) -> None:
        """
        False: the shared-memory file cannot be attached until this is True again.
        """

    @property
    def simd(self) -> str: ...

    @property
    def num_threads(self) -> int: ...

    def empty(self, rows: int, dim: int) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C')]:
        """
        Returns an uninitialised float32 block, 64-byte aligned, recycled when it is freed.
        """

    def lookup(self, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], step: int, oldest_open: int, train: bool, out: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')], ticket: bool, first_epoch: bool = True) -> Ticket: ...

    def num_floats(self, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_ids: int) -> int:
        """The number of floats in the rows of so many ids."""

    def prepare(self, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Ticket: ...

    def update(self, ticket: Ticket, gradients: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)], step: int, lrs: Sequence[float], trainer: int | None = None) -> None:
        """
        With a trainer: skips buckets that have already applied its update of this step.
        """

    def read(self, table: int, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')], present: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def lr(self, table: int) -> float: ...

    def set_lr(self, table: int, lr: float) -> None: ...

    def state_dim(self, table: int) -> int: ...

    def num_buckets(self, table: int) -> int: ...

    def num_rows(self, table: int) -> int: ...

    def stats(self, table: int) -> dict[str, int]: ...

    def check(self, table: int) -> None: ...

    @property
    def latest_step(self) -> int: ...

    @property
    def attempt(self) -> int:
        """The attempt whose processes may call; 0 before the first."""

    def finished(self, trainer: int, step: int) -> bool:
        """
        Whether finish() was called for this trainer and step, in this attempt.
        """

    def finish(self, trainer: int, step: int) -> None:
        """
        Records that every bucket has applied this update, for as long as the rows live.
        """

    def begin_attempt(self, attempt: int) -> None:
        """
        Starts an attempt in which no update counts as applied. No update may run.
        """

    def version(self, table: int) -> int: ...

    def begin_version(self, table: int) -> int: ...

    def export_rows(self, table: int, bucket_begin: int, bucket_end: int, since: int, others: bool = False) -> dict[str, NDArray[Any]]: ...

    def export_removed(self, table: int, bucket_begin: int, bucket_end: int, since: int) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C')]: ...

    def export_sightings(self, table: int, bucket_begin: int, bucket_end: int, others: bool = False) -> dict[str, NDArray[Any]]: ...

    def begin_cut(self, tables: Sequence[int], limit: int, patience: float) -> list[dict[str, Any]]:
        """Notes how the tables are now, for export_cut; see engine.hpp."""

    def export_cut(self, table: int, bucket_begin: int, bucket_end: int, since: int) -> dict[str, Any]: ...

    def export_cut_sightings(self, table: int, bucket_begin: int, bucket_end: int) -> dict[str, NDArray[Any]]: ...

    def end_cut(self, table: int) -> None: ...

    def cut_figures(self) -> dict[str, Any]: ...

    def removed_since(self, table: int) -> int: ...

    def rows_with(self, table: int, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C')]:
        """
        Returns how many rows each bucket of this engine would have with rows of these ids, each given once.
        """

    def import_rows(self, table: int, id: NDArray[numpy.uint64], step: NDArray[numpy.uint32], values: NDArray[Any], state: NDArray[numpy.float32]) -> None: ...

    def import_removed(self, table: int, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def import_sightings(self, table: int, id: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], step: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], count: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], clear: bool) -> None: ...

    def expire_before(self, table: int) -> int: ...

    def restore(self, table: int, version: int, latest_step: int, expire_before: int, lr: float) -> None: ...

    def encode_rows(self, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """
        Encodes rows, table by table, as scaled fp16: a message of 2 bytes for each value and 1 for each row.
        """

    def decode_rows(self, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], message: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]:
        """Decodes a message of encode_rows."""

    def lookup_bags(self, bags: Bags, values: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, weights: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None, batch_size: int, step: int, oldest_open: int, train: bool, block: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')], sequences: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]], first_epoch: bool = True) -> Ticket: ...

    def bag_ticket(self, bags: Bags, values: NDArray[numpy.uint64], offsets: NDArray[numpy.int64] | None, weights: NDArray[numpy.float32] | None, batch_size: int) -> Ticket:
        """Returns a ticket for a batch whose rows other calls have found."""

    def update_bags(self, tickets: Sequence[Ticket], gradients: Sequence[tuple[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None, Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None]]], step: int, lrs: Sequence[tuple[int, float]], scale: float) -> None: ...

    def drop(self, ticket: Ticket) -> None:
        """Releases a ticket that will not be updated."""

    def take_moves(self) -> dict[str, NDArray[Any]]:
        """
        Returns the copies between frames and slots at home that the rows' places require.
        """

    def set_device_frames(self, pool: int, frames: int) -> None:
        """Limits the frames of a pool; the other rows are at home."""

    def home_used(self, pool: int) -> int:
        """How many slots the memory at home must have."""

    def home_free(self, pool: int) -> int: ...

    def frames_used(self, pool: int) -> int:
        """How many frames the device's memory must have."""

    def frames_free(self, pool: int) -> int: ...

    def set_frame_limit(self, pool: int, limit: int) -> None: ...

    def share_buckets(self, table: int) -> None:
        """
        Lets this engine look up and update the rows of all buckets of a table.
        """

    def shares_buckets(self, table: int) -> bool: ...

    def lookup_id_frames(self, ids: NDArray[numpy.uint64], offsets: NDArray[numpy.int64], step: int, oldest_open: int, train: bool, frames: NDArray[numpy.int32], first_epoch: bool = True, want_ticket: bool = False) -> dict[str, Any]:
        """Finds the frames of ids in flat arrays, table by table."""

    def order_id_frames(self, ticket: Ticket, places: NDArray[numpy.int32]) -> dict[str, Any]:
        """Returns what update_id_frames would, ahead of it."""

    def update_id_frames(self, ids: NDArray[numpy.uint64], offsets: NDArray[numpy.int64], places: NDArray[numpy.int32], step: int, filter: bool) -> dict[str, Any]:
        """Does all of an update of ids in flat arrays but the optimizer."""

    def check_id_gradients(self, ids: NDArray[numpy.uint64], offsets: NDArray[numpy.int64], gradients: NDArray[numpy.float32]) -> bool:
        """
        Raises NonFiniteError as an update would. Returns whether gradients may have to be skipped.
        """

    def lookup_frames(self, bags: Bags, values: NDArray[numpy.uint64], offsets: NDArray[numpy.int64] | None, weights: NDArray[numpy.float32] | None, batch_size: int, step: int, oldest_open: int, train: bool, frames: NDArray[numpy.int32], first_epoch: bool = True) -> dict[str, Any]: ...

    def take_inserted(self) -> dict[str, NDArray[Any]]:
        """Returns the rows whose frames have no values yet."""

    def update_frames(self, tickets: Sequence[Ticket], given: Sequence[tuple[bool, Sequence[bool]]], step: int, filter: bool) -> dict[str, Any]: ...

    def order_frames(self, ticket: Ticket) -> dict[str, Any]:
        """Returns the runs of an update of a whole batch, ahead of it."""

    def update_ordered_frames(self, ticket: Ticket, step: int, filter: bool) -> dict[str, Any] | None:
        """
        Returns the frames of an update that was ordered ahead; None: those that were found then.
        """

    def sum_bound(self, tickets: Sequence[Ticket]) -> float:
        """Returns how many times the largest gradient a sum can be at most."""

    def settle_frames(self, table: int, ids: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], skipped: int, step: int) -> None:
        """
        Stamps and counts the rows of a table whose gradients were not all skipped.
        """

    def check_gradients(self, tickets: Sequence[Ticket], gradients: Sequence[tuple[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None, Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None]]], scale: float) -> bool:
        """
        Raises NonFiniteError as update_bags would. Returns whether gradients may have to be skipped.
        """

    def initial_rows(self, table: int, ids: NDArray[numpy.uint64], values: NDArray[Any], state: NDArray[numpy.float32]) -> None: ...

    def read_frames(self, table: int, ids: NDArray[numpy.uint64]) -> NDArray[numpy.int32]:
        """
        Returns the frame of each id's row; -1: it has none; below: it is at home.
        """

    def import_frames(self, table: int, ids: NDArray[numpy.uint64], steps: NDArray[numpy.uint32]) -> NDArray[numpy.int32]:
        """
        Inserts or replaces rows of a snapshot; returns their frames. If one has no room, inserts none.
        """

    def check_frames(self) -> None:
        """Raises AssertionError unless each frame is free or of one row."""

    def set_owners(self, owners: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], number: int) -> None:
        """
        Sets the owner of every bucket; this engine is server `number`. Lookups and updates of other servers' buckets are refused then.
        """

    def freeze(self, buckets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], frozen: bool) -> None:
        """Sets whether calls that would change these are refused."""

    def export_windows(self, buckets: NDArray[numpy.uint32]) -> tuple[list[int], NDArray[numpy.uint64]]:
        """Returns the trainers, and each one's windows of the buckets."""

    def import_windows(self, buckets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], trainers: Sequence[int], words: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def export_counters(self, buckets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C')]: ...

    def import_counters(self, buckets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], counters: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def hand_over(self, buckets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        Called before they leave: records what is finished here at each. No update may run.
        """

    def take_over(self, buckets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], first: bool) -> None:
        """
        Called after they arrived: adopts what is finished at each. No update may run.
        """

    def forget(self, buckets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Empties the buckets."""

    def reach_step(self, step: int) -> None:
        """Raises the latest step to at least this one."""

    def reach_table(self, table: int, version: int, expire_before: int) -> None:
        """Raises the table's version and expire_before to at least these."""

    def note(self) -> bytes:
        """
        The last note of set_note, maybe by an earlier process; empty before the first.
        """

    def set_note(self, note: bytes) -> None:
        """
        Stores a note that lives as long as the rows; replaced as a whole, even if the process is killed.
        """

class Bags:
    """
    The features of an engine's tables, as satrap.config.features.Features declares them.
    """

    def __init__(self, engine: Engine, features: Sequence[tuple[str, int, str, bool, int, bool, int | None, bool]]) -> None: ...

    def made(self, ticket: Ticket) -> bool:
        """Returns whether the ticket is from a lookup of these bags."""

    @property
    def truncated(self) -> list[int]:
        """
        For each sequence the number of ids beyond its max_length, which were not looked up.
        """

class SplitTicket:
    """A batch whose unique ids are laid out for the servers."""

    @property
    def batch_size(self) -> int: ...

    @property
    def sequence_floats(self) -> list[int]: ...

    @property
    def used(self) -> bool: ...

    def ids(self, server: int) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', writable=False)]:
        """
        Ids of the server, table by table, and within a table bucket by bucket.
        """

    def offsets(self, server: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)]:
        """
        Where each table's ids begin in ids(server), and where the last one's end.
        """

    def num_floats(self, server: int) -> int:
        """Number of floats of the rows, or gradients, of ids(server)."""

    @property
    def num_servers(self) -> int: ...

class Sums:
    """What an update sends to each server: one gradient for each id."""

    def gradients(self, server: int) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', writable=False)]:
        """The gradients of ids(server), in their order."""

    @property
    def same_ids(self) -> bool:
        """Whether ids and servers are those of the one ticket's lookup."""

    @property
    def skipped(self) -> list[int]:
        """
        For each table the number of ids in bags whose gradients were not finite and left out.
        """

    def ids(self, server: int) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', writable=False)]:
        """
        Ids of the server, table by table, and within a table bucket by bucket.
        """

    def offsets(self, server: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)]:
        """
        Where each table's ids begin in ids(server), and where the last one's end.
        """

    def num_floats(self, server: int) -> int:
        """Number of floats of the rows, or gradients, of ids(server)."""

    @property
    def num_servers(self) -> int: ...

class SumRuns:
    """The ids that an update sends to each server; a device has the sums."""

    def ids(self, server: int) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', writable=False)]:
        """
        Ids of the server, table by table, and within a table bucket by bucket.
        """

    def offsets(self, server: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', writable=False)]:
        """
        Where each table's ids begin in ids(server), and where the last one's end.
        """

    def num_floats(self, server: int) -> int:
        """Number of floats of the rows, or gradients, of ids(server)."""

    @property
    def num_servers(self) -> int: ...

class Split:
    """
    Lookups and updates whose rows lie on servers: what Engine does with bags, less rows.
    """

    def __init__(self, tables: Sequence[TableConfig], features: Sequence[tuple[str, int, str, bool, int, bool, int | None, bool]], num_threads: int, simd: str = 'auto') -> None: ...

    @property
    def num_threads(self) -> int: ...

    @property
    def simd(self) -> str: ...

    @property
    def truncated(self) -> list[int]:
        """
        For each sequence the number of ids beyond its max_length, which were not looked up.
        """

    def empty(self, rows: int, dim: int) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C')]:
        """Returns an uninitialised block, like Engine.empty."""

    def lines(self, ticket: SplitTicket, groups: NDArray[numpy.uint32]) -> dict[str, Any]:
        """
        Returns the row of each id of a batch that a device pools, among the rows of its group of tables.
        """

    def order(self, ticket: SplitTicket, groups: NDArray[numpy.uint32]) -> dict[str, Any]:
        """
        Returns which gradients the sum of each id of the lookup consists of, ahead of the update.
        """

    def runs(self, tickets: Sequence[SplitTicket], given: Sequence[tuple[bool, Sequence[bool]]], owners: NDArray[numpy.uint32], num_servers: int, groups: NDArray[numpy.uint32]) -> tuple[SumRuns, dict[str, Any]]:
        """
        Returns which gradients each sum of `sums` consists of, for a device that computes them.
        """

    def fill(self, ticket: SplitTicket, rows: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]], block: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')], sequences: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]]) -> None:
        """
        Writes what Engine.lookup_bags writes, from rows as each server's flat lookup returns them.
        """

    def sums(self, tickets: Sequence[SplitTicket], gradients: Sequence[tuple[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None, Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None]]], scale: float, owners: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_servers: int) -> Sums:
        """Returns the sums that Engine.update_bags would apply to each id."""

    def drop(self, ticket: SplitTicket) -> None:
        """Releases a ticket that will not be updated."""

    def lookup(self, values: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, weights: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None, batch_size: int, owners: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_servers: int, with_indexes: bool = False, bags: Bags | None = None) -> SplitTicket: ...

    def bags(self, features: Sequence[tuple[str, int, str, bool, int, bool, int | None, bool]]) -> Bags:
        """
        Returns other features of the same tables, for lookups whose tickets an update may have beside others.
        """

    def reshard(self, ticket: SplitTicket, owners: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_servers: int) -> None:
        """Lays the ticket's ids out for other owners."""

    def reshard_sums(self, sums: Sums, owners: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_servers: int) -> Sums:
        """Returns the same sums for other owners."""

    def encode_rows(self, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """
        Encodes rows, table by table, as scaled fp16: a message of 2 bytes for each value and 1 for each row.
        """

    def decode_rows(self, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], message: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]:
        """Decodes a message of encode_rows."""

    def encode_runs(self, dims: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
        """
        Encodes rows as encode_rows does: run r has the rows offsets[r] to offsets[r + 1], of dim dims[r].
        """

    def decode_runs(self, dims: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], message: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]:
        """Decodes a message of encode_runs."""

class Samples:
    """Decoded samples of one block of a source."""

    def __init__(self, n: int, ids: Sequence[tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None]], dense: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, label: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None) -> None: ...

    def __len__(self) -> int: ...

    def count_ids(self, feature: int, padding: int | None) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C')]:
        """
        How many ids of the feature with this number each sample has, without those that are `padding`.
        """

def gather(parts: Sequence[tuple[Samples, int, int]], order: NDArray[numpy.int64]) -> tuple[NDArray[numpy.uint64], NDArray[numpy.int64] | None, NDArray[numpy.float32] | None, NDArray[numpy.float32] | None, NDArray[numpy.float32] | None]:
    """
    One batch: (values, offsets, weights, dense, label) of the samples `order` of the parts (samples, begin, end), which are numbered through.
    """

class FieldUse:
    """One use of a text file's column."""

    def __init__(self, kind: str, index: int) -> None: ...

    @property
    def absent(self) -> int:
        """A missing field: 0 reads as `missing`, 1 is refused, 2 drops its row."""

    @absent.setter
    def absent(self, arg: int, /) -> None: ...

    @property
    def missing(self) -> float: ...

    @missing.setter
    def missing(self, arg: float, /) -> None: ...

    @property
    def log1p(self) -> bool: ...

    @log1p.setter
    def log1p(self, arg: bool, /) -> None: ...

    @property
    def label_kind(self) -> int:
        """Which numbers a label may be: 0 any, 1 binary (0 or 1), 2 a count."""

    @label_kind.setter
    def label_kind(self, arg: int, /) -> None: ...

    @property
    def above(self) -> float | None: ...

    @above.setter
    def above(self, arg: float | None, /) -> None: ...

    @property
    def texts(self) -> list[tuple[str, float]]: ...

    @texts.setter
    def texts(self, arg: Sequence[tuple[str, float]], /) -> None: ...

    @property
    def other(self) -> float | None: ...

    @other.setter
    def other(self, arg: float | None, /) -> None: ...

    @property
    def separator(self) -> int: ...

    @separator.setter
    def separator(self, arg: int, /) -> None: ...

    @property
    def integer(self) -> bool: ...

    @integer.setter
    def integer(self, arg: bool, /) -> None: ...

    @property
    def hash(self) -> bool: ...

    @hash.setter
    def hash(self, arg: bool, /) -> None: ...

    @property
    def missing_id(self) -> int | None: ...

    @missing_id.setter
    def missing_id(self, arg: int | None, /) -> None: ...

class TextFormat:
    """The meaning of the fields of a delimited text file."""

    def __init__(self) -> None: ...

    @property
    def delimiter(self) -> str: ...

    @delimiter.setter
    def delimiter(self, arg: str, /) -> None: ...

    @property
    def quote(self) -> int: ...

    @quote.setter
    def quote(self, arg: int, /) -> None: ...

    @property
    def strip(self) -> bool: ...

    @strip.setter
    def strip(self, arg: bool, /) -> None: ...

    @property
    def quoted_newlines(self) -> bool: ...

    @quoted_newlines.setter
    def quoted_newlines(self, arg: bool, /) -> None: ...

    @property
    def missing(self) -> list[str]: ...

    @missing.setter
    def missing(self, arg: Sequence[str], /) -> None: ...

    @property
    def columns(self) -> list[list[FieldUse]]: ...

    @columns.setter
    def columns(self, arg: Sequence[Sequence[FieldUse]], /) -> None: ...

    @property
    def constants(self) -> list[str]: ...

    @constants.setter
    def constants(self, arg: Sequence[str], /) -> None: ...

    @property
    def num_dense(self) -> int: ...

    @num_dense.setter
    def num_dense(self, arg: int, /) -> None: ...

    @property
    def num_labels(self) -> int: ...

    @num_labels.setter
    def num_labels(self, arg: int, /) -> None: ...

    @property
    def num_features(self) -> int: ...

    @num_features.setter
    def num_features(self, arg: int, /) -> None: ...

    @property
    def num_texts(self) -> int: ...

    @num_texts.setter
    def num_texts(self, arg: int, /) -> None: ...

def parse_text(format: TextFormat, text: NDArray[numpy.uint8], most_bad: int) -> tuple[Samples, list[tuple[NDArray[numpy.int64], NDArray[numpy.uint8], NDArray[numpy.uint8]]], list[tuple[int, str, int, int, int, int, int]], int]:
    """
    Parses whole rows of text to (samples, text columns, bad rows, number of dropped rows).
    """

def count_lines(text: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Returns the number of newlines."""

def last_row_end(text: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], quote: int) -> int:
    """Returns where the last whole row of the text ends; 0 if none does."""

def count_rows(text: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], quote: int) -> int:
    """Returns the number of rows."""

def rows_within(text: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], quote: int, begin: int, end: int) -> tuple[int, int]:
    """Returns where the rows from `begin` to `end` begin and end."""

@overload
def parse_numbers(offsets: NDArray[numpy.int32], data: NDArray[numpy.uint8]) -> tuple[NDArray[numpy.float32], NDArray[numpy.bool_]]: ...

@overload
def parse_numbers(offsets: NDArray[numpy.int64], data: NDArray[numpy.uint8]) -> tuple[NDArray[numpy.float32], NDArray[numpy.bool_]]:
    """
    Parses each text data[offsets[i]:offsets[i + 1]] as a number: (numbers, NaN where empty or malformed; which are malformed).
    """

def log1p(values: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C')]:
    """ln(1 + max(x, 0)) of each, the same bits on every machine."""

def read_header(message: bytes) -> tuple[int, ...] | None:
    """
    Returns the fields of the header of a message of one frame, in their order; None unless header and sizes are in order.
    """

class MessageCodec:
    """Packs and unpacks messages of one frame with values of given types."""

    def __init__(self, types: list[tuple[Any, ...]], array_class: type, frombuffer: Any, scan: Any) -> None: ...

    def pack(self, kind: int, method: int, client: int, call: int, deadline_ms: int, origin: Any, values: tuple[Any, ...], first: int) -> bytearray | None:
        """
        Returns the message of the values from `first` on; None if it is large, or a value is unusual or wrong.
        """

    def unpack(self, message: bytes) -> list[Any] | None:
        """Returns the values of a message; None if anything is unusual or wrong."""

class Dots:
    """
    DLRM's interaction of a batch, on the CPU: the dot products of all pairs of vectors.
    """

    def __init__(self, num_threads: int, simd: str = 'auto') -> None: ...

    def forward(self, dim: int, first: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, block: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        Fills out: each sample's first vector, then the products of all pairs, row by row of the triangle.
        """

    def backward(self, dim: int, first: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, block: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], gradient: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], of_first: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None, of_block: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        Fills of_first and of_block with the gradients of first and block, given that of out.
        """
