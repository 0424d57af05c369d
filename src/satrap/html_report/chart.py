"""Charts as SVG with their figures, and tables. Pure: values in, markup out; the page's style has the colours.

A chart is 560 wide and is scaled to its column. The colours of series are those of the classes c0 to c5, their dashes
those of d0 to d5; the data for the tooltip is a JSON block behind the SVG.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import TypeVar

from satrap.html_report.markup import Markup, element, json_script, table
from satrap.html_report.run_records import Point, Series
from satrap.monitor.report import short

MAX_SERIES = 6
MAX_POINTS = 1000
"""Points of all curves of a chart."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 560, 62, 546, 36, 242, 284
_NUM_FIGURES, _MAX_DOTS, _MAX_ROWS = 12, 40, 200
_MIN_AVERAGED = 20
"""Points of a curve that is drawn as its moving average."""
_WINDOW, _NUM_PLACES = 0.05, 160
"""Width of the average, as a share of the axis, and the number of places at which it is computed."""
_MARKS = {"launch": "start of a launch", "epoch": "start of an epoch"}
_LINE = "M0 5H26"
"""Shape of a curve in a legend."""
_Item = TypeVar("_Item")


@dataclass(slots=True, kw_only=True)
class LineChart:
    """Curves over the steps."""

    title: str
    y: str
    """What the vertical axis shows; the horizontal one shows steps."""
    series: list[Series] = field(default_factory=list)
    absent: str = ""
    """The sentence that stands for a chart without values."""
    notes: list[str] = field(default_factory=list)
    from_zero: bool = False
    is_averaged: bool = False
    """Whether curves of many points are drawn as moving averages, over faint points."""
    marks: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Steps that have a vertical line, by their kind in `_MARKS`."""


@dataclass(slots=True)
class Listing:
    """A table, or the sentence that stands for it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""
    style: str | None = None
    """Class of the table."""


def draw(part: LineChart | Listing) -> Markup:
    """Return a section of the page: a chart with its legend, note and figures, or a table with its note."""
    content = _curves(part) if isinstance(part, LineChart) else _rows(part)
    return element("section", element("h3", part.title), *content)


def _rows(listing: Listing) -> list[Markup]:
    """Return the note and the table."""
    rows, note = listing.rows[:_MAX_ROWS], listing.note
    if len(rows) < len(listing.rows):
        note += f" These are the first {len(rows)} of {len(listing.rows):,}."
    return [*_note(note), *([table(listing.header, rows, listing.style)] if rows else [])]


def _note(text: str) -> list[Markup]:
    return [element("p", text, class_="note")] if text else []


def bar(share: float, place: int) -> Markup:
    """Return a bar that fills this share of its cell, in the colour of this place."""
    line = element("path", d=f"M0 5H{100 * share:.4g}", class_=f"bar c{place}")
    return element("svg", line, viewBox="0 0 100 9", preserveAspectRatio="none", aria_hidden="true")


