"""Modules that look rows up inside forward join the step of an open stream: one update, as plain torch does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from module_jobs import embeddings_of, item, placed, start_rows
from satrap import (
    SGD,
    Adagrad,
    Embeddings,
    InputError,
    NonFiniteError,
    Normal,
    Parquet,
    StreamError,
    Table,
    Zeros,
)
from satrap.config.features import Features
from satrap.nn import Embedding, EmbeddingBag
from satrap.worker.local_rows import local_worker
from satrap.worker.remote.service import _id_gradients
from satrap.worker.server_group import ServerGroup

NUM_IDS, DIM, SIZE, STEPS = 12, 4, 6, 10
PLACES = ("here", "servers", "worker", "device")


def features(optimizer: Any) -> dict[str, Any]:
    one = Table("one", DIM, optimizer=optimizer, initial=Normal(std=0.5))
    two = Table("two", DIM, optimizer=optimizer, initial=Normal(std=0.5), num_rows=NUM_IDS)
    return {"clicked": one, "history": one.bag("mean"), "seen": two.sequence(3)}


def written(folder: Path, rng: np.random.Generator) -> Parquet:
    """Return a source of which `other` and `clicked_too` are ids for modules."""
    n = SIZE * STEPS
    clicked = rng.integers(0, NUM_IDS, n, dtype=np.uint64)
    lists = {name: [rng.integers(0, NUM_IDS, 3).tolist() for _ in range(n)] for name in ("history", "seen")}
    other = rng.integers(0, NUM_IDS, n)
    pq.write_table(
        pa.table({"clicked": clicked, **lists, "other": other, "too": clicked.astype(np.int64)}), folder / "d"
    )
    return Parquet(str(folder / "d"), batch_size=SIZE, extra=["other", "too"])


class Plain:
    """The same model over torch's own tables."""

    def __init__(self, embeddings: Embeddings) -> None:
        self.weights = {name: start_rows(embeddings, name, NUM_IDS).requires_grad_() for name in ("one", "two")}

    def rows(self, name: str, ids: Any) -> Tensor:
        return self.weights[name][torch.as_tensor(np.asarray(ids).astype(np.int64))]


def extra(batch: Any, name: str) -> Tensor:
    return torch.from_numpy(batch.inputs.extra[name].to_numpy().astype(np.int64))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("run", range(3))
