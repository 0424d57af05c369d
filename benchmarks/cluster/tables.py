"""The table of the kinds that look rows up: 26 features of one id each over one table, here or on a server.

All use row-wise Adagrad, which Paddle's servers have too. Every row exists before anything is timed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.clock import available_bytes
from benchmarks.contenders import RANGE
from benchmarks.plan import table_bytes
from benchmarks.train.contenders import FEATURES
from benchmarks.workload import BATCH_IDS, SAMPLES, RowNumbers, hashed_ids, total_rows
from satrap import RowWiseAdagrad, Table, Uniform
from satrap.config.features import Features
from satrap.config.job import Job
from satrap.data.inputs import Inputs
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import ShardedWorker
from satrap.worker.worker import Worker

LR = 0.05
SLACK = 1.05  # room for so many times the rows


def one_table(rows: int, dim: int) -> dict[str, Table]:
    """The features, as `satrap.Embeddings` takes them."""
    table = Table(
        "ids",
        dim=dim,
        optimizer=RowWiseAdagrad(lr=LR),
        initial=Uniform(low=-RANGE, high=RANGE),
        capacity=int(total_rows(rows) * SLACK),
        on_full="evict",
    )
    return dict.fromkeys(FEATURES, table)


@contextmanager
def reached(features: Features, address: str, num_threads: int, **options: Any) -> Iterator[ShardedWorker]:
    """A worker over one server. options: of `ServerGroup`."""
    servers = ServerGroup(Job(tables=features.tables), [address], **options)
    try:
        yield ShardedWorker(features, servers, num_threads=num_threads)
    finally:
        servers.close()


def inputs_of(rows: RowNumbers) -> Inputs:
    """A batch without dense numbers and labels."""
    return Inputs(names=FEATURES, values=hashed_ids(rows), batch_size=SAMPLES)


def fill(worker: Worker, tables: Any, rows: int) -> None:
    """Looks every row up once, as step 1; `tables` are the worker's."""
    if isinstance(worker, ShardedWorker):
        worker.servers.begin()  # before the rows: those of a run before would be refused
    count = total_rows(rows)
    for begin in range(0, count, BATCH_IDS):
        # The last batch begins again at the first row.
        looked = worker.lookup(inputs_of(np.arange(begin, begin + BATCH_IDS) % count), step=1)
        assert looked.ticket is not None
        worker.drop(looked.ticket)
    if len(tables["ids"]) != count:
        raise RuntimeError(f"the table holds {len(tables['ids'])} rows after filling it with {count}")


def require_memory(rows: int, dim: int, num_tables: int) -> None:
    """Refuses to begin what would not fit."""
    needed, available = num_tables * table_bytes(rows, dim, "rowwise"), available_bytes()
    if needed > available:
        raise RuntimeError(f"needs {needed / 2**30:.1f} GiB of memory and {available / 2**30:.1f} are available")
