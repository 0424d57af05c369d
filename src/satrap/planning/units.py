"""Numbers as a plan prints them. Pure."""

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_MINUTE, _HOUR = 60.0, 3600.0


def size(count: float) -> str:
    """Return bytes in the unit that leaves one to three digits: "9.3 TB"."""
    for unit, name in _BYTES:
        if count >= unit:
            return f"{count / unit:,.{1 if count < 100 * unit else 0}f} {name}"
    return f"{count:.0f} B"


def seconds(count: float) -> str:
    """Return a time: "3.2 h", "12 min", "40 s", "98 ms"."""
    if count >= _HOUR:
        return f"{count / _HOUR:,.1f} h"
    if count >= 2 * _MINUTE:
        return f"{count / _MINUTE:.0f} min"
    return f"{count:.1f} s" if count >= 1 else f"{1e3 * count:.0f} ms"


def amount(count: float) -> str:
    """Return a number with separators and at most three significant digits behind a point."""
    return f"{count:,.0f}" if abs(count) >= 100 else f"{count:,.3g}"
