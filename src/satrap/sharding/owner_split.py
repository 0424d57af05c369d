"""Splits ids by the server that owns them, for calls outside the road of a batch; the core's `Split` is for batches.

Pure. Ids of all tables are one array, table after table, with the start of each table in `offsets`, as in calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from satrap import _core


@dataclass(frozen=True, slots=True, eq=False)
class OwnedIds:
    """The ids of a call that one server owns."""

    ids: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    """Where each table's ids begin, and where the last one's end."""
    positions: NDArray[np.int64]
    """Where these ids are among all ids of the call, ascending."""


def split_by_owner(
    ids: NDArray[np.uint64], offsets: NDArray[np.int64], owners: NDArray[np.uint32], num_buckets: Sequence[int]
) -> dict[int, OwnedIds]:
    """Return the ids of each server that owns some, in their order. Without ids, server 0 gets none of them.

    owners: of every bucket, one table after the other. num_buckets: of each table.
    """
    owner = np.empty(len(ids), np.uint32)
    first_bucket = 0
    for begin, end, buckets in zip(offsets[:-1].tolist(), offsets[1:].tolist(), num_buckets, strict=True):
        if begin < end:
            owner[begin:end] = owners[first_bucket:][_core.bucket_of(ids[begin:end], buckets)]
        first_bucket += buckets
    found = {}
    for server in np.unique(owner).tolist() or [0]:
        positions = np.flatnonzero(owner == server)
        found[server] = OwnedIds(ids[positions], np.searchsorted(positions, offsets), positions)
    return found
