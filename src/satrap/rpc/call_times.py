"""The time that the calls of a service take: a histogram for each method. It has no lock; the service does."""

from bisect import bisect_left
from collections.abc import Mapping

BOUNDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
"""Upper bounds of the bins in seconds: 100 us to 100 s. One more bin holds longer calls."""


class CallTimes:
    """Histograms of the seconds of calls, by the number of their method."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """names: of the methods, by number."""
        self._names = names
        self._counts = {number: [0] * (len(BOUNDS) + 1) for number in names}
        self._totals = dict.fromkeys(names, 0.0)

    def record(self, method: int, seconds: float) -> None:
        """Add a call of a method."""
        self._counts[method][bisect_left(BOUNDS, seconds)] += 1
        self._totals[method] += seconds

    def to_dict(self) -> dict[str, tuple[list[int], float]]:
        """Return, by name of the method, the number of calls in each bin and their sum in seconds."""
        return {name: (list(self._counts[each]), self._totals[each]) for each, name in self._names.items()}
