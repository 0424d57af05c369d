"""The charts of a run, from its records. Pure.

A launch that resumes a checkpoint trains some steps again: what an earlier launch recorded of them is superseded, and
is drawn paler.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from satrap.html_report.chart import MAX_SERIES, BarChart, Chart, LineChart, Point, Series, number
from satrap.html_report.run_records import Loop, RunRecords

_MAX_STALENESS, _MAX_LOGGED = 24, 24
_WITHOUT = "No {} recorded: Progress was created without embeddings."


def charts_of(runs: Sequence[RunRecords]) -> list[Chart]:
    """Return all charts of a run, in order; of two runs those with one title together, in a colour for each run."""
    charts: list[list[Chart]] = [[*_charts(run), *_logged(run)] for run in runs]
    if len(runs) == 1:
        return charts[0]
    titles: dict[tuple[bool, str], list[tuple[int, Chart]]] = {}
    for place, chart in ((place, chart) for place, each in enumerate(charts) for chart in each):
        titles.setdefault((chart.is_small, chart.title), []).append((place, chart))
    return [_together([run.name for run in runs], same) for same in titles.values()]


def _together(names: Sequence[str], same: Sequence[tuple[int, Chart]]) -> Chart:
    """Join the charts of several runs with one title into one chart.

    names: the runs. same: pairs of a run's index in `names` and its chart."""
    chart = same[0][1]
    notes = [f"{names[place]}: {other.note}" for place, other in same if other.note]
    note = chart.note if len({other.note for _, other in same}) == 1 else " ".join(notes)
    if isinstance(chart, BarChart):
        groups = {names[place]: other.groups[""] for place, other in same if isinstance(other, BarChart)}
        return replace(chart, groups=groups, note=note)
    assert isinstance(chart, LineChart)
    series = [
        replace(one, name=f"{names[place]}, {one.name}".removesuffix(", "), look=f"c{place} d{index}")
        for place, other in same
        if isinstance(other, LineChart)
        for index, one in enumerate(other.series[: MAX_SERIES // 2])
    ]
    return replace(chart, series=series, marks={}, note=note)


def _charts(run: RunRecords) -> list[Chart]:
    windows = [int(window) for interval in run.intervals if (window := interval.numbers.get("window"))]
    loss, auc = _curves(run, "loss", "Loss"), _curves(run, "auc", "AUC in training")
    loss.y, auc.y = "loss, mean of an interval", f"AUC of the last {max(windows, default=0):,} samples"
    loss.absent = "No loss was given to Progress.step(loss=...)."
    auc.absent = "No scores were given to Progress.step(scores=...), so there is no AUC."
    auc.note = f"The samples are those of training, with the scores that Progress.step was given. {auc.note}"
    norm, device = _curves(run, "gradient_norm", "Gradient norm"), _curves(run, "device_bytes", "Memory of GPUs")
    norm.y, norm.absent = "norm of the dense gradients", _WITHOUT.format("gradient norm was")
    device.is_averaged, device.from_zero, device.y = False, True, "bytes that torch holds"
    return [
        loss,
        auc,
        _throughput(run),
        *_validation(run),
        _staleness(run),
        _stages(run),
        _tables(run, "rows", "Rows of each table", "rows were"),
        _tables(run, "bytes", "Memory of each table", "memory of tables was"),
        _memory(run),
        *([device] if device.series else []),
        _learning_rates(run),
        norm,
    ]


def _memory(run: RunRecords) -> LineChart:
    """Return the memory of each process. That of servers and workers was measured at other times than steps: each
    value counts for the interval of the first trainer in which it was measured."""
    chart, loops = _curves(run, "memory", "Memory of each process"), next(iter(by_rank(run).values()), [])
    chart.is_averaged, chart.from_zero, chart.y, chart.note = False, True, "bytes", ""
    chart.absent = "No memory of a process was recorded."
    measured: dict[str, list[tuple[float, float]]] = {}
    for event in (event for event in run.events if event["kind"] == "memory"):
        for name, size in event["bytes"].items():
            measured.setdefault(name, []).append((event["at"], size))
    for curve in chart.series if measured else ():
        curve.name = curve.name or f"trainer {loops[0].rank}"
    for name, sizes in measured.items():
        chart.series.append(series_of(name, loops, lambda loop, sizes=sizes: _by_step(loop, sizes)))  # type: ignore[misc]
    chart.series = [curve for curve in chart.series if curve.points or curve.superseded]
    if (count := len(by_rank(run)) + len(measured)) > MAX_SERIES:
        chart.series.sort(key=lambda curve: -max((y for _, y in curve.points if y is not None), default=0.0))
        chart.note = f"{count} processes recorded; these are {MAX_SERIES}, the largest first."
        chart.series = chart.series[:MAX_SERIES]
    return chart


def _by_step(loop: Loop, values: Sequence[tuple[float, float]]) -> list[Point]:
    """Return values with the Unix times of their measurement by the step of a loop, as far as they fall into it."""
    times = [interval.at for interval in loop.intervals]
    places = [(bisect_left(times, at), value) for at, value in values if at >= (loop.began_at or 0.0)]
    return [(float(loop.intervals[place].step), value) for place, value in places if place < len(times)]


def _learning_rates(run: RunRecords) -> LineChart:
    loops = next(iter(by_rank(run).values()), [])
    names = list(
        dict.fromkeys(name for loop in loops for interval in loop.intervals for name in interval.learning_rates)
    )
    series = [series_of(name, loops, _held("intervals", "learning_rates", name)) for name in names[:MAX_SERIES]]
    absent = "No learning rate was recorded: it is that of the optimizer of Progress(embeddings)."
    chart = LineChart(title="Learning rate", y="learning rate", series=series, from_zero=True, absent=absent)
    chart.marks = _marks(loops)
    if len(names) > MAX_SERIES:
        chart.note = f"{len(names)} groups of parameters have a learning rate; these are the first {MAX_SERIES}."
    return chart


def _logged(run: RunRecords) -> list[LineChart]:
    """Return a chart of each number that the script of trainer 0 logged."""
    loops = next(iter(by_rank(run).values()), [])
    names = list(dict.fromkeys(name for loop in loops for interval in loop.intervals for name in interval.logged))
    charts: list[LineChart] = []
    for name in names[:_MAX_LOGGED]:
        series = [series_of("", loops, _held("intervals", "logged", name))]
        charts.append(LineChart(title=name, y="", series=series, is_averaged=True, is_small=True))
        charts[-1].marks = _marks(loops)
    if len(names) > _MAX_LOGGED:
        charts[-1].note = f"{len(names)} numbers were logged; these are the first {_MAX_LOGGED}."
    return charts


def by_rank(run: RunRecords) -> dict[int, list[Loop]]:
    """Return the loops that have steps or evaluations, by trainer and in the order of time."""
    loops: dict[int, list[Loop]] = {}
    for loop in run.loops:
        if loop.intervals or loop.evaluations:
            loops.setdefault(loop.rank, []).append(loop)
    return dict(sorted(loops.items()))


def cuts(loops: Sequence[Loop]) -> list[float]:
    """Return for each loop of a trainer the step from which later loops trained again; infinite if none did."""
    steps, cut = [], float("inf")
    for loop in reversed(loops):
        steps.append(cut)
        if loop.intervals:
            cut = min(cut, loop.intervals[0].first_step)
    return steps[::-1]


def series_of(name: str, loops: Sequence[Loop], points_of: Callable[[Loop], Iterable[Point]]) -> Series:
    """Return the points over steps that count, and those that were superseded. Both are interrupted between loops."""
    series = Series(name=name, points=[])
    for loop, cut in zip(loops, cuts(loops), strict=True):
        points = list(points_of(loop))
        counted, again = [p for p in points if p[0] < cut], [p for p in points if p[0] >= cut]
        for target, part in ((series.points, counted), (series.superseded, again)):
            if part and target:
                target.append((part[0][0], None))
            target += part
    return series


def _held(items: str, numbers: str, key: str) -> Callable[[Loop], list[tuple[float, Any]]]:
    """Return what finds a number, with its step, in those items of a loop that have it."""
    return lambda loop: [
        (float(item.step), found[key]) for item in getattr(loop, items) if key in (found := getattr(item, numbers))
    ]


def _marks(loops: Sequence[Loop]) -> dict[str, list[float]]:
    """Return the first step of each launch but the first, and of each epoch that began in the loops of a trainer."""
    pairs = [(one, two) for one, two in pairwise(loops) if two.intervals and one.launch != two.launch]
    epochs = sorted({float(step) for loop in loops for interval in loop.intervals for step in interval.epochs})
    return {"launch": [float(two.intervals[0].first_step) for _, two in pairs], "epoch": epochs}


def _curves(run: RunRecords, key: str, title: str) -> LineChart:
    """Return the curves of a number for each trainer."""
    ranks = by_rank(run)
    chart = LineChart(title=title, y=key, series=[], is_averaged=True)
    chart.marks = _marks(next(iter(ranks.values()), []))
    if len(ranks) > MAX_SERIES:
        chart.note = f"{len(ranks)} trainers recorded; these are the first {MAX_SERIES}."
    points_of, chosen = _held("intervals", "numbers", key), list(ranks.items())[:MAX_SERIES]
    every = [series_of(f"trainer {rank}" if len(ranks) > 1 else "", loops, points_of) for rank, loops in chosen]
    chart.series = [curve for curve in every if curve.points or curve.superseded]
    return chart


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
    places = [(step, [min(bisect_left(held, (step,)), len(held) - 1) for held in spans]) for step in steps]
    return [(float(step), sum(held[at][1] for held, at in zip(spans, found, strict=True))) for step, found in places]


def _throughput(run: RunRecords) -> LineChart:
    ranks = by_rank(run)
    loops = next(iter(ranks.values()), [])
    series = series_of("", loops, lambda loop: rates(run.loops, loop))
    chart = LineChart(title="Samples per second", y="samples/s", series=[series], from_zero=True)
    if len(ranks) > 1:
        chart.y += f", sum of {len(ranks)} trainers"
    chart.is_averaged, chart.marks, chart.absent = True, _marks(loops), "No steps were recorded."
    return chart


def _validation(run: RunRecords) -> list[LineChart]:
    loops = next((loops for loops in by_rank(run).values() if any(loop.evaluations for loop in loops)), [])
    evaluations = [evaluation for loop in loops for evaluation in loop.evaluations]
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))
    best = [evaluation for evaluation in evaluations if evaluation.is_best][-1:]
    charts = []
    for name in names[:MAX_SERIES]:
        series = [series_of("", loops, _held("evaluations", "metrics", name))]
        chart = LineChart(title=f"Validation: {name}", y=name, series=series)
        chart.marks, chart.absent = _marks(loops), f"No finite {name} was recorded."
        for evaluation in best:
            chart.note = (
                f"The best evaluation is that of step {evaluation.step:,}: {number(evaluation.metrics.get(name))}."
            )
        charts.append(chart)
    if len(names) > MAX_SERIES:
        charts[-1].note += f" {len(names)} metrics were recorded; these are the first {MAX_SERIES}."
    sentence = "No evaluation was recorded: satrap.Validation reports one, or Progress.report_evaluation."
    return charts or [LineChart(title="Validation", y="metric", series=[], absent=sentence)]


