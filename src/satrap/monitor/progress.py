"""What a person sees while a model trains: a bar on a terminal, a line now and then elsewhere, TensorBoard, JSON lines.

    user's loop --step(batch)--> Meter --report(now, Counters)--> Report --> each sink's write()

`Progress` only looks at the clock. `meter` makes a report of an interval's steps, `report` is its numbers and text,
`sinks` put it somewhere. What is not given is not shown.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, Self

from satrap.errors import ConfigError, InputError
from satrap.monitor.meter import Meter, require_column
from satrap.monitor.report import Counters
from satrap.monitor.sinks import LINE_SECONDS, Screen, Sink


class Counting(Protocol):
    """What can be asked for its counters: `Embeddings`."""

    def counters(self) -> Counters:
        """As they stand."""


class Stepped(Protocol):
    """What a step was made of: `Batch`."""

    step: int

    def __len__(self) -> int:
        """Samples."""

    @property
    def label(self) -> Any:
        """Of each sample."""


class Progress:
    """Give it every batch that was stepped; it reports when it is time.

    with satrap.Progress(embeddings) as progress:
        for batch in embeddings.stream(data):
            ...
            optimizer.step()
            progress.step(batch, loss=loss, scores=logits)
    """

    def __init__(
        self,
        embeddings: Counting | None = None,
        sinks: Sequence[Sink] | None = None,
        *,
        total_samples: int | None = None,
        every_seconds: float | None = None,
        window: int = 1 << 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """embeddings: asked at every report for table rows, staleness and the seconds of each stage.

        sinks: a Screen on standard error if None.
        every_seconds: None takes the shortest that a sink wants, else 10: 1 with a bar.
        window: samples that AUC and normalised entropy look back.
        """
        if every_seconds is not None and not every_seconds > 0:
            raise ConfigError(f"Progress: every_seconds is {every_seconds!r}; wanted a number above 0")
        self._sinks = [Screen()] if sinks is None else list(sinks)
        wanted = min((getattr(sink, "every_seconds", LINE_SECONDS) for sink in self._sinks), default=LINE_SECONDS)
        self._every: float = wanted if every_seconds is None else every_seconds
        self._clock, self._embeddings = clock, embeddings
        now = clock()
        self._meter = Meter(now, counters=self._counters(), window=window, total_samples=total_samples)
        self._due, self._closed = now + self._every, False

    def step(self, batch: Stepped, *, loss: Any = None, scores: Any = None, labels: Any = None) -> None:
        """The batch was stepped. loss: a tensor or number; scores: the logits; labels: the batch's own if None. All are
        read at the next report."""
        if self._closed:
            raise InputError("Progress.step: found it closed; make a new Progress")
        if scores is not None:
            labels = batch.label if labels is None else labels
            for name, values in (("labels", labels), ("scores", scores)):  # now, where the user sees which line
                require_column(name, getattr(values, "shape", ()))
        if not len(batch):  # it has no samples, and is there for the other trainers' sake
            loss = labels = scores = None
        self._meter.step(batch.step, len(batch), loss, labels, scores)
        now = self._clock()
        if now >= self._due:
            self._report(now)

    def close(self) -> None:
        """Reports what came since the last report and closes the sinks."""
        try:
            if not self._closed and self._meter.has_news:
                self._report(self._clock())
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # After an error nothing is read any more: it might raise another one over the first.
        self.close() if kind is None else self._close()

    def _report(self, now: float) -> None:
        report = self._meter.report(now, self._counters())
        self._due = now + self._every
        for sink in self._sinks:
            sink.write(report)

    def _counters(self) -> Counters | None:
        return None if self._embeddings is None else self._embeddings.counters()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:  # each is closed, whatever the others raise
            for sink in self._sinks:
                stack.callback(sink.close)
