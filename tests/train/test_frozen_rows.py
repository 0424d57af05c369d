"""Frozen rows, those of a whole table, a range or any set of ids, keep every bit while the others train as plain torch
trains them: with rows in this process, on servers, behind a worker process and on a device. A saved table may be
thawed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from contents import contents
from module_jobs import placed
from one_row import torch_optimizer
from satrap import (
    SGD,
    Adagrad,
    Adam,
    Checkpoint,
    ConfigError,
    Embeddings,
    Normal,
    Parquet,
    Reader,
    Store,
    Table,
    TableGroup,
    Zeros,
)
from satrap.table.store import StoredRows

DIM, NUM_IDS, SIZE, STEPS = 4, 12, 6, 7
FROZEN = range(3, 8)
EVERY = np.arange(NUM_IDS, dtype=np.uint64)
ENDS = [0, 1, 2, 2**32, 2**63 - 2, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 3, 2**64 - 2, 2**64 - 1, 0x9E3779B97F4A7C15]
ITEM, TEXT = Adam(lr=0.05, weight_decay=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.1)


def features(num_rows: int | None, some: Any = FROZEN, **thawed: Any) -> dict[str, Any]:
    how: dict[str, Any] = {"dim": DIM, "initial": Normal(std=0.5), "num_rows": num_rows}
    item = Table("item", optimizer=ITEM, **how | {"frozen": some} | thawed)
    text = Table("text", optimizer=TEXT, **how | {"frozen": True} | thawed)
    return {"item": item.bag("mean"), "path": item.sequence(2), "text": text, "words": text.sequence(2)}


def loss_of(item: Tensor, path: Tensor, text: Tensor, words: Tensor) -> Tensor:
    """path, words: all rows of the sequences; padding adds nothing."""
    return torch.nn.functional.softplus((item * text).sum(1)).sum() + path.tanh().sum() + words.square().sum()


def written(tmp_path: Path, of: NDArray[np.uint64] = EVERY) -> Parquet:
    """Return batches of these ids."""
    rng = np.random.default_rng(5)

    def lists() -> pa.Array:
        return pa.array([of[rng.integers(0, NUM_IDS, int(n))] for n in rng.integers(1, 5, SIZE * STEPS)])

    columns = {"item": lists(), "path": lists(), "text": of[rng.integers(0, NUM_IDS, SIZE * STEPS)], "words": lists()}
    pq.write_table(pa.table(columns), tmp_path / "data.parquet")
    return Parquet(str(tmp_path / "data.parquet"), batch_size=SIZE)


@pytest.fixture
def data(tmp_path: Path) -> Parquet:
    return written(tmp_path)


def train_features(embeddings: Embeddings, data: Any) -> None:
    optimizer = embeddings.optimizer()
    for batch in embeddings.stream(data):
        optimizer.zero_grad()
        loss_of(batch["item"], batch["path"].values, batch["text"], batch["words"].values).backward()
        optimizer.step()


def read(embeddings: Embeddings, ids: NDArray[np.uint64] = EVERY) -> dict[str, StoredRows]:
    return {name: table.read(ids) for name, table in embeddings.tables.items()}


def start(embeddings: Embeddings, ids: NDArray[np.uint64] = EVERY) -> dict[str, Any]:
    return {name: table.lookup(ids, train=False).copy() for name, table in embeddings.tables.items()}


def plain_rows(values: dict[str, Any], data: Parquet, ids: NDArray[np.uint64], frozen: Any) -> dict[str, Any]:
    """Return the rows after training by plain torch, where each row that trains has its own optimizer."""
    rows: dict[str, dict[int, Any]] = {
        name: {
            id_: Parameter(torch.from_numpy(row), name == "item" and id_ not in frozen)
            for id_, row in zip(ids.tolist(), values[name], strict=True)
        }
        for name in ("item", "text")
    }
    steppers = [torch_optimizer(ITEM, row, ITEM.lr) for row in rows["item"].values() if row.requires_grad]
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
    return {name: torch.stack([row.detach() for row in of.values()]).numpy() for name, of in rows.items()}


@pytest.mark.draw(8)
@pytest.mark.parametrize("kind", ["range", "direct range", "set", "direct set"])
@pytest.mark.parametrize("where", ["here", "servers", "worker", "device"])
def test_frozen_rows_stay_and_others_train_as_in_torch(where: str, kind: str, tmp_path: Path) -> None:
    num_rows = NUM_IDS if kind.startswith("direct") else None
    ids = np.array(sorted(ENDS), np.uint64) if kind == "set" else EVERY
    some = FROZEN if kind.endswith("range") else set(ids[[0, 1, 3, 4, 6, 9, 11]].tolist())
    data, of = written(tmp_path, ids), features(num_rows, some)
    is_frozen = np.array([id_ in some for id_ in ids.tolist()])
    with (
        placed(where) as place,
        Embeddings(of, num_threads=1, **place) as embeddings,
        Embeddings(of, num_threads=1) as here,
    ):
        before = start(embeddings, ids)
        train_features(embeddings, data)
        train_features(here, data)
        found = read(embeddings, ids)
        assert embeddings.step == STEPS and embeddings.counters().lost.keys() <= {"ids/path", "ids/words"}
        assert contents(embeddings, ids) == contents(here, ids)
        item, text = found["item"], found["text"]
        assert item.present.all() and text.present.all(), "lookups insert frozen rows"
        np.testing.assert_array_equal(text.values, before["text"])
        np.testing.assert_array_equal(item.values[is_frozen], before["item"][is_frozen])
        assert not text.state.any() and not item.state[is_frozen].any()
        assert (item.values[~is_frozen] != before["item"][~is_frozen]).all()
        expected = plain_rows(before, data, ids, some)["item"]
        np.testing.assert_allclose(item.values, expected, rtol=1e-5, atol=1e-6)
        stats = {name: table.stats() for name, table in embeddings.tables.items()}
        assert stats["text"]["updated"] == 0 and stats["item"]["updated"] > 0
        assert not any(of_table["not_applied_absent"] + of_table["skipped"] for of_table in stats.values())


@given(st.sets(st.sampled_from(ENDS) | st.integers(0, 2**64 - 1), max_size=9), st.data())
def test_any_set_of_ids_is_frozen(frozen: set[int], draw: st.DataObject) -> None:
    """The ids come as a set, a list with repetitions, an array or a tensor of either sign; a batch has duplicates."""
    unsigned = np.array(list(frozen), np.uint64)
    forms = [frozen, [*frozen, *frozen], unsigned, unsigned.view(np.int64), torch.from_numpy(unsigned.view(np.int64))]
    table = Table("item", 2, optimizer=SGD(lr=1.0), initial=Zeros(), frozen=draw.draw(st.sampled_from(forms)))
    known = st.sampled_from([*ENDS, *frozen])
    ids = np.array(draw.draw(st.lists(known | st.integers(0, 2**64 - 1), max_size=12)), np.uint64)
    store = Store(table, num_threads=1)
    store.lookup(ids)
    store.update(ids, np.ones((len(ids), 2), np.float32))
    counts = {id_: 0 if id_ in frozen else ids.tolist().count(id_) for id_ in ids.tolist()}
    assert store.lookup(ids, train=False)[:, 0].tolist() == [-counts[id_] for id_ in ids.tolist()]
    assert all((id_ in table.frozen_ids) == (id_ in frozen) for id_ in [*frozen, *ids.tolist(), *ENDS])


def test_a_store_without_its_frozen_ids_is_read_and_not_trained(tmp_path: Path) -> None:
    """A snapshot has the number of the frozen ids and their checksum; a shared-memory file has the ids."""
    table, ids, ones = Table("item", 2, frozen=[3, 9]), np.array([3, 4, 9]), np.ones((3, 2), np.float32)
    store = Store(table, shared=tmp_path / "rows")
    before = store.lookup(ids).copy()
    store.save(tmp_path / "saved")
    loaded, group = Store.load(tmp_path / "saved"), TableGroup([table])
    group.restore({"item": [tmp_path / "saved"]})
    del store
    for trained in (Store.attach(tmp_path / "rows"), group["item"]):
        assert trained.table == table and (trained.table.frozen_ids.ids == [3, 9]).all()  # type: ignore[union-attr]
        trained.update(ids, ones)
        assert (trained.lookup(ids, train=False) == before).all(1).tolist() == [True, False, True]
    np.testing.assert_array_equal(loaded.lookup(ids, train=False), before)
    known = r"table 'item': frozen is <2 ids, sha256 \w{16}>, of which the ids are not known; expected the ids"
    with pytest.raises(ConfigError, match=known):
        loaded.update(ids, ones)
    with pytest.raises(ConfigError, match=known):
        Embeddings({"item": loaded.table})
    np.testing.assert_array_equal(loaded.lookup(ids, train=False), before)


@pytest.mark.parametrize("where", ["here", "servers", "device"])
def test_written_rows_stay_until_a_checkpoint_is_resumed_without_frozen(
    where: str, data: Parquet, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).normal(size=(NUM_IDS, DIM)).astype(np.float32)
    model = torch.nn.Linear(1, 1)

    def checkpoint(embeddings: Embeddings) -> Checkpoint:
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return Checkpoint(tmp_path / "run", model, optimizer, embeddings)

    with placed(where) as place, Embeddings(features(None, {0, 3, 4, 9}), num_threads=1, **place) as embeddings:
        run = checkpoint(embeddings)
        embeddings.tables["text"].write(EVERY, values)
        train_features(embeddings, data)
        run.save()
        expected = contents(embeddings, EVERY)
        np.testing.assert_array_equal(read(embeddings)["text"].values, values)
    with Reader(tmp_path / "run", features(None, {0, 3, 4, 9})) as reader:
        np.testing.assert_array_equal(reader.lookup("text", EVERY), values)
    with placed(where) as place, Embeddings(features(None, frozen=False), num_threads=1, **place) as embeddings:
        assert checkpoint(embeddings).resume()
        assert contents(embeddings, EVERY) == expected
        train_features(embeddings, data)
        assert (read(embeddings)["text"].values != values).all()


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
