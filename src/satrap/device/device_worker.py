"""Creates the worker of one trainer whose rows are on a device."""

from functools import partial

import torch

from satrap.config.features import Features
from satrap.device.device_blocks import TensorBlocks
from satrap.device.device_engine import DeviceEngine
from satrap.device.device_ids import DeviceReader
from satrap.device.device_memory import DeviceMemory
from satrap.device.device_rows import DeviceRows
from satrap.device.device_stream import new_stream
from satrap.device.direct_rows import DirectEngine, DirectRows, are_direct
from satrap.device.torch_device import require_possible, resolve_device
from satrap.table.engine import Slot
from satrap.table.table_group import TableGroup
from satrap.worker.worker import Worker, require_features


def device_worker(
    features: Features,
    device: torch.device | str,
    *,
    seed: int = 0,
    num_threads: int | None = None,
    device_memory: DeviceMemory = None,
) -> Worker:
    """Return a worker that owns the tables of its features, empty ones, on a device. seed, num_threads: as in `Store`.
    device_memory: as in `Embeddings`."""
    require_features(features)
    resolved = resolve_device(device)
    require_possible(features.tables, resolved)
    direct = are_direct(features)
    create = partial(
        DirectEngine if direct else DeviceEngine,
        features.tables,
        resolved,
        seed=seed,
        num_threads=num_threads,
        device_memory=device_memory,
        stream=new_stream(resolved),
    )
    engine = create()
    rows = (DirectRows if direct else DeviceRows)(features, engine)

    def renew() -> list[Slot]:  # must not refer to the worker or the tables: they would keep each other alive
        engine = create()
        rows.use(engine)
        return engine.slots(seed)

    tables = TableGroup.in_engine(engine.slots(seed), renew)
    return Worker(features, rows, tables, blocks=TensorBlocks(resolved), reader=DeviceReader(features, resolved))
