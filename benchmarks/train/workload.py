"""The batches that every contender of the training benchmark gets: row numbers, dense numbers and labels.

The row numbers are those of the store's benchmark, Zipf(1.05). Labels are drawn from a hidden weight of every row and
every dense column, so that a contender that really trains sees its loss fall. Batches are made by the driver before
anything is timed and handed over as one `.npz` file per stream; numpy only.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.workload import NUM_FEATURES, SAMPLES, Floats, RowNumbers, hashed_ids, row_numbers

NUM_DENSE = 13
BIAS = -1.0
ROW_WEIGHT = 0.35  # standard deviation
DENSE_WEIGHT = 0.2
SEED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Some batches, one after another in every array."""

    rows: RowNumbers
    """[batches, 26 * 4096]: feature after feature, of each sample after sample; unique over the features."""
    dense: Floats
    """[batches, 4096, 13]."""
    labels: Floats
    """[batches, 4096], 0 or 1."""

    def __len__(self) -> int:
        return len(self.rows)


def make_batches(rows: int, num_steps: int, part: int) -> Batches:
    """`num_steps` batches; another `part` draws others from the same popularity and the same hidden weights."""
    numbers = row_numbers(rows, "zipf", num_steps, part)
    rng = np.random.default_rng([SEED, rows, part])
    dense = rng.standard_normal((num_steps, SAMPLES, NUM_DENSE), np.float32)
    weights = np.random.default_rng(SEED).normal(0.0, DENSE_WEIGHT, NUM_DENSE).astype(np.float32)
    logits = BIAS + row_weights(numbers).reshape(num_steps, NUM_FEATURES, SAMPLES).sum(axis=1) + dense @ weights
    labels = rng.random(logits.shape) < 1.0 / (1.0 + np.exp(-logits))
    return Batches(rows=numbers, dense=dense, labels=labels.astype(np.float32))


def row_weights(numbers: RowNumbers) -> Floats:
    """The hidden weight of each row, a function of its number alone, uniform around 0."""
    uniform = (hashed_ids(numbers) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    width = np.float32(ROW_WEIGHT * 12.0**0.5)
    return np.asarray((uniform - np.float32(0.5)) * width, np.float32)


def batches_file(folder: Path, rows: int, num_steps: int, part: int) -> Path:
    """The file with these batches in `folder`, made if it is not there; complete whenever it is visible."""
    path = folder / f"train-rows{rows}-steps{num_steps}-part{part}.npz"
    if not path.exists():
        made = make_batches(rows, num_steps, part)
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        with unfinished.open("wb") as file:
            np.savez(file, rows=made.rows, dense=made.dense, labels=made.labels)
        unfinished.replace(path)
    return path


def load_batches(path: Path | str) -> Batches:
    """What `batches_file` wrote."""
    with np.load(path) as arrays:
        return Batches(rows=arrays["rows"], dense=arrays["dense"], labels=arrays["labels"])
