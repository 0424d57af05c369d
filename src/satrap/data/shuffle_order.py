"""Orders of blocks and samples: pure functions of numbers, the same on every machine and with any NumPy.

`legacy_turns` and `legacy_share` split blocks over ranks as older releases did; their trainers did not all end at the
same step. They finish an epoch that such a release started; `satrap.data.rank_split` splits every other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from satrap.data.hashing import hash_integers


class LegacyTurn(NamedTuple):
    """A block that a rank reads in an epoch that an older release started."""

    block: int
    """The block's number in the source."""
    is_shared: bool
    """Whether every rank reads the block and takes its share."""


def legacy_turns(order: Sequence[int], *, rank: int, world_size: int) -> list[LegacyTurn]:
    """Return what one rank reads in one epoch, in order."""
    num_assigned = len(order) - len(order) % world_size
    own = [LegacyTurn(block, False) for block in order[rank:num_assigned:world_size]]
    return own + [LegacyTurn(block, True) for block in order[num_assigned:]]


def legacy_share(num_samples: int, number: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's samples (begin, end) of chunk `number` of a shared block; the longer shares rotate."""
    part = (rank + number) % world_size
    return num_samples * part // world_size, num_samples * (part + 1) // world_size


def permutation(n: int, *key: int) -> NDArray[np.int64]:
    """Return the numbers 0 to n - 1 in an order that only `key` decides: by their hashes, all of which differ."""
    mixed = np.zeros(1, np.uint64)
    for each in key:
        mixed = hash_integers(mixed ^ np.uint64(each % 2**64)) + np.uint64(1)
    return np.argsort(hash_integers(np.arange(n, dtype=np.uint64) + mixed)).astype(np.int64, copy=False)
