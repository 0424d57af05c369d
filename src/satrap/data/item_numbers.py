"""What stands beside the ids of a sequence: numbers, such as times and ratings, and the ids of an aligned sequence.

Numbers travel with a batch as Arrow lists, one for each sample, under the names of `numbers_key`. A lookup leaves out
padding and what a sequence cuts off, so their numbers are left out here, before a worker knows the ids.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap.config.columns import Columns, numbers_key
from satrap.config.optional_deps import pyarrow_for
from satrap.config.tables import Feature


def numbers_beside(
    columns: Columns, bags: Sequence[Any], numbers: Sequence[list[NDArray[np.float64]]]
) -> dict[str, Any]:
    """Return Arrow lists of numbers by key. numbers: for each feature one array for each column, of one for each id."""
    by_key: dict[str, Any] = {}
    for feature, column, (ids, offsets, _), its in zip(columns.features, columns.ids, bags, numbers, strict=True):
        if not its:
            continue
        arrow = pyarrow_for("numbers beside ids")
        bounds = np.arange(len(ids) + 1) if offsets is None else offsets
        stays, kept = kept_ids(None if columns.declared is None else columns.declared[feature], ids, bounds)
        for name, values in zip(column.numbers, its, strict=True):
            lists = arrow.LargeListArray.from_arrays(arrow.array(kept), arrow.array(values[stays]))
            by_key[numbers_key(feature, name)] = lists
    return by_key


def unaligned(columns: Columns, bags: Sequence[Any]) -> Iterator[tuple[NDArray[np.bool_], Callable[[int], str]]]:
    """Yield the rows in which a sequence has another length than the one that it is aligned with, and why."""
    if columns.declared is None:
        return
    numbers = {feature: number for number, feature in enumerate(columns.features)}
    for feature in columns.features:
        other = columns.declared[feature].aligned_with
        if other is None:
            continue
        names = [f"{name!r} (column {columns.ids[numbers[name]].name!r})" for name in (feature, other)]
        lengths = [_lengths(columns.declared[name], *bags[numbers[name]][:2]) for name in (feature, other)]
        yield (lengths[0] != lengths[1], partial(_describe_unaligned, names, lengths))


def _describe_unaligned(names: Sequence[str], lengths: Sequence[NDArray[np.int64]], row: int) -> str:
    (mine, its), (feature, other) = (counts[row] for counts in lengths), names
    return f"feature {feature} has {mine} ids and {other}, with which it is aligned, has {its}"


def _lengths(feature: Feature, ids: NDArray[np.uint64], offsets: NDArray[np.int64] | None) -> NDArray[np.int64]:
    bounds = np.arange(len(ids) + 1) if offsets is None else offsets
    if feature.padding_id is None:
        return np.diff(bounds)
    return np.diff(np.append(0, np.cumsum(ids != np.uint64(feature.padding_id)))[bounds])


def kept_ids(
    feature: Feature | None, ids: NDArray[np.uint64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which ids of a feature are looked up, and where those of each sample begin among them."""
    stays = np.ones(len(ids), np.bool_)
    if feature is not None and feature.padding_id is not None:
        stays = ids != np.uint64(feature.padding_id)
    before = np.append(0, np.cumsum(stays))
    lengths = np.diff(before[offsets])
    if feature is not None and feature.max_length is not None:
        first = np.maximum(lengths - feature.max_length, 0) if feature.keep == "last" else np.zeros_like(lengths)
        lengths = np.minimum(lengths, feature.max_length)
        at = before[:-1] - np.repeat(before[offsets[:-1]] + first, np.diff(offsets))
        stays &= (at >= 0) & (at < feature.max_length)
    return stays, np.append(0, np.cumsum(lengths))


def numbers_of(feature: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Arrow lists of a feature's numbers by column, from the further columns of a batch."""
    prefix = numbers_key(feature, "")[:-1]
    return {
        key[len(prefix) : -1]: lists
        for key, lists in extra.items()
        if key.startswith(prefix) and str(getattr(lists, "type", "")).startswith("large_list<")
    }


def padded_numbers(lists: Any, max_length: int) -> NDArray[np.float64]:
    """Return the numbers of lists as [samples, max_length], zeros behind the ends of the lists."""
    arrow = pyarrow_for("numbers beside ids")
    lengths = arrow.compute.list_value_length(lists).to_numpy()
    numbers = np.zeros((len(lists), max_length))
    numbers[np.arange(max_length) < lengths[:, None]] = lists.flatten().to_numpy()
    return numbers
