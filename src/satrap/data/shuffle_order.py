"""Orders of blocks and samples: pure functions of numbers, the same on every machine and with any NumPy."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from satrap.data.hashing import hash_integers


def permutation(n: int, *key: int) -> NDArray[np.int64]:
    """Return the numbers 0 to n - 1 in an order that only `key` decides: by their hashes, all of which differ."""
    hashes = hash_integers(np.arange(n, dtype=np.uint64) + mixed(key))
    return np.argsort(hashes).astype(np.int64, copy=False)


def mixed(key: Iterable[int]) -> NDArray[np.uint64]:
    """Return one number for a key, uint64 [1]."""
    number = np.zeros(1, np.uint64)
    for word in key:
        number = hash_integers(number ^ np.uint64(word % 2**64)) + np.uint64(1)
    return number
