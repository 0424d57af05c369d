"""How many bytes a row of a table takes, found by filling a small table of the same configuration.

So the layout of a row has one owner, the core. What a row takes beyond values and state is its head and its share of
the index; a table without a capacity has room for growth, too.
"""

import math
from functools import lru_cache

import numpy as np

from satrap.config.tables import Table
from satrap.table.snapshot.writer import row_bytes as saved_row_bytes
from satrap.table.store import Store

__all__ = ["memory_row_bytes", "saved_row_bytes"]

_BUCKETS = 8  # they grow at different sizes, as those of a large table do
_MAX_ROWS = 4096  # of a bucket


def memory_row_bytes(table: Table, rows: int) -> int:
    """Return the bytes of memory that each of so many rows takes, rounded up."""
    bounded = table.capacity is not None and table.on_full != "grow"
    per_bucket = max(1, min(_MAX_ROWS, rows // table.resolved_num_buckets))
    sample = Table(
        "planned",
        dim=table.dim,
        optimizer=table.optimizer,
        dtype=table.dtype,
        capacity=_BUCKETS * per_bucket if bounded else None,
        num_buckets=_BUCKETS,
    )
    return _measured(sample, _BUCKETS * per_bucket)


@lru_cache(maxsize=1024)
def _measured(table: Table, rows: int) -> int:
    store = Store(table, num_threads=1)
    # A bounded table evicts: with twice the ids, each bucket is full.
    ids = np.random.default_rng(0).integers(0, 2**63, rows if table.capacity is None else 2 * rows, dtype=np.uint64)
    for part in np.array_split(ids, 2 * _BUCKETS):  # each fits into one bucket: no lookup needs more rows at once
        store.lookup(part)
    found = store.stats()
    return math.ceil(found["bytes"] / found["rows"])
