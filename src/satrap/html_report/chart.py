"""Charts as SVG with the table of their figures. Pure: values in, markup out; the page's style has the colours.

A chart is 560 wide and is scaled to its column. Colours and dashes of series are those of the classes s0 to s5; the
data for the tooltip is a JSON block behind the SVG.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from satrap.html_report.axis import Axis, axis, number, tick_texts
from satrap.html_report.markup import Markup, element, json_script, table
from satrap.html_report.thinning import Point, evenly, thin

MAX_SERIES = 6
MAX_POINTS = 1000
"""Points of all curves of a chart."""
_TABLE_ROWS = 12
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 560, 62, 546, 36, 242, 284
_MAX_DOTS = 40
_BAR_ROW, _BAR_LEFT, _BAR_RIGHT = 30, 90, 450


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
    from_zero: bool = False
    marks: list[float] = field(default_factory=list)
    """Places on the horizontal axis where a launch started."""
    note: str = ""

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return any(value is not None for each in self.series for _, value in (*each.points, *each.superseded))


@dataclass(slots=True, kw_only=True)
class BarChart:
    """One bar for each of some categories."""

    title: str
    category: str
    value: str
    """What a bar's length is, with its unit."""
    bars: list[tuple[str, float]]
    columns: tuple[str, ...] = ()
    """Headers of further columns of the table."""
    more: list[tuple[object, ...]] = field(default_factory=list)
    """Their values."""
    is_vertical: bool = False
    note: str = ""

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.bars)


def draw(chart: LineChart | BarChart) -> Markup:
    """Return a chart with its title, legend, note and table."""
    title = element("h3", chart.title)
    note = element("p", chart.note, class_="note") if chart.note else ""
    if isinstance(chart, LineChart):
        parts = [_legend(chart), _line_svg(chart), note, _details(_line_table(chart))]
    else:
        svg = _vertical_svg(chart) if chart.is_vertical else _horizontal_svg(chart)
        rows = [
            (name, number(value), *rest)
            for (name, value), rest in zip(chart.bars, chart.more or [()] * len(chart.bars), strict=True)
        ]
        parts = [svg, note, _details(table((chart.category, chart.value, *chart.columns), rows))]
    return element("section", title, *parts, class_="chart")


def _details(content: Markup) -> Markup:
    return element("details", element("summary", "Figures"), content)


def _legend(chart: LineChart) -> Markup:
    if len(chart.series) < 2:
        return Markup("")
    items = [element("li", _swatch(index), element("span", each.name)) for index, each in enumerate(chart.series)]
    return element("ul", *items, class_="legend")


def _swatch(index: int) -> Markup:
    line = element("path", d="M0 5H26", class_=f"curve s{index}")
    return element("svg", line, width=26, height=10, viewBox="0 0 26 10", aria_hidden="true")


# -- curves ------------------------------------------------------------------------------------------------------------


