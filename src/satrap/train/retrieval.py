"""All rows of a table against queries, for evaluation: the highest dot products, and the softmax over all rows.

The rows are read in parts, from this process, servers, a device or a `Reader`, so memory holds a part at a time, and at
most 2**24 products. Nothing here trains: no gradient reaches the table.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from satrap.config.array_args import as_ids
from satrap.config.tables import Table
from satrap.config.validation import check_integer, describe, known_arguments
from satrap.errors import InputError
from satrap.table.store import StoredRows

_MOST_PRODUCTS = 1 << 24


class Rows(Protocol):
    """A table of `Embeddings` or of a `Reader`, or a `Store`."""

    @property
    def table(self) -> Table: ...

    def rows(self) -> Iterator[tuple[NDArray[np.uint64], StoredRows]]: ...

    def read(self, ids: ArrayLike) -> StoredRows: ...


@known_arguments()
def topk(queries: Tensor, table: Rows, k: int) -> tuple[NDArray[np.uint64], Tensor]:
    """Return for each query the ids whose rows have the highest dot products with it, and these: [n, k], highest first.
    k is at most the number of rows, or that many are returned.

    queries: float32 [n, dim]. The order of equal products is not defined."""
    _require_table("topk", table)
    k = check_integer("topk", "k", k, 1, 2**31 - 1, InputError)
    queries = _checked(queries, table)
    best, ids = queries.new_empty((len(queries), 0)), np.empty((len(queries), 0), np.uint64)
    for part_ids, scores in _scores(queries, table):
        top, at = scores.topk(min(k, len(part_ids)), dim=1)
        joined = torch.cat([best, top], dim=1)
        best, order = joined.topk(min(k, joined.shape[1]), dim=1)
        ids = np.take_along_axis(np.hstack([ids, part_ids[at.cpu().numpy()]]), order.cpu().numpy(), axis=1)
    return ids, best


@known_arguments()
def full_softmax(queries: Tensor, targets: ArrayLike, table: Rows) -> Tensor:
    """Return each query's cross-entropy against all rows of the table, float32 [n]: minus the logarithm of the softmax
    over the dot products, at the target's.

    queries: float32 [n, dim]. targets: the id of each query; InputError if one has no row."""
    _require_table("full_softmax", table)
    where = f"table {table.table.name!r}"
    target_ids = as_ids(where, targets)
    if len(target_ids) != len(_checked(queries, table)):
        raise InputError(f"{where}: found {len(target_ids)} targets for {len(queries)} queries; expected one for each")
    rows = table.read(target_ids)
    if not rows.present.all():
        missing = target_ids[~rows.present][0]
        raise InputError(f"{where}: target {missing} has no row; leave such queries out")
    with torch.no_grad():
        own = (queries * torch.from_numpy(rows.values).to(queries.device)).sum(dim=1)
        total = queries.new_full((len(queries),), -torch.inf)
        for _, scores in _scores(queries, table):
            total = torch.logaddexp(total, scores.logsumexp(dim=1))
    return total - own


def _scores(queries: Tensor, table: Rows) -> Iterator[tuple[NDArray[np.uint64], Tensor]]:
    """Yield the ids of some rows, and their products with all queries."""
    step = max(1, _MOST_PRODUCTS // max(1, len(queries)))
    for ids, rows in table.rows():
        for begin in range(0, len(ids), step):
            values = torch.from_numpy(rows.values[begin : begin + step])
            with torch.no_grad():
                yield ids[begin : begin + step], queries @ values.to(queries.device).T


def _require_table(where: str, table: object) -> None:
    if not all(hasattr(table, name) for name in ("table", "rows", "read")):
        raise InputError(
            f"{where}: table is {describe(table)}; expected one of embeddings.tables or of a Reader's tables, by its "
            "name: embeddings.tables['item']"
        )


def _checked(queries: Any, table: Rows) -> Tensor:
    dim = table.table.dim
    if not isinstance(queries, Tensor) or queries.dtype != torch.float32 or queries.shape[1:] != (dim,):
        given = f"{queries.dtype} of shape {tuple(queries.shape)}" if isinstance(queries, Tensor) else type(queries)
        raise InputError(f"table {table.table.name!r}: queries are {given}; expected a float32 tensor [n, {dim}]")
    return queries
