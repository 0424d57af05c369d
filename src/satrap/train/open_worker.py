"""The choice of a trainer's worker: one with rows in this process, or with rows on servers, here or in another
process."""

from typing import TYPE_CHECKING

from satrap.config.features import Features
from satrap.config.job import Job
from satrap.config.tables import Table
from satrap.errors import ConfigError, StreamError
from satrap.event_log import describe_process
from satrap.run_context import current_context
from satrap.train.deployment import Deployment
from satrap.train.process_group import ProcessGroup
from satrap.worker.local_rows import LocalWorker

if TYPE_CHECKING:
    from satrap.worker.server_group import ServerGroup
    from satrap.worker.sharded_rows import ShardedWorker


def open_worker(
    features: Features,
    rows: Deployment,
    trainers: ProcessGroup,
    seed: int,
    staleness: int,
    num_threads: int | None,
    dense: tuple[Table, ...] = (),
) -> "LocalWorker | ShardedWorker":
    """Open the worker of a trainer. All trainers call this, and the first one starts an attempt at the servers.

    rows: with what the run gives.
    dense: the tables of dense parameters on the servers; then trainers do not wait for each other.
    """
    job = Job(tables=(*features.tables, *dense), seed=seed)
    describe_process("trainer", job=job.fingerprint)
    if rows.servers is None:
        if trainers.world_size > 1:
            raise ConfigError(
                f"found {trainers.world_size} trainers under torch.distributed but no servers, so each would train its "
                "own tables: pass Deployment(servers=[...]) to share them"
            )
        return LocalWorker(features, seed=seed, num_threads=num_threads, shared=rows.shared)
    from satrap.worker.sharded_rows import MOST_STALENESS, ShardedWorker

    if staleness > MOST_STALENESS:
        raise ConfigError(f"staleness is {staleness}; expected at most {MOST_STALENESS} with servers")
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


def _connect_servers(job: Job, rows: Deployment, trainers: ProcessGroup, *, synchronous: bool) -> "ServerGroup":
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
