"""The contenders of the training benchmark: Satrap, plain PyTorch, FBGEMM, TorchRec; PaddlePaddle has its own file.

All start with every row present and values within 0.01, and use the learning rate and eps of the store benchmark for
the tables and SGD for the dense parameters. Batches are converted to each contender's form before anything is timed.
Plain PyTorch and FBGEMM have the tables of the store benchmark. Each imports its framework when it is built.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness.machine import versions
from benchmarks.harness.ranks import Ranks
from benchmarks.store.contenders import (
    CAPACITY_SLACK,
    EPS,
    LR,
    RANGE,
    FbgemmTable,
    TorchTable,
    fill,
    satrap_optimizer,
)
from benchmarks.workload import (
    BATCH_IDS,
    NUM_FEATURES,
    SAMPLES,
    WHOLE,
    Batches,
    Floats,
    RowNumbers,
    Share,
    hashed_ids,
    rows_per_feature,
    total_rows,
)

FEATURES = tuple(f"c{number}" for number in range(1, NUM_FEATURES + 1))


def build(name: str, table: Mapping[str, Any], ranks: Ranks) -> Any:
    """Return the contender of this name with its tables filled; its share of them if there are several ranks."""
    if name == "paddle":
        from benchmarks.train.paddle import PaddleTrain

        return PaddleTrain(**table)
    contenders: dict[str, Any] = {
        "satrap": SatrapTrain,
        "torch": TorchTrain,
        "fbgemm": FbgemmTrain,
        "torchrec": TorchrecTrain,
    }
    shared = {} if ranks.size == 1 else {"share": Share(rank=ranks.rank, size=ranks.size)}
    return contenders[name](**table, **shared)


def satrap_inputs(batches: Batches) -> list[Any]:
    """Return the batches as Satrap's sources return them."""
    from satrap.data.inputs import Inputs

    return [
        Inputs(names=FEATURES, values=hashed_ids(rows), batch_size=SAMPLES, dense=dense, label=labels)
        for rows, dense, labels in zip(batches.rows, batches.dense, batches.labels, strict=True)
    ]


class SatrapTrain:
    """One table with all rows for 26 features, as the product trains it.

    Modes: "sync" and "stale" (staleness 0 and 4) with satrap.models.DLRM; "plain" is "sync" with the peers' model.
    """

    STALENESS: Mapping[str, int] = {"sync": 0, "stale": 4, "plain": 0}

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        import torch

        import satrap.worker.local_rows

        torch.set_num_threads(num_threads)
        count = total_rows(rows)
        table = satrap.Table(
            "ids",
            dim=dim,
            optimizer=satrap_optimizer(optimizer),
            initial=satrap.Uniform(low=-RANGE, high=RANGE),
            capacity=int(count * CAPACITY_SLACK),
            on_full="evict",
        )
        self.dim = dim
        self.embeddings = satrap.Embeddings(dict.fromkeys(FEATURES, table), seed=1)
        worker = self.embeddings.worker
        assert isinstance(worker, satrap.worker.local_rows.LocalWorker)
        self.store = worker.tables["ids"]
        fill(self.store, count)

    def trainer(self, mode: str, top: str, precision: str) -> "SatrapTrainer":
        return SatrapTrainer(self, self.STALENESS[mode], top, precision, plain=mode == "plain")

    def prepare(self, batches: Batches) -> list[Any]:
        return satrap_inputs(batches)

    def probe(self, rows: RowNumbers) -> Floats:
        return np.array(self.store.lookup(hashed_ids(rows), train=False))

    def versions(self) -> dict[str, str]:
        return versions("satrap", "torch", "numpy") | {"simd": self.store.simd}


class SatrapTrainer:
    """A model trained on Satrap's tables, in the loop that a user writes."""

    def __init__(self, contender: SatrapTrain, staleness: int, top: str, precision: str, *, plain: bool) -> None:
        from benchmarks.train import model

        def make() -> model.DenseStep:
            if plain:
                return model.DenseStep(model.plain_model(contender.dim, top), precision)
            return model.DenseStep(model.satrap_model(contender.embeddings, top), precision)

        self.embeddings, self.staleness, self.dim = contender.embeddings, staleness, contender.dim
        self.step, self.alone = make(), make()

    def steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        self.embeddings.staleness = self.staleness
        yield from self.step.train(self.embeddings.optimizer(self.step.optimizer), self.embeddings.stream(batches))

    def dense_steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        import torch

        from benchmarks.train.model import fixed_steps

        pairs = [(torch.from_numpy(batch.dense), torch.from_numpy(batch.label)) for batch in batches]
        return fixed_steps(self.alone, self.dim, pairs)


