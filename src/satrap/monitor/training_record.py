"""The record of a training loop, which `Progress` writes and `satrap report` reads.

A line for each interval of steps: its loss, AUC, samples per second, staleness, seconds of each stage, rows and bytes,
numbers of the script, the gradient norm, memory of the process and of GPUs, the steps at which an epoch began, and
learning rates that changed.
The record has its own intervals, since a screen's are too long for a curve of a short run: they grow with the run, from
a 64th of a second to a minute, and are long enough that all summaries together take 0.25 s and half a percent of
the time. Where summaries are slow, as on a busy machine, an interval is at most a tenth of the time since the start, so
that a curve has a point where it bends, or as long as twenty summaries. A step costs two microseconds more.
Under `satrap run` the process also sends every second how far it is, which the run shows and does not record.
"""

import math
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from satrap.config.location import local_path
from satrap.errors import ConfigError
from satrap.event_log import place_of_process
from satrap.monitor.hidden_secrets import hide_secrets
from satrap.monitor.memory import resident_bytes
from satrap.monitor.meter import Meter
from satrap.monitor.record_file import FOLDER, SHOWN, RecordFile
from satrap.monitor.report import Counters, Report
from satrap.run_context import current_context, record_pipe

_MIN_SECONDS, _MAX_SECONDS = 1 / 64, 60.0
_OF_ELAPSED = 0.01
"""Length of an interval, as a share of the time since the start."""
_FREE_SECONDS, _COST_SHARE = 0.25, 0.005
"""Time that all summaries may take: so many seconds, and this share of the time since the start."""
_MAX_GROWTH, _MIN_SUMMARIES = 0.1, 20
"""Length of an interval at most: this share of the time since the start, or as long as so many summaries."""
_SHOWN_SECONDS = 1.0
_MAX_ERROR = 500  # characters
_GIT_SECONDS = 2.0
_PROCESS = secrets.token_hex(4)
_SAME_NAMES = ("seconds", "step", "steps", "samples", "loss", "auc", "window", "stages", "rows", "bytes", "lost")
_FIELDS = {name: name for name in (*_SAME_NAMES, "gradient_norm", "device_bytes", "logged")} | {
    "rate": "samples_per_second",
    "ne": "normalised_entropy",
    "staleness": "staleness_counts",
}
"""What an interval has of a report: its names there."""


