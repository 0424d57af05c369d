"""Selects some samples of a source: a random share of them, or those before or since a value of a column.

`Source.batches` wraps its blocks here. Whether a sample is in a share is a hash of the seed, its block, its chunk and
its row there, with rows counted that are left out. So sources that differ only in `share` read disjoint samples, in any
order of the blocks and on any number of trainers. Samples of an iterable have numbers, or offsets, instead: where its
chunks end depends on how it is read. The chunks are decoded whole and then cut, which copies the selected samples.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import check_number, describe
from satrap.data.block import Block, Chunk, RawChunk
from satrap.data.decode import is_time
from satrap.data.hashing import hash_integers
from satrap.data.shuffle_order import mixed
from satrap.errors import ConfigError, SourceError

Bound = tuple[str, Any]
"""A column and a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which samples are read."""

    share: tuple[float, float] | None
    before: Bound | None
    since: Bound | None
    seed: int

    @property
    def portion(self) -> float | None:
        """The share of the samples that is read, 1.0 for all of them; None: it is not known before they are read."""
        if self.before is not None or self.since is not None:
            return None
        return 1.0 if self.share is None else self.share[1] - self.share[0]

    @property
    def columns(self) -> dict[str, str]:
        """The columns that decide which samples are read, each with the option that names it."""
        bounds = {"since": self.since, "before": self.before}
        return {bound[0]: option for option, bound in bounds.items() if bound is not None}

    def blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the blocks with the selected samples only."""
        return [replace(block, read=partial(self._read, block, number)) for number, block in enumerate(blocks)]

    def _read(self, block: Block, number: int) -> Iterator["_SelectedChunk"]:
        for chunk, raw in enumerate(block.read()):
            yield _SelectedChunk(raw, self, (number, 0 if block.is_numbered else chunk), 0, block.is_numbered)

    def mask(
        self, chunk: Chunk, place: tuple[int, int], numbers: Callable[[Chunk], NDArray[np.uint64]]
    ) -> NDArray[np.bool_]:
        """Return which samples of a chunk are selected. place, numbers: decide together with the seed which samples are
        in the share; `numbers` returns the number of each sample at the place."""
        selected = np.ones(len(chunk), np.bool_)
        if self.share is not None:
            low, high = self.share
            fractions = _fractions(numbers(chunk), self.seed, *place)
            selected &= (fractions >= low) & (fractions < high)
        for bound, is_since in ((self.before, False), (self.since, True)):
            if bound is not None:
                values = chunk.extra[bound[0]].slice(chunk.begin, len(chunk))
                selected &= _is_since(bound, values) == is_since
        return selected


@dataclass(frozen=True, slots=True)
class _SelectedChunk:
    """Rows of a block that are not decoded yet, of which some samples will be selected."""

    raw: RawChunk
    selection: Selection
    place: tuple[int, int]
    """The numbers of the block and of its chunk; 0 in place of the second if the samples have numbers in the block."""
    begin: int
    """The number of the first row in the whole chunk."""
    is_numbered: bool
    """Whether the samples have numbers in the block."""

    def count_rows(self) -> int:
        return self.raw.count_rows()

    def slice(self, begin: int, end: int) -> "_SelectedChunk":
        return replace(self, raw=self.raw.slice(begin, end), begin=self.begin + begin)

    def decode(self) -> Chunk:
        chunk = self.raw.decode()
        order = np.flatnonzero(self.selection.mask(chunk, self.place, self._numbers))
        extra = {name: array.slice(chunk.begin, len(chunk)).take(order) for name, array in chunk.extra.items()}
        taken, end = _taken(chunk, order), len(order)
        return replace(chunk, samples=taken, ready_batch=None, extra=extra, begin=0, end=end, rows=None)

    def _numbers(self, chunk: Chunk) -> NDArray[np.uint64]:
        """Return a number for each sample at the place. It depends on no setting that does not change the place, too,
        so sources that differ in other settings select the same samples."""
        if chunk.rows is None:
            return np.arange(self.begin, self.begin + len(chunk), dtype=np.uint64)
        rows = chunk.rows()[chunk.begin : chunk.stop].astype(np.uint64, copy=False)
        return rows if self.is_numbered else rows + np.uint64(self.begin)


def check_share(where: str, share: Any) -> tuple[float, float] | None:
    """Return the share as two numbers; raise if it is none."""
    if share is None:
        return None
    if not isinstance(share, Sequence) or isinstance(share, str) or len(share) != 2:
        raise ConfigError(f"{where}: share is {describe(share)}; expected two numbers, e.g. (0.0, 0.9)")
    low, high = (check_number(where, f"share[{i}]", bound, 0.0) for i, bound in enumerate(share))
    if not low < high <= 1.0:
        raise ConfigError(f"{where}: share is {describe(share)}; expected ascending numbers from 0 to 1")
    return low, high


