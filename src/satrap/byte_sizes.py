"""Numbers of bytes as text: reads those that a user gives, and writes those that a message has. Pure."""

import re

from satrap.errors import ConfigError

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | _BINARY


def parse_bytes(where: str, size: object, others: str = "") -> int:
    """Return a size in bytes, from an integer or a string with a unit, such as "64GiB" or "512 MB".

    others: what else a message says that `where` may be."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", size) if isinstance(size, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"{where} is {size!r} ({type(size).__name__}); expected bytes as an integer, or a string such as '100GiB'"
            f"{others}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(number: float) -> str:
    """Return bytes in words, such as "1.2 GiB"."""
    for unit, size in reversed(_BINARY.items()):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:.0f} bytes"
