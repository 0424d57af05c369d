"""A user's own training loop over three features of two tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satrap import SGD, Deployment, Embeddings, Inputs, Table, Zeros
from satrap.train.optimizer import HybridOptimizer

BATCH, NUM_IDS, DIM = 8, 30, 4


def tables(
    lr: float = 0.1,
    shards: tuple[Any, Any] = ("rows", "rows"),
    num_users: int | None = None,
    frozen: tuple[Any, Any] = (False, False),
) -> dict[str, Any]:
    """Return a table of any ids, or with this `num_rows`, and one with `num_rows`. shards: how several trainers divide
    the table of users, and that of items. frozen: which rows of these are."""
    user = Table("user", dim=DIM, optimizer=SGD(lr=lr), shard=shards[0], num_rows=num_users, frozen=frozen[0])
    item = Table("item", dim=DIM, optimizer=SGD(lr=lr), shard=shards[1], num_rows=2 * NUM_IDS, frozen=frozen[1])
    return {"user": user, "item": item, "history": item.bag("mean")}


def counting_tables(shards: tuple[Any, Any] = ("rows", "rows")) -> dict[str, Any]:
    """Return tables whose rows become minus the sum of their gradients: exact for integers, in any order. shards: as
    those of `tables`."""
    how: dict[str, Any] = {"dim": DIM, "optimizer": SGD(lr=1.0), "initial": Zeros()}
    user, item = (Table(name, shard=shard, **how) for name, shard in zip(("user", "item"), shards, strict=True))
    return {"user": user, "item": item, "history": item.bag("sum")}


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


def join(parts: list[Inputs]) -> Inputs:
    """Return one batch with the samples of several."""
    num_features = len(parts[0].names)
    values, lengths = [], []
    for f in range(num_features):
        for part in parts:
            assert part.offsets is not None
            begin, end = (part.offsets[i * part.batch_size] for i in (f, f + 1))
            values.append(part.values[begin:end])
            lengths.append(np.diff(part.offsets[f * part.batch_size : (f + 1) * part.batch_size + 1]))
    return Inputs(
        names=parts[0].names,
        values=np.concatenate(values),
        offsets=np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64),
        batch_size=sum(part.batch_size for part in parts),
        dense=np.concatenate([part.dense for part in parts if part.dense is not None]),
        label=np.concatenate([part.label for part in parts if part.label is not None]),
    )


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


def job(
    staleness: int = 0, dense: str = "cpu", features: Any = None, **options: Any
) -> tuple[Embeddings, Net, HybridOptimizer]:
    """dense: the device of the model. features: by default `tables()`."""
    torch.manual_seed(0)
    embeddings = Embeddings(features or tables(), staleness=staleness, num_threads=1, **deployed(options))
    model = Net().to(dense)
    return embeddings, model, embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))


def rows(embeddings: Embeddings) -> dict[str, np.ndarray]:
    return {name: store.read(np.arange(NUM_IDS, dtype=np.uint64)).values for name, store in embeddings.tables.items()}


def take_step(loss: Tensor, *optimizers: Any) -> float:
    """Take a step of each optimizer, and return the loss."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def train_step(model: torch.nn.Module, optimizer: Any, batch: Any) -> float:
    """Train on one batch, and return its loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(embeddings: Embeddings, model: Net, optimizer: HybridOptimizer, data: Any, **options: Any) -> list[float]:
    with embeddings.stream(data, **options) as stream:
        return [train_step(model, optimizer, batch) for batch in stream]


def train_dropping(
    data: Any, features: Any, *, overlap: bool = False, accumulate: int = 1, dense: str = "cpu", **options: Any
) -> tuple[Embeddings, Net]:
    """Train a new job, which drops every seventh batch."""
    embeddings, model, optimizer = job(dense=dense, features=features, seed=3, **options)
    with embeddings.stream(data, overlap=overlap, accumulate=accumulate, device=dense) as stream:
        for number, batch in enumerate(stream, 1):
            loss_of(model, batch).backward()
            if number % 7 == 0:
                optimizer.zero_grad()
            elif batch.completes_step:
                optimizer.step()
                optimizer.zero_grad()
    return embeddings, model


@contextmanager
def running(num_servers: int, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield a job on `num_servers` new servers; 0: with local rows."""
    from cluster import running_servers  # not at the top: scripts of `satrap run` have a copy of this file only

    with running_servers(num_servers) as services:
        embeddings, model, optimizer = job(servers=[each.address for each in services] or None, **options)
        try:
            yield embeddings, model, optimizer
        finally:
            embeddings.worker.close()
