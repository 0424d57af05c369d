"""The embeddings of a model: features, their tables, and the streams that train them.

An `nn.Module` without Parameters. `train()` and `eval()` switch inserting, as a new stream begins: evaluation never
changes a table. Its rows are in no state_dict and need no DDP; a checkpoint saves them. A state_dict only names the
step and the tables' versions: a stream refuses to begin with dense parameters of one checkpoint and rows of another.
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
from satrap.data.iterable import Iterable as Items
from satrap.data.registry import travels
from satrap.errors import ConfigError, StreamError
from satrap.interrupts import Uninterrupted
from satrap.monitor.report import Counters
from satrap.run_context import before_end, current
from satrap.table.table_group import TableGroup
from satrap.train.async_dense import DenseParameters, require_free_names
from satrap.train.batch import Batch
from satrap.train.batch_lookup import BatchLookup
from satrap.train.joint_step import Padded
from satrap.train.open_worker import RowsAt, open_worker
from satrap.train.optimizer import HybridOptimizer
from satrap.train.process_group import Compress, ProcessGroup
from satrap.train.staleness_gate import StalenessGate
from satrap.train.stream import JointStream, Stream
from satrap.train.torch_threads import spare_cores
from satrap.worker.local_rows import LocalWorker

if TYPE_CHECKING:
    from satrap.worker.remote.client import RemoteWorker
    from satrap.worker.sharded_rows import ShardedWorker
    from satrap.worker.sharded_tables import ShardedTables


class Embeddings(torch.nn.Module):
    """Looks features up in their tables and trains those. A context manager; see `close`."""

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
        """features: by the name of their column; a bare table stands for one id per sample.

        staleness: how many earlier steps a batch may be looked up without; 0 is full synchrony.
        deterministic: a batch is looked up with exactly that staleness, so a run repeats bit for bit.
        seed: what initial values and random draws are a function of.
        num_threads: of table work; None: the cores that torch leaves free where the two overlap, else all.
        shared: a new file in shared memory for the rows, which then outlive the process.
        servers: the rows lie there and not here: "ipc:///folder/name" or "tcp://host:port" of each `satrap server`,
            always in this order. Under `satrap run` they are the run's, unless they are named.
        keys: the file client.key of `satrap keys`, for servers at tcp://.
        wire: how rows and gradients cross to the servers and back. "float32": as they are, bit for bit. "float16": in
            half the bytes, each rounded by at most 2^-11 of the largest magnitude of its row; nothing overflows.
        workers: the address of each `satrap worker`: they read the files of declared sources, look up and update;
            this trainer uses the one of its rank. Any other data is looked up from here. Under `satrap run` they are
            the run's, unless they are named; []: none.
        dense: "sync": each trainer has the dense parameters, and DDP keeps them alike. "async": the servers have them,
            in tables of their own, and no trainer waits for another; the worker is opened by `optimizer`.
        take_over: servers on which another process trains are taken from it, and its training ends; else that is
            refused. To look at its rows take a `Reader`.
        """
        super().__init__()
        self.features = Features(features)
        self.staleness, self.deterministic = staleness, deterministic
        self.trainers = ProcessGroup()
        self.apart = dense == "async"
        """Whether trainers step without each other."""
        self._require_possible(dense, servers)
        if num_threads is None and staleness > 0 and spare_cores() > 0:
            num_threads = spare_cores()
        rows = RowsAt(shared, servers, keys, wire, workers, as_flag("Embeddings", "take_over", take_over))
        self._open = partial(open_worker, self.features, rows, self.trainers, seed, staleness, num_threads)
        self._worker = None if self.apart else self._open()
        self._dense: DenseParameters | None = None
        self._step = 0
        self._past = Counters()  # of the training streams that ended
        self._followed: dict[int, _Followed] = {}  # by identity: lists are sources, too
        self._loaded: Any = None  # what a state_dict named
        self._optimizer: HybridOptimizer | None = None
        self._training: Stream | None = None
        self._training_data: Any = None
        self._evaluations: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._before_close: list[Callable[[], None]] = []
        self._closed = self._warned = False

    def _require_possible(self, dense: str, servers: Sequence[str] | None) -> None:
        """Raises if an option is none, or some do not go together."""
        staleness: Any = self.staleness
        if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
            raise ConfigError(f"staleness is {staleness!r}; wanted an integer, 0 (synchronous) or more")
        check_choice("Embeddings", "dense", dense, ("sync", "async"))
        if self.deterministic and (self.staleness > 0 or self.apart) and self.trainers.world > 1:
            how = "dense='async'" if self.apart else f"staleness {self.staleness}"
            raise ConfigError(f"deterministic=True with {how} is for one trainer; here are several")
        if self.apart:
            require_free_names(self.features.tables)
            if servers is None and current() is None:
                raise ConfigError("dense='async' and no servers: name those that are to hold the dense parameters")

    @property
    def worker(self) -> "LocalWorker | ShardedWorker":
        """What looks ids up and updates their rows."""
        if self._closed:
            raise StreamError("these embeddings were closed: make others")
        if self._worker is None:
            raise StreamError(
                "dense='async': the dense parameters' tables are not known yet: call optimizer(...) first"
            )
        return self._worker

    @property
    def step(self) -> int:
        """The last step that was updated or dropped."""
        return self._step if self._training is None else self._training.last_step

    def follow(self, data: Any) -> None:
        """For a checkpoint: from now on `position_of(data)` is known."""
        self._followed.setdefault(id(data), _Followed(data))

    def position_of(self, data: Any) -> Position | None:
        """Where a followed source stands after the last of its batches that was updated or dropped; None if it was
        not begun, or cannot say."""
        if self._training is not None and self._training_data is data:
            return self._training.position
        followed = self._followed.get(id(data))
        return None if followed is None else followed.position

    def resume_at(self, step: int, data: Any, position: Position | None) -> None:
        """For a checkpoint: the next training stream goes on after the step, and one over `data` at the position."""
        self._leave_stream()
        self._step = step
        self._followed[id(data)] = _Followed(data, position, resume=True)

    @property
    def tables(self) -> "TableGroup | ShardedTables":
        """The tables by name: each is a `Store`, or on servers does what one can do from here."""
        return self.worker.tables

    def optimizer(self, dense: torch.optim.Optimizer) -> HybridOptimizer:
        """An optimizer that steps the dense parameters and these tables together. With dense="async" all trainers call
        it, once."""
        if not isinstance(dense, torch.optim.Optimizer):
            raise ConfigError(f"dense is a {type(dense).__name__}; wanted a torch.optim.Optimizer")
        self._optimizer = HybridOptimizer(dense, self, self._open_with(dense) if self.apart else None)
        return self._optimizer

    def parallel(self, model: torch.nn.Module, *, compress: Compress | None = None) -> torch.nn.Module:
        """The model for as many trainers as there are: of several the dense gradients are averaged, by torch's
        DistributedDataParallel; of one, or with dense="async", it is the model itself. Call it before the optimizer is
        made.

        compress: what the gradients cross the network as, by DDP's own hook: "float16", on GPUs also "bfloat16"; None:
            as they are.
        """
        return model if self.apart else self.trainers.parallel(model, compress)

    def _open_with(self, dense: torch.optim.Optimizer) -> DenseParameters:
        if self._dense is not None:
            raise ConfigError("dense='async': the servers have an optimizer's parameters already, and keep to those")
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
        """The batches of a source, looked up, as tensors on the device.

        data: a source, or any iterable of what `satrap.Iterable` takes without being told of columns: `Inputs`, or
            (dense, KeyedJaggedTensor, label). Several trainers each train on their share of its samples, and end
            together: every sample is trained on, and in the last step, where they have fewer samples or none, each
            sample counts as much as the others. With dense="async" each trains to its own end.
        accumulate: how many batches make one optimizer step.
        overlap: table work beside the dense network; None: if there is a device, a worker in a process of its own, or
            staleness and a spare core.
        train: whether the tables learn; None: as `train()` or `eval()` said before.
        """
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ConfigError(f"accumulate is {accumulate!r}; wanted an integer, 1 or more")
        train = self.training if train is None else train
        if train and (self._dense is None or self._dense.start is None):
            self.join_attempt()
        self._require_same_rows()
        place = torch.device("cpu" if device is None else device)
        if overlap is None:
            overlap = place.type != "cpu" or (spare_cores() > 0 and self.staleness > 0) or self._far(data) is not None
            self._warn_of_no_core(train and not overlap)
        if not train:
            return self._evaluation(data, place, overlap)
        return self._train_on(data, place, accumulate, overlap)

    def _train_on(self, data: Any, place: torch.device, accumulate: int, overlap: bool) -> Stream:
        if self._optimizer is None:
            raise StreamError("no optimizer: call embeddings.optimizer(...) before a training stream, or eval()")
        if id(data) not in self._followed and getattr(data, "origin", None) in self._followed:
            raise StreamError(
                "this source is a replace() of the one that Checkpoint(...) was given, and its position would not be "
                "saved: stream the source itself (epochs=N with shuffle=True reads it in another order each time, "
                "path= takes a list), or make the Checkpoint without a source and begin each stream where you want it"
            )
        self._leave_stream()
        self._require_own_rows()
        if self._dense is not None:
            self._dense.begin()
        followed = self._followed.get(id(data))
        position = followed.position if followed is not None and followed.resume else None
        several = self.trainers.world > 1
        share = {"rank": self.trainers.rank, "world": self.trainers.world} if several else {}
        inputs = self._batches(data, position, **share)
        together = several and self._dense is None
        if together:
            inputs = Padded(inputs, self.features.names)
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
                device=place,
                overlap=overlap,
                on_hold=self._optimizer.hold,
                position=position,
                joint=JointStream(self.trainers.joint_step, self._optimizer.weigh) if together else None,
                dense=self._dense,
            )
            if followed is not None:
                followed.resume = False
        return self._training

    def _warn_of_no_core(self, inline: bool) -> None:
        """Once: a stream inline looks a batch up after all updates before it, unless the staleness is deterministic."""
        if not inline or self._warned or self.staleness == 0 or self.deterministic:
            return
        self._warned = True
        warnings.warn(
            f"staleness={self.staleness} has no effect: torch's {torch.get_num_threads()} threads leave no core "
            "free, so table work runs between the steps, at staleness 0; leave a core free by "
            "torch.set_num_threads(...), or say stream(overlap=True) for threads that share the cores",
            stacklevel=3,
        )

    def _evaluation(self, data: Any, place: torch.device, overlap: bool) -> Stream:
        inputs = self._batches(data, None)
        if self._dense is not None:
            self.drain()
        if not any(len(store) for store in self.tables.values()):
            warnings.warn("the embeddings are evaluated and no table has a row yet", stacklevel=3)
        stream = Stream.evaluation(inputs, self.worker, place, overlap=overlap)
        self._evaluations.add(stream)
        return stream

    def get_extra_state(self) -> Tensor:
        """For state_dict: which rows these are, by step and version of each table. A tensor, which every file takes."""
        return torch.tensor([self.step, *(store.version for store in self.tables.values())])

    def set_extra_state(self, state: Any) -> None:
        """For load_state_dict: which rows there must be when the next stream begins, or the next step is made."""
        self._loaded = state

    def require_rows(self, state: Any) -> None:
        """Raises if the state, as `get_extra_state` gave it, names other rows than there are."""
        wanted, found = _rows_of(state), _rows_of(self.get_extra_state())
        if wanted != found:
            raise StreamError(
                f"load_state_dict was given the state of {_told(wanted)}, but the tables are at {_told(found)}: rows "
                "are in no state_dict, nor in what Accelerate's save_state or Lightning's checkpoints write; save and "
                "resume both with satrap.Checkpoint"
            )

    def _require_same_rows(self) -> None:
        if self._loaded is not None:
            self.require_rows(self._loaded)
            self._loaded = None

    def join_attempt(self) -> None:
        """All trainers go on in the attempt that the first one has begun at the servers; one alone begins it now. All
        of them call it."""
        if not isinstance(self.worker, LocalWorker):
            servers = self.worker.servers
            servers.begin()
            servers.attempt = self.trainers.from_first(servers.attempt)
            servers.latest_step = self.trainers.from_first(servers.latest_step)

    def _require_own_rows(self) -> None:
        """Servers outlive the processes that train on them."""
        if isinstance(self.worker, LocalWorker):
            return
        place, latest = current(), self.worker.servers.latest_step
        if place is not None and place.launch > place.first_launch and self.step == 0:
            warnings.warn(
                f"launch {place.launch} begins at step 0: there was no checkpoint to resume, so all is lost that was "
                f"trained since launch {place.first_launch}",
                stacklevel=3,
            )
        if latest > self.step == 0 and place is not None:
            # Of a launch before this one that ended without a checkpoint: the run begins again.
            self.trainers.first_does(self.worker.tables.clear, StreamError)
            self.join_attempt()
        elif latest > self.step:
            raise StreamError(
                f"the servers hold rows of an earlier run, of up to step {latest}, and this one is at step "
                f"{self.step}: resume its checkpoint, or remove them with embeddings.tables.clear()"
            )

    def signature_of(self, data: Any) -> Mapping[str, Any] | None:
        """For a checkpoint: what a position in it depends on; None if it cannot say."""
        if (far := self._far(data)) is not None:
            return far.signature(data)
        signature = getattr(data, "signature", None)
        return None if signature is None else signature()

    def _far(self, data: Any) -> "RemoteWorker | None":
        """The worker in a process of its own, if it can read the data."""
        if isinstance(self.worker, LocalWorker):
            return None
        from satrap.worker.remote.client import RemoteWorker

        return self.worker if isinstance(self.worker, RemoteWorker) and travels(data) else None

    def _batches(self, data: Any, position: Position | None, **share: int) -> Iterator[Inputs]:
        if (far := self._far(data)) is not None:
            return far.batches(data, position, **share)
        source = data if hasattr(data, "batches") else Items(data)
        found: Iterator[Inputs] = source.batches(self.features, position=position, **share)
        return found

    def _leave_stream(self, why: str = "another training stream was begun, or a checkpoint was resumed") -> None:
        """Ends the training stream before another begins; what it was handed is applied."""
        if self._training is None:
            return
        self._training.close(f"this stream ended when {why}")
        with Uninterrupted():
            self._step, self._past = self._training.last_step, self._past + self._training.counters()
            if (followed := self._followed.get(id(self._training_data))) is not None and not followed.resume:
                followed.position = self._training.position
            self._training = self._training_data = None

    def counters(self) -> Counters:
        """What training did so far, over all its streams: rows, seconds of each stage, staleness, what was lost."""
        so_far = self._past if self._training is None else self._past + self._training.counters()
        cut = {f"ids/{name}": count for name, count in self.worker.truncated.items() if count}
        rows = {name: len(store) for name, store in self.tables.items()}
        return replace(so_far, rows=rows, lost={**so_far.lost, **cut})

    def close(self) -> None:
        """Ends the streams, applies the updates that were handed over, and ends the connections to servers and workers.
        Rows in this process are freed with their last reference. Embeddings that are collected, or left at the end
        of the process, are closed likewise, but their last updates may be missing."""
        self._close(finish=True)

    def before_close(self, work: Callable[[], None]) -> None:
        """For a checkpoint in a run: have it done before the connections end, or else at the end of the script."""
        if current() is not None:
            self._before_close.append(work)
            before_end(self._finish)

    def _finish(self) -> None:
        while self._before_close:
            self._before_close.pop(0)()

    def _close(self, finish: bool) -> None:
        """finish: do what was to be done before. One that failed does not: to the others its share would be done."""
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
        """For the optimizer: sends the gradients that wait to the tables."""
        if self._loaded is not None:
            self._require_same_rows()
        scale /= self.trainers.world  # the loss is a mean over what all of them have
        taken = self._training is not None and self._training.update(dict(lrs), scale)
        if not taken and self._dense is not None and self._dense.has_gradients():
            raise StreamError(
                "dense='async': optimizer.step() found gradients of dense parameters and no batch that a loss has "
                "reached: the servers know a step by its batch"
            )
        if not taken and not self.training:
            raise StreamError(
                "optimizer.step() found no batch of a training stream, and the embeddings are in eval(): call "
                "embeddings.train() before embeddings.stream(...)"
            )

    def drop_reached(self, cause: str) -> None:
        """For the optimizer: the gradients that wait are not sent."""
        if self._training is not None:
            self._training.drop(cause)

    def drain(self) -> None:
        """Returns once every update handed to the tables is applied. With dense="async" the dense parameters are the
        servers' latest then."""
        if self._training is not None:
            self._training.drain()
        self.refresh()

    def refresh(self) -> None:
        """With dense="async": the dense parameters are the servers' latest now."""
        if self._dense is not None:
            self._dense.refresh()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Every update handed over is applied before, and no table work runs inside: the moment of a checkpoint."""
        with self._training.paused() if self._training is not None else nullcontext():
            yield

    def split(self, block: Tensor) -> dict[str, Tensor]:
        """The pooled features' parts of a batch's embeddings, each [batch, dim], by name."""
        pooled = self.features.pooled
        return dict(zip(pooled, block.split(list(pooled.values()), dim=1), strict=True))

    def forward(self, inputs: Inputs) -> Batch:
        """One batch looked up without training, on the CPU: for serving, outside any stream."""
        return BatchLookup(self.worker, torch.device("cpu"), train=False, overlap=False)(inputs, 0, 0).hand_over(None)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{', '.join(self.features.names)}; staleness={self.staleness}"


@dataclass(slots=True)
class _Followed:
    """A source whose position a checkpoint saves."""

    data: Any
    position: Position | None = None
    resume: bool = False
    """The next stream over it begins at the position."""


def _rows_of(state: Any) -> list[int]:
    """A step, and the version of each table."""
    if isinstance(state, Mapping):  # of an older release
        return [state["step"], *state["versions"].values()]
    found: list[int] = state.tolist()
    return found


def _told(rows: list[int]) -> str:
    return f"step {rows[0]}, table versions {rows[1:]}"
