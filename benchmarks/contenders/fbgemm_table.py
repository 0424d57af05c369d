"""FBGEMM's fused table on the CPU, called directly and through TorchRec's own module; it updates in its backward."""

import logging
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.contenders import EPS, LR, RANGE
from benchmarks.contenders.torch_table import exchange, fill_uniform, with_samples
from benchmarks.workload import (
    BATCH_IDS,
    NUM_FEATURES,
    SAMPLES,
    WHOLE,
    Batches,
    Floats,
    RowNumbers,
    Share,
    rows_per_feature,
)


class FbgemmTable:
    """One table per feature in one operator."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int, share: Share = WHOLE) -> None:
        torch.set_num_threads(num_threads)
        self.rows, self.share, self.dim, self.count = rows, share, dim, rows_per_feature(rows)
        kinds = {"adagrad": EmbOptimType.EXACT_ADAGRAD, "rowwise": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        self.tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[(self.count, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * share.num_features,
            optimizer=kinds[optimizer],
            learning_rate=LR,
            eps=EPS,
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        for weights in self.tables.split_embedding_weights():
            fill_uniform(weights)
        touch_states(self.tables)
        self.offsets = torch.arange(share.num_ids + 1)  # one id per bag
        self.gradients = torch.from_numpy(share.sample_gradients(dim))

    def prepare(self, rows: RowNumbers) -> list[Any]:
        # Features follow each other, as FBGEMM requires.
        return list(torch.from_numpy(self.share.own_rows(rows, self.rows) % self.count))

    def train(self, local_rows: Any) -> None:
        """Train; after the exchange of several ranks each has all features of its samples."""
        exchange(self.look_up(local_rows), self.share.size).backward(self.gradients)

    def prepare_samples(self, batches: Batches) -> list[Any]:
        return with_samples(self.prepare(batches.rows), batches, self.share)

    def look_up(self, local_rows: Any) -> Any:
        return self.tables(local_rows, self.offsets)

    def update(self) -> None:
        """Do nothing: the backward updates."""

    def probe(self, rows: RowNumbers) -> Floats:
        return rows_of(self.tables.split_embedding_weights(), rows, self.count)


class TorchrecTable:
    """A FusedEmbeddingBagCollection of KeyedJaggedTensors."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        logging.disable(logging.WARNING)  # it announces every optional module that is missing
        import torchrec.optim
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        torch.set_num_threads(num_threads)
        torch.manual_seed(1)
        self.count, self.dim, self.share = rows_per_feature(rows), dim, WHOLE
        self.features = [f"c{number}" for number in range(1, NUM_FEATURES + 1)]
        configs = [
            EmbeddingBagConfig(
                name=f"t{feature}",
                embedding_dim=dim,
                num_embeddings=self.count,
                feature_names=[feature],
                weight_init_min=-RANGE,
                weight_init_max=RANGE,
            )
            for feature in self.features
        ]
        kinds = {"adagrad": torch.optim.Adagrad, "rowwise": torchrec.optim.RowWiseAdagrad}
        self.collection: Any = FusedEmbeddingBagCollection(
            configs, kinds[optimizer], {"lr": LR, "eps": EPS}, location=EmbeddingLocation.HOST
        )
        for module in self.collection._emb_modules:
            touch_states(module._emb_module)
        self.lengths = torch.ones(BATCH_IDS, dtype=torch.int32)

    def prepare_samples(self, batches: Batches) -> list[Any]:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        ids = [
            KeyedJaggedTensor(self.features, values, lengths=self.lengths, stride=SAMPLES)
            for values in torch.from_numpy(batches.rows % self.count)
        ]
        return with_samples(ids, batches)

    def look_up(self, ids: Any) -> Any:
        return self.collection(ids).values()

    def update(self) -> None:
        """Do nothing: the backward updates."""

    def probe(self, rows: RowNumbers) -> Floats:
        return rows_of([bag.weight for bag in self.collection.embedding_bags.values()], rows, self.count)


def touch_states(tables: Any) -> None:
    """Write to every state of an operator, so that every page exists before anything is timed."""
    for states in tables.split_optimizer_states():
        for state in states:
            state.zero_()


def rows_of(weights: Any, rows: RowNumbers, count: int) -> Floats:
    """Return rows of tables with `count` rows each."""
    picked = [weights[row // count].detach()[row % count].numpy() for row in rows.tolist()]
    return np.array(picked, np.float32)
