"""What tables contain, as bytes and counters that a test compares: of a store, a worker or embeddings."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

IDS = np.arange(60, dtype=np.uint64)
MOVES = ("on_device", "at_home", "moved_in", "moved_out")
"""Counters that depend on where rows are."""
PLACE = ("bytes", *MOVES)


def row_bytes(store: Any, ids: Any = IDS) -> list[bytes]:
    """Return values, state and presence of these rows."""
    return [part.tobytes() for part in store.read(ids)]


def contents(owner: Any, ids: Any = IDS) -> dict[str, list[bytes]]:
    """Return values, state and presence of these rows of every table."""
    return {name: row_bytes(table, ids) for name, table in owner.tables.items()}


def counters(store: Any, left_out: Collection[str] = PLACE) -> dict[str, int]:
    """Check a table, and return its counters, by default those that do not depend on where its rows are."""
    store.check()
    stats = store.stats()
    if "on_device" in stats:
        assert stats["on_device"] + stats["at_home"] == stats["rows"]
    return {name: count for name, count in stats.items() if name not in left_out}


def counted_contents(owner: Any, ids: Any = IDS, left_out: Collection[str] = PLACE) -> dict[str, Any]:
    """Check every table, and return its counters and these rows."""
    return {name: (counters(table, left_out), row_bytes(table, ids)) for name, table in owner.tables.items()}


def worker_contents(worker: Any, ids: Any = IDS, left_out: Collection[str] = PLACE) -> tuple[Any, ...]:
    """Return the contents of the worker's tables and its own numbers."""
    return counted_contents(worker, ids, left_out), worker.truncated, worker.tables.latest_step


def bits(embeddings: Any, model: Any, ids: Any = IDS) -> list[bytes]:
    """Return every parameter of the model, and these rows of every table."""
    dense = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
    return dense + [part for rows in contents(embeddings, ids).values() for part in rows]


def counted_bits(embeddings: Any, model: Any, ids: Any = IDS) -> list[Any]:
    """Return `bits`, and the counters of each table, which is checked."""
    return [bits(embeddings, model, ids), [counters(table) for table in embeddings.tables.values()]]


def outcome(embeddings: Any, model: Any, ids: Any = IDS) -> list[Any]:
    """Return what training has changed: `counted_bits`, and the counters of the embeddings."""
    totals = embeddings.counters()
    return [*counted_bits(embeddings, model, ids), embeddings.step, totals.rows, totals.staleness, totals.lost]
