"""The buckets of a table that a process owns, as the buckets of a snapshot that was saved with another number of them.

Pure. A bucket is a range of hashes, and numbers of buckets are powers of two: so a bucket of the one lies within a
bucket of the other, or holds several. If only one of the two is direct (`Table.num_rows`), each bucket of the one has
ids of all buckets of the other.
"""

import numpy as np
from numpy.typing import NDArray

from satrap._core import bucket_of

_Flags = NDArray[np.bool_]


class OwnedBuckets:
    """Which lines of a snapshot a process needs."""

    def __init__(self, owned: _Flags | None, num_buckets: int, direct: bool = False, was_direct: bool = False) -> None:
        """owned: for each bucket of the table, whether the process owns it; None: all. num_buckets: of the snapshot.
        direct, was_direct: whether the table is, and whether the snapshot's was."""
        self._owned, self._direct = owned, direct
        if owned is not None and direct != was_direct:
            some, whole = np.full(num_buckets, owned.any()), np.full(num_buckets, owned.all())
        elif owned is not None:
            some, whole = _folded(owned, num_buckets, np.logical_or), _folded(owned, num_buckets, np.logical_and)
        else:
            some = whole = np.full(num_buckets, True)
        self.some: _Flags = some
        """For each bucket of the snapshot, whether the process owns some of it."""
        self._whole: _Flags = whole

    @property
    def are_all(self) -> bool:
        """Whether the process needs every line."""
        return self._owned is None

    def are_whole(self, begin: int, end: int) -> bool:
        """Return whether the process owns all of these buckets of the snapshot."""
        return bool(self._whole[begin:end].all())

    def hold(self, ids: NDArray[np.uint64]) -> _Flags:
        """Return for each id whether the process owns its bucket."""
        if self._owned is None:
            return np.full(len(ids), True)
        held: _Flags = self._owned[np.asarray(bucket_of(ids, len(self._owned), self._direct))]
        return held


def _folded(owned: _Flags, num_buckets: int, fold: np.ufunc) -> _Flags:
    if len(owned) <= num_buckets:
        return np.repeat(owned, num_buckets // len(owned))
    folded: _Flags = fold.reduce(owned.reshape(num_buckets, -1), axis=1)
    return folded
