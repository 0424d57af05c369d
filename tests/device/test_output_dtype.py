"""Rows and gradients in 16 bits: the bits of rows that torch rounds, and of an update with rounded gradients, which are
summed in float32. On a device the kernels round; rows in memory and on servers are cast where they become tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import satrap
from bag_oracle import UNIVERSE, draw_bags
from cluster import running_servers, step_both
from contents import bits
from device_workers import (
    ArrayWorker,
    Direct,
    RoundingWorker,
    SortingWorker,
    assert_equal,
    every_kind,
    give_gradients_that_are_not_finite,
    take_random_steps,
    three_features,
)
from loop import Net, batches, tables
from satrap import SGD, Deployment, Embeddings, Inputs, Table
from satrap.config.features import Features
from satrap.config.optimizers import Adagrad
from satrap.config.tables import MinCount, Normal
from satrap.device import device_ids
from satrap.errors import ConfigError
from satrap.worker.local_rows import local_worker

DTYPES = ("float16", "bfloat16")
NUM_ROWS = 60
BELOW = np.arange(NUM_ROWS * 3 // 4, dtype=np.uint64)  # the smallest table of `every_kind` has so many rows


def workers_of(declared: Features, output_dtype: str, device: str, where: str) -> list[Any]:
    """Return a worker that rounds rows in memory, and one with rows on the device."""
    kind = SortingWorker if where == "sorted" else ArrayWorker
    memory = {table.name: "none" for table in declared.tables} if where.endswith("home") else None
    options: dict[str, Any] = {"seed": 3, "num_threads": 1, "device_memory": memory}
    found: list[Any] = [
        RoundingWorker(local_worker(declared, seed=3, num_threads=1), output_dtype),
        kind(declared, device, output_dtype=output_dtype, **options),
    ]
    return [Direct(worker, len(BELOW), None) for worker in found] if declared.tables[0].num_rows else found


def table_of(where: str, **options: Any) -> Table:
    num_rows = NUM_ROWS if where.startswith("numbered") else None
    given: dict[str, Any] = {"dim": 3, "optimizer": Adagrad(lr=0.1), "initial": Normal(std=0.5), "num_rows": num_rows}
    return Table("item", **(given | options))


@pytest.mark.parametrize("output_dtype", DTYPES)
@pytest.mark.parametrize("where", ["device", "home", "sorted", "numbered", "numbered home"])
def test_a_device_rounds_as_torch_does(
    where: str, output_dtype: str, device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pooling and kind of sequence, several batches in a step, missing gradients, drops, and those that are not
    finite; ids without a directory, too."""
    monkeypatch.setitem(device_ids.SORTS_IDS, "cpu", where == "sorted")
    is_numbered = where.startswith("numbered")
    ids = BELOW if is_numbered else UNIVERSE
    kinds = every_kind(table_of(where, dtype=["float32", "bfloat16"][int(rng.integers(2))], dim=8))
    if where != "sorted":
        workers = workers_of(kinds, output_dtype, device, where)
        for step in range(1, 6):
            step_both(workers, rng, [draw_bags(rng, kinds, 7) for _ in range(1 + step % 2)], step)
        assert_equal(workers, ids)
    table = table_of(where, **({} if is_numbered else {"admission": MinCount(2)}))
    workers = workers_of(three_features(table), output_dtype, device, where)
    take_random_steps(workers, table, rng, batch_size=5, ids=ids)
    table = table_of(where, on_nonfinite=["skip", "raise"][int(rng.integers(2))])
    workers = workers_of(three_features(table), output_dtype, device, where)
    give_gradients_that_are_not_finite(workers, three_features(table), rng, ids)


def plain(batch: Any) -> Tensor:
    rows: Tensor = batch.embeddings
    return rows


def rounded(batch: Any) -> Tensor:
    """Return the rows as a loop rounds them whose embeddings return float32."""
    rows: Tensor = batch.embeddings
    return rows.to(torch.bfloat16)


def train_under_autocast(embeddings: Embeddings, rows_of: Callable[[Any], Tensor], **options: Any) -> list[Any]:
    """Train under autocast, with two batches in a step and one that is dropped; return all bits."""
    torch.manual_seed(0)
    model = Net()
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    with embeddings.stream(batches(7), accumulate=2, **options) as stream:
        for batch in stream:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(batch.dense, rows_of(batch))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.label)
            loss.backward()
            if batch.completes_step:
                optimizer.step()
                optimizer.zero_grad()
    embeddings.eval()
    (evaluated,) = embeddings.stream(batches(1, seed=5))
    found = [bits(embeddings, model), rows_of(evaluated).float().tolist()]
    assert rows_of(evaluated).dtype == torch.bfloat16
    embeddings.close()
    return found


