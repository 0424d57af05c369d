"""The way from blocks to batches for any format: order, shuffling, ranks, positions, threads and memory.

Most properties are tested on a generated source with very uneven blocks and chunks; a few on every format.
"""

import gc
import gzip
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from clicks import FEATURES, KINDS, make, source
from satrap.config.columns import Columns
from satrap.data.block import Block, Chunk
from satrap.data.delimited import CSV
from satrap.data.inputs import Position
from satrap.data.parquet import Parquet
from satrap.data.rank_split import RowAssigner, RowRange
from satrap.data.read_ahead import ReadAhead
from satrap.data.shuffle_order import permutation
from satrap.errors import ConfigError, InputError, SourceError
from uneven_source import Numbers, UnevenSource, at, ids, number_block, uneven_sources
from waiting import DEADLINE_SECONDS, wait_until

# -- order -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_permutations_are_complete_and_differ(n: int, seed: int, epoch: int) -> None:
    order = permutation(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, permutation(n, seed, epoch))
    if n > 20:
        assert not np.array_equal(order, permutation(n, seed, epoch + 1))
        assert not np.array_equal(order, permutation(n, seed ^ 1, epoch))


def test_permutations_never_change() -> None:
    """Saved positions rely on this order."""
    assert permutation(10, 0, 0).tolist() == [5, 8, 9, 2, 3, 6, 0, 1, 7, 4]
    assert permutation(10, 7, 1, 2).tolist() == [0, 2, 3, 6, 9, 8, 7, 4, 5, 1]


# -- batches -----------------------------------------------------------------------------------------------------------


@given(uneven_sources())
def test_every_sample_occurs_once_in_each_epoch(data: UnevenSource) -> None:
    batches = list(data.batches(["a"]))
    assert Counter(ids(batches)) == dict.fromkeys(range(data.total), data.epochs)
    if not data.shuffle:
        assert ids(batches) == list(range(data.total)) * (data.epochs or 0)
    for epoch in range(data.epochs or 0):
        sizes = [inputs.batch_size for inputs in batches if at(inputs).epoch == epoch]
        size = data.batch_size or 0
        assert sizes == [min(size, data.total - begin) for begin in range(0, data.total, size)]
        assert [at(inputs).batch for inputs in batches if at(inputs).epoch == epoch] == list(range(1, len(sizes) + 1))
    full = [inputs for inputs in batches if inputs.batch_size == data.batch_size]
    without_short = data.replace(drop_last=True).batches(["a"])
    assert ids(without_short) == ids(full)
    assert without_short.skipped_rows.short == (data.epochs or 0) * (data.total % (data.batch_size or 1))


