"""Reads what a run recorded: the training loops of each trainer, and the events of the run.

    records/trainer-N.jsonl, records/run.jsonl ──read_run──> RunRecords ──> satrap.html_report.figures, .summary

Other modules of this package do no I/O. A line that is damaged, or lacks what its kind must have, is left out and
counted. A kind that this release does not know is ignored.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from satrap.errors import ConfigError
from satrap.monitor.record_file import FOLDER, read_records

_TRAINER = re.compile(r"trainer-(\d{1,9})")
_NUMBERS, _MAPS = ("loss", "auc", "ne", "window"), ("staleness", "stages", "rows", "bytes", "lost")
_EVENTS = ("run", "launch", "servers", "restart", "fault", "exit")


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
    """loss, auc, ne and window, as far as they were given; None: not finite."""
    maps: dict[str, dict[str, float]]
    """staleness, stages, rows, bytes and lost."""

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
        found = self.start.get("settings")
        return found if isinstance(found, dict) else {}


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


def read_run(folder: Path, is_live: bool | None = None) -> RunRecords:
    """Read the records of a run; ConfigError if the directory is not that of a run."""
    records = folder / FOLDER
    if not records.is_dir() and not (folder / "run.json").is_file():
        raise ConfigError(
            f"there is no record of a run in {str(folder)!r}; expected the --folder of satrap run, or the directory "
            "that a script gives to satrap.Progress(record=...)"
        )
    found = RunRecords(name=folder.resolve().name, is_live=is_live)
    for path in sorted(records.glob("*.jsonl"), key=lambda each: (len(each.name), each.name)):
        match = _TRAINER.fullmatch(path.stem)
        if match is None and path.stem != "run":
            continue
        try:
            content = read_records(path)
        except OSError as error:
            found.unreadable.append(f"{FOLDER}/{path.name} cannot be read ({error.strerror}).")
            continue
        damaged = content.damaged
        if match is None:
            found.events = [each for each in content.lines if each["kind"] in _EVENTS and _is_number(each.get("at"))]
            damaged += sum(each["kind"] in _EVENTS and not _is_number(each.get("at")) for each in content.lines)
        else:
            loops, refused = loops_of(int(match[1]), content.lines)
            found.loops += loops
            damaged += refused
        found.missing += content.missing
        if damaged:
            found.damaged[f"{FOLDER}/{path.name}"] = damaged
    return found


def loops_of(rank: int, lines: list[dict[str, Any]]) -> tuple[list[Loop], int]:
    """Return the loops of one trainer, and the number of records that lack something."""
    loops: dict[str, Loop] = {}
    refused = 0
    for line in lines:
        if line["kind"] not in ("start", "interval", "evaluation", "end"):
            continue
        if not isinstance(line.get("id"), str) or not _is_number(line.get("at")):
            refused += 1
            continue
        loop = loops.setdefault(line["id"], Loop(rank=rank))
        if line["kind"] == "start":
            loop.start = line
        elif line["kind"] == "end":
            loop.end = line
        elif line["kind"] == "interval" and (interval := _interval(line)) is not None:
            loop.intervals.append(interval)
        elif line["kind"] == "evaluation" and (evaluation := _evaluation(line)) is not None:
            loop.evaluations.append(evaluation)
        else:
            refused += 1
    processes: list[str] = []
    for loop in loops.values():
        process = str(loop.start.get("process"))
        if process not in processes:
            processes.append(process)
        launch = loop.start.get("launch")
        loop.launch = (launch if isinstance(launch, int) else 0, processes.index(process))
    return list(loops.values()), refused


def _interval(line: dict[str, Any]) -> Interval | None:
    counts = [line.get(name) for name in ("step", "steps", "samples")]
    measures = [line.get(name) for name in ("seconds", "trained", "rate")]
    if not all(isinstance(each, int) for each in counts) or not all(map(_is_number, measures)):
        return None
    numbers: dict[str, float | None] = {name: line[name] for name in _NUMBERS if name in line}
    maps: dict[str, dict[str, float]] = {name: line[name] for name in _MAPS if name in line}
    if not all(each is None or _is_number(each) for each in numbers.values()):
        return None
    if not all(isinstance(each, dict) and all(map(_is_number, each.values())) for each in maps.values()):
        return None
    if not all(key.isdecimal() and len(key) < 10 for key in maps.get("staleness", {})):
        return None
    kept = {name: line[name] for name in ("at", "seconds", "trained", "step", "steps", "samples", "rate")}
    return Interval(**kept, numbers=numbers, maps=maps)


def _evaluation(line: dict[str, Any]) -> Evaluation | None:
    metrics, step, is_best = line.get("metrics"), line.get("step"), line.get("is_best")
    if not isinstance(metrics, dict) or not isinstance(step, int) or not isinstance(is_best, bool | None):
        return None
    if not all(each is None or _is_number(each) for each in metrics.values()):
        return None
    return Evaluation(step=step, metrics=metrics, is_best=is_best)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
