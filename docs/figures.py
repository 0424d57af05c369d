"""Draws the figures of README.md into docs/figures: the road of a batch, and the measured ratios of benchmarks/results.

`python docs/figures.py` writes them, and a test compares them. Each is a dark card, legible on a light and a dark page.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/figures"
INK, SOFT, CARD, PANEL, LINE = "#f2f5f9", "#a9b8c9", "#12202f", "#1d3146", "#3c5773"
ROWS, DENSE = "#f0a35e", "#6fb3f2"
"""The colours of what embeddings do and of what the dense network does."""


def text(x: float, y: float, words: str, colour: str = INK, size: int = 15, **attributes: str) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}"{more}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = PANEL, stroke: str = LINE) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" stroke="{stroke}"/>'


def arrow(path: str, colour: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5" marker-end="url(#{colour[1:]})"/>'


def picture(title: str, width: int, height: int, shapes: list[str]) -> str:
    heads = [
        f'<marker id="{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'
        for colour in (ROWS, DENSE)
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="Helvetica, Arial, sans-serif">',
        f"<title>{title}</title>",
        f"<defs>{''.join(heads)}</defs>",
        f'<rect width="{width}" height="{height}" rx="14" fill="{CARD}"/>',
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def road() -> str:
    """The road of a batch, with rows on servers."""
    stations = [
        (30, "Worker", "reads the data,", "looks ids up"),
        (300, "Servers", "own the rows:", "values, optimizer state"),
        (570, "Trainers", "run your script:", "forward, backward, step"),
    ]
    shapes: list[str] = []
    for x, name, *lines in stations:
        if name == "Servers":
            shapes += [box(x + shift, 60 - shift, 210, 120) for shift in (16, 8)]
        shapes.append(box(x, 60, 210, 120))
        shapes.append(text(x + 18, 95, name, size=20, font_weight="bold"))
        shapes += [text(x + 18, 125 + 24 * i, line, SOFT) for i, line in enumerate(lines)]
    shapes += [
        arrow("M240 105 H296", ROWS),
        arrow("M526 105 H566", ROWS),
        text(268, 92, "ids", ROWS, text_anchor="middle"),
        text(548, 92, "rows", ROWS, text_anchor="middle"),
        arrow("M640 182 C640 250 440 250 420 186", ROWS),
        text(530, 258, "gradients of rows: asynchronous,", ROWS, text_anchor="middle"),
        text(530, 278, "at most k steps late: the staleness", ROWS, text_anchor="middle"),
        arrow("M700 182 C715 222 745 222 752 186", DENSE),
        text(688, 258, "dense network:", DENSE),
        text(688, 278, "synchronous", DENSE),
        text(30, 258, "In one process all of this", SOFT),
        text(30, 278, "is the same objects.", SOFT),
    ]
    return picture("The road of a batch: workers, servers, trainers", 830, 300, shapes)


def ratios(lines: list[tuple[str, float, float]]) -> str:
    """lines: of each case its name, and the ratio on the worst and on the best processor."""
    left, right, top, step = 330, 760, 78, 34
    largest = max(best for _, _, best in lines) + 0.3
    height = top + step * len(lines) + 46
    bottom = height - 40

    def at(ratio: float) -> float:
        return left + (right - left) * ratio / largest

    shapes = [
        text(30, 36, "Speed on two CPU cores, as a multiple of the fastest peer", size=17, font_weight="bold"),
        text(30, 58, "from the worst to the best of three kinds of processor", SOFT, 14),
    ]
    for tick in range(int(largest) + 1):
        colour = SOFT if tick == 1 else LINE
        shapes.append(f'<path d="M{at(tick):.1f} {top - 8} V{bottom}" stroke="{colour}"/>')
        shapes.append(text(at(tick), bottom + 20, f"{tick}x", SOFT, 13, text_anchor="middle"))
    for number, (name, worst, best) in enumerate(lines):
        y = top + step * number
        shapes.append(text(left - 12, y + 17, name, text_anchor="end"))
        shapes.append(box(at(worst), y + 4, max(at(best) - at(worst), 4), 16, ROWS, ROWS))
        label = f"{worst:.1f}" if f"{worst:.1f}" == f"{best:.1f}" else f"{worst:.1f} to {best:.1f}"
        shapes.append(text(at(best) + 8, y + 17, label, size=14))
    return picture("Measured ratios", 830, height, shapes)


def figures() -> dict[str, str]:
    """Return the figures by the names of their files."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.ranges import medians

    cases = {
        "table 20M x 64, Adagrad": "train/20Mx64/adagrad/zipf/2t",
        "table 20M x 16, Adagrad": "train/20Mx16/adagrad/zipf/2t",
        "table 20M x 16, row-wise Adagrad": "train/20Mx16/rowwise/zipf/2t",
        "whole step of a DLRM, light, bf16": "train/20Mx16/light/bf16/adagrad/2t",
        "whole step of a DLRM, light, fp32": "train/20Mx16/light/fp32/adagrad/2t",
        "whole step of a DLRM, heavy, fp32": "train/20Mx16/heavy/fp32/adagrad/2t",
    }
    found = {name: medians(case) for name, case in cases.items()}
    lines = [(name, min(each), max(each)) for name, each in found.items()]
    return {"road.svg": road(), "ratios.svg": ratios(lines)}


if __name__ == "__main__":
    for name, content in figures().items():
        (FOLDER / name).write_text(content)
