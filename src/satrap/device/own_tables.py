"""The tables that a trainer's server has, for calls that are no part of a step, and the rows that the trainer owns of
them, for the steps of all trainers."""

from dataclasses import replace
from typing import Any

import torch

from satrap.config.features import Features
from satrap.config.job import Job
from satrap.config.tables import Table
from satrap.device.device_engine import DeviceEngine
from satrap.device.device_memory import DeviceMemory
from satrap.device.device_stream import new_stream
from satrap.device.direct_owned_rows import DirectOwnedRows, are_owned_direct
from satrap.device.direct_rows import DirectEngine
from satrap.device.owned_rows import OwnedRows
from satrap.device.segments import TableGroups
from satrap.device.table_shards import Trainer
from satrap.table.engine import Slot, state_dim


class OwnTables:
    """The tables that this trainer's server has: empty ones at first, and others after each restore."""

    def __init__(
        self, features: Features, device: torch.device, device_memory: DeviceMemory, rank: int, world_size: int
    ) -> None:
        """Raise ConfigError for a table that cannot be divided over `world_size` trainers.

        device_memory: the argument of `Embeddings`; each trainer uses this much on its device."""
        self._features, self._device, self._device_memory = features, device, device_memory
        self.trainer = Trainer(rank, world_size)
        self.stream = new_stream(device)
        """Where rows are read and changed."""
        for table in features.tables:
            self.trainer.columns(table, state_dim(table))
        self.num_threads: int | None = None
        """Threads of one call on the tables that are created next; None: all cores."""
        self._groups = TableGroups.of(features.tables)
        self._rows: OwnedRows | DirectOwnedRows | None = None
        self.are_direct = are_owned_direct(features)
        """Whether the place of each row is computed from its id."""
        self._engine: DeviceEngine | None = None

    def open(self, job: Job) -> list[Slot]:
        """Create empty tables for the server. The previous tables must be unused, since a device may not hold both."""
        self._rows = self._engine = None
        engine = (DirectEngine if self.are_direct else DeviceEngine)(
            self._with_frozen_ids(job),
            self._device,
            seed=job.seed,
            num_threads=self.num_threads,
            device_memory=self._device_memory,
            trainer=self.trainer,
            stream=self.stream,
        )
        self._engine = engine
        if isinstance(engine, DirectEngine):
            self._rows = DirectOwnedRows(self._features, engine)
        else:
            self._rows = OwnedRows(self._features, engine, self._groups, self.trainer)
        return engine.slots(job.seed)

    def _with_frozen_ids(self, job: Job) -> list[Table]:
        """Return the job's tables with their sets of frozen ids, which a job that was sent does not have: updates here
        bring gradients of frozen ids, too."""
        known = {table.name: table.frozen for table in self._features.tables}
        return [
            replace(table, frozen=known[table.name]) if known.get(table.name) == table.frozen else table
            for table in job.tables
        ]

    @property
    def has_columns(self) -> bool:
        """Whether a table is divided by columns, which trainers then read from each other."""
        return bool(self._groups.of_kinds("columns"))

    def engine(self) -> DeviceEngine:
        """Return the engine of these tables."""
        assert self._engine is not None, "the handshake creates tables before there is a call"
        return self._engine

    def rows(self) -> Any:
        """Return the rows of the present tables."""
        assert self._rows is not None, "the handshake creates tables before there is a lookup"
        return self._rows
