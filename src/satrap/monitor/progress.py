"""Progress of a training loop: a bar on a terminal, periodic lines elsewhere, TensorBoard, JSON lines, and the record
from which `satrap report` makes a page.

    user's loop --step(batch)--> Meter --report(now, Counters)--> Report --> each sink's write()
                              `-> TrainingRecord, with a Meter and intervals that differ from those of the sinks

`Progress` is the only part with a clock. `meter` summarizes an interval of steps, `report` has its numbers and text,
and `sinks` show them. Numbers that were not passed are not shown.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from typing import Any, Protocol, Self, runtime_checkable

from satrap.config.validation import kind_of, known_arguments
from satrap.errors import ConfigError, InputError
from satrap.monitor.hidden_secrets import hide_secrets
from satrap.monitor.meter import Meter, require_column
from satrap.monitor.report import Counters, own_scalars
from satrap.monitor.sinks import LINE_SECONDS, Screen, Sink
from satrap.monitor.training_record import TrainingRecord, open_record
from satrap.run_context import is_trial
from satrap.transfer import format_progress, observe_transfers, stop_observing


class HasCounters(Protocol):
    """An object with counters: `Embeddings`."""

    def counters(self) -> Counters:
        """Return the current counters."""


@runtime_checkable
class HasSettings(Protocol):
    """An object with settings that a report shows: `Embeddings`."""

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, among them `rank`."""


class SteppedBatch(Protocol):
    """The batch of a step: `Batch`."""

    step: int

    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    def label(self) -> Any:
        """Label of each sample."""


class ReadBatch(Protocol):
    """A batch as a source has read it: `Inputs`."""

    @property
    def batch_size(self) -> int:
        """The number of samples."""

    @property
    def label(self) -> Any:
        """Label of each sample; None: there is none."""


