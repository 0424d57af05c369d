"""The buckets of a table that a process owns, as the buckets of a snapshot that was saved with another number of them.

Pure. A bucket is a range of hashes, and numbers of buckets are powers of two: so a bucket of the one lies within a
bucket of the other, or holds several.
"""

import numpy as np
from numpy.typing import NDArray

from satrap._core import bucket_of

_Flags = NDArray[np.bool_]


class OwnedBuckets:
    """Which lines of a snapshot a process needs."""

    def __init__(self, owned: _Flags | None, num_buckets: int) -> None:
        """owned: for each bucket of the table, whether the process owns it; None: all. num_buckets: of the snapshot."""
        self._owned = owned
        self.some: _Flags = np.full(num_buckets, True) if owned is None else _folded(owned, num_buckets, np.logical_or)
        """For each bucket of the snapshot, whether the process owns some of it."""
        self._whole = self.some if owned is None else _folded(owned, num_buckets, np.logical_and)

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
        held: _Flags = self._owned[np.asarray(bucket_of(ids, len(self._owned)))]
        return held


def _folded(owned: _Flags, num_buckets: int, fold: np.ufunc) -> _Flags:
    if len(owned) <= num_buckets:
        return np.repeat(owned, num_buckets // len(owned))
    folded: _Flags = fold.reduce(owned.reshape(num_buckets, -1), axis=1)
    return folded
