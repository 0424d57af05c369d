"""The charts of a run, from its records. Pure.

A launch that resumes a checkpoint trains some steps again: what an earlier launch recorded of them is superseded, and
is drawn paler.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from satrap.html_report.axis import number
from satrap.html_report.chart import MAX_SERIES, BarChart, LineChart, Series
from satrap.html_report.run_records import Interval, Loop, RunRecords
from satrap.html_report.thinning import Point, bins

_MAX_BINS = 24
_Span = tuple[float, float, float]  # begin, end, samples per second
_UNITS = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))
_TIMES = ((3 * 86_400.0, 86_400.0, "days"), (3 * 3600.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "s"))


@dataclass(frozen=True, slots=True)
class Part:
    """A chart, and the sentence that stands for it if nothing was recorded for it."""

    chart: LineChart | BarChart
    absent: str


def parts_of(run: RunRecords) -> list[Part]:
    """Return all parts of the page that are charts, in order."""
    return [
        Part(
            _curves(run, "loss", "Loss", "loss, mean of an interval"), "No loss was given to Progress.step(loss=...)."
        ),
        Part(_auc(run), "No scores were given to Progress.step(scores=...), so there is no AUC."),
        Part(_throughput(run), "No steps were recorded."),
        *_validation(run),
        Part(_staleness(run), "No staleness was recorded: Progress was created without embeddings."),
        Part(_stages(run), "No times of stages were recorded: Progress was created without embeddings."),
        Part(_tables(run, "rows"), "No rows were recorded: Progress was created without embeddings."),
        Part(_tables(run, "bytes"), "No memory of tables was recorded: Progress was created without embeddings."),
    ]


def by_rank(run: RunRecords) -> dict[int, list[Loop]]:
    """Return the loops that have steps or evaluations, by trainer and in the order of time."""
    found: dict[int, list[Loop]] = {}
    for loop in run.loops:
        if loop.intervals or loop.evaluations:
            found.setdefault(loop.rank, []).append(loop)
    return {rank: found[rank] for rank in sorted(found)}


def cuts(loops: Sequence[Loop]) -> list[float]:
    """Return for each loop of a trainer the step from which later loops trained again; infinite if none did."""
    found, cut = [], float("inf")
    for loop in reversed(loops):
        found.append(cut)
        if loop.intervals:
            cut = min(cut, loop.intervals[0].first_step)
    return found[::-1]


def split(loops: Sequence[Loop], points_of: Callable[[Loop], Iterable[Point]]) -> tuple[list[Point], list[Point]]:
    """Return the points over steps that count, and those that were superseded. Both are interrupted between loops."""
    kept: list[Point] = []
    superseded: list[Point] = []
    for loop, cut in zip(loops, cuts(loops), strict=True):
        points = list(points_of(loop))
        for target, part in (
            (kept, [p for p in points if p[0] < cut]),
            (superseded, [p for p in points if p[0] >= cut]),
        ):
            if part and target:
                target.append((part[0][0], None))
            target += part
    return kept, superseded


def _shown(ranks: dict[int, list[Loop]]) -> tuple[dict[int, list[Loop]], str]:
    """Return the trainers whose curves are drawn, and what to say about the others."""
    if len(ranks) <= MAX_SERIES:
        return ranks, ""
    return (
        {rank: ranks[rank] for rank in list(ranks)[:MAX_SERIES]},
        f"{len(ranks)} trainers recorded; these are the first {MAX_SERIES}.",
    )


def _launch_steps(run: RunRecords) -> list[float]:
    """Return the first step of each launch but the first."""
    loops = next(iter(by_rank(run).values()), [])
    pairs = pairwise(loops)
    return [float(two.intervals[0].first_step) for one, two in pairs if two.intervals and one.launch != two.launch]


def _curves(run: RunRecords, key: str, title: str, y: str) -> LineChart:
    ranks, note = _shown(by_rank(run))

    def points_of(loop: Loop) -> list[Point]:
        return [(float(each.step), each.numbers[key]) for each in loop.intervals if key in each.numbers]

    series = []
    for rank, loops in ranks.items():
        kept, superseded = split(loops, points_of)
        if kept or superseded:
            series.append(Series(name=f"trainer {rank}", points=kept, superseded=superseded))
    return LineChart(title=title, x="step", y=y, series=series, marks=_launch_steps(run), note=note)


def _auc(run: RunRecords) -> LineChart:
    windows = [int(window) for loop in run.loops for each in loop.intervals if (window := each.numbers.get("window"))]
    chart = _curves(run, "auc", "AUC in training", f"AUC of the last {max(windows, default=0):,} samples")
    chart.note = " ".join(
        ["The samples are those of training, with the scores that Progress.step was given.", chart.note]
    ).strip()
    return chart


# -- time --------------------------------------------------------------------------------------------------------------


def rates(loops: Iterable[Loop]) -> list[Point]:
    """Return the samples per second of all trainers together, at Unix times; interrupted between launches.

    The times are the ends of one trainer's intervals in each launch. The intervals of the others end at other times, so
    each counts with the interval that holds this time, or the one that ended shortly before.
    """
    launches: dict[int, dict[int, list[_Span]]] = {}
    for loop in loops:
        launches.setdefault(loop.launch_number, {}).setdefault(loop.rank, []).extend(_spans(loop.intervals))
    found: list[Point] = []
    for launch in sorted(launches):
        ranks = [sorted(spans) for spans in launches[launch].values() if spans]
        if not ranks:
            continue
        ends = [[end for _, end, _ in spans] for spans in ranks]
        leader = max(range(len(ranks)), key=lambda rank: len(ranks[rank]))
        if found:
            found.append((ranks[leader][0][0], None))
        for time in ends[leader]:
            found.append((time, sum(_rate_at(time, *each) for each in zip(ranks, ends, strict=True))))
    return found


def _rate_at(time: float, spans: Sequence[_Span], ends: Sequence[float]) -> float:
    index = bisect_left(ends, time)
    if index < len(spans) and spans[index][0] < time:
        return spans[index][2]
    if index and time - ends[index - 1] <= (ends[index - 1] - spans[index - 1][0]) / 2:
        return spans[index - 1][2]
    return 0.0


def _spans(intervals: Sequence[Interval]) -> list[_Span]:
    """Return (begin, end, samples per second) of each interval; neighbours touch."""
    found: list[_Span] = []
    for each in intervals:
        begin = each.at - each.trained
        last = found[-1][1] if found else begin
        if abs(begin - last) <= 0.05 + 0.01 * each.trained:
            begin = last
        if begin < each.at:
            found.append((begin, each.at, each.rate))
    return found


def _throughput(run: RunRecords) -> LineChart:
    loops = [loop for loops in by_rank(run).values() for loop in loops]
    points = rates(loops)
    begins = [at for loop in loops if (at := loop.began_at) is not None]
    start = min(begins, default=0.0)
    scale, unit = time_unit(max((0.0, *(x - start for x, _ in points))))
    marks = [
        min((loop.began_at or start) for loop in loops if loop.launch_number == launch)
        for launch in sorted({loop.launch_number for loop in loops})
    ]
    return LineChart(
        title="Samples per second",
        x=f"time since the first record ({unit})",
        y="samples/s" if len(by_rank(run)) < 2 else f"samples/s, sum of {len(by_rank(run))} trainers",
        series=[Series(name="samples/s", points=[((x - start) / scale, y) for x, y in points])] if points else [],
        from_zero=True,
        marks=[(mark - start) / scale for mark in marks[1:]],
    )


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which an axis shows a duration: its seconds and its name."""
    return next((scale, unit) for least, scale, unit in _TIMES if seconds >= least)


