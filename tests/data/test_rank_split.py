"""Which rank reads what: every sample goes to one rank, ranks get as many, and another number of ranks goes on."""

import gzip
import json
from collections import Counter
from itertools import chain
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from made_source import Made, at, ids, made
from satrap.config.columns import IdColumn
from satrap.data.delimited import CSV
from satrap.data.inputs import Position
from satrap.data.rank_split import Part, deal
from satrap.data.rank_split import share as deal_share
from satrap.data.shuffle_order import permutation, share, turns
from satrap.errors import SourceError

FIXTURES = Path(__file__).parents[1] / "fixtures"


@given(st.integers(0, 40), st.integers(1, 9), st.booleans(), st.integers(0, 9), st.integers(0, 3))
def test_every_block_is_read_by_one_rank_or_shared_by_all(n: int, world: int, shuffle: bool, seed: int, e: int) -> None:
    order = permutation(n, seed, e).tolist() if shuffle else list(range(n))
    ranks = [turns(order, rank=rank, world=world) for rank in range(world)]
    own = [turn.block for rank in ranks for turn in rank if not turn.shared]
    shared = [[turn.block for turn in rank if turn.shared] for rank in ranks]
    assert all(each == shared[0] for each in shared)
    assert sorted(own + shared[0]) == list(range(n))
    assert len(shared[0]) < world and len({len(rank) for rank in ranks}) == 1
    if not shuffle:
        assert all(rank == sorted(rank) for rank in ranks)


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 9))
def test_rows_that_are_known_are_dealt_out_evenly_in_whole_blocks(rows: list[int], world: int) -> None:
    ranks = deal([Part(block) for block in range(len(rows))], rows, world)
    spans = [[(p.block, p.begin, rows[p.block] if p.end is None else p.end) for p in rank] for rank in ranks]
    dealt = [(block, row) for rank in spans for block, begin, end in rank for row in range(begin, end)]
    assert sorted(dealt) == [(block, row) for block, n in enumerate(rows) for row in range(n)], "every row once"
    counts = [sum(end - begin for _, begin, end in rank) for rank in spans]
    assert max(counts) - min(counts) <= 1
    assert all(rank == sorted(rank) for rank in spans), "in their order"
    assert sum(map(len, ranks)) - len(rows) < world, "at most one cut for each rank but one"


@given(st.lists(st.integers(0, 20), max_size=10), st.integers(1, 9))
def test_shares_of_pieces_are_even_after_every_piece(sizes: list[int], world: int) -> None:
    counts, before = [0] * world, 0
    for size in sizes:
        found = [deal_share(size, before, rank, world) for rank in range(world)]
        assert [row for begin, end in found for row in range(begin, end)] == list(range(size))
        counts = [count + end - begin for count, (begin, end) in zip(counts, found, strict=True)]
        assert max(counts) - min(counts) <= 1
        before += size


@given(st.integers(0, 100), st.integers(0, 30), st.integers(1, 9))
def test_shares_are_even_and_cover_everything(n: int, number: int, world: int) -> None:
    shares = [share(n, number, rank, world) for rank in range(world)]
    assert sorted(chain.from_iterable(range(*each) for each in shares)) == list(range(n))
    assert {end - begin for begin, end in shares} <= {n // world, -(-n // world)}


@given(made(), st.sampled_from([1, 2, 3, 7]))
def test_ranks_partition_the_samples(data: Made, world: int) -> None:
    ranks = [list(data.batches(["a"], rank=rank, world=world)) for rank in range(world)]
    assert Counter(i for rank in ranks for i in ids(rank)) == dict.fromkeys(range(data.total), data.epochs)
    counts = [len(ids(rank)) // (data.epochs or 1) for rank in ranks]
    assert max(counts) - min(counts) <= 1, "as many for each"
    if world == 1:
        assert ids(ranks[0]) == ids(data.batches(["a"]))


@given(made(), st.lists(st.sampled_from([1, 2, 3, 7]), min_size=2, max_size=4), st.data())
def test_another_number_of_ranks_goes_on_with_what_is_left(data: Made, worlds: list[int], draw: st.DataObject) -> None:
    """Trainers stop anywhere, each after its own number of batches, and others go on: every sample comes once."""
    seen: Counter[int] = Counter()
    start: Position | None = None
    for world in worlds:
        positions = []
        for rank in range(world):
            batches = list(data.batches(["a"], position=start, rank=rank, world=world))
            taken = len(batches) if world is worlds[-1] else draw.draw(st.integers(0, len(batches)))
            seen.update(ids(batches[:taken]))
            first = start or Position(0, 0, 0)
            positions.append(at(batches[taken - 1]) if taken else first)
        start = Position.from_dict(Position.after(positions).to_dict())
    assert not list(data.batches(["a"], position=start)), "nothing is left"
    assert seen == dict.fromkeys(range(data.total), data.epochs)


def test_positions_of_older_releases_go_on_as_there() -> None:
    """The file was written by a release that dealt blocks out in another way."""
    cases = json.loads((FIXTURES / "positions_of_older_releases.json").read_text())
    sizes = [[3, 4], [5], [], [2, 2, 2], [7], [1], [6, 1], [9]]
    for case in cases:
        data = Made(sizes=sizes, guess=1, batch_size=4, shuffle=case["shuffle"], shuffle_blocks=3, seed=5, counted=True)
        position = Position.from_dict(case["position"])
        rest = data.batches(["a"], position=position, rank=case["rank"], world=case["world"])
        assert [inputs.values.tolist() for inputs in rest] == case["rest"]
    assert len(cases) == 30


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
@pytest.mark.parametrize("newlines", [False, True])
def test_ranks_share_the_rows_of_a_text(ending: str, newlines: bool, tmp_path: Path) -> None:
    """With blank lines, quoted newlines, no newline at the end and rows that are refused: each row is one rank's."""
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
    wanted = sorted({*range(200)} - {90 - 2})
    for world in (1, 2, 3, 7):
        ranks = [data.batches(["id"], rank=rank, world=world) for rank in range(world)]
        found = [[i for inputs in rank for i in inputs.values.tolist()] for rank in ranks]
        assert sorted(chain.from_iterable(found)) == wanted
        assert sum(rank.left_out.malformed for rank in ranks) == 1, "the bad row is one rank's"
        assert max(map(len, found)) - min(map(len, found)) <= 4, (
            "two blank lines and a bad row are rows to be dealt out"
        )
    refused = data.replace(max_bad_rows=0)
    line = text[: text.index(b"bad,d")].count(b"\n") + 1
    with pytest.raises(SourceError, match=f"line {line}: column 'id'"):
        for rank in range(3):
            list(refused.batches(["id"], rank=rank, world=3))
