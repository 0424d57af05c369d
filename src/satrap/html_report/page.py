"""The page of a report: one HTML file without any external resource, light or dark as the browser prefers. Pure.

Its Content-Security-Policy permits the style and the script of this package by their hashes and nothing else, so even a
text that was not escaped could neither run nor load anything.
"""

import base64
import hashlib
from importlib.metadata import version
from pathlib import Path

from satrap.html_report import summary
from satrap.html_report.chart import MAX_POINTS, draw
from satrap.html_report.figures import charts_of
from satrap.html_report.markup import Markup, element, join, table
from satrap.html_report.run_records import RunRecords
from satrap.html_report.summary import Listing, Tile

_STYLE, _SCRIPT = (Path(__file__).with_name(f"page.{end}").read_text(encoding="utf-8") for end in ("css", "js"))


def page(run: RunRecords, now: float, other: RunRecords | None = None) -> str:
    """Return the page about a run, or about two. now: Unix time of the page."""
    runs = [run] if other is None else [run, other]
    charts = charts_of(runs)
    small = [chart for chart in charts if chart.is_small]
    title = summary.title_of(run) if other is None else f"{run.name} and {other.name}"
    main = element(
        "main",
        element("h1", title),
        element("p", f"This page was made by satrap report at {summary.time_text(now)} UTC.", class_="soft"),
        *(_state(run, now, names=other is not None) for run in runs),
        element("h2", "Training"),
        element("div", *(draw(chart) for chart in charts if chart not in small), class_="charts"),
        element("h2", "Numbers of the script") if small else "",
        element("div", *map(draw, small), class_="charts small"),
        _listing(summary.differences(run, other)) if other is not None else "",
        *(_details(run, f" of {run.name}" if other is not None else "") for run in runs),
        _footer(),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(_STYLE)),
    )
    body = element("body", main, element("script", Markup(_SCRIPT)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _state(run: RunRecords, now: float, *, names: bool) -> Markup:
    kind, sentence = summary.state_of(run, now)
    notes = [element("li", note) for note in summary.warnings(run)]
    return element(
        "section",
        element("h2", run.name) if names else "",
        element("p", element("span", sentence, class_=f"state {kind}".strip())),
        element("ul", *notes, class_="warnings") if notes else "",
        element("dl", *map(_tile, summary.tiles(run)), class_="tiles"),
    )


def _details(run: RunRecords, of_run: str) -> Markup:
    heads = [element("h2", f"{what}{of_run}") for what in ("Run", "Settings and tables")]
    return join([heads[0], _listing(summary.events(run)), heads[1], *map(_listing, summary.listings(run))])


def _policy() -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in (_STYLE, _SCRIPT))
    style, script = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    allowed = f"style-src {style}; script-src {script}; img-src data:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _tile(tile: Tile) -> Markup:
    more = element("small", tile.more) if tile.more else ""
    return element("div", element("dt", tile.name), element("dd", tile.value, more), class_="tile")


def _listing(listing: Listing) -> Markup:
    note = element("p", listing.note, class_="note") if listing.note else ""
    rows = table(listing.header, listing.rows, listing.style) if listing.rows else ""
    return element("section", element("h3", listing.title), note, rows, class_="listing")


def _footer() -> Markup:
    text = (
        f"satrap {version('satrap')}. A chart shows at most {MAX_POINTS:,} "
        "points: of a longer curve the lowest and the highest of each run of neighbours, so that no "
        "peak is lost. Its figures are values at even distances. The files in records/ have all values."
    )
    return element("footer", element("p", text))