class Progress:
    """Reports the progress of a training loop, which passes it every batch after its step.

    with satrap.Progress(embeddings) as progress:
        for batch in embeddings.stream(data):
            ...
            optimizer.step()
            progress.step(batch, loss=loss, scores=logits)
    """

    @known_arguments()
    def __init__(
        self,
        embeddings: HasCounters | None = None,
        sinks: Sequence[Sink] | None = None,
        *,
        total_samples: int | None = None,
        every_seconds: float | None = None,
        window: int = 1 << 16,
        record: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """embeddings: source of table rows, staleness and the seconds of each stage in a report.

        sinks: None: a Screen on standard error.
        total_samples: of the whole run, of all trainers; reports have the step at which it ends. None: they have it
            where the source knows how many samples it has.
        every_seconds: interval of reports; None: the shortest that a sink requests, or else 10; a bar requests 1.
        window: number of recent samples for AUC and normalised entropy.
        record: local folder in which this trainer records the run for `satrap report`, below `records/`; None: the
            folder of `satrap run`; without `satrap run`, nothing is recorded.
        settings: settings of your own that the report shows, such as `vars(args)`; texts whose names say that they are
            secret, such as password or token, are neither recorded nor shown.
        """
        if every_seconds is not None and not every_seconds > 0:
            raise ConfigError(f"Progress: every_seconds is {every_seconds!r}; expected a number above 0")
        if embeddings is not None and not hasattr(embeddings, "counters"):
            raise ConfigError(f"Progress: embeddings is {kind_of(embeddings)}; expected the satrap.Embeddings, or None")
        if not isinstance(sinks, Sequence | None) or not all(_is_sink(sink) for sink in sinks or ()):
            raise ConfigError(f"Progress: sinks is {kind_of(sinks)}; expected a list of sinks, [satrap.Screen()], e.g.")
        if not isinstance(settings, Mapping | None):
            raise ConfigError(f"Progress: settings is {kind_of(settings)}; expected a dict by name, such as vars(args)")
        self._sinks: list[Sink] = [] if is_trial() else [Screen()] if sinks is None else list(sinks)
        requested = min((getattr(sink, "every_seconds", LINE_SECONDS) for sink in self._sinks), default=LINE_SECONDS)
        self._every: float = requested if every_seconds is None else every_seconds
        self._clock, self._embeddings = clock, embeddings
        self._end_step, self._total_samples = None, total_samples
        now = clock()
        self._meter = Meter(now, counters=self._counters(), window=window)
        self._due, self._closed, self._has_warned = now + self._every, False, False
        known: Mapping[str, Any] = embeddings.settings() if isinstance(embeddings, HasSettings) else {}
        file = None if is_trial() else open_record(record, known.get("rank", 0))
        self._record = None
        if file is not None:
            shown = {**known, "script": hide_secrets(dict(settings or {}))}
            self._record = TrainingRecord(
                file,
                self._counters,
                clock,
                window=window,
                settings=shown,
                end_step=None if record is not None else self._last_step,
            )
        observe_transfers(self._on_transfer)

    def step(
        self, batch: SteppedBatch | ReadBatch | int, *, loss: Any = None, scores: Any = None, labels: Any = None
    ) -> None:
        """Record a batch after its step. loss: a tensor or number; scores: the logits; labels: the batch's own if None.
        All are read at the next report.

        batch: that of a stream; or else `Inputs`, or the number of samples, and the step is that of the embeddings.
        """
        if self._closed:
            raise InputError("Progress.step: this Progress is closed; create a new one")
        num_samples = _num_samples(batch)
        if (shape := getattr(loss, "shape", ())) and math.prod(shape) != 1:
            raise InputError(f"Progress.step: loss has the shape {list(shape)}; expected one number: loss.mean()")
        if scores is not None:
            labels = getattr(batch, "label", None) if labels is None else labels
            if labels is None:
                raise InputError("Progress.step: scores have no labels beside them; expected labels=..., one per score")
            for name, values in (("labels", labels), ("scores", scores)):  # raises at the user's line
                require_column(name, getattr(values, "shape", ()))
        if not num_samples:  # a batch that only keeps this trainer in step with others
            loss = labels = scores = None
        step = self._step_of(batch)
        now = self._clock()
        self._meter.step(now, step, num_samples, loss, labels, scores)
        if self._record is not None:
            position = getattr(getattr(batch, "inputs", batch), "position", None)
            self._record.step(now, step, num_samples, loss, labels, scores, getattr(position, "epoch", None))
        if now >= self._due:
            self._report(now)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record numbers of your own, such as `{"learning rate": 0.1}`: `satrap report` draws a chart of each, and JSON
        lines and TensorBoard have them by these names. A report has the mean of those since the last one.

        values: finite numbers; a tensor of one number is read at once, which waits for its device.
        """
        if self._closed:
            raise InputError("Progress.log: this Progress is closed; create a new one")
        numbers = own_scalars(values)
        self._meter.log(numbers)
        if self._record is not None:
            self._record.log(numbers)

    def report_evaluation(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        is_best: bool | None = None,
        best_by: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Report the metrics of an evaluation now, with the steps since the last report. `Validation` calls this.

        is_best: whether it is the best so far; None: not known.
        best_by: the metric that decides which evaluation is the best, shown beside the best one.
        seconds: how long the evaluation took, which does not count for the throughput of training.
        """
        if self._closed:
            raise InputError("Progress.report_evaluation: this Progress is closed; create a new one")
        self._meter.leave_out(seconds)
        if self._record is not None:
            self._record.add_evaluation(self._clock(), step, metrics, seconds, is_best=is_best, best_by=best_by)
        evaluation: dict[str, Any] = {"validation": dict(metrics), "is_best": is_best, "best_by": best_by, "step": step}
        if step != self._meter.last_step:  # as that of the best model: training has gone further
            evaluation |= {"loss": None, "auc": None, "normalised_entropy": None}
        self._report(self._clock(), evaluation)

    def close(self) -> None:
        """Report the steps since the last report, with the throughput of all, and close the sinks."""
        try:
            if not self._closed and self._meter.has_news:
                self._report(self._clock(), is_last=True)
        finally:
            self._close()

    def __repr__(self) -> str:
        return f"Progress({self._meter}{', closed' if self._closed else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # After an error nothing is read any more, which might raise another error and hide the first.
        self.close() if kind is None else self._close(error)

    def _report(self, now: float, evaluation: Mapping[str, Any] | None = None, *, is_last: bool = False) -> None:
        report = self._meter.report(now, self._counters(), is_last=is_last)
        report = replace(report, end_step=self._end_after(report.step), **(evaluation or {}))
        if not self._has_warned and (is_last or self._meter.is_full) and (why := self._meter.undefined) is not None:
            self._has_warned = True
            warnings.warn(
                f"Progress: AUC and normalised entropy are undefined (nan): {why} at step {report.step}; expected "
                "labels 0 and labels 1: check the label column, or raise window",
                stacklevel=3,
            )
        self._due = now + self._every
        for sink in self._sinks:
            sink.write(report)

    def _step_of(self, batch: SteppedBatch | ReadBatch | int) -> int:
        if hasattr(batch, "step"):
            return int(batch.step)
        return int(getattr(self._embeddings, "step", self._meter.last_step + 1))

    def _last_step(self) -> int | None:
        """Return the last step of the run, or of the stream, of the last one if it has ended; None: not known."""
        if self._total_samples is not None:
            trainers = getattr(self._embeddings, "trainers", None)
            return self._meter.end_step(self._total_samples / getattr(trainers, "world_size", 1))
        self._end_step = getattr(self._embeddings, "end_step", None) or self._end_step
        return self._end_step

    def _end_after(self, step: int) -> int | None:
        """Return the last step, if this step leads to it, and not after a stream that was left early."""
        end_step = self._last_step()
        is_left = self._total_samples is None and getattr(self._embeddings, "end_step", None) is None
        return None if end_step is None or step > end_step or (is_left and step < end_step) else end_step

    def _on_transfer(self, kind: str, figures: Mapping[str, Any] | None) -> None:
        """Show how far a save is, from any thread."""
        note = None if figures is None else f"{kind}: {format_progress(**figures)}"
        for sink in self._sinks:
            if (show := getattr(sink, "note", None)) is not None:
                show(note)
        if self._record is not None:
            self._record.note(note)

    def _counters(self) -> Counters | None:
        return None if self._embeddings is None else self._embeddings.counters()

    def _close(self, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        stop_observing(self._on_transfer)
        with ExitStack() as stack:  # closes each sink, whatever the others raise
            if self._record is not None:
                stack.callback(self._record.close, self._clock(), error)
            for sink in self._sinks:
                stack.callback(sink.close)


def _is_sink(given: object) -> bool:
    return not isinstance(given, type) and hasattr(given, "write") and hasattr(given, "close")


def _num_samples(batch: Any) -> int:
    """Return the number of samples of what `Progress.step` received."""
    if hasattr(batch, "step"):
        return len(batch)
    number = getattr(batch, "batch_size", batch)
    if isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 0:
        return int(number)
    raise InputError(
        f"Progress.step: batch is a {type(batch).__name__}; expected that of a stream, as in step(batch, loss=loss), "
        "or for a loader of your own its number of samples, as in step(len(label), loss=loss)"
    )
