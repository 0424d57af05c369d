"""The batches of all benchmarks: row numbers, their 64-bit ids, dense numbers, labels, gradients.

A batch is 26 features x 4096 ids, one feature after another. `rows` are split evenly over the features; a feature draws
either uniformly or by a bounded Zipf(1.05) whose ranks are spread over its rows, so that hot rows are not neighbours.
Peers that index an array use the row numbers themselves; Satrap uses `hashed_ids` of them, a bijection onto scattered
64-bit ids, so that it really hashes and every contender sees the same repetitions and as many distinct ids.

Labels are drawn from a hidden weight of every row and every dense column, so that the loss of a contender falls if it
trains. Batches are created before anything is timed and passed to the workers as files. Nothing depends on a framework.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

DIMS = (16, 64)
NUM_FEATURES = 26
NUM_DENSE = 13
SAMPLES = 4096
BATCH_IDS = NUM_FEATURES * SAMPLES
ZIPF_EXPONENT = 1.05
BIAS = -1.0
ROW_WEIGHT = 0.35  # standard deviation
DENSE_WEIGHT = 0.2
SEED = 20
DENSE_LR = 0.02
BOTTOM = (512, 256)
TOPS = {"light": (256, 1), "heavy": (1024, 1024, 512, 256, 1)}
"""Widths of the DLRM's layers, but for the dim between bottom and top."""
STATES = {"sgd": 0, "rowwise": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2, "ftrl": 2}
"""How many numbers of state an optimizer has for each number of a row."""

Ids = npt.NDArray[np.uint64]
RowNumbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def rows_per_feature(rows: int) -> int:
    """Return the number of rows of one feature."""
    return rows // NUM_FEATURES


def total_rows(rows: int) -> int:
    """Return the rows that exist: `rows` without the remainder of the division by the features."""
    return NUM_FEATURES * rows_per_feature(rows)


def table_bytes(rows: int, dim: int, optimizer: str) -> int:
    """Return the bytes of values and state, and a tenth for everything beside them."""
    return int(1.1 * rows * (4 * dim * (1 + STATES[optimizer]) + 24))


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The features and samples of one rank; all of them if it is the only one."""

    rank: int = 0
    size: int = 1

    @property
    def num_features(self) -> int:
        return NUM_FEATURES // self.size

    @property
    def num_ids(self) -> int:
        """The ids of its features in a batch, for all samples."""
        return self.num_features * SAMPLES

    @property
    def num_samples(self) -> int:
        return SAMPLES // self.size

    def own_rows(self, numbers: RowNumbers, rows: int) -> RowNumbers:
        """Return the row numbers of its features in each batch, counted from the first of its rows."""
        begin = self.rank * self.num_ids
        first = self.rank * self.num_features * rows_per_feature(rows)
        return np.ascontiguousarray(numbers[:, begin : begin + self.num_ids] - first)

    def own_samples(self, numbers: Floats) -> Floats:
        """Return its samples of [batches, samples, ...]."""
        begin = self.rank * self.num_samples
        return np.ascontiguousarray(numbers[:, begin : begin + self.num_samples])

    def sample_gradients(self, dim: int) -> Floats:
        """Return `gradients` of its samples, [samples, 26 * dim], times the ranks, which a mean over all undoes."""
        by_feature = gradients(dim).reshape(NUM_FEATURES, SAMPLES, dim)[:, self.rank * self.num_samples :]
        own = by_feature[:, : self.num_samples].swapaxes(0, 1).reshape(self.num_samples, NUM_FEATURES * dim)
        return np.asarray(own * np.float32(self.size), np.float32)


WHOLE = Share()


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Batches of samples, one after another in every array."""

    rows: RowNumbers
    """[batches, 26 * 4096]: feature after feature, within each sample after sample; unique over the features."""
    dense: Floats
    """[batches, 4096, 13]."""
    labels: Floats
    """[batches, 4096], 0 or 1."""

    def __len__(self) -> int:
        return len(self.rows)


def hashed_ids(row_numbers: RowNumbers) -> Ids:
    """Return a different 64-bit id for every row number: odd multipliers and xor-shifts are invertible mod 2^64."""
    x = row_numbers.astype(np.uint64) + np.uint64(1)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(29)
    return x