def _line_svg(chart: LineChart) -> Markup:
    limit = max(30, MAX_POINTS // max(1, sum(1 + bool(each.superseded) for each in chart.series)))
    drawn = [(thin(each.points, limit), thin(each.superseded, limit)) for each in chart.series]
    every = [point for parts in drawn for part in parts for point in part]
    across = axis((x for x, _ in every), _LEFT, _RIGHT, is_snug=True, is_whole=chart.x == "step", num_ticks=6)
    up = axis((y for _, y in every if y is not None), _BOTTOM, _TOP, from_zero=chart.from_zero)
    parts = [_grid(across, up, chart.x, chart.y)]
    parts += [
        element("line", class_="mark", x1=across.at(x), x2=across.at(x), y1=_TOP, y2=_BOTTOM)
        for x in chart.marks[:100]
        if across.low <= x <= across.high
    ]
    for index, (points, superseded) in enumerate(drawn):
        parts.append(_curve(superseded, across, up, f"curve old s{index}"))
        parts.append(_curve(points, across, up, f"curve s{index}"))
        if len(points) <= _MAX_DOTS:
            parts.append(_dots(points, across, up, f"dots s{index}"))
    parts.append(element("line", class_="cursor", x1=0, x2=0, y1=_TOP, y2=_BOTTOM))
    svg = element(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"{chart.title}: {chart.y} by {chart.x}",
    )
    data = {
        "x": chart.x,
        "low": across.low,
        "high": across.high,
        "begin": _LEFT,
        "end": _RIGHT,
        "series": [
            {"name": each.name, "x": [_rounded(x) for x, _ in points], "y": [_rounded(y) for _, y in points]}
            for each, (points, _) in zip(chart.series, drawn, strict=True)
        ],
    }
    return element("div", svg, json_script(data), class_="plot")


def _grid(across: Axis, up: Axis, x: str, y: str) -> Markup:
    parts: list[Markup] = []
    for tick, text in zip(up.ticks, tick_texts(up.ticks), strict=True):
        at = up.at(tick)
        parts.append(element("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=at, y2=at))
        parts.append(element("text", text, x=_LEFT - 7, y=at + 4, class_="end"))
    for tick, text in zip(across.ticks, tick_texts(across.ticks), strict=True):
        parts.append(element("text", text, x=across.at(tick), y=_BOTTOM + 18, class_="middle"))
    parts.append(element("line", class_="base", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM))
    parts.append(element("text", y, x=4, y=15, class_="title"))
    parts.append(element("text", x, x=(_LEFT + _RIGHT) / 2, y=_BOTTOM + 38, class_="middle title"))
    return element("g", *parts)


def _curve(points: Sequence[Point], across: Axis, up: Axis, style: str) -> Markup:
    steps, is_down = [], False
    for x, y in points:
        if y is not None:
            steps.append(f"{'L' if is_down else 'M'}{across.at(x):g} {up.at(y):g}")
        is_down = y is not None
    return element("path", d="".join(steps), class_=style) if len(steps) > 1 else Markup("")


def _dots(points: Sequence[Point], across: Axis, up: Axis, style: str) -> Markup:
    d = "".join(f"M{across.at(x):g} {up.at(y):g}h0" for x, y in points if y is not None)
    return element("path", d=d, class_=style)


def _rounded(value: float | None) -> float | None:
    """Return the value with six digits; an integer in full."""
    return value if value is None or float(value).is_integer() else float(f"{value:.6g}")


def _line_table(chart: LineChart) -> Markup:
    places = [[x for x, _ in each.points] for each in chart.series]
    header: tuple[str, ...]
    if all(each == places[0] for each in places):
        header = (chart.x, *(each.name for each in chart.series))
        picked = [evenly(each.points, _TABLE_ROWS) for each in chart.series]
        rows: list[tuple[object, ...]] = [
            (number(x), *(number(points[row][1]) for points in picked)) for row, (x, _) in enumerate(picked[0])
        ]
    else:
        header = ("", chart.x, chart.y)
        rows = [(each.name, number(x), number(y)) for each in chart.series for x, y in evenly(each.points, _TABLE_ROWS)]
    if len(chart.series) == 1:
        header = (chart.x, chart.y)
    return table(header, rows)


# -- bars --------------------------------------------------------------------------------------------------------------


def _vertical_svg(chart: BarChart) -> Markup:
    up = axis((value for _, value in chart.bars), _BOTTOM, _TOP, from_zero=True)
    parts: list[Markup] = []
    for tick, text in zip(up.ticks, tick_texts(up.ticks), strict=True):
        parts.append(element("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=up.at(tick), y2=up.at(tick)))
        parts.append(element("text", text, x=_LEFT - 7, y=up.at(tick) + 4, class_="end"))
    room = (_RIGHT - _LEFT) / len(chart.bars)
    width = min(56.0, 0.8 * room)
    every = -(-len(chart.bars) * 30 // (_RIGHT - _LEFT))  # labels of 30 fit beside one another
    for index, (name, value) in enumerate(chart.bars):
        middle = _LEFT + (index + 0.5) * room
        top = up.at(value)
        tip = element("title", f"{name}: {number(value)}")
        size = {
            "x": round(middle - width / 2, 1),
            "y": top,
            "width": round(width, 1),
            "height": round(_BOTTOM - top, 1),
        }
        parts.append(element("g", tip, element("rect", class_="bar", **size)))
        if index % every == 0:
            parts.append(element("text", name, x=round(middle, 1), y=_BOTTOM + 18, class_="middle"))
    parts.append(element("line", class_="base", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM))
    parts.append(element("text", chart.value, x=4, y=15, class_="title"))
    parts.append(element("text", chart.category, x=(_LEFT + _RIGHT) / 2, y=_BOTTOM + 38, class_="middle title"))
    return _framed(parts, _HEIGHT, chart)


def _horizontal_svg(chart: BarChart) -> Markup:
    longest = max((value for _, value in chart.bars), default=0.0) or 1.0
    parts: list[Markup] = [element("text", chart.value, x=_BAR_LEFT, y=15, class_="title")]
    for index, (name, value) in enumerate(chart.bars):
        y = 28 + index * _BAR_ROW
        width = round((_BAR_RIGHT - _BAR_LEFT) * value / longest, 1)
        parts.append(element("text", name, x=_BAR_LEFT - 8, y=y + 14, class_="end"))
        parts.append(element("rect", class_="bar", x=_BAR_LEFT, y=y, width=width, height=_BAR_ROW - 10))
        parts.append(element("text", number(value), x=_BAR_LEFT + width + 7, y=y + 14))
    bottom = 28 + len(chart.bars) * _BAR_ROW
    parts.append(element("line", class_="base", x1=_BAR_LEFT, x2=_BAR_LEFT, y1=22, y2=bottom - 4))
    return _framed(parts, bottom + 4, chart)


def _framed(parts: Sequence[Markup], height: int, chart: BarChart) -> Markup:
    label = f"{chart.title}: {chart.value} by {chart.category}"
    svg = element("svg", *parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=label)
    return element("div", svg, class_="plot")
