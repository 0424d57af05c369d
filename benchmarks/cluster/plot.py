"""The plot of the kind `network`: `python -m benchmarks.cluster.plot <results> <out.svg>`.

It shows samples/s over those of staleness 0, by staleness, with a colour for each network and a panel for each dim.
Points are medians with their range over the rounds, dashed lines are predictions. SVG is written directly: a few shapes
need no library.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.cluster.prediction import ASYNC

COLOURS = ("#1b6ca8", "#d1495b", "#3c8d5a", "#8d5a97")
WIDTH, HEIGHT = 380, 300  # of a panel
LEFT, TOP, RIGHT, BOTTOM = 46, 34, 14, 44
LEGEND = 26
SPACING = 9  # between the points of two networks
Record = Mapping[str, Any]


def read_records(path: Path) -> list[Record]:
    """Return the newest record of each case, by dim."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    newest = {record["case"]: record for record in lines if record.get("kind") == "network"}
    return sorted(newest.values(), key=lambda record: int(record["dim"]))


def draw(records: Sequence[Record]) -> str:
    """Return the plot as SVG."""
    names = list(dict.fromkeys(name for record in records for name in record["networks"]))
    highs = [value for record in records for value in values_of(record)]
    top = max(2, math.ceil(2 * max(highs, default=1)) / 2)
    width, height = WIDTH * max(1, len(records)), HEIGHT + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, record in enumerate(records):
        parts += [f'<g transform="translate({WIDTH * number} 0)">', *panel(record, names, top), "</g>"]
    for number, name in enumerate(names):
        x = LEFT + 130 * number
        parts.append(f'<circle cx="{x}" cy="{HEIGHT + 8}" r="4" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(text(x + 8, HEIGHT + 12, name.replace("gbit-", " Gbit/s, ").replace("ms", " ms"), "start"))
    parts.append(text(LEFT + 130 * len(names), HEIGHT + 12, "dashed: predicted", "start"))
    return "\n".join([*parts, "</svg>", ""])


def values_of(record: Record) -> Iterator[float]:
    """Yield every value that a panel must have room for."""
    for network in record["networks"].values():
        for ratio in network["ratio"].values():
            yield ratio["high"] or 0
        for predicted in network["predicted_ratio"].values():
            yield predicted["median"] or 0


def panel(record: Record, names: Sequence[str], top: float) -> Iterator[str]:
    """Yield the panel of one dim: the axes, and the lines and points of each network."""
    modes = list(dict.fromkeys(mode for network in record["networks"].values() for mode in network["ratio"]))
    step = (WIDTH - LEFT - RIGHT) / max(1, len(modes))
    x_of = {mode: LEFT + step * (number + 0.5) for number, mode in enumerate(modes)}
    bottom = HEIGHT - BOTTOM

    def y_of(value: float) -> float:
        return bottom - (bottom - TOP) * value / top

    yield text(LEFT, TOP - 14, f"dim {record['dim']}: times the samples/s of staleness 0", "start")
    for tick in range(math.floor(top) + 1):
        y = y_of(tick)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
        yield text(LEFT - 6, y + 4, str(tick), "end")
    for mode in modes:
        yield text(x_of[mode], bottom + 16, "all async" if mode == ASYNC else mode, "middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, "staleness", "middle")
    for number, name in enumerate(names):
        if (network := record["networks"].get(name)) is None:
            continue
        colour, offset = COLOURS[number % len(COLOURS)], SPACING * (number - (len(names) - 1) / 2)
        predicted = [(mode, network["predicted_ratio"][mode]["median"]) for mode in modes]
        points = " ".join(
            f"{x_of[mode] + offset:.1f},{y_of(value):.1f}" for mode, value in predicted if value is not None
        )
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-dasharray="4 3" opacity="0.7"/>'
        for mode in modes:
            yield from point(network["ratio"][mode], x_of[mode] + offset, y_of, colour, f"{name}, {mode}")


def point(ratio: Mapping[str, Any], x: float, y_of: Any, colour: str, title: str) -> Iterator[str]:
    """Yield a median with its range."""
    if ratio["median"] is None:
        return
    low, high = y_of(ratio["low"]), y_of(ratio["high"])
    yield f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}" stroke-width="1.5"/>'
    yield f'<circle class="measured" cx="{x:.1f}" cy="{y_of(ratio["median"]):.1f}" r="4" fill="{colour}">'
    yield f"<title>{escape(title)}: {ratio['median']:g}</title></circle>"


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.plot", description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON lines of `python -m benchmarks.cluster`")
    parser.add_argument("out", type=Path, help="the SVG file")
    options = parser.parse_args(arguments)
    if not (records := read_records(options.results)):
        print(f"{options.results} has no line of the kind network; record one with --case network", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(draw(records))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
