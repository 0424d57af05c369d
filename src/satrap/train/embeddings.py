"""The embeddings of a model: its features, their tables, and the streams that train them.

`Embeddings` is an `nn.Module` without Parameters. `train()` and `eval()` decide whether the next stream may insert
rows: evaluation never changes a table. The rows are in no state_dict and need no DDP; a checkpoint saves them. A
state_dict only records the step and the tables' versions, so that a stream refuses to start with dense parameters of
one checkpoint and rows of another.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import torch
from torch import Tensor

from satrap.config.features import Feature, Features
from satrap.config.tables import Table, require_frozen_ids
from satrap.config.validation import check_choice, check_integer, kind_of, known_arguments
from satrap.data.inputs import Inputs
from satrap.device.home_memory import DTYPES
from satrap.device.torch_device import resolve_device, torch_device
from satrap.errors import ConfigError, InputError, SourceError
from satrap.hidden_names import internal
from satrap.monitor.report import Counters
from satrap.table.table_group import TableGroup
from satrap.train.async_dense import AsyncDense
from satrap.train.batch import Batch
from satrap.train.batch_lookup import BatchLookup
from satrap.train.dense_figures import device_bytes
from satrap.train.dense_strategy import DenseStrategy, SyncDense
from satrap.train.deployment import Deployment
from satrap.train.open_worker import open_worker
from satrap.train.optimizer import HybridOptimizer
from satrap.train.prefetched_batches import IdsOf, LoaderPass, PrefetchedBatches
from satrap.train.process_group import Compress, ProcessGroup
from satrap.train.session import TrainingSession
from satrap.train.stream import Stream
from satrap.train.torch_threads import spare_cores
from satrap.worker.worker import Worker

if TYPE_CHECKING:
    from satrap.worker.sharded_tables import ShardedTables

DEPLOYMENT_ARGUMENTS = {
    field.name: f"write deployment=satrap.Deployment({field.name}=...)" for field in fields(Deployment)
}
"""What `known_arguments` says of those of `Deployment`."""
_STRATEGIES: dict[str, type[SyncDense | AsyncDense]] = {"sync": SyncDense, "async": AsyncDense}


@internal("extra_repr get_extra_state set_extra_state settings worker")
class Embeddings(torch.nn.Module):
    """Embedding tables of a model, which look up and train the rows of its features. A context manager; see `close`."""

    @known_arguments(DEPLOYMENT_ARGUMENTS)
    def __init__(
        self,
        features: Mapping[str, Feature | Table],
        *,
        staleness: int = 0,
        deterministic: bool = False,
        seed: int = 0,
        num_threads: int | None = None,
        dense: Literal["sync", "async"] = "sync",
        device: torch.device | str | None = None,
        device_memory: int | str | Mapping[str, int | str] | None = None,
        output_dtype: Literal["float32", "float16", "bfloat16"] = "float32",
        deployment: Deployment | None = None,
    ) -> None:
        """features: features by the name of their column; a bare table is `table.bag("sum")`.

        staleness: number of a trainer's own earlier steps whose updates a lookup may miss; 0 is fully synchronous.
        deterministic: give every lookup exactly that staleness, so that a run repeats bit for bit.
        seed: seed of initial values and random draws.
        num_threads: threads for table work; None: the cores that torch leaves free if the two overlap, else all cores.
        dense: "sync" keeps a copy of the dense parameters in each trainer, synchronized by DDP. "async" stores them in
            tables on the servers, and no trainer waits for another; the worker is opened by `optimizer`.
        device: keeps the rows on this device, and computes their lookups and updates there; None: in the memory of this
            process or of servers. Streams return batches on this device.
        device_memory: bytes of the device's memory for rows, such as "100GiB"; the rows that were not used for longest
            are at home, in this process's memory. Or by table: bytes, "all" or "none"; a table without an entry is
            "all". None: all rows are on the device, as they must be with several trainers.
        output_dtype: dtype of the rows in batches and of their gradients, which are pooled and summed in float32; 16
            bits suit a model under autocast.
        deployment: where the rows are; None: in this process, sharded over several trainers, or under `satrap run` on
            the run's servers.
        """
        super().__init__()
        self.features = Features(features)
        self.staleness, self.deterministic = staleness, deterministic
        self.trainers = ProcessGroup()
        check_choice("Embeddings", "dense", dense, tuple(_STRATEGIES))
        self.dense, self.output_dtype, self._strategy = dense, output_dtype, _STRATEGIES[dense]
        if not isinstance(deployment, Deployment | None):
            raise ConfigError(f"deployment is {kind_of(deployment)}; expected a satrap.Deployment, or None")
        self.device = None if device is None else resolve_device(device)
        rows = (deployment or Deployment()).in_context()
        self._require_possible(dense, device_memory, has_servers=rows.servers is not None)
        if num_threads is None and staleness > 0 and spare_cores() > 0:
            num_threads = spare_cores()
        open_rows = partial(open_worker, self.features, rows, self.trainers, seed, staleness, num_threads)
        self._session = TrainingSession(
            self.features,
            self.trainers,
            partial(open_rows, self.device, device_memory),
            staleness=staleness,
            deterministic=deterministic,
            output_dtype=output_dtype,
        )
        if self._strategy.is_joint:
            self._session.open(DenseStrategy())

    def _require_possible(self, dense: str, device_memory: Any, *, has_servers: bool) -> None:
        """Raise ConfigError if an option is invalid or conflicts with another."""
        for table in self.features.tables:
            require_frozen_ids(table)
        check_choice("Embeddings", "output_dtype", self.output_dtype, tuple(DTYPES))
        if device_memory is not None and self.device is None:
            raise ConfigError(f"device_memory is {device_memory!r} without a device; expected device= beside it")
        staleness: Any = self.staleness
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise ConfigError(f"staleness is {staleness!r}; expected an integer, 0 (synchronous) or more")
        repeats = self.staleness == 0 and self._strategy.is_joint
        if self.deterministic and not repeats and self.trainers.world_size > 1 and self.device is None:
            raise ConfigError(
                f"deterministic=True with dense={dense!r} and staleness {staleness} needs a single trainer; found "
                "several"
            )
        self._strategy.require_possible(self.features, has_servers=has_servers)

    @property
    def worker(self) -> Worker:
        """The worker that looks up and updates rows."""
        return self._session.worker

    @property
    def step(self) -> int:
        """The last step that was updated or dropped."""
        return self._session.step

    @property
    def end_step(self) -> int | None:
        """The last step of the training stream that is open; None if there is none, or if the source does not know its
        length before it is read."""
        return self._session.end_step

    @property
    def tables(self) -> "TableGroup | ShardedTables":
        """The tables by name: each a `Store`, or for tables on servers the methods of a `Store` that work remotely."""
        return self.worker.tables

    @known_arguments()
    def optimizer(self, dense: torch.optim.Optimizer | None = None, *, lr_scale: float = 1.0) -> HybridOptimizer:
        """Return an optimizer that steps the dense parameters and the tables. With dense="async" all trainers call it,
        once.

        dense: the optimizer of the dense parameters; None: the model has none.
        lr_scale: with dense="async", factor of the learning rates of the dense parameters. The trainers then take as
            many steps as they have batches, where with dense="sync" all of them together take one: Adam and AdamW go as
            far with 1 / world size, Adagrad with 1 / sqrt(world size), SGD with 1.
        """
        if dense is None and self._strategy.is_joint:
            dense = torch.optim.SGD([torch.empty(0, requires_grad=True)])  # torch refuses an empty list
        if isinstance(dense, type):
            raise ConfigError(
                f"dense is the class {dense.__name__}; expected an object: {dense.__name__}(model.parameters(), lr=...)"
            )
        if not isinstance(dense, torch.optim.Optimizer):
            raise ConfigError(f"dense is {kind_of(dense)}; expected a torch.optim.Optimizer")
        _require_no_converted(dense)
        strategy = self._strategy(dense, self.trainers, lr_scale)
        if strategy.tables:
            self._session.open(strategy)
        optimizer = HybridOptimizer(dense, self._session, strategy)
        self._session.use(strategy, optimizer.hold)
        return optimizer

    @known_arguments()
    def parallel(self, model: torch.nn.Module, *, compress: Compress | None = None) -> torch.nn.Module:
        """Wrap the model in torch's DistributedDataParallel, which averages the gradients of several trainers. With one
        trainer, dense="async" or no Parameter, return the model itself. Call this before creating the optimizer.

        compress: dtype in which DDP sends the gradients: "float16", on GPUs also "bfloat16"; None: unchanged.
        """
        if not self._strategy.is_joint:
            return model
        launches = None if self.device is None else lambda: self.worker.launches
        return self.trainers.wrap(model, compress, launches)

    @known_arguments()
    def stream(
        self,
        data: Any,
        *,
        device: torch.device | str | None = None,
        accumulate: int = 1,
        overlap: bool | None = None,
        train: bool | None = None,
    ) -> Stream:
        """Return the batches of a source with their rows looked up, as tensors on the device.

        data: a source, or any iterable that `satrap.IterableSource` takes without columns: of `Inputs`, or of (dense,
            KeyedJaggedTensor, label). Several trainers each train on a shard of its samples and end together: every
            sample is trained on, and in the last step, where some trainers have fewer samples or none, all samples have
            equal weight. With dense="async" each trainer ends with its own shard.
        accumulate: number of batches per optimizer step.
        overlap: run table work concurrently with the dense network; None: if there is a device or a worker in another
            process, or with staleness if the rows are on servers or a core is free.
        train: whether to train the tables; None: according to the last `train()` or `eval()`.
        """
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ConfigError(f"accumulate is {accumulate!r}; expected an integer, 1 or more")
        if isinstance(data, Stream):
            raise InputError("stream: data is a Stream; expected the source that it reads")
        train = self.training if train is None else train
        session = self._session
        if train and session.dense.joins_attempt:
            session.join_attempt()
        session.require_expected_rows()
        target = torch_device(device or self.worker.device or "cpu")
        if self.worker.device is not None and resolve_device(target) != self.worker.device:
            raise ConfigError(f"device is {str(target)!r}; expected {str(self.worker.device)!r}, where the rows are")
        if overlap is None:
            overlap = target.type != "cpu" or self._overlaps() or self.worker.can_read(data)
        try:
            if train:
                return session.train_on(data, target, accumulate, overlap)
            return session.evaluate_on(data, target, overlap)
        except SourceError as error:
            error.__traceback__ = None  # leads through readers; the message says where in the data
            raise

    @known_arguments()
    def prefetch(
        self, loader: Iterable[Any], ids: IdsOf, *, accumulate: int = 1, overlap: bool | None = None
    ) -> PrefetchedBatches:
        """Return the batches of any loader, with the rows of their ids looked up ahead for modules (`satrap.nn`): those
        of all tables in one call, and at staleness k while the k steps before are in progress. A loop steps once for
        each batch, as for a stream. Several trainers each have a loader, and end together: one whose loader ends
        early repeats its last batch, without weight. `Checkpoint(..., loader)` saves the position of a loader that has
        state_dict and load_state_dict.

        ids: returns for a batch of the loader a dict from a table's name to the ids that modules will look up: a tensor
            of any shape, or a list of them, best one for each call of a module. An id that is missing is looked up on
            the spot: `counters().module_ids` counts both. On the devices of several trainers none may be missing.
        accumulate, overlap: as in `stream`.
        """
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise InputError(
                f"prefetch: loader is {kind_of(loader)}; expected an iterable of batches, such as a DataLoader: for a "
                "source, give data.batches([...]), or use embeddings.stream(data)"
            )
        if not callable(ids):
            raise ConfigError(f"prefetch: ids is {kind_of(ids)}; expected a function of a batch of the loader")
        accumulate = check_integer("prefetch", "accumulate", accumulate, 1, 2**31)
        session = self._session

        def start(items: LoaderPass) -> Stream:
            if session.dense.joins_attempt:
                session.join_attempt()
            session.require_expected_rows()
            return session.train_by_table(items, accumulate, self._overlaps() if overlap is None else overlap)

        return PrefetchedBatches(loader, ids, session.paddings, start)

    def _overlaps(self) -> bool:
        """Return whether table work gains from threads beside the dense network."""
        worker = self.worker
        is_on_device = worker.device is not None and worker.device.type != "cpu"
        return is_on_device or (self.staleness > 0 and (worker.servers is not None or spare_cores() > 0))

    def train(self, mode: bool = True) -> Self:
        """Choose whether the streams that are created from now on train the tables. `eval()` is `train(False)`."""
        self._session.is_training = mode
        return super().train(mode)

    def __reduce_ex__(self, _: object) -> Never:
        raise TypeError(
            "embeddings can be neither copied nor pickled, and no model that has them as a submodule, because their "
            "rows live in tables: save the rows with satrap.Checkpoint; to copy or pickle a model, keep the embeddings "
            "outside of it"
        )

    def __dir__(self) -> list[str]:
        """Return the names of Satrap, without the many of `nn.Module`."""
        return sorted({*vars(type(self)), *vars(self), "eval"} - {*vars(torch.nn.Module())})

    def get_extra_state(self) -> Tensor:
        """Return the step and the version of each table for state_dict."""
        return self._session.rows_state()

    def set_extra_state(self, state: Any) -> None:
        """Record, for load_state_dict, which rows the next stream or step must find."""
        self._session.expected_rows = state

    def counters(self) -> Counters:
        """Return totals over all training streams: rows, seconds of each stage, staleness, and what was lost; the
        current learning rates; and the gradient norm of the first step after the last call."""
        so_far = self._session.counters()
        cut = {f"ids/{name}": count for name, count in self.worker.truncated.items() if count}
        held = {name: store.stats() for name, store in self.tables.items()}
        rows, memory = ({name: stats[key] for name, stats in held.items()} for key in ("rows", "bytes"))
        return replace(
            so_far,
            rows=rows,
            bytes=memory,
            lost={**so_far.lost, **cut},
            learning_rates=self._session.figures.learning_rates(),
            gradient_norm=self._session.figures.read_norm(),
            device_bytes=device_bytes(),
        )

    def settings(self) -> dict[str, Any]:
        """Return what the report of a run shows as settings, in plain JSON types."""
        deployed = self.worker.servers
        return {
            "rank": self.trainers.rank,
            "world_size": self.trainers.world_size,
            "staleness": self.staleness,
            "deterministic": self.deterministic,
            "dense": self.dense,
            "device": None if self.device is None else str(self.device),
            "output_dtype": self.output_dtype,
            "servers": 0 if deployed is None else len(deployed.addresses),
            "torch": torch.__version__,
            "torch_threads": torch.get_num_threads(),
            "tables": [table.to_dict() for table in self.features.tables],
            "features": {name: _feature_settings(feature) for name, feature in self.features.items()},
        }

    def close(self) -> None:
        """End the streams, apply submitted updates, and close the connections to servers and workers. Rows in this
        process are freed with their last reference. Embeddings that are garbage-collected, or left open at the end of
        the process, are closed too, but may miss their last updates."""
        self._session.close(finish=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._session.explain(error)
        done = kind is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        with nullcontext() if done else suppress(Exception):  # not over the user's own error
            self._session.close(finish=done)

    def drain(self) -> None:
        """Wait until every submitted update is applied. With dense="async", then fetch the latest dense parameters."""
        self._session.drain()

    def forward(self, inputs: Inputs | Mapping[str, Any]) -> Batch:
        """Look up one batch without training, on the CPU or where the rows are: for serving or a quick look, outside
        any stream.

        inputs: `Inputs`, or by feature an array with one id per sample, or (ids, offsets), where sample s has
            ids[offsets[s] : offsets[s + 1]], or (ids, offsets, weights).
        """
        self._session.require_whole_rows()
        look_up = BatchLookup(self.worker, self.worker.device or torch.device("cpu"), train=False, overlap=False)
        batch_in = look_up.new(self.worker.inputs_of(inputs))
        look_up.look_up(batch_in, 0)
        look_up.wait_for_copies(batch_in)
        return batch_in.hand_over()

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{', '.join(self.features.names)}; staleness={self.staleness}"


def session_of(embeddings: Embeddings) -> TrainingSession:
    """Return the session, for a checkpoint."""
    return embeddings._session


def _feature_settings(feature: Feature) -> dict[str, Any]:
    return feature.to_dict() | {"table": feature.table.name}


def _require_no_converted(dense: torch.optim.Optimizer) -> None:
    """Raise ConfigError if the optimizer has a weight whose rows are in a table, since it would train nothing."""
    for parameter in (parameter for group in dense.param_groups for parameter in group["params"]):
        if (table := getattr(parameter, "in_satrap_table", None)) is not None:
            raise ConfigError(
                f"the dense optimizer has the weight that satrap.convert replaced by table {table!r}, whose optimizer "
                "is that of the table: create the dense optimizer after satrap.convert"
            )
