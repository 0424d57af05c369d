"""The table of the kinds that look up rows: 26 features of one id each over one table, in this process or on a server.

All use row-wise Adagrad, which Paddle's servers have too. Every row exists before anything is timed.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.cluster import GRADIENT
from benchmarks.contenders import satrap_table
from benchmarks.contenders.satrap_table import inputs_of
from benchmarks.workload import BATCH_IDS, SAMPLES, Floats, total_rows
from satrap import RowWiseAdagrad, Table
from satrap.config.features import Features
from satrap.config.job import Job
from satrap.data.inputs import Inputs
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import sharded_worker
from satrap.worker.worker import Worker

LR = 0.05


def one_table(rows: int, dim: int) -> dict[str, Table]:
    """Return the features, as `satrap.Embeddings` accepts them."""
    return satrap_table.one_table(rows, dim, RowWiseAdagrad(lr=LR))


@contextmanager
def connected(features: Features, addresses: Sequence[str], num_threads: int, **options: Any) -> Iterator[Any]:
    """Connect a worker to servers. options: those of `ServerGroup`."""
    servers = ServerGroup(Job(tables=features.tables), addresses, **options)
    try:
        yield sharded_worker(features, servers, num_threads=num_threads)
    finally:
        servers.close()


def fill(worker: Worker, tables: Any, rows: int) -> None:
    """Look up every row once, as step 1; `tables` are the worker's."""
    if worker.servers is not None:
        worker.servers.begin_attempt()  # a server refuses rows of an earlier attempt
    count = total_rows(rows)
    for begin in range(0, count, BATCH_IDS):
        # The last batch wraps around to the first rows.
        lookup = worker.lookup(inputs_of(np.arange(begin, begin + BATCH_IDS) % count), step=1)
        assert lookup.ticket is not None
        worker.drop(lookup.ticket)
    if len(tables["ids"]) != count:
        raise RuntimeError(f"expected {count} rows in the table after filling it, found {len(tables['ids'])}")


def gradient_of(features: Features) -> Floats:
    """Return the gradient of a batch."""
    return np.full((SAMPLES, features.total_dim), GRADIENT, np.float32)


def step(worker: Any, batch: Inputs, gradient: Floats, number: int) -> tuple[float, float]:
    """Look up and update one batch; return the seconds of both."""
    start = time.perf_counter()
    lookup = worker.lookup(batch, step=number)
    middle = time.perf_counter()
    worker.update([lookup.ticket], [gradient], step=number)
    return middle - start, time.perf_counter() - middle
