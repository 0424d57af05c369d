"""Several trainers over files: every sample is trained on once with equal weight, wherever the data ends, and another
number of trainers resumes with the rest. The oracle is one trainer in one process on the same samples."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loop import NUM_IDS, batches, job, loss_of, train, train_step
from satrap import Inputs, Table
from satrap.config.features import Features
from satrap.data.inputs import Position
from satrap.errors import StreamError
from satrap.train.batch import InFlightBatch
from satrap.train.dense_strategy import SyncDense
from satrap.train.embeddings import session_of
from satrap.train.joint_batches import JointBatches
from satrap.train.joint_calls import PADDING_ROWS, Call, JointStep, describe
from satrap.train.ledger import BatchLedger
from satrap.train.process_group import ProcessGroup
from satrap.train.stream import Stream
from trainers import Trainers, require_result

N = 143


def samples() -> dict[str, Any]:
    """Return the columns of N samples."""
    rng = np.random.default_rng(3)
    return {
        "user": rng.integers(0, NUM_IDS, N, dtype=np.uint64),
        "item": rng.integers(0, NUM_IDS, N, dtype=np.uint64),
        "history": [rng.integers(0, NUM_IDS, int(k)).tolist() for k in rng.integers(1, 5, N)],
        "d0": rng.integers(-8, 8, N) / 4,
        "d1": rng.integers(-8, 8, N) / 4,
        "label": rng.integers(0, 2, N),
        "number": np.arange(N),
    }


def inputs_of(columns: dict[str, Any], numbers: list[int]) -> Inputs:
    bags = [[[columns[name][i]] for i in numbers] for name in ("user", "item")]
    bags.append([columns["history"][i] for i in numbers])
    flat = [bag for each in bags for bag in each]
    return Inputs(
        names=("user", "item", "history"),
        values=np.array([i for bag in flat for i in bag], np.uint64),
        offsets=np.concatenate([[0], np.cumsum([len(bag) for bag in flat])]).astype(np.int64),
        batch_size=len(numbers),
        dense=np.stack([columns[name][numbers] for name in ("d0", "d1")], 1).astype(np.float32),
        label=columns["label"][numbers].astype(np.float32),
    )


def write(folder: Path, kind: str) -> str:
    """Write two files of unequal length."""
    columns = samples()
    for name, begin, end in (("a", 0, 100), ("b", 100, N)):
        path = folder / f"{name}.{kind}"
        path.parent.mkdir(exist_ok=True)
        part = {key: value[begin:end] for key, value in columns.items()}
        if kind == "parquet":
            pq.write_table(pa.table(part), path, 40)
            continue
        with (gzip.open if kind == "csv.gz" else open)(path, "wt", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(part)
            part["history"] = ["|".join(map(str, bag)) for bag in part["history"]]
            writer.writerows(zip(*part.values(), strict=True))
    return str(folder / f"*.{kind}")


@pytest.mark.parametrize(
    ("kind", "world_size", "how"),
    [
        ("parquet", 2, {}),
        ("parquet", 3, {"shuffle": True, "shuffle_blocks": 2}),
        ("csv", 2, {"shuffle": True, "shuffle_blocks": 2}),
        ("csv.gz", 3, {}),
        ("csv.gz", 2, {"batch_size": 71}),
    ],
)
def test_every_sample_is_trained_on_once_with_equal_weight(
    trainers: Trainers, tmp_path: Path, kind: str, world_size: int, how: dict[str, Any]
) -> None:
    found = trainers.run_on_servers(2, world_size, tmp_path, batches=0, file=write(tmp_path / "data", kind), how=how)
    steps = [list(chain(*each)) for each in zip(*(each["seen"] for each in found), strict=True)]
    assert sorted(chain(*steps)) == list(range(N))
    size = world_size * how.get("batch_size", 8)
    assert [len(each) for each in steps] == [size] * (N // size) + [N % size], "one short step, the last"
    assert all(each["lost"] == {} for each in found)
    embeddings, model, optimizer = job()
    columns = samples()
    train(embeddings, model, optimizer, [inputs_of(columns, step) for step in steps])
    require_result(found[0], embeddings, model)


@pytest.mark.parametrize("kind", ["parquet", "csv.gz"])
def test_another_number_of_trainers_resumes(trainers: Trainers, tmp_path: Path, kind: str) -> None:
    """With 2, then 3, then 1 trainers, each sample is trained on once before or after a checkpoint."""
    options: dict[str, Any] = {
        "batches": 0,
        "file": write(tmp_path / "data", kind),
        "checkpoint": str(tmp_path / "run"),
    }
    options["how"] = {"shuffle": True, "shuffle_blocks": 2}
    trained: list[int] = []
    before = 0
    for world_size, until, saved in ((2, 4, 2), (3, 7, 6), (1, None, None)):
        found = trainers.run_on_servers(2, world_size, tmp_path, until=until, **options)
        assert all(each["resumed"] == (before > 0) for each in found)
        kept = None if saved is None else saved - before
        trained += [number for each in found for batch in each["seen"][:kept] for number in batch]
        before = saved or 0
    assert sorted(trained) == list(range(N))


@pytest.mark.parametrize(("num", "accumulate"), [(5, 2), (7, 3)])
def test_accumulation_ends_where_the_batches_end(num: int, accumulate: int, trainers: Trainers, tmp_path: Path) -> None:
    """Two trainers have an odd number of batches: the last step has one batch of one trainer, and padding."""
    found = trainers.run_on_servers(2, 2, tmp_path, batches=num, accumulate=accumulate)
    assert [len(each["seen"]) for each in found] == [accumulate + 1, accumulate + 1]
    assert found[0]["dense"] == found[1]["dense"] and all(each["lost"] == {} for each in found)
    embeddings, model, optimizer = job()
    known = {str(each.values.tolist()): each for each in batches(num)}
    steps = [[each["seen"][i] for each in found if each["seen"][i]] for i in range(accumulate + 1)]
    for group in (steps[:accumulate], steps[accumulate:]):
        mine = [[known[str(values)] for values in step] for step in group]
        with embeddings.stream([each for step in mine for each in step], accumulate=sum(map(len, mine))) as stream:
            for step in mine:
                for _ in step:
                    (loss_of(model, next(stream)) / len(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    require_result(found[0], embeddings, model)


def test_a_weight_applies_until_the_batchs_backward_pass() -> None:
    """The other trainer always has eight samples; this one has 8, then 3, then none."""
    embeddings, model, optimizer = job(staleness=1)
    weights: list[float] = []
    others = iter([8, 8, 8, 0])

    def exchange(numbers: Sequence[int], *, patient: bool) -> Callable[[], list[Sequence[int]]]:
        other = [*numbers[:3], next(others), 2, 0, 0] if numbers[0] == Call.NEXT else numbers
        return lambda: [numbers, other]

    inputs = JointBatches(
        iter([*batches(1), *batches(1, size=3)]), embeddings.features.names, exchange, 0, weights.append
    )
    stream = Stream(
        inputs,
        embeddings.worker,
        BatchLedger(1),
        train=True,
        device=torch.device("cpu"),
        overlap=False,
        on_hold=optimizer.hold,
    )
    session_of(embeddings)._training = stream
    whole, short = next(stream), next(stream)
    loss = loss_of(model, whole)
    with pytest.raises(StreamError, match=r"step 2: its batch has 3 samples, and that of step 1, .* has 8; several"):
        _ = short.embeddings
    loss.backward()
    optimizer.step()
    assert weights == [1.0, 1.0]
    loss_of(model, short).backward()
    assert weights[2:] == [6 / 11]
    optimizer.step()
    assert weights[3:] == [1.0], "the weight no longer applies"
    padding = next(stream)
    assert len(padding) == 0 and padding.embeddings.shape[0] == padding.dense.shape[0] == PADDING_ROWS
    train_step(model, optimizer, padding)
    assert weights[4:] == [0.0, 1.0]
    with pytest.raises(StopIteration):
        next(stream)
    assert stream.counters().lost == {} and embeddings.step == 3
    stream.close()


def test_dense_gradients_are_weighed_until_the_next_weight() -> None:
    _, model, optimizer = job()
    dense = SyncDense(optimizer.dense, ProcessGroup())
    bias = list(model.parameters())[1]
    for weight in (1.0, 0.5, 0.0, 1.0):
        dense.set_weight(weight)
        model.zero_grad()
        bias.sum().backward()
        assert bias.grad is not None and bias.grad.tolist() == [weight] * 8


# -- pure --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any))
def test_the_mean_of_weighted_means_is_the_mean(sizes: list[int]) -> None:
    batches = [(n, 3 if n else 0, 0 if n else -1, 0) for n in sizes]
    steps = [JointStep.from_batches(batches, rank) for rank in range(len(sizes))]
    values = [np.arange(n) + 7.0 * rank for rank, n in enumerate(sizes)]
    means = [step.weight * each.mean() if len(each) else 0.0 for step, each in zip(steps, values, strict=True)]
    assert np.isclose(np.mean(means), np.concatenate(values).mean())
    assert all(step.num_samples == sum(sizes) for step in steps)
    assert all((step.weight == 0) == (n == 0) for step, n in zip(steps, sizes, strict=True))
    if len(set(sizes)) == 1:
        assert all(step.weight == 1.0 for step in steps), "exactly, so that no bits change"


@pytest.mark.parametrize("label", [None, (5,), (5, 2)])
def test_padding_has_the_shape_of_the_other_trainers_batches(label: tuple[int, ...] | None) -> None:
    one = Inputs(
        names=("a",),
        values=np.zeros(5, np.uint64),
        batch_size=5,
        dense=np.ones((5, 3), np.float32),
        label=None if label is None else np.ones(label, np.float32),
        position=Position(0, 0, 1, 5),
    )
    stream = JointBatches(iter([one]), ("a",), lambda numbers, patient: lambda: [numbers], 0, lambda _: None)
    assert next(stream) is one
    padding = next(stream)
    assert describe(padding) == describe(None)
    dense, found = JointStep.from_batches([describe(padding), describe(one)], 0).padding()
    assert dense.shape == (2, 3) and not dense.any()
    assert (None if found is None else found.shape[1:]) == (None if label is None else label[1:])
    batch = InFlightBatch(padding, Features({"a": Table("a", dim=1)}))
    assert stream.take(batch, is_last=True) is None and stream.is_stopped
    assert list(stream) == []
