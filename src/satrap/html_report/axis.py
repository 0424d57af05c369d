"""Axes: ticks at round numbers, the place of a number on an axis, and numbers as text. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from satrap.monitor.report import short

_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` to `high`, drawn from the coordinate `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Return the coordinate of a value, rounded to a tenth."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


def axis(
    values: Iterable[float],
    begin: float,
    end: float,
    *,
    from_zero: bool = False,
    is_snug: bool = False,
    is_whole: bool = False,
    num_ticks: int = 5,
) -> Axis:
    """Return an axis that holds all values, with ticks at round numbers.

    from_zero: it starts at 0. is_snug: it ends at the last value, else at a tick. is_whole: its ticks are integers.
    """
    held = list(values)
    low, high = min(held, default=0.0), max(held, default=1.0)
    if from_zero or (is_snug and 0 < low < high / 10):
        low, high = min(low, 0.0), max(high, 0.0)
    if not high - low > max(1e-9 * max(abs(low), abs(high)), 1e-290):
        room = abs(low) / 10 if abs(low) > 1e-290 else 1.0
        low, high = 0.0 if from_zero else low - room, high + room
    step = max(_step((high - low) / num_ticks), float(is_whole))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(each * step for each in range(first, last + 1))
    if is_snug:
        return Axis(low, high, begin, end, tuple(tick for tick in ticks if low <= tick <= high))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), begin, end, ticks)


def _step(rough: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return the texts of an axis's ticks: as few digits as tell them apart."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    rounded = [0.0 if abs(tick) < step / 1e6 else tick for tick in ticks]
    if max(map(abs, rounded)) >= 10_000:
        texts = [short(tick) for tick in rounded]
        return texts if len(set(texts)) == len(texts) else [f"{tick:,.0f}" for tick in rounded]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{digits}f}" if digits < 7 else f"{tick:.3g}" for tick in rounded]


def number(value: float | None) -> str:
    """Return a number of a table: integers in full, others with five digits."""
    if value is None:
        return "not finite"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10_000 else f"{value:.5g}"


def size(value: float) -> str:
    """Return a number of bytes as text."""
    for scale, unit in _BYTES:
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Return a duration as text."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, rest = divmod(whole, 86_400)
    text = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days} d {text}" if days else text
