"""Ids and numbers that are computed from the values of Arrow columns: parts of times, buckets of numbers, crosses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.config.columns import Time
from satrap.data.hashing import hash_integers

_SECONDS = {"days": 86400, "hours": 3600, "seconds": 1}
_EPOCH_WEEKDAY = 3  # 1 January 1970 was a Thursday


def time_part(arrow: Any, array: Any, part: Time) -> Any:
    """Return what `part` names of timestamps or dates, as float64; null where there is none."""
    nanoseconds = arrow.types.is_timestamp(array.type) and array.type.unit == "ns"
    unit = "ns" if nanoseconds else "us"
    counts = array.cast(arrow.timestamp(unit, "UTC" if getattr(array.type, "tz", None) else None)).cast(arrow.int64())
    valid = counts.is_valid().to_numpy(zero_copy_only=False)
    ticks, second = counts.fill_null(0).to_numpy(), 10**9 if nanoseconds else 10**6
    if part in _SECONDS:
        length = _SECONDS[part] * second
        numbers = ticks // length + (ticks % length) / length  # exact to the tick, as a quotient of floats is not
    elif part == "hour_of_day":
        numbers = ticks // (3600 * second) % 24
    else:
        numbers = (ticks // (86400 * second) + _EPOCH_WEEKDAY) % 7
    return arrow.array(numbers.astype(np.float64), mask=~valid)


def buckets(arrow: Any, array: Any, boundaries: Sequence[float]) -> Any:
    """Return how many of the boundaries are at most each number, as int64; null where there is no number."""
    numbers = array.cast(arrow.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    found = np.searchsorted(np.array(boundaries), numbers, side="right")
    return arrow.array(found.astype(np.int64), mask=np.isnan(numbers))


def crossed_ids(columns: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return one id for the ids of each line; another order gives other ids."""
    ids = columns[0]
    for other in columns[1:]:
        ids = hash_integers(hash_integers(ids) ^ other)
    return ids
