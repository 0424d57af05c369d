"""Reads what a run recorded: the training loops of each trainer, and the events of the run.

    records/trainer-N.jsonl, records/run.jsonl ──read_run──> RunRecords ──> satrap.html_report.figures, .summary

Other modules of this package do no I/O. A line that is damaged, or lacks what its kind must have, is left out and
counted. A kind that this release does not know is ignored.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from satrap.errors import ConfigError
from satrap.monitor.record_file import FOLDER, Records, scan_records

_TRAINER = re.compile(r"trainer-(\d{1,9})")
_NUMBERS = ("loss", "auc", "ne", "window", "memory", "gradient_norm", "device_bytes")
_MAPS, _TABLES = ("staleness", "stages", "lost", "logged", "learning_rates"), ("rows", "bytes")
_EVENTS = ("run", "launch", "servers", "restart", "fault", "memory", "exit")


@dataclass(slots=True, kw_only=True)
class Interval:
    """The numbers of some steps."""

    at: float
    """Unix time of its end."""
    seconds: float
    """Time since the loop started."""
    trained: float
    """Seconds of the interval without evaluations."""
    step: int
    """The last step."""
    steps: int
    samples: int
    """Number of samples since the loop started."""
    rate: float
    """Samples per second."""
    numbers: dict[str, float | None]
    """The numbers of `_NUMBERS` that were given; None: not finite."""
    logged: dict[str, float] = field(default_factory=dict)
    """The script's own numbers."""
    learning_rates: dict[str, float] = field(default_factory=dict)
    """The rates at its end; they are recorded when they change."""
    epochs: list[int] = field(default_factory=list)
    """The first steps of epochs that began."""
    tables: dict[str, dict[str, float]] = field(default_factory=dict)
    """rows and bytes of each table at its end. They are read of one trainer only, since each sees whole tables."""

    @property
    def first_step(self) -> int:
        """The first step."""
        return self.step - self.steps + 1


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """The metrics of an evaluation."""

    step: int
    metrics: dict[str, float | None]
    is_best: bool | None


@dataclass(slots=True, kw_only=True)
class Loop:
    """What one `Progress` recorded."""

    rank: int
    start: dict[str, Any] = field(default_factory=dict)
    """The record of its start; empty if that is damaged."""
    intervals: list[Interval] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    end: dict[str, Any] | None = None
    """The record of its end, if there is one."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of batches that missed n steps."""
    stage_seconds: Counter[str] = field(default_factory=Counter)
    """Seconds of each stage."""
    stage_steps: Counter[str] = field(default_factory=Counter)
    """Number of steps that `stage_seconds` covers."""
    lost: dict[str, int] = field(default_factory=dict)
    """What was not trained on, by the last record: counters of the process, which never start again."""
    launch: tuple[int, int] = (0, 0)
    """Orders the launches of a trainer: the run's number, or how many processes recorded before."""

    @property
    def began_at(self) -> float | None:
        """Unix time of its start; None: not known."""
        if "at" in self.start:
            return float(self.start["at"])
        return self.intervals[0].at - self.intervals[0].seconds if self.intervals else None

    @property
    def launch_number(self) -> int:
        """The number of the launch, from 1."""
        return self.launch[0] or self.launch[1] + 1

    @property
    def settings(self) -> dict[str, Any]:
        """The settings at its start."""
        settings = self.start.get("settings")
        return settings if isinstance(settings, dict) else {}


@dataclass(slots=True, kw_only=True)
class RunRecords:
    """What a run recorded."""

    name: str
    loops: list[Loop] = field(default_factory=list)
    """By rank, then by time."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Records of `satrap run` itself; none if it did not start the script."""
    damaged: dict[str, int] = field(default_factory=dict)
    """Number of damaged lines, by file."""
    missing: int = 0
    """Number of records that could not be written."""
    unreadable: list[str] = field(default_factory=list)
    is_live: bool | None = None
    """Whether `satrap run` runs now; None: not known."""

    @property
    def intervals(self) -> list[Interval]:
        """All intervals, by rank, then by time."""
        return [interval for loop in self.loops for interval in loop.intervals]