@pytest.mark.parametrize("staleness", [0, 2])
def test_training_equals_a_loop_that_rounds(staleness: int) -> None:
    """Rows in memory, on servers, and on a device with and without a directory, against `.to(torch.bfloat16)`."""
    how: dict[str, Any] = {"staleness": staleness, "deterministic": True, "num_threads": 1}
    expected = train_under_autocast(Embeddings(tables(), **how), rounded)
    sixteen = how | {"output_dtype": "bfloat16"}
    forms: list[dict[str, Any]] = [{}, {"device": "cpu"}]
    for more in forms:
        assert train_under_autocast(Embeddings(tables(), **sixteen, **more), plain) == expected
        assert train_under_autocast(Embeddings(tables(num_users=60), **sixteen, **more), plain) == expected
    with running_servers(2) as services:
        deployment = Deployment(servers=[each.address for each in services])
        assert train_under_autocast(Embeddings(tables(), **sixteen, deployment=deployment), plain) == expected


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_grad_scaler_checks_gradients_in_16_bits(device: str | None) -> None:
    """An overflow changes nothing. With float16 the update takes the scaler's word that the others are finite."""
    ends = []
    for output_dtype in ("float32", "float16"):
        torch.manual_seed(0)
        model, where = Net(), None if output_dtype == "float32" else device
        embeddings = Embeddings(tables(), num_threads=1, device=where, output_dtype=output_dtype)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, batch in enumerate(embeddings.stream(batches(6), device="cpu")):
            optimizer.zero_grad()
            logits = model(batch.dense, batch.embeddings.half().float())
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
            scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append((bits(embeddings, model), embeddings.counters().lost))
        embeddings.close()
    assert ends[0] == ends[1] and ends[0][1] == {"batches/overflow": 1}


@pytest.mark.parametrize("device", [None, "cpu"])
def test_sequences_modules_and_single_batches(device: str | None) -> None:
    """Sequences of both kinds have the dtype, and their gradients. Modules look up in float32."""
    import satrap

    item = Table("item", dim=4, optimizer=SGD(lr=1.0), initial=Normal(std=0.5))
    declared = {"item": item, "path": item.sequence(2), "jagged": item.sequence()}
    ids = np.array([7, 7, 8, 1, 2, 3, 4, 5], np.uint64)
    inputs = Inputs(names=("item", "path", "jagged"), values=ids, offsets=np.array([0, 1, 2, 4, 5, 5, 8]), batch_size=2)
    read = []
    for output_dtype in ("float32", "float16"):
        embeddings = Embeddings(declared, seed=3, device=device, output_dtype=output_dtype)  # type: ignore[arg-type]
        optimizer = embeddings.optimizer(None)
        module, dtype = satrap.nn.Embedding(embeddings, item), getattr(torch, output_dtype)
        (batch,) = stream = embeddings.stream([inputs])
        parts = [batch.embeddings, batch["path"].values, batch["jagged"].values]
        assert [part.dtype for part in parts] == [dtype] * 3
        looked_up = module(torch.tensor([7, 8]))
        assert looked_up.dtype == torch.float32
        (sum(part.half().float().square().sum() for part in parts) + looked_up.square().sum()).backward()
        optimizer.step()
        stream.close()
        embeddings.eval()
        shown = embeddings(inputs)
        assert shown.embeddings.dtype == dtype
        read.append((embeddings.tables["item"].read(np.unique(ids)).values, shown.embeddings.half()))
        embeddings.close()
    np.testing.assert_array_equal(read[0][0], read[1][0])
    assert torch.equal(read[0][1], read[1][1])


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, "float64", None])
def test_other_dtypes_are_refused(output_dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"output_dtype is .*expected .*'bfloat16'"):
        Embeddings(tables(), output_dtype=output_dtype)


@pytest.mark.parametrize("num_rows", [None, NUM_ROWS])
def test_modules_look_up_in_float32(num_rows: int | None) -> None:
    """Ahead and on the spot, with the same bits as rows of embeddings that return float32."""
    losses: list[list[float]] = []
    for output_dtype in ("float32", "bfloat16"):
        how: dict[str, Any] = {"device": "cpu", "output_dtype": output_dtype}
        embeddings = Embeddings({"item": Table("item", 4, num_rows=num_rows, initial=Normal(std=0.5))}, **how)
        module, optimizer = satrap.nn.Embedding(embeddings, "item"), embeddings.optimizer()
        losses.append([])
        for ids in embeddings.prefetch(list(torch.arange(48).view(6, 8) % 10), lambda ids: {"item": ids[:5]}):
            rows = [module(ids[:5]), module(ids[5:])]
            assert [part.dtype for part in rows] == [torch.float32] * 2
            loss = torch.cat(rows).square().sum()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        assert embeddings.counters().module_ids == {"ahead": 30, "on the spot": 18}
        embeddings.close()
    assert losses[0] == losses[1]
