"""Plain PyTorch, a bare array, and what the peers with torch share: rows to start from, samples, the exchange of rows.

In a step of several ranks every rank looks up its features for the samples of all ranks, as TorchRec does with
table-wise sharding: one all-to-all brings rows to the rank of their samples, and another brings the gradients back. No
ids are exchanged: every rank gets those of its features. A rank's gradients are those of a mean over its samples, and a
step's those of a mean over all samples, so they are divided by the number of ranks.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from benchmarks.contenders import EPS, LR, RANGE
from benchmarks.workload import (
    BATCH_IDS,
    SAMPLES,
    WHOLE,
    Batches,
    Floats,
    RowNumbers,
    Share,
    gradients,
    rows_per_feature,
    total_rows,
)

FILL_VALUES = 1 << 20


def fill_uniform(values: Tensor) -> None:
    """Fill with values within RANGE that repeat after a million: to draw 5 GB takes longer than the measurement."""
    torch.manual_seed(1)
    drawn = torch.empty(FILL_VALUES).uniform_(-RANGE, RANGE)
    for part in values.detach().view(-1).split(FILL_VALUES):
        part.copy_(drawn[: len(part)])


def with_samples(ids: Any, batches: Batches, share: Share = WHOLE) -> list[Any]:
    """Return each batch's ids with the dense numbers and labels of the samples of this rank."""
    dense, labels = (torch.from_numpy(share.own_samples(numbers)) for numbers in (batches.dense, batches.labels))
    return list(zip(ids, dense, labels, strict=True))


def exchange(block: Tensor, num_ranks: int) -> Tensor:
    """Return all features of this rank's samples, given this rank's features of all samples."""
    if num_ranks == 1:
        return block
    exchanged: Tensor = _Exchange.apply(block, num_ranks)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, block: Tensor, num_ranks: int) -> Tensor:
        context.num_ranks = num_ranks
        return torch.cat(_all_to_all(block).chunk(num_ranks), 1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = torch.cat(gradients[0].chunk(context.num_ranks, 1)).div_(context.num_ranks)
        return _all_to_all(parts), None


def _all_to_all(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    torch.distributed.all_to_all_single(received, tensor)
    return received


def rowwise_step(weight: Tensor, sums: Tensor) -> None:
    """Step a table with a sparse gradient by row-wise Adagrad."""
    assert weight.grad is not None
    with torch.no_grad():
        summed = weight.grad.coalesce()
        touched, gradient = summed.indices()[0], summed.values()
        sums.index_add_(0, touched, gradient.square().mean(dim=1))
        scale = sums[touched].sqrt_().add_(EPS).reciprocal_().mul_(-LR)
        weight.index_add_(0, touched, gradient.mul_(scale[:, None]))


class TorchTable:
    """One nn.Embedding(sparse=True) with all rows, with torch's sparse Adagrad or a row-wise one of a few lines."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int, share: Share = WHOLE) -> None:
        torch.set_num_threads(num_threads)
        self.rows, self.share, self.dim = rows, share, dim
        count = share.num_features * rows_per_feature(rows)
        weight = torch.empty(count, dim)
        fill_uniform(weight)
        self.embedding = torch.nn.Embedding(count, dim, sparse=True, _weight=weight)
        self.gradients = torch.from_numpy(gradients(dim) if share.size == 1 else share.sample_gradients(dim))
        if optimizer == "adagrad":
            adagrad = torch.optim.Adagrad(self.embedding.parameters(), lr=LR, eps=EPS)
            self.optimizer_step: Any = adagrad.step
        else:
            self.sums = torch.zeros(count)
            self.sums.fill_(0.0)  # every page exists before anything is timed
            self.optimizer_step = self._rowwise_step

    def _rowwise_step(self) -> None:
        rowwise_step(self.embedding.weight, self.sums)

    def prepare(self, rows: RowNumbers) -> list[Any]:
        return list(torch.from_numpy(self.share.own_rows(rows, self.rows)))

    def train(self, rows: Any) -> None:
        """Train; after the exchange of several ranks each has all features of its samples."""
        self.embedding.weight.grad = None
        if self.share.size == 1:
            block = self.embedding(rows)
        else:
            own = self.embedding(rows.view(self.share.num_features, SAMPLES).t()).flatten(1)
            block = exchange(own, self.share.size)
        block.backward(self.gradients)
        self.optimizer_step()

    def prepare_samples(self, batches: Batches) -> list[Any]:
        own = self.share.own_rows(batches.rows, self.rows)
        ids = torch.from_numpy(np.ascontiguousarray(own.reshape(-1, self.share.num_features, SAMPLES).swapaxes(1, 2)))
        return with_samples(ids, batches, self.share)

    def look_up(self, ids: Any) -> Any:
        return self.embedding(ids).flatten(1)

    def update(self) -> None:
        self.optimizer_step()
        self.embedding.weight.grad = None

    def probe(self, rows: RowNumbers) -> Floats:
        return np.array(self.embedding.weight.detach()[torch.from_numpy(rows)].numpy())


class PlainArray:
    """Arrays of values and state, read by torch.index_select into reused buffers and written by index_copy_: the limit
    of what this machine can read and write."""

    def __init__(self, *, rows: int, dim: int, optimizer: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self.array = torch.ones(total_rows(rows), dim)
        self.state = torch.ones(total_rows(rows), {"adagrad": dim, "rowwise": 1}[optimizer])
        self.out, self.state_out = torch.empty(BATCH_IDS, dim), torch.empty(BATCH_IDS, self.state.shape[1])

    def prepare(self, rows: RowNumbers) -> list[Any]:
        return list(torch.from_numpy(rows))

    def lookup(self, rows: Any) -> None:
        torch.index_select(self.array, 0, rows, out=self.out)

    def train(self, rows: Any) -> None:
        """Read the rows, then write them and their state; of a row that occurs twice both are written."""
        self.lookup(rows)
        torch.index_select(self.state, 0, rows, out=self.state_out)
        self.array.index_copy_(0, rows, self.out)
        self.state.index_copy_(0, rows, self.state_out)
