"""The road from blocks to batches, whatever the format: order, shuffling, ranks, positions, threads and memory.

Most properties are asked of a made-up source whose blocks and pieces are as uneven as can be; a few of every format.
"""

import gc
import gzip
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

import clicks
from clicks import FEATURES, WRITERS, make, source
from made_source import Made, Numbers, at, ids, made
from satrap.config.columns import Columns
from satrap.data.block import Block, Piece
from satrap.data.delimited import CSV
from satrap.data.inputs import Position
from satrap.data.parquet import Parquet
from satrap.data.rank_split import Dealer, Part
from satrap.data.read_ahead import ReadAhead
from satrap.data.shuffle_order import permutation
from satrap.errors import ConfigError, InputError, SourceError

DEADLINE = 120.0


# -- order -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_permutations_are_permutations_and_differ(n: int, seed: int, epoch: int) -> None:
    order = permutation(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, permutation(n, seed, epoch))
    if n > 20:
        assert not np.array_equal(order, permutation(n, seed, epoch + 1))
        assert not np.array_equal(order, permutation(n, seed ^ 1, epoch))


def test_permutations_never_change() -> None:
    """A position that was saved means this order."""
    assert permutation(10, 0, 0).tolist() == [5, 8, 9, 2, 3, 6, 0, 1, 7, 4]
    assert permutation(10, 7, 1, 2).tolist() == [0, 2, 3, 6, 9, 8, 7, 4, 5, 1]


# -- batches -----------------------------------------------------------------------------------------------------------


@given(made())
def test_every_sample_comes_once_an_epoch(data: Made) -> None:
    batches = list(data.batches(["a"]))
    assert Counter(ids(batches)) == dict.fromkeys(range(data.total), data.epochs)
    if not data.shuffle:
        assert ids(batches) == list(range(data.total)) * (data.epochs or 0)
    for epoch in range(data.epochs or 0):
        sizes = [inputs.batch_size for inputs in batches if at(inputs).epoch == epoch]
        assert sizes == sizes_of(data.total, data.batch_size or 0)
        assert [at(inputs).batch for inputs in batches if at(inputs).epoch == epoch] == list(range(1, len(sizes) + 1))
    full = [inputs for inputs in batches if inputs.batch_size == data.batch_size]
    without_short = data.replace(drop_last=True).batches(["a"])
    assert ids(without_short) == ids(full)
    assert without_short.left_out.short == (data.epochs or 0) * (data.total % (data.batch_size or 1))


