"""Where the lines of a data file are cut into record batches: at buckets, so that a server reads whole ones. Pure.

A record batch is one bucket, or an aligned group of buckets that has at most `TARGET_BYTES` on average: a batch costs
some 400 bytes in the file, and 50 us of the writer and of each reader, whatever it holds. Groups are aligned, because
the even maps of servers are: then 2, 4, 8, ... servers share no batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TARGET_BYTES = 16 << 10


class BatchCut(NamedTuple):
    """The lines of one record batch."""

    bucket_begin: int
    bucket_end: int
    first: int
    """The first line."""
    last: int
    """The line after the last one."""


def cut_batches(
    buckets: NDArray[np.uint32], begin: int, end: int, owned: Sequence[tuple[int, int]], line_bytes: int
) -> list[BatchCut]:
    """Return the record batches of lines whose buckets are `buckets`, rising, of the range begin to end.

    owned: the saver's buckets, as rising ranges. No batch spans buckets that are not among them.
    line_bytes: size of a line.
    """
    ranges = [(max(first, begin), min(last, end)) for first, last in owned if first < end and begin < last]
    num_owned = sum(last - first for first, last in ranges)
    group = 1
    while 2 * group * len(buckets) * line_bytes <= TARGET_BYTES * num_owned and group < end:
        group *= 2
    cuts = []
    for first, last in ranges:
        edges = [first, *range(first - first % group + group, last, group), last]
        lines = np.searchsorted(buckets, edges).tolist()
        steps = zip(edges[:-1], edges[1:], lines[:-1], lines[1:], strict=True)
        cuts += [BatchCut(*each) for each in steps if each[2] < each[3]]
    return cuts
