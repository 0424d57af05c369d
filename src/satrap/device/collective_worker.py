"""A worker whose rows are on the devices of several trainers."""

from collections.abc import Callable

import torch

from satrap.collected import close_when_collected
from satrap.config.features import Features
from satrap.config.job import Job
from satrap.device.collective_lookups import CollectiveStream
from satrap.device.collective_rows import CollectiveRows
from satrap.device.device_blocks import DeviceBlocks
from satrap.device.device_engine import DeviceEngine
from satrap.device.device_memory import DeviceMemory
from satrap.device.device_stream import new_stream
from satrap.device.owned_rows import OwnedRows
from satrap.device.segments import TableGroups
from satrap.device.table_shards import Trainer
from satrap.table.engine import Slot, native_config
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import ShardedWorker


class OwnTables:
    """The tables that this trainer's server has: empty ones at first, and others after each restore."""

    def __init__(
        self, features: Features, device: torch.device, device_memory: DeviceMemory, rank: int, world_size: int
    ) -> None:
        """device_memory: that of `Embeddings`, of each trainer. Raise ConfigError for a table that so many trainers
        cannot divide."""
        self._features, self._device, self._device_memory = features, device, device_memory
        self.trainer = Trainer(rank, world_size)
        self.stream = new_stream(device)
        """Where rows are read and changed."""
        for table in features.tables:
            self.trainer.columns(table, native_config(table).state_dim)
        self.num_threads: int | None = None
        """Threads of one call on the tables that are created next; None: all cores."""
        self._groups = TableGroups.of(features.tables)
        self._rows: OwnedRows | None = None
        self._engine: DeviceEngine | None = None

    def open(self, job: Job) -> list[Slot]:
        """Create empty tables, for the server. The earlier ones must be unused: a device may not hold both."""
        self._rows = self._engine = None
        engine = DeviceEngine(
            job.tables,
            self._device,
            seed=job.seed,
            num_threads=self.num_threads,
            device_memory=self._device_memory,
            trainer=self.trainer,
            stream=self.stream,
        )
        self._engine, self._rows = engine, OwnedRows(self._features, engine, self._groups, self.trainer.rank)
        return engine.slots(job.seed)

    @property
    def has_columns(self) -> bool:
        """Whether a table is divided by columns, which trainers then read from each other."""
        return bool(self._groups.of_kinds("columns"))

    def engine(self) -> DeviceEngine:
        """Return the engine of these tables."""
        assert self._engine is not None, "the handshake creates tables before there is a call"
        return self._engine

    def rows(self) -> OwnedRows:
        """Return the rows of these tables."""
        assert self._rows is not None, "the handshake creates tables before there is a lookup"
        return self._rows


class CollectiveWorker(DeviceBlocks, ShardedWorker):
    """A worker over tables on the devices of all trainers."""

    def __init__(
        self,
        features: Features,
        servers: ServerGroup,
        own: OwnTables,
        device: torch.device,
        *,
        num_threads: int | None,
        staleness: int,
        explain: Callable[[Exception], Exception],
    ) -> None:
        """All trainers call this together. servers: those of all trainers. own: the tables of this trainer's.
        explain: returns the error to raise for one of an exchange between trainers."""
        self._collective = CollectiveRows(
            features, servers, own.rows, own.stream, num_threads=num_threads, staleness=staleness, explain=explain
        )
        super().__init__(features, servers, rows=self._collective)
        self.device, self.device_stream = device, own.stream
        self.launches = self._collective.launches
        close_when_collected(self, self._collective.close)

    def open_stream(self, step: int) -> CollectiveStream:
        return self._collective.open_stream(step)

    def pad(self, step: int, oldest_open: int) -> None:
        self._collective.join(step, oldest_open)

    def pause(self) -> None:
        self._collective.pause()

    def close(self) -> None:
        self._collective.close()
        super().close()