def sizes_of(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


@given(made(), st.sampled_from([1, 1, 2, 5]))
@settings(max_examples=60)
def test_resuming_anywhere_is_going_on(data: Made, world: int) -> None:
    for rank in range(world):
        whole = list(data.batches(["a"], rank=rank, world=world))
        for i, inputs in enumerate(whole):
            position = Position.from_dict(at(inputs).to_dict())
            rest = list(data.batches(["a"], position=position, rank=rank, world=world))
            assert ids(rest) == ids(whole[i + 1 :])
            assert [each.position for each in rest] == [each.position for each in whole[i + 1 :]]


@given(made(shuffle=True))
def test_the_same_bits_for_any_threads(data: Made) -> None:
    first = list(data.batches(["a"]))
    for num_threads in (0, 1, 4):
        again = list(data.replace(num_threads=num_threads).batches(["a"]))
        assert ids(again) == ids(first) and [i.position for i in again] == [i.position for i in first]


@given(made(whole=True))
def test_what_came_whole_changes_nothing(data: Made) -> None:
    found, wanted = (list(each.batches(["a"])) for each in (data, data.replace(whole=False)))
    assert [(i.position, ids([i])) for i in found] == [(i.position, ids([i])) for i in wanted]


def test_shuffling_mixes_blocks_and_differs_by_epoch_and_seed() -> None:
    data = Made(sizes=[[100]] * 20, shuffle=True, shuffle_blocks=4, epochs=2, batch_size=400)
    batches = list(data.batches(["a"]))
    first, second = ids(batches[:5]), ids(batches[5:])
    assert first != second and sorted(first) == sorted(second)
    assert ids(data.replace(seed=1).batches(["a"])) != first + second
    for inputs in batches:
        blocks = Counter(i // 100 for i in np.asarray(inputs.values).tolist())
        assert sorted(blocks.values()) == [100] * 4  # a window is four blocks here, and a batch a window
        assert inputs.values.tolist() != sorted(inputs.values.tolist())


def test_only_the_chain_of_a_position_is_read_again() -> None:
    read: list[int] = []

    class Watched(Numbers):
        def read(self) -> Iterator[tuple[int, int]]:
            read.append(self._first)
            return super().read()

    class WatchedSource(Made):
        def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
            return [Watched(10 * i, [10], None) for i in range(30)]

    for options, most in (({}, 1), ({"shuffle": True, "shuffle_blocks": 3}, 3)):
        data = WatchedSource(batch_size=7, num_threads=0, **options)  # type: ignore[arg-type]
        batches = list(data.batches(["a"]))
        for i in (3, 11, 40):
            read.clear()
            rest = data.batches(["a"], position=batches[i].position)
            assert ids([next(rest)]) == ids([batches[i + 1]])
            assert len(read) <= 2 * most  # twice, where the batch takes from two windows
            rest.close()


@given(made(epochs=1), st.integers(1, 20))
def test_a_position_holds_where_the_signature_is_equal(data: Made, batch_size: int) -> None:
    other = data.replace(batch_size=batch_size, num_threads=0)
    assert other.signature() == data.signature()
    for i, inputs in enumerate(whole := list(data.batches(["a"]))):
        assert ids(other.batches(["a"], position=inputs.position)) == ids(whole[i + 1 :])
    assert (data.replace(seed=data.seed ^ 1).signature() == data.signature()) is not data.shuffle
    assert data.replace(shuffle=not data.shuffle).signature() != data.signature()


def test_signatures_name_what_decides_where_blocks_begin(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("12345")
    assert Parquet(tmp_path, shuffle=True).signature() == {
        "type": "Parquet",
        "shuffle": True,
        "shuffle_blocks": 16,
        "seed": 0,
        "block_rows": 32768,
        "files": [["x", 5]],
    }
    plain = CSV(tmp_path / "x")
    changed = (plain.replace(block_bytes=1), plain.replace(skip_lines=1))
    assert len({str(each.signature()) for each in (plain, *changed)}) == 3


def test_epochs_without_end() -> None:
    data = Made(sizes=[[3], [4]], batch_size=5, epochs=None)
    assert ids(islice(data.batches(["a"]), 6)) == list(range(7)) * 3
    for empty in (data.replace(sizes=[]), data.replace(drop_last=True, batch_size=8)):
        with pytest.raises(SourceError, match="epoch 0 has no batch, and epochs is None"):
            next(empty.batches(["a"]))


# -- bad rows ----------------------------------------------------------------------------------------------------------


def test_bad_rows_are_counted_up_to_the_limit() -> None:
    data = Made(sizes=[[5], [5], [5]], bad=2, max_bad_rows=6, epochs=2)
    batches = data.batches(["a"])
    assert len(ids(batches)) == 30 and batches.left_out.malformed == 12  # the limit is for each epoch
    batches = data.replace(max_bad_rows=5, batch_size=5).batches(["a"])
    with pytest.raises(SourceError, match="block 10: bad; 5 bad rows are allowed in an epoch and were skipped before"):
        list(batches)
    assert batches.left_out.malformed == 4
    with pytest.raises(SourceError, match="block 0: bad; mend the row, or allow more with max_bad_rows"):
        list(data.replace(max_bad_rows=0).batches(["a"]))


# -- threads -----------------------------------------------------------------------------------------------------------


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("satrap-source")]


def gone() -> bool:
    limit = time.monotonic() + DEADLINE
    while own_threads() and time.monotonic() < limit:
        threading.Event().wait(0.001)
    return not own_threads()


@pytest.mark.parametrize("end", ["drop", "close", "with", "error"])
def test_no_thread_outlives_its_iterator(end: str) -> None:
    data = Made(sizes=[[100]] * 50, batch_size=10, num_threads=3)
    batches = data.batches(["a"])
    assert not own_threads()  # before the first batch
    next(batches)
    assert own_threads()
    match end:
        case "drop":
            gc.disable()  # being dropped is enough, nothing waits for the collector
            try:
                del batches
                assert not own_threads()
            finally:
                gc.enable()
        case "close":
            batches.close()
            assert not own_threads() and list(batches) == []
        case "with":
            with batches:
                next(batches)
            assert not own_threads()
        case "error":
            with pytest.raises(ZeroDivisionError):
                for inputs in batches:
                    _ = inputs.batch_size / 0
            del batches
            assert gone()


class Failing(Numbers):
    def __init__(self, where: str) -> None:
        super().__init__(0, [4, 4, 4], 1)
        self._where = where

    def read(self) -> Iterator[tuple[int, int]]:
        for i, raw in enumerate(super().read()):
            if i == 1 and self._where == "read":
                raise SourceError("torn")
            yield raw

    def decode(self, raw: tuple[int, int]) -> Piece:
        if raw[0] == 4 and self._where == "decode":
            raise SourceError("malformed")
        return super().decode(raw)


@pytest.mark.parametrize("num_threads", [0, 1, 4])
@pytest.mark.parametrize(("where", "message"), [("read", "torn"), ("decode", "malformed")])
def test_an_error_comes_where_its_samples_would_have(where: str, message: str, num_threads: int) -> None:
    @dataclass(frozen=True)
    class Source_(Made):
        def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
            return [Failing(where), Numbers(12, [4], None)]

    batches = Source_(batch_size=2, num_threads=num_threads).batches(["a"])
    assert ids(islice(batches, 2)) == [0, 1, 2, 3]
    with pytest.raises(SourceError, match=message):
        next(batches)
    assert gone()


def test_what_is_read_ahead_is_bounded() -> None:
    """Never more pieces under way than allowed, and every thread has some: counted while the consumer dawdles."""
    lock, open_now, most = threading.Lock(), 0, 0
    three = threading.Barrier(3)

    class Counted(Numbers):
        def decode(self, raw: tuple[int, int]) -> Piece:
            nonlocal open_now, most
            with lock:
                open_now += 1
                most = max(most, open_now)
            if raw[0] < 3:
                three.wait(DEADLINE)  # three threads decode at once
            return super().decode(raw)

    blocks = [(Counted(i, [1], None), Part(i)) for i in range(40)]
    with ReadAhead(blocks, Dealer(), num_threads=3, num_pieces=5) as ahead:
        for _, piece in ahead.pieces():
            if piece is not None:
                with lock:
                    open_now -= 1
    assert most <= 6  # five, and the one that was just handed over


def test_pieces_of_one_block_are_decoded_side_by_side() -> None:
    both = threading.Barrier(2)

    class Slow(Numbers):
        def decode(self, raw: tuple[int, int]) -> Piece:
            both.wait(DEADLINE)
            return super().decode(raw)

    with ReadAhead([(Slow(0, [1, 1, 1, 1], 3), Part(0))], Dealer(), num_threads=2, num_pieces=4) as ahead:
        assert sum(piece is not None for _, piece in ahead.pieces()) == 4


# -- every format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", WRITERS)
def test_formats_resume_and_partition(kind: str, shuffle: bool, tmp_path: Path, seed: int) -> None:
    samples = make(500, seed)
    for i in range(5):
        WRITERS[kind](tmp_path / f"{i}.{kind}", samples[100 * i : 100 * i + 100])
    data = source(kind, tmp_path, batch_size=48, shuffle=shuffle, shuffle_blocks=3, seed=seed)
    wanted = sorted(map(clicks.expected, samples))
    assert sorted(clicks.read(data)) == wanted
    assert sorted(s for rank in range(3) for s in clicks.read(data, rank=rank, world=3)) == wanted
    whole = [(inputs.position, clicks.samples_in(inputs)) for inputs in data.batches(FEATURES)]
    for i, (position, _) in enumerate(whole):
        rest = [(inputs.position, clicks.samples_in(inputs)) for inputs in data.batches(FEATURES, position=position)]
        assert rest == whole[i + 1 :]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "arrow", "arrows"])
