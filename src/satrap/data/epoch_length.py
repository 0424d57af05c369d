"""The number of batches that a source has after a position, where it is known before anything is read.

It is known where every block knows its rows (Parquet, tables and frames in memory), or where the only block knows its
items: samples or batches. It is unknown where rows may be left out, or where the data does not say its length. With
several trainers, all of them run as many steps as the trainer with the most rows has batches.
"""

import numpy as np

from satrap.data.batch_assembler import BatchAssembler
from satrap.data.rank_split import plan_epoch
from satrap.data.shuffle_order import permutation


def num_batches(assembler: BatchAssembler, *, selects_all: bool = True) -> int:
    """Return the number of steps from the stream's position to its end; TypeError says why it is unknown."""
    position = assembler.position
    if assembler.epochs is None:
        raise TypeError("epochs is None, so there is no end")
    if not selects_all:
        raise TypeError("share, before or since select some of the samples")
    if assembler.max_bad_rows or any(label.missing == "drop" for label in assembler.columns.label):
        raise TypeError("rows may be left out, by max_bad_rows or by a label's missing='drop'")
    if assembler.limit is not None:
        raise TypeError("max_ids decides how many samples a batch has")
    if position.before:
        raise TypeError("another number of trainers started this epoch")
    if position.epoch >= assembler.epochs:
        return 0
    sizes = [block.num_items if block.num_rows is None else block.num_rows for block in assembler.blocks]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        raise TypeError("the data does not say how many samples it has before it is read")
    size, round_up = assembler.batch_size or 1, 0 if assembler.drop_last else (assembler.batch_size or 1) - 1
    most = -(-sum(known) // assembler.world_size)
    return (most - _num_consumed(assembler, known) + round_up) // size + (assembler.epochs - position.epoch - 1) * (
        (most + round_up) // size
    )


def _num_consumed(assembler: BatchAssembler, rows: list[int]) -> int:
    """Return how many rows of the epoch this trainer has consumed, or how many items where each is a batch."""
    position = assembler.position
    if assembler.batch_size is None:
        if position.batch > rows[0]:
            raise TypeError("the position counts batches that were cut in another way")
        return position.batch
    if assembler.blocks and assembler.blocks[0].num_rows is None:  # one block of samples, and so one window group
        return position.sample
    order = permutation(len(rows), assembler.seed, position.epoch) if assembler.shuffle else np.arange(len(rows))
    row_ranges = plan_epoch(order.tolist(), rows, assembler.world_size)[assembler.rank].row_ranges[: position.block]
    return sum((rows[r.block] if r.end is None else r.end) - r.begin for r in row_ranges) + position.sample
