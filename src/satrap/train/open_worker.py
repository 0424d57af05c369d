"""The choice of a trainer's worker: one with rows in this process, or with rows on servers, here or in another
process."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from satrap.collected import close_when_collected
from satrap.config.features import Features
from satrap.config.job import Job
from satrap.config.tables import Table
from satrap.errors import ConfigError, StreamError
from satrap.event_log import describe_process
from satrap.run_context import current_context
from satrap.train.deployment import Deployment
from satrap.train.process_group import ProcessGroup, missing_trainer
from satrap.worker.local_rows import local_worker
from satrap.worker.worker import Worker

if TYPE_CHECKING:
    from satrap.device.device_memory import DeviceMemory
    from satrap.rpc import Keys
    from satrap.worker.server_group import ServerGroup


def open_worker(
    features: Features,
    rows: Deployment,
    trainers: ProcessGroup,
    seed: int,
    staleness: int,
    num_threads: int | None,
    device: torch.device | None = None,
    device_memory: "DeviceMemory" = None,
    dense: tuple[Table, ...] = (),
) -> Worker:
    """Open the worker of a trainer. All trainers call this, and the first one starts an attempt at the servers.

    rows: the user's deployment, completed by the servers, workers and keys of the run.
    device: the device that holds the rows; None: the memory of this process, or servers.
    device_memory: how much of the device's memory the rows may take.
    dense: the tables of dense parameters on the servers; with them, trainers do not wait for each other.
    """
    job = Job(tables=(*features.tables, *dense), seed=seed)
    describe_process("trainer", job=job.fingerprint)
    if device is not None:
        return _open_on_device(features, rows, trainers, seed, staleness, num_threads, device, device_memory)
    if rows.servers is None:
        if trainers.world_size == 1:
            return local_worker(features, seed=seed, num_threads=num_threads, shared=rows.shared)
        if rows.shared is not None:
            raise ConfigError(
                f"shared is a file for the rows of one process, and there are {trainers.world_size} trainers: leave it "
                "out, or give each `satrap server` such a file and pass Deployment(servers=[...])"
            )
    from satrap.rpc import Keys
    from satrap.worker.sharded_rows import MOST_STALENESS, sharded_worker

    if staleness > MOST_STALENESS:
        raise ConfigError(
            f"staleness is {staleness}; expected at most {MOST_STALENESS} with several trainers or servers"
        )
    synchronous = staleness == 0 and not dense
    if rows.servers is None:
        return _open_among_trainers(features, job, rows, trainers, num_threads, synchronous=synchronous)
    keys = None if rows.keys is None else Keys.read(rows.keys)
    servers = _connect_servers(job, rows, trainers, keys, synchronous=synchronous)
    if not rows.workers:
        return sharded_worker(features, servers, num_threads=num_threads)
    from satrap.worker.remote.client import remote_worker

    try:
        address = rows.workers[trainers.rank % len(rows.workers)]
        return remote_worker(features, servers, address, keys=keys, num_threads=num_threads)
    except BaseException:
        servers.close()
        raise


def _open_among_trainers(
    features: Features,
    job: Job,
    rows: Deployment,
    trainers: ProcessGroup,
    num_threads: int | None,
    *,
    synchronous: bool,
) -> Worker:
    """Shard the rows over the trainers' own memory: each runs a server in its process."""
    from satrap.train.trainer_server import TrainerServer
    from satrap.worker.sharded_rows import sharded_worker

    server = TrainerServer(trainers, num_threads)
    try:
        rows = replace(rows, servers=server.addresses)
        servers = _connect_servers(job, rows, trainers, server.keys, synchronous=synchronous)
        worker = sharded_worker(features, servers, num_threads=server.num_threads)
    except BaseException:
        server.close()
        raise
    worker.stop_own_server = server.close
    close_when_collected(worker, server.close)
    return worker


def _open_on_device(
    features: Features,
    rows: Deployment,
    trainers: ProcessGroup,
    seed: int,
    staleness: int,
    num_threads: int | None,
    device: torch.device,
    device_memory: "DeviceMemory",
) -> Worker:
    from satrap.device.device_worker import device_worker

    for place, what in ((rows.servers, "servers"), (rows.shared, "a shared-memory file")):
        if place is not None:
            raise ConfigError(f"device is {str(device)!r} and the rows are in {what}: leave one of them out")
    if trainers.world_size == 1:
        return device_worker(features, device, seed=seed, num_threads=num_threads, device_memory=device_memory)
    return _open_among_devices(features, rows, trainers, seed, staleness, num_threads, device, device_memory)


def _open_among_devices(
    features: Features,
    rows: Deployment,
    trainers: ProcessGroup,
    seed: int,
    staleness: int,
    num_threads: int | None,
    device: torch.device,
    device_memory: "DeviceMemory",
) -> Worker:
    """Shard the rows over the trainers' devices. Each trainer also runs a server of its rows, for calls that are not
    part of a step."""
    from satrap.device.column_service import ColumnCalls, OtherColumns, ServedColumns
    from satrap.device.direct_collective_rows import collective_worker
    from satrap.device.own_tables import OwnTables
    from satrap.device.torch_device import require_possible
    from satrap.train.trainer_server import TrainerServer

    require_possible(features.tables, device)
    own = OwnTables(features, device, device_memory, trainers.rank, trainers.world_size)
    server = TrainerServer(trainers, num_threads, own.open)
    opened = ExitStack()
    opened.callback(server.close)
    own.num_threads = server.num_threads  # the tables are created by the handshake
    try:
        if own.has_columns:
            addresses = server.serve("columns", ServedColumns(own.engine), ColumnCalls)
            others = OtherColumns(addresses, trainers.rank, server.keys)
            opened.callback(others.close)
            own.trainer = replace(own.trainer, read_others=others)
        rows = replace(rows, servers=server.addresses)
        servers = _connect_servers(
            Job(tables=features.tables, seed=seed), rows, trainers, server.keys, synchronous=False
        )
        worker = collective_worker(
            features,
            servers,
            own,
            device,
            num_threads=server.num_threads,
            staleness=staleness,
            explain=partial(missing_trainer, server.addresses),
        )
    except BaseException:
        opened.close()
        raise
    worker.stop_own_server = opened.close
    close_when_collected(worker, opened.close)
    return worker


def _connect_servers(
    job: Job, rows: Deployment, trainers: ProcessGroup, keys: "Keys | None", *, synchronous: bool
) -> "ServerGroup":
    """Connect to the servers, in the attempt that trainer 0 starts. A lone trainer starts it only when it trains,
    restores or saves: until then it may read beside another process that trains."""
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
            keys=keys,
            wire=rows.wire,
        )

    def begin() -> None:
        if rows.workers:  # before the attempt, which would end that of another run
            from satrap.worker.remote.client import require_same_releases

            used = [rows.workers[rank % len(rows.workers)] for rank in range(trainers.world_size)]
            require_same_releases(list(dict.fromkeys(used)), keys)
        opened.append(connect(None))

    opened: list[ServerGroup] = []
    trainers.run_first(begin, StreamError)
    attempt = trainers.broadcast_int(opened[0].attempt if opened else 0)
    return opened[0] if opened else connect(attempt)
