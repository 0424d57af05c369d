"""Read access to rows that another process trains or has trained, for inspection and evaluation; nothing here changes a
row.

A `Reader` opens the servers of a live run, beside its trainers; a checkpoint, by default the newest in a run's folder;
or the snapshot of a table. Features, batches and streams are those of `Embeddings`. From servers each call reads the
current rows, even after the run has restarted. From a folder the rows are copied into this process with their optimizer
state: that takes as much memory as in training.
"""

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from satrap.checkpoint.run_directory import STATE, RunDirectory, require_rows, table_folders
from satrap.checkpoint.state_dict_file import read_state, require_model
from satrap.config.features import Features
from satrap.config.job import Job, with_buckets_of
from satrap.config.tables import Feature, Table
from satrap.config.validation import ByName, known_arguments, suggest
from satrap.data.inputs import Inputs, as_inputs
from satrap.errors import CheckpointError, ConfigError, InputError, SatrapError, StreamError
from satrap.run_context import current_context
from satrap.storage.folder import Folder
from satrap.storage.open_folder import open_folder
from satrap.table.engine import open_engine
from satrap.table.snapshot.directory import holds_snapshot
from satrap.table.snapshot.saved_table import find_parts
from satrap.table.store import Store, StoredRows
from satrap.table.table_group import TableGroup
from satrap.train.batch import Batch
from satrap.train.batch_lookup import BatchLookup
from satrap.train.stream import Stream
from satrap.worker.local_rows import LocalRows
from satrap.worker.worker import Worker

if TYPE_CHECKING:
    from satrap.worker.sharded_tables import ShardedTable

_MAX_READS = 10  # attempts, since a live run may remove the checkpoint that is being read


class ReaderTable:
    """A read-only view of one table."""

    def __init__(self, store: "Store | ShardedTable") -> None:
        self.table: Table = store.table
        """The table's configuration."""
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    def __bool__(self) -> bool:
        """Return True, even for an empty table."""
        return True

    def __repr__(self) -> str:
        return f"ReaderTable({self.table.name!r}, dim={self.table.dim}, rows={len(self)})"

    @property
    def dim(self) -> int:
        """Numbers in a row."""
        return self.table.dim

    @property
    def version(self) -> int:
        """Version of the table, as `Store.version`."""
        return self._store.version

    def lookup(self, ids: ArrayLike) -> NDArray[np.float32]:
        """Return the values of the ids' rows, float32 [n, dim]. `table.absent` defines the values of an id without a
        row."""
        return self._store.lookup(ids, train=False)

    def read(self, ids: ArrayLike) -> StoredRows:
        """Return values, optimizer state and presence, as `Store.read`."""
        return self._store.read(ids)

    def ids(self) -> NDArray[np.uint64]:
        """Return the ids of all rows, as `Store.ids`."""
        return self._store.ids()

    def rows(self) -> Iterator[tuple[NDArray[np.uint64], StoredRows]]:
        """Yield all rows in parts, as `Store.rows`."""
        return self._store.rows()

    def stats(self) -> dict[str, int]:
        """Return counters of the table, as `Store.stats`."""
        return self._store.stats()


