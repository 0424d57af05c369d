"""What the tests of remote workers share: files, a job over every kind of pooling, a training loop, workers served in
this process, and worker processes that can be killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from cluster import ANYWHERE, ServerProcess, features, running_servers
from contents import IDS, bits
from faults import kill, random_faults
from loop import deployed
from satrap import Embeddings, Feature, IdColumn, Parquet, Table
from satrap.config.features import Features
from satrap.rpc import Service
from satrap.train.embeddings import session_of
from satrap.worker.remote.client import remote_worker
from satrap.worker.remote.protocol import WorkerCalls
from satrap.worker.remote.service import WorkerService
from waiting import DEADLINE_SECONDS

BATCH = 8
NUM_IDS = len(IDS)


def write(path: Path, num_batches: int, seed: int = 0) -> Path:
    """Write a Parquet file whose row groups are three and a half batches long."""
    rng = np.random.default_rng(seed)
    n = num_batches * BATCH

    def lists() -> list[list[int]]:
        return [rng.integers(0, NUM_IDS, int(k)).tolist() for k in rng.integers(0, 6, n)]

    user, items = lists(), lists()
    table = pa.table(
        {
            "bag": lists(),
            "item": rng.integers(0, NUM_IDS, n, dtype=np.uint64),
            "user": user,
            "user_weight": [rng.standard_normal(len(each)).astype(np.float32).tolist() for each in user],
            "tiny": lists(),
            "path": items,
            "path_time": [rng.standard_normal(len(each)).tolist() for each in items],
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
    ids: dict[str, Any] = {"padded": "path", "padded bag": "user", "jagged last": "tiny"}
    timed = {"jagged": IdColumn("path", numbers="path_time"), "path": IdColumn(numbers="path_time")}
    weights = dict.fromkeys(["user", "padded bag"], "user_weight")
    return Parquet(str(path), dense="age", label="click", ids=ids | timed, weights=weights, **given)


class Working:
    """A worker in this process, behind a real socket."""

    def __init__(self, address: str = ANYWHERE, data: Sequence[str | os.PathLike[str]] = ("/",)) -> None:
        self.host = WorkerService(num_threads=1, data=data)
        self._service = Service(self.host, WorkerCalls, address, num_threads=4)
        self.address = self._service.address

    def close(self) -> None:
        self._service.close()
        self.host.close()

    def restart(self) -> None:
        """Replace it by another one at the same address, without any state."""
        self.close()
        self.__init__(self.address)  # type: ignore[misc]


@contextmanager
def working(num_workers: int = 1) -> Iterator[list[Working]]:
    """Workers in this process."""
    with ExitStack() as stack:
        found = []
        for _ in range(num_workers):
            found.append(Working())
            stack.callback(found[-1].close)
        yield found


@contextmanager
def serving(num_servers: int = 1, num_workers: int = 1) -> Iterator[tuple[dict[str, Any], list[Working]]]:
    """Yield the addresses of servers and workers, as options of a job, and the workers."""
    with running_servers(num_servers) as services, working(num_workers) as workers:
        given: dict[str, list[Any]] = {"servers": services, "workers": workers}
        yield {name: [each.address for each in found] for name, found in given.items() if found}, workers


class KillableWorker(ServerProcess):
    """A worker process that can be restarted at the same address."""

    def __init__(self, *options: str) -> None:
        super().__init__(Path(), options=options)

    def _command(self) -> list[str]:
        return ["worker", "--data", "/", *self._options]


@contextmanager
def dying(victims: list[ServerProcess], seed: int, num_kills: int) -> Iterator[threading.Event]:
    """Kill and restart one of them at a time at random moments. Yields an event that is set when that is over."""
    with ending(victims), random_faults([kill(each) for each in victims], seed, num=num_kills, gap=0.4) as over:
        yield over


@contextmanager
def ending(processes: list[ServerProcess]) -> Iterator[None]:
    """Stop the processes at the end of the `with` block."""
    try:
        yield
    finally:
        for each in processes:
            each.end()


class Net(torch.nn.Module):
    """A model that uses everything that a batch has."""

    def __init__(self, of: Features) -> None:
        super().__init__()
        sequences = sum(of[name].table.dim for name in ("path", "jagged", "jagged last"))
        self.layer = torch.nn.Linear(1 + of.total_dim + sequences, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        sequences = [batch[name] for name in ("path", "padded")]
        pooled = torch.stack([(each.values * each.mask.unsqueeze(2)).sum(1) for each in sequences]).sum(0)
        pooled = pooled + batch["path"].numbers["path_time"].float().sum(1, keepdim=True)
        timed = batch["jagged"].padded()
        factors = torch.sigmoid(timed.numbers["path_time"].float()).unsqueeze(2)
        jagged = [(timed.values * factors).sum(1), batch["jagged last"].padded().values.sum(1)]
        out: torch.Tensor = self.layer(torch.cat([batch.dense, batch.embeddings, pooled, *jagged], 1)).squeeze(1)
        return out


@contextmanager
def made(of: Mapping[str, Table | Feature], **options: Any) -> Iterator[Embeddings]:
    """Create embeddings, and close their connections in the end."""
    embeddings = Embeddings(dict(of), num_threads=1, **deployed(options))
    try:
        yield embeddings
    finally:
        embeddings.worker.close()


@contextmanager
def running(**options: Any) -> Iterator[tuple[Embeddings, Net, Any]]:
    """Create a job, and close its connections in the end."""
    torch.manual_seed(0)
    of = features()
    with made(of, **options) as embeddings:
        model = Net(of)
        yield embeddings, model, embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def send_through(embeddings: Embeddings, address: str, deadline: float = DEADLINE_SECONDS) -> None:
    """Connect a job with servers to the worker at the address, with short retries."""
    near = embeddings.worker
    assert near.servers is not None
    near.servers.begin_attempt()
    how: dict[str, Any] = {"deadline": deadline, "retry_seconds": 0.03}
    session_of(embeddings)._worker = remote_worker(embeddings.features, near.servers, address, num_threads=1, **how)


def train_and_note(
    job: tuple[Embeddings, Net, Any], data: Any, at: Any = lambda *_: None, first: int = 1, **options: Any
) -> list[Any]:
    """Train, and return what each batch showed; every seventh batch is dropped. `at("looked up", number)` and
    `at("updated", number)` are called in between.

    first: the number of the first batch.
    """
    embeddings, model, optimizer = job
    seen = []
    with embeddings.stream(data, **options) as stream:
        for number, batch in enumerate(stream, first):
            at("looked up", number)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
            loss.backward()
            seen.append((batch.step, loss.item(), batch.position, batch.inputs.extra["note"].to_pylist()))
            if number % 7 == 0:
                optimizer.zero_grad()
            elif number % options.get("accumulate", 1) == 0:
                optimizer.step()
                optimizer.zero_grad()
            at("updated", number)
    return seen


def evaluate(job: tuple[Embeddings, Net, Any], data: Any) -> list[Any]:
    """Return the scores of a source, as bits."""
    embeddings, model, _ = job
    embeddings.eval()
    with embeddings.stream(data) as stream, torch.no_grad():
        found = [model(batch).numpy().tobytes() for batch in stream]
    embeddings.train()
    return found


def drained_bits(job: tuple[Embeddings, Net, Any]) -> list[bytes]:
    """Return every parameter and every row, as bits."""
    embeddings, model, _ = job
    embeddings.drain()
    return bits(embeddings, model)