def read_run(folder: Path, is_live: bool | None = None) -> RunRecords:
    """Read the records of a run; ConfigError if the folder is not that of a run."""
    records = folder / FOLDER
    if not records.is_dir() and not (folder / "run.json").is_file():
        raise ConfigError(
            f"there is no record of a run in {str(folder)!r}; expected the --folder of satrap run, or the folder "
            "that a script gives to satrap.Progress(record=...)"
        )
    run = RunRecords(name=folder.resolve().name, is_live=is_live)
    for path in sorted(records.glob("*.jsonl"), key=lambda path: (len(path.name), path.name)):
        match = _TRAINER.fullmatch(path.stem)
        if match is None and path.stem != "run":
            continue
        counts = Records()
        lines = scan_records(path, counts)
        try:
            if match is None:
                run.events, refused = _events(lines)
            else:
                has_tables = any(interval.tables for interval in run.intervals)
                loops, refused = loops_of(int(match[1]), lines, keeps_tables=not has_tables)
                run.loops += loops
        except OSError as error:
            run.unreadable.append(f"{FOLDER}/{path.name} cannot be read ({error.strerror}).")
            continue
        run.missing += counts.missing
        if counts.damaged + refused:
            run.damaged[f"{FOLDER}/{path.name}"] = counts.damaged + refused
    return run


def _events(lines: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the events of a run, and the number of records that lack something."""
    known = [line for line in lines if line["kind"] in _EVENTS]
    whole = [line for line in known if _is_number(line.get("at")) and _has_counts(line, "launch", "servers", "status")]
    whole = [line for line in whole if line["kind"] != "memory" or _is_map(line.get("bytes"))]
    return whole, len(known) - len(whole)


def loops_of(rank: int, lines: Iterable[dict[str, Any]], *, keeps_tables: bool = True) -> tuple[list[Loop], int]:
    """Return the loops of one trainer, and the number of records that lack something."""
    loops: dict[str, Loop] = {}
    refused = 0
    for line in lines:
        if line["kind"] not in ("start", "interval", "evaluation", "end"):
            continue
        is_whole = isinstance(line.get("id"), str) and _is_number(line.get("at"))
        if not is_whole or (line["kind"] in ("start", "end") and not _has_counts(line, "launch", "step")):
            refused += 1
            continue
        loop = loops.setdefault(line["id"], Loop(rank=rank))
        if line["kind"] == "start":
            loop.start = line
        elif line["kind"] == "end":
            loop.end = line
        elif line["kind"] == "interval" and (interval := _interval(line)) is not None:
            _add(loop, interval, line, keeps_tables)
        elif line["kind"] == "evaluation" and (evaluation := _evaluation(line)) is not None:
            loop.evaluations.append(evaluation)
        else:
            refused += 1
    processes: dict[str, int] = {}
    for loop in loops.values():
        process = processes.setdefault(str(loop.start.get("process")), len(processes))
        loop.launch = (loop.start.get("launch") or 0, process)
    return list(loops.values()), refused


def _add(loop: Loop, interval: Interval, line: dict[str, Any], keeps_tables: bool) -> None:
    before = loop.intervals[-1].learning_rates if loop.intervals else {}
    interval.learning_rates = line.get("learning_rates", before)
    loop.intervals.append(interval)
    if keeps_tables:
        interval.tables = {
            key: {sys.intern(name): value for name, value in line[key].items()} for key in _TABLES if line.get(key)
        }
    loop.staleness.update({int(steps): int(batches) for steps, batches in line.get("staleness", {}).items()})
    for stage, mean in line.get("stages", {}).items():
        loop.stage_steps[stage] += interval.steps
        loop.stage_seconds[stage] += mean * interval.steps
    loop.lost = line.get("lost", loop.lost)


def _interval(line: dict[str, Any]) -> Interval | None:
    numbers: dict[str, float | None] = {name: line[name] for name in _NUMBERS if name in line}
    maps, epochs = [line[name] for name in (*_MAPS, *_TABLES) if name in line], line.get("epochs", [])
    is_whole = (
        all(_is_count(line.get(name)) for name in ("step", "steps", "samples"))
        and all(_is_number(line.get(name)) for name in ("seconds", "trained", "rate"))
        and all(figure is None or _is_number(figure) for figure in numbers.values())
        and all(map(_is_map, maps))
        and (isinstance(epochs, list) and all(map(_is_count, epochs)))
        and all(key.isdecimal() and len(key) < 10 for key in line.get("staleness", {}))
    )
    kept = {name: line.get(name) for name in ("at", "seconds", "trained", "step", "steps", "samples", "rate")}
    if not is_whole:
        return None
    return Interval(**kept, numbers=numbers, logged=line.get("logged", {}), epochs=epochs)  # type: ignore[arg-type]


def _evaluation(line: dict[str, Any]) -> Evaluation | None:
    metrics, step, is_best = line.get("metrics"), line.get("step"), line.get("is_best")
    if not isinstance(metrics, dict) or not _is_count(step) or not isinstance(is_best, bool | None):
        return None
    if not all(figure is None or _is_number(figure) for figure in metrics.values()):
        return None
    return Evaluation(step=int(line["step"]), metrics=metrics, is_best=is_best)


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _has_counts(line: dict[str, Any], *names: str) -> bool:
    """Return whether what the record has under these names are integers, or null."""
    return all(line.get(name) is None or _is_count(line[name]) for name in names)
