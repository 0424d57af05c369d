"""The contenders of the training benchmark with their models: Satrap's tables in a user's loop, and the peers' tables
under the peers' model.

The modes of Satrap are "sync" and "stale" (staleness 0 and 4) with satrap.models.DLRM, "plain": "sync" with the
peers' model, and "modules": "sync" with 26 modules that look up in the model. A trainer's `steps` yields the loss of a
whole step for each batch, `dense_steps` that of a step with fixed embeddings, whose gradient is computed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.contenders.torch_table import exchange
from benchmarks.train.model import DenseStep, WithModules, fixed_steps, plain_model, satrap_model
from benchmarks.workload import Batches, Floats, RowNumbers, total_rows

STALENESS = {"sync": 0, "stale": 4, "plain": 0, "modules": 0}


class SatrapTrain:
    """One table with all rows for 26 features, hashed or with `num_rows`."""

    is_direct = False

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        import satrap
        from benchmarks.contenders import satrap_table

        torch.set_num_threads(num_threads)
        self.dim = dim
        form = satrap_table.SatrapDirectTable if self.is_direct else satrap_table.SatrapTable
        self.ids_of = form.ids_of
        table = satrap_table.one_table(rows, dim, satrap_table.optimizer_of(optimizer), form.size_of)
        self.embeddings = satrap.Embeddings(table, seed=1)
        self.store: Any = self.embeddings.tables["ids"]
        satrap_table.fill(self.store, total_rows(rows), self.ids_of)

    def prepare_samples(self, batches: Batches) -> list[Any]:
        from benchmarks.contenders.satrap_table import inputs_of

        samples = zip(batches.rows, batches.dense, batches.labels, strict=True)
        return [inputs_of(*sample, self.ids_of) for sample in samples]

    def probe(self, rows: RowNumbers) -> Floats:
        return np.array(self.store.lookup(self.ids_of(rows), train=False))


class SatrapDirectTrain(SatrapTrain):
    """The same with `num_rows`."""

    is_direct = True


class SatrapTrainer:
    """A model trained on Satrap's tables."""

    def __init__(self, contender: SatrapTrain, mode: str, top: str, precision: str) -> None:
        self.embeddings, self.staleness, self.dim = contender.embeddings, STALENESS[mode], contender.dim
        is_plain = mode == "plain"
        self.step, self.alone = (
            DenseStep(plain_model(self.dim, top) if is_plain else satrap_model(self.embeddings, top), precision)
            for _ in range(2)
        )
        self.modules = WithModules(self.embeddings, self.step) if mode == "modules" else None

    def steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        self.embeddings.staleness = self.staleness
        if self.modules is not None:
            yield from self.modules.train(batches)
            return
        yield from self.step.train(self.embeddings.optimizer(self.step.optimizer), self.embeddings.stream(batches))

    def dense_steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        pairs = [(torch.from_numpy(batch.dense), torch.from_numpy(batch.label)) for batch in batches]
        return fixed_steps(self.alone, self.dim, pairs)


class PlainTrainer:
    """The peers' model on a peer's tables."""

    def __init__(self, contender: Any, top: str, precision: str) -> None:
        self.contender, self.share = contender, contender.share
        several = self.share.size > 1
        self.step, self.alone = (
            DenseStep(plain_model(contender.dim, top), precision, several_ranks=several) for _ in range(2)
        )

    def steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        for ids, dense, labels in batches:
            block = self.contender.look_up(ids)
            loss = self.step(dense, exchange(block, self.share.size), labels)
            self.contender.update()
            yield loss

    def dense_steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        return fixed_steps(self.alone, self.contender.dim, batches, self.share.num_samples)


def trainer_of(contender: Any, mode: str, top: str, precision: str) -> SatrapTrainer | PlainTrainer:
    """Return a trainer of one mode of a contender with one model."""
    if isinstance(contender, SatrapTrain):
        return SatrapTrainer(contender, mode, top, precision)
    return PlainTrainer(contender, top, precision)
