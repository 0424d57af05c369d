"""Charts as SVG with the table of their figures. Pure: values in, markup out; the page's style has the colours.

A chart is 560 wide and is scaled to its column. Colours and dashes of series are those of the classes s0 to s5; the
data for the tooltip is a JSON block behind the SVG.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from satrap.html_report.markup import Markup, element, json_script, table
from satrap.monitor.report import short

MAX_SERIES = 6
MAX_POINTS = 1000
"""Points of all curves of a chart."""
_TABLE_ROWS = 12
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 560, 62, 546, 36, 242, 284
_MAX_DOTS = 40
_MAX_BAR_TEXTS = 8
Point = tuple[float, float | None]
"""A place on the axis, and the value there; None: the curve is interrupted."""


@dataclass(slots=True, kw_only=True)
class Series:
    """One curve."""

    name: str
    points: list[Point]
    superseded: list[Point] = field(default_factory=list)
    """The part that a later launch trained again."""


@dataclass(slots=True, kw_only=True)
class LineChart:
    """Curves over one axis."""

    title: str
    x: str
    """What the horizontal axis shows, with its unit."""
    y: str
    series: list[Series]
    absent: str = ""
    """The sentence that stands for a chart without values."""
    from_zero: bool = False
    marks: list[float] = field(default_factory=list)
    """Places on the horizontal axis where a launch started."""
    note: str = ""


@dataclass(slots=True, kw_only=True)
class BarChart:
    """One bar for each of some categories."""

    title: str
    category: str
    value: str
    """What a bar's height is, with its unit."""
    extra: str
    """The header of a further column of the table."""
    bars: list[tuple[str, float, str]]
    """Name, value, and the text in the further column."""
    absent: str = ""
    note: str = ""


def draw(chart: LineChart | BarChart) -> Markup:
    """Return a chart with its title, legend, note and table; without values, its title and a sentence."""
    if isinstance(chart, LineChart):
        points = [point for each in chart.series for point in (*each.points, *each.superseded)]
        content = [_legend(chart), _curves(chart), _figures(chart)] if any(y is not None for _, y in points) else []
    else:
        rows = [(name, number(value), extra) for name, value, extra in chart.bars]
        content = [Markup(), _bars(chart), table((chart.category, chart.value, chart.extra), rows)] if rows else []
    title = element("h3", chart.title)
    if not content:
        return element("section", title, element("p", chart.absent, class_="note"), class_="chart")
    legend, svg, figures = content
    note = element("p", chart.note, class_="note") if chart.note else ""
    details = element("details", element("summary", "Figures"), figures)
    return element("section", title, legend, svg, note, details, class_="chart")


def _legend(chart: LineChart) -> Markup:
    if len(chart.series) < 2:
        return Markup()
    items = []
    for index, each in enumerate(chart.series):
        line = element("path", d="M0 5H26", class_=f"curve s{index}")
        swatch = element("svg", line, width=26, height=10, viewBox="0 0 26 10", aria_hidden="true")
        items.append(element("li", swatch, element("span", each.name)))
    return element("ul", *items, class_="legend")


def _curves(chart: LineChart) -> Markup:
    limit = max(30, MAX_POINTS // max(1, sum(1 + bool(each.superseded) for each in chart.series)))
    drawn = [(thin(each.points, limit), thin(each.superseded, limit)) for each in chart.series]
    every = [point for parts in drawn for part in parts for point in part]
    across = axis((x for x, _ in every), _LEFT, _RIGHT, is_snug=True, is_whole=chart.x == "step", num_ticks=6)
    up = axis((y for _, y in every if y is not None), _BOTTOM, _TOP, from_zero=chart.from_zero)
    parts = _frame(up, chart.x, chart.y)
    for tick, text in zip(across.ticks, tick_texts(across.ticks), strict=True):
        parts.append(element("text", text, x=across.at(tick), y=_BOTTOM + 18, class_="middle"))
    for x in chart.marks[:100]:
        if across.low <= x <= across.high:
            parts.append(element("line", class_="mark", x1=across.at(x), x2=across.at(x), y1=_TOP, y2=_BOTTOM))
    for index, (points, superseded) in enumerate(drawn):
        parts.append(_curve(superseded, across, up, f"curve old s{index}"))
        parts.append(_curve(points, across, up, f"curve s{index}"))
        if len(points) <= _MAX_DOTS:
            dots = "".join(f"M{across.at(x):g} {up.at(y):g}h0" for x, y in points if y is not None)
            parts.append(element("path", d=dots, class_=f"dots s{index}"))
    parts.append(element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM))
    series = [
        {"name": each.name, "x": [_rounded(x) for x, _ in points], "y": [_rounded(y) for _, y in points]}
        for each, (points, _) in zip(chart.series, drawn, strict=True)
    ]
    place = {"low": across.low, "high": across.high, "begin": _LEFT, "end": _RIGHT}
    return _plot(
        parts, f"{chart.title}: {chart.y} by {chart.x}", json_script({"x": chart.x, **place, "series": series})
    )


