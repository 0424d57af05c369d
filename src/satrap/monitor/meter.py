"""Collects the numbers of each step and summarizes an interval of steps in a report. The caller passes the time.

A step costs a few microseconds: tensors are kept by reference (without their graph) and read when a report is due, so a
GPU is waited for once per interval. Until then the tensors must not be overwritten. A report costs a few milliseconds,
for the AUC.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.errors import InputError
from satrap.monitor.metrics import Window
from satrap.monitor.report import Counters, Report

_MAX_LOSSES = 512  # kept per report, since each is read from its device separately


class Meter:
    """Collects the numbers of each step; a report covers the steps since the report before it."""

    def __init__(self, now: float, *, counters: Counters | None = None, window: int = 1 << 16) -> None:
        self._started = now
        self._whole = self._last = _Mark(at=now, counters=counters or Counters())  # the start, and the last report
        self._first: _Mark | None = None  # the end of the first step
        self._window = Window(window)
        self._window_size = window
        self._step = self._num_steps = self._num_whole = self._samples = self._last_samples = 0
        self._waiting: deque[tuple[Any, Any, int]] = deque()  # unread labels and scores, and their samples
        self._num_waiting = 0
        self._start_interval()

    def __str__(self) -> str:
        return f"step {self._step:,}, {self._samples:,} samples"

    def _start_interval(self) -> None:
        self._losses: deque[Any] = deque(maxlen=_MAX_LOSSES)
        self._logged: dict[str, tuple[float, int]] = {}  # sum and count

    @property
    def last_step(self) -> int:
        """The last step; 0 before the first."""
        return self._step

    @property
    def num_samples(self) -> int:
        """Number of samples so far."""
        return self._samples

    def end_step(self, total_samples: float) -> int | None:
        """Return the step at which all steps have so many samples; None before the first. The last step so far may be
        short, so it only counts if there is no other."""
        several = self._num_whole > 1
        samples, steps = self._samples - several * self._last_samples, self._num_whole - several
        return max(self._step, math.ceil(total_samples * steps / samples - 1e-9)) if samples else None

    @property
    def has_news(self) -> bool:
        """Whether there were steps or numbers of the script since the last report."""
        return self._num_steps > self._last.steps or bool(self._logged)

    @property
    def undefined(self) -> str | None:
        """Why the AUC of the samples seen so far is undefined; None: it is not, or there are none yet."""
        return self._window.only_label if self._window.num_samples else None

    @property
    def is_full(self) -> bool:
        """Whether the window of the AUC is full."""
        return self._window.num_samples == self._window_size

    def step(
        self, now: float, step: int, samples: int, loss: Any = None, labels: Any = None, scores: Any = None
    ) -> None:
        """Record one step that has ended. This is the hot path: it keeps references and adds integers."""
        self._step = step
        self._samples += samples
        if samples:  # a batch without samples keeps this trainer in step with others
            self._last_samples = samples
            self._num_whole += 1
        self._num_steps += 1
        if self._first is None:
            self._first = _Mark(at=now, steps=1, samples=samples)
        if loss is not None:
            self._losses.append(_detached(loss))
        if scores is not None:
            self._waiting.append((_detached(labels), _detached(scores), samples))
            self._num_waiting += samples
            while self._num_waiting - self._waiting[0][2] >= self._window_size:  # samples that no window would include
                self._num_waiting -= self._waiting.popleft()[2]

    def log(self, values: Mapping[str, float]) -> None:
        """Record numbers of the script, of which a report has the mean."""
        for name, value in values.items():
            total, count = self._logged.get(name, (0.0, 0))
            self._logged[name] = (total + value, count + 1)

    def leave_out(self, seconds: float) -> None:
        """Leave the last seconds out of the throughput: no training took place in them."""
        for mark in {self._whole, self._last, self._first}:
            if mark is not None:
                mark.at += seconds

    def report(self, now: float, counters: Counters | None = None, *, is_last: bool = False) -> Report:
        """Return a report of the steps since the last one. Reads the tensors, so it waits for their device.

        is_last: whether it is the last one: its throughput, staleness and stages are those of all steps, since the few
            steps since the report before it would say little.
        """
        losses = [float(loss) for loss in self._losses]
        auc, entropy = self._window_metrics()
        counters = counters or Counters()
        since = self._whole if is_last else self._last
        before = since.counters.staleness
        seen = {n: new for n, count in counters.staleness.items() if (new := count - before.get(n, 0)) > 0}
        samples_per_second, steps_per_second = self._rates(now, since)
        _, mean_steps = self._rates(now, self._first or since)
        report = Report(
            step=self._step,
            samples=self._samples,
            steps=self._num_steps - since.steps,
            seconds=now - self._started,
            samples_per_second=samples_per_second,
            steps_per_second=steps_per_second,
            mean_steps_per_second=mean_steps,
            loss=sum(losses) / len(losses) if losses else None,
            window=self._window.num_samples,
            auc=auc,
            normalised_entropy=entropy,
            staleness=sum(n * count for n, count in seen.items()) / sum(seen.values()) if seen else None,
            max_staleness=max(seen) if seen else None,
            staleness_counts=seen,
            rows=dict(counters.rows),
            bytes=dict(counters.bytes),
            stages=self._stages(counters, now, since),
            learning_rates=dict(counters.learning_rates),
            gradient_norm=counters.gradient_norm,
            device_bytes=counters.device_bytes,
            lost=dict(counters.lost),
            logged={name: total / count for name, (total, count) in self._logged.items()},
        )
        self._last = _Mark(at=now, steps=self._num_steps, samples=self._samples, counters=counters)
        self._start_interval()
        return report

    def _rates(self, now: float, since: "_Mark") -> tuple[float, float]:
        """Return the samples and the steps per second."""
        seconds = now - since.at
        if seconds <= 0:
            return 0.0, 0.0
        return (self._samples - since.samples) / seconds, (self._num_steps - since.steps) / seconds

    def _stages(self, counters: Counters, now: float, since: "_Mark") -> dict[str, float]:
        steps, before = self._num_steps - since.steps, since.counters
        if steps == 0:
            return {}
        spent = {name: total - before.stages.get(name, 0.0) for name, total in counters.stages.items()}
        if counters.inside is not None:
            spent["dense"] = max(0.0, now - since.at - (counters.inside - (before.inside or 0.0)))
        return {name: total / steps for name, total in spent.items()}

    def _window_metrics(self) -> tuple[float | None, float | None]:
        diverged = False
        while self._waiting:
            labels, scores, _ = self._waiting.popleft()
            truth, logits = _column("labels", labels), _column("scores", scores)
            if truth.size != logits.size:
                raise InputError(
                    f"Progress: {truth.size} labels and {logits.size} scores; expected one score per label"
                )
            is_number = ~np.isnan(logits)
            diverged |= not is_number.all()
            self._window.add(truth[is_number], logits[is_number])
        self._num_waiting = 0
        if diverged:
            return math.nan, math.nan
        if not self._window.num_samples:
            return None, None
        return self._window.auc(), self._window.normalised_entropy()


@dataclass(slots=True, eq=False)
class _Mark:
    """A moment from which rates are measured."""

    at: float
    """When it was, later by the seconds since then that do not count."""
    steps: int = 0
    samples: int = 0
    counters: Counters = field(default_factory=Counters)


def _detached(value: Any) -> Any:
    """Detach a tensor from its graph, which would keep the activations of a step alive."""
    return value.detach() if hasattr(value, "detach") else value


def require_column(name: str, shape: Sequence[int]) -> None:
    """Raise InputError unless labels or scores have one number per sample."""
    if len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
        raise InputError(f"Progress: {name} have the shape {tuple(shape)}; expected one column, e.g. {name}[:, 0]")


def _column(name: str, values: Any) -> NDArray[Any]:
    array = np.asarray(values.float().cpu() if hasattr(values, "detach") else values)
    require_column(name, array.shape)
    return array.reshape(-1)
