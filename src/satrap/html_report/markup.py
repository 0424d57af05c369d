"""HTML and SVG by construction: `element` escapes every text that is not `Markup`, so no name or setting of a user can
become part of the page's structure.
"""

import html
import json
import re
from collections.abc import Iterable
from typing import Any

_VOID = {"meta", "link", "br", "line", "path", "rect", "polyline", "circle"}
# What XML and HTML cannot hold: controls but tab and line breaks, surrogates, and two code points that stand for none.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff￾￿]")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Return the text as HTML that shows it."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text)), quote=True))


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Return an element. Attributes that are None are left out; `_` in their names stands for `-`, and one at the end
    is dropped (`class_`)."""
    opened = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{opened}/>")
    return Markup(f"<{tag}{opened}>{''.join(map(escape, content))}</{tag}>")


def json_script(value: Any) -> Markup:
    """Return a data block that the page's script reads. Its text cannot end the element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json">{text}</script>')


def table(header: Iterable[object], rows: Iterable[Iterable[object]], style: str | None = "numbers") -> Markup:
    """Return a table that scrolls in a box if it is wide. style: its class; "numbers" aligns all columns but the first
    to the right."""
    head = element("tr", *(element("th", cell, scope="col") for cell in header))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    inside = element("table", element("thead", head), element("tbody", *body), class_=style)
    return element("div", inside, class_="scroll", tabindex="0")