@given(uneven_sources(), st.sampled_from([1, 1, 2, 5]))
@settings(max_examples=settings().max_examples // 2)
def test_resuming_at_any_position_continues_the_sequence(data: UnevenSource, world_size: int) -> None:
    for rank in range(world_size):
        whole = list(data.batches(["a"], rank=rank, world_size=world_size))
        for i, inputs in enumerate(whole):
            position = Position.from_dict(at(inputs).to_dict())
            rest = list(data.batches(["a"], position=position, rank=rank, world_size=world_size))
            assert ids(rest) == ids(whole[i + 1 :])
            assert [each.position for each in rest] == [each.position for each in whole[i + 1 :]]


@given(uneven_sources(shuffle=True))
def test_the_number_of_threads_changes_nothing(data: UnevenSource) -> None:
    first = list(data.batches(["a"]))
    for num_threads in (0, 1, 4):
        again = list(data.replace(num_threads=num_threads).batches(["a"]))
        assert ids(again) == ids(first) and [i.position for i in again] == [i.position for i in first]


@given(uneven_sources(ready_batches=True))
def test_passing_on_ready_batches_changes_nothing(data: UnevenSource) -> None:
    found, expected = (list(each.batches(["a"])) for each in (data, data.replace(ready_batches=False)))
    assert [(i.position, ids([i])) for i in found] == [(i.position, ids([i])) for i in expected]


def test_shuffling_mixes_blocks_and_differs_by_epoch_and_seed() -> None:
    data = UnevenSource(sizes=[[100]] * 20, shuffle=True, shuffle_blocks=4, epochs=2, batch_size=400)
    batches = list(data.batches(["a"]))
    first, second = ids(batches[:5]), ids(batches[5:])
    assert first != second and sorted(first) == sorted(second)
    assert ids(data.replace(seed=1).batches(["a"])) != first + second
    for inputs in batches:
        blocks = Counter(i // 100 for i in np.asarray(inputs.values).tolist())
        assert sorted(blocks.values()) == [100] * 4  # here a window is four blocks, and a batch is a window
        assert inputs.values.tolist() != sorted(inputs.values.tolist())


def test_resuming_reads_only_the_window_group_of_the_position() -> None:
    read: list[int] = []

    class RecordingSource(UnevenSource):
        def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
            return [Block(read=partial(self._read, 10 * i), is_exact=True) for i in range(30)]

        def _read(self, first: int) -> Iterator[Numbers]:
            read.append(first)
            return iter([Numbers(first, 10)])

    for options, most in (({}, 1), ({"shuffle": True, "shuffle_blocks": 3}, 3)):
        data = RecordingSource(batch_size=7, num_threads=0, **options)  # type: ignore[arg-type]
        batches = list(data.batches(["a"]))
        for i in (3, 11, 40):
            read.clear()
            rest = data.batches(["a"], position=batches[i].position)
            assert ids([next(rest)]) == ids([batches[i + 1]])
            assert len(read) <= 2 * most  # twice if the batch takes samples from two windows
            rest.close()


@given(uneven_sources(epochs=1), st.integers(1, 20))
def test_a_position_is_valid_where_signatures_are_equal(data: UnevenSource, batch_size: int) -> None:
    other = data.replace(batch_size=batch_size, num_threads=0)
    assert other.signature() == data.signature()
    for i, inputs in enumerate(whole := list(data.batches(["a"]))):
        assert ids(other.batches(["a"], position=inputs.position)) == ids(whole[i + 1 :])
    assert (data.replace(seed=data.seed ^ 1).signature() == data.signature()) is not data.shuffle
    assert data.replace(shuffle=not data.shuffle).signature() != data.signature()


def test_signatures_have_the_settings_that_decide_where_blocks_begin(tmp_path: Path) -> None:
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


def test_endless_epochs() -> None:
    data = UnevenSource(sizes=[[3], [4]], batch_size=5, epochs=None)
    assert ids(islice(data.batches(["a"]), 6)) == list(range(7)) * 3
    for empty in (data.replace(sizes=[]), data.replace(drop_last=True, batch_size=8)):
        with pytest.raises(SourceError, match="epoch 0 has no batch and epochs is None, so reading would never end"):
            next(empty.batches(["a"]))


# -- bad rows ----------------------------------------------------------------------------------------------------------


def test_bad_rows_are_counted_up_to_the_limit() -> None:
    data = UnevenSource(sizes=[[5], [5], [5]], num_bad=2, max_bad_rows=6, epochs=2)
    batches = data.batches(["a"])
    assert len(ids(batches)) == 30 and batches.skipped_rows.malformed == 12  # the limit applies to each epoch
    batches = data.replace(max_bad_rows=5, batch_size=5).batches(["a"])
    with pytest.raises(SourceError, match="block 10: bad; only 5 bad rows are allowed in an epoch: fix the row"):
        list(batches)
    assert batches.skipped_rows.malformed == 4
    with pytest.raises(SourceError, match="block 0: bad; fix the row, or allow more with max_bad_rows"):
        list(data.replace(max_bad_rows=0).batches(["a"]))


# -- threads -----------------------------------------------------------------------------------------------------------


def source_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("satrap-source")]


@pytest.mark.parametrize("end", ["drop", "close", "with", "error"])
def test_no_thread_outlives_its_iterator(end: str) -> None:
    data = UnevenSource(sizes=[[100]] * 50, batch_size=10, num_threads=3)
    batches = data.batches(["a"])
    assert not source_threads()  # before the first batch
    next(batches)
    assert source_threads()
    match end:
        case "drop":
            gc.disable()  # dropping the last reference suffices, without the garbage collector
            try:
                del batches
                assert not source_threads()
            finally:
                gc.enable()
        case "close":
            batches.close()
            assert not source_threads() and list(batches) == []
        case "with":
            with batches:
                next(batches)
            assert not source_threads()
        case "error":
            with pytest.raises(ZeroDivisionError):
                for inputs in batches:
                    _ = inputs.batch_size / 0
            del batches
            wait_until(lambda: not source_threads())


class MalformedNumbers(Numbers):
    def decode(self) -> Chunk:
        raise SourceError("malformed")


@pytest.mark.parametrize("num_threads", [0, 1, 4])
@pytest.mark.parametrize(("where", "message"), [("read", "incomplete"), ("decode", "malformed")])
def test_an_error_is_raised_in_place_of_its_samples(where: str, message: str, num_threads: int) -> None:
    @dataclass(frozen=True)
    class FailingSource(UnevenSource):
        def _blocks(self, columns: Columns, position: Position | None = None) -> Sequence[Block]:
            return [Block(read=self._read), number_block([Numbers(12, 4)])]

        def _read(self) -> Iterator[Numbers]:
            yield Numbers(0, 4)
            if where == "read":
                raise SourceError("incomplete")
            yield MalformedNumbers(4, 4)
            yield Numbers(8, 4)

    batches = FailingSource(batch_size=2, num_threads=num_threads).batches(["a"])
    assert ids(islice(batches, 2)) == [0, 1, 2, 3]
    with pytest.raises(SourceError, match=message):
        next(batches)
    wait_until(lambda: not source_threads())


def test_reading_ahead_is_bounded() -> None:
    """No more chunks are in flight than allowed, and every thread has some, while the consumer is slow."""
    lock, num_in_flight, most = threading.Lock(), 0, 0
    three_threads = threading.Barrier(3)

    class CountingNumbers(Numbers):
        def decode(self) -> Chunk:
            nonlocal num_in_flight, most
            with lock:
                num_in_flight += 1
                most = max(most, num_in_flight)
            if self.first < 3:
                three_threads.wait(DEADLINE_SECONDS)  # three threads decode at the same time
            return super().decode()

    blocks = [(number_block([CountingNumbers(i, 1)]), RowRange(i)) for i in range(40)]
    with ReadAhead(blocks, RowAssigner(), num_threads=3, num_chunks=5) as ahead:
        for _, chunk in ahead.chunks():
            if chunk is not None:
                with lock:
                    num_in_flight -= 1
    assert most <= 6  # five, and the one that was just returned


def test_closing_waits_for_no_turn_that_was_cancelled() -> None:
    """The pool cancels what waits in its queue from the front, while its threads still take from it."""
    has_begun, may_end = threading.Event(), threading.Event()

    def occupy_thread() -> None:
        has_begun.set()
        may_end.wait(DEADLINE_SECONDS)

    block = number_block([Numbers(i, 1) for i in range(3)])
    ahead = ReadAhead([(block, RowRange(0))], RowAssigner(), num_threads=1, num_chunks=3)
    assert ahead._pool is not None
    ahead._pool.submit(occupy_thread)
    assert has_begun.wait(DEADLINE_SECONDS)
    ahead._fill()
    ahead._pool._work_queue.get()  # the first turn; the thread continues with the second
    may_end.set()
    closing = threading.Thread(target=ahead.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_SECONDS)
    assert not closing.is_alive()


def test_chunks_of_one_block_are_decoded_in_parallel() -> None:
    two_threads = threading.Barrier(2)

    class ParallelNumbers(Numbers):
        def decode(self) -> Chunk:
            two_threads.wait(DEADLINE_SECONDS)
            return super().decode()

    block = number_block([ParallelNumbers(i, 1) for i in range(4)], guess=3)
    with ReadAhead([(block, RowRange(0))], RowAssigner(), num_threads=2, num_chunks=4) as ahead:
        assert sum(chunk is not None for _, chunk in ahead.chunks()) == 4


# -- every format ------------------------------------------------------------------------------------------------------


@pytest.mark.draw(12)
@pytest.mark.parametrize(("shuffle", "num_threads"), [(False, 0), (False, 3), (True, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_formats_yield_their_samples_resume_and_partition(
    kind: str, shuffle: bool, num_threads: int, tmp_path: Path, seed: int
) -> None:
    samples = make(500, seed)
    for i in range(5):
        clicks.write(tmp_path / f"{i}.{kind}", samples[100 * i : 100 * i + 100])
    how: dict[str, Any] = {"shuffle": shuffle, "shuffle_blocks": 3, "seed": seed, "num_threads": num_threads}
    data = source(kind, tmp_path, batch_size=48, **how)
    found, expected = clicks.read(data), sorted(map(clicks.expected, samples))
    assert sorted(found) == expected and (found == list(map(clicks.expected, samples))) is not shuffle
    assert sorted(s for rank in range(3) for s in clicks.read(data, rank=rank, world_size=3)) == expected
    whole = [(inputs.position, clicks.samples_in(inputs)) for inputs in data.batches(FEATURES)]
    for i, (position, _) in enumerate(whole):
        rest = [(inputs.position, clicks.samples_in(inputs)) for inputs in data.batches(FEATURES, position=position)]
        assert rest == whole[i + 1 :]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "arrow", "arrows"])
def test_memory_does_not_grow_with_the_file(kind: str, tmp_path: Path) -> None:
    """A file of 45 to 60 MB, in one row group, record batch or stream, costs the memory of a few chunks."""
    some = make(2000, 0)
    paths = [tmp_path / f"small.{kind}", tmp_path / f"large.{kind}"]
    for path, times in zip(paths, (2, 300), strict=True):
        if kind.startswith("csv"):
            clicks.write(tmp_path / "some.csv", some)
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
    program = Path(__file__).parents[1] / "support/source_memory_child.py"
    command = [sys.executable, str(program), kind, *map(str, paths)]
    exact = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}  # other memory pools keep freed memory
    found = subprocess.run(command, env=exact, capture_output=True, text=True, check=True, timeout=300).stdout
    if not found:
        pytest.skip("needs /proc")
    assert kind == "csv.gz" or paths[1].stat().st_size > 40 << 20
    print(kind, "grew by", int(found))
    assert int(found) < 24 << 20


# -- invalid calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda data: data.batches(["a"], rank=2, world_size=2),
            ConfigError,
            "UnevenSource: rank is 2; expected an integer from 0 to 1",
        ),
        (lambda data: data.batches(["a"], world_size=0), ConfigError, "UnevenSource: world_size is 0"),
        (
            lambda data: data.batches(["a"], position=(0, 0, 0)),
            InputError,
            "position is .*; expected the position of",
        ),
        (lambda data: data.batches(["a", "a"]), ConfigError, "features holds 'a' twice"),
        (lambda data: data.batches([1]), ConfigError, "features is .*; expected strings"),
        (
            lambda data: next(data.batches(["a"], position=Position(0, 9, 1))),
            SourceError,
            "position .* is at block 9 and rank 0 of 1 reads 2 in an epoch: the source or its settings changed",
        ),
    ],
)
def test_invalid_calls_are_refused(call: Callable[[UnevenSource], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(UnevenSource(sizes=[[1], [2]]))
