"""The split over ranks: each sample has one rank, the shares are even, and another number of ranks can continue."""

import gzip
from collections import Counter
from itertools import chain
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from satrap.config.columns import IdColumn
from satrap.data.delimited import CSV
from satrap.data.inputs import Position
from satrap.data.rank_split import RowRange, assign, rank_share
from satrap.errors import SourceError
from uneven_source import UnevenSource, at, ids, uneven_sources


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 9))
def test_known_rows_are_assigned_evenly_in_whole_blocks(rows: list[int], world_size: int) -> None:
    ranks = assign([RowRange(block) for block in range(len(rows))], rows, world_size)
    spans = [[(p.block, p.begin, rows[p.block] if p.end is None else p.end) for p in rank] for rank in ranks]
    assigned = [(block, row) for rank in spans for block, begin, end in rank for row in range(begin, end)]
    assert sorted(assigned) == [(block, row) for block, n in enumerate(rows) for row in range(n)], "each row once"
    counts = [sum(end - begin for _, begin, end in rank) for rank in spans]
    assert max(counts) - min(counts) <= 1
    assert all(rank == sorted(rank) for rank in spans), "in the order of the blocks"
    assert sum(map(len, ranks)) - len(rows) < world_size, "at most one cut less than ranks"


@given(st.lists(st.integers(0, 20), max_size=10), st.integers(1, 9))
def test_shares_are_even_after_every_chunk(sizes: list[int], world_size: int) -> None:
    counts, before = [0] * world_size, 0
    for size in sizes:
        found = [rank_share(size, before, rank, world_size) for rank in range(world_size)]
        assert [row for begin, end in found for row in range(begin, end)] == list(range(size))
        counts = [count + end - begin for count, (begin, end) in zip(counts, found, strict=True)]
        assert max(counts) - min(counts) <= 1
        before += size


@given(uneven_sources(), st.sampled_from([1, 2, 3, 7]))
def test_ranks_partition_the_samples(data: UnevenSource, world_size: int) -> None:
    ranks = [list(data.batches(["a"], rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert Counter(i for rank in ranks for i in ids(rank)) == dict.fromkeys(range(data.total), data.epochs)
    counts = [len(ids(rank)) // (data.epochs or 1) for rank in ranks]
    assert max(counts) - min(counts) <= 1, "equally many for each rank"


@settings(max_examples=settings().max_examples // 3)
@given(uneven_sources(), st.lists(st.sampled_from([1, 2, 3, 7]), min_size=2, max_size=4), st.data())
def test_another_number_of_ranks_continues(data: UnevenSource, worlds: list[int], draw: st.DataObject) -> None:
    """Trainers stop after different numbers of batches, and others continue: every sample occurs once."""
    seen: Counter[int] = Counter()
    start: Position | None = None
    for world_size in worlds:
        positions = []
        for rank in range(world_size):
            batches = list(data.batches(["a"], position=start, rank=rank, world_size=world_size))
            taken = len(batches) if world_size is worlds[-1] else draw.draw(st.integers(0, len(batches)))
            seen.update(ids(batches[:taken]))
            first = start or Position(0, 0, 0)
            positions.append(at(batches[taken - 1]) if taken else first)
        start = Position.from_dict(Position.after(positions).to_dict())
    assert not list(data.batches(["a"], position=start)), "no sample is left"
    assert seen == dict.fromkeys(range(data.total), data.epochs)


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
@pytest.mark.parametrize("newlines", [False, True])
def test_ranks_share_the_rows_of_a_text_file(ending: str, newlines: bool, tmp_path: Path) -> None:
    """Each row has one rank, with blank lines, quoted newlines, no newline at the end and malformed rows."""
    notes = ["a\n\nb" if newlines and i % 3 == 0 else "c" for i in range(200)]
    rows = [f'{i},"{note}"' for i, note in enumerate(notes)]
    rows[50:50], rows[90] = ["", ""], "bad,d"
    text = ("id,note\n" + "\n".join(rows)).encode()
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(text if ending == "csv" else gzip.compress(text))
    data = CSV(
        path,
        ids={"id": IdColumn(kind="integer")},
        extra="note",
        newlines_in_values=newlines,
        block_bytes=256,
        batch_size=16,
        max_bad_rows=1,
        num_threads=2,
    )
    expected = sorted({*range(200)} - {90 - 2})
    for world_size in (1, 2, 3, 7):
        ranks = [data.batches(["id"], rank=rank, world_size=world_size) for rank in range(world_size)]
        found = [[i for inputs in rank for i in inputs.values.tolist()] for rank in ranks]
        assert sorted(chain.from_iterable(found)) == expected
        assert sum(rank.skipped_rows.malformed for rank in ranks) == 1, "one rank has the bad row"
        assert max(map(len, found)) - min(map(len, found)) <= 4, "two blank lines and a bad row count as rows"
    refused = data.replace(max_bad_rows=0)
    line = text[: text.index(b"bad,d")].count(b"\n") + 1
    with pytest.raises(SourceError, match=f"line {line}: column 'id'"):
        for rank in range(3):
            list(refused.batches(["id"], rank=rank, world_size=3))
