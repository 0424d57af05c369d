"""Which worker a trainer has: one with rows in this process, or with rows on servers, here or in a process of its own.

What a script leaves out, the run that started it has told (`satrap.run_context`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from satrap.config.features import Features
from satrap.config.job import Job
from satrap.config.tables import Table
from satrap.errors import ConfigError, StreamError
from satrap.run_context import current
from satrap.train.process_group import ProcessGroup
from satrap.worker.local_rows import LocalWorker

if TYPE_CHECKING:
    from satrap.worker.server_group import ServerGroup
    from satrap.worker.sharded_rows import ShardedWorker


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Where the rows are, and how they cross to there: options of `Embeddings`."""

    shared: str | PathLike[str] | None = None
    servers: Sequence[str] | None = None
    keys: str | PathLike[str] | None = None
    wire: str = "float32"
    workers: Sequence[str] | None = None
    take_over: bool = False


def open_worker(
    features: Features,
    rows: RowsAt,
    trainers: ProcessGroup,
    seed: int,
    staleness: int,
    num_threads: int | None,
    dense: tuple[Table, ...] | None = None,
) -> "LocalWorker | ShardedWorker":
    """The worker of a trainer. All trainers call it: the first one begins an attempt at the servers.

    dense: the tables of dense parameters, of trainers that do not wait for each other; None: they do.
    """
    place = current()
    if rows.servers is None and place is not None:
        rows = replace(rows, servers=place.servers, keys=place.keys if rows.keys is None else rows.keys)
    if rows.workers is None:
        rows = replace(rows, workers=() if place is None else place.workers)
    if rows.servers is None:
        if rows.workers:
            raise ConfigError("there are workers and no servers: name the servers, which the workers call")
        if rows.keys is not None or rows.wire != "float32":
            given = f"wire={rows.wire!r}" if rows.keys is None else "keys"
            raise ConfigError(f"there are {given} and no servers: leave that out, or name the servers")
        if trainers.world > 1:
            raise ConfigError(
                f"there are {trainers.world} trainers under torch.distributed and no servers, so each would "
                "train tables of its own: name the servers that hold them"
            )
        return LocalWorker(features, seed=seed, num_threads=num_threads, shared=rows.shared)
    if rows.shared is not None:
        raise ConfigError("shared is a file for rows here, and servers hold them: give it to `satrap server`")
    from satrap.worker.sharded_rows import MOST_STALENESS, ShardedWorker

    workers: Any = rows.workers
    if not isinstance(workers, list | tuple) or not all(isinstance(each, str) for each in workers):
        raise ConfigError(f"workers is {workers!r}; wanted a list of 'tcp://host:port'")
    if staleness > MOST_STALENESS:
        raise ConfigError(f"staleness is {staleness}; wanted at most {MOST_STALENESS} with servers")
    job = Job(tables=(*features.tables, *(dense or ())), seed=seed)
    servers = _greeted(job, rows, trainers, synchronous=staleness == 0 and dense is None)
    if not rows.workers:
        return ShardedWorker(features, servers, num_threads=num_threads)
    from satrap.rpc import Keys
    from satrap.worker.remote.client import RemoteWorker

    try:
        address = rows.workers[trainers.rank % len(rows.workers)]
        client = None if rows.keys is None else Keys.read(rows.keys)
        return RemoteWorker(features, servers, address, keys=client, num_threads=num_threads)
    except BaseException:
        servers.close()
        raise


def _greeted(job: Job, rows: RowsAt, trainers: ProcessGroup, *, synchronous: bool) -> "ServerGroup":
    """The servers, in the attempt that the first trainer begins. One trainer alone begins it when it trains, restores
    or saves: until then it may look beside another process that does."""
    from satrap.rpc import Keys
    from satrap.worker.server_group import ServerGroup

    assert rows.servers is not None
    addresses, place = rows.servers, current()

    def greet(attempt: int | None) -> ServerGroup:
        return ServerGroup(
            job,
            addresses,
            trainer=trainers.rank,
            together=trainers.world if synchronous and trainers.world > 1 else 0,
            attempt=attempt,
            begin=trainers.world > 1 or bool(rows.workers),
            take_over=rows.take_over,
            launch=0 if place is None else place.launch,
            keys=None if rows.keys is None else Keys.read(rows.keys),
            wire=rows.wire,
        )

    found: list[ServerGroup] = []
    trainers.first_does(lambda: found.append(greet(None)), StreamError)
    attempt = trainers.from_first(found[0].attempt if found else 0)
    return found[0] if found else greet(attempt)
