"""Reports of a run: the counters of the embeddings, the numbers of an interval of steps, and their text.

These are pure functions and values: no clock, no file, no screen.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from satrap.errors import InputError

_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)
_SCALARS = (
    *("step", "samples", "seconds", "samples_per_second", "loss", "auc", "normalised_entropy"),
    *("staleness", "max_staleness"),
)
_GROUPS = ("validation", "rows", "bytes", "seconds", "lost")
_LINE = re.compile(rb"step [\d,]+( of [\d,]+)? \| \S+ samples in [\d:]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Totals that the embeddings count over their lifetime."""

    rows: Mapping[str, int] = field(default_factory=dict)
    """Current number of rows in each table."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Current memory of each table."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Number of batches that were looked up while n earlier steps of their own trainer were not yet applied. What a
    lookup misses of other trainers is not counted."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent in each stage."""
    inside: float | None = None
    """Seconds that the user's thread spent in the stream."""
    module_ids: Mapping[str, int] = field(default_factory=dict)
    """Number of ids that modules looked up for training: "on the spot" inside forward, or "ahead" of it by
    `prefetch`."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """What was read or looked up without being trained on: "batches/<cause>", "rows/<cause>", and "ids/<feature>"
    beyond the length of a sequence."""

    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Current learning rate of the dense parameters and of the tables."""
    gradient_norm: float | None = None
    """Norm of the gradients of the dense parameters in a recent step."""
    device_bytes: int | None = None
    """Memory of GPUs that this process uses."""

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            rows=other.rows,
            bytes=other.bytes,
            staleness=_sum_counts(self.staleness, other.staleness),
            stages=_sum_counts(self.stages, other.stages),
            inside=other.inside if self.inside is None else self.inside + (other.inside or 0.0),
            module_ids=_sum_counts(self.module_ids, other.module_ids),
            lost=_sum_counts(self.lost, other.lost),
        )


def _sum_counts(one: Mapping[_Key, _Number], other: Mapping[_Key, _Number]) -> dict[_Key, _Number]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The numbers of one interval of steps. None or empty: not given. NaN: given, but undefined or not finite.

    In the last report of a loop, throughput, staleness and stages are those of the whole loop.
    """

    step: int
    """The last step."""
    samples: int
    """Number of samples so far."""
    steps: int = 0
    """Number of steps in the interval."""
    end_step: int | None = None
    """The last step: of the stream, where its source knows its length, or as `total_samples` of `Progress` gives it."""
    seconds: float
    """Seconds since the start."""
    samples_per_second: float
    """Throughput in the interval, without evaluations."""
    steps_per_second: float = 0.0
    """Steps per second in the interval, without evaluations."""
    mean_steps_per_second: float | None = None
    """Steps per second since the first step, which give the time left; None: those in the interval do."""
    loss: float | None = None
    """Mean over the interval's steps, at most the last 512."""
    window: int = 0
    """Number of recent samples that `auc` and `normalised_entropy` cover."""
    auc: float | None = None
    normalised_entropy: float | None = None
    staleness: float | None = None
    """Mean over the batches looked up in the interval."""
    max_staleness: int | None = None
    """Maximum in the interval."""
    staleness_counts: Mapping[int, int] = field(default_factory=dict)
    """Number of batches of the interval that missed n earlier steps of their own trainer."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Number of rows in each table."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory of each table."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds per step of each stage, mean over the interval. "dense" is the time between calls of the stream."""
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """Learning rate of the dense parameters and of the tables."""
    gradient_norm: float | None = None
    """The norm of the dense gradients, in one step of the interval."""
    device_bytes: int | None = None
    """Memory of GPUs that the process uses."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """What was not trained on, so far; see `Counters`."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """Metrics of an evaluation at this step, if there was one."""
    is_best: bool | None = None
    """Whether that evaluation is the best so far."""
    best_by: str | None = None
    """The metric that decides which evaluation is the best."""
    logged: Mapping[str, float] = field(default_factory=dict)
    """The script's own numbers: the mean of each over the interval."""

    def scalars(self) -> dict[str, float]:
        """Return every given number by name, as TensorBoard and JSON lines store them."""
        numbers = {name: getattr(self, name) for name in _SCALARS} | dict(self.logged)
        numbers |= {f"validation/{name}": value for name, value in self.validation.items()}
        numbers["validation/is_best"] = None if self.is_best is None else int(self.is_best)
        numbers |= {f"rows/{table}": rows for table, rows in self.rows.items()}
        numbers |= {f"bytes/{table}": size for table, size in self.bytes.items()}
        numbers |= {f"seconds/{stage}": seconds for stage, seconds in self.stages.items()}
        numbers |= {f"lost/{what}": count for what, count in self.lost.items()}
        return {name: value for name, value in numbers.items() if value is not None}


def own_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the script's own numbers as floats; InputError unless all are finite and their names are free."""
    merged = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise InputError(f"Progress.log: a name is {name!r}; expected a text, such as 'learning rate'")
        if name in _SCALARS or name.partition("/")[0] in _GROUPS:
            raise InputError(
                f"Progress.log: the name {name!r} is taken by Progress itself; choose another, such as 'my {name}'"
            )
        number = math.nan
        if not isinstance(value, str | bytes | bool):
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):
                number = float(value)
        if not math.isfinite(number):
            raise InputError(f"Progress.log: {name!r} is {value!r}; expected a finite number, or a tensor of one")
        merged[name] = number
    return merged


