"""Charts as SVG or rows of bars, with their figures. Pure: values in, markup out; the page's style has the colours.

A chart is 560 wide and is scaled to its column. The colours of series are those of the classes c0 to c5, their dashes
those of d0 to d5; the data for the tooltip is a JSON block behind the SVG.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from satrap.html_report.markup import Markup, element, json_script, table
from satrap.html_report.run_records import Point, Series
from satrap.monitor.report import short

MAX_SERIES = 6
MAX_POINTS = 1000
"""Points of all curves of a chart."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 560, 62, 546, 36, 242, 284
_TABLE_ROWS, _MAX_DOTS, _MAX_MARKS = 12, 40, 100
_MIN_AVERAGED = 20
"""Points of a curve that is drawn as its moving average."""
_WINDOW, _NUM_PLACES = 0.05, 160
"""Width of the average, as a share of the axis, and the number of places at which it is computed."""
_MARKS = {"launch": "start of a launch", "epoch": "start of an epoch"}


@dataclass(slots=True, kw_only=True)
class LineChart:
    """Curves over the steps."""

    title: str
    y: str
    """What the vertical axis shows; the horizontal one shows steps."""
    series: list[Series] = field(default_factory=list)
    absent: str = ""
    """The sentence that stands for a chart without values."""
    note: str = ""
    from_zero: bool = False
    is_averaged: bool = False
    """Whether curves of many points are drawn as moving averages, over faint points."""
    is_small: bool = False
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Places on the horizontal axis, by their kind in `_MARKS`."""


@dataclass(slots=True, kw_only=True)
class BarChart:
    """A row with a bar for each of some categories."""

    title: str
    header: tuple[str, str, str]
    """What a category, a bar's length and the further column are."""
    groups: dict[str, list[tuple[str, float, str]]]
    """By the name of each run: name, value, and the text in the further column of each bar."""
    absent: str
    note: str
    is_small: bool = False


def draw(chart: LineChart | BarChart) -> Markup:
    """Return a chart with its title, legend, note and figures; without values, its title and a sentence."""
    parts = _bars(chart) if isinstance(chart, BarChart) else _curves(chart)
    title = element("h3", chart.title)
    if not parts:
        return element("section", title, element("p", chart.absent, class_="note"), class_="chart")
    samples, plot, figures = parts
    legend = element("ul", *samples, class_="legend") if samples else ""
    note = element("p", chart.note, class_="note") if chart.note else ""
    return element("section", title, legend, plot, note, figures, class_="chart")


def _curves(chart: LineChart) -> tuple[list[Markup], Markup, Markup] | None:
    """Return the entries of the legend, the plot and the figures; None if there is no value."""
    every = [point for curve in chart.series for point in (*curve.points, *curve.superseded)]
    if all(y is None for _, y in every):
        return None
    xs = [x for x, _ in every]
    is_averaged = chart.is_averaged and max(len(curve.points) for curve in chart.series) >= _MIN_AVERAGED
    window = _WINDOW * (max(xs) - min(xs)) if is_averaged else None
    num_curves = sum(1 + bool(curve.superseded) for curve in chart.series)
    limit = max(30, MAX_POINTS // num_curves - _NUM_PLACES * is_averaged)
    shown = [replace(curve, points=thin(curve.points, limit), look=curve.look or f"c{index} d{index}",
             superseded=thin(curve.superseded, limit)) for index, curve in enumerate(chart.series)]  # fmt: skip
    ys = [y for curve in shown for _, y in (*curve.points, *curve.superseded) if y is not None]
    across = axis(xs, _LEFT, _RIGHT, is_snug=True, is_whole=True, num_ticks=6)
    up = axis(ys, _BOTTOM, _TOP, from_zero=chart.from_zero)
    marks = {kind: [x for x in chart.marks.get(kind, ()) if across.low <= x <= across.high] for kind in _MARKS}
    paths = [
        (f"M{across.at(x):g} {_TOP}V{_BOTTOM}", f"mark {kind}") for kind in _MARKS for x in marks[kind][:_MAX_MARKS]
    ]
    for whole, curve in zip(chart.series, shown, strict=True):
        if is_averaged or len(curve.points) <= _MAX_DOTS:
            dots = "".join(f"M{across.at(x):g} {up.at(y):g}h0" for x, y in curve.points if y is not None)
            paths.append((dots, f"dots {curve.look}{' faint' * is_averaged}"))
        old = averaged(whole.superseded, window) if window is not None else curve.superseded
        line = averaged(whole.points, window) if window is not None else curve.points
        paths += [(_line(old, across, up), f"curve old {curve.look}"), (_line(line, across, up), f"curve {curve.look}")]
    parts = [*_frame(chart, across, up), *(element("path", d=path, class_=style) for path, style in paths if path)]
    return _legend(chart, shown, window, marks), _plot(chart, parts, across, shown), _figures(chart)


def _plot(chart: LineChart, parts: Sequence[Markup], across: "Axis", shown: Sequence[Series]) -> Markup:
    """Return the drawing with the data of its tooltip."""
    cursor = element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM)
    label = f"{chart.title}: {chart.y} by step"
    svg = element("svg", *parts, cursor, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=label)
    series = [
        {"name": curve.name, "x": [x for x, _ in curve.points], "y": [y and float(f"{y:.9g}") for _, y in curve.points]}
        for curve in shown
    ]
    ends = {"low": across.low, "high": across.high, "begin": _LEFT, "end": _RIGHT}
    return element("div", svg, json_script({"x": "step", **ends, "series": series}), class_="plot")


