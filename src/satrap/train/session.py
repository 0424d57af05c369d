"""The training session of an `Embeddings`: its worker, its streams, and where each source and the step have come to.

`Embeddings` is the part that users call; `HybridOptimizer` and `Checkpoint` use the session.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from satrap.config.features import Features
from satrap.config.tables import Table
from satrap.data.inputs import Inputs, Position
from satrap.errors import ConfigError, StreamError
from satrap.event_log import describe_process
from satrap.interrupts import Uninterrupted
from satrap.monitor.report import Counters
from satrap.monitor.samples import Sample, register, snapshot_samples, table_samples, training_samples
from satrap.run_context import current_context, register_exit_hook
from satrap.table.table_group import transfers_of
from satrap.train.batch import InFlightBatch
from satrap.train.dense_figures import DenseFigures
from satrap.train.dense_strategy import DenseStrategy
from satrap.train.joint_batches import JointBatches
from satrap.train.joint_calls import Call
from satrap.train.ledger import BatchLedger
from satrap.train.module_lookups import ModuleLookups
from satrap.train.prefetched_batches import LoaderPass
from satrap.train.process_group import ProcessGroup, note_missing_trainer
from satrap.train.row_state import require_own_rows, require_rows, rows_state
from satrap.train.step_lookups import read_without_training
from satrap.train.stream import Stream
from satrap.train.tracked_sources import TrackedSource, TrackedSources, is_same
from satrap.train.training_watch import TrainingWatch
from satrap.worker.rows import Ids
from satrap.worker.worker import Worker

_CPU = torch.device("cpu")
_NO_ROWS = "the embeddings are evaluated, but no table has a row yet: resume a checkpoint, or train first"


class TrainingSession:
    """The state of training that outlives a stream."""

    def __init__(
        self,
        features: Features,
        trainers: ProcessGroup,
        open_worker: Callable[[tuple[Table, ...]], Worker],
        *,
        staleness: int,
        deterministic: bool,
        output_dtype: str,
    ) -> None:
        """open_worker: opens the worker of a job that also has these tables, of dense parameters."""
        self.features, self.trainers = features, trainers
        self.dense = DenseStrategy()
        """The strategy of the optimizer; one that does nothing until there is an optimizer."""
        self.on_hold: Callable[[list[Tensor]], None] | None = None
        """Receives the leaves that wait for a step; None until there is an optimizer."""
        self._held: list[Tensor] = []
        self.figures = DenseFigures()
        self.watch = TrainingWatch(features)
        self.is_training = True
        """Whether the embeddings are in train(), and not in eval()."""
        self.expected_rows: Any = None
        """The rows that a loaded state_dict expects, as `rows_state` returns them; None if they were found."""
        self.why_untrained = ""  # the error of a step that finds no gradient of rows, since modules only read
        self.staleness, self.deterministic = staleness, deterministic
        self._open_worker = open_worker
        self._output_dtype = output_dtype
        self._worker: Worker | None = None
        self._step = 0
        own = weakref.ref(self)
        describe_process("trainer", number=trainers.rank, step=lambda: None if (me := own()) is None else me.step)
        self._past_counters = Counters()  # totals of ended training streams
        self._tracked = TrackedSources()
        self._training: Stream | ModuleLookups | None = None
        self._training_data: Any = None
        self._paddings: dict[str, set[int | None]] = {}  # what modules skip, by table
        self._evaluations: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._before_close: list[Callable[[], None]] = []
        self._awaited: list[Callable[[], None]] = []
        self._has_evaluated_nothing = False
        self._closed = False
        register(self)
        end_script = weakref.WeakMethod(self._end_script)
        register_exit_hook(lambda: None if (end := end_script()) is None else end())

    # -- the worker ----------------------------------------------------------------------------------------------------

    def open(self, dense: DenseStrategy) -> None:
        """Open the worker, of a job that also has the tables of the dense parameters."""
        if self._worker is not None:
            raise ConfigError("dense='async': optimizer(...) was already called; use the optimizer that it returned")
        self._worker = self._open_worker(dense.tables)
        self._worker.rows.output_dtype = self._output_dtype
        if self._worker.servers is not None:
            dense.connect(self._worker.servers)

    @property
    def worker(self) -> Worker:
        """The worker that looks up and updates rows."""
        if self._closed:
            raise StreamError("these embeddings are closed: create new ones")
        if self._worker is None:
            raise StreamError("dense='async': the dense parameters have no tables yet: call optimizer(...) first")
        return self._worker

    def join_attempt(self) -> None:
        """Join the attempt that trainer 0 has started at the servers; a lone trainer starts it now. All trainers call
        this. Ends the stream that is open first: a trainer that left its loop alone must not wait for the others."""
        self._leave_stream()
        if (servers := self.worker.servers) is not None:
            servers.begin_attempt()
            servers.attempt = self.trainers.broadcast_int(servers.attempt)
            servers.latest_step = self.trainers.broadcast_int(servers.latest_step)

    def rows_state(self) -> Tensor:
        """Return what identifies the rows; see `satrap.train.row_state`."""
        return rows_state(self.worker, self.step)

    def require_rows(self, state: Any) -> None:
        """Raise StreamError if `state`, from `rows_state`, identifies other rows than the current ones."""
        require_rows(self.worker, self.step, state)

    def require_whole_rows(self) -> None:
        """Raise StreamError if a restore has failed after it had begun to replace the rows."""
        if not self.worker.tables.is_whole:
            raise StreamError(
                "the tables hold a part of a checkpoint, because resuming it failed: resume again, or start again"
            )

    def require_expected_rows(self) -> None:
        """Raise StreamError unless the rows are those that a loaded state_dict expects, and all of them."""
        self.require_whole_rows()
        if self.expected_rows is not None:
            self.require_rows(self.expected_rows)
            self.expected_rows = None

    def use(self, dense: DenseStrategy, on_hold: Callable[[list[Tensor]], None]) -> None:
        """Train by this strategy from the next stream on, and let its optimizer hold the leaves that wait for a step,
        from now on."""
        self.dense, self.on_hold = dense, on_hold
        on_hold(self._held)

    def _hold(self, leaves: list[Tensor]) -> None:
        self._held = leaves
        if self.on_hold is not None:
            self.on_hold(leaves)

    # -- step and position ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step that was updated or dropped."""
        return self._step if self._training is None else self._training.last_step

    @property
    def end_step(self) -> int | None:
        """The last step of the training stream that is open; None if there is none, or its length is not known."""
        return self._training.end_step if isinstance(self._training, Stream) else None

    def track_position(self, data: Any) -> None:
        """Start to track `position_of(data)`."""
        self._tracked.track(data)

    def position_of(self, data: Any) -> Position | None:
        """Return the position of a tracked source after its last batch that was updated or dropped; None if it has none
        yet."""
        if self._training is not None and is_same(self._training_data, data):
            return self._training.position
        tracked = self._tracked.find(data)
        return None if tracked is None else tracked.position

    def note_save(self, data: Any) -> None:
        """Note that a checkpoint is saved, with the position in this data."""
        if self.step > 0 and not is_same(self._training_data, data):
            self._tracked.note_save(data)

    def end_streams(self) -> None:
        """End all streams before their rows are replaced; submitted updates are applied."""
        for stream in list(self._evaluations):
            stream.close("this stream ended when a checkpoint was resumed")
        self._leave_stream()

    def resume_at(self, step: int, data: Any, position: Position | None) -> None:
        """Make the next training stream continue after the step, and one over `data` at the position."""
        self._leave_stream()
        self._step = step
        tracked = self._tracked.track(data)
        tracked.position, tracked.resume = position, True

    def signature_of(self, data: Any) -> Mapping[str, Any] | None:
        """Return what a position in the source depends on; None if the source has no signature."""
        return self.worker.signature(data)

    # -- streams -------------------------------------------------------------------------------------------------------

    def train_on(self, data: Any, device: torch.device, accumulate: int, overlap: bool) -> Stream:
        """Start a training stream. All trainers call this."""
        if self.on_hold is None:
            raise StreamError("no optimizer: call embeddings.optimizer(...) before a training stream, or eval() first")
        share = (
            {"rank": self.trainers.rank, "world_size": self.trainers.world_size} if self.trainers.world_size > 1 else {}
        )

        def read(tracked: TrackedSource | None) -> tuple[Iterator[Inputs], Position | None]:
            position = tracked.position if tracked is not None and tracked.resume else None
            batches = self.worker.batches(data, position, **share)
            return self.dense.batches(batches, self.features.names, self._unawaited(accumulate)), position

        return self._start_stream(data, read, self.worker, device, accumulate, overlap)

    def _begin_training(self, *, joins: bool = False) -> None:
        self._leave_stream()
        if joins:
            self.join_attempt()
        self._has_evaluated_nothing = False
        require_own_rows(self.worker, self.trainers, self.step, self.join_attempt)
        self.dense.begin()

    def note_padding(self, table: str, padding: int | None) -> None:
        """Note the id that stands for none in a module over the table."""
        self._paddings.setdefault(table, set()).add(padding)

    @property
    def has_modules(self) -> bool:
        """Whether modules look rows up inside a model."""
        return bool(self._paddings)

    def paddings(self) -> dict[str, int | None]:
        """Return for each table the id that stands for none in all modules over it; None if there is no such id."""
        known = {table.name: self._paddings.get(table.name, {None}) for table in self.features.tables}
        return {name: next(iter(paddings)) if len(paddings) == 1 else None for name, paddings in known.items()}

    def train_by_table(self, items: LoaderPass, accumulate: int, overlap: bool) -> Stream:
        """Start a training stream of ids by table, for modules. All trainers call this."""
        if self.on_hold is None:
            raise StreamError("no optimizer: call embeddings.optimizer(...) before you iterate over prefetch(...)")
        worker = self.worker.by_table()

        def read(tracked: TrackedSource | None) -> tuple[Iterator[Inputs], Position | None]:
            position, is_resumed = (None, False) if tracked is None else (tracked.position, tracked.resume)
            first = items.begin(position, is_resumed=is_resumed, is_tracked=tracked is not None)
            names = worker.features.names
            return self.dense.batches(items, names, self._unawaited(accumulate), items.padding), first

        return self._start_stream(items.loader, read, worker, worker.device or _CPU, accumulate, overlap)

    def _start_stream(
        self,
        data: Any,
        read: "Callable[[TrackedSource | None], tuple[Iterator[Inputs], Position | None]]",
        worker: Worker,
        device: torch.device,
        accumulate: int,
        overlap: bool,
    ) -> Stream:
        """read: returns the batches of the data, and the position at which they begin."""
        tracked = self._tracked.begin(data)
        self._begin_training()
        ledger: BatchLedger[InFlightBatch] = BatchLedger(
            self.staleness, accumulate=accumulate, deterministic=self.deterministic, last_step=self.step
        )
        inputs, ledger.position = read(tracked)
        self.watch.begin(data, is_resumed=ledger.position is not None)
        how: dict[str, Any] = {"device": device, "overlap": overlap, "on_hold": self._hold, "dense": self.dense}
        with Uninterrupted():
            self._training_data = data
            stream = self._training = Stream(inputs, worker, ledger, train=True, watch=self.watch, **how)
            if tracked is not None:
                tracked.resume = False
        return stream

    def _unawaited(self, accumulate: int) -> set[Call]:
        """Return the calls of a training loop in which no trainer waits for another."""
        if self.worker.device is not None:
            return set()  # lookups and updates are exchanges of all trainers
        calls = {
            Call.NEXT: accumulate == 1,  # else a trainer must know whether others have a later batch
            Call.USE: not self.trainers.forward_waits,
            Call.STEP: self.worker.servers is not None and not self.worker.servers.barrier_size,
        }
        return {call for call, is_free in calls.items() if is_free}

    def look_up(self, ids: Mapping[str, Ids], device: torch.device) -> dict[str, Tensor]:
        """Return the rows of ids by table that modules look up for training, on the device."""
        self.require_expected_rows()
        training, self.why_untrained = self._training, ""
        if training is None or (isinstance(training, Stream) and training.is_over):
            training = self._begin_module_lookups()
        return training.look_up(ids, device)

    def read(self, ids: Mapping[str, Ids], device: torch.device) -> dict[str, Tensor]:
        """Return the rows of ids by table that modules look up without training, as they are."""
        self.require_whole_rows()
        return read_without_training(self.worker, ids, device)

    def _begin_module_lookups(self) -> ModuleLookups:
        """Start the lookups of modules where no stream is open. All trainers call this."""
        if self.on_hold is None:
            raise StreamError("no optimizer: call embeddings.optimizer(...) before a module looks up rows for training")
        self._begin_training(joins=self.dense.joins_attempt)
        several = self.trainers.world_size > 1
        how: dict[str, Any] = {"dense": self.dense, "watch": self.watch, "has_peers": several}
        lookups = ModuleLookups(self.worker, self._step, self._hold, **how)
        with Uninterrupted():
            self._training = lookups
        return lookups

    def evaluate_on(self, data: Any, device: torch.device, overlap: bool) -> Stream:
        """Start a stream that changes no table, and reads the updates of all steps so far."""
        self.apply_submitted()
        inputs = self.worker.batches(data)
        if self.dense.tables:
            self.drain()
        if not any(len(store) for store in self.worker.tables.values()):
            # With an optimizer, training may follow: Lightning validates before its first step. `close` warns if not.
            if self.on_hold is None:
                warnings.warn(_NO_ROWS, stacklevel=4)
            self._has_evaluated_nothing = self.on_hold is not None and self._training is None
        stream = Stream.evaluation(inputs, self.worker, device, overlap=overlap)
        self._evaluations.add(stream)
        return stream

    def _leave_stream(self, why: str = "another training stream started, or a checkpoint was resumed") -> None:
        """End the training stream before another starts; submitted updates are applied."""
        if self._training is None:
            return
        self._training.close(f"this stream ended when {why}")
        with Uninterrupted():
            self._step, self._past_counters = self._training.last_step, self._past_counters + self._training.counters()
            if (tracked := self._tracked.find(self._training_data)) is not None and not tracked.resume:
                tracked.position = self._training.position
            self._training = self._training_data = None

    def counters(self) -> Counters:
        """Return totals over all training streams."""
        return self._past_counters if self._training is None else self._past_counters + self._training.counters()

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of a scrape, which another thread makes while this session trains."""
        training, worker = self._training, self._worker
        past = self._past_counters
        yield from training_samples(past if training is None else past + training.counters())
        yield Sample("satrap_step", self._step if training is None else training.last_step)
        yield Sample("satrap_staleness_bound_steps", self.staleness)
        if worker is None:
            return
        for feature, count in worker.truncated.items():
            yield Sample("satrap_lost", count, {"what": f"ids/{feature}"})
        if worker.servers is not None:  # trainers leave gradients out before servers see them
            for table, count in zip(worker.servers.job.tables, worker.servers.num_skipped, strict=True):
                yield Sample("satrap_table_skipped", count, {"table": table.name})
        else:
            tables: Any = worker.tables
            yield from table_samples({name: store.stats() for name, store in tables.items()})
            yield from snapshot_samples(transfers_of(tables).to_dict())

    @property
    def not_ready(self) -> str:
        """Why this session cannot train; "" if it can."""
        if self._closed:
            return "the embeddings are closed"
        return "" if self._worker is not None else "the embeddings have no rows yet"

    @property
    def joint(self) -> JointBatches | None:
        """The batches of a training stream in which several trainers step together."""
        return None if self._training is None else self._training.joint

    def join_step(self, *, waits: bool = False) -> None:
        """Compare the step, or the drop, of the batches that have gradients with what other trainers do. waits: whether
        it waits for other trainers."""
        if self.joint is not None and (waiting := self.waiting_batches()):
            self.joint.step(waiting[-1], waits=waits)

    def update(self, lrs: Mapping[str, float], scale: float) -> None:
        """Send the collected gradients to the tables."""
        self.require_expected_rows()
        scale /= self.trainers.world_size  # the loss is a mean over what all of them have
        self.watch.note_update(self.waiting_batches())
        taken = self._training is not None and self._training.update(dict(lrs), scale)
        if self._training is not None:
            self.watch.note_step(has_rows=taken)
        if not taken and self.why_untrained:
            raise StreamError(self.why_untrained)
        if not taken and not self.is_training:
            raise StreamError(
                "optimizer.step() found no batch of a training stream, and the embeddings are in eval(): call "
                "embeddings.train() before embeddings.stream(...)"
            )

    def measure(self, *, are_checked: bool) -> None:
        """Start to compute the largest gradient of the next update. are_checked: as in `BatchLookup.measure`."""
        if self._training is not None:
            self._training._measure(are_checked=are_checked)

    def waiting_batches(self) -> list[InFlightBatch]:
        """Return the batches that a backward pass has reached and no step has taken."""
        return [] if self._training is None else self._training._waiting_batches()

    def drop_batches_with_gradients(self, cause: str) -> None:
        """Drop the batches that a backward pass has reached."""
        if self._training is not None:
            self.join_step()
            self._training.drop(cause)

    def apply_submitted(self) -> None:
        """Wait until every submitted update is applied, except those that wait for the loop."""
        if self._training is not None:
            self._training.apply_submitted()

    def drain(self) -> None:
        """Wait until every submitted update is applied, then fetch the latest dense parameters."""
        if self._training is not None:
            self._training.drain()
        self.dense.refresh()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Apply every submitted update, then keep table work from running inside the context."""
        with self._training.pause() if self._training is not None else nullcontext():
            yield

    # -- the end -------------------------------------------------------------------------------------------------------

    def run_before_close(self, work: Callable[[], None]) -> None:
        """In a run, run `work` before the connections close, or else at the end of the script."""
        if current_context() is not None:
            self._before_close.append(work)
            register_exit_hook(self._finish)

    def wait_before_close(self, wait: Callable[[], None]) -> None:
        """Call `wait` before the connections close, also after an error; it may be called again. In a run, call it also
        at the end of the script, so that its error is one of the run."""
        method = weakref.WeakMethod(wait)  # the session must not keep its object alive

        def call() -> None:
            if (wait := method()) is not None:
                wait()

        self._awaited.append(call)
        register_exit_hook(call)

    def _end_script(self) -> None:
        """Let the other trainers raise, if they are still in a loop that this trainer has left."""
        if self.joint is not None:
            if self.joint.may_be_awaited:
                self.worker.settle()  # before another trainer may wait for this one
            self.joint.announce_end()

    def _finish(self) -> None:
        while self._before_close:
            self._before_close.pop(0)()

    def explain(self, error: BaseException) -> None:
        """Name the trainers that have ended, if the error comes from that."""
        servers = None if self._worker is None else self._worker.servers
        if servers is not None and self._worker is not None and self._worker.stop_own_server is not None:
            note_missing_trainer(servers.addresses, error)

    def close(self, *, finish: bool) -> None:
        """End the streams, apply submitted updates, and close the connections.

        finish: first run what `run_before_close` registered; False after an error, since it would look done to other
            trainers.
        """
        if self._closed:
            return
        with ExitStack() as stack:
            if self._worker is not None:
                stack.callback(self._worker.close)
            stack.callback(setattr, self, "_worker", None)
            stack.callback(setattr, self, "_closed", True)
            for stream in self._evaluations:
                stack.callback(stream.close)
            if not finish and self._training is not None:
                self._training.release()
            self._leave_stream("the embeddings were closed")
            for wait in self._awaited:
                with nullcontext() if finish else suppress(Exception):  # its log line says why it failed
                    wait()
            if finish:
                self._finish()
                self._wait_for_readers()
                if self._has_evaluated_nothing:
                    warnings.warn(_NO_ROWS, stacklevel=3)

    def _wait_for_readers(self) -> None:
        """Wait until no other trainer needs rows of this process."""
        if self._worker is not None and self._worker.stop_own_server is not None:
            with suppress(RuntimeError):  # another trainer has failed
                self.trainers.all(True, patient=True)
