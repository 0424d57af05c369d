"""Orders of blocks and samples: pure functions of numbers, the same on every machine and with any NumPy."""

import numpy as np
from numpy.typing import NDArray

from satrap.data.hashing import hash_integers


def permutation(n: int, *key: int) -> NDArray[np.int64]:
    """Return the numbers 0 to n - 1 in an order that only `key` decides: by their hashes, all of which differ."""
    mixed = np.zeros(1, np.uint64)
    for word in key:
        mixed = hash_integers(mixed ^ np.uint64(word % 2**64)) + np.uint64(1)
    return np.argsort(hash_integers(np.arange(n, dtype=np.uint64) + mixed)).astype(np.int64, copy=False)
