"""The workload every contender of the store benchmark gets: batches of row numbers, their 64-bit ids, gradients.

A batch is 26 features x 4096 ids, one feature after another. `rows` are split evenly over the features; a feature draws
either uniformly or by a bounded Zipf(1.05) whose ranks are spread over its rows, so that hot rows are not neighbours.
Peers that index an array use the row numbers themselves; Satrap uses `hashed_ids` of them, a bijection onto scattered
64-bit ids, so that it truly hashes and every contender sees the same repetitions and the same number of distinct ids.

Batches are made by the driver before anything is timed and handed to the workers as `.npy` files in a folder it names.
Nothing here is timed and nothing depends on a framework: numpy only.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

NUM_FEATURES = 26
SAMPLES = 4096
BATCH_IDS = NUM_FEATURES * SAMPLES
ZIPF_EXPONENT = 1.05

Ids = npt.NDArray[np.uint64]
RowNumbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def rows_per_feature(rows: int) -> int:
    """How many rows one feature has."""
    return rows // NUM_FEATURES


def total_rows(rows: int) -> int:
    """The rows that really exist: `rows` without the remainder that does not divide over the features."""
    return NUM_FEATURES * rows_per_feature(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The features and samples of one of several processes; all of them where it is alone."""

    rank: int = 0
    size: int = 1

    @property
    def num_features(self) -> int:
        return NUM_FEATURES // self.size

    @property
    def num_ids(self) -> int:
        """Of a batch: its features, for all samples."""
        return self.num_features * SAMPLES

    @property
    def num_samples(self) -> int:
        return SAMPLES // self.size

    def own_rows(self, numbers: RowNumbers, rows: int) -> RowNumbers:
        """Of batches, the row numbers of its features, counted from the first of its own rows."""
        begin = self.rank * self.num_ids
        first = self.rank * self.num_features * rows_per_feature(rows)
        return np.ascontiguousarray(numbers[:, begin : begin + self.num_ids] - first)

    def own_samples(self, numbers: Floats) -> Floats:
        """Of [batches, samples, ...], its samples."""
        begin = self.rank * self.num_samples
        return np.ascontiguousarray(numbers[:, begin : begin + self.num_samples])

    def gradients(self, dim: int) -> Floats:
        """Its part of `gradients`."""
        return gradients(dim)[self.rank * self.num_ids :][: self.num_ids]

    def sample_gradients(self, dim: int) -> Floats:
        """`gradients` as its samples have them, [samples, 26 * dim], times the ranks, which a mean over all undoes."""
        of_all = gradients(dim).reshape(NUM_FEATURES, SAMPLES, dim)[:, self.rank * self.num_samples :]
        own = of_all[:, : self.num_samples].swapaxes(0, 1).reshape(self.num_samples, NUM_FEATURES * dim)
        return np.asarray(own * np.float32(self.size), np.float32)


WHOLE = Share()


def hashed_ids(row_numbers: RowNumbers) -> Ids:
    """A different 64-bit id for every row number: odd multipliers and xor-shifts are each invertible mod 2^64."""
    x = row_numbers.astype(np.uint64) + np.uint64(1)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(29)
    return x


def gradients(dim: int) -> Floats:
    """One gradient for every id of a batch, about 1e-4; the same array serves every step of every contender."""
    return np.random.default_rng(11).uniform(0.5e-4, 1.5e-4, (BATCH_IDS, dim)).astype(np.float32)


def row_numbers(rows: int, distribution: str, num_steps: int, part: int) -> RowNumbers:
    """`num_steps` batches, int64[num_steps, BATCH_IDS]; another `part` draws other batches from the same popularity."""
    count = rows_per_feature(rows)
    rng = np.random.default_rng([rows, part, 1 if distribution == "zipf" else 0])
    shape = (num_steps, NUM_FEATURES, SAMPLES)
    if distribution == "uniform":
        local = rng.integers(0, count, shape)
    elif distribution == "zipf":
        mass = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
        ranks = np.minimum(np.searchsorted(mass, rng.random(shape) * mass[-1]), count - 1)
        shifts = np.random.default_rng(rows).integers(0, count, NUM_FEATURES)  # the same hot rows in every part
        local = (ranks * _coprime_stride(count) + shifts[None, :, None]) % count
    else:
        raise ValueError(f"unknown distribution {distribution!r}, wanted 'uniform' or 'zipf'")
    first = np.arange(NUM_FEATURES, dtype=np.int64) * count
    return np.ascontiguousarray((local + first[None, :, None]).reshape(num_steps, BATCH_IDS), dtype=np.int64)


def _coprime_stride(count: int) -> int:
    stride = max(1, int(count * 0.6180339887))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride


def batch_file(folder: Path, rows: int, distribution: str, num_steps: int, part: int) -> Path:
    """The `.npy` file with these batches in `folder`, made if it is not there; complete whenever it is visible."""
    path = folder / f"rows{rows}-{distribution}-steps{num_steps}-part{part}.npy"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        with unfinished.open("wb") as file:
            np.save(file, row_numbers(rows, distribution, num_steps, part))
        unfinished.replace(path)
    return path
