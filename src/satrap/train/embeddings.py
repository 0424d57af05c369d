"""The embeddings of a model: its features, their tables, and the streams that train them.

`Embeddings` is an `nn.Module` without Parameters. `train()` and `eval()` decide whether the next stream may insert
rows: evaluation never changes a table. The rows are in no state_dict and need no DDP; a checkpoint saves them. A
state_dict only records the step and the tables' versions, so that a stream refuses to start with dense parameters of
one checkpoint and rows of another.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from satrap.config.array_args import as_flag
from satrap.config.features import Feature, Features
from satrap.config.tables import Table
from satrap.config.validation import check_choice
from satrap.data.inputs import Inputs, Position
from satrap.data.iterable import IterableSource
from satrap.data.registry import is_portable
from satrap.errors import ConfigError, StreamError
from satrap.interrupts import Uninterrupted
from satrap.monitor.report import Counters
from satrap.run_context import current_context, register_exit_hook
from satrap.table.table_group import TableGroup
from satrap.train.async_dense import DenseParameters, require_free_names
from satrap.train.batch import Batch
from satrap.train.batch_lookup import BatchLookup
from satrap.train.joint_step import PaddedBatches
from satrap.train.open_worker import RowLocation, open_worker
from satrap.train.optimizer import HybridOptimizer
from satrap.train.process_group import Compress, ProcessGroup
from satrap.train.staleness_gate import StalenessGate
from satrap.train.stream import JointStepCallbacks, Stream
from satrap.train.torch_threads import spare_cores
from satrap.worker.local_rows import LocalWorker

if TYPE_CHECKING:
    from satrap.worker.remote.client import RemoteWorker
    from satrap.worker.sharded_rows import ShardedWorker
    from satrap.worker.sharded_tables import ShardedTables


class Embeddings(torch.nn.Module):
    """Embedding tables of a model, which look up and train the rows of its features. A context manager; see `close`."""

    def __init__(
        self,
        features: Mapping[str, Feature | Table],
        *,
        staleness: int = 0,
        deterministic: bool = False,
        seed: int = 0,
        num_threads: int | None = None,
        shared: str | PathLike[str] | None = None,
        servers: Sequence[str] | None = None,
        keys: str | PathLike[str] | None = None,
        wire: Literal["float32", "float16"] = "float32",
        workers: Sequence[str] | None = None,
        dense: Literal["sync", "async"] = "sync",
        take_over: bool = False,
    ) -> None:
        """features: features by the name of their column; a bare table stands for one id per sample.

        staleness: number of earlier steps whose updates a lookup may miss; 0 is fully synchronous.
        deterministic: give every lookup exactly that staleness, so that a run repeats bit for bit.
        seed: seed of initial values and random draws.
        num_threads: threads for table work; None: the cores that torch leaves free if the two overlap, else all cores.
        shared: path of a new shared-memory file for the rows, which then outlive the process.
        servers: addresses of the `satrap server` processes that hold the rows, "ipc:///folder/name" or
            "tcp://host:port", always in the same order. The default under `satrap run` is the run's servers.
        keys: path of the client.key file that `satrap keys` wrote, for servers at tcp:// addresses.
        wire: format of rows and gradients on the network. "float32" sends them bit for bit; "float16" sends half the
            bytes, with each number rounded by at most 2^-11 of the largest magnitude in its row, and never overflows.
        workers: addresses of the `satrap worker` processes, which read the files of declared sources, look up and
            update; each trainer uses the worker of its rank. This process looks up data from other sources. The default
            under `satrap run` is the run's workers; [] means none.
        dense: "sync" keeps a copy of the dense parameters in each trainer, synchronized by DDP. "async" stores them in
            tables on the servers, and no trainer waits for another; the worker is opened by `optimizer`.
        take_over: take the servers from another process that trains on them, which ends its training. The default
            refuses such servers. To read the rows of a live run use a `Reader`.
        """
        super().__init__()
        self.features = Features(features)
        self.staleness, self.deterministic = staleness, deterministic
        self.trainers = ProcessGroup()
        self.is_async = dense == "async"
        """Whether trainers step without waiting for each other."""
        self._require_possible(dense, servers)
        if num_threads is None and staleness > 0 and spare_cores() > 0:
            num_threads = spare_cores()
        rows = RowLocation(shared, servers, keys, wire, workers, as_flag("Embeddings", "take_over", take_over))
        self._open = partial(open_worker, self.features, rows, self.trainers, seed, staleness, num_threads)
        self._worker = None if self.is_async else self._open()
        self._dense: DenseParameters | None = None
        self._step = 0
        self._past_counters = Counters()  # totals of ended training streams
        self._followed: dict[int, _Followed] = {}  # by id(): a list can be a source, and is not hashable
        self._loaded: Any = None  # the rows that a loaded state_dict expects
        self._optimizer: HybridOptimizer | None = None
        self._training: Stream | None = None
        self._training_data: Any = None
        self._evaluations: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._before_close: list[Callable[[], None]] = []
        self._closed = self._has_warned = False

    def _require_possible(self, dense: str, servers: Sequence[str] | None) -> None:
        """Raise ConfigError if an option is invalid or conflicts with another."""
        staleness: Any = self.staleness
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise ConfigError(f"staleness is {staleness!r}; expected an integer, 0 (synchronous) or more")
        check_choice("Embeddings", "dense", dense, ("sync", "async"))
        if self.deterministic and (self.staleness > 0 or self.is_async) and self.trainers.world_size > 1:
            how = "dense='async'" if self.is_async else f"staleness {self.staleness}"
            raise ConfigError(f"deterministic=True with {how} needs a single trainer; found several")
        if self.is_async:
            require_free_names(self.features.tables)
            if servers is None and current_context() is None:
                raise ConfigError("dense='async' without servers: pass servers=[...] to hold the dense parameters")

    @property
    def worker(self) -> "LocalWorker | ShardedWorker":
        """The worker that looks up and updates rows."""
        if self._closed:
            raise StreamError("these embeddings are closed: create new ones")
        if self._worker is None:
            raise StreamError("dense='async': the dense parameters have no tables yet: call optimizer(...) first")
        return self._worker

    @property
    def step(self) -> int:
        """The last step that was updated or dropped."""
        return self._step if self._training is None else self._training.last_step

    def track_position(self, data: Any) -> None:
        """Start to track `position_of(data)`. For a checkpoint."""
        self._followed.setdefault(id(data), _Followed(data))

    def position_of(self, data: Any) -> Position | None:
        """Return the position of a tracked source after its last batch that was updated or dropped; None if it has none
        yet."""
        if self._training is not None and self._training_data is data:
            return self._training.position
        followed = self._followed.get(id(data))
        return None if followed is None else followed.position

    def resume_at(self, step: int, data: Any, position: Position | None) -> None:
        """Make the next training stream continue after the step, and one over `data` at the position. For a
        checkpoint."""
        self._leave_stream()
        self._step = step
        self._followed[id(data)] = _Followed(data, position, resume=True)

    @property
    def tables(self) -> "TableGroup | ShardedTables":
        """The tables by name: each a `Store`, or for tables on servers the methods of a `Store` that work remotely."""
        return self.worker.tables

    def optimizer(self, dense: torch.optim.Optimizer) -> HybridOptimizer:
        """Return an optimizer that steps the dense parameters and the tables. With dense="async" all trainers call it,
        once."""
        if not isinstance(dense, torch.optim.Optimizer):
            raise ConfigError(f"dense is a {type(dense).__name__}; expected a torch.optim.Optimizer")
        self._optimizer = HybridOptimizer(dense, self, self._open_with(dense) if self.is_async else None)
        return self._optimizer

    def parallel(self, model: torch.nn.Module, *, compress: Compress | None = None) -> torch.nn.Module:
        """Wrap the model in torch's DistributedDataParallel, which averages the gradients of several trainers. With one
        trainer or dense="async", return the model itself. Call this before creating the optimizer.

        compress: dtype in which DDP sends the gradients: "float16", on GPUs also "bfloat16"; None: unchanged.
        """
        return model if self.is_async else self.trainers.wrap(model, compress)

    def _open_with(self, dense: torch.optim.Optimizer) -> DenseParameters:
        if self._dense is not None:
            raise ConfigError("dense='async': optimizer(...) was already called, and cannot be called again")
        found = DenseParameters(dense)
        worker = self._open(dense=found.tables)
        assert not isinstance(worker, LocalWorker)
        found.connect(worker.servers, self.trainers)
        self._worker, self._dense = worker, found
        return found

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
        overlap: run table work concurrently with the dense network; None: if there is a device, a worker in another
            process, or staleness and a spare core.
        train: whether to train the tables; None: according to the last `train()` or `eval()`.
        """
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ConfigError(f"accumulate is {accumulate!r}; expected an integer, 1 or more")
        train = self.training if train is None else train
        if train and (self._dense is None or self._dense.start is None):
            self.join_attempt()
        self._require_same_rows()
        target = torch.device("cpu" if device is None else device)
        if overlap is None:
            overlap = (
                target.type != "cpu" or (spare_cores() > 0 and self.staleness > 0) or self._remote(data) is not None
            )
            self._warn_of_no_core(train and not overlap)
        if not train:
            return self._evaluation(data, target, overlap)
        return self._train_on(data, target, accumulate, overlap)

    def _train_on(self, data: Any, target: torch.device, accumulate: int, overlap: bool) -> Stream:
        if self._optimizer is None:
            raise StreamError("no optimizer: call embeddings.optimizer(...) before a training stream, or eval() first")
        if id(data) not in self._followed and getattr(data, "origin", None) in self._followed:
            raise StreamError(
                "this source is a replace() of the one passed to Checkpoint(...), so its position would not be saved: "
                "stream the source itself (epochs=N with shuffle=True reads it in another order each time, path= "
                "takes a list), or create the Checkpoint without a source and start each stream where you want it"
            )
        self._leave_stream()
        self._require_own_rows()
        if self._dense is not None:
            self._dense.begin()
        followed = self._followed.get(id(data))
        position = followed.position if followed is not None and followed.resume else None
        several = self.trainers.world_size > 1
        share = {"rank": self.trainers.rank, "world_size": self.trainers.world_size} if several else {}
        inputs = self._batches(data, position, **share)
        is_joint = several and self._dense is None
        if is_joint:
            inputs = PaddedBatches(inputs, self.features.names)
        gate = StalenessGate(
            self.staleness, accumulate=accumulate, deterministic=self.deterministic, last_step=self.step
        )
        with Uninterrupted():
            self._training_data = data
            self._training = Stream(
                inputs,
                self.worker,
                gate,
                train=True,
                device=target,
                overlap=overlap,
                on_hold=self._optimizer.hold,
                position=position,
                joint=JointStepCallbacks(self.trainers.joint_step, self._optimizer.weigh) if is_joint else None,
                dense=self._dense,
            )
            if followed is not None:
                followed.resume = False
        return self._training

    def _warn_of_no_core(self, inline: bool) -> None:
        """Warn once: an inline stream applies all earlier updates before each lookup, unless the staleness is
        deterministic."""
        if not inline or self._has_warned or self.staleness == 0 or self.deterministic:
            return
        self._has_warned = True
        warnings.warn(
            f"staleness={self.staleness} has no effect: torch's {torch.get_num_threads()} threads leave no core "
            "free, so table work runs between the steps, at staleness 0; leave a core free with "
            "torch.set_num_threads(...), or pass stream(overlap=True) to share the cores",
            stacklevel=3,
        )

    def _evaluation(self, data: Any, target: torch.device, overlap: bool) -> Stream:
        inputs = self._batches(data, None)
        if self._dense is not None:
            self.drain()
        if not any(len(store) for store in self.tables.values()):
            warnings.warn("the embeddings are evaluated, but no table has a row yet", stacklevel=3)
        stream = Stream.evaluation(inputs, self.worker, target, overlap=overlap)
        self._evaluations.add(stream)
        return stream

    def get_extra_state(self) -> Tensor:
        """Return the step and the version of each table for state_dict. A tensor, since every file format takes one."""
        return torch.tensor([self.step, *(store.version for store in self.tables.values())])

    def set_extra_state(self, state: Any) -> None:
        """Record, for load_state_dict, which rows the next stream or step must find."""
        self._loaded = state

    def require_rows(self, state: Any) -> None:
        """Raise StreamError if `state`, from `get_extra_state`, identifies other rows than the current ones."""
        expected, found = _rows_of(state), _rows_of(self.get_extra_state())
        if expected != found:
            raise StreamError(
                f"load_state_dict was given the state of {_shown(expected)}, but the tables are at {_shown(found)}: a "
                "state_dict has no rows, and neither has what Accelerate's save_state or Lightning's checkpoints "
                "write; save and resume both with satrap.Checkpoint"
            )

    def _require_same_rows(self) -> None:
        if self._loaded is not None:
            self.require_rows(self._loaded)
            self._loaded = None

    def join_attempt(self) -> None:
        """Join the attempt that trainer 0 has started at the servers; a lone trainer starts it now. All trainers call
        this."""
        if not isinstance(self.worker, LocalWorker):
            servers = self.worker.servers
            servers.begin_attempt()
            servers.attempt = self.trainers.broadcast_int(servers.attempt)
            servers.latest_step = self.trainers.broadcast_int(servers.latest_step)

    def _require_own_rows(self) -> None:
        """Raise StreamError if the servers hold rows of an earlier run; remove those of a launch that left no
        checkpoint."""
        if isinstance(self.worker, LocalWorker):
            return
        context, latest = current_context(), self.worker.servers.latest_step
        if context is not None and context.launch > context.first_launch and self.step == 0:
            warnings.warn(
                f"launch {context.launch} starts at step 0: found no checkpoint to resume, so all training since "
                f"launch {context.first_launch} is lost",
                stacklevel=3,
            )
        if latest > self.step == 0 and context is not None:
            # An earlier launch ended without a checkpoint: the run starts again.
            self.trainers.run_first(self.worker.tables.clear, StreamError)
            self.join_attempt()
        elif latest > self.step:
            raise StreamError(
                f"the servers hold rows of an earlier run, trained up to step {latest}, and this run is at step "
                f"{self.step}: resume the earlier run's checkpoint, or remove its rows with embeddings.tables.clear()"
            )

    def signature_of(self, data: Any) -> Mapping[str, Any] | None:
        """Return what a position in the source depends on; None if the source has no signature. For a checkpoint."""
        if (worker := self._remote(data)) is not None:
            return worker.signature(data)
        signature = getattr(data, "signature", None)
        return None if signature is None else signature()

    def _remote(self, data: Any) -> "RemoteWorker | None":
        """Return the worker in another process, if there is one and it can read the data."""
        if isinstance(self.worker, LocalWorker):
            return None
        from satrap.worker.remote.client import RemoteWorker

        return self.worker if isinstance(self.worker, RemoteWorker) and is_portable(data) else None

    def _batches(self, data: Any, position: Position | None, **share: int) -> Iterator[Inputs]:
        if (worker := self._remote(data)) is not None:
            return worker.batches(data, position, **share)
        source = data if hasattr(data, "batches") else IterableSource(data)
        found: Iterator[Inputs] = source.batches(self.features, position=position, **share)
        return found

    def _leave_stream(self, why: str = "another training stream started, or a checkpoint was resumed") -> None:
        """End the training stream before another starts; submitted updates are applied."""
        if self._training is None:
            return
        self._training.close(f"this stream ended when {why}")
        with Uninterrupted():
            self._step, self._past_counters = self._training.last_step, self._past_counters + self._training.counters()
            if (followed := self._followed.get(id(self._training_data))) is not None and not followed.resume:
                followed.position = self._training.position
            self._training = self._training_data = None

    def counters(self) -> Counters:
        """Return totals over all training streams: rows, seconds of each stage, staleness, and what was lost."""
        so_far = self._past_counters if self._training is None else self._past_counters + self._training.counters()
        cut = {f"ids/{name}": count for name, count in self.worker.truncated.items() if count}
        rows = {name: len(store) for name, store in self.tables.items()}
        return replace(so_far, rows=rows, lost={**so_far.lost, **cut})

    def close(self) -> None:
        """End the streams, apply submitted updates, and close the connections to servers and workers. Rows in this
        process are freed with their last reference. Embeddings that are garbage-collected, or left open at the end of
        the process, are closed too, but may miss their last updates."""
        self._close(finish=True)

    def run_before_close(self, work: Callable[[], None]) -> None:
        """Run `work` before the connections close, or else at the end of the script. For a checkpoint in a run."""
        if current_context() is not None:
            self._before_close.append(work)
            register_exit_hook(self._finish)

    def _finish(self) -> None:
        while self._before_close:
            self._before_close.pop(0)()

    def _close(self, finish: bool) -> None:
        """finish: first run what `before_close` registered; False after an error, since it would look done to other
        trainers."""
        if self._closed:
            return
        with ExitStack() as stack:
            if self._worker is not None:
                stack.callback(self._worker.close)
            stack.callback(setattr, self, "_worker", None)
            stack.callback(setattr, self, "_closed", True)
            for stream in self._evaluations:
                stack.callback(stream.close)
            self._leave_stream("the embeddings were closed")
            if finish:
                self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        done = kind is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        with nullcontext() if done else suppress(Exception):  # not over the user's own error
            self._close(finish=done)

    def update(self, lrs: Mapping[str, float], scale: float) -> None:
        """Send the collected gradients to the tables. For the optimizer."""
        if self._loaded is not None:
            self._require_same_rows()
        scale /= self.trainers.world_size  # the loss is a mean over what all of them have
        taken = self._training is not None and self._training.update(dict(lrs), scale)
        if not taken and self._dense is not None and self._dense.has_gradients():
            raise StreamError(
                "dense='async': optimizer.step() found gradients of dense parameters, but no batch that a loss has "
                "reached: the servers identify a step by its batches"
            )
        if not taken and not self.training:
            raise StreamError(
                "optimizer.step() found no batch of a training stream, and the embeddings are in eval(): call "
                "embeddings.train() before embeddings.stream(...)"
            )

    def drop_batches_with_gradients(self, cause: str) -> None:
        """Drop the batches that a backward pass has reached. For the optimizer."""
        if self._training is not None:
            self._training.drop(cause)

    def drain(self) -> None:
        """Wait until every submitted update is applied. With dense="async", then fetch the latest dense parameters."""
        if self._training is not None:
            self._training.drain()
        self.refresh()

    def refresh(self) -> None:
        """With dense="async", fetch the latest dense parameters from the servers."""
        if self._dense is not None:
            self._dense.refresh()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Apply every submitted update, then keep table work from running inside the context. For a checkpoint."""
        with self._training.pause() if self._training is not None else nullcontext():
            yield

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """Split a batch's embeddings into the parts of the pooled features, each [batch, dim], by name."""
        pooled = self.features.pooled
        return dict(zip(pooled, block.split(list(pooled.values()), dim=1), strict=True))

    def forward(self, inputs: Inputs) -> Batch:
        """Look up one batch without training, on the CPU: for serving, outside any stream."""
        return BatchLookup(self.worker, torch.device("cpu"), train=False, overlap=False)(inputs, 0, 0).hand_over(None)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"{', '.join(self.features.names)}; staleness={self.staleness}"


@dataclass(slots=True)
class _Followed:
    """A source whose position a checkpoint saves."""

    data: Any
    position: Position | None = None
    resume: bool = False
    """Whether the next stream over it starts at the position."""


def _rows_of(state: Any) -> list[int]:
    """Return the step and the version of each table."""
    if isinstance(state, Mapping):  # written by an older release
        return [state["step"], *state["versions"].values()]
    found: list[int] = state.tolist()
    return found


def _shown(rows: list[int]) -> str:
    return f"step {rows[0]}, table versions {rows[1:]}"
