"""The mean of one value per seed, and its interval."""

import math
import statistics
from collections.abc import Sequence

from benchmarks.harness.record import Figure

# The 97.5 % quantile of Student's t, by degrees of freedom.
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: Sequence[float]) -> Figure:
    """Return the mean of one value per seed and its 95 % interval, which one or more than ten values do not have."""
    mean, count = statistics.fmean(values), len(values)
    reach = T95[count - 1] * statistics.stdev(values) / math.sqrt(count) if 1 < count <= len(T95) else math.inf
    numbers = {"mean": mean, "low": mean - reach, "high": mean + reach}
    known = {name: round(value, 6) if math.isfinite(value) else None for name, value in numbers.items()}
    return {**known, "values": [round(value, 6) for value in values]}
