"""Satrap in the training benchmark: one table with all rows for 26 features, trained by a user's loop."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import satrap
from benchmarks.contenders.satrap_table import fill, inputs_of, one_table, optimizer_of
from benchmarks.train.model import DenseStep, fixed_steps, plain_model, satrap_model
from benchmarks.workload import Batches, Floats, RowNumbers, hashed_ids, total_rows

STALENESS = {"sync": 0, "stale": 4, "plain": 0}


class SatrapTrain:
    """The tables and their trainers.

    Modes: "sync" and "stale" (staleness 0 and 4) with satrap.models.DLRM; "plain" is "sync" with the peers' model.
    """

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.dim = dim
        self.embeddings = satrap.Embeddings(one_table(rows, dim, optimizer_of(optimizer)), seed=1)
        self.store: Any = self.embeddings.tables["ids"]
        fill(self.store, total_rows(rows))

    def trainer(self, mode: str, top: str, precision: str) -> "SatrapTrainer":
        return SatrapTrainer(self, mode, top, precision)

    def prepare_samples(self, batches: Batches) -> list[Any]:
        return [inputs_of(*batch) for batch in zip(batches.rows, batches.dense, batches.labels, strict=True)]

    def probe(self, rows: RowNumbers) -> Floats:
        return np.array(self.store.lookup(hashed_ids(rows), train=False))


class SatrapTrainer:
    """A model trained on Satrap's tables."""

    def __init__(self, contender: SatrapTrain, mode: str, top: str, precision: str) -> None:
        self.embeddings, self.staleness, self.dim = contender.embeddings, STALENESS[mode], contender.dim
        is_plain = mode == "plain"
        self.step, self.alone = (
            DenseStep(plain_model(self.dim, top) if is_plain else satrap_model(self.embeddings, top), precision)
            for _ in range(2)
        )

    def steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        self.embeddings.staleness = self.staleness
        yield from self.step.train(self.embeddings.optimizer(self.step.optimizer), self.embeddings.stream(batches))

    def dense_steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        pairs = [(torch.from_numpy(batch.dense), torch.from_numpy(batch.label)) for batch in batches]
        return fixed_steps(self.alone, self.dim, pairs)