def _staleness(run: RunRecords) -> BarChart:
    counts = sum((loop.staleness for loop in run.loops), Counter[int]())
    total = sum(counts.values()) or 1
    bounds = {bound for loop in run.loops if isinstance(bound := loop.settings.get("staleness"), int)}
    mean = sum(steps * batches for steps, batches in counts.items()) / total
    note = f"The steps are those of the same trainer. Mean {number(mean)}, largest {max(counts, default=0)}."
    if len(bounds) == 1:
        note += f" At most {bounds.pop()} was permitted."
    return BarChart(
        title="Staleness",
        category="earlier steps that a lookup missed",
        value="batches",
        extra="share",
        groups={
            "": [(name, float(count), f"{count / total:.1%}") for name, count in bins(counts, _MAX_STALENESS).items()]
        },
        absent=_WITHOUT.format("staleness was"),
        note=note,
    )


def bins(counts: Mapping[int, int], limit: int) -> dict[str, int]:
    """Return how often each number from 0 to the largest was counted, with those of at least `limit` together."""
    sums = {str(number): counts.get(number, 0) for number in range(min(limit, max(counts, default=-1) + 1))}
    rest = sum(count for number, count in counts.items() if number >= limit)
    return sums | ({f"{limit} or more": rest} if rest else {})


