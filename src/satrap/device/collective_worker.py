"""Creates the worker of one of several trainers whose rows are on their devices."""

from collections.abc import Callable

import torch

from satrap.collected import close_when_collected
from satrap.config.features import Features
from satrap.device.collective_rows import CollectiveRows
from satrap.device.device_blocks import TensorBlocks
from satrap.device.direct_collective_rows import DirectCollectiveRows
from satrap.device.own_tables import OwnTables
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import require_tables
from satrap.worker.sharded_tables import ShardedTables
from satrap.worker.worker import Worker


def collective_worker(
    features: Features,
    servers: ServerGroup,
    own: OwnTables,
    device: torch.device,
    *,
    num_threads: int | None,
    staleness: int,
    explain: Callable[[Exception], Exception],
) -> Worker:
    """Return a worker over tables on the devices of all trainers, which call this together.

    servers: those of all trainers. own: the tables of this trainer's server.
    explain: returns the error to raise for one of an exchange between trainers."""
    require_tables(features, servers)
    rows = (DirectCollectiveRows if own.are_direct else CollectiveRows)(
        features, servers, own.rows, own.stream, num_threads=num_threads, staleness=staleness, explain=explain
    )
    worker = Worker(features, rows, ShardedTables(servers), blocks=TensorBlocks(device))
    close_when_collected(worker, rows.end_rounds)
    return worker