def _legend(
    chart: LineChart, shown: Sequence[Series], window: float | None, marks: Mapping[str, Sequence[float]]
) -> list[Markup]:
    """Return an entry for each curve, if there are several, for the moving average, the superseded parts and marks."""
    line = "M0 5H26"
    samples = [_sample(curve.name, (line, f"curve {curve.look}")) for curve in shown if len(shown) > 1]
    if window is not None:
        dots = ("M3 8h0M10 3h0M16 7h0M23 2h0", f"dots {shown[0].look} faint")
        samples.append(_sample(f"interval; mean over {window:.3g} steps", dots, (line, f"curve {shown[0].look}")))
    if any(curve.superseded for curve in chart.series):
        samples.append(_sample("trained again later", (line, f"curve old {shown[0].look}")))
    return samples + [_sample(_MARKS[kind], ("M13 0V10", f"mark {kind}")) for kind, places in marks.items() if places]


def _sample(text: str, *paths: tuple[str, str]) -> Markup:
    """Return an entry of a legend. paths: what is drawn before the text, and its classes."""
    shapes = [element("path", d=path, class_=style) for path, style in paths]
    sample = element("svg", *shapes, width=26, height=10, viewBox="0 0 26 10", aria_hidden="true")
    return element("li", sample, element("span", text))


def _bars(chart: BarChart) -> tuple[list[Markup], Markup, Markup] | None:
    """Return the entries of the legend and the rows of bars, which are their own figures; None if there is no bar."""
    groups = [{name: (value, text) for name, value, text in bars} for bars in chart.groups.values()]
    largest = max((value for bars in groups for value, _ in bars.values()), default=None)
    if largest is None:
        return None
    category, value, extra = chart.header
    rows = []
    for name in dict.fromkeys(name for bars in groups for name in bars):
        found = [bars.get(name) for bars in groups]
        paths = [
            f"M0 {9 * place + 5}H{100 * bar[0] / (largest or 1):.4g}" if bar else "" for place, bar in enumerate(found)
        ]
        shapes = [element("path", d=path, class_=f"bar c{place}") for place, path in enumerate(paths) if path]
        size = {"viewBox": f"0 0 100 {9 * len(groups)}", "preserveAspectRatio": "none", "aria_hidden": "true"}
        texts = [text for bar in found for text in ((number(bar[0]), bar[1]) if bar else ("", ""))]
        rows.append((name, *texts, element("svg", *shapes, **size)))
    samples = [_sample(run, ("M0 5H26", f"bar c{place}")) for place, run in enumerate(chart.groups) if run]
    titles = [f"{text}, {run}" if run else text for run in chart.groups for text in (value, extra)]
    return samples, table((category, *titles, ""), rows, "bars numbers"), Markup()


def _frame(chart: LineChart, across: "Axis", up: "Axis") -> list[Markup]:
    """Return the lines and texts of the ticks, the base, and the titles of both axes."""
    parts = []
    for tick, text in zip(up.ticks, tick_texts(up.ticks), strict=True):
        parts.append(element("path", d=f"M{_LEFT} {up.at(tick):g}H{_RIGHT}", class_="grid"))
        parts.append(element("text", text, x=_LEFT - 7, y=up.at(tick) + 4, class_="end"))
    for tick, text in zip(across.ticks, tick_texts(across.ticks), strict=True):
        parts.append(element("text", text, x=across.at(tick), y=_BOTTOM + 18, class_="middle"))
    parts.append(element("path", d=f"M{_LEFT} {_BOTTOM}H{_RIGHT}", class_="base"))
    parts.append(element("text", chart.y, x=4, y=15, class_="title"))
    parts.append(element("text", "step", x=(_LEFT + _RIGHT) / 2, y=_BOTTOM + 38, class_="middle title"))
    return parts


def _line(points: Sequence[Point], across: "Axis", up: "Axis") -> str:
    """Return the path of a curve; empty if it has less than two points."""
    steps, is_down = [], False
    for x, y in points:
        if y is not None:
            steps.append(f"{'L' if is_down else 'M'}{across.at(x):g} {up.at(y):g}")
        is_down = y is not None
    return "".join(steps) if len(steps) > 1 else ""