def line(report: Report) -> str:
    """Format a report as one line, with the most relevant numbers first."""
    return " | ".join(_phrases(report))


def bar(report: Report, columns: int, marks: str = "#.", notes: Sequence[str] = ()) -> str:
    """Format a report in at most `columns` columns: a bar if the total is known, then as much of the line as fits.
    notes: in words, such as "save: 40 %"."""
    return fit([*_bar_of(report, columns, marks), *notes, *_phrases(report)], columns)


def run_bar(report: Report, columns: int, marks: str, notes: Sequence[str], *, is_over: bool = False) -> str:
    """Format the report of all trainers of a run in at most `columns` columns, the most relevant first: how much is
    done, the time left, the notes, samples, loss, AUC. notes: in words, such as "2 restarts". is_over: no time is
    left."""
    phrases, seconds = _bar_of(report, columns, marks), _seconds_left(report)
    if phrases and seconds is not None and report.samples_per_second > 0 and not is_over:
        phrases[0] += f" {_clock(seconds)} left"
    phrases += [*notes, f"{short(report.samples)} samples, {short(report.samples_per_second)}/s"]
    if report.loss is not None:
        phrases.append(f"loss {report.loss:.4f}")
    if report.auc is not None:
        phrases.append(f"AUC {report.auc:.4f}")
    if report.step:
        phrases.append(f"step {report.step:,}" + (f" of {report.end_step:,}" if report.end_step else ""))
    return fit([*phrases, f"{_clock(report.seconds)} since the start"], columns)


def is_progress(text: bytes) -> bool:
    """Return whether a line of output is one that `line` returned, and not the line of an evaluation."""
    return _LINE.match(text) is not None


def fit(phrases: Sequence[str], columns: int) -> str:
    """Return as many of the phrases as fit in so many columns, and at least a part of the first."""
    text = phrases[0]
    for phrase in phrases[1:]:
        if len(text) + 3 + len(phrase) > columns:
            break
        text += f" | {phrase}"
    return text[:columns]


def _bar_of(report: Report, columns: int, marks: str) -> list[str]:
    """Return a bar of how much of the run is done, if its end is known."""
    return [drawn_share(min(1.0, report.step / report.end_step), columns, marks)] if report.end_step else []


def drawn_share(share: float, columns: int, marks: str) -> str:
    """Return a bar and the percentage; in a narrow terminal the bar is shorter."""
    width = min(20, columns // 4)
    full = int(width * share)
    return f"{marks[0] * full}{marks[1] * (width - full)} {share:4.0%}"


def short(number: float) -> str:
    """Format a number with about three digits: 950, 81.2k, 4.9M, 2.13G, 1.5T."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.0f}"


def _seconds_left(report: Report) -> float | None:
    left = (report.end_step or 0) - report.step
    rate = report.steps_per_second if report.mean_steps_per_second is None else report.mean_steps_per_second
    return left / rate if rate > 0 and left > 0 else None


def _phrases(report: Report) -> list[str]:
    seconds = _seconds_left(report)
    left = "" if seconds is None else f", {_clock(seconds)} left"
    phrases = [f"step {report.step:,}" + (f" of {report.end_step:,}" if report.end_step else "")]
    if report.validation:
        metrics = " ".join(f"{name} {value:.4f}" for name, value in report.validation.items())
        by = "" if report.best_by is None else f" {report.best_by}"
        phrases.append(f"evaluation {metrics}{f' (best{by})' if report.is_best else ''}")
    phrases.append(f"{short(report.samples)} samples in {_clock(report.seconds)}{left}")
    if not report.validation:
        phrases.append(f"{short(report.samples_per_second)}/s")
    if report.loss is not None:
        phrases.append(f"{'training ' if report.validation else ''}loss {report.loss:.4f}")
    if report.auc is not None and report.normalised_entropy is not None:
        phrases.append(f"AUC {report.auc:.4f} NE {report.normalised_entropy:.4f} of the last {short(report.window)}")
    if report.validation:
        return phrases
    if report.staleness is not None:
        phrases.append(f"staleness {report.staleness:.1f}, at most {report.max_staleness}")
    if report.rows:
        phrases.append(f"{short(sum(report.rows.values()))} rows")
    for word in ("lost", "cut"):  # ids beyond a sequence's length are cut by the user's declaration
        counts = [
            f"{short(count)} {what}"
            for what, count in report.lost.items()
            if what.startswith("ids/") == (word == "cut")
        ]
        if counts:
            phrases.append(f"{word} {', '.join(counts)}")
    if report.stages:
        phrases.append("ms/step " + " ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in report.stages.items()))
    return phrases


def _clock(seconds: float) -> str:
    whole = int(seconds)
    minutes = f"{whole // 60 % 60:02}:{whole % 60:02}"
    return minutes if whole < 3600 else f"{whole // 3600}:{minutes}"