class TrainingRecord:
    """Records one training loop."""

    def __init__(
        self,
        file: RecordFile,
        counters: Callable[[], Counters | None],
        clock: Callable[[], float],
        *,
        window: int,
        settings: Mapping[str, Any],
        end_step: Callable[[], int | None] | None = None,
    ) -> None:
        """counters: returns the current counters. settings: what the report shows as settings.
        end_step: returns that of the loop, for the run that shows its progress; None: no run does."""
        self._file, self._counters, self._clock = file, counters, clock
        self._end_step, self._show_at = end_step, -math.inf
        self._first_step: int | None = None
        self._note: str | None = None
        self._learning_rates: Mapping[str, float] = {}
        self._started = self._last = clock()
        self._meter = Meter(self._started, counters=counters(), window=window)
        self._due = self._started + _MIN_SECONDS
        self._spent = 0.0  # seconds in summaries
        self._left_out = 0.0  # seconds of the current interval without training
        self._step: int | None = None  # the last one
        self._epoch: int | None = None  # at that step
        self._epochs: list[int] = []  # first steps of the epochs that began in this interval
        self._id = secrets.token_hex(4)
        context = current_context()
        file.append(
            "start",
            id=self._id,
            at=time.time(),
            process=_PROCESS,
            where=place_of_process(),
            launch=None if context is None else context.launch,
            version=version("satrap"),
            script=sys.argv[0],
            command=shlex.join(map(str, hide_secrets(sys.argv))),
            commit=_commit_of(Path(sys.argv[0]).parent),
            settings=settings,
        )

    def step(
        self, now: float, step: int, samples: int, loss: Any, labels: Any, scores: Any, epoch: int | None = None
    ) -> None:
        """Record one step, as `Meter.step`. epoch: of its batch; None: not known."""
        self._meter.step(now, step, samples, loss, labels, scores)
        if epoch != self._epoch and None not in (epoch, self._epoch):
            self._epochs.append(step)
        self._step, self._epoch = step, epoch
        if self._first_step is None:
            self._first_step = step
        if now >= self._show_at:
            self._show(now)
        if now >= self._due:
            self._write_interval(now)

    def log(self, values: Mapping[str, float]) -> None:
        """Record numbers of the script, as `Meter.log`."""
        self._meter.log(values)

    def add_evaluation(
        self, now: float, step: int, metrics: Mapping[str, float], seconds: float, **judgement: Any
    ) -> None:
        """Record the metrics of an evaluation, and that its seconds were not spent on training. judgement: `is_best`
        and `best_by`, as in `Progress.report_evaluation`."""
        self._meter.leave_out(seconds)
        self._left_out += seconds
        elapsed = now - self._started
        self._file.append(
            "evaluation",
            id=self._id,
            at=time.time(),
            seconds=elapsed,
            step=step,
            metrics=metrics,
            took=seconds,
            **judgement,
        )

    def close(self, now: float, error: BaseException | None = None) -> None:
        """Record the end, and the steps since the last interval, unless the loop ended with an error."""
        if error is None and self._meter.has_news:
            self._write_interval(now)
        if self._step is not None:
            self._show(now)
        text = None if error is None else f"{type(error).__name__}: {error}"[:_MAX_ERROR]
        self._file.append("end", id=self._id, at=time.time(), seconds=now - self._started, step=self._step, error=text)
        self._file.close()

    def note(self, text: str | None) -> None:
        """Show a note beside the progress, from any thread; None: no more."""
        self._note = text
        if self._step is not None:
            self._show(self._clock())

    def _show(self, now: float) -> None:
        """Send the run how far this loop is."""
        self._show_at = math.inf if self._end_step is None else now + _SHOWN_SECONDS
        if self._end_step is not None:
            count = {"first": self._first_step, "step": self._step, "samples": self._meter.num_samples}
            self._file.append(SHOWN, id=self._id, note=self._note, **count, end_step=self._end_step())

    def _write_interval(self, now: float) -> None:
        report = self._meter.report(now, self._counters())
        trained = max(0.0, now - self._last - self._left_out)
        more: dict[str, Any] = {"memory": resident_bytes(), "epochs": self._epochs or None}
        if report.learning_rates != self._learning_rates:
            self._learning_rates = report.learning_rates
            more["learning_rates"] = report.learning_rates
        given = {name: value for name, value in more.items() if value is not None}
        self._file.append("interval", id=self._id, at=time.time(), trained=trained, **_values(report), **given)
        self._epochs = []
        elapsed, cost = now - self._started, self._clock() - now
        self._last, self._left_out, self._spent = now, 0.0, self._spent + cost
        length = min(max(_OF_ELAPSED * elapsed, _MIN_SECONDS), _MAX_SECONDS)
        affordable = (self._spent + cost - _FREE_SECONDS) / _COST_SHARE  # if the next one costs as much
        longest = max(_MAX_GROWTH * elapsed, _MIN_SUMMARIES * cost)
        self._due = now + max(length, min(self._started + affordable - now, longest))


def open_record(folder: str | os.PathLike[str] | None, rank: int) -> RecordFile | None:
    """Open the record of this trainer in `folder`.

    With None the record belongs to the run under `satrap run`; elsewhere there is none, and None is returned."""
    if folder is None:
        pipe = record_pipe()
        return None if pipe is None else RecordFile(os.dup(pipe), "the record of this trainer")
    path = local_path(folder, "Progress: record")
    try:
        return RecordFile.open(path / FOLDER / f"trainer-{rank}.jsonl")
    except OSError as error:
        raise ConfigError(
            f"Progress: record is {str(path)!r}, which cannot be written to ({error.strerror}); choose another folder"
        ) from error


def _commit_of(folder: Path) -> str | None:
    """Return the commit of the git repository that has this folder, with "-dirty" if tracked files have changed since;
    None if there is none, or git does not answer in time."""
    command = ["git", "-C", str(folder), "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
        )
        return done.stdout.strip()
    return None


def _values(report: Report) -> dict[str, Any]:
    """Return the numbers of a report. What was not given is left out; what is not finite will be null."""
    entry = {name: getattr(report, field) for name, field in _FIELDS.items()}
    entry["window"] = report.window or None
    return {name: value for name, value in entry.items() if value is not None and value != {}}
