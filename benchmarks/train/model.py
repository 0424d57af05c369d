"""The models of the contenders with torch, and the step of the dense network that they share.

The peers' DLRM is plain eager PyTorch, as their users write it: bottom layers, the dot products of all pairs of 27
vectors, top layers. Satrap's model has the same layers and sizes and computes the interaction in another way.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.workload import BOTTOM, DENSE_LR, NUM_DENSE, NUM_FEATURES, SAMPLES, TOPS

SEED = 7
FIXED = 0.01  # bound of fixed embeddings, as of the rows


class PlainDLRM(nn.Module):
    """The peers' model; forward(dense [batch, 13], block [batch, 26 * dim]) -> logits [batch]."""

    pairs: Tensor

    def __init__(self, dim: int, top: Sequence[int]) -> None:
        super().__init__()
        self.dim = dim
        count = NUM_FEATURES + 1
        i, j = torch.tril_indices(count, count, -1)
        self.register_buffer("pairs", i * count + j, persistent=False)
        self.bottom = nn.Sequential(*layers((NUM_DENSE, *BOTTOM, dim)))
        self.top = nn.Sequential(*layers((dim + len(i), *top))[:-1])

    def forward(self, dense: Tensor, block: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), block.view(len(block), -1, self.dim).to(x.dtype)], 1)
        # index_select is at least as fast as gather or an index here, in both precisions.
        dots = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([x, dots], 1))
        return logits.squeeze(1)


def layers(sizes: Sequence[int]) -> list[nn.Module]:
    """Return linear layers, each followed by a ReLU."""
    return [layer for before, after in pairwise(sizes) for layer in (nn.Linear(before, after), nn.ReLU())]


class DenseStep:
    """A model with its SGD, which steps on the embeddings that it gets."""

    def __init__(self, model: nn.Module, precision: str, *, several_ranks: bool = False) -> None:
        self.model = nn.parallel.DistributedDataParallel(model) if several_ranks else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=DENSE_LR)
        self.autocast = precision == "bf16"

    def loss(self, dense: Tensor, block: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.model(dense, block)
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)

    def __call__(self, dense: Tensor, block: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss(dense, block, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, optimizer: Any, stream: Any) -> Iterator[Tensor]:
        """Train on Satrap's embeddings in the loop that a user writes; yield the loss of each step."""
        for batch in stream:
            loss = self.loss(batch.dense, batch.embeddings, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()


class WithModules:
    """Satrap's model with 26 modules that look up in forward, in the loop that a user of `prefetch` writes."""

    def __init__(self, embeddings: Any, step: DenseStep) -> None:
        import satrap

        self.embeddings, self.step = embeddings, step
        self.columns = [satrap.nn.Embedding(embeddings, "ids") for _ in range(NUM_FEATURES)]
        self.optimizer = embeddings.optimizer(step.optimizer)

    def train(self, batches: Sequence[Any]) -> Iterator[Tensor]:
        """Yield the loss of each step."""
        arrays = [(b.values.view(np.int64).reshape(NUM_FEATURES, -1), b.dense, b.label) for b in batches]
        tensors = [[torch.from_numpy(array) for array in batch] for batch in arrays]
        for ids, dense, labels in self.embeddings.prefetch(tensors, ids=lambda batch: {"ids": list(batch[0])}):
            block = torch.cat([column(ids[i]) for i, column in enumerate(self.columns)], 1)
            loss = self.step.loss(dense, block, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            yield loss.detach()


def fixed_steps(step: DenseStep, dim: int, batches: Sequence[Any], num_samples: int = SAMPLES) -> Iterator[Tensor]:
    """Step on one block that never changes; each item of `batches` ends with its dense numbers and labels."""
    block = torch.empty(num_samples, NUM_FEATURES * dim).uniform_(-FIXED, FIXED).requires_grad_()
    for *_, dense, labels in batches:
        block.grad = None
        yield step(dense, block, labels)


def plain_model(dim: int, top: str) -> PlainDLRM:
    """Return the peers' model with the same first parameters in every contender."""
    torch.manual_seed(SEED)
    return PlainDLRM(dim, TOPS[top])


def satrap_model(embeddings: Any, top: str) -> nn.Module:
    """Return Satrap's model with the same first parameters in every process."""
    from satrap.models import DLRM

    torch.manual_seed(SEED)
    model: nn.Module = DLRM(NUM_DENSE, embeddings, bottom=BOTTOM, top=TOPS[top])
    return model
