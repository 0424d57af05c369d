"""Plots as SVG that need no text beside them: axes with units, each curve labelled where it ends. Pure.

A plot has `class` attributes instead of colours: the page's style gives them, light or dark. `standalone` adds a style
for a plot that is a file. Measured curves are solid, simulated and computed ones dashed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from satrap.html_report.markup import Markup, element

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 560, 320, 64, 34, 268
LABELS = 164
"""Room for the labels to the right of the curves."""
_LIGHT = "--back: #fff; --text: #1c1e21; --soft: #5b626b; --grid: #e3e6ea; "
_LIGHT += "--c0: #0067a8; --c1: #c4500a; --c2: #00845f; --c3: #a8448a; --c4: #8f6d00; --c5: #3b3f99; "
_DARK = "--back: #14171a; --text: #e7e9ec; --soft: #a3abb5; --grid: #2a3037; "
_DARK += "--c0: #5cb8f2; --c1: #f28e4b; --c2: #3fcf9f; --c3: #e691c8; --c4: #e3c34f; --c5: #a6abf5; "
COLOURS = f":root {{ {_LIGHT}}} @media (prefers-color-scheme: dark) {{ :root {{ {_DARK}}} }}"
"""The colours of a page, or of a plot that is a file."""
SHAPES = """
svg text { fill: var(--soft); font: 12.5px system-ui, "DejaVu Sans", sans-serif; }
svg .title, svg .head { fill: var(--text); } svg .head { font-weight: 600; }
svg .end { text-anchor: end; } svg .middle { text-anchor: middle; }
.grid { stroke: var(--grid); } .base { stroke: var(--soft); }
.line { fill: none; stroke: currentColor; stroke-width: 2; }
.line.dashed { stroke-dasharray: 6 4; } .line.faint { opacity: .45; }
.band { fill: currentColor; opacity: .15; } .dot, .bar { fill: currentColor; }
.whisker { stroke: var(--text); stroke-width: 1.5; }
.k0 { color: var(--c0); } .k1 { color: var(--c1); } .k2 { color: var(--c2); }
.k3 { color: var(--c3); } .k4 { color: var(--c4); } .k5 { color: var(--c5); }
svg text.label { fill: currentColor; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve."""

    name: str
    """Its label; "" has none."""
    points: Sequence[tuple[float, float]]
    colour: int = 0
    is_dashed: bool = False
    """Simulated or computed."""
    is_faint: bool = False
    band: Sequence[tuple[float, float]] = ()
    """The low and the high end of the interval of each point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over two axes."""

    title: str
    x: str
    """What the axis shows, with its unit."""
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = ()
    low: float | None = None
    """The lowest value shown; what is lower is drawn at it."""
    slug: str = ""
    """The name of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar for each category, with its interval."""

    title: str
    value: str
    """What the length shows, with its unit."""
    bars: Sequence[tuple[str, float, float, float]]
    """Name, value, low and high end of its interval."""
    text: Callable[[float], str] = "{:.4g}".format
    low: float = 0.0
    slug: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A table of coloured fields: blue for a gain, orange for a loss, as strong as `full` at most."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]
    full: float
    text: Callable[[float], str] = "{:+.1f}".format
    note: str = ""
    slug: str = ""


Plot = Chart | Bars | HeatMap


def draw(plot: Plot) -> Markup:
    """Return a plot as an SVG element."""
    made = {Chart: _chart, Bars: _bars, HeatMap: _heat_map}[type(plot)](plot)  # type: ignore[operator]
    parts, height = made
    title = element("text", plot.title, x=4, y=16, class_="head")
    size = {"viewBox": f"0 0 {WIDTH} {height}", "role": "img", "aria_label": plot.title}
    return element("svg", title, *parts, xmlns="http://www.w3.org/2000/svg", **size)


def standalone(plot: Plot) -> str:
    """Return a plot as a file."""
    svg = draw(plot)
    end = svg.index(">") + 1
    return f"{svg[:end]}<style>{COLOURS}svg {{ background: var(--back); }}{SHAPES}</style>{svg[end:]}\n"


def short(value: float) -> str:
    """Return a number of an axis as text."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, held = self.low, self.high, max(value, self.low)
        if self.is_log:
            low, high, held = math.log10(low), math.log10(high), math.log10(held)
        return round(self.begin + (held - low) / (high - low) * (self.end - self.begin), 1)


def _scale(values: Sequence[float], begin: float, end: float, *, is_log: bool, ticks: Sequence[float] = ()) -> _Scale:
    low, high = min(values), max(values)
    if is_log:
        if ticks:
            return _Scale(min(low, *ticks), max(high, *ticks), begin, end, tuple(ticks), True)
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        last = max(last, first + 1)
        return _Scale(10.0**first, 10.0**last, begin, end, tuple(10.0**power for power in range(first, last + 1)), True)
    if ticks:
        return _Scale(min(low, *ticks), max(high, *ticks), begin, end, tuple(ticks))
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-9) / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), max(math.ceil(high / step - 1e-9), math.floor(low / step) + 1)
    return _Scale(first * step, last * step, begin, end, tuple(round(n * step, 10) for n in range(first, last + 1)))


