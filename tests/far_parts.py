"""What the tests of workers in processes of their own share: files, a job over every kind of pooling, a loop over it,
workers served in this process, and some that can be killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from cluster import IDS, Killable, features
from satrap import Embeddings, Parquet
from satrap.far import FarWorker
from satrap.host import Host
from satrap.remote import RemoteWorker
from satrap.rpc import Service
from satrap.worker_calls import WorkerCalls

BATCH = 8
NUM_IDS = len(IDS)


def write(path: Path, num_batches: int, seed: int = 0) -> Path:
    """Parquet, its row groups three batches and a half long."""
    rng = np.random.default_rng(seed)
    n = num_batches * BATCH

    def lists() -> list[list[int]]:
        return [rng.integers(0, NUM_IDS, int(k)).tolist() for k in rng.integers(0, 6, n)]

    user = lists()
    table = pa.table(
        {
            "bag": lists(),
            "item": rng.integers(0, NUM_IDS, n, dtype=np.uint64),
            "user": user,
            "user_weight": [rng.standard_normal(len(each)).astype(np.float32).tolist() for each in user],
            "tiny": lists(),
            "path": lists(),
            "age": rng.standard_normal(n),
            "click": rng.integers(0, 2, n).astype(np.float64),
            "note": [f"n{i}" for i in range(n)],
        }
    )
    pq.write_table(table, path, row_group_size=7 * BATCH // 2)
    return path


def source(path: Path, **options: Any) -> Parquet:
    given: dict[str, Any] = {
        "batch_size": BATCH,
        "block_rows": 7 * BATCH // 2,
        "num_threads": 1,
        "extra": "note",
    } | options
    return Parquet(str(path), dense="age", label="click", weights={"user": "user_weight"}, **given)


@contextmanager
def working(num_workers: int = 1) -> Iterator[list[Service]]:
    """Workers on free ports."""
    with ExitStack() as stack:
        found = []
        for _ in range(num_workers):
            host = Host(num_threads=1)
            stack.callback(host.close)
            found.append(stack.enter_context(Service(host, WorkerCalls, "tcp://127.0.0.1:0", num_threads=4)))
        yield found


class KillableWorker(Killable):
    """A worker process; started again at the same port."""

    def __init__(self) -> None:
        self._begin()

    def _command(self) -> list[str]:
        return ["worker"]


class Net(torch.nn.Module):
    """Uses everything that a batch has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        path = batch.sequences["path"]
        pooled = (path.values * path.mask.unsqueeze(2)).sum(1)
        out: torch.Tensor = self.layer(torch.cat([batch.dense, batch.embeddings, pooled], 1)).squeeze(1)
        return out


@contextmanager
def running(**options: Any) -> Iterator[tuple[Embeddings, Net, Any]]:
    """A job, its connections closed in the end."""
    torch.manual_seed(0)
    of = features()
    embeddings = Embeddings(dict(of), num_threads=1, **options)
    model = Net(1 + of.total_dim + 5)
    try:
        yield embeddings, model, embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        if isinstance(embeddings.worker, FarWorker):
            embeddings.worker.close()
        elif isinstance(embeddings.worker, RemoteWorker):
            embeddings.worker.servers.close()


def train(job: tuple[Embeddings, Net, Any], data: Any, **options: Any) -> list[Any]:
    """Of each batch what was seen; every seventh is dropped."""
    embeddings, model, optimizer = job
    seen = []
    with embeddings.stream(data, **options) as stream:
        for number, batch in enumerate(stream, 1):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
            loss.backward()
            seen.append((batch.step, loss.item(), batch.position, batch.inputs.extra["note"].to_pylist()))
            if number % 7 == 0:
                optimizer.zero_grad()
            elif number % options.get("accumulate", 1) == 0:
                optimizer.step()
                optimizer.zero_grad()
    return seen


def evaluate(job: tuple[Embeddings, Net, Any], data: Any) -> list[Any]:
    """Scores of a source, as bits."""
    embeddings, model, _ = job
    embeddings.eval()
    with embeddings.stream(data) as stream, torch.no_grad():
        found = [model(batch).numpy().tobytes() for batch in stream]
    embeddings.train()
    return found


def bits(job: tuple[Embeddings, Net, Any]) -> list[bytes]:
    """Every parameter and every row."""
    embeddings, model, _ = job
    embeddings.drain()
    dense = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return dense + [part.tobytes() for table in embeddings.tables.values() for part in table.read(IDS)]