def check_bound(where: str, name: str, bound: Any) -> Bound | None:
    """Return the bound, with a date or time as its ISO text; raise if it is not the name of a column and a value."""
    if bound is None:
        return None
    is_pair = isinstance(bound, Sequence) and not isinstance(bound, str) and len(bound) == 2
    value = _iso_text(bound[1]) if is_pair else None
    if not is_pair or not isinstance(bound[0], str) or not isinstance(value, str | int | float):
        raise ConfigError(
            f"{where}: {name} is {describe(bound)}; expected a column and a value (a number, text, date or time), e.g. "
            "('day', 25) or ('day', '2026-01-25')"
        )
    return bound[0], value


def _iso_text(value: Any) -> Any:
    """Return a date or time as its ISO text, at midnight as that of its date; other values unchanged, None for a time
    that is missing."""
    if not isinstance(value, datetime.date | np.datetime64):
        return value
    if value != value:  # numpy's and pandas' NaT
        return None
    if isinstance(value, np.datetime64) and (rounded := value.astype("M8[us]")) == value:
        value = rounded.item()
    return (value.isoformat() if isinstance(value, datetime.date) else str(value)).removesuffix("T00:00:00")


def _fractions(numbers: NDArray[np.uint64], *key: int) -> NDArray[np.float64]:
    """Return a number from 0 to below 1 for each of these numbers, which only the number and the key decide."""
    hashes = hash_integers(hash_integers(numbers) ^ mixed(key))
    fractions: NDArray[np.float64] = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions


def _is_since(bound: Bound, values: Any) -> NDArray[np.bool_]:
    """Return which values are at least the bound. A missing value is not; text is compared as numbers to a number."""
    arrow = pyarrow_for("reading data")
    name, least = bound
    kind, is_number = values.type, isinstance(least, int | float) and not isinstance(least, bool)
    if arrow.types.is_null(kind):
        return np.zeros(len(values), np.bool_)
    try:
        values = values.dictionary_decode() if arrow.types.is_dictionary(kind) else values
        if arrow.types.is_integer(values.type) and is_number:  # exactly, of any size
            numbers: NDArray[Any] = values.fill_null(0).to_numpy(zero_copy_only=False)
            is_since: NDArray[np.bool_] = (numbers >= least) & np.asarray(values.is_valid())
            return is_since
        if is_number:
            values = values.cast(arrow.float64())
        elif isinstance(least, str) and is_time(arrow, values.type):
            least = _time(arrow, least, getattr(values.type, "tz", None))
        else:
            least = arrow.scalar(least).cast(values.type)
        since = arrow.compute.greater_equal(values, least).fill_null(False)
    except arrow.ArrowException as error:
        expected = "a value of the column's type"
        if is_time(arrow, values.type):
            expected = "a date or time, such as '2026-01-25' or datetime.date(2026, 1, 25)"
        raise SourceError(
            f"column {name!r} of type {kind} cannot be compared to {bound[1]!r} ({error}); give {expected}"
        ) from error
    return np.asarray(since.to_numpy(zero_copy_only=False))


def _time(arrow: Any, text: str, zone: str | None) -> Any:
    """Return the time that a text states, as exactly as it does, to compare with times in a zone. Times without a zone
    are in UTC."""
    error: Exception | None = None
    for unit, given in product(("us", "ns"), (None, "UTC")):
        try:
            return arrow.scalar(text).cast(arrow.timestamp(unit, given)).cast(arrow.timestamp(unit, zone))
        except arrow.ArrowInvalid as caught:
            error = error or caught
    assert error is not None
    raise error


def _taken(chunk: Chunk, order: NDArray[np.int64]) -> _core.Samples:
    """Return some samples of a chunk."""
    n = len(order)
    values, offsets, weights, dense, label = _core.gather([(chunk.decoded(), chunk.begin, chunk.stop)], order)
    num_features = (len(values) if offsets is None else len(offsets) - 1) // n if n else 0
    ids = []
    for feature in range(num_features):
        if offsets is None:
            begin, end, starts = feature * n, (feature + 1) * n, None
        else:
            starts = offsets[feature * n : (feature + 1) * n + 1]
            begin, end = int(starts[0]), int(starts[-1])
            starts = starts - begin
        ids.append((values[begin:end], starts, None if weights is None else weights[begin:end]))
    return _core.Samples(n, ids, dense, label)
