"""A user's own training loop over three features of two tables, and the same job in plain PyTorch."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satrap import SGD, Deployment, Embeddings, Inputs, Table, Zeros
from satrap.train.optimizer import HybridOptimizer
from satrap.worker.sharded_rows import ShardedWorker

BATCH, NUM_IDS, DIM = 8, 30, 4


def tables(lr: float = 0.1) -> dict[str, Any]:
    item = Table("item", dim=DIM, optimizer=SGD(lr=lr))
    return {"user": Table("user", dim=DIM, optimizer=SGD(lr=lr)), "item": item, "history": item.bag("mean")}


def counting_tables() -> dict[str, Any]:
    """Return tables whose rows become minus the sum of their gradients: exact for integers, in any order."""
    how: dict[str, Any] = {"dim": DIM, "optimizer": SGD(lr=1.0), "initial": Zeros()}
    item = Table("item", **how)
    return {"user": Table("user", **how), "item": item, "history": item.bag("sum")}


def batches(num: int, seed: int = 0, size: int = BATCH) -> list[Inputs]:
    """Return batches with one user and one item per sample, and zero to four items of history."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(num):
        lengths = np.concatenate([np.ones(2 * size, np.int64), rng.integers(0, 5, size)])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        made.append(
            Inputs(
                names=("user", "item", "history"),
                values=rng.integers(0, NUM_IDS, int(offsets[-1]), dtype=np.uint64),
                offsets=offsets,
                batch_size=size,
                dense=rng.standard_normal((size, 2)).astype(np.float32),
                label=rng.integers(0, 2, size).astype(np.float32),
            )
        )
    return made


class Net(torch.nn.Module):
    def __init__(self, width: int = 3 * DIM) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2 + width, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        out: Tensor = self.layers(torch.cat([dense, embeddings], 1)).squeeze(1)
        return out


def loss_of(model: torch.nn.Module, batch: Any) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.embeddings), batch.label)


def deployed(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `Embeddings`, with those of a `Deployment` moved into one."""
    where = {each.name: options[each.name] for each in fields(Deployment) if each.name in options}
    others = {name: value for name, value in options.items() if name not in where}
    return others | ({"deployment": Deployment(**where)} if where else {})


def job(staleness: int = 0, **options: Any) -> tuple[Embeddings, Net, HybridOptimizer]:
    torch.manual_seed(0)
    embeddings = Embeddings(tables(), staleness=staleness, num_threads=1, **deployed(options))
    model = Net()
    return embeddings, model, embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))


def rows(embeddings: Embeddings) -> dict[str, np.ndarray]:
    return {name: store.read(np.arange(NUM_IDS, dtype=np.uint64)).values for name, store in embeddings.tables.items()}


def bits(embeddings: Embeddings, model: torch.nn.Module) -> list[bytes]:
    """Return the bytes of every parameter and of every row's values."""
    dense = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return dense + [values.tobytes() for values in rows(embeddings).values()]


def train(embeddings: Embeddings, model: Net, optimizer: HybridOptimizer, data: Any, **options: Any) -> list[float]:
    losses = []
    with embeddings.stream(data, **options) as stream:
        for batch in stream:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


class Plain:
    """The same job in plain PyTorch: weights as Parameters, gradients summed in the order of the ids."""

    def __init__(self, embeddings: Embeddings) -> None:
        every = np.arange(NUM_IDS, dtype=np.uint64)
        self.weights = {
            name: torch.from_numpy(store.lookup(every, train=False).copy()) for name, store in embeddings.tables.items()
        }
        self.features = [(name, embeddings.features[name]) for name in embeddings.features.names]

    def block(self, inputs: Inputs) -> tuple[Tensor, list[tuple[str, int, int, float]]]:
        assert inputs.offsets is not None
        size, out, used = inputs.batch_size, [], []
        for f, (_, feature) in enumerate(self.features):
            for s in range(size):
                a, b = inputs.offsets[f * size + s], inputs.offsets[f * size + s + 1]
                total = torch.zeros(DIM)
                for value in inputs.values[a:b]:
                    total = total + self.weights[feature.table.name][int(value)]
                    used.append((feature.table.name, int(value), f * size + s, float(b - a)))
                out.append(total / float(b - a) if feature.pooling == "mean" and b > a else total)
        return torch.stack(out).view(len(self.features), size, DIM).transpose(0, 1).reshape(size, -1), used

    def train(self, model: Net, optimizer: torch.optim.Optimizer, data: list[Inputs], lr: float) -> list[float]:
        losses = []
        for inputs in data:
            block, used = self.block(inputs)
            leaf = block.requires_grad_()
            assert inputs.dense is not None and inputs.label is not None
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                model(torch.from_numpy(inputs.dense), leaf), torch.from_numpy(inputs.label)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            assert leaf.grad is not None
            gradients = leaf.grad.view(inputs.batch_size, len(self.features), DIM).transpose(0, 1).reshape(-1, DIM)
            sums: dict[tuple[str, int], Tensor] = {}
            for table, value, bag, length in used:
                mean = self.features[bag // inputs.batch_size][1].pooling == "mean"
                gradient = gradients[bag] / length if mean else gradients[bag]
                known = sums.get((table, value))
                sums[table, value] = gradient if known is None else known + gradient
            for (table, value), total in sums.items():
                self.weights[table][value].add_(total, alpha=-lr)
        return losses


@contextmanager
def running(num_servers: int, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield a job on `num_servers` new servers; 0: with local rows."""
    with ExitStack() as stack:
        if num_servers:
            from cluster import running_servers  # not at the top: scripts of `satrap run` have a copy of this file only

            options["servers"] = [each.address for each in stack.enter_context(running_servers(num_servers))]
        embeddings, model, optimizer = job(**options)
        if isinstance(embeddings.worker, ShardedWorker):
            stack.callback(embeddings.worker.servers.close)
        yield embeddings, model, optimizer