# -- validation --------------------------------------------------------------------------------------------------------


def _validation(run: RunRecords) -> list[Part]:
    ranks = by_rank(run)
    loops = next((loops for loops in ranks.values() if any(each.evaluations for each in loops)), [])
    names = list(dict.fromkeys(name for loop in loops for each in loop.evaluations for name in each.metrics))
    best = [each for loop in loops for each in loop.evaluations if each.is_best]
    parts = []
    for name in names[:MAX_SERIES]:

        def points_of(loop: Loop, name: str = name) -> list[Point]:
            return [(float(each.step), each.metrics[name]) for each in loop.evaluations if name in each.metrics]

        kept, superseded = split(loops, points_of)
        note = (
            f"The best evaluation is that of step {best[-1].step:,}: {number(best[-1].metrics.get(name))}."
            if best
            else ""
        )
        chart = LineChart(
            title=f"Validation: {name}",
            x="step",
            y=name,
            series=[Series(name=name, points=kept, superseded=superseded)],
            marks=_launch_steps(run),
            note=note,
        )
        parts.append(Part(chart, f"No finite {name} was recorded."))
    if len(names) > MAX_SERIES:
        parts[-1].chart.note += f" {len(names)} metrics were recorded; these are the first {MAX_SERIES}."
    empty = LineChart(title="Validation", x="step", y="metric", series=[])
    sentence = "No evaluation was recorded: satrap.Validation reports one, or Progress.report_evaluation."
    return parts or [Part(empty, sentence)]