def test_memory_does_not_grow_with_the_file(kind: str, tmp_path: Path) -> None:
    """A file of 45 to 60 MB, in one row group, record batch or stream, costs a few pieces of it."""
    some = make(2000, 0)
    paths = [tmp_path / f"small.{kind}", tmp_path / f"large.{kind}"]
    for path, times in zip(paths, (2, 300), strict=True):
        if kind.startswith("csv"):
            clicks.write_csv(tmp_path / "some.csv", some)
            header, _, rows = (tmp_path / "some.csv").read_bytes().partition(b"\n")
            text = header + b"\n" + rows * times
            path.write_bytes(text if kind == "csv" else gzip.compress(text, 1))
            continue
        table = pa.concat_tables([clicks.table(some)] * times).combine_chunks()
        if kind == "parquet":
            pq.write_table(table, path, use_dictionary=False, compression="none", row_group_size=10**9)
            continue
        new = pa.ipc.new_stream if kind == "arrows" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=10**9 if kind == "arrow" else 2000)
    program = Path(__file__).parents[1] / "source_memory_child.py"
    command = [sys.executable, str(program), kind, *map(str, paths)]
    exact = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}  # others keep what was freed
    found = subprocess.run(command, env=exact, capture_output=True, text=True, check=True, timeout=300).stdout
    if not found:
        pytest.skip("needs /proc")
    assert kind == "csv.gz" or paths[1].stat().st_size > 40 << 20
    print(kind, "grew by", int(found))
    assert int(found) < 24 << 20


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda data: data.batches(["a"], rank=2, world=2),
            ConfigError,
            "Made: rank is 2; expected an integer from 0 to 1",
        ),
        (lambda data: data.batches(["a"], world=0), ConfigError, "Made: world is 0"),
        (lambda data: data.batches(["a"], position=(0, 0, 0)), InputError, "position is .*; wanted the position of a"),
        (lambda data: data.batches(["a", "a"]), ConfigError, "features holds 'a' twice"),
        (lambda data: data.batches([1]), ConfigError, "features is .*; wanted texts"),
        (
            lambda data: next(data.batches(["a"], position=Position(0, 9, 1))),
            SourceError,
            "position .* is at block 9 and rank 0 of 1 reads 2 in an epoch: the source or its settings changed",
        ),
    ],
)
def test_wrong_calls_are_refused(call: Callable[[Made], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(Made(sizes=[[1], [2]]))
