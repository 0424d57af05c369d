"""The form of pooled rows, sequences and their gradients between a worker process and its trainer: float32 as they are,
or scaled fp16 (core/kernels/fp16_codec.hpp) with an exponent for each sample's part of a feature.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.features import Features
from satrap.errors import InputError
from satrap.server.protocol import Coded, Floats


class PooledCodec:
    """Encodes what crosses between a worker process and its trainer. `flat` holds a block [batch_size, total_dim], then
    each sequence [batch_size, max_length, dim], as far as they are present."""

    def __init__(self, features: Features, split: _core.Split, wire: str) -> None:
        """split: encodes and decodes. wire: "float32" or "float16"."""
        self._split, self.is_coded = split, wire == "float16"
        self._pooled = _runs_of(features.pooled.values())
        self._sequences = [
            (feature.table.dim, feature.max_length) for feature in features.values() if feature.max_length is not None
        ]
        self._layout = lru_cache(maxsize=8)(self._runs)

    def encode(self, flat: Floats, batch_size: int, present: Sequence[bool]) -> tuple[Floats | None, Coded | None]:
        """Return the floats in one of the two forms; the other one is None.

        present: whether the block, and each sequence, is in `flat`."""
        if not self.is_coded:
            return flat, None
        dims, offsets = self._layout(batch_size, tuple(present))
        return None, np.asarray(self._split.encode_runs(dims, offsets, flat))

    def decode(self, flat: Floats | None, coded: Coded | None, batch_size: int, present: Sequence[bool]) -> Floats:
        """Return the floats, from whichever form was received."""
        if (flat is None) == (coded is None):
            raise InputError("expected rows or gradients in one of the two forms, found both or none")
        if coded is None:
            assert flat is not None
            return flat
        dims, offsets = self._layout(batch_size, tuple(present))
        return np.asarray(self._split.decode_runs(dims, offsets, coded))

    def _runs(self, batch_size: int, present: tuple[bool, ...]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return runs of rows of one dim: their dims, and where the rows of each begin, and where the last ones end."""
        if len(present) != 1 + len(self._sequences):
            raise InputError(f"found {len(present)} parts; expected a block and {len(self._sequences)} sequences")
        dims, counts = (list(each) for each in zip(*self._pooled, strict=True)) if self._pooled else ([], [])
        if not present[0]:
            dims, counts = [], []
        elif len(dims) == 1:
            counts = [counts[0] * batch_size]
        else:
            dims, counts = dims * batch_size, counts * batch_size
        for (dim, max_length), is_present in zip(self._sequences, present[1:], strict=True):
            dims += [dim] * is_present
            counts += [batch_size * max_length] * is_present
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return np.array(dims, np.uint32), offsets


def _runs_of(dims: Iterable[int]) -> list[tuple[int, int]]:
    """Return neighbours of one dim as (dim, number)."""
    found: list[tuple[int, int]] = []
    for dim in dims:
        if found and found[-1][0] == dim:
            found[-1] = dim, found[-1][1] + 1
        else:
            found.append((dim, 1))
    return found
