"""Charts as SVG with the table of their figures. Pure: values in, markup out; the page's style has the colours.

A chart is 560 wide and is scaled to its column. The colours of series are those of the classes c0 to c5, their dashes
those of d0 to d5; the data for the tooltip is a JSON block behind the SVG.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from satrap.html_report.markup import Markup, element, json_script, table
from satrap.monitor.report import short

MAX_SERIES = 6
MAX_POINTS = 1000
"""Points of all curves of a chart."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 560, 62, 546, 36, 242, 284
_TABLE_ROWS, _MAX_DOTS, _MAX_BAR_TEXTS = 12, 40, 8
_MIN_AVERAGED = 20
"""Points of a curve that is drawn as its moving average."""
_WINDOW, _NUM_PLACES = 0.05, 160
"""Width of the average, as a share of the axis, and the number of places at which it is computed."""
_MARKS = {"launch": "start of a launch", "epoch": "start of an epoch"}
Point = tuple[float, float | None]
"""A place on the axis, and the value there; None: the curve is interrupted."""


@dataclass(slots=True, kw_only=True)
class Series:
    """One curve."""

    name: str
    points: list[Point]
    superseded: list[Point] = field(default_factory=list)
    """The part that a later launch trained again."""
    look: str = ""
    """Classes of its colour and dashes; empty: those of its place in the chart."""


@dataclass(slots=True, kw_only=True)
class Chart:
    """What all charts have."""

    title: str
    absent: str = ""
    """The sentence that stands for a chart without values."""
    note: str = ""
    is_small: bool = False


@dataclass(slots=True, kw_only=True)
class LineChart(Chart):
    """Curves over one axis."""

    x: str = "step"
    """What the horizontal axis shows."""
    y: str
    series: list[Series]
    from_zero: bool = False
    is_averaged: bool = False
    """Whether curves of many points are drawn as moving averages, over faint points."""
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Places on the horizontal axis, by their kind in `_MARKS`."""


@dataclass(slots=True, kw_only=True)
class BarChart(Chart):
    """One bar for each of some categories."""

    category: str
    value: str
    """What a bar's height is, with its unit."""
    extra: str
    """The header of a further column of the table."""
    groups: dict[str, list[tuple[str, float, str]]]
    """By the name of each run: name, value, and the text in the further column of each bar."""


def draw(chart: Chart) -> Markup:
    """Return a chart with its title, legend, note and table; without values, its title and a sentence."""
    title = element("h3", chart.title)
    if isinstance(chart, LineChart) and any(y is not None for s in chart.series for _, y in (*s.points, *s.superseded)):
        legend, svg, figures = _curves(chart)
    elif isinstance(chart, BarChart) and any(chart.groups.values()):
        legend, svg, figures = _bars(chart)
    else:
        return element("section", title, element("p", chart.absent, class_="note"), class_="chart")
    note = element("p", chart.note, class_="note") if chart.note else ""
    details = element("details", element("summary", "Figures"), figures)
    return element("section", title, legend, svg, note, details, class_="chart")


def _legend(items: Sequence[tuple[Sequence[Markup], str]]) -> Markup:
    """Return a legend of samples, each with its text."""
    size = {"width": 26, "height": 10, "viewBox": "0 0 26 10", "aria_hidden": "true"}
    entries = [element("li", element("svg", *shapes, **size), element("span", text)) for shapes, text in items]
    return element("ul", *entries, class_="legend") if entries else Markup()


def _curves(chart: LineChart) -> tuple[Markup, Markup, Markup]:
    """Return the legend, the curves and the table of a chart."""
    every = [x for curve in chart.series for x, _ in (*curve.points, *curve.superseded)]
    window = _WINDOW * (max(every) - min(every))
    is_averaged = chart.is_averaged and max(len(curve.points) for curve in chart.series) >= _MIN_AVERAGED
    parts_of = [(curve.look or f"c{index} d{index}", curve) for index, curve in enumerate(chart.series)]
    num_curves = sum(1 + bool(curve.superseded) for curve in chart.series)
    limit = max(30, MAX_POINTS // num_curves - _NUM_PLACES * is_averaged)
    drawn = [(thin(curve.points, limit), thin(curve.superseded, limit)) for curve in chart.series]
    values = [y for parts in drawn for part in parts for _, y in part if y is not None]
    across = axis(every, _LEFT, _RIGHT, is_snug=True, is_whole=chart.x == "step", num_ticks=6)
    up = axis(values, _BOTTOM, _TOP, from_zero=chart.from_zero)
    parts = _frame(up, chart.x, chart.y)
    for tick, text in zip(across.ticks, tick_texts(across.ticks), strict=True):
        parts.append(element("text", text, x=across.at(tick), y=_BOTTOM + 18, class_="middle"))
    marks = {kind: [x for x in xs if across.low <= x <= across.high][:100] for kind, xs in chart.marks.items()}
    kinds = [kind for kind, places in marks.items() if places]
    for kind, at in ((name, across.at(x)) for name in kinds for x in marks[name]):
        parts.append(element("line", class_=f"mark {kind}", x1=at, x2=at, y1=_TOP, y2=_BOTTOM))
    for (look, curve), (points, superseded) in zip(parts_of, drawn, strict=True):
        strong = averaged(curve.points, window) if is_averaged else points
        weak = averaged(curve.superseded, window) if is_averaged else superseded
        if is_averaged or len(points) <= _MAX_DOTS:
            dots = "".join(f"M{across.at(x):g} {up.at(y):g}h0" for x, y in points if y is not None)
            parts.append(element("path", d=dots, class_=f"dots {look}{' faint' * is_averaged}"))
        parts.append(_curve(weak, across, up, f"curve old {look}"))
        parts.append(_curve(strong, across, up, f"curve {look}"))
    parts.append(element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM))
    series = [
        {"name": curve.name, "x": [x for x, _ in points], "y": [y and float(f"{y:.9g}") for _, y in points]}
        for curve, (points, _) in zip(chart.series, drawn, strict=True)
    ]
    ends = {"low": across.low, "high": across.high, "begin": _LEFT, "end": _RIGHT}
    data = json_script({"x": chart.x, **ends, "series": series})
    svg = _plot(parts, f"{chart.title}: {chart.y} by {chart.x}", data)
    return _curve_legend(chart, parts_of, kinds, f"{window:.3g}" if is_averaged else ""), svg, _figures(chart)


