"""How many batches a road has from its position on, where that is known before anything is read.

Blocks know their rows (Parquet, tables and frames in memory, lists of samples), or one block knows its items, each a
batch. Where rows may be left out, or the data says nothing of its length, there is no answer.
"""

from satrap.sources.order import turns
from satrap.sources.road import Road


def num_batches(road: Road) -> int:
    """The batches that are left at the beginning of a stream; TypeError says why they are not known."""
    if road.epochs is None:
        raise TypeError("epochs is None, so there is no end")
    if road.world > 1:
        raise TypeError("it is known for one trainer alone")
    if road.max_bad_rows or any(label.missing == "drop" for label in road.columns.label):
        raise TypeError("rows may be left out, by max_bad_rows or by a label's missing='drop'")
    at = road.position
    epochs = road.epochs - at.epoch - 1  # after the one that it begins in
    if epochs < 0:
        return 0
    if road.batch_size is None:
        items = road.blocks[0].num_items
        if items is None:
            raise TypeError("the items are no list, and give no number of them")
        return items - at.batch + epochs * items
    rows = [block.num_rows for block in road.blocks]
    known = [each for each in rows if each is not None]
    if len(known) < len(rows):
        raise TypeError("the data does not say how many samples it has before it is read")
    size, cut = road.batch_size, 0 if road.drop_last else road.batch_size - 1
    order = turns(len(known), shuffle=road.shuffle, seed=road.seed, epoch=at.epoch, rank=0, world=1)
    left = sum(known[turn.block] for turn in order[at.block :]) - at.sample
    return (left + cut) // size + epochs * ((sum(known) + cut) // size)