class Reader:
    """Read-only access to the rows of a live run, of a checkpoint, or of a table's snapshot. A context manager;
    thread-safe."""

    @known_arguments()
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        features: Mapping[str, Feature | Table] | None = None,
        *,
        name: str | None = None,
        servers: list[str] | tuple[str, ...] | None = None,
        keys: str | os.PathLike[str] | None = None,
        num_threads: int | None = None,
    ) -> None:
        """path: the folder of a run, of one of its checkpoints, or of a table's snapshot, on a disk or a URL. None: the
            rows are on servers.

        features: all or some of the features of the model's `Embeddings`. None: only lookups by table and id.
        name: the checkpoint in a run's folder, as in `Checkpoint.resume`: "best" or its name; None: the newest.
        servers: "tcp://host:port" of one or more servers of the run, which name the others. The default under `satrap
            run` is the run's servers.
        keys: path of the client.key file that `satrap keys` wrote; not needed for servers on this machine.
        num_threads: threads for table work; None: all cores.
        """
        run = current_context()
        if path is None and servers is None and run is not None:
            servers, keys = run.servers, run.keys if keys is None else keys
        if (path is None) == (servers is None):
            raise ConfigError("Reader: pass either the path of a folder or servers=[...] of a live run")
        if path is not None and keys is not None:
            raise ConfigError("Reader: keys are for servers, but the rows are in a folder: leave keys out")
        if path is None and name is not None:
            raise ConfigError(
                f"Reader: name is {name!r}, and the rows are on servers, which have the current ones only: leave name "
                "out, or pass the path of the run's checkpoints"
            )
        self._closed = False
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._rows: _OnServers | _InFolder = (
            _OnServers(servers, keys, num_threads) if path is None else _InFolder(path, name, num_threads)
        )
        tables = {name: ReaderTable(table) for name, table in self._rows.tables.items()}
        self.tables: Mapping[str, ReaderTable] = ByName("table", tables)
        """The tables by name."""
        self.features: Features | None = None
        """The features, in the order in which a batch has them."""
        self._worker: Worker | None = None
        try:
            if features is not None:
                self.features = _in_job_order(Features(features), self._rows.job)
                self._worker = self._rows.worker_of(self.features)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Reader({self._rows.where}: {', '.join(self.tables)})"

    @property
    def step(self) -> int:
        """The last step in which these rows were trained."""
        return self._open().step

    @property
    def version(self) -> int:
        """Version of the newest save of the tables; 1 before the first."""
        return max(table.version for table in self._open().tables.values())

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the counters of each table, as `Store.stats`."""
        return {name: table.stats() for name, table in self._open().tables.items()}

    def lookup(self, table: str, ids: ArrayLike) -> NDArray[np.float32]:
        """Return the values of rows of a table, as `ReaderTable.lookup`."""
        self._open()
        if table not in self.tables:
            raise InputError(f"there is no table {table!r} in {self._rows.where}; {suggest(table, list(self.tables))}")
        return self.tables[table].lookup(ids)

    def load_model(self, model: torch.nn.Module) -> None:
        """Copy the dense parameters and buffers of the checkpoint into `model`, which must be built like the trained
        model. A model whose modules look rows up, such as a converted one, resumes its `Checkpoint` instead.

        For the model of a live run, open the folder of its checkpoints: a Reader of servers has rows only.
        """
        self._open()
        self._rows.load_model(model)

    def __call__(self, inputs: Inputs | Mapping[str, Any]) -> Batch:
        """Look up one batch, on the CPU: `model(batch.dense, batch.embeddings)`. `inputs` are those of calling
        `Embeddings`: without dense features, unless they are `Inputs` that have them; `stream` reads columns."""
        worker = self._feature_worker()
        look_up = BatchLookup(worker, torch.device("cpu"), train=False, overlap=False)
        batch = look_up.new(as_inputs(worker.features, inputs))
        look_up.look_up(batch, 0)
        return batch.hand_over()

    @known_arguments()
    def stream(self, data: Any, *, device: torch.device | str | None = None, overlap: bool = False) -> Stream:
        """Return the batches of a source with their rows looked up, as `Embeddings.stream` does in evaluation.

        overlap: read and look up batches concurrently with the dense network.
        """
        worker, place = self._feature_worker(), torch.device("cpu" if device is None else device)
        stream = Stream.evaluation(worker.batches(data), worker, place, overlap=overlap)
        self._streams.add(stream)
        return stream

    def close(self) -> None:
        """End the streams, and close the connections or free the copied rows. Idempotent."""
        self._closed, self._worker, self.tables = True, None, {}
        with ExitStack() as stack:
            stack.callback(self._rows.close)
            for stream in self._streams:
                stack.callback(stream.close, "this stream ended when its Reader was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> "_OnServers | _InFolder":
        if self._closed:
            raise StreamError("this Reader is closed: create a new one")
        return self._rows

    def _feature_worker(self) -> Worker:
        self._open()
        if self._worker is None:
            raise ConfigError("this Reader has no features, which a batch needs: create it with features=...")
        return self._worker


class _OnServers:
    """The rows of a live run."""

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

    def worker_of(self, features: Features) -> Worker:
        from satrap.worker.sharded_rows import ShardedRows

        return Worker(features, ShardedRows(features, self._servers, num_threads=self._num_threads), self.tables)

    def load_model(self, model: torch.nn.Module) -> None:
        raise ConfigError(
            f"{self.where} have rows only; the dense parameters are in the run's checkpoints: "
            "Reader(<their folder>, features).load_model(model)"
        )

    def close(self) -> None:
        self._servers.close()


class _InFolder:
    """A copy of the rows in a folder."""

    def __init__(self, path: str | os.PathLike[str], name: str | None, num_threads: int | None) -> None:
        folder = open_folder(path, "Reader: path")
        self.where, self._num_threads = os.fspath(folder), num_threads
        self._model: Mapping[str, Any] | None = None  # the model's state_dict
        is_snapshot = holds_snapshot(folder)
        one = None if is_snapshot else RunDirectory.of_checkpoint(folder)
        if name is not None and (is_snapshot or one is not None):
            kind = "the snapshot of a table" if is_snapshot else "one checkpoint"
            raise ConfigError(
                f"Reader: name is {name!r} and {self.where} is {kind}; expected the folder of a run's checkpoints: "
                "pass that, or leave name out"
            )
        if is_snapshot:
            self._fill({"": [folder]})
        else:
            self._take(*(one or (RunDirectory(folder), name)))

    def _take(self, directory: RunDirectory, name: str | None) -> None:
        """Copy a checkpoint of a run: the named one, or the newest."""
        folder = directory.folder
        if folder.is_local and not os.path.isdir(folder):
            raise CheckpointError(f"there is no folder {self.where!r}; expected a run's checkpoints or a snapshot")
        for attempts_left in range(_MAX_READS, 0, -1):
            newest = directory.newest_name()
            try:
                with directory.chain_of(name) as chain:
                    if not chain:
                        raise CheckpointError(
                            f"{folder} contains neither a checkpoint nor a snapshot of a table; expected one"
                        )
                    self._fill(table_folders(chain))
                    require_rows(chain[-1], {name: len(table) for name, table in self.tables.items()})
                    self.where = chain[-1].where
                    state = read_state(chain[-1].folder, STATE, chain[-1].state_crc32c)
                    self._model = state["objects"]["model"]
                    return
            except (SatrapError, OSError):
                # A newer save may have removed this checkpoint: then retry.
                if attempts_left == 1 or directory.newest_name() == newest:
                    raise

    def _fill(self, folders: Mapping[str, list[Folder]]) -> None:
        manifests = [find_parts(chain[0])[0].manifest for chain in folders.values()]
        tables = [Table.from_dict(manifest.config) for manifest in manifests]
        self.job = Job(tables=tuple(tables), seed=manifests[0].seed)
        self._slots = open_engine(tables, seed=self.job.seed, num_threads=self._num_threads, shared=None)
        group = TableGroup.in_engine(self._slots)
        group.restore({table.name: chain for table, chain in zip(tables, folders.values(), strict=True)})
        self.tables: Mapping[str, Store] = group
        self.step = group.latest_step

    def worker_of(self, features: Features) -> Worker:
        rows = LocalRows(features, self._slots[0].engine, self.job.tables)
        return Worker(features, rows, TableGroup.in_engine(self._slots))

    def load_model(self, model: torch.nn.Module) -> None:
        if self._model is None:
            raise ConfigError(f"{self.where} is the snapshot of a table; expected the folder of a run's checkpoints")
        require_model(f"{self.where}/{STATE}", self._model, model.state_dict())
        model.load_state_dict(self._model)

    def close(self) -> None:
        self._slots, self.tables = [], {}


def _in_job_order(features: Features, job: Job) -> Features:
    """Return the features with their tables in the job's order; raise ConfigError if the job's tables differ."""
    known = {table.name: number for number, table in enumerate(job.tables)}
    unknown = [table.name for table in features.tables if table.name not in known]
    if unknown:
        raise ConfigError(f"there is no table {unknown[0]!r} here; {suggest(unknown[0], list(known))}")
    there = Job(tables=tuple(job.tables[known[table.name]] for table in features.tables), seed=job.seed)
    if differences := Job(tables=with_buckets_of(features.tables, there.tables), seed=job.seed).differences(there):
        raise ConfigError(f"the features' tables are configured differently: {'; '.join(differences)}")
    ordered = sorted(features.items(), key=lambda item: known[item[1].table.name])
    return Features(dict(ordered))
