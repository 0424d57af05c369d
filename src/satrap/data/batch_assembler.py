"""Turns blocks into batches: windows of samples, shuffled or not, cut into batches, each with its position.

`BatchAssembler` takes decoded chunks from `read_ahead`, in the order that `shuffle_order` and `rank_split` decide, and
yields `Inputs`. It knows no file format.

Windows. A window is the set of samples that is permuted together and held in memory: at most `num_chunks` chunks (1
without shuffling). A window that starts at the beginning of a block continues through the following blocks. If it is
full before a block has ended, the rest of that block follows in further windows. The windows from one that starts
at the beginning of a block up to the next such window form a window group. A position names the block at which a group
starts and how many samples of the group were consumed: resuming reads that group from its start, and nothing before
it. A batch may take samples from several windows. A complete batch of the data, in unchanged order, is passed on
without a copy.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from satrap import _core
from satrap.config.columns import Columns
from satrap.config.optional_deps import pyarrow_for
from satrap.data.block import Block, Chunk
from satrap.data.decode import concatenated
from satrap.data.id_limit import IdLimit
from satrap.data.inputs import Inputs, Position
from satrap.data.rank_split import GroupShare, RowAssigner, RowRange, plan_epoch
from satrap.data.read_ahead import ReadAhead
from satrap.data.shuffle_order import permutation
from satrap.data.skipped_rows import SkippedRows
from satrap.errors import SourceError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAssembler:
    """The settings of one iteration over a source, and its batches."""

    blocks: Sequence[Block]
    columns: Columns
    batch_size: int | None
    """None: each chunk is a batch, unchanged."""
    limit: IdLimit | None
    """Ends batches before they have `batch_size` samples."""
    shuffle: bool
    seed: int
    epochs: int | None
    drop_last: bool
    num_chunks: int
    num_threads: int
    max_bad_rows: int
    portion: float | None
    """The share of the data's samples that the blocks have; None: it is not known."""
    position: Position
    rank: int
    world_size: int

    def batches(self, skipped_rows: SkippedRows) -> Generator[Inputs]:
        """Yield the batches from the position on, and count the samples that are left out."""
        at = self.position
        while self.epochs is None or at.epoch < self.epochs:
            number = at.batch
            for inputs in _EpochReader(self, at, skipped_rows).batches():
                number += 1
                yield inputs
            if number == 0 and self.epochs is None:
                if self.world_size > 1:  # other ranks may have batches
                    return
                raise SourceError(
                    f"epoch {at.epoch} has no batch and epochs is None, so reading would never end; give more data or "
                    "set epochs"
                )
            at = Position(at.epoch + 1, 0, 0, before=at.before)

    def num_batches(self) -> int:
        """Return the number of steps from the position to the end; TypeError says why it is unknown.

        It is known where every block knows its rows (Parquet, tables and frames in memory), or where the only block
        knows its items: samples or batches. With several trainers, all of them run as many steps as the trainer with
        the most rows has batches.
        """
        if self.portion != 1.0:
            raise TypeError("share, before or since select some of the samples")
        if self.max_bad_rows or any(label.missing == "drop" for label in self.columns.label):
            raise TypeError("rows may be left out, by max_bad_rows or by a label's missing='drop'")
        return self.about_num_batches()

    def about_num_batches(self) -> int:
        """Return the same, but about as many where a share of the samples is read or rows may be left out."""
        position = self.position
        if self.epochs is None:
            raise TypeError("epochs is None, so there is no end")
        if self.portion is None:
            raise TypeError("before or since select some of the samples")
        if self.limit is not None:
            raise TypeError("max_ids decides how many samples a batch has")
        if position.before:
            raise TypeError("another number of trainers started this epoch")
        if position.epoch >= self.epochs:
            return 0
        sizes = [block.num_items if block.num_rows is None else block.num_rows for block in self.blocks]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise TypeError("the data does not say how many samples it has before it is read")
        size, round_up = self.batch_size or 1, 0 if self.drop_last else (self.batch_size or 1) - 1
        most = round(self.portion * -(-sum(known) // self.world_size))
        left = most - self._num_consumed(known, self.portion)
        return (left + round_up) // size + (self.epochs - position.epoch - 1) * ((most + round_up) // size)

    def _num_consumed(self, rows: list[int], portion: float) -> int:
        """Return how many samples of the epoch this trainer has consumed. If the items are whole batches, return how
        many items; if only a portion of the rows is read, the number is approximate."""
        position = self.position
        if self.batch_size is None:
            if position.batch > rows[0]:
                raise TypeError("the position counts batches that were cut in another way")
            return position.batch
        if self.blocks and self.blocks[0].num_rows is None:  # one block of samples, and so one window group
            return position.sample
        plan = plan_epoch(self.order(position.epoch), rows, self.world_size)[self.rank]
        row_ranges = plan.row_ranges[: position.block]
        consumed = sum((rows[r.block] if r.end is None else r.end) - r.begin for r in row_ranges)
        return round(portion * consumed) + position.sample

    def order(self, epoch: int) -> list[int]:
        """Return the blocks in the order of an epoch."""
        count = len(self.blocks)
        return permutation(count, self.seed, epoch).tolist() if self.shuffle else list(range(count))


@dataclass(slots=True)
class _WindowGroup:
    """A group to which windows are being added."""

    block: int
    """The block at which it starts, as a position counts blocks."""
    rows: int
    """How many rows were assigned before it."""
    number: int
    """Its number, from 1 in this iteration."""
    offset: Any
    """The data's own offset before it."""
    num_samples: int = 0
    """Samples in its windows so far."""
    num_windows: int = 0


@dataclass(frozen=True, slots=True)
class _Window:
    """Samples that are permuted together."""

    group: _WindowGroup
    end: int
    """The block after its group, as a position counts blocks."""
    before: int
    """Samples of the group in earlier windows."""
    number: int
    """How many windows of the group come before it."""
    chunks: list[Chunk]
    """The chunks, without their `extra`."""
    order: NDArray[np.int64]
    extra: dict[str, Any]
    ready_batch: Inputs | None
    """The data's own batch with exactly these samples in this order, if there is one."""
    num_ids: NDArray[np.int64]
    """How many ids each sample of the chunks has; empty without a limit."""

    def __len__(self) -> int:
        return len(self.order)


class _GroupShares:
    """Takes a rank's share of the windows of one group that other ranks left unfinished."""

    def __init__(self, shares: Sequence[GroupShare]) -> None:
        self._shares = shares
        self._num_seen = [0] * len(shares)  # samples of each share in earlier windows

    def apply(self, window: _Window) -> _Window:
        """Return the rank's samples of the next window. `_EpochReader._cut` leaves out those that it has consumed."""
        begin, end, before = 0, len(window), window.before
        for i, share in enumerate(self._shares):
            n, part = end - begin, (share.rank + window.number) % share.num_ranks
            begin, end = begin + n * part // share.num_ranks, begin + n * (part + 1) // share.num_ranks
            before, self._num_seen[i] = self._num_seen[i], self._num_seen[i] + end - begin
            if i + 1 < len(self._shares):
                begin += min(max(0, share.num_consumed - before), end - begin)
        return replace(window, before=before, order=window.order[begin:end], ready_batch=None)


@dataclass(slots=True)
class _WindowSlice:
    """Samples of a window that are not in a batch yet: order[begin : end]."""

    window: _Window
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def order(self) -> NDArray[np.int64]:
        """The samples, as the window numbers them."""
        return self.window.order[self.begin : self.end]


class _EpochReader:
    """Reads one epoch from a position in it, and cuts it into batches."""

    def __init__(self, assembler: BatchAssembler, start: Position, skipped_rows: SkippedRows) -> None:
        self.assembler = assembler
        self.skipped_rows = skipped_rows
        self.num_bad = 0  # rows of this epoch that were skipped
        self.num_groups = 0  # started in this iteration
        self.offset = start.offset  # where the last chunk ended
        self.before = tuple(stopped for stopped in start.before if max(p.epoch for p in stopped) >= start.epoch)
        self.start = replace(start, before=self.before)
        rows = [block.num_rows for block in assembler.blocks]
        order = assembler.order(start.epoch)
        self.plan = plan_epoch(order, rows, assembler.world_size, start.epoch, self.before)[assembler.rank]
        if start.block > len(self.plan):
            raise SourceError(
                f"position {start} is at block {start.block} and rank {assembler.rank} of {assembler.world_size} reads "
                f"{len(self.plan)} in an epoch: the source or its settings changed since the position was saved; "
                "declare the source as it was, or start without the position"
            )

    def batches(self) -> Iterator[Inputs]:
        with closing(self._windows()) as windows:
            yield from self._cut(windows)

    def _cut(self, windows: Iterator[_Window]) -> Iterator[Inputs]:
        """Cut windows into batches; leave out the samples before the start."""
        pending, number = deque[_WindowSlice](), self.start.batch
        for window in windows:
            begin = 0
            if window.group.number == 1:
                begin = min(max(0, self.start.sample - window.before), len(window))
            if begin == len(window):
                continue
            pending.append(_WindowSlice(window, begin, len(window)))
            while (size := self._next_size(pending)) is not None:
                number += 1
                yield self._batch(pending, size, number)
        num_pending = sum(map(len, pending))
        if num_pending and self.assembler.drop_last:
            self.skipped_rows.short += num_pending
        elif num_pending:
            yield self._batch(pending, num_pending, number + 1)

    def _next_size(self, pending: deque[_WindowSlice]) -> int | None:
        """Return how many of the pending samples make the next batch; None if it needs others."""
        size, limit = self.assembler.batch_size, self.assembler.limit
        if size is not None and limit is not None:
            return limit.num_fitting((part.window.num_ids[part.order[:size]] for part in pending), size)
        num_pending = sum(map(len, pending))
        return size or num_pending if num_pending >= (size or 1) else None

    def _windows(self) -> Generator[_Window]:
        """Yield the windows from the start on: first of unfinished groups, then of the rank's own row ranges."""
        first = len(self.plan.groups)
        assigner = RowAssigner(self.start.rows, whole_chunks=self.assembler.batch_size is None)
        for index in range(self.start.block, first):
            group = self.plan.groups[index]
            with closing(self._chunks(self._from_start(index, group.row_ranges), index, assigner)) as chunks:
                shares = _GroupShares(group.shares)
                for window in self._fill_windows((index, rows, chunk) for _, rows, chunk in chunks):
                    yield shares.apply(window)
        at = max(self.start.block, first)
        with closing(self._chunks(self._from_start(at, self.plan.row_ranges[at - first :]), at, assigner)) as chunks:
            yield from self._fill_windows(chunks)

    def _from_start(self, index: int, row_ranges: Sequence[RowRange]) -> Sequence[RowRange]:
        """Return the row ranges from an index on; the first one read has the position's number of rows before it."""
        if index != self.start.block or not self.start.sample or not row_ranges:
            return row_ranges
        return [row_ranges[0]._replace(rows_before=self.start.rows), *row_ranges[1:]]

    def _fill_windows(self, numbered: Iterator[tuple[int, int, Chunk | None]]) -> Iterator[_Window]:
        """Collect chunks in windows, and windows in groups."""
        chunks: list[Chunk] = []
        group: _WindowGroup | None = None
        for index, rows, chunk in numbered:
            if group is None:
                self.num_groups += 1
                group = _WindowGroup(index, rows, self.num_groups, self.offset)
            if chunk is not None and len(chunk):
                chunks.append(chunk)
            offset = None if chunk is None else chunk.offset
            if group.number == 1 and group.num_samples + sum(map(len, chunks)) < self.start.sample:
                offset = None  # the samples that the position counts go on, cut into other chunks than before
            is_end = chunk is None or offset is not None  # a block ends, or the data can resume at an offset
            if offset is not None:
                self.offset = offset
            if len(chunks) == self.assembler.num_chunks or (is_end and group.num_windows and chunks):
                yield self._window(group, index + 1, chunks)
                chunks = []
            if is_end and group.num_windows:
                group = None
        if group is not None and chunks:
            yield self._window(group, index + 1, chunks)

    def _chunks(
        self, row_ranges: Sequence[RowRange], first: int, assigner: RowAssigner
    ) -> Generator[tuple[int, int, Chunk | None]]:
        """Yield the rank's samples of row ranges as (range, rows assigned before, chunk); None ends each range."""
        assembler = self.assembler
        ahead = ReadAhead(
            ((assembler.blocks[row_range.block], row_range) for row_range in row_ranges),
            assigner,
            num_threads=assembler.num_threads,
            num_chunks=assembler.num_chunks + 2 * assembler.num_threads,
        )
        with ahead:
            index = first
            for rows_before, chunk in ahead.chunks():
                if chunk is not None:
                    self._count(chunk)
                yield index, rows_before, chunk
                index += chunk is None

    def _count(self, chunk: Chunk) -> None:
        """Count the rows that decoding left out; raise if there are more bad rows than allowed."""
        self.skipped_rows.no_label += chunk.num_dropped
        num_allowed = self.assembler.max_bad_rows - self.num_bad
        if chunk.num_bad > num_allowed:
            allowed = self.assembler.max_bad_rows
            hint = f"only {allowed} bad rows are allowed in an epoch: fix the row" if allowed else "fix the row"
            raise SourceError(f"{chunk.describe_bad(num_allowed)}; {hint}, or allow more with max_bad_rows")
        self.num_bad += chunk.num_bad
        self.skipped_rows.malformed += chunk.num_bad

    def _window(self, group: _WindowGroup, end: int, chunks: list[Chunk]) -> _Window:
        """Close a window of these chunks and add it to its group."""
        n = sum(map(len, chunks))
        if self.assembler.shuffle:
            at = group.block - len(self.plan.groups)
            block = (self.plan.row_ranges[at] if at >= 0 else self.plan.groups[group.block].row_ranges[0]).block
            order = permutation(n, self.assembler.seed, self.start.epoch, block, group.num_windows)
        else:
            order = np.arange(n, dtype=np.int64)
        extra = {
            name: joined(name, [chunk.extra[name].slice(chunk.begin, len(chunk)) for chunk in chunks])
            for name in self.assembler.columns.held
        }
        ready_batch = chunks[0].ready_batch if not self.assembler.shuffle and len(chunks) == 1 else None
        bare = [replace(chunk, extra={}, describe_bad=str, rows=None) for chunk in chunks]
        window = _Window(
            group=group,
            end=end,
            before=group.num_samples,
            number=group.num_windows,
            chunks=bare,
            order=order,
            extra=extra,
            ready_batch=ready_batch,
            num_ids=np.empty(0, np.int64) if self.assembler.limit is None else self.assembler.limit.count(bare),
        )
        group.num_samples += n
        group.num_windows += 1
        return window

    def _batch(self, pending: deque[_WindowSlice], n: int, number: int) -> Inputs:
        """Return a batch of the next n pending samples; there must be as many."""
        taken: list[_WindowSlice] = []
        remaining = n
        while remaining:
            current = pending[0]
            end = min(current.end, current.begin + remaining)
            taken.append(_WindowSlice(current.window, current.begin, end))
            remaining -= end - current.begin
            current.begin = end
            if current.begin == current.end:
                pending.popleft()
        last = taken[-1]
        group, num_consumed = last.window.group, last.window.before + last.end
        position = Position(
            self.start.epoch, group.block, number, num_consumed, last.window.end, group.rows, self.before, group.offset
        )
        if last.window.ready_batch is not None and last.begin == 0 and last.end == n == len(last.window):
            return replace(last.window.ready_batch, position=position)
        return inputs_of(self.assembler.columns, [(s.window, s.order) for s in taken], position)


def inputs_of(columns: Columns, taken: list[tuple[_Window, NDArray[np.int64]]], position: Position) -> Inputs:
    """Return one batch of samples from several windows."""
    chunks: list[Chunk] = []
    orders, before = [], 0
    for window, order in taken:
        chunks += window.chunks
        orders.append(order + before)
        before += sum(map(len, window.chunks))
    values, offsets, weights, dense, label = _core.gather(
        [(chunk.decoded(), chunk.begin, chunk.stop) for chunk in chunks], np.concatenate(orders)
    )
    extra = {name: joined(name, [w.extra[name].take(order) for w, order in taken]) for name in columns.held}
    is_flat = label is not None and _is_label_flat(columns, chunks)
    return Inputs(
        names=columns.features,
        values=values,
        offsets=offsets,
        weights=weights,
        batch_size=sum(map(len, orders)),
        dense=dense,
        label=label[:, 0] if label is not None and is_flat else label,
        position=position,
        extra=extra,
    )


def joined(name: str, arrays: list[Any]) -> Any:
    """Concatenate the values of a further column. Their types may differ between files, and where data has no types
    between chunks: one without any value is of nulls."""
    if len({array.type for array in arrays}) > 1:
        arrow = pyarrow_for("joining columns")
        plain = [array.dictionary_decode() if arrow.types.is_dictionary(array.type) else array for array in arrays]
        schemas = [arrow.schema([(name, array.type)]) for array in plain]
        try:
            kind = arrow.unify_schemas(schemas, promote_options="permissive").field(name).type
            arrays = [array.cast(kind) for array in plain]
        except arrow.ArrowException as error:
            kinds = ", ".join(sorted({str(array.type) for array in arrays}))
            raise SourceError(
                f"column {name!r} has values of the types {kinds}, which no type holds together ({error}): write the "
                "column in one type"
            ) from error
    return concatenated(arrays)


def _is_label_flat(columns: Columns, chunks: list[Chunk]) -> bool:
    """Return whether the label has shape [n]: because one column is declared, or because it is so in the data."""
    if columns.label:
        return columns.is_single_label
    is_flat = {chunk.is_label_flat for chunk in chunks}
    if len(is_flat) > 1:
        raise SourceError(
            "a batch takes samples of items with labels [n] and of items with labels [n, 1]; give all items one shape"
        )
    return is_flat.pop()


class Batches(Iterator[Inputs]):
    """An iterator over the batches of a source. `close`, or dropping the last reference to it, stops its threads."""

    def __init__(self, assembler: BatchAssembler, watch: Callable[[Inputs | None], None]) -> None:
        """watch: called with each batch, and with None at the end."""
        self._assembler, self._watch = assembler, watch
        self._skipped_rows = SkippedRows()
        self._batches = assembler.batches(self._skipped_rows)

    def __iter__(self) -> "Batches":
        return self

    def __len__(self) -> int:
        """Return the number of batches from the first one on; TypeError if it is unknown before they are read."""
        return self._assembler.num_batches()

    def about_length(self) -> int:
        """Return the same, or an estimate where a share of the samples is read or rows may be left out."""
        return self._assembler.about_num_batches()

    def __next__(self) -> Inputs:
        inputs = next(self._batches, None)
        self._watch(inputs)
        if inputs is None:
            raise StopIteration
        return inputs

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the iteration; return when all of its threads have ended."""
        self._batches.close()

    @property
    def skipped_rows(self) -> SkippedRows:
        """The samples that were left out so far, by reason."""
        return replace(self._skipped_rows)
