"""Loops that request batches before stepping earlier ones train like a plain loop, or raise an error with a remedy."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import satrap
from contents import bits
from loop import BATCH, NUM_IDS, batches, job, loss_of, train, train_step
from satrap import Batch, Checkpoint, Inputs, StreamError
from satrap.train.stream import Stream

each_way = pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])


def one_ahead(stream: Stream) -> Iterator[Batch]:
    """Read one batch ahead, as Lightning and Accelerate do."""
    one = next(stream)
    for following in stream:
        yield one
        one = following
    yield one


def three_ahead(stream: Stream) -> Iterator[Batch]:
    held = list(islice(stream, 3))
    for following in stream:
        held.append(following)
        yield held.pop(0)
    yield from held


@each_way
def test_a_fixed_order_of_updates_is_that_of_the_steps(overlap: bool) -> None:
    """The lookup of step 3 waits for step 1, and the update of step 2 for that lookup."""
    found = []
    for order in ([0, 1], [1, 0]):
        embeddings, model, optimizer = job(1, deterministic=True)
        with embeddings.stream(batches(5), overlap=overlap) as stream:
            first = list(islice(stream, 2))
            losses = [batch.embeddings.square().sum() for batch in first]
            for number in order:
                losses[number].backward()
                optimizer.step()
            for batch in stream:
                batch.embeddings.square().sum().backward()
                optimizer.step()
        found.append(bits(embeddings, model))
    assert found[0] == found[1]


HOW: dict[str, Callable[[Stream], Iterable[Batch]]] = {
    "plain": lambda stream: stream,
    "all at once": list,
    "one ahead": one_ahead,
    "three ahead": three_ahead,
}


@cache
def trained(
    how: str, staleness: int, overlap: bool, *, accumulate: int = 1, skip: tuple[int, ...] = (), num: int = 14
) -> tuple[list[bytes], dict[str, int], list[float]]:
    """Return the result of a loop: bits, dropped batches, losses."""
    embeddings, model, optimizer = job(staleness, deterministic=True)
    stream, losses = embeddings.stream(batches(num), overlap=overlap, accumulate=accumulate), []
    for i, batch in enumerate(HOW[how](stream)):
        assert batch.step == 1 + i // accumulate
        if i in skip:
            continue
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        if (i + 1) % accumulate == 0 or i == num - 1:
            optimizer.step()
            optimizer.zero_grad()
    embeddings.drain()
    lost = dict(stream.dropped)
    stream.close()
    for store in embeddings.tables.values():
        store.check()
    return bits(embeddings, model), lost, losses


@each_way
@pytest.mark.parametrize(("staleness", "accumulate"), [(0, 1), (0, 3), (1, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("how", [name for name in HOW if name != "plain"])
def test_reading_ahead_equals_the_plain_loop(how: str, staleness: int, accumulate: int, overlap: bool) -> None:
    found = trained(how, staleness, overlap, accumulate=accumulate)
    assert found == trained("plain", staleness, overlap, accumulate=accumulate)
    assert found[1] == {}


@each_way
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("how", list(HOW))
def test_skipped_batches_are_counted_once(how: str, staleness: int, overlap: bool) -> None:
    skip = (0, 3, 4, 5, 9)
    found = trained(how, staleness, overlap, skip=skip)
    assert found == trained("plain", staleness, overlap, skip=skip)
    assert found[1] == {"unused": len(skip)}


@each_way
def test_using_a_batch_too_early_names_the_remedy_and_changes_nothing(overlap: bool) -> None:
    embeddings, model, optimizer = job()
    stream = embeddings.stream(batches(3), overlap=overlap)
    first, second, third = stream
    assert len(second) == BATCH and second.dense.shape == (BATCH, 2) and second.label.shape == (BATCH,)
    assert "not looked up yet" in repr(second)
    loss = loss_of(model, first)
    for obstacle in ("the loop used", "a loss reached"):
        for early, staleness in ((second, 1), (third, 2)):
            match = rf"step {early.step}: .*{obstacle} the batch of step 1 and optimizer\.step.*staleness={staleness}\)"
            with pytest.raises(StreamError, match=match):
                _ = early.embeddings
        if obstacle == "the loop used":
            loss.backward()
    optimizer.step()
    for batch in (second, third):
        train_step(model, optimizer, batch)
    assert embeddings.step == 3 and not stream.dropped


@each_way
def test_a_backward_pass_to_a_dropped_batch_raises(overlap: bool) -> None:
    embeddings, model, optimizer = job()
    stream = embeddings.stream(batches(3), overlap=overlap)
    first, second, third = stream
    loss = first.embeddings.sum()
    del first  # skipped, as far as the stream can tell
    train_step(model, optimizer, third)
    with pytest.raises(StreamError, match=r"step 1: its batch was dropped: .* step 3 was used .*staleness=2\)"):
        loss.backward()
    with pytest.raises(StreamError, match="step 2: its batch was dropped"):
        _ = second.embeddings
    assert stream.dropped == {"unused": 2}
    stream.close()


@each_way
def test_a_batch_may_be_skipped_after_its_forward_pass(overlap: bool) -> None:
    """The loss is not finite, or the batch was only inspected."""
    embeddings, model, optimizer = job()
    stream = embeddings.stream(batches(8), overlap=overlap)
    with torch.no_grad():
        example = next(stream)
        loss_of(model, example)
    for batch in HOW["one ahead"](stream):
        loss = loss_of(model, batch)
        if batch.step in (3, 4, 7):
            continue
        loss.backward()
        optimizer.step()
    assert stream.dropped == {"unused": 4} and embeddings.step == 8 and example.step == 1


def test_a_backward_pass_after_zero_grad_raises() -> None:
    embeddings, model, optimizer = job()
    stream = embeddings.stream(batches(2))
    loss = loss_of(model, next(stream))
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
    with pytest.raises(StreamError, match=r"step 1: its batch was dropped: zero_grad\(\) cleared its gradients"):
        loss.backward()


@each_way
def test_a_batch_of_a_closed_stream_says_so(overlap: bool) -> None:
    embeddings, model, optimizer = job()
    first, second = islice(embeddings.stream(batches(6), overlap=overlap), 2)
    loss = first.embeddings.sum()
    train(embeddings, model, optimizer, batches(2, seed=1))
    with pytest.raises(StreamError, match="step 1: its batch was dropped: this stream ended when another training"):
        loss.backward()
    with pytest.raises(StreamError, match="step 2: its batch was dropped: this stream ended when another training"):
        _ = second["history"]
    assert embeddings.counters().lost == {"batches/closed": 1, "batches/unused": 1} and embeddings.step == 4


@each_way
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_loop_that_uses_no_batch_keeps_none(staleness: int, overlap: bool) -> None:
    """Batches that the user released are settled; otherwise a pass over an endless source would fill the memory."""
    embeddings, _, _ = job(staleness)
    arrays: list[weakref.ref[Any]] = []
    most = 0

    def made() -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng(0)
        for _ in range(40):
            values = rng.integers(0, NUM_IDS, (3, BATCH)).astype(np.uint64)
            yield {"user": values[0], "item": values[1], "history": values[2]}

    with embeddings.stream(satrap.IterableSource(made, num_threads=0), overlap=overlap) as stream:
        for _count, batch in enumerate(stream, 1):
            arrays.append(weakref.ref(batch.inputs.values))
            most = max(most, sum(each() is not None for each in arrays))
        del batch
    assert _count == 40 and most <= 2 * staleness + 4
    assert stream.dropped == {"unused": 40}
    gc.collect()
    assert not any(each() is not None for each in arrays)


@each_way
def test_an_evaluation_in_the_middle_keeps_batches_read_ahead(overlap: bool) -> None:
    def run(evaluates: bool) -> list[bytes]:
        embeddings, model, optimizer = job()
        for i, batch in enumerate(HOW["one ahead"](embeddings.stream(batches(8), overlap=overlap))):
            train_step(model, optimizer, batch)
            if evaluates and i % 3 == 0:
                embeddings.eval()
                assert len(list(embeddings.stream(batches(3, seed=1)))) == 3
                embeddings.train()
        return bits(embeddings, model)

    assert run(True) == run(False)


@each_way
@pytest.mark.parametrize("how", ["one ahead", "three ahead"])
def test_a_checkpoint_counts_no_batch_that_was_only_read(how: str, overlap: bool, tmp_path: Path) -> None:
    data = satrap.IterableSource(batches(10))
    expected = trained("plain", 0, overlap, num=10)[0]
    embeddings, model, optimizer = job()
    run = Checkpoint(tmp_path, model, optimizer, embeddings, data)
    for batch in HOW[how](embeddings.stream(data, overlap=overlap)):
        train_step(model, optimizer, batch)
        if batch.step == 4:
            run.save()
            break
    embeddings.close()
    embeddings, model, optimizer = job()
    assert Checkpoint(tmp_path, model, optimizer, embeddings, data).resume() and embeddings.step == 4
    for batch in HOW[how](embeddings.stream(data, overlap=overlap)):
        train_step(model, optimizer, batch)
    assert embeddings.step == 10 and bits(embeddings, model) == expected


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": None}])
def test_a_data_loader_around_a_stream_is_refused(options: dict[str, Any], sized: bool) -> None:
    embeddings, _, _ = job()
    data: list[Inputs] = batches(4)
    stream = embeddings.stream(data if sized else (each for each in data))
    with pytest.raises((StreamError, TypeError), match=r"satrap\.IterableSource\(loader\)"):
        next(iter(DataLoader(stream, **options)))  # type: ignore[arg-type]
    stream.close()


class Wrapped(torch.utils.data.IterableDataset[Batch]):
    """A stream that a DataLoader's workers would read, each in a separate process."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Batch]:
        yield from self.stream


