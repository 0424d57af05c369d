"""Splits ids by the server that owns them, for calls that read or write single rows; batches use the core's `Split`.

Pure. Ids of all tables are one array, table after table, with the start of each table in `offsets`, as in calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.tables import Table


@dataclass(frozen=True, slots=True, eq=False)
class OwnedIds:
    """The ids of a call that one server owns."""

    ids: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    """Where each table's ids begin, and where the last one's end."""
    positions: NDArray[np.int64]
    """Where these ids are among all ids of the call, ascending."""


def split_by_owner(
    ids: NDArray[np.uint64], offsets: NDArray[np.int64], owners: NDArray[np.uint32], tables: Sequence[Table]
) -> dict[int, OwnedIds]:
    """Return the ids of each server that owns some, in their order. Without ids, server 0 gets none of them.

    owners: of every bucket, one table after the other.
    """
    owner = np.empty(len(ids), np.uint32)
    first_bucket = 0
    for begin, end, table in zip(offsets[:-1].tolist(), offsets[1:].tolist(), tables, strict=True):
        if begin < end:
            buckets = _core.bucket_of(ids[begin:end], table.resolved_num_buckets, table.is_direct)
            owner[begin:end] = owners[first_bucket:][buckets]
        first_bucket += table.resolved_num_buckets
    by_server = {}
    for server in np.unique(owner).tolist() or [0]:
        positions = np.flatnonzero(owner == server)
        by_server[server] = OwnedIds(ids[positions], np.searchsorted(positions, offsets), positions)
    return by_server
