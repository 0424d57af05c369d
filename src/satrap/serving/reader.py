"""Rows that somebody else trains or has trained, to look at and to evaluate with: nothing here changes one.

A `Reader` opens the servers of a live run, beside its trainers; the newest checkpoint in a run's folder; or the
snapshot of a table. Features, batches and streams are those of `Embeddings`. From servers each call reads what they
hold at that moment, also after the run has begun again. From a folder the rows are copied into this process, with
their optimizer state: that takes as much memory as they took in training.
"""

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from satrap.checkpoint.run_directory import STATE, RunDirectory, require_rows, table_folders
from satrap.checkpoint.state_dict_file import read_state, require_model
from satrap.config.features import Features
from satrap.config.job import Job
from satrap.config.tables import Feature, Table
from satrap.config.validation import suggest
from satrap.data.inputs import Inputs
from satrap.data.iterable import Iterable as Items
from satrap.errors import CheckpointError, ConfigError, InputError, SatrapError, StreamError
from satrap.run_context import current
from satrap.table.engine import open_engine
from satrap.table.snapshot.directory import parts_in, parts_of, read_manifest
from satrap.table.snapshot.manifest import FILE_NAME
from satrap.table.store import Store, StoredRows
from satrap.table.table_group import TableGroup
from satrap.train.batch import Batch
from satrap.train.batch_lookup import BatchLookup
from satrap.train.stream import Stream
from satrap.worker.local_rows import LocalRows
from satrap.worker.worker import Rows, Worker

if TYPE_CHECKING:
    from satrap.worker.sharded_tables import ShardedTable

_MOST_READS = 10  # of a folder whose run goes on saving, and removes what is old


class ReaderTable:
    """One table, to read."""

    def __init__(self, store: "Store | ShardedTable") -> None:
        self.table: Table = store.table
        """Its configuration."""
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __bool__(self) -> bool:
        """A table is one even while it is empty."""
        return True

    def __repr__(self) -> str:
        return f"ReaderTable({self.table.name!r}, dim={self.table.dim}, rows={len(self)})"

    @property
    def dim(self) -> int:
        """Numbers in a row."""
        return self.table.dim

    @property
    def version(self) -> int:
        """As `Store.version`."""
        return self._store.version

    def lookup(self, ids: ArrayLike) -> NDArray[np.float32]:
        """The values of the ids' rows: float32 [n, dim]. An id without a row reads as `table.absent` says."""
        return self._store.lookup(ids, train=False)

    def read(self, ids: ArrayLike) -> StoredRows:
        """As `Store.read`: values, optimizer state and presence."""
        return self._store.read(ids)

    def stats(self) -> dict[str, int]:
        """As `Store.stats`."""
        return self._store.stats()