def _bars(chart: BarChart) -> Markup:
    up = axis((value for _, value, _ in chart.bars), _BOTTOM, _TOP, from_zero=True)
    parts = _frame(up, chart.category, chart.value)
    room = (_RIGHT - _LEFT) / len(chart.bars)
    width = min(56.0, 0.8 * room)
    every = -(-len(chart.bars) * 30 // (_RIGHT - _LEFT))  # labels of 30 fit beside one another
    for index, (name, value, _) in enumerate(chart.bars):
        middle, top = round(_LEFT + (index + 0.5) * room, 1), up.at(value)
        size = {"x": round(middle - width / 2, 1), "width": round(width, 1), "height": round(_BOTTOM - top, 1)}
        tip = element("title", f"{name}: {number(value)}")
        parts.append(element("g", tip, element("rect", class_="bar", y=top, **size)))
        if len(chart.bars) <= _MAX_BAR_TEXTS:
            parts.append(element("text", number(value), x=middle, y=top - 4, class_="middle"))
        if index % every == 0:
            parts.append(element("text", name, x=middle, y=_BOTTOM + 18, class_="middle"))
    return _plot(parts, f"{chart.title}: {chart.value} by {chart.category}")


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


def _rounded(value: float | None) -> float | None:
    """Return the value with six digits; an integer in full."""
    return value if value is None or float(value).is_integer() else float(f"{value:.6g}")


def _figures(chart: LineChart) -> Markup:
    """Return the table of some points: a column for each series, or if their places differ, a row for each point."""
    places = [[x for x, _ in each.points] for each in chart.series]
    picked = [evenly(each.points, _TABLE_ROWS) for each in chart.series]
    header, rows = ("", chart.x, chart.y), list[tuple[object, ...]]()
    if all(each == places[0] for each in places):
        names = [each.name for each in chart.series] if len(chart.series) > 1 else [chart.y]
        columns = zip(*picked, strict=True)
        rows += [(number(row[0][0]), *(number(value) for _, value in row)) for row in columns]
        return table((chart.x, *names), rows)
    rows += [
        (each.name, number(x), number(y)) for each, some in zip(chart.series, picked, strict=True) for x, y in some
    ]
    return table(header, rows)


# -- points ------------------------------------------------------------------------------------------------------------


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` of the points, in their order. Of each run of neighbours it keeps the lowest, the highest
    and the first interruption; the first and the last point always remain. limit: at least 5."""
    assert limit >= 5
    if len(points) <= limit:
        return list(points)
    num_runs = (limit - 2) // 3
    kept = {0, len(points) - 1}
    for run in range(num_runs):
        begin, end = (len(points) * each // num_runs for each in (run, run + 1))
        values = [(value, index) for index in range(begin, end) if (value := points[index][1]) is not None]
        if values:
            kept |= {min(values)[1], max(values)[1]}
        if len(values) < end - begin:
            kept.add(next(index for index in range(begin, end) if points[index][1] is None))
    return [points[index] for index in sorted(kept)]


def evenly(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` of the points, evenly spaced in their order, with the first and the last; for tables."""
    if len(points) <= limit:
        return list(points)
    return [points[round(each * (len(points) - 1) / (limit - 1))] for each in range(limit)]


# -- axes and numbers --------------------------------------------------------------------------------------------------


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
    ticks = tuple(each * step for each in range(first, last + 1))
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