def _curve_legend(chart: LineChart, looks: Sequence[tuple[str, Series]], kinds: Sequence[str], width: str) -> Markup:
    """Return what the curves, the marks and, if a width of the moving average is given, the points are."""
    items = [([element("path", d="M0 5H26", class_=f"curve {look}")], s.name) for look, s in looks if len(looks) > 1]
    if width:
        dots = element("path", d="M3 8h0M10 3h0M16 7h0M23 2h0", class_=f"dots {looks[0][0]} faint")
        curve = element("path", d="M0 5H26", class_=f"curve {looks[0][0]}")
        items.append(([dots, curve], f"interval; mean over {width} steps"))
    if any(s.superseded for s in chart.series):
        items.append(([element("path", d="M0 5H26", class_=f"curve old {looks[0][0]}")], "trained again later"))
    marks = [([element("path", d="M13 0V10", class_=f"mark {kind}")], _MARKS[kind]) for kind in kinds]
    return _legend([*items, *marks])


def _bars(chart: BarChart) -> tuple[Markup, Markup, Markup]:
    """Return the legend, the bars and the table of a chart."""
    groups = {name: {bar[0]: bar[1:] for bar in bars} for name, bars in chart.groups.items()}
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    up = axis((value for bars in groups.values() for value, _ in bars.values()), _BOTTOM, _TOP, from_zero=True)
    parts = _frame(up, chart.category, chart.value)
    room = (_RIGHT - _LEFT) / len(names)
    width = min(56.0, 0.8 * room / len(groups))
    every = -(-len(names) * 30 // (_RIGHT - _LEFT))  # labels of 30 fit beside one another
    for index, name in enumerate(names):
        middle = _LEFT + (index + 0.5) * room
        for place, bars in enumerate(groups.values()):
            if name not in bars:
                continue
            value, left = bars[name][0], middle + (place - len(groups) / 2) * width
            top = up.at(value)
            size = {"x": round(left, 1), "width": round(width, 1), "height": round(_BOTTOM - top, 1)}
            tip = element("title", f"{name}: {number(value)}")
            parts.append(element("g", tip, element("rect", class_=f"bar c{place}", y=top, **size)))
            if len(names) * len(groups) <= _MAX_BAR_TEXTS:
                parts.append(element("text", number(value), x=round(left + width / 2, 1), y=top - 4, class_="middle"))
        if index % every == 0:
            parts.append(element("text", name, x=round(middle, 1), y=_BOTTOM + 18, class_="middle"))
    header = [f"{text}, {run}" if run else text for run in groups for text in (chart.value, chart.extra)]
    cells = {name: [bars.get(name) for bars in groups.values()] for name in names}
    rows = [
        (name, *(text for bar in row for text in ((number(bar[0]), bar[1]) if bar else ("", ""))))
        for name, row in cells.items()
    ]
    swatches = [
        ([element("rect", class_=f"bar c{i}", width=26, height=10)], run) for i, run in enumerate(groups) if run
    ]
    svg = _plot(parts, f"{chart.title}: {chart.value} by {chart.category}")
    return _legend(swatches), svg, table((chart.category, *header), rows)


def _frame(up: "Axis", x: str, y: str) -> list[Markup]:
    """Return the lines of the vertical axis's ticks, the base, and the titles of both axes."""
    parts = []
    for tick, text in zip(up.ticks, tick_texts(up.ticks), strict=True):
        at = up.at(tick)
        parts.append(element("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=at, y2=at))
        parts.append(element("text", text, x=_LEFT - 7, y=at + 4, class_="end"))
    parts.append(element("line", class_="base", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM))
    parts.append(element("text", y, x=4, y=15, class_="title"))
    parts.append(element("text", x, x=(_LEFT + _RIGHT) / 2, y=_BOTTOM + 38, class_="middle title"))
    return parts


def _plot(parts: Sequence[Markup], label: str, data: Markup | str = "") -> Markup:
    svg = element("svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=label)
    return element("div", svg, data, class_="plot")


def _curve(points: Sequence[Point], across: "Axis", up: "Axis", style: str) -> Markup:
    steps, is_down = [], False
    for x, y in points:
        if y is not None:
            steps.append(f"{'L' if is_down else 'M'}{across.at(x):g} {up.at(y):g}")
        is_down = y is not None
    return element("path", d="".join(steps), class_=style) if len(steps) > 1 else Markup()


def _figures(chart: LineChart) -> Markup:
    """Return the table of some points: a column for each series, or if their places differ, a row for each point."""
    places = [[x for x, _ in curve.points] for curve in chart.series]
    picked = [evenly(curve.points, _TABLE_ROWS) for curve in chart.series]
    names = [curve.name for curve in chart.series] if len(chart.series) > 1 else [chart.y]
    if all(xs == places[0] for xs in places):
        columns = [(number(row[0][0]), *(number(y) for _, y in row)) for row in zip(*picked, strict=True)]
        return table((chart.x, *names), columns)
    rows = [(name, number(x), number(y)) for name, some in zip(names, picked, strict=True) for x, y in some]
    return table(("", chart.x, chart.y), rows)


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
