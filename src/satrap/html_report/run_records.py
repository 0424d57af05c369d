"""What a run recorded, and its curves over the steps: of each number of the trainers, of the samples per second of all
trainers together, and of the memory of servers and workers. Pure: satrap.html_report.record_reader reads the files.

A launch that resumes a checkpoint trains some steps again: what an earlier launch recorded of them is superseded.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

Record = dict[str, Any]
"""A line that a trainer (satrap.monitor.training_record) or `satrap run` wrote. A value is null only where a number is
not finite."""
Point = tuple[float, float | None]
"""A step, and a value; None: it is not finite, or a curve is interrupted here."""
NUMBERS = ("loss", "auc", "ne", "window", "memory", "gradient_norm", "device_bytes")
"""What a record may have one number of."""
MAPS = ("logged", "learning_rates", "rows", "bytes", "metrics")
"""What a record may have several numbers of, by the name of a table, group of parameters or metric."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """What one `Progress` recorded."""

    rank: int
    launch: int = 1
    """Number of the launch: that of the run, or how many processes of this trainer recorded so far."""
    start: Record = field(default_factory=dict)
    """The record of its start; empty if that is damaged."""
    intervals: list[Record] = field(default_factory=list)
    """Records of intervals, with the `first_step` of each."""
    evaluations: list[Record] = field(default_factory=list)
    end: Record = field(default_factory=dict)
    """The record of its end; empty if there is none."""

    @property
    def began_at(self) -> float:
        """Unix time of its start; 0 if it is not known."""
        times = [line["at"] - line["seconds"] for line in self.intervals[:1]]
        return float(self.start.get("at", max([0.0, *times])))

    @property
    def settings(self) -> Record:
        """The settings at its start."""
        settings: Record = self.start.get("settings", {})
        return settings

    def columns(self) -> dict[tuple[str, str], list[Point]]:
        """Return the values by step of each number, by its key and its name; "" for one of `NUMBERS`."""
        columns: dict[tuple[str, str], list[Point]] = {}
        for line in (*self.intervals, *self.evaluations):
            values = {(key, ""): line[key] for key in NUMBERS if key in line}
            values |= {(key, name): value for key in MAPS for name, value in line.get(key, {}).items()}
            for column, value in values.items():
                columns.setdefault(column, []).append((float(line["step"]), value))
        return columns


@dataclass(slots=True, kw_only=True)
class Series:
    """One curve."""

    name: str
    points: list[Point] = field(default_factory=list)
    superseded: list[Point] = field(default_factory=list)
    """The part that a later launch trained again."""
    look: str = ""
    """Classes of its colour and dashes."""

    def mapped(self, change: Callable[[Sequence[Point]], list[Point]]) -> "Series":
        """Return the curve with both of its parts changed."""
        return replace(self, points=change(self.points), superseded=change(self.superseded))

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
    events: list[Record] = field(default_factory=list)
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
    def starts(self) -> tuple[Record, Record]:
        """The records of the `satrap run` whose trainers recorded last, and of the last one; empty if there is none."""
        runs: list[Record] = [event for event in self.events if event["kind"] == "run"]
        last = max((loop.began_at for loop in self.loops), default=math.inf)
        return next((event for event in reversed(runs) if event["at"] <= last), {}), runs[-1] if runs else {}

    @property
    def intervals(self) -> list[Record]:
        """All intervals, by rank, then by time."""
        return [interval for loop in self.loops for interval in loop.intervals]

    @property
    def best(self) -> Record | None:
        """The record of the best evaluation, if one was marked."""
        return next((line for loop in self.loops[::-1] for line in loop.evaluations[::-1] if line.get("is_best")), None)

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
        first, ranks = self.first_loops, self.by_rank
        curves = {"rate": [series_of("", first, [rates(self.loops, loop) for loop in first])]}
        for rank, loops in ranks.items():
            complete, columns = set(curves), [loop.columns() for loop in loops]
            for key, name in dict.fromkeys(column for of_loop in columns for column in of_loop):
                if not name or key not in complete:
                    label = name or (f"trainer {rank}" if len(ranks) > 1 else "")
                    points = [of_loop.get((key, name), []) for of_loop in columns]
                    curves.setdefault(key, []).append(series_of(label, loops, points))
        sizes = [(event["at"], event["bytes"]) for event in self.events if event["kind"] == "memory"]
        memory = curves.setdefault("memory", [])
        for curve in memory if sizes else ():
            curve.name = curve.name or f"trainer {first[0].rank}"
        for name in dict.fromkeys(name for _, measured in sizes for name in measured):
            values = [(at, measured[name]) for at, measured in sizes if name in measured]
            memory.append(series_of(name, first, [_by_step(loop, values) for loop in first]))
        return {key: [curve for curve in drawn if curve.points or curve.superseded] for key, drawn in curves.items()}


def cuts(loops: Sequence[Loop]) -> list[float]:
    """Return for each loop of a trainer the step from which later loops trained again; infinite if none did."""
    begins = [loop.intervals[0]["first_step"] if loop.intervals else math.inf for loop in loops]
    return list(accumulate(reversed(begins), min, initial=math.inf))[-2::-1]


def series_of(name: str, loops: Sequence[Loop], points: Sequence[Sequence[Point]]) -> Series:
    """Return a curve of the points of each loop that count, and those that were superseded. Both are interrupted
    between loops. The point of an interval that was superseded in part also ends the part that counts."""
    series = Series(name=name)
    for loop, of_loop, cut in zip(loops, points, cuts(loops), strict=True):
        counted, again = [p for p in of_loop if p[0] < cut], [p for p in of_loop if p[0] >= cut]
        divided = {float(line["step"]) for line in loop.intervals if line["first_step"] < cut <= line["step"]}
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
        if other.launch == loop.launch:
            held = [(line["step"], line["rate"]) for line in other.intervals if line["steps"]]
            ranks.setdefault(other.rank, []).extend(held)
    spans = [sorted(held) for held in ranks.values() if held]
    steps = [line["step"] for line in loop.intervals if line["steps"]]
    return [
        (float(step), sum(held[min(bisect_left(held, (step,)), len(held) - 1)][1] for held in spans)) for step in steps
    ]


def _by_step(loop: Loop, values: Sequence[tuple[float, float]]) -> list[Point]:
    """Return values with the Unix times of their measurement by the step of a loop, as far as they fall into it: each
    counts for the interval in which it was measured."""
    times = [line["at"] for line in loop.intervals]
    places = [(bisect_left(times, at), value) for at, value in values if at >= loop.began_at]
    return [(float(loop.intervals[place]["step"]), value) for place, value in places if place < len(times)]
