"""Jobs whose modules look their rows up inside forward, here or on two servers, and what plain torch makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster import running_servers
from satrap import Deployment, Embeddings, Table

PLACES = ("here", "servers")


@contextmanager
def deployed(where: str) -> Iterator[Deployment | None]:
    """Yield where the rows are: in this process, or on two new servers."""
    with running_servers(2 if where == "servers" else 0) as services:
        yield Deployment([each.address for each in services]) if services else None


@contextmanager
def embeddings_of(*tables: Table, where: str = "here", **options: Any) -> Iterator[Embeddings]:
    with deployed(where) as deployment:
        features = {table.name: table for table in tables}
        with Embeddings(features, num_threads=1, deployment=deployment, **options) as embeddings:
            yield embeddings


def start_rows(embeddings: Embeddings, name: str, count: int) -> Tensor:
    """Return the rows of the first ids as they are, or as they would begin."""
    return torch.from_numpy(np.asarray(embeddings.tables[name].lookup(np.arange(count), train=False)))


def train(
    optimizers: list[Any], loss_of: Callable[[int], Tensor], steps: int, after: Callable[[], object] = lambda: None
) -> list[float]:
    """Return the loss of each step. after: called between the backward pass and the step."""
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        after()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses
