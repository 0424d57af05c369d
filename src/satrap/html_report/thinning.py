"""Makes long curves and histograms short enough to draw, without losing what they show. Pure."""

from collections.abc import Mapping, Sequence

Point = tuple[float, float | None]
"""A place on the axis, and the value there; None: the curve is interrupted."""


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` of the points, in their order. Of each run of neighbours it keeps the lowest, the highest
    and the first interruption; the first and the last point always remain. limit: at least 5."""
    assert limit >= 5
    if len(points) <= limit:
        return list(points)
    num_runs = (limit - 2) // 3
    kept = {0, len(points) - 1}
    for run in range(num_runs):
        begin, end = (len(points) * each // num_runs for each in (run, run + 1))
        values = [(value, index) for index in range(begin, end) if (value := points[index][1]) is not None]
        if values:
            kept |= {min(values)[1], max(values)[1]}
        if len(values) < end - begin:
            kept.add(next(index for index in range(begin, end) if points[index][1] is None))
    return [points[index] for index in sorted(kept)]


def evenly(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` of the points, evenly spaced in their order, with the first and the last; for tables."""
    if len(points) <= limit:
        return list(points)
    return [points[round(each * (len(points) - 1) / (limit - 1))] for each in range(limit)]


def bins(counts: Mapping[int, int], limit: int) -> list[tuple[int, int, int]]:
    """Return (lowest, highest, count) of at most `limit` neighbouring bins of equal width from 0 to the largest key."""
    if not counts:
        return []
    last = max(counts)
    width = -(-(last + 1) // limit)
    found = [[low, min(last, low + width - 1), 0] for low in range(0, last + 1, width)]
    for key, count in counts.items():
        found[key // width][2] += count
    return [(low, high, count) for low, high, count in found]
