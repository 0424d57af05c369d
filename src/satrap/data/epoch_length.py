"""How many batches a road has from its position on, where that is known before anything is read.

Blocks know their rows (Parquet, tables and frames in memory), or one block knows its items: samples, or batches. Where
rows may be left out, or the data says nothing of its length, there is no answer. Several trainers take as many steps
as the one with the most rows has batches.
"""

import numpy as np

from satrap.data.batch_assembler import BatchAssembler
from satrap.data.rank_split import plans
from satrap.data.shuffle_order import permutation


def num_batches(road: BatchAssembler) -> int:
    """The steps that are left at the beginning of a stream; TypeError says why they are not known."""
    at = road.position
    if road.epochs is None:
        raise TypeError("epochs is None, so there is no end")
    if road.max_bad_rows or any(label.missing == "drop" for label in road.columns.label):
        raise TypeError("rows may be left out, by max_bad_rows or by a label's missing='drop'")
    if at.before or (at.is_of_older_release and road.world > 1):
        raise TypeError("this epoch was begun by another number of trainers, or by an older release")
    if at.epoch >= road.epochs:
        return 0
    found = [block.num_items if block.num_rows is None else block.num_rows for block in road.blocks]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        raise TypeError("the data does not say how many samples it has before it is read")
    size, cut = road.batch_size or 1, 0 if road.drop_last else (road.batch_size or 1) - 1
    most = -(-sum(known) // road.world)
    return (most - _given(road, known) + cut) // size + (road.epochs - at.epoch - 1) * ((most + cut) // size)


def _given(road: BatchAssembler, rows: list[int]) -> int:
    """What this trainer was given of the epoch: rows, or items that are batches."""
    at = road.position
    if road.batch_size is None:
        if at.batch > rows[0]:
            raise TypeError("its position counts batches that were cut in another way")
        return at.batch
    if road.blocks and road.blocks[0].num_rows is None:  # one block of samples, and so one chain
        return at.sample
    order = permutation(len(rows), road.seed, at.epoch) if road.shuffle else np.arange(len(rows))
    parts = plans(order.tolist(), rows, road.world)[road.rank].parts[: at.block]
    return sum((rows[part.block] if part.end is None else part.end) - part.begin for part in parts) + at.sample