def dense_ids(row_numbers: RowNumbers) -> Ids:
    """Return the row numbers as ids, for tables with `num_rows`."""
    return row_numbers.astype(np.uint64)


def gradients(dim: int) -> Floats:
    """Return one gradient for every id of a batch, about 1e-4; every step of every contender uses the same array."""
    return np.random.default_rng(11).uniform(0.5e-4, 1.5e-4, (BATCH_IDS, dim)).astype(np.float32)


def row_numbers(rows: int, distribution: str, num_steps: int, part: int, samples: int = SAMPLES) -> RowNumbers:
    """Draw int64[num_steps, 26 * samples]; another `part` draws other batches from the same popularity."""
    count = rows_per_feature(rows)
    rng = np.random.default_rng([rows, part, 1 if distribution == "zipf" else 0])
    shape = (num_steps, NUM_FEATURES, samples)
    if distribution == "uniform":
        local = rng.integers(0, count, shape)
    elif distribution == "zipf":
        mass = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -ZIPF_EXPONENT)
        ranks = np.minimum(np.searchsorted(mass, rng.random(shape) * mass[-1]), count - 1)
        shifts = np.random.default_rng(rows).integers(0, count, NUM_FEATURES)  # the same hot rows in every part
        local = (ranks * _coprime_stride(count) + shifts[None, :, None]) % count
    else:
        raise ValueError(f"expected the distribution 'uniform' or 'zipf', found {distribution!r}")
    first = np.arange(NUM_FEATURES, dtype=np.int64) * count
    return np.ascontiguousarray((local + first[None, :, None]).reshape(num_steps, -1), dtype=np.int64)


def _coprime_stride(count: int) -> int:
    stride = max(1, int(count * 0.6180339887))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride


def make_batches(rows: int, num_steps: int, part: int) -> Batches:
    """Draw samples; another `part` draws others from the same popularity and the same hidden weights."""
    numbers = row_numbers(rows, "zipf", num_steps, part)
    rng = np.random.default_rng([SEED, rows, part])
    dense = rng.standard_normal((num_steps, SAMPLES, NUM_DENSE), np.float32)
    weights = np.random.default_rng(SEED).normal(0.0, DENSE_WEIGHT, NUM_DENSE).astype(np.float32)
    logits = BIAS + row_weights(numbers).reshape(num_steps, NUM_FEATURES, SAMPLES).sum(axis=1) + dense @ weights
    labels = rng.random(logits.shape) < 1.0 / (1.0 + np.exp(-logits))
    return Batches(rows=numbers, dense=dense, labels=labels.astype(np.float32))


def row_weights(numbers: RowNumbers) -> Floats:
    """Return the hidden weight of each row, a function of its number alone, uniform around 0."""
    uniform = (hashed_ids(numbers) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    width = np.float32(ROW_WEIGHT * 12.0**0.5)
    return np.asarray((uniform - np.float32(0.5)) * width, np.float32)


def ids_file(folder: Path, rows: int, distribution: str, num_steps: int, part: int) -> Path:
    """Return the file of these row numbers in `folder`, written if it does not exist."""

    def write(file: BinaryIO) -> None:
        np.save(file, row_numbers(rows, distribution, num_steps, part))

    return _written(folder / f"rows{rows}-{distribution}-steps{num_steps}-part{part}.npy", write)


def samples_file(folder: Path, rows: int, num_steps: int, part: int) -> Path:
    """Return the file of these samples in `folder`, written if it does not exist."""

    def write(file: BinaryIO) -> None:
        batches = make_batches(rows, num_steps, part)
        np.savez(file, rows=batches.rows, dense=batches.dense, labels=batches.labels)

    return _written(folder / f"train-rows{rows}-steps{num_steps}-part{part}.npz", write)


def _written(path: Path, write: Callable[[BinaryIO], None]) -> Path:
    """Return the path after writing it, if need be; a visible file is complete."""
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        with unfinished.open("wb") as file:
            write(file)
        unfinished.replace(path)
    return path


def load_batches(path: Path | str) -> Batches:
    """Read the samples of a file of `samples_file`."""
    with np.load(path) as arrays:
        return Batches(rows=arrays["rows"], dense=arrays["dense"], labels=arrays["labels"])
