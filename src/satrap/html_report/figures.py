"""The charts of a run, or of two in one, from their curves and counts. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from satrap.html_report.chart import MAX_SERIES, LineChart, Listing, bar, number
from satrap.html_report.run_records import Loop, Point, RunRecords, Series

Runs = Mapping[str, RunRecords]
"""By the name in legends and notes; that of a run alone is empty."""
Bars = dict[str, tuple[float, str]]
"""The value of each category, and the text in the further column."""
_MAX_STALENESS, _MAX_CHARTS = 24, 24
_WITHOUT = "No {} recorded: a Progress with the embeddings records them, some only for the batches of a stream."
_NO_METRIC = "No evaluation was recorded: satrap.Validation reports one, or Progress.report_evaluation."


def charts_of(runs: Runs) -> dict[str, list[LineChart | Listing]]:
    """Return all charts in their order, by the heading above them. Of two runs each chart shows both, in a colour for
    each."""
    lines = partial(_lines, runs)
    window = max((curve.last for run in runs.values() for curve in run.curves.get("window", ())), default=0)
    num_trainers = max(len(run.by_rank) for run in runs.values())
    charts: list[LineChart | Listing] = [
        lines("Loss", "loss", y="loss, mean of an interval", is_averaged=True,
              absent="No loss was given to Progress.step(loss=...)."),
        lines("AUC in training", "auc", y=f"AUC of the last {window:,.0f} samples", is_averaged=True,
              absent="No scores were given to Progress.step(scores=...), so there is no AUC.",
              notes=["The samples are those of training, with the scores that Progress.step was given."]),
        lines("Samples per second", "rate", y="samples/s" + f", sum of {num_trainers} trainers" * (num_trainers > 1),
              is_averaged=True, from_zero=True, absent="No steps were recorded."),
        *(_each(runs, "metrics", partial(_validation, runs)) or [lines("Validation", "metrics", absent=_NO_METRIC)]),
        _bars(runs, _staleness, title="Staleness", header=("earlier steps that a lookup missed", "batches", "share"),
              note="The steps are those of the same trainer.", absent=_WITHOUT.format("staleness was")),
        _bars(runs, _stages, title="Time of each stage",
              header=("stage", "milliseconds per step, mean", "seconds in all"),
              note="Stages may overlap, so they need not add up to it; dense is the loop's time outside the stream.",
              absent=_WITHOUT.format("times of stages were")),
        lines("Rows of each table", "rows", what="tables", from_zero=True, absent=_WITHOUT.format("rows were")),
        lines("Memory of each table", "bytes", what="tables", from_zero=True,
              absent=_WITHOUT.format("memory of tables was")),
        lines("Memory of each process", "memory", y="bytes", what="processes", from_zero=True,
              absent="No memory of a process was recorded."),
        lines("Memory of GPUs", "device_bytes", y="bytes that torch holds", from_zero=True),
        lines("Learning rate", "learning_rates", y="learning rate", what="groups of parameters", from_zero=True,
              absent="No learning rate was recorded: it is that of the optimizer of Progress(embeddings)."),
        lines("Gradient norm", "gradient_norm", y="norm of the dense gradients", is_averaged=True,
              absent=_WITHOUT.format("gradient norm was")),
    ]  # fmt: skip
    logged = _each(runs, "logged", lambda name: lines(name, "logged", name, y="", is_averaged=True))
    shown = [chart for chart in charts if isinstance(chart, Listing) or chart.series or chart.absent]
    return {"Training": shown, "Numbers of the script": [*logged]}


def _lines(
    runs: Runs, title: str, key: str, only: str | None = None, *, what: str = "trainers", **options: Any
) -> LineChart:
    """Return a chart of the curves with this key. only: the name of one curve. what: what the curves are of."""
    chart = LineChart(title=title, **{"y": key, **options})
    for place, (run_name, run) in enumerate(runs.items()):
        curves = [curve for curve in run.curves.get(key, ()) if only in (None, curve.name)]
        shown, notes = _fitting(curves, what, MAX_SERIES // len(runs))
        chart.notes += notes
        chart.marks = _marks(run.first_loops) if len(runs) == 1 else {}
        for index, curve in enumerate(shown):
            name = ", ".join(filter(None, (run_name, "" if only else curve.name)))
            look = f"c{place if len(runs) > 1 else index} d{index}"
            chart.series.append(replace(curve, name=name, look=look))
    return chart


def _fitting(curves: list[Series], what: str, limit: int) -> tuple[list[Series], list[str]]:
    """Return the curves for which a chart has room, and a note if that is not all: the largest tables or processes, the
    first of others. The smaller tables are one curve together."""
    if what in ("tables", "processes"):
        curves = sorted(curves, key=lambda curve: -curve.last)
    if len(curves) <= limit:
        return curves, []
    if what != "tables":
        order = "largest" if what == "processes" else "first"
        return curves[:limit], [f"{len(curves)} {what} recorded; these are the {order} {limit}."]
    smaller = curves[limit - 1 :]
    points, superseded = (_sum([getattr(curve, part) for curve in smaller]) for part in ("points", "superseded"))
    together = Series(name=f"{len(smaller)} other tables", points=points, superseded=superseded)
    return [*curves[: limit - 1], together], ["The last value of every table is listed under Tables."]


def _sum(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the sum of curves at the steps of the first. Its interruptions remain."""
    values = [dict(points) for points in curves]
    return [(x, None if y is None else sum(at.get(x) or 0.0 for at in values)) for x, y in curves[0]]


