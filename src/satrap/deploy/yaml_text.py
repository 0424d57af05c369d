"""Writes values as YAML that a person can read: block style, comments above keys, no quotes where none are needed.

The subset is small: mappings, lists, text, integers and booleans. Text that a reader of YAML 1.1 or 1.2 could take for
something else is written in double quotes, as JSON does. Needs no package.
"""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PLAIN = re.compile(r"[A-Za-z0-9_./$(-]([A-Za-z0-9_./=$()@+*,-]|:(?=\S)|(?<!:) (?![#:]))*")
_RESERVED = re.compile(
    r"(?i)y|n|yes|no|on|off|true|false|null|[-+]?\.?(inf|nan)|-|---.*|\.+|[-+.]*[0-9][-+.:0-9_a-fox tz]*|- .*"
)
"""What some reader takes for a boolean, a number, a date, nothing, a list or the end of a document."""
_WIDTH = 110
_SHORT_LIST = 70


@dataclass(frozen=True, slots=True)
class Note:
    """A value with a comment above its key, or above its item in a list."""

    text: str
    value: Any


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command, written over several lines, which a reader of YAML joins by spaces."""

    words: Sequence[str]
    """Quoted for the shell. A word that begins with - begins a line."""

    def __str__(self) -> str:
        return " ".join(self.words)


class Octal(int):
    """A file mode, written in octal."""


def document(value: Mapping[str, Any]) -> str:
    """Return a YAML document."""
    return "\n".join(_mapping(value, 0)) + "\n"


def _mapping(value: Mapping[str, Any], indent: int) -> Iterator[str]:
    pad = " " * indent
    for key, element in value.items():
        if isinstance(element, Note):
            yield from _comment(element.text, pad)
            element = element.value
        yield from _entry(f"{pad}{_scalar(key)}:", element, indent)


def _entry(prefix: str, value: Any, indent: int) -> Iterator[str]:
    """Yield the lines of a value after its key."""
    match value:
        case Mapping() if value:
            yield prefix
            yield from _mapping(value, indent + 2)
        case list() | tuple() if value and not _is_short(value):
            yield prefix
            yield from _list(value, indent + 2)
        case Command():
            yield from _command(prefix, value, indent + 2)
        case str() if "\n" in value and _fits_block(value):
            yield f"{prefix} |"
            yield from (f"{' ' * (indent + 2)}{line}" if line else "" for line in value.removesuffix("\n").split("\n"))
        case _:
            yield f"{prefix} {_scalar(value)}"


def _list(value: Sequence[Any], indent: int) -> Iterator[str]:
    pad = " " * indent
    for element in value:
        if isinstance(element, Note):
            yield from _comment(element.text, pad)
            element = element.value
        if isinstance(element, Mapping) and element:
            lines = list(_mapping(element, indent + 2))
            first = next(number for number, line in enumerate(lines) if not line.lstrip().startswith("#"))
            yield from (line[2:] for line in lines[:first])  # comments of the first key
            yield f"{pad}- {lines[first].lstrip()}"
            yield from lines[first + 1 :]
        else:
            yield from _entry(f"{pad}-", element, indent)


def _command(prefix: str, command: Command, indent: int) -> Iterator[str]:
    text, pad = str(command), " " * indent
    if re.search(r"[^\x20-\x7e]|  ", text) or text != text.strip() or not text:
        yield f"{prefix} {_scalar(text)}"
        return
    yield f"{prefix} >-"
    line: list[str] = []
    for word in command.words:
        if line and (word.startswith("-") or len(" ".join([*line, word])) + indent > _WIDTH):
            yield pad + " ".join(line)
            line = []
        line.append(word)
    yield pad + " ".join(line)


def _comment(text: str, pad: str) -> list[str]:
    start = f"{pad}# "
    wrapper = textwrap.TextWrapper(_WIDTH, start, start, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(" ".join(text.split()))


def _is_short(value: Sequence[Any]) -> bool:
    """Return whether a list of texts fits on one line, in brackets."""
    return all(isinstance(element, str) for element in value) and len(json.dumps(value)) <= _SHORT_LIST


def _fits_block(text: str) -> bool:
    """Return whether a text can be written line by line, without escapes."""
    lines = text.removesuffix("\n").split("\n")
    printable = all(line == "" or (line.isascii() and line.isprintable()) for line in lines)
    return text.endswith("\n") and printable and bool(lines[0]) and not lines[0].startswith(" ") and bool(lines[-1])


def _scalar(value: Any) -> str:
    match value:
        case Octal():
            return f"0{value:o}"
        case bool() | int():
            return json.dumps(value)
        case str():
            is_plain = _PLAIN.fullmatch(value) and not _RESERVED.fullmatch(value) and value[-1] not in ": "
            return value if is_plain else _quoted(value)
        case list() | tuple():
            return f"[{', '.join(map(_quoted, value))}]"
        case _:
            assert isinstance(value, Mapping) and not value, value
            return "{}"


def _quoted(text: str) -> str:
    """Return a text in double quotes. JSON writes a character beyond 16 bits as two, which YAML does not join."""
    pieces = [
        json.dumps(character)[1:-1] if ord(character) < 1 << 16 else f"\\U{ord(character):08x}" for character in text
    ]
    return f'"{"".join(pieces)}"'