class Reader:
    """See the file's docstring. A context manager; any number of threads may use it."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        features: Mapping[str, Feature | Table] | None = None,
        *,
        servers: list[str] | tuple[str, ...] | None = None,
        keys: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        """path: the folder of a run's checkpoints (here, or on any fsspec system), of which the newest is taken, or of
            a table's snapshot. None: the rows are on servers.

        features: those of the model, as its `Embeddings` has them; some of them will do. None: rows are looked up by
            table and id alone.
        servers: "tcp://host:port" of one server of the run, or of several: they know the others. Under `satrap run`
            they are the run's.
        keys: the file client.key of `satrap keys`; without it the servers are on this machine.
        num_threads: of table work; None: all cores.
        """
        run = current()
        if path is None and servers is None and run is not None:
            servers, keys = run.servers, run.keys if keys is None else keys
        if (path is None) == (servers is None):
            raise ConfigError("Reader: give either the path of a folder or servers=[...] of a live run")
        if path is not None and keys is not None:
            raise ConfigError("Reader: keys are for servers; the rows are in a folder: leave them out")
        if path is not None and not os.fspath(path):
            raise ConfigError("Reader: path is empty; wanted the folder of a run or of a table's snapshot")
        self._closed = False
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._rows: _Rows = (
            _OnServers(servers, keys, num_threads) if path is None else _InFolder(os.fspath(path), num_threads)
        )
        self.tables: Mapping[str, ReaderTable] = {name: ReaderTable(each) for name, each in self._rows.tables.items()}
        """The tables by name."""
        self.features: Features | None = None
        """The model's; a batch has them in this order."""
        self._worker: Worker | None = None
        try:
            if features is not None:
                self.features = _in_order(Features(features), self._rows.job)
                self._worker = Worker(self.features, self._rows.of(self.features))
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Reader({self._rows.where}: {', '.join(self.tables)})"

    @property
    def step(self) -> int:
        """The last step that these rows were trained in."""
        return self._open().step

    @property
    def version(self) -> int:
        """Of the newest save of the tables; 1 before the first."""
        return max(each.version for each in self._open().tables.values())

    def stats(self) -> dict[str, dict[str, int]]:
        """As `Store.stats`, of each table."""
        return {name: each.stats() for name, each in self._open().tables.items()}

    def lookup(self, table: str, ids: ArrayLike) -> NDArray[np.float32]:
        """The values of the rows of a table, as `ReaderTable.lookup`."""
        self._open()
        if table not in self.tables:
            raise InputError(f"there is no table {table!r} in {self._rows.where}; {suggest(table, list(self.tables))}")
        return self.tables[table].lookup(ids)

    def load_model(self, model: torch.nn.Module) -> None:
        """Copies the dense parameters and buffers of the checkpoint into a model that is built as the trained one was.

        Beside a live run, open the folder of its checkpoints for this: from servers a Reader has rows only.
        """
        self._open()
        self._rows.load_model(model)

    def __call__(self, inputs: Inputs) -> Batch:
        """One batch looked up, on the CPU: `model(batch.dense, batch.embeddings)`."""
        return BatchLookup(self._of_features(), torch.device("cpu"), train=False, overlap=False)(
            inputs, 0, 0
        ).hand_over(None)

    def stream(self, data: Any, *, device: torch.device | str | None = None, overlap: bool = False) -> Stream:
        """The batches of a source, looked up, as `Embeddings.stream` gives them in evaluation.

        overlap: batches are read and looked up beside the dense network.
        """
        worker, place = self._of_features(), torch.device("cpu" if device is None else device)
        source = data if hasattr(data, "batches") else Items(data)
        inputs: Iterator[Inputs] = source.batches(worker.features, position=None)
        stream = Stream.evaluation(inputs, worker, place, overlap=overlap)
        self._streams.add(stream)
        return stream

    def close(self) -> None:
        """Ends the streams, and the connections, or gives the copied rows up. Does nothing twice."""
        self._closed, self._worker, self.tables = True, None, {}
        with ExitStack() as stack:
            stack.callback(self._rows.close)
            for stream in self._streams:
                stack.callback(stream.close, "this stream ended when its Reader was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> "_Rows":
        if self._closed:
            raise StreamError("this Reader was closed: make another")
        return self._rows

    def _of_features(self) -> Worker:
        self._open()
        if self._worker is None:
            raise ConfigError("this Reader has no features, and a batch is of features: Reader(..., features=...)")
        return self._worker


class _Rows(Protocol):
    """Where the rows of a Reader are."""

    where: str
    """For people."""
    job: Job

    @property
    def tables(self) -> "Mapping[str, Store | ShardedTable]": ...

    @property
    def step(self) -> int: ...

    def of(self, features: Features) -> Rows:
        """Those of some features, whose tables come in the job's order."""
        ...

    def load_model(self, model: torch.nn.Module) -> None: ...

    def close(self) -> None: ...


class _OnServers:
    """Those of a live run."""

    def __init__(self, addresses: Any, keys: Any, num_threads: int | None) -> None:
        from satrap.rpc import Keys
        from satrap.worker.reader_servers import ReaderServers
        from satrap.worker.sharded_tables import ShardedTables

        self._num_threads = num_threads
        self._servers = ReaderServers(addresses, keys=None if keys is None else Keys.read(keys))
        self.job, self.tables = self._servers.job, ShardedTables(self._servers)
        self.where = f"the servers {', '.join(self._servers.addresses)}"

    @property
    def step(self) -> int:
        return self._servers.newest_step

    def of(self, features: Features) -> Rows:
        from satrap.worker.sharded_rows import ShardedRows

        return ShardedRows(features, self._servers, num_threads=self._num_threads)

    def load_model(self, model: torch.nn.Module) -> None:
        raise ConfigError(
            f"{self.where} give rows only; the dense parameters are in the run's checkpoints: "
            "Reader(<their folder>, features).load_model(model)"
        )

    def close(self) -> None:
        self._servers.close()


class _InFolder:
    """A copy of those in a folder."""

    def __init__(self, path: str, num_threads: int | None) -> None:
        self.where, self._num_threads = path, num_threads
        self._model: Mapping[str, Any] | None = None  # its state
        if (Path(path) / FILE_NAME).exists() or parts_in(Path(path)):
            self._fill({"": [Path(path)]})
        else:
            self._take_newest(path)

    def _take_newest(self, path: str) -> None:
        if "://" not in path and not Path(path).is_dir():
            raise CheckpointError(f"there is no folder {path!r}; wanted that of a run's checkpoints or of a snapshot")
        home = RunDirectory(path)
        for last in range(_MOST_READS, 0, -1):
            name = home.newest_name()
            try:
                with home.newest() as chain:
                    if not chain:
                        raise CheckpointError(f"{path} has neither a checkpoint nor a snapshot of a table in it")
                    self._fill(table_folders(chain))
                    require_rows(chain, {each: len(table) for each, table in self.tables.items()})
                    self.where = chain[-1].where
                    state = read_state(chain[-1].folder / STATE, chain[-1].state_crc32c, self.where)
                    self._model = state["objects"]["model"]
                    return
            except (SatrapError, OSError):
                if last == 1 or home.newest_name() == name:  # else the run saved another, and may have removed this one
                    raise

    def _fill(self, folders: Mapping[str, list[Path]]) -> None:
        manifests = [read_manifest(parts_of(chain[0])[0]) for chain in folders.values()]
        tables = [Table.from_dict(each.config) for each in manifests]
        self.job = Job(tables=tuple(tables), seed=manifests[0].seed)
        self._slots = open_engine(tables, seed=self.job.seed, num_threads=self._num_threads, shared=None)
        found = TableGroup.in_engine(self._slots)
        found.restore({table.name: chain for table, chain in zip(tables, folders.values(), strict=True)})
        self.tables: Mapping[str, Store] = found
        self.step = found.latest_step

    def of(self, features: Features) -> Rows:
        return LocalRows(features, self._slots[0].engine, self.job.tables)

    def load_model(self, model: torch.nn.Module) -> None:
        if self._model is None:
            raise ConfigError(f"{self.where} is the snapshot of a table; wanted the folder of a run's checkpoints")
        require_model(f"{self.where}/{STATE}", self._model, model.state_dict())
        model.load_state_dict(self._model)

    def close(self) -> None:
        self._slots, self.tables = [], {}


def _in_order(features: Features, job: Job) -> Features:
    """The features, with their tables in the job's order. ConfigError if the job has others."""
    known = {table.name: number for number, table in enumerate(job.tables)}
    unknown = [table.name for table in features.tables if table.name not in known]
    if unknown:
        raise ConfigError(f"there is no table {unknown[0]!r} here; {suggest(unknown[0], list(known))}")
    there = Job(tables=tuple(job.tables[known[table.name]] for table in features.tables), seed=job.seed)
    if found := Job(tables=features.tables, seed=job.seed).differences(there):
        raise ConfigError(f"the rows are of tables configured otherwise: {'; '.join(found)}")
    ordered = sorted(features.items(), key=lambda each: known[each[1].table.name])
    return Features(dict(ordered))