def _each(runs: Runs, key: str, chart_of: Callable[[str], LineChart]) -> list[LineChart]:
    """Return a chart of each name that has values of this key, at most `_MAX_CHARTS`."""
    names = list(dict.fromkeys(curve.name for run in runs.values() for curve in run.curves.get(key, ())))
    charts = [chart_of(name) for name in names[:_MAX_CHARTS]]
    if len(names) > len(charts):
        charts[-1].notes.append(f"{len(names)} numbers of this kind were recorded; these are the first {len(charts)}.")
    return charts


def _validation(runs: Runs, name: str) -> LineChart:
    """Return the chart of a metric of evaluations, with a note on the best one."""
    chart = _lines(runs, f"Validation: {name}", "metrics", name, y=name, absent=f"No finite {name} was recorded.")
    for run_name, run in runs.items():
        if (best := run.best) is not None and name in best["metrics"]:
            which = f"the best evaluation of {run_name}" if run_name else "the best evaluation"
            chart.notes.append(f"At {which}, step {best['step']:,}: {number(best['metrics'].get(name))}.")
    return chart


def _marks(loops: Sequence[Loop]) -> dict[str, list[float]]:
    """Return the first step of each launch but the first, and of each epoch that began in the loops of a trainer."""
    resumed = [two for one, two in pairwise(loops) if two.intervals and one.launch != two.launch]
    epochs = sorted({float(step) for loop in loops for line in loop.intervals for step in line.get("epochs", ())})
    return {"launch": [float(loop.intervals[0]["first_step"]) for loop in resumed], "epoch": epochs}


def _bars(
    runs: Runs,
    bars_of: Callable[[RunRecords], tuple[Bars, str]],
    title: str,
    header: tuple[str, str, str],
    note: str,
    absent: str,
) -> Listing:
    """Return a table with a bar for each category of each run. header: what categories, bars and further texts are."""
    counted = {name: bars_of(run) for name, run in runs.items()}
    largest = max((value for bars, _ in counted.values() for value, _ in bars.values()), default=0.0) or 1.0
    rows = []
    for category in dict.fromkeys(category for bars, _ in counted.values() for category in bars):
        for place, (name, (bars, _)) in enumerate(counted.items()):
            if category in bars:
                value, text = bars[category]
                rows.append((category, *filter(None, [name]), number(value), text, bar(value / largest, place)))
    notes = [f"{name}: {text}" if name else text for name, (bars, text) in counted.items() if bars]
    columns = (header[0], *(["run"] if len(runs) > 1 else []), *header[1:], "")
    return Listing(title, columns, rows, " ".join([*notes, note]) if rows else absent, "bars numbers")


def _staleness(run: RunRecords) -> tuple[Bars, str]:
    counts = Counter[int]()
    for line in run.intervals:
        counts.update({int(steps): int(batches) for steps, batches in line.get("staleness", {}).items()})
    total = sum(counts.values()) or 1
    mean = sum(steps * batches for steps, batches in counts.items()) / total
    note = f"Mean {number(mean)}, largest {max(counts, default=0)}."
    bounds = {bound for loop in run.loops if isinstance(bound := loop.settings.get("staleness"), int)}
    if len(bounds) == 1:
        note += f" At most {bounds.pop()} was permitted."
    return {name: (count, f"{count / total:.1%}") for name, count in bins(counts, _MAX_STALENESS).items()}, note


def bins(counts: Mapping[int, int], limit: int) -> dict[str, int]:
    """Return how often each number from 0 to the largest was counted, with those of at least `limit` together."""
    sums = {str(number): counts.get(number, 0) for number in range(min(limit, max(counts, default=-1) + 1))}
    rest = sum(count for number, count in counts.items() if number >= limit)
    return sums | ({f"{limit} or more": rest} if rest else {})


def _stages(run: RunRecords) -> tuple[Bars, str]:
    steps, seconds = Counter[str](), Counter[str]()
    for line in run.intervals:
        for stage, mean in line.get("stages", {}).items():
            steps[stage] += line["steps"]
            seconds[stage] += mean * line["steps"]
    whole = sum(line["trained"] for line in run.intervals) / (sum(line["steps"] for line in run.intervals) or 1)
    bars = {stage: (1e3 * spent / (steps[stage] or 1), number(spent)) for stage, spent in seconds.items()}
    return bars, f"A step took {number(1e3 * whole)} ms."