# -- staleness and stages ----------------------------------------------------------------------------------------------


def _staleness(run: RunRecords) -> BarChart:
    counts = sum((loop.staleness for loop in run.loops), Counter[int]())
    found = bins(counts, _MAX_BINS)
    total = sum(counts.values()) or 1
    bounds = {bound for loop in run.loops if isinstance(bound := loop.settings.get("staleness"), int)}
    mean = sum(steps * batches for steps, batches in counts.items()) / total
    note = f"Mean {number(mean)}, largest {max(counts, default=0)}."
    if len(bounds) == 1:
        note += f" At most {bounds.pop()} was permitted."
    return BarChart(
        title="Staleness",
        category="earlier steps of the same trainer whose updates a lookup missed",
        value="batches",
        bars=[(str(low) if low == high else f"{low} to {high}", float(count)) for low, high, count in found],
        columns=("share",),
        more=[(f"{count / total:.1%}",) for _, _, count in found],
        is_vertical=True,
        note=note,
    )


def _stages(run: RunRecords) -> BarChart:
    intervals = [each for loop in run.loops for each in loop.intervals]
    steps, seconds = Counter[str](), Counter[str]()
    for loop in run.loops:
        steps.update(loop.stage_steps)
        seconds.update(loop.stage_seconds)
    whole = 1e3 * sum(each.trained for each in intervals) / (sum(each.steps for each in intervals) or 1)
    bars = [(stage, 1e3 * seconds[stage] / (steps[stage] or 1)) for stage in seconds]
    return BarChart(
        title="Time of each stage",
        category="stage",
        value="milliseconds per step, mean",
        bars=bars,
        columns=("seconds in all",),
        more=[(number(seconds[stage]),) for stage in seconds],
        note=f"A step took {number(whole)} ms. Stages may overlap, so they need not add up to it; dense is the loop's "
        "time outside the stream.",
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def last_maps(run: RunRecords, key: str) -> dict[str, float]:
    """Return the last recorded rows or bytes of each table."""
    loops = _loops_with(run, key)
    return next(
        (each.tables[key] for loop in reversed(loops) for each in reversed(loop.intervals) if key in each.tables), {}
    )


def _loops_with(run: RunRecords, key: str) -> list[Loop]:
    """Return the loops of the first trainer that recorded this. Each trainer sees whole tables."""
    return next(
        (
            loops
            for loops in by_rank(run).values()
            if any(key in each.tables for loop in loops for each in loop.intervals)
        ),
        [],
    )


def _tables(run: RunRecords, key: str) -> LineChart:
    loops, last = _loops_with(run, key), last_maps(run, key)
    names = sorted(last, key=lambda name: (-last[name], name))
    chosen = names if len(names) <= MAX_SERIES else names[: MAX_SERIES - 1]
    largest = max((sum(each.tables.get(key, {}).values()) for loop in loops for each in loop.intervals), default=0.0)
    scale, unit = (
        (1.0, "rows") if key == "rows" else next(each for each in _UNITS if largest >= each[0] or each[0] == 1)
    )

    def series_of(name: str, value: Callable[[dict[str, float]], float]) -> Series:
        kept, superseded = split(
            loops,
            lambda loop: [
                (float(each.step), value(each.tables[key]) / scale) for each in loop.intervals if key in each.tables
            ],
        )
        return Series(name=name, points=kept, superseded=superseded)

    series = [series_of(name, lambda values, name=name: values.get(name, 0.0)) for name in chosen]  # type: ignore[misc]
    if len(names) > len(chosen):
        others = f"{len(names) - len(chosen)} other tables"
        series.append(
            series_of(others, lambda values: sum(count for name, count in values.items() if name not in chosen))
        )
    return LineChart(
        title="Rows of each table" if key == "rows" else "Memory of each table",
        x="step",
        y=unit,
        series=series,
        from_zero=True,
        marks=_launch_steps(run),
        note="The last value of every table is listed under Tables." if len(names) > len(chosen) else "",
    )