def test_a_data_loader_worker_refuses_a_stream() -> None:
    embeddings, _, _ = job()
    with embeddings.stream(batches(4), overlap=False) as stream:
        reader = iter(DataLoader(Wrapped(stream), batch_size=None, num_workers=1))
        with pytest.raises(StreamError, match=r"satrap\.IterableSource\(loader\)"):
            next(reader)
        reader._shutdown_workers()  # type: ignore[attr-defined]  # what it does when it is collected, but now


def test_a_stream_is_one_pass() -> None:
    embeddings, _, _ = job()
    embeddings.eval()
    stream = embeddings.stream(batches(3))
    assert len(list(stream)) == 3 and next(stream, None) is None
    with pytest.raises(StreamError, match=r"a stream is one pass over its data: start another one"):
        iter(stream)


ROWS = 37
COLUMNS = {"user": np.arange(ROWS), "item": np.arange(ROWS), "history": np.arange(ROWS)}


def parquet(tmp_path: Path) -> str:
    pq.write_table(pa.table(COLUMNS), tmp_path / "rows.parquet", row_group_size=10)
    return str(tmp_path / "rows.parquet")


SOURCES: dict[str, Callable[..., Any]] = {
    "parquet": lambda folder, **options: satrap.Parquet(parquet(folder), block_rows=10, **options),
    "table": lambda _, **options: satrap.Arrow(pa.table(COLUMNS), block_rows=10, **options),
    "frame": lambda _, **options: satrap.Frame(COLUMNS, block_rows=10, **options),
    "samples": lambda _, **options: satrap.IterableSource(
        [{name: int(i) for name in COLUMNS} for i in range(ROWS)], samples=True, **options
    ),
}


