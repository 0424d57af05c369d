"""The choice of a trainer's worker: one with rows in this process, or with rows on servers, here or in another process.

Options that the script leaves out come from the run that started it (`satrap.run_context`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from satrap.config.features import Features
from satrap.config.job import Job
from satrap.config.tables import Table
from satrap.errors import ConfigError, StreamError
from satrap.run_context import current_context
from satrap.train.process_group import ProcessGroup
from satrap.worker.local_rows import LocalWorker

if TYPE_CHECKING:
    from satrap.worker.server_group import ServerGroup
    from satrap.worker.sharded_rows import ShardedWorker


@dataclass(frozen=True, slots=True)
class RowLocation:
    """Where the rows are, and how to reach them: options of `Embeddings`."""

    shared: str | PathLike[str] | None = None
    servers: Sequence[str] | None = None
    keys: str | PathLike[str] | None = None
    wire: str = "float32"
    workers: Sequence[str] | None = None
    take_over: bool = False


def open_worker(
    features: Features,
    rows: RowLocation,
    trainers: ProcessGroup,
    seed: int,
    staleness: int,
    num_threads: int | None,
    dense: tuple[Table, ...] = (),
) -> "LocalWorker | ShardedWorker":
    """Open the worker of a trainer. All trainers call this, and the first one starts an attempt at the servers.

    dense: the tables of dense parameters on the servers; then trainers do not wait for each other.
    """
    context = current_context()
    if rows.servers is None and context is not None:
        rows = replace(rows, servers=context.servers, keys=context.keys if rows.keys is None else rows.keys)
    if rows.workers is None:
        rows = replace(rows, workers=() if context is None else context.workers)
    if rows.servers is None:
        if rows.workers:
            raise ConfigError("found workers but no servers: pass servers=[...], which the workers call")
        if rows.keys is not None or rows.wire != "float32":
            option = f"wire={rows.wire!r}" if rows.keys is None else "keys"
            raise ConfigError(f"found {option} but no servers: leave it out, or pass servers=[...]")
        if trainers.world_size > 1:
            raise ConfigError(
                f"found {trainers.world_size} trainers under torch.distributed but no servers, so each would train its "
                "own tables: pass servers=[...] to share them"
            )
        return LocalWorker(features, seed=seed, num_threads=num_threads, shared=rows.shared)
    if rows.shared is not None:
        raise ConfigError("shared is a file for local rows, but servers hold them: pass it to `satrap server`")
    from satrap.worker.sharded_rows import MOST_STALENESS, ShardedWorker

    workers: Any = rows.workers
    if not isinstance(workers, list | tuple) or not all(isinstance(address, str) for address in workers):
        raise ConfigError(f"workers is {workers!r}; expected a list of 'tcp://host:port'")
    if staleness > MOST_STALENESS:
        raise ConfigError(f"staleness is {staleness}; expected at most {MOST_STALENESS} with servers")
    job = Job(tables=(*features.tables, *dense), seed=seed)
    servers = _connect_servers(job, rows, trainers, synchronous=staleness == 0 and not dense)
    if not rows.workers:
        return ShardedWorker(features, servers, num_threads=num_threads)
    from satrap.rpc import Keys
    from satrap.worker.remote.client import RemoteWorker

    try:
        address = rows.workers[trainers.rank % len(rows.workers)]
        client_keys = None if rows.keys is None else Keys.read(rows.keys)
        return RemoteWorker(features, servers, address, keys=client_keys, num_threads=num_threads)
    except BaseException:
        servers.close()
        raise


def _connect_servers(job: Job, rows: RowLocation, trainers: ProcessGroup, *, synchronous: bool) -> "ServerGroup":
    """Connect to the servers, in the attempt that trainer 0 starts. A lone trainer starts it only when it trains,
    restores or saves: until then it may read beside another process that trains."""
    from satrap.rpc import Keys
    from satrap.worker.server_group import ServerGroup

    assert rows.servers is not None
    addresses, context = rows.servers, current_context()

    def connect(attempt: int | None) -> ServerGroup:
        return ServerGroup(
            job,
            addresses,
            trainer=trainers.rank,
            barrier_size=trainers.world_size if synchronous and trainers.world_size > 1 else 0,
            attempt=attempt,
            begin=trainers.world_size > 1 or bool(rows.workers),
            take_over=rows.take_over,
            launch=0 if context is None else context.launch,
            keys=None if rows.keys is None else Keys.read(rows.keys),
            wire=rows.wire,
        )

    opened: list[ServerGroup] = []
    trainers.run_first(lambda: opened.append(connect(None)), StreamError)
    attempt = trainers.broadcast_int(opened[0].attempt if opened else 0)
    return opened[0] if opened else connect(attempt)