def _chart(chart: Chart) -> tuple[list[Markup], int]:
    right = WIDTH - LABELS
    points = [point for line in chart.lines for point in line.points]
    heights = [y for _, y in points] + [end for line in chart.lines for ends in line.band for end in ends]
    if chart.low is not None:
        heights = [max(y, chart.low) for y in heights]
    across = _scale([x for x, _ in points], LEFT, right, is_log=chart.log_x, ticks=chart.x_ticks)
    up = _scale(heights, BOTTOM, TOP + 22, is_log=chart.log_y)
    parts = [element("text", chart.y, x=4, y=TOP + 4, class_="title")]
    for tick in up.ticks:
        y = up.at(tick)
        parts += [element("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"),
                  element("text", short(tick), x=LEFT - 7, y=y + 4, class_="end")]  # fmt: skip
    for tick in across.ticks:
        parts.append(element("text", short(tick), x=across.at(tick), y=BOTTOM + 18, class_="middle"))
    parts += [element("line", x1=LEFT, x2=right, y1=BOTTOM, y2=BOTTOM, class_="base"),
              element("text", chart.x, x=(LEFT + right) / 2, y=BOTTOM + 40, class_="middle title")]  # fmt: skip
    for line in chart.lines:
        parts += _line(line, across, up)
    return parts + _labels(chart.lines, across, up, right), HEIGHT


def _line(line: Line, across: _Scale, up: _Scale) -> list[Markup]:
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    colour, parts = f"k{line.colour}", list[Markup]()
    if line.band:
        ends = [(across.at(x), up.at(end)) for (x, _), (_, end) in zip(line.points, line.band, strict=True)]
        back = [(across.at(x), up.at(end)) for (x, _), (end, _) in zip(line.points, line.band, strict=True)]
        parts.append(element("path", d=f"M{_path([*ends, *reversed(back)])}Z", class_=f"band {colour}"))
    style = " ".join(["line", colour, *(["dashed"] * line.is_dashed), *(["faint"] * line.is_faint)])
    parts.append(element("path", d=f"M{_path(places)}", class_=style))
    if not line.is_faint:
        parts += [element("circle", cx=x, cy=y, r=3, class_=f"dot {colour}") for x, y in places]
    return parts


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:g} {y:g}" for x, y in places)


def _labels(lines: Sequence[Line], across: _Scale, up: _Scale, right: float) -> list[Markup]:
    """Return the labels of the curves at their ends, moved apart where they would overlap."""
    ends = sorted((up.at(line.points[-1][1]), number) for number, line in enumerate(lines) if line.name)
    places, last = list[float](), TOP + 4.0
    for y, _ in ends:
        last = max(y, last + 14)
        places.append(last)
    overhang = max(0.0, last - BOTTOM) if places else 0.0
    for at in range(len(places) - 1, -1, -1):  # those below the axis move up, and push the others
        limit = BOTTOM if at == len(places) - 1 else places[at + 1] - 14
        places[at] = min(places[at], limit) if overhang else places[at]
    parts = []
    for place, (y, number) in zip(places, ends, strict=True):
        line = lines[number]
        begin = across.at(line.points[-1][0])
        parts.append(
            element("path", d=f"M{begin + 4:g} {y:g}L{right + 6:g} {place:g}", class_=f"line faint k{line.colour}")
        )
        parts.append(element("text", line.name, x=right + 9, y=place + 4, class_=f"label k{line.colour}"))
    return parts


def _bars(plot: Bars) -> tuple[list[Markup], int]:
    left, right, row = 190, WIDTH - 90, 26
    scale = _scale(
        [plot.low, *(high for *_, high in plot.bars), *(low for _, _, low, _ in plot.bars)], left, right, is_log=False
    )
    bottom = TOP + 20 + row * len(plot.bars)
    parts = []
    for tick in scale.ticks:
        x = scale.at(tick)
        parts += [element("line", x1=x, x2=x, y1=TOP + 8, y2=bottom, class_="grid"),
                  element("text", short(tick), x=x, y=bottom + 16, class_="middle")]  # fmt: skip
    zero = scale.at(max(scale.low, min(0.0, scale.high)))
    for number, (name, value, low, high) in enumerate(plot.bars):
        y, end = TOP + 14 + row * number, scale.at(value)
        parts += [element("text", name, x=left - 8, y=y + 13, class_="end title"),
                  element("rect", x=min(zero, end), y=y, width=abs(end - zero), height=row - 9, class_="bar k0"),
                  element("line", x1=scale.at(low), x2=scale.at(high), y1=y + 8.5, y2=y + 8.5, class_="whisker"),
                  element("text", plot.text(value), x=max(end, scale.at(high), zero) + 7, y=y + 13)]  # fmt: skip
    parts += [element("line", x1=zero, x2=zero, y1=TOP + 8, y2=bottom, class_="base"),
              element("text", plot.value, x=(left + right) / 2, y=bottom + 34, class_="middle title")]  # fmt: skip
    return parts, bottom + 44


def _heat_map(plot: HeatMap) -> tuple[list[Markup], int]:
    left, top, row = 190, TOP + 34, 24
    width = (WIDTH - left - 6) / len(plot.columns)
    parts = [element("text", plot.note, x=4, y=TOP + 2, class_="title")]
    for number, name in enumerate(plot.columns):
        parts.append(element("text", name, x=left + (number + 0.5) * width, y=top - 6, class_="middle"))
    for at, (name, values) in enumerate(plot.rows):
        y = top + at * row
        parts.append(element("text", name, x=left - 8, y=y + 16, class_="end"))
        for number, value in enumerate(values):
            strength = round(min(1.0, abs(value) / plot.full), 2)
            place = {"x": round(left + number * width, 1), "y": y, "width": round(width - 2, 1), "height": row - 2}
            colour, middle = "k0" if value >= 0 else "k1", left + (number + 0.5) * width
            parts.append(element("rect", **place, fill_opacity=strength, class_=f"bar {colour}"))
            parts.append(element("text", plot.text(value), x=middle, y=y + 15, class_="middle title"))
    return parts, top + row * len(plot.rows) + 10