def _stages(run: RunRecords) -> BarChart:
    steps, seconds = Counter[str](), Counter[str]()
    for loop in run.loops:
        steps.update(loop.stage_steps)
        seconds.update(loop.stage_seconds)
    whole = (
        1e3
        * sum(interval.trained for interval in run.intervals)
        / (sum(interval.steps for interval in run.intervals) or 1)
    )
    return BarChart(
        title="Time of each stage",
        category="stage",
        value="milliseconds per step, mean",
        extra="seconds in all",
        groups={"": [(stage, 1e3 * spent / (steps[stage] or 1), number(spent)) for stage, spent in seconds.items()]},
        absent=_WITHOUT.format("times of stages were"),
        note=f"A step took {number(whole)} ms. Stages may overlap, so they need not add up to it; dense is the loop's "
        "time outside the stream.",
    )


def last_maps(run: RunRecords, key: str) -> dict[str, float]:
    """Return the last recorded rows or bytes of each table."""
    maps = [
        interval.tables[key] for loop in _loops_with(run, key) for interval in loop.intervals if key in interval.tables
    ]
    return maps[-1] if maps else {}


def _loops_with(run: RunRecords, key: str) -> list[Loop]:
    """Return the loops of the first trainer that recorded this. Each trainer sees whole tables."""
    ranks = by_rank(run).values()
    return next(
        (loops for loops in ranks if any(key in interval.tables for loop in loops for interval in loop.intervals)), []
    )


def _tables(run: RunRecords, key: str, title: str, what: str) -> LineChart:
    loops, last = _loops_with(run, key), last_maps(run, key)
    names = sorted(last, key=lambda name: (-last[name], name))
    chosen = names if len(names) <= MAX_SERIES else names[: MAX_SERIES - 1]

    held = _held("intervals", "tables", key)

    def curve(name: str, value: Callable[[Any], float]) -> Series:
        return series_of(name, loops, lambda loop: [(step, value(tables)) for step, tables in held(loop)])

    series = [curve(name, lambda tables, name=name: tables.get(name, 0.0)) for name in chosen]  # type: ignore[misc]
    chart = LineChart(title=title, y=key, series=series, absent=_WITHOUT.format(what), from_zero=True)
    chart.marks = _marks(loops)
    if len(names) > len(chosen):
        others = f"{len(names) - len(chosen)} other tables"
        series.append(curve(others, lambda tables: sum(n for name, n in tables.items() if name not in chosen)))
        chart.note = "The last value of every table is listed under Tables."
    return chart
