"""The contenders of the training benchmark: Satrap, plain PyTorch, FBGEMM, TorchRec; PaddlePaddle has its own file.

All start with every row present and values within 0.01, and use the learning rate and eps of the store's benchmark for
the tables and SGD for the dense parameters. Batches come in each contender's own form before anything is timed. Plain
PyTorch and FBGEMM have the tables of the store's benchmark. Each imports its framework when it is built.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.contenders import CAPACITY_SLACK, EPS, LR, RANGE, FbgemmTable, TorchTable
from benchmarks.ranks import Ranks
from benchmarks.train.pairs import TrainContender, Trainer
from benchmarks.train.workload import Batches
from benchmarks.workload import (
    BATCH_IDS,
    NUM_FEATURES,
    SAMPLES,
    WHOLE,
    Floats,
    RowNumbers,
    Share,
    hashed_ids,
    rows_per_feature,
    total_rows,
)

FEATURES = tuple(f"c{number}" for number in range(1, NUM_FEATURES + 1))


def build(name: str, table: Mapping[str, Any], ranks: Ranks) -> TrainContender:
    """The contender of this name, with its tables filled; its share of them where there are several ranks."""
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
    contender: TrainContender = contenders[name](**table, **shared)
    return contender


class SatrapTrain:
    """One table with all rows behind 26 features, as the product trains it.

    Modes: "sync" and "stale" (staleness 0 and 4) with satrap.models.DLRM; "plain" is "sync" with the peers' model.
    """

    STALENESS: Mapping[str, int] = {"sync": 0, "stale": 4, "plain": 0}

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        import torch

        import satrap.worker.local_rows

        torch.set_num_threads(num_threads)
        optimizers: dict[str, Any] = {
            "adagrad": satrap.Adagrad(lr=LR, eps=EPS),
            "rowwise": satrap.RowWiseAdagrad(lr=LR, eps=EPS),
        }
        count = total_rows(rows)
        table = satrap.Table(
            "ids",
            dim=dim,
            optimizer=optimizers[optimizer],
            initial=satrap.Uniform(low=-RANGE, high=RANGE),
            capacity=int(count * CAPACITY_SLACK),
            on_full="evict",
        )
        self.dim = dim
        self.embeddings = satrap.Embeddings(dict.fromkeys(FEATURES, table), seed=1)
        worker = self.embeddings.worker
        assert isinstance(worker, satrap.worker.local_rows.LocalWorker)
        self.store = worker.tables["ids"]
        for begin in range(0, count, BATCH_IDS):
            self.store.lookup(hashed_ids(np.arange(begin, min(begin + BATCH_IDS, count))))
        if len(self.store) != count:
            raise RuntimeError(f"the table holds {len(self.store)} rows after filling it with {count}")

    def trainer(self, mode: str, top: str, precision: str) -> Trainer:
        return SatrapTrainer(self, self.STALENESS[mode], top, precision, plain=mode == "plain")

    def prepare(self, batches: Batches) -> list[Any]:
        from satrap.data.inputs import Inputs

        return [
            Inputs(names=FEATURES, values=hashed_ids(rows), batch_size=SAMPLES, dense=dense, label=labels)
            for rows, dense, labels in zip(batches.rows, batches.dense, batches.labels, strict=True)
        ]

    def probe(self, rows: RowNumbers) -> Floats:
        return np.array(self.store.lookup(hashed_ids(rows), train=False))

    def versions(self) -> dict[str, str]:
        from importlib.metadata import version

        import torch

        names = {"satrap": version("satrap"), "torch": str(torch.__version__), "numpy": np.__version__}
        return {**names, "simd": self.store.simd}


class SatrapTrainer:
    """A model trained on Satrap's tables; its steps are the loop that a user writes."""

    def __init__(self, contender: SatrapTrain, staleness: int, top: str, precision: str, *, plain: bool) -> None:
        import torch

        from benchmarks.train import model
        from benchmarks.train.cases import BOTTOM, TOPS
        from benchmarks.train.workload import NUM_DENSE

        def make() -> torch.nn.Module:
            if plain:
                return model.plain_model(contender.dim, top)
            from satrap.models import DLRM

            torch.manual_seed(model.SEED)
            made: torch.nn.Module = DLRM(NUM_DENSE, contender.embeddings, bottom=BOTTOM, top=TOPS[top])
            return made

        self.embeddings, self.staleness, self.dim = contender.embeddings, staleness, contender.dim
        self.step, self.alone = model.DenseStep(make(), precision), model.DenseStep(make(), precision)

    def steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        self.embeddings.staleness = self.staleness
        optimizer = self.embeddings.optimizer(self.step.optimizer)
        for batch in self.embeddings.stream(batches):
            loss = self.step.loss(batch.dense, batch.embeddings, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()

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
        from benchmarks.exchange import exchange

        for ids, dense, labels in batches:
            block = self.contender.look_up(ids)
            loss = self.step(dense, exchange(block, self.share.size), labels)
            self.contender.update()
            yield loss

    def dense_steps(self, batches: Sequence[Any]) -> Iterator[Any]:
        from benchmarks.train.model import fixed_steps

        return fixed_steps(self.alone, self.contender.dim, batches, self.share.num_samples)


def with_samples(ids: Any, batches: Batches, share: Share = WHOLE) -> list[Any]:
    """Each batch's ids with the dense numbers and labels of the samples of this process."""
    import torch

    dense, labels = (torch.from_numpy(share.own_samples(each)) for each in (batches.dense, batches.labels))
    return list(zip(ids, dense, labels, strict=True))


class TorchTrain(TorchTable):
    """Plain PyTorch: one nn.Embedding(sparse=True) with all rows, looked up by [4096, 26] row numbers."""

    def __init__(self, *, dim: int, **options: Any) -> None:
        super().__init__(dim=dim, **options)
        self.dim = dim

    def trainer(self, mode: str, top: str, precision: str) -> Trainer:
        return PlainTrainer(self, top, precision)

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


class FbgemmTrain(FbgemmTable):
    """What TorchRec trains with, called directly: 26 tables in one fused operator, which updates in its backward."""

    def trainer(self, mode: str, top: str, precision: str) -> Trainer:
        return PlainTrainer(self, top, precision)

    def prepare(self, batches: Any) -> list[Any]:
        import torch

        ids = torch.from_numpy(self.share.own_rows(batches.rows, self.rows) % self.count)
        return with_samples(ids, batches, self.share)

    def look_up(self, ids: Any) -> Any:
        return self.tables(ids, self.offsets)

    def update(self) -> None:
        pass


class TorchrecTrain:
    """TorchRec's own module over the same operator: a FusedEmbeddingBagCollection of KeyedJaggedTensors."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        logging.disable(logging.WARNING)  # it announces every module it does without
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

    def trainer(self, mode: str, top: str, precision: str) -> Trainer:
        return PlainTrainer(self, top, precision)

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

    def update(self) -> None:
        pass

    def probe(self, rows: RowNumbers) -> Floats:
        weights = [bag.weight.detach() for bag in self.collection.embedding_bags.values()]
        picked = [weights[row // self.count][row % self.count].numpy() for row in rows.tolist()]
        return np.array(picked, np.float32)

    def versions(self) -> dict[str, str]:
        from importlib.metadata import version

        import torch

        names = {name: version(name) for name in ("torchrec", "fbgemm-gpu-cpu")}
        return {**names, "torch": str(torch.__version__), "numpy": np.__version__}
