"""What a run recorded, and its curves over the steps: of each number of the trainers, of the samples per second of all
trainers together, and of the memory of servers and workers. Pure: satrap.html_report.record_reader reads the files.

A launch that resumes a checkpoint trains some steps again: what an earlier launch recorded of them is superseded.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

Point = tuple[float, float | None]
"""A step, and a value; None: it is not finite, or a curve is interrupted here."""


class Interval(NamedTuple):
    """The measures of some steps."""

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

    @property
    def first_step(self) -> int:
        """The first step."""
        return self.step - self.steps + 1


@dataclass(slots=True, kw_only=True)
class Loop:
    """What one `Progress` recorded."""

    rank: int
    start: dict[str, Any] = field(default_factory=dict)
    """The record of its start; empty if that is damaged."""
    intervals: list[Interval] = field(default_factory=list)
    columns: dict[tuple[str, str], list[Point]] = field(default_factory=dict)
    """The values by step of each number, by its key, such as "loss", "rows" or "metrics", and the name of the table or
    metric; "" for a number without such a name. Rows and bytes are read of one trainer only."""
    epochs: list[int] = field(default_factory=list)
    """The first steps of epochs that began."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
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
class Series:
    """One curve."""

    name: str
    points: list[Point] = field(default_factory=list)
    superseded: list[Point] = field(default_factory=list)
    """The part that a later launch trained again."""
    look: str = ""
    """Classes of its colour and dashes; empty: those of its place in the chart."""

    @property
    def last(self) -> float:
        """The last value; 0 if there is none."""
        return next((y for _, y in reversed(self.points) if y is not None), 0.0)


@dataclass(kw_only=True)
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
    num_earlier: int = 0
    """Number of runs in the same folder that ended before this one began at the first step; they are left out."""

    @property
    def intervals(self) -> list[Interval]:
        """All intervals, by rank, then by time."""
        return [interval for loop in self.loops for interval in loop.intervals]

    @property
    def by_rank(self) -> dict[int, list[Loop]]:
        """The loops that have steps or evaluations, by trainer and in the order of time."""
        ranks: dict[int, list[Loop]] = {}
        for loop in self.loops:
            if loop.intervals or loop.evaluations:
                ranks.setdefault(loop.rank, []).append(loop)
        return ranks

    @property
    def first_loops(self) -> list[Loop]:
        """The loops of the first trainer."""
        return next(iter(self.by_rank.values()), [])

    @cached_property
    def curves(self) -> dict[str, list[Series]]:
        """The curves of each number by its key. A number like "loss" has a curve for each trainer; one like "rows" has
        one for each name that the first trainer with any recorded, since each trainer sees whole tables. The key "rate"
        has the samples per second."""
        curves: dict[str, list[Series]] = {}
        ranks = self.by_rank
        for rank, loops in ranks.items():
            complete = set(curves)
            for key, name in dict.fromkeys(column for loop in loops for column in loop.columns):
                if not name or key not in complete:
                    label = name or (f"trainer {rank}" if len(ranks) > 1 else "")
                    points = [loop.columns.get((key, name), []) for loop in loops]
                    curves.setdefault(key, []).append(series_of(label, loops, points))
        first = self.first_loops
        curves["rate"] = [series_of("", first, [rates(self.loops, loop) for loop in first])]
        sizes = [(event["at"], event["bytes"]) for event in self.events if event["kind"] == "memory"]
        memory = curves.setdefault("memory", [])
        for curve in memory if sizes else ():
            curve.name = curve.name or f"trainer {first[0].rank}"
        for name in dict.fromkeys(name for _, measured in sizes for name in measured):
            values = [(at, measured[name]) for at, measured in sizes if name in measured]
            memory.append(series_of(name, first, [_by_step(loop, values) for loop in first]))
        return {key: [one for one in found if one.points or one.superseded] for key, found in curves.items()}


def cuts(loops: Sequence[Loop]) -> list[float]:
    """Return for each loop of a trainer the step from which later loops trained again; infinite if none did."""
    steps, cut = [], float("inf")
    for loop in reversed(loops):
        steps.append(cut)
        if loop.intervals:
            cut = min(cut, loop.intervals[0].first_step)
    return steps[::-1]


def series_of(name: str, loops: Sequence[Loop], points: Sequence[Sequence[Point]]) -> Series:
    """Return a curve of the points of each loop that count, and those that were superseded. Both are interrupted
    between loops. The point of an interval that was superseded in part also ends the part that counts."""
    series = Series(name=name)
    for loop, of_loop, cut in zip(loops, points, cuts(loops), strict=True):
        counted, again = [p for p in of_loop if p[0] < cut], [p for p in of_loop if p[0] >= cut]
        divided = {float(interval.step) for interval in loop.intervals if interval.first_step < cut <= interval.step}
        counted += [(cut - 1, y) for x, y in again[:1] if x in divided]
        for target, part in ((series.points, counted), (series.superseded, again)):
            if part and target:
                target.append((part[0][0], None))
            target += part
    return series


def rates(loops: Sequence[Loop], loop: Loop) -> list[Point]:
    """Return the samples per second of all trainers together at the steps of a loop, of all `loops` of its launch.

    The intervals of other trainers end at other steps: each counts with the one that holds this step, or its last."""
    ranks: dict[int, list[tuple[int, float]]] = {}
    for other in loops:
        if other.launch_number == loop.launch_number:
            held = [(interval.step, interval.rate) for interval in other.intervals if interval.steps]
            ranks.setdefault(other.rank, []).extend(held)
    spans = [sorted(held) for held in ranks.values() if held]
    steps = [interval.step for interval in loop.intervals if interval.steps]
    return [
        (float(step), sum(held[min(bisect_left(held, (step,)), len(held) - 1)][1] for held in spans)) for step in steps
    ]


def _by_step(loop: Loop, values: Sequence[tuple[float, float]]) -> list[Point]:
    """Return values with the Unix times of their measurement by the step of a loop, as far as they fall into it: each
    counts for the interval in which it was measured."""
    times = [interval.at for interval in loop.intervals]
    places = [(bisect_left(times, at), value) for at, value in values if at >= (loop.began_at or 0.0)]
    return [(float(loop.intervals[place].step), value) for place, value in places if place < len(times)]