def _figures(chart: LineChart) -> Markup:
    """Return the table of some points: a column for each series, or if their places differ, a row for each point."""
    curves = [_without_gaps(curve.points) for curve in chart.series]
    places = [[x for x, _ in points] for points in curves]
    picked = [evenly(points, _TABLE_ROWS) for points in curves]
    names = [curve.name for curve in chart.series] if len(chart.series) > 1 else [chart.y]
    if all(xs == places[0] for xs in places):
        columns = [(number(row[0][0]), *(number(y) for _, y in row)) for row in zip(*picked, strict=True)]
        figures = table(("step", *names), columns)
    else:
        rows = [(name, number(x), number(y)) for name, some in zip(names, picked, strict=True) for x, y in some]
        figures = table(("", "step", chart.y), rows)
    return element("details", element("summary", "Figures"), figures)


def _without_gaps(points: Sequence[Point]) -> list[Point]:
    """Return the points without the interruptions, each of which has the place of the point after it."""
    gaps = [y is None and x == after for (x, y), (after, _) in pairwise(points)]
    return [point for point, is_gap in zip(points, [*gaps, False], strict=False) if not is_gap]


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` of the points, in their order. Of each run of neighbours it keeps the lowest, the highest
    and the first interruption; the first and the last point always remain. limit: at least 5."""
    assert limit >= 5
    if len(points) <= limit:
        return list(points)
    num_runs = (limit - 2) // 3
    kept = {0, len(points) - 1}
    for run in range(num_runs):
        begin, end = (len(points) * number // num_runs for number in (run, run + 1))
        values = [(value, index) for index in range(begin, end) if (value := points[index][1]) is not None]
        if values:
            kept |= {min(values)[1], max(values)[1]}
        if len(values) < end - begin:
            kept.add(next(index for index in range(begin, end) if points[index][1] is None))
    return [points[index] for index in sorted(kept)]


def averaged(points: Sequence[Point], width: float) -> list[Point]:
    """Return the moving average of a curve at equal distances: the mean of the points within half the width, which does
    not cross an interruption."""
    kept: list[Point] = []
    for is_gap, part in groupby(points, lambda point: point[1] is None):
        run = list(part)
        if is_gap:
            kept.append(run[0])
            continue
        xs, ys = [x for x, _ in run], [y for _, y in run if y is not None]
        num = max(1, round((xs[-1] - xs[0]) / width * _WINDOW * _NUM_PLACES)) if width > 0 else 1
        for index in range(num + 1):
            x = xs[0] + (xs[-1] - xs[0]) * index / num
            near = ys[bisect_left(xs, x - width / 2) : bisect_right(xs, x + width / 2)]
            if near:
                kept.append((x, sum(near) / len(near)))
    return kept


def evenly(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` of the points, evenly spaced in their order, with the first and the last; for tables."""
    if len(points) <= limit:
        return list(points)
    return [points[round(number * (len(points) - 1) / (limit - 1))] for number in range(limit)]


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` to `high`, drawn from the coordinate `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Return the coordinate of a value, rounded to a tenth."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


def axis(
    values: Iterable[float],
    begin: float,
    end: float,
    *,
    from_zero: bool = False,
    is_snug: bool = False,
    is_whole: bool = False,
    num_ticks: int = 5,
) -> Axis:
    """Return an axis that holds all values, with ticks at round numbers: 1, 2 or 5 times a power of ten apart.

    from_zero: it starts at 0. is_snug: it ends at the last value, else at a tick. is_whole: its ticks are integers.
    """
    held = list(values)
    low, high = min(held, default=0.0), max(held, default=1.0)
    if from_zero or (is_snug and 0 < low < high / 10):
        low, high = min(low, 0.0), max(high, 0.0)
    if not high - low > max(1e-9 * max(abs(low), abs(high)), 1e-290):
        room = abs(low) / 10 if abs(low) > 1e-290 else 1.0
        low, high = 0.0 if from_zero else low - room, high + room
    least = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    step = max(step, float(is_whole))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    if is_snug:
        return Axis(low, high, begin, end, tuple(tick for tick in ticks if low <= tick <= high))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), begin, end, ticks)


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return the texts of an axis's ticks: as few digits as tell them apart."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    rounded = [0.0 if abs(tick) < step / 1e6 else tick for tick in ticks]
    if max(map(abs, rounded)) >= 10_000:
        texts = [short(tick) for tick in rounded]
        return texts if len(set(texts)) == len(texts) else [f"{tick:,.0f}" for tick in rounded]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{digits}f}" if digits < 7 else f"{tick:.3g}" for tick in rounded]


def number(value: float | None) -> str:
    """Return a number of a table: integers in full, others with five digits."""
    if value is None:
        return "not finite"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10_000 else f"{value:.5g}"
