"""Hides what may be a secret in settings and arguments that are recorded, logged or shown.

A secret is known by its name: a setting, an option or a parameter of a URL whose name has a word such as password or
token; and a password in the address of a URL. A name says little, so some other texts are hidden, too; numbers are not.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_WORDS = "password|passwd|passphrase|pwd|secret|token|key|apikey|accesskey|credential|signature|sig|authorization"
_NAME = re.compile(rf"(?:^|[^a-z])(?:{_WORDS})s?(?:$|[^a-z])")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SCHEME = r"(?:(?i:basic|bearer|digest|negotiate|token)\s+)?"  # HTTP has it before the secret
_PAIR = re.compile(
    rf"""(?P<name>[\w.-]+)(?P<mark>["']?\s*[=:](?!//)\s*)(?P<value>{_SCHEME}(?:"[^"]*"|'[^']*'|[^\s,;&)}}\]]+))"""
)
_ADDRESS = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")


def hide_secrets(value: Any) -> Any:
    """Return settings without what may be secret: mappings, lists, and their texts; other objects only if their text
    has a secret."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if _is_hidden(name, setting) else hide_secrets(setting) for name, setting in value.items()}
    if isinstance(value, list | tuple):
        return _hide_in_list(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    hidden = _ADDRESS.sub(rf"\1:{HIDDEN}@", _PAIR.sub(_hide_pair, text))
    return value if hidden == text else hidden


def _hide_in_list(values: "list[Any] | tuple[Any, ...]") -> list[Any]:
    """Hide in a list, such as the arguments of a script, where "--password" may precede the secret."""
    shown: list[Any] = []
    is_next = False
    for entry in values:
        is_option = isinstance(entry, str) and entry.startswith("-")
        shown.append(HIDDEN if is_next and not is_option else hide_secrets(entry))
        is_next = is_option and "=" not in entry and is_secret_name(entry)
    return shown


def is_secret_name(name: object) -> bool:
    """Return whether the name is that of a secret."""
    return _NAME.search(_CAMEL.sub("_", str(name)).lower()) is not None


def _is_hidden(name: object, value: object) -> bool:
    return is_secret_name(name) and not (value is None or value == "" or isinstance(value, bool | int | float))


def _hide_pair(match: re.Match[str]) -> str:
    if (match["mark"].strip() == ":" and match["value"].startswith("//")) or not is_secret_name(match["name"]):
        return match[0]
    return f"{match['name']}{match['mark']}{HIDDEN}"
