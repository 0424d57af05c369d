"""The page of a report: one HTML file without any external resource, light or dark as the browser prefers. Pure.

Its Content-Security-Policy permits the style and the script of this package by their hashes and nothing else, so even a
text that was not escaped could neither run nor load anything.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from satrap.html_report import summary
from satrap.html_report.chart import MAX_POINTS, draw
from satrap.html_report.figures import charts_of
from satrap.html_report.markup import Markup, element
from satrap.html_report.run_records import RunRecords

_STYLE, _SCRIPT = (Path(__file__).with_name(f"page.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
_FOOTER = (
    f"satrap {version('satrap')}. A chart shows at most {MAX_POINTS:,} points: of a longer curve the lowest and the "
    "highest of each run of neighbours, so that no peak is lost. Its figures are values at some steps, or the last "
    "ones before. The files in records/ have all values."
)


def page(runs: Sequence[RunRecords], now: float) -> str:
    """Return the page about a run, or about two with different names. now: Unix time of the page."""
    is_alone = len(runs) == 1
    title = summary.title_of(runs[0]) if is_alone else " and ".join(run.name for run in runs)
    parts = [
        element("h1", title),
        element("p", f"This page was made by satrap report at {summary.time_text(now)} UTC.", class_="soft"),
        *(_state(run, now, "" if is_alone else run.name) for run in runs),
    ]
    for heading, charts in charts_of({"" if is_alone else run.name: run for run in runs}).items():
        if charts:
            parts += [element("h2", heading), element("div", *map(draw, charts), class_="charts")]
    if not is_alone:
        parts.append(draw(summary.differences(*runs)))
    for run in runs:
        of_run = "" if is_alone else f" of {run.name}"
        parts += [element("h2", f"Run{of_run}"), draw(summary.events(run))]
        parts += [element("h2", f"Settings and tables{of_run}"), *map(draw, summary.listings(run))]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(_STYLE)),
    )
    main = element("main", *parts, element("footer", element("p", _FOOTER)))
    body = element("body", main, element("script", Markup(_SCRIPT)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _state(run: RunRecords, now: float, name: str) -> Markup:
    kind, sentence = summary.state_of(run, now)
    notes = [element("li", note) for note in summary.warnings(run)]
    tiles = [
        element("div", element("dt", title), element("dd", value, element("small", remark)), class_="tile")
        for title, value, remark in summary.tiles(run)
    ]
    return element(
        "section",
        element("h2", name) if name else "",
        element("p", element("span", sentence, class_=f"state {kind}".strip())),
        element("ul", *notes, class_="warnings") if notes else "",
        element("dl", *tiles, class_="tiles"),
    )


def _policy() -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in (_STYLE, _SCRIPT))
    style, script = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    allowed = f"style-src {style}; script-src {script}; img-src data:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
