"""The tables that are measured: Satrap's store, plain PyTorch, FBGEMM's fused CPU table, and a bare array.

Each is built with every row present, converts batches to its own form (`prepare`, not timed) and does one step of the
work (`train`, `lookup`, ..., timed). All use the same learning rate and eps; the initial accumulator is 0. Each imports
its framework when it is built, so that one worker process has one framework. The peers can be built with a share of the
features, for one of several ranks.
"""

from typing import Any, Protocol

import numpy as np

from benchmarks.harness.machine import versions
from benchmarks.workload import (
    BATCH_IDS,
    SAMPLES,
    WHOLE,
    Floats,
    RowNumbers,
    Share,
    gradients,
    hashed_ids,
    rows_per_feature,
    total_rows,
)

LR = 0.02
EPS = 1e-8
CAPACITY_SLACK = 1.05
RANGE = 0.01
FILL_VALUES = 1 << 20


class Contender(Protocol):
    """A table: it converts batches to its form, returns single rows to compare, and names its versions."""

    def prepare(self, rows: RowNumbers) -> list[Any]: ...
    def probe(self, rows: RowNumbers) -> Floats: ...
    def versions(self) -> dict[str, str]: ...


def satrap_optimizer(name: str) -> Any:
    """Return the configuration of an optimizer for Satrap."""
    import satrap

    return {"adagrad": satrap.Adagrad, "rowwise": satrap.RowWiseAdagrad}[name](lr=LR, eps=EPS)


def fill(store: Any, count: int) -> None:
    """Look up every row of a store once."""
    for begin in range(0, count, BATCH_IDS):
        store.lookup(hashed_ids(np.arange(begin, min(begin + BATCH_IDS, count))))
    if len(store) != count:
        raise RuntimeError(f"expected {count} rows in the store after filling it, found {len(store)}")


class SatrapTable:
    """Satrap's store, with capacity for 1.05 times the rows."""

    def __init__(
        self, *, rows: int, dim: int, optimizer: str, num_threads: int, filled: bool = True, shared: str | None = None
    ) -> None:
        from satrap import Table
        from satrap.table.store import Store

        capacity = int(rows * CAPACITY_SLACK)
        table = Table("bench", dim=dim, optimizer=satrap_optimizer(optimizer), capacity=capacity, on_full="evict")
        self.store = Store(table, seed=1, num_threads=num_threads, shared=shared)
        self.gradients = gradients(dim)
        if filled:
            fill(self.store, total_rows(rows))

    def prepare(self, rows: RowNumbers) -> list[Any]:
        return [hashed_ids(batch) for batch in rows]

    def train(self, ids: Any) -> None:
        _, ticket = self.store.lookup(ids, with_ticket=True)
        self.store.update(ticket, self.gradients)

    def train_plain(self, ids: Any) -> None:
        self.store.lookup(ids)
        self.store.update(ids, self.gradients)

    def lookup(self, ids: Any) -> None:
        self.store.lookup(ids)

    def lookup_eval(self, ids: Any) -> None:
        self.store.lookup(ids, train=False)

    def probe(self, rows: RowNumbers) -> Floats:
        return np.array(self.store.lookup(hashed_ids(rows), train=False))

    def versions(self) -> dict[str, str]:
        return versions("satrap", "numpy") | {"simd": self.store.simd}


def fill_uniform(values: Any) -> None:
    """Fill with values within RANGE that repeat after a million: to draw 5 GB takes longer than the measurement."""
    import torch

    torch.manual_seed(1)
    drawn = torch.empty(FILL_VALUES).uniform_(-RANGE, RANGE)
    for part in values.detach().view(-1).split(FILL_VALUES):
        part.copy_(drawn[: len(part)])