def _curves(chart: LineChart) -> list[Markup]:
    """Return the legend, the plot, the note and the figures; without values, the sentence that stands for them."""
    parts = [points for curve in chart.series for points in (curve.points, curve.superseded) if points]
    if all(y is None for points in parts for _, y in points):
        return _note(chart.absent)
    xs = [x for points in parts for x, _ in points]
    is_averaged = chart.is_averaged and max(len(curve.points) for curve in chart.series) >= _MIN_AVERAGED
    window = _WINDOW * (max(xs) - min(xs)) if is_averaged else 0.0
    limit = max(30, MAX_POINTS // len(parts) - _NUM_PLACES * is_averaged)
    shown = [curve.mapped(partial(thin, limit=limit)) for curve in chart.series]
    ys = [y for curve in shown for _, y in (*curve.points, *curve.superseded) if y is not None]
    across = axis(xs, _LEFT, _RIGHT, is_steps=True)
    up = axis(ys, _BOTTOM, _TOP, from_zero=chart.from_zero)
    marks = {kind: [x for x in chart.marks.get(kind, ()) if across.low <= x <= across.high] for kind in _MARKS}
    paths = []
    for kind, places in marks.items():
        ends = sorted({round(across.at(x)) for x in places})
        paths.append(("".join(f"M{x} {_TOP}V{_BOTTOM}" for x in ends), f"mark {kind}"))
    for whole, curve in zip(chart.series, shown, strict=True):
        if window or len(curve.points) <= _MAX_DOTS:
            dots = "".join(f"M{across.at(x):g} {up.at(y):g}h0" for x, y in curve.points if y is not None)
            paths.append((dots, f"dots {curve.look}{' faint' * bool(window)}"))
        drawn = whole.mapped(partial(averaged, width=window)) if window else curve
        paths.append((_line(drawn.superseded, across, up), f"curve old {curve.look}"))
        paths.append((_line(drawn.points, across, up), f"curve {curve.look}"))
    shapes = [element("path", d=path, class_=style) for path, style in paths if path]
    plot = _plot(chart, across, up, shapes, shown)
    return [*_legend(shown, window, marks), plot, *_note(" ".join(chart.notes)), _figures(chart)]


def _plot(chart: LineChart, across: "Axis", up: "Axis", shapes: Sequence[Markup], shown: Sequence[Series]) -> Markup:
    """Return the drawing with its axes, and the data of its tooltip."""
    svg = element(
        "svg",
        element("path", d="".join(f"M{_LEFT} {y:g}H{_RIGHT}" for y, _ in up.labels), class_="grid"),
        *(element("text", text, x=_LEFT - 7, y=y + 4, class_="end") for y, text in up.labels),
        *(element("text", text, x=x, y=_BOTTOM + 18, class_="middle") for x, text in across.labels),
        element("path", d=f"M{_LEFT} {_BOTTOM}H{_RIGHT}", class_="base"),
        element("text", chart.y, x=4, y=15, class_="title"),
        element("text", "step", x=(_LEFT + _RIGHT) / 2, y=_BOTTOM + 38, class_="middle title"),
        *shapes,
        element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=f"{chart.title}: {chart.y} by step",
    )  # fmt: skip
    series = [
        {"name": curve.name, "x": [x for x, _ in curve.points], "y": [y and float(f"{y:.9g}") for _, y in curve.points]}
        for curve in shown
    ]
    data = {"low": across.low, "high": across.high, "begin": _LEFT, "end": _RIGHT, "series": series}
    return element("div", svg, json_script(data), class_="plot")


def _legend(shown: Sequence[Series], window: float, marks: Mapping[str, Sequence[float]]) -> list[Markup]:
    """Return the legend: of each curve, if there are several, of the moving average, superseded parts and marks."""
    look = shown[0].look
    samples = [_sample(curve.name, (_LINE, f"curve {curve.look}")) for curve in shown if len(shown) > 1]
    if window:
        dots = ("M3 8h0M10 3h0M16 7h0M23 2h0", f"dots {look} faint")
        samples.append(
            _sample(f"interval; mean over {number(float(f'{window:.3g}'))} steps", dots, (_LINE, f"curve {look}"))
        )
    if any(curve.superseded for curve in shown):
        samples.append(_sample("trained again later", (_LINE, f"curve old {look}")))
    samples += [_sample(_MARKS[kind], ("M13 -3V13", f"mark {kind}")) for kind, places in marks.items() if places]
    return [element("ul", *samples, class_="legend")] if samples else []


def _sample(text: str, *paths: tuple[str, str]) -> Markup:
    """Return an entry of a legend. paths: what is drawn before the text, and its classes."""
    shapes = [element("path", d=path, class_=style) for path, style in paths]
    sample = element("svg", *shapes, width=26, height=10, viewBox="0 0 26 10", aria_hidden="true")
    return element("li", sample, element("span", text))


def _line(points: Sequence[Point], across: "Axis", up: "Axis") -> str:
    """Return the path of a curve; empty if it has less than two points."""
    steps, is_down = [], False
    for x, y in points:
        if y is not None:
            steps.append(f"{'L' if is_down else 'M'}{across.at(x):g} {up.at(y):g}")
        is_down = y is not None
    return "".join(steps) if len(steps) > 1 else ""


def _figures(chart: LineChart) -> Markup:
    """Return the table of the values at some steps, or at the last step before that the row above does not have."""
    steps = evenly(sorted({x for curve in chart.series for x, _ in curve.points}), _NUM_FIGURES)
    names = [curve.name for curve in chart.series] if len(chart.series) > 1 else [chart.y]
    rows = [
        (number(step), *(_figure(curve.points, after, step) for curve in chart.series))
        for after, step in pairwise((-math.inf, *steps))
    ]
    return element("details", element("summary", "Figures"), table(("step", *names), rows))


def _figure(points: Sequence[Point], after: float, step: float) -> str:
    """Return the last value of a curve after one step and up to another; empty if there is none."""
    place = bisect_right(points, step, key=lambda point: point[0])
    return number(points[place - 1][1]) if place and points[place - 1][0] > after else ""


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` of the points, in their order. Of each run of neighbours it keeps the lowest, the highest
    and the first interruption; the first and the last point always remain. limit: at least 5."""
    assert limit >= 5
    if len(points) <= limit:
        return list(points)
    num_runs = (limit - 2) // 3
    kept = {0, len(points) - 1}
    for begin, end in pairwise(len(points) * run // num_runs for run in range(num_runs + 1)):
        values = sorted((y, index) for index, (_, y) in enumerate(points[begin:end], begin) if y is not None)
        gaps = [index for index in range(begin, end) if points[index][1] is None]
        kept |= {index for _, index in (*values[:1], *values[-1:])} | set(gaps[:1])
    return [points[index] for index in sorted(kept)]


def averaged(points: Sequence[Point], width: float) -> list[Point]:
    """Return the moving average of a curve at equal distances: the mean of the points within half the width, which does
    not cross an interruption. width: above 0."""
    means: list[Point] = []
    for is_gap, group in groupby(points, lambda point: point[1] is None):
        run = list(group)
        if is_gap:
            means.append(run[0])
            continue
        xs, ys = [x for x, _ in run], [y for _, y in run if y is not None]
        num = max(1, round((xs[-1] - xs[0]) / width * _WINDOW * _NUM_PLACES))
        for x in (xs[0] + (xs[-1] - xs[0]) * index / num for index in range(num + 1)):
            near = ys[bisect_left(xs, x - width / 2) : bisect_right(xs, x + width / 2)]
            if near:
                means.append((x, sum(near) / len(near)))
    return means


def evenly(items: Sequence[_Item], limit: int) -> list[_Item]:
    """Return at most `limit` of the items, evenly spaced in their order, with the first and the last; for tables."""
    if len(items) <= limit:
        return list(items)
    return [items[round(number * (len(items) - 1) / (limit - 1))] for number in range(limit)]


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

    @property
    def labels(self) -> list[tuple[float, str]]:
        """The coordinate and the text of each tick."""
        return list(zip(map(self.at, self.ticks), tick_texts(self.ticks), strict=True))


def axis(values: Iterable[float], begin: float, end: float, *, from_zero: bool = False, is_steps: bool = False) -> Axis:
    """Return an axis that holds all values, with ticks at round numbers: 1, 2 or 5 times a power of ten apart.

    from_zero: it starts at 0. is_steps: its ticks are integers, and it ends at the last value; others end at a tick.
    """
    held = list(values)
    low, high = min(held, default=0.0), max(held, default=1.0)
    if from_zero or (is_steps and 0 < low < high / 10):
        low, high = min(low, 0.0), max(high, 0.0)
    if not high - low > max(1e-9 * max(abs(low), abs(high)), 1e-290):
        room = abs(low) / 10 if abs(low) > 1e-290 else 1.0
        low, high = 0.0 if from_zero else low - room, high + room
    least = (high - low) / (6 if is_steps else 5)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    step = max(step, float(is_steps))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    if is_steps:
        return Axis(low, high, begin, end, tuple(tick for tick in ticks if low <= tick <= high))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), begin, end, ticks)


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return the texts of an axis's ticks: as few digits as tell them apart."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    if max(map(abs, ticks)) >= 10_000:
        texts = [short(tick) for tick in ticks]
        return texts if len(set(texts)) == len(texts) else [f"{tick:,.0f}" for tick in ticks]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{digits}f}" if digits < 7 else f"{tick:.3g}" for tick in ticks]


def number(value: float | None) -> str:
    """Return a number of a table: integers in full, others with five digits."""
    if value is None:
        return "not finite"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10_000 else f"{value:.5g}"
