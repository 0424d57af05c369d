"""Frozen rows, those of a whole table or of a range of ids, keep every bit while the others train as plain torch trains
them: with rows in this process, on servers, behind a worker process and on a device. A saved table may be thawed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cluster import running_servers
from one_row import torch_optimizer
from remote_worker_parts import working
from satrap import SGD, Adagrad, Adam, Checkpoint, Deployment, Embeddings, Normal, Parquet, Reader, Table
from satrap.table.store import StoredRows

DIM, NUM_IDS, SIZE, STEPS = 4, 12, 6, 7
FROZEN = range(3, 8)
EVERY = np.arange(NUM_IDS, dtype=np.uint64)
IS_FROZEN = np.isin(EVERY, FROZEN)
ITEM, TEXT = Adam(lr=0.05, weight_decay=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1)


def features(num_rows: int | None, **thawed: Any) -> dict[str, Any]:
    how: dict[str, Any] = {"dim": DIM, "initial": Normal(std=0.5), "num_rows": num_rows}
    item = Table("item", optimizer=ITEM, **how | {"frozen": FROZEN} | thawed)
    text = Table("text", optimizer=TEXT, **how | {"frozen": True} | thawed)
    return {"item": item.bag("mean"), "path": item.sequence(2), "text": text, "words": text.sequence(2)}


def loss_of(item: Tensor, path: Tensor, text: Tensor, words: Tensor) -> Tensor:
    """path, words: all rows of the sequences; padding adds nothing."""
    return torch.nn.functional.softplus((item * text).sum(1)).sum() + path.tanh().sum() + words.square().sum()


@pytest.fixture
def data(tmp_path: Path) -> Parquet:
    rng = np.random.default_rng(5)

    def lists() -> list[list[int]]:
        return [rng.integers(0, NUM_IDS, int(n)).tolist() for n in rng.integers(1, 5, SIZE * STEPS)]

    columns = {"item": lists(), "path": lists(), "text": rng.integers(0, NUM_IDS, SIZE * STEPS), "words": lists()}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    return Parquet(str(tmp_path / "data.parquet"), batch_size=SIZE)


@contextmanager
def placed(where: str, of: dict[str, Any]) -> Iterator[Embeddings]:
    """Yield embeddings whose rows are there."""
    with ExitStack() as stack:
        services = stack.enter_context(running_servers(2 if where in ("servers", "worker") else 0))
        workers = stack.enter_context(working(where == "worker"))
        deployment = None
        if services:
            addresses = [each.address for each in workers] or None
            deployment = Deployment([each.address for each in services], workers=addresses)
        device = "cpu" if where == "device" else None
        yield stack.enter_context(Embeddings(of, num_threads=1, deployment=deployment, device=device))


def train(embeddings: Embeddings, data: Any) -> None:
    optimizer = embeddings.optimizer()
    for batch in embeddings.stream(data):
        optimizer.zero_grad()
        loss_of(batch["item"], batch["path"].values, batch["text"], batch["words"].values).backward()
        optimizer.step()


def read(embeddings: Embeddings) -> dict[str, StoredRows]:
    return {name: table.read(EVERY) for name, table in embeddings.tables.items()}


def start(embeddings: Embeddings) -> dict[str, Any]:
    return {name: table.lookup(EVERY, train=False).copy() for name, table in embeddings.tables.items()}


def plain_rows(values: dict[str, Any], data: Parquet) -> dict[str, Any]:
    """Return the rows after training by plain torch, where each row that trains has its own optimizer."""
    rows = {
        "item": [Parameter(torch.from_numpy(row), id_ not in FROZEN) for id_, row in enumerate(values["item"])],
        "text": [Parameter(torch.from_numpy(row), False) for row in values["text"]],
    }
    steppers = [torch_optimizer(ITEM, row, ITEM.lr) for row in rows["item"] if row.requires_grad]
    table = pq.read_table(data.path).to_pydict()
    for begin in range(0, SIZE * STEPS, SIZE):
        part = {name: column[begin : begin + SIZE] for name, column in table.items()}
        item = torch.stack([torch.stack([rows["item"][i] for i in ids]).mean(0) for ids in part["item"]])
        path, words = (
            [rows[of][i] for ids in part[name] for i in ids[-2:]] for name, of in (("path", "item"), ("words", "text"))
        )
        for stepper in steppers:
            stepper.zero_grad()
        text = torch.stack([rows["text"][i] for i in part["text"]])
        loss_of(item, torch.stack(path), text, torch.stack(words)).backward()
        for stepper in steppers:
            stepper.step()
    return {name: torch.stack([*of_table]).detach().numpy() for name, of_table in rows.items()}


@pytest.mark.parametrize("num_rows", [None, NUM_IDS])
@pytest.mark.parametrize("where", ["here", "servers", "worker", "device"])
def test_frozen_rows_stay_and_others_train_as_in_torch(where: str, num_rows: int | None, data: Parquet) -> None:
    with placed(where, features(num_rows)) as embeddings, placed("here", features(num_rows)) as here:
        before = start(embeddings)
        train(embeddings, data)
        train(here, data)
        found = read(embeddings)
        assert embeddings.step == STEPS and embeddings.counters().lost.keys() <= {"ids/path", "ids/words"}
        assert [[part.tobytes() for part in rows] for rows in found.values()] == [
            [part.tobytes() for part in rows] for rows in read(here).values()
        ]
        item, text = found["item"], found["text"]
        assert item.present.all() and text.present.all(), "lookups insert frozen rows"
        np.testing.assert_array_equal(text.values, before["text"])
        np.testing.assert_array_equal(item.values[IS_FROZEN], before["item"][IS_FROZEN])
        assert not text.state.any() and not item.state[IS_FROZEN].any()
        assert (item.values[~IS_FROZEN] != before["item"][~IS_FROZEN]).all()
        np.testing.assert_allclose(item.values, plain_rows(before, data)["item"], rtol=1e-5, atol=1e-6)
        stats = {name: table.stats() for name, table in embeddings.tables.items()}
        assert stats["text"]["updated"] == 0 and stats["item"]["updated"] > 0
        assert not any(of_table["not_applied_absent"] + of_table["skipped"] for of_table in stats.values())


@pytest.mark.parametrize("where", ["here", "servers", "device"])
def test_written_rows_stay_until_a_checkpoint_is_resumed_without_frozen(
    where: str, data: Parquet, tmp_path: Path
) -> None:
    written = np.random.default_rng(0).normal(size=(NUM_IDS, DIM)).astype(np.float32)
    model = torch.nn.Linear(1, 1)

    def checkpoint(embeddings: Embeddings) -> Checkpoint:
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return Checkpoint(tmp_path / "run", model, optimizer, embeddings)

    with placed(where, features(None)) as embeddings:
        run = checkpoint(embeddings)
        embeddings.tables["text"].write(EVERY, written)
        train(embeddings, data)
        run.save()
        expected = [[part.tobytes() for part in rows] for rows in read(embeddings).values()]
        np.testing.assert_array_equal(read(embeddings)["text"].values, written)
    with Reader(tmp_path / "run", features(None)) as reader:
        np.testing.assert_array_equal(reader.lookup("text", EVERY), written)
    with placed(where, features(None, frozen=False)) as embeddings:
        assert checkpoint(embeddings).resume()
        assert [[part.tobytes() for part in rows] for rows in read(embeddings).values()] == expected
        train(embeddings, data)
        assert (read(embeddings)["text"].values != written).all()


def test_a_nan_of_a_frozen_row_is_left_out() -> None:
    table = Table("item", DIM, optimizer=Adagrad(), frozen=range(1))
    with Embeddings({"item": table}) as embeddings:
        optimizer = embeddings.optimizer()
        before = start(embeddings)["item"]
        for batch in embeddings.stream([{"item": np.array([0, 1])}]):
            (batch["item"] * torch.tensor([[torch.nan], [1.0]])).sum().backward()
            optimizer.step()
        found = embeddings.tables["item"].read([0, 1]).values
        assert (found[0] == before[0]).all() and (found[1] != before[1]).all()


def test_a_frozen_table_adds_nothing_to_the_norm_of_the_gradients() -> None:
    with Embeddings(features(None)) as embeddings:
        embeddings.optimizer()
        (batch,) = embeddings.stream([{"item": [[1, 9]], "path": [[1]], "text": np.array([2]), "words": [[3, 4]]}])
        loss_of(batch["item"], batch["path"].values, batch["text"], batch["words"].values).backward()
        assert not batch["words"].values.grad.any() and batch["path"].values.grad.any()
        gradient = batch.embeddings.grad
        assert gradient is not None
        item, text = gradient.split(DIM, 1)
        assert item.all() and not text.any()


def test_a_job_whose_rows_are_all_frozen_steps() -> None:
    """The dense parameters train, and step counts as for other tables."""
    with Embeddings({"text": Table("text", DIM, frozen=True).sequence(2)}) as embeddings:
        model = torch.nn.Linear(DIM, 1)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        weight = model.weight.detach().clone()
        for batch in embeddings.stream([{"text": [[1, 2], [2]]}] * 3):
            model(batch["text"].values).sum().backward()
            optimizer.step()
        assert embeddings.step == 3 and not embeddings.counters().lost and (model.weight != weight).any()