class TorchTable:
    """One nn.Embedding(sparse=True) with all rows, with torch's sparse Adagrad or a row-wise one of a few lines."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int, share: Share = WHOLE) -> None:
        import torch

        torch.set_num_threads(num_threads)
        self.rows, self.share, self.dim = rows, share, dim
        count = share.num_features * rows_per_feature(rows)
        weight = torch.empty(count, dim)
        fill_uniform(weight)
        self.embedding = torch.nn.Embedding(count, dim, sparse=True, _weight=weight)
        self.gradients = torch.from_numpy(share.gradients(dim))
        self.sample_gradients = torch.from_numpy(share.sample_gradients(dim))
        if optimizer == "adagrad":
            adagrad = torch.optim.Adagrad(self.embedding.parameters(), lr=LR, eps=EPS)
            self.optimizer_step: Any = adagrad.step
        else:
            self.sums = torch.zeros(count)
            self.sums.fill_(0.0)  # every page exists before anything is timed
            self.optimizer_step = self._rowwise_step

    def _rowwise_step(self) -> None:
        import torch

        weight = self.embedding.weight
        assert weight.grad is not None
        with torch.no_grad():
            summed = weight.grad.coalesce()
            touched, gradient = summed.indices()[0], summed.values()
            self.sums.index_add_(0, touched, gradient.square().mean(dim=1))
            scale = self.sums[touched].sqrt_().add_(EPS).reciprocal_().mul_(-LR)
            weight.index_add_(0, touched, gradient.mul_(scale[:, None]))

    def prepare(self, rows: RowNumbers) -> list[Any]:
        import torch

        return list(torch.from_numpy(self.share.own_rows(rows, self.rows)))

    def train(self, rows: Any) -> None:
        self.embedding.weight.grad = None
        self.embedding(rows).backward(self.gradients)
        self.optimizer_step()

    def train_exchanged(self, rows: Any) -> None:
        """Train, with an exchange after which every rank has all features of its samples."""
        from benchmarks.store.exchange import exchange

        self.embedding.weight.grad = None
        block = self.embedding(rows.view(self.share.num_features, SAMPLES).t()).flatten(1)
        exchange(block, self.share.size).backward(self.sample_gradients)
        self.optimizer_step()

    def probe(self, rows: RowNumbers) -> Floats:
        import torch

        return np.array(self.embedding.weight.detach()[torch.from_numpy(rows)].numpy())

    def versions(self) -> dict[str, str]:
        return versions("torch", "numpy")


class FbgemmTable:
    """FBGEMM's fused table on the CPU: one table per feature in one operator, the optimizer inside its backward."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int, share: Share = WHOLE) -> None:
        import torch
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            BoundsCheckMode,
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

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
        for states in self.tables.split_optimizer_states():
            for state in states:
                state.zero_()  # every page exists before anything is timed
        self.offsets = torch.arange(share.num_ids + 1)  # one id per bag
        gradient = torch.from_numpy(share.gradients(dim)).view(share.num_features, SAMPLES, dim)
        self.gradients = gradient.transpose(0, 1).reshape(SAMPLES, share.num_features * dim).contiguous()
        self.sample_gradients = torch.from_numpy(share.sample_gradients(dim))

    def prepare(self, rows: RowNumbers) -> list[Any]:
        import torch

        # Features follow each other, as FBGEMM requires.
        return list(torch.from_numpy(self.share.own_rows(rows, self.rows) % self.count))

    def train(self, local_rows: Any) -> None:
        self.tables(local_rows, self.offsets).backward(self.gradients)

    def train_exchanged(self, local_rows: Any) -> None:
        """Train, with an exchange after which every rank has all features of its samples."""
        from benchmarks.store.exchange import exchange

        exchange(self.tables(local_rows, self.offsets), self.share.size).backward(self.sample_gradients)

    def probe(self, rows: RowNumbers) -> Floats:
        weights = self.tables.split_embedding_weights()
        picked = [weights[row // self.count].detach()[row % self.count].numpy() for row in rows.tolist()]
        return np.array(picked, np.float32)

    def versions(self) -> dict[str, str]:
        return versions("torch", "numpy", "fbgemm-gpu-cpu")


class PlainArray:
    """An array read by torch.index_select into a reused buffer: the limit of what this machine can read."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)
        self.array = torch.ones(total_rows(rows), dim)
        self.out = torch.empty(BATCH_IDS, dim)

    def prepare(self, rows: RowNumbers) -> list[Any]:
        import torch

        return list(torch.from_numpy(rows))

    def lookup(self, rows: Any) -> None:
        import torch

        torch.index_select(self.array, 0, rows, out=self.out)

    def probe(self, rows: RowNumbers) -> Floats:
        return np.array(self.array.numpy()[rows])

    def versions(self) -> dict[str, str]:
        return versions("torch", "numpy")


CONTENDERS: dict[str, Any] = {
    "satrap": SatrapTable,
    "torch": TorchTable,
    "fbgemm": FbgemmTable,
    "index_select": PlainArray,
}