class PlainTrainer:
    """The peers' model on a peer's tables."""

    def __init__(self, contender: Any, top: str, precision: str) -> None:
        from benchmarks.train.model import DenseStep, plain_model

        self.contender, self.share = contender, getattr(contender, "share", WHOLE)
        several = self.share.size > 1
        self.step, self.alone = (
            DenseStep(plain_model(contender.dim, top), precision, several_ranks=several) for _ in range(2)
        )

    def steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        from benchmarks.store.exchange import exchange

        for ids, dense, labels in batches:
            block = self.contender.look_up(ids)
            loss = self.step(dense, exchange(block, self.share.size), labels)
            self.contender.update()
            yield loss

    def dense_steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        from benchmarks.train.model import fixed_steps

        return fixed_steps(self.alone, self.contender.dim, batches, self.share.num_samples)


def with_samples(ids: Any, batches: Batches, share: Share = WHOLE) -> list[Any]:
    """Return each batch's ids with the dense numbers and labels of the samples of this rank."""
    import torch

    dense, labels = (torch.from_numpy(share.own_samples(each)) for each in (batches.dense, batches.labels))
    return list(zip(ids, dense, labels, strict=True))


class Peer:
    """A contender that trains the peers' model."""

    def trainer(self, mode: str, top: str, precision: str) -> PlainTrainer:
        return PlainTrainer(self, top, precision)

    def update(self) -> None:
        """Do nothing: a fused operator updates in its backward."""


class TorchTrain(Peer, TorchTable):
    """Plain PyTorch: one nn.Embedding(sparse=True) with all rows, looked up by [4096, 26] row numbers."""

    def prepare(self, batches: Any) -> list[Any]:
        import torch

        own = self.share.own_rows(batches.rows, self.rows)
        ids = torch.from_numpy(np.ascontiguousarray(own.reshape(-1, self.share.num_features, SAMPLES).swapaxes(1, 2)))
        return with_samples(ids, batches, self.share)

    def look_up(self, ids: Any) -> Any:
        return self.embedding(ids).flatten(1)

    def update(self) -> None:
        self.optimizer_step()
        self.embedding.weight.grad = None


class FbgemmTrain(Peer, FbgemmTable):
    """The operator that TorchRec trains with, called directly: 26 tables, updated in its backward."""

    def prepare(self, batches: Any) -> list[Any]:
        import torch

        ids = torch.from_numpy(self.share.own_rows(batches.rows, self.rows) % self.count)
        return with_samples(ids, batches, self.share)

    def look_up(self, ids: Any) -> Any:
        return self.tables(ids, self.offsets)


class TorchrecTrain(Peer):
    """TorchRec's own module over the same operator: a FusedEmbeddingBagCollection of KeyedJaggedTensors."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        logging.disable(logging.WARNING)  # it announces every optional module that is missing
        import torch
        import torchrec.optim
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmbeddingLocation
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        torch.set_num_threads(num_threads)
        torch.manual_seed(1)
        self.count, self.dim = rows_per_feature(rows), dim
        configs = [
            EmbeddingBagConfig(
                name=f"t{feature}",
                embedding_dim=dim,
                num_embeddings=self.count,
                feature_names=[feature],
                weight_init_min=-RANGE,
                weight_init_max=RANGE,
            )
            for feature in FEATURES
        ]
        kinds = {"adagrad": torch.optim.Adagrad, "rowwise": torchrec.optim.RowWiseAdagrad}
        self.collection: Any = FusedEmbeddingBagCollection(
            configs, kinds[optimizer], {"lr": LR, "eps": EPS}, location=EmbeddingLocation.HOST
        )
        for module in self.collection._emb_modules:
            for states in module._emb_module.split_optimizer_states():
                for state in states:
                    state.zero_()  # every page exists before anything is timed
        self.lengths = torch.ones(BATCH_IDS, dtype=torch.int32)

    def prepare(self, batches: Batches) -> list[Any]:
        import torch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        ids = [
            KeyedJaggedTensor(list(FEATURES), values, lengths=self.lengths, stride=SAMPLES)
            for values in torch.from_numpy(batches.rows % self.count)
        ]
        return with_samples(ids, batches)

    def look_up(self, ids: Any) -> Any:
        return self.collection(ids).values()

    def probe(self, rows: RowNumbers) -> Floats:
        weights = [bag.weight.detach() for bag in self.collection.embedding_bags.values()]
        picked = [weights[row // self.count][row % self.count].numpy() for row in rows.tolist()]
        return np.array(picked, np.float32)

    def versions(self) -> dict[str, str]:
        return versions("torchrec", "fbgemm-gpu-cpu", "torch", "numpy")
