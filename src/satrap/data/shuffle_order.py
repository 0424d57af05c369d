"""Who reads what, and in which order: pure functions of numbers, the same on every machine and with any NumPy.

`turns` and `share` deal blocks out as older releases did, with whose order the trainers did not all end at the same
step. They finish an epoch that was begun so; every other is dealt out by `satrap.data.rank_split`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from satrap.data.hashing import hash_integers


class Turn(NamedTuple):
    """A block that a rank reads."""

    block: int
    """Its number in the source."""
    shared: bool
    """Every rank reads it and takes its share."""


def turns(order: Sequence[int], *, rank: int, world: int) -> list[Turn]:
    """What one rank reads in one epoch, in order."""
    dealt = len(order) - len(order) % world
    own = [Turn(block, False) for block in order[rank:dealt:world]]
    return own + [Turn(block, True) for block in order[dealt:]]


def share(num_samples: int, number: int, rank: int, world: int) -> tuple[int, int]:
    """A rank's samples, first and end, of piece `number` of a shared block. Who takes the longer shares rotates."""
    part = (rank + number) % world
    return num_samples * part // world, num_samples * (part + 1) // world


def permutation(n: int, *key: int) -> NDArray[np.int64]:
    """The numbers 0 to n - 1 in an order that only `key` decides: by their hashes, of which no two are equal."""
    mixed = np.zeros(1, np.uint64)
    for each in key:
        mixed = hash_integers(mixed ^ np.uint64(each % 2**64)) + np.uint64(1)
    return np.argsort(hash_integers(np.arange(n, dtype=np.uint64) + mixed)).astype(np.int64, copy=False)
