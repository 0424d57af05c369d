"""Jobs whose modules look their rows up inside forward, here or on two servers, and what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster import running_servers
from loop import take_step
from remote_worker_parts import working
from satrap import Adagrad, Deployment, Embeddings, Normal, Table
from satrap.nn import Embedding

PLACES = ("here", "servers")
NUM_IDS, DIM = 12, 4


def item(**options: Any) -> Table:
    return Table("item", DIM, **{"optimizer": Adagrad(lr=0.1), "initial": Normal(std=0.5)} | options)


def tables() -> tuple[Table, Table]:
    return item(), Table("user", DIM)


class Scores(torch.nn.Module):
    """Looks up two tables: one by two modules, of which one is called twice."""

    def __init__(self, item: torch.nn.Module, again: torch.nn.Module, user: torch.nn.Module) -> None:
        super().__init__()
        self.item, self.again, self.user, self.head = item, again, user, torch.nn.Linear(DIM, 1)

    @classmethod
    def over(cls, embeddings: Embeddings) -> Scores:
        return cls(*(Embedding(embeddings, name) for name in ("item", "item", "user")))

    def forward(self, user: Tensor, seen: Tensor, shown: Tensor) -> Tensor:
        history = self.item(seen).tanh().mean(1) + self.again(shown)
        logits: Tensor = self.head(history * self.user(user) + self.item(shown)).squeeze(1)
        return logits


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids of which each occurs in every batch, since torch's Adam moves rows without a gradient, too."""
    generator = torch.Generator().manual_seed(step)
    seen = torch.stack([torch.randperm(NUM_IDS, generator=generator)[:5] for _ in range(NUM_IDS)])
    return torch.randperm(NUM_IDS, generator=generator), seen, torch.randperm(NUM_IDS, generator=generator)


def loss_of(model: Any, user: Tensor, seen: Tensor, shown: Tensor) -> Tensor:
    return torch.nn.functional.softplus(model(user, seen, shown) * (1 - 2 * (user % 2))).mean()


def loss_at(model: Any, step: int) -> Tensor:
    return loss_of(model, *batch(step))


@contextmanager
def placed(where: str) -> Iterator[dict[str, Any]]:
    """Yield options of `Embeddings` that place rows in this process ("here"), on the device "cpu" ("device" and
    "direct"), on two new servers ("servers"), or on these with a remote worker ("worker")."""
    with (
        running_servers(2 if where in ("servers", "worker") else 0) as services,
        working(int(where == "worker")) as workers,
    ):
        addresses = [[each.address for each in started] or None for started in (services, workers)]
        if services:
            yield {"deployment": Deployment(addresses[0], workers=addresses[1])}
        else:
            yield {"device": "cpu"} if where in ("device", "direct") else {}


@contextmanager
def embeddings_of(*tables: Table, where: str = "here", **options: Any) -> Iterator[Embeddings]:
    if where == "direct":
        tables = tuple(replace(table, num_rows=NUM_IDS) for table in tables)
    features = {table.name: table for table in tables}
    with placed(where) as place, Embeddings(features, num_threads=1, **place | options) as embeddings:
        yield embeddings


def start_rows(embeddings: Embeddings, name: str, count: int) -> Tensor:
    """Return the rows of the first ids as they are, or as they would begin."""
    return torch.from_numpy(np.asarray(embeddings.tables[name].lookup(np.arange(count), train=False)))


def minimize(optimizers: list[Any], loss_of: Callable[[int], Tensor], num_steps: int, *, first: int = 0) -> list[float]:
    """Return the loss of each step."""
    return [take_step(loss_of(step), *optimizers) for step in range(first, first + num_steps)]


def noted(owner: Any, method: str, monkeypatch: pytest.MonkeyPatch, note: Any = lambda argument: argument) -> list[Any]:
    """Return a list that receives a note of the first argument of each call of a method."""
    calls: list[Any] = []
    call = getattr(owner, method)

    def noting(argument: Any, *others: Any, **options: Any) -> Any:
        calls.append(note(argument))
        return call(argument, *others, **options)

    monkeypatch.setattr(owner, method, noting)
    return calls


def noted_calls(embeddings: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that receives the tables of each lookup for training."""
    calls = noted(embeddings.worker, "look_up_ids", monkeypatch, list)
    by_table = embeddings.worker.look_up_ids
    monkeypatch.setattr(embeddings.worker.rows, "look_up", by_table)  # for the worker that prefetch creates
    return calls


def noted_reads(embeddings: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that receives the tables of each lookup of modules that does not train."""
    return noted(embeddings.worker.tables, "lookup_by_table", monkeypatch, list)
