"""How many different ids a batch has, given how unevenly ids occur. Pure.

Ids of a table follow Zipf's law: the id of rank r occurs with a probability proportional to r ** -exponent; exponent 0
is uniform. Ranks above `_EXACT` are summed in bins of growing width, so a table of 10^12 rows costs as little as one of
10^6.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

_EXACT = 2000
_GROWTH = 1.02


@lru_cache(maxsize=4096)
def expected_unique(draws: float, rows: int, exponent: float) -> float:
    """Return how many different ids `draws` independent draws are expected to contain."""
    if draws <= 0 or rows <= 0:
        return 0.0
    total = sum(count * rank**-exponent for rank, count in _ranks(rows))
    found = 0.0
    for rank, count in _ranks(rows):
        share = rank**-exponent / total
        seen = 1.0 if share >= 1.0 else -math.expm1(draws * math.log1p(-share))
        found += count * seen
    return min(found, draws, float(rows))


def _ranks(rows: int) -> Iterator[tuple[float, float]]:
    """Yield ranks and how many ranks each stands for: one each at first, then the middles of bins."""
    exact = min(rows, _EXACT)
    yield from ((float(rank), 1.0) for rank in range(1, exact + 1))
    begin = exact + 0.5
    while begin < rows + 0.5:
        end = min(begin * _GROWTH, rows + 0.5)
        yield math.sqrt(begin * end), end - begin
        begin = end
