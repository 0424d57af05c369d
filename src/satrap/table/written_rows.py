"""Rows that a caller writes into a table, checked before any row changes, in the form in which the table stores them.

`Store.write` puts them into an engine, and `ShardedTable.write` sends them to servers, which have a Store.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap import _core
from satrap.config import array_args
from satrap.config.optimizers import SGD, Adagrad, Ftrl, RowWiseAdagrad
from satrap.config.tables import MinCount, Table
from satrap.errors import CapacityError, InputError

if TYPE_CHECKING:
    from satrap.table.engine import Slot


class WrittenRows(NamedTuple):
    """One line for each id."""

    ids: NDArray[np.uint64]
    values: NDArray[np.float32]
    state: NDArray[np.float32] | None
    """None: each row's optimizer starts again."""


def as_rows(table: Table, state_dim: int, ids: ArrayLike, values: ArrayLike, state: ArrayLike | None) -> WrittenRows:
    """Return the caller's rows; raise InputError if an id repeats, a shape is wrong, or the table's type cannot hold a
    number."""
    where = f"table {table.name!r}"
    id_array = array_args.as_ids(where, ids)
    distinct, counts = np.unique(id_array, return_counts=True)
    if len(distinct) < len(id_array):
        raise InputError(f"{where}: ids hold {distinct[counts > 1][0]} twice; expected one row for each id")
    value_array = array_args.as_values(where, "values", values, id_array, table.dim)
    stored_values(table, value_array)
    if state is None:
        return WrittenRows(id_array, value_array, None)
    state_array = array_args.as_values(where, "state", state, id_array, state_dim)
    _require_state(table, state_array)
    return WrittenRows(id_array, value_array, state_array)


def _require_state(table: Table, state: NDArray[np.float32]) -> None:
    """Raise InputError if a sum of squares or a count of steps is negative: the next update would make the row NaN."""
    match table.optimizer:
        case SGD():
            return
        case Adagrad() | RowWiseAdagrad():
            first = 0
        case _:
            first = table.dim  # after Adam's mean of the gradients, or Ftrl's z
    if (negative := state[:, first:] < 0).any():
        line = int(np.argwhere(negative)[0][0])
        value = state[line, first:][negative[line]][0]
        raise InputError(
            f"table {table.name!r}: state[{line}] holds {value}; expected at least 0 in the sums of squares and counts "
            f"of steps of {type(table.optimizer).__name__}: pass the state that `read` returned, or none"
        )


def stored_values(table: Table, values: NDArray[np.float32]) -> NDArray[Any]:
    """Return the values as the table stores them, rounded to the nearest number; those of 16 bits as uint16."""
    if table.dtype == "float32":
        return values
    if table.dtype == "float16":
        with np.errstate(over="ignore"):
            bits = values.astype(np.float16).view(np.uint16)
        is_infinite = bits & 0x7C00 == 0x7C00
    else:
        words = values.view(np.uint32)
        bits = (words + (0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)  # half to even
        is_infinite = bits & 0x7F80 == 0x7F80
    if is_infinite.any():
        largest = values[is_infinite][0]
        raise InputError(
            f"table {table.name!r}: values hold {largest:g}, which {table.dtype} cannot; give smaller values or "
            "dtype='float32'"
        )
    return bits


def is_bounded(table: Table) -> bool:
    """Return whether the table may be full."""
    return table.capacity is not None and table.on_full != "grow"


def require_room(table: Table, counts: NDArray[np.integer[Any]]) -> None:
    """Raise CapacityError if a bucket would have more rows than its share of the table's capacity. counts: the rows
    that each bucket would have."""
    assert table.capacity is not None
    num_buckets = len(counts)
    shares = table.capacity // num_buckets + (np.arange(num_buckets) < table.capacity % num_buckets)
    if (counts > shares).any():
        bucket = int(np.argmax(counts > shares))
        raise CapacityError(
            f"table {table.name!r}: bucket {bucket} of {num_buckets} would have {counts[bucket]} rows with the written "
            f"ones; expected at most {shares[bucket]}, its share of capacity={table.capacity}; nothing was written: "
            f"set capacity to at least {counts.max() * num_buckets} with num_buckets={num_buckets}, or use "
            "on_full='grow'"
        )


def put_rows(slot: "Slot", rows: WrittenRows) -> None:
    """Insert or replace the rows in the slot's table, stamped as used at the engine's latest step."""
    engine, index, table = slot.engine, slot.index, slot.table
    where = f"table {table.name!r}"
    if engine.shares_buckets(index):
        raise InputError(
            f"{where}: shard is {table.shard!r}, and the other trainers' devices have copies or columns of its rows, "
            "which a write would not reach: write into a table with shard='rows', or resume a checkpoint with the rows"
        )
    if isinstance(table.admission, MinCount) and (sighted := engine.stats(index)["sightings"]):
        raise InputError(
            f"{where}: {sighted} ids were seen and are not admitted yet, and a written row has no such count: write "
            "before the first step, or declare another admission"
        )
    if is_bounded(table):
        require_room(table, engine.rows_with(index, rows.ids))
    values, state = stored_values(table, rows.values), rows.state
    if state is None:
        state = _new_state(table, engine.state_dim(index), values)
    steps = np.full(len(rows.ids), engine.latest_step, np.uint32)
    order = np.argsort(_core.bucket_of(rows.ids, engine.num_buckets(index), table.is_direct), kind="stable")
    slot.rows.import_rows(index, *(np.ascontiguousarray(column[order]) for column in (rows.ids, steps, values, state)))


def _new_state(table: Table, state_dim: int, stored: NDArray[Any]) -> NDArray[np.float32]:
    """Return the state with which rows of these values start, as the core's `initialise` does."""
    optimizer = table.optimizer
    start = optimizer.initial_accumulator_value if isinstance(optimizer, Adagrad | RowWiseAdagrad) else 0.0
    state = np.full((len(stored), state_dim), start, np.float32)
    if isinstance(optimizer, Ftrl):  # its closed form of the state is the row's value
        values = stored
        if table.dtype != "float32":
            wide = stored.view(np.float16) if table.dtype == "float16" else (stored.astype(np.uint32) << 16)
            values = wide.astype(np.float32) if table.dtype == "float16" else wide.view(np.float32)
        decay = np.float32(optimizer.beta / optimizer.lr + optimizer.l2)
        z = -(values * decay) - np.copysign(np.float32(optimizer.l1), values)
        state[:, : table.dim] = np.where(values == 0, np.float32(0), z)
    return state