@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"epochs": 3}, {"epochs": 2, "shuffle": True, "shuffle_blocks": 2}], ids=str
)
@pytest.mark.parametrize("kind", list(SOURCES))
def test_the_length_of_a_stream_is_its_number_of_batches(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """From every position, also when another batch size came before."""
    embeddings, _, optimizer = job()
    data = SOURCES[kind](tmp_path, batch_size=5, **options)
    stream = embeddings.stream(data)
    positions = [batch.position for batch in stream]
    assert len(stream) == len(positions)
    for position in positions[:: max(1, len(positions) // 5)]:
        for other in (data, data.replace(batch_size=4)):
            rest = other.batches(embeddings.features, position=position)
            length = len(rest)
            assert length == len(list(rest))
    assert not optimizer.state


def test_the_length_of_a_list_is_its_number_of_items() -> None:
    embeddings, _, _ = job()
    data = satrap.IterableSource(batches(5), epochs=2)
    stream = embeddings.stream(data)
    position = [batch.position for batch in stream][5]
    assert len(stream) == 10 and len(data.batches(embeddings.features, position=position)) == 4
    assert len(embeddings.stream(batches(3))) == 3


@pytest.mark.parametrize("kind", ["parquet", "frame"])
def test_the_length_of_a_share_is_estimated_until_the_end(kind: str, tmp_path: Path) -> None:
    """From positions in each part of every epoch; rows that may be left out count as read."""
    embeddings, _, _ = job()
    data = SOURCES[kind](tmp_path, batch_size=1, epochs=4, share=(0.1, 0.6), shuffle=True)
    positions = [batch.position for batch in data.batches(embeddings.features)]
    for position in (*positions[::5], positions[-1]):
        for other in (data, data.replace(max_bad_rows=3)):
            rest = other.batches(embeddings.features, position=position)
            assert rest.about_length() == pytest.approx(len(list(rest)), abs=0.25 * len(positions))
    with embeddings.stream(data, overlap=False) as stream:
        next(stream)
        assert stream.end_step == round(0.5 * ROWS) * 4
        assert sum(1 for _ in stream) + 1 == len(positions) == stream.end_step
    by_time = data.replace(share=None, before=("user", 5))
    with pytest.raises(TypeError, match="before or since"):
        by_time.batches(embeddings.features).about_length()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": None}, "epochs is None"),
        ({"max_bad_rows": 1}, "rows may be left out"),
        ({"label": satrap.LabelColumn("seen", missing="drop", kind="count")}, "rows may be left out"),
    ],
)
def test_an_unknown_length_says_why(options: dict[str, Any], message: str) -> None:
    embeddings, _, _ = job()
    columns = COLUMNS | {"seen": COLUMNS["user"]}
    with embeddings.stream(satrap.Frame(columns, batch_size=5, **options), overlap=False) as stream:
        with pytest.raises(TypeError, match=f"the length of this stream is not known: {message}"):
            len(stream)
        assert len(list(islice(stream, 3))) == 3


def test_staleness_without_a_free_core_runs_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warning: staleness is a bound."""
    monkeypatch.setattr("satrap.train.embeddings.spare_cores", lambda: 0)
    embeddings, net, optimizer = job(4)
    with warnings.catch_warnings(), embeddings.stream(batches(6)) as stream:
        warnings.simplefilter("error")
        for batch in stream:
            train_step(net, optimizer, batch)
    assert embeddings.counters().staleness == {0: 6}
