"""`Embeddings.prefetch` looks the ids of any loader's next batches up ahead: modules find the rows by id, the update is
as without, and an id that was not named is looked up on the spot and counted."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loop import take_step
from module_jobs import NUM_IDS, PLACES, Scores, batch, embeddings_of, item, loss_of, placed, start_rows, tables
from satrap import SGD, ConfigError, Embeddings, Frame, InputError, Normal, StreamError, Table, Zeros
from satrap.nn import Embedding, EmbeddingBag

EVERYWHERE = (*PLACES, "device", "direct")
STEPS = 6


def every(ids: Any) -> dict[str, Any]:
    """Return what `Scores` looks up, in its order."""
    user, seen, shown = ids
    return {"item": [seen, shown, shown], "user": user}


def all_at_once(ids: Any) -> dict[str, Any]:
    user, seen, shown = ids
    return {"user": user.numpy(), "item": torch.cat([shown, seen.view(-1)])}


def some(ids: Any) -> dict[str, Any]:
    return {"item": ids[1][:, :2]}


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize(("ids", "share"), [(every, 1.0), (all_at_once, 1.0), (some, None), (lambda _: {}, 0.0)])
def test_a_prefetched_loop_trains_as_one_without(where: str, ids: Any, share: float | None) -> None:
    found = []
    for prefetched in (False, True):
        with embeddings_of(*tables(), where=where) as embeddings:
            torch.manual_seed(0)
            model = Scores.over(embeddings)
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            loader: Any = [batch(step) for step in range(STEPS)]
            losses = []
            for each in embeddings.prefetch(loader, ids) if prefetched else loader:
                losses.append(take_step(loss_of(model, *each), optimizer))
            found.append(torch.tensor(losses))
            found.append(torch.cat([start_rows(embeddings, name, NUM_IDS) for name in embeddings.tables]))
            counted = embeddings.counters()
            assert embeddings.step == STEPS and not counted.lost
        ahead, now = (counted.module_ids.get(name, 0) for name in ("ahead", "on the spot"))
        assert ahead + now == STEPS * 8 * NUM_IDS
        if not prefetched or share is not None:
            assert ahead == (share or 0.0) * prefetched * (ahead + now)
        else:
            assert 0 < ahead < ahead + now
    for one, other in zip(found[:2], found[2:], strict=True):
        if ids is every:  # the gradients of an id come in the order of the calls
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize(("staleness", "overlap"), [(0, False), (2, False), (2, True)])
def test_each_gradient_is_applied_once_with_staleness(where: str, staleness: int, overlap: bool) -> None:
    """Rows become minus the sum of their gradients. What was looked up ahead misses at most the last steps."""
    with embeddings_of(item(optimizer=SGD(lr=1.0), initial=Zeros()), where=where, staleness=staleness) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        loader = DataLoader(TensorDataset(torch.arange(60) % 7), batch_size=4)
        expected, before = np.zeros(7), []
        batches = embeddings.prefetch(loader, lambda each: {"item": each[0]}, overlap=overlap)
        assert len(batches) == 15
        for (ids,) in batches:
            before.append(expected.copy())
            rows = module(ids)
            for row, i in zip(rows[:, 0].tolist(), ids.tolist(), strict=True):
                assert -row in {past[i] for past in before[-1 - staleness :]}
            rows.sum().backward()
            optimizer.step()
            np.add.at(expected, ids.numpy(), 1)
        embeddings.drain()
        assert start_rows(embeddings, "item", 7)[:, 0].tolist() == (-expected).tolist()
        assert embeddings.counters().module_ids == {"ahead": 60} and embeddings.step == 15


def test_an_id_that_was_named_and_not_asked_for_is_not_updated() -> None:
    """Weight decay would move it."""
    with embeddings_of(item()) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        before = embeddings.tables["item"].read(np.arange(4)).state
        for ids in embeddings.prefetch([torch.arange(4)], lambda ids: {"item": ids}):
            module(ids[:2]).sum().backward()
            optimizer.step()
        state = embeddings.tables["item"].read(np.arange(4)).state[:, 0]
        assert state.tolist() == [1, 1, 0, 0] and len(before)
        assert embeddings.tables["item"].stats()["updated"] == 2


def test_a_step_of_named_ids_is_one_lookup_and_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Table(f"t{i}", 2, initial=Normal(std=1.0)) for i in range(5)]
    with embeddings_of(*many, where="servers") as embeddings:
        calls: list[str] = []
        servers: Any = embeddings.worker.servers
        call = servers.call_servers

        def counted(method: str, step: int, arguments: Any, **options: Any) -> Any:
            calls.extend([method] * len(arguments))
            return call(method, step, arguments, **options)

        modules = [EmbeddingBag(embeddings, each, mode="sum") for each in many]
        optimizer = embeddings.optimizer()
        monkeypatch.setattr(servers, "call_servers", counted)
        ids = torch.arange(32).view(8, 4)
        for each in embeddings.prefetch([ids], lambda ids: {table.name: ids for table in many}):
            torch.stack([module(each).sum() for module in modules]).sum().backward()
            optimizer.step()
        monkeypatch.undo()
        assert [name for name in calls if name in ("lookup", "update")] == ["lookup"] * 2 + ["update"] * 2


def test_every_pass_is_over_the_loader_and_a_break_drops_the_rest() -> None:
    with embeddings_of(item(optimizer=SGD(lr=1.0)), staleness=1) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        batches = embeddings.prefetch([torch.tensor([i]) for i in range(4)], lambda ids: {"item": ids})
        for epoch in range(2):
            for number, ids in enumerate(batches):
                if epoch and number == 2:
                    break
                module(ids).sum().backward()
                optimizer.step()
        module(torch.tensor([9])).sum().backward()
        optimizer.step()
        assert embeddings.step >= 7 and embeddings.tables["item"].stats()["updated"] == 7


@pytest.mark.parametrize("where", PLACES)
def test_an_evaluation_between_steps_has_every_update(where: str) -> None:
    """The update of the last step is in progress in a thread when the evaluation starts."""
    table = Table("item", 2, optimizer=SGD(lr=1.0), initial=Zeros())
    with placed(where) as place, Embeddings({"item": table}, staleness=1, **place) as embeddings:
        module, optimizer, ids = Embedding(embeddings, "item"), embeddings.optimizer(), torch.arange(4)
        for number, _ in enumerate(embeddings.prefetch([ids] * 20, lambda ids: {"item": ids}, overlap=True), 1):
            module.train()(ids).sum().backward()
            optimizer.step()
            assert module.eval()(ids)[:, 0].tolist() == [-number] * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_may_skip_batches(overlap: bool) -> None:
    """One before its lookup, one after backward(), whose gradients the next zero_grad() clears."""
    with embeddings_of(item(optimizer=SGD(lr=1.0), initial=Zeros())) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        loader = [torch.tensor([number]) for number in range(6)]
        for number, ids in enumerate(embeddings.prefetch(loader, lambda ids: {"item": ids}, overlap=overlap)):
            optimizer.zero_grad()
            if number == 1:
                continue
            module(ids).sum().backward()
            if number == 3:
                continue
            optimizer.step()
        embeddings.drain()
        assert start_rows(embeddings, "item", 6)[:, 0].tolist() == [-1, 0, -1, 0, -1, -1]
        assert embeddings.counters().lost == {"batches/unused": 1, "batches/zero_grad": 1}
        assert embeddings.counters().module_ids == {"ahead": 5}


def test_padding_is_not_looked_up() -> None:
    with embeddings_of(item()) as embeddings:
        bag, optimizer = EmbeddingBag(embeddings, "item", mode="sum", padding_idx=0), embeddings.optimizer()
        for ids in embeddings.prefetch([torch.tensor([[1, 0], [0, 2]])], lambda ids: {"item": ids}):
            bag(ids).sum().backward()
            optimizer.step()
        assert sorted(embeddings.tables["item"].ids().tolist()) == [1, 2]
        assert embeddings.counters().module_ids == {"ahead": 2}


def test_bad_ids_are_named() -> None:
    with embeddings_of(item()) as embeddings:
        run = partial(embeddings.prefetch, [torch.tensor([1])])
        with pytest.raises(StreamError, match=r"no optimizer: call embeddings\.optimizer"):
            next(iter(run(lambda ids: {"item": ids})))
        embeddings.optimizer()
        with pytest.raises(InputError, match=r"ids named 'itm', which is no table; .*'item'"):
            next(iter(run(lambda ids: {"itm": ids})))
        with pytest.raises(InputError, match=r"ids returned a Tensor; expected a dict from a table's name"):
            next(iter(run(lambda ids: ids)))
        with pytest.raises(InputError, match="prefetch: table 'item'"):
            next(iter(run(lambda ids: {"item": ids.float()})))
        with pytest.raises(ConfigError, match=r"ids is .*; expected a function of a batch"):
            run({"item": [1]})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="accumulate"):
            run(lambda ids: {"item": ids}, accumulate=0)
        source: Any = Frame({"item": [1]})
        with pytest.raises(
            InputError, match=r"prefetch: loader is a Frame; .* data\.batches\(\[...\]\), or use .*stream"
        ):
            embeddings.prefetch(source, lambda ids: {"item": ids})
        assert len(embeddings.tables["item"]) == 0