def test_a_random_program_over_a_stream_and_modules(
    where: str, run: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    adaptive, accumulate = run % 2 == 1, 1 + run % 2
    source = written(tmp_path, rng)
    data = pq.read_table(tmp_path / "d").to_pydict()
    optimizer: Any = Adagrad(lr=0.1, eps=1e-10) if adaptive else SGD(lr=0.1)
    with placed(where) as options, Embeddings(features(optimizer), num_threads=1, **options) as embeddings:
        plain = Plain(embeddings)
        one, bag = Embedding(embeddings, "one"), EmbeddingBag(embeddings, "two", mode="sum")
        combined = embeddings.optimizer()
        make: Any = torch.optim.Adagrad if adaptive else torch.optim.SGD
        of_torch = make(list(plain.weights.values()), lr=0.1)
        for number, batch in enumerate(embeddings.stream(source, accumulate=accumulate)):
            uses = set(rng.choice(6, 3, replace=False).tolist())
            at = slice(SIZE * number, SIZE * (number + 1))
            other, too = extra(batch, "other"), extra(batch, "too")
            ours, theirs = [], []
            if 0 in uses:
                ours.append(batch["clicked"])
                theirs.append(plain.rows("one", data["clicked"][at]))
            if 1 in uses:
                ours.append(one(other))
                theirs.append(plain.rows("one", other))
            if 2 in uses:
                ours.append(batch["history"])
                theirs.append(plain.rows("one", np.array(data["history"][at])).mean(1))
            if 3 in uses:
                ours.append(bag(other.view(2, 3)))
                theirs.append(plain.rows("two", other.view(2, 3)).sum(1))
            if 4 in uses:
                ours.append(batch["seen"].values)
                theirs.append(plain.rows("two", np.array(data["seen"][at])))
            if 5 in uses:
                ours += [one(too), one(too[:2])]
                theirs += [plain.rows("one", too), plain.rows("one", too[:2])]
            losses = [
                torch.stack([torch.tanh(3 * part).square().sum() for part in parts]).sum() for parts in (ours, theirs)
            ]
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
            for loss in losses:
                loss.backward()
            if batch.completes_step:
                for each in (combined, of_torch):
                    each.step()
                    each.zero_grad()
        assert embeddings.step == STEPS // accumulate and not embeddings.counters().lost
        for name, weight in plain.weights.items():
            torch.testing.assert_close(start_rows(embeddings, name, NUM_IDS), weight.detach(), rtol=1e-4, atol=1e-5)


def ids_of(step: int) -> np.ndarray[Any, Any]:
    return np.array([step % 3, 7, (step + 1) % 3], np.uint64)


def test_a_step_is_one_call_of_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    call = ServerGroup.call_servers

    def counted(self: Any, method: str, step: int, arguments: Any, **options: Any) -> Any:
        calls.append((method, step, len(arguments)))
        return call(self, method, step, arguments, **options)

    with embeddings_of(item(), Table("user", 4), where="servers") as embeddings:
        module, optimizer = Embedding(embeddings, "user"), embeddings.optimizer()
        monkeypatch.setattr(ServerGroup, "call_servers", counted)
        both = {"item": np.arange(16, dtype=np.uint64), "user": np.arange(16, dtype=np.uint64)}
        for batch in embeddings.stream([both]):
            (batch.embeddings.sum() + module(torch.arange(32)).sum()).backward()
            optimizer.step()
        monkeypatch.undo()
    assert [call for call in calls if call[0] == "update" and call[2]] == [("update", 1, 2)]
    assert [call for call in calls if call[0] == "lookup"] == [("lookup", 1, 2)] * 2


@pytest.mark.parametrize("where", ["here", "servers", "device", "direct"])
@pytest.mark.parametrize(("staleness", "overlap"), [(0, True), (2, False), (2, True)])
def test_each_gradient_is_applied_once_with_staleness(where: str, staleness: int, overlap: bool) -> None:
    """Rows become minus the sum of their gradients, in any order of the updates."""
    num_rows = NUM_IDS if where == "direct" else None  # on a device
    table = Table("item", 4, optimizer=SGD(lr=1.0), initial=Zeros(), num_rows=num_rows)
    with placed(where) as options, Embeddings({"item": table}, staleness=staleness, **options) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        expected = np.zeros(NUM_IDS)
        data = [{"item": ids_of(step)} for step in range(20)]
        for step, batch in enumerate(embeddings.stream(data, overlap=overlap)):
            (batch["item"].sum() + 2 * module(torch.from_numpy(ids_of(step + 5).astype(np.int64))).sum()).backward()
            np.add.at(expected, ids_of(step).astype(int), 1)
            np.add.at(expected, ids_of(step + 5).astype(int), 2)
            optimizer.step()
        embeddings.drain()
        assert start_rows(embeddings, "item", NUM_IDS)[:, 0].tolist() == (-expected).tolist()
        assert embeddings.counters().module_ids == {"on the spot": 60} and embeddings.step == 20


def test_a_deterministic_stream_repeats_bit_for_bit() -> None:
    found = []
    for overlap in (False, True, True):
        with embeddings_of(item(), staleness=2, deterministic=True) as embeddings:
            module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
            for step, batch in enumerate(embeddings.stream([{"item": ids_of(i)} for i in range(20)], overlap=overlap)):
                rows = module(torch.from_numpy(ids_of(step + 5).astype(np.int64)))
                (batch["item"] * rows).tanh().sum().backward()
                optimizer.step()
            found.append(start_rows(embeddings, "item", NUM_IDS).tolist())
    assert found[0] == found[1] == found[2]


def test_a_frozen_module_reads_the_same_rows_in_every_run_of_a_deterministic_stream() -> None:
    found = []
    for overlap in (False, True, True):
        with embeddings_of(item(initial=Zeros()), staleness=2, deterministic=True) as embeddings:
            target, optimizer = Embedding(embeddings, "item").requires_grad_(False), embeddings.optimizer()
            seen = []
            for batch in embeddings.stream([{"item": ids_of(i)} for i in range(30)], overlap=overlap):
                batch["item"].sum().backward()
                optimizer.step()
                seen.append(target(torch.tensor([7])).tolist())
            found.append(seen)
    assert found[0] == found[1] == found[2]


def test_a_loop_may_use_modules_alone() -> None:
    """The batches' own rows are never used, and each step has its batch's number."""
    with embeddings_of(item(optimizer=SGD(lr=1.0))) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        before = start_rows(embeddings, "item", NUM_IDS)
        for batch in embeddings.stream([{"item": ids_of(step)} for step in range(4)]):
            if batch.step == 2:
                continue
            module(torch.tensor([batch.step])).sum().backward()
            optimizer.step()
            assert embeddings.step == batch.step
        moved = before - start_rows(embeddings, "item", NUM_IDS)
        assert moved[:, 0].tolist() == pytest.approx([0, 1, 0, 1, 1] + [0] * 7)
        assert embeddings.counters().lost == {"batches/unused": 1}


def test_what_would_be_lost_is_an_error_or_counted() -> None:
    with embeddings_of(item(optimizer=SGD(lr=1.0))) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        before = start_rows(embeddings, "item", NUM_IDS)
        stream = embeddings.stream([{"item": ids_of(step)} for step in range(5)])
        with pytest.raises(StreamError, match="no batch of it is in use, so the lookup belongs to no step"):
            module(torch.tensor([1]))
        next(stream)
        rows = module(torch.tensor([1]))
        rows.sum().backward(retain_graph=True)
        optimizer.zero_grad()
        optimizer.step()
        assert torch.equal(start_rows(embeddings, "item", NUM_IDS), before)
        with pytest.raises(
            StreamError, match="step 1: a loss reached a lookup of table 'item' after its batch was dro"
        ):
            rows.sum().backward()
        held = next(stream)
        rows = module(torch.tensor([3]))
        rows.sum().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(
            StreamError, match=r"step 2: a loss reached .* after optimizer.step\(\) had taken its batch"
        ):
            rows.sum().backward()
        held = next(stream)
        (module(torch.tensor([4])) * float("nan")).sum().backward()
        held["item"].sum().backward()
        with pytest.raises(NonFiniteError, match="table 'item'"):
            optimizer.step()
        stream.close()
        moved = before - start_rows(embeddings, "item", NUM_IDS)
        assert moved[:, 0].tolist() == pytest.approx([0, 0, 0, 1] + [0] * 8)
        assert embeddings.counters().lost == {"batches/zero_grad": 1, "batches/failed": 1}


def test_an_overflow_drops_what_modules_looked_up() -> None:
    with embeddings_of(item(optimizer=SGD(lr=1.0))) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = start_rows(embeddings, "item", 2)
        for factor, batch in zip((float("inf"), 1.0), embeddings.stream([{"item": ids_of(0)}] * 2), strict=False):
            scaler.scale((module(torch.tensor([1])) * factor).sum() + batch["item"][1:2].sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert torch.equal(start_rows(embeddings, "item", 2)[1], before[1] - 1)
        assert embeddings.counters().lost == {"batches/overflow": 1}


def test_gradients_for_a_worker_process_are_checked() -> None:
    worker = local_worker(Features({"item": item()}))
    ids, gradients = np.arange(2, dtype=np.uint64), np.ones(8, np.float32)
    found = _id_gradients(worker, ids, [2], gradients)
    assert found is not None and found.by_table["item"].shape == (2, 4)
    for counts, given in (([1], gradients), ([2, 0], gradients), ([2], gradients[:4]), ([-1], gradients)):
        with pytest.raises(InputError, match=r"2 ids, \[.*expected ids of 1 tables"):
            _id_gradients(worker, ids, counts, given)
