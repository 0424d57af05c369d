"""The pages: one self-contained HTML file, and a Markdown page with its plots as files. Pure.

A figure in the text is a `Claim`, which knows its line of the record; in the HTML page it is a `data` element that
names cell and field, so every number can be traced and a test compares all of them with the record.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.cell import Figures
from benchmarks.paper.plot import COLOURS, SHAPES, Plot, draw, standalone
from satrap.html_report.markup import Markup, element, escape, table

CLAIM = re.compile(r"<([^<>#]+)#([^<>|]+)\|([^<>]*)>")
INTRO = (
    "This page repeats the experiments of the paper Persia (arXiv 2111.05897) at a size that two cores can carry. "
    "`python -m benchmarks.paper` measures them and writes this page. Solid curves are measured, dashed ones are "
    "simulated or computed. "
)
PAGE = """
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.55 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; } h2 { font-size: 20px; margin: 44px 0 8px; } p { max-width: 76ch; margin: 8px 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 18px; }
.plots > div { overflow-x: auto; border: 1px solid var(--grid); border-radius: 8px; padding: 10px; }
.plots svg { display: block; width: 100%; min-width: 440px; height: auto; }
.kind { color: var(--soft); font-size: 13px; } data { border-bottom: 1px dotted var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; margin: 10px 0; }
td, th { text-align: left; padding: 3px 18px 3px 0; border-bottom: 1px solid var(--grid); }
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure of the record, as the text shows it."""

    cell: str
    field: str
    """Its path in the line's figures: "difference.mean"."""
    value: Any
    text: str
    kind: str


Text = Sequence[str | Claim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """An experiment on the page."""

    title: str
    kind: str
    """Whether its figures were measured, simulated or computed."""
    paragraphs: Sequence[Text]
    plots: Sequence[Plot] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default=())


class Record:
    """The lines of a record by cell."""

    def __init__(self, lines: Mapping[str, Figures]) -> None:
        self.lines = lines

    def figures(self, cell: str) -> Figures | None:
        """Return the figures of a cell, None if it was not run."""
        return self.lines.get(cell, {}).get("figures") or None

    def below(self, prefix: str) -> dict[str, Figures]:
        """Return the figures of all cells whose names begin so, by the rest of their names."""
        return {
            name.removeprefix(prefix): line["figures"]
            for name, line in self.lines.items()
            if name.startswith(prefix) and line["figures"]
        }

    def text(self, template: str) -> Text:
        """Return a text with its claims: <cell#path|format> is a figure of the record."""
        parts = CLAIM.split(template)
        made: list[str | Claim] = [parts[0]]
        for cell, path, form, plain in zip(*(parts[at::4] for at in (1, 2, 3, 4)), strict=True):
            value = look_up(self.lines[cell]["figures"], path)
            made += [Claim(cell, path, value, f"{value:{form}}", self.lines[cell]["kind"]), plain]
        return made


def look_up(figures: Any, path: str) -> Any:
    """Return the value at a path of names and numbers with dots between them."""
    for name in path.split("."):
        figures = figures[int(name)] if isinstance(figures, list) else figures[name]
    return figures


def html(record: Record, sections: Sequence[Section]) -> str:
    """Return the page as one file without any other."""
    head = element(
        "head", element("meta", charset="utf-8"), element("title", "Persia's experiments, repeated"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"), element("meta", name="color-scheme", content="light dark"),
        element("style", Markup(COLOURS + SHAPES + PAGE)),
    )  # fmt: skip
    body = [element("h1", "Persia's experiments, repeated"), element("p", INTRO.replace("`", ""), origin(record))]
    for section in sections:
        body += [element("h2", section.title), element("p", f"Figures: {section.kind}.", class_="kind")]
        body += [element("p", *map(_shown, text)) for text in section.paragraphs]
        body.append(element("div", *(element("div", draw(plot)) for plot in section.plots), class_="plots"))
        if section.rows:
            body.append(table(section.header, section.rows))
    return f"<!doctype html>\n{element('html', head, element('body', element('main', *body)), lang='en')}\n"


def _shown(part: str | Claim) -> Markup:
    if isinstance(part, str):
        return escape(part.replace("`", ""))
    source = f"{part.cell}#{part.field}"
    return element("data", part.text, value=json.dumps(part.value), title=f"{part.kind}: {source}", data_source=source)


def markdown(record: Record, sections: Sequence[Section], folder: str = "../figures") -> str:
    """Return the page of the documentation. folder: where its plots are."""
    parts = [
        "# Persia's experiments, repeated",
        "<!-- made by python -m benchmarks.paper --docs -->",
        INTRO + origin(record),
    ]
    for section in sections:
        parts += [f"## {section.title}", f"*Figures: {section.kind}.*"]
        parts += ["".join(part if isinstance(part, str) else part.text for part in text) for text in section.paragraphs]
        parts += [f"![{plot.title}]({folder}/paper-{plot.slug}.svg)" for plot in section.plots]
        if section.rows:
            rows = [section.header, ["---"] * len(section.header), *section.rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts) + "\n"


def files(sections: Sequence[Section]) -> dict[str, str]:
    """Return the plots as files by name."""
    return {f"paper-{plot.slug}.svg": standalone(plot) for section in sections for plot in section.plots}


def origin(record: Record) -> str:
    """Return where the figures come from, in a sentence."""
    lines = record.lines.values()
    days = sorted({line["date"][:10] for line in lines})
    loads = [line["load"] for line in lines]
    if not days:
        return "No experiment has run yet."
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    cpus = " and ".join(sorted({f"{line['machine']['cpu']}, {line['machine']['cores']} cores" for line in lines}))
    shared = " Other work ran beside it, so its times are provisional." if max(loads) > 3 else ""
    return f"Run on {when} on {cpus}; load average {min(loads):.1f} to {max(loads):.1f}.{shared}"
