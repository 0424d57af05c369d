"""Modules that are called together, as those of a collection are, look their rows up in one call, and return and train
what they do one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loop import take_step
from module_jobs import NUM_IDS, PLACES, embeddings_of, item, noted, noted_calls, noted_reads, start_rows, tables
from satrap import InputError
from satrap.nn import Embedding, EmbeddingBag
from satrap.nn.embedding import call_together


def modules_of(embeddings: Any) -> list[nn.Module]:
    return [
        EmbeddingBag(embeddings, "item", mode="sum", padding_idx=0),
        Embedding(embeddings, "user"),
        Embedding(embeddings, "item"),  # shares the table of the first
        EmbeddingBag(embeddings, "user", mode="max"),
        nn.Embedding(NUM_IDS, 4),
    ]


def arguments_of(step: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(0, NUM_IDS, (6,), generator=generator) for _ in range(5)]
    weights = torch.rand(6, generator=generator)
    bags = (ids[0], torch.tensor([0, 4]), weights), (ids[3].int(), torch.tensor([0, 1]))
    return [bags[0], (ids[1].view(2, 3),), (ids[2],), bags[1], (ids[4],)]


@pytest.mark.parametrize("where", [*PLACES, "device", "direct"])
def test_modules_called_together_train_as_one_by_one(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for together in (False, True):
        with embeddings_of(*tables(), where=where) as embeddings:
            torch.manual_seed(0)
            modules = modules_of(embeddings)
            optimizer = embeddings.optimizer(torch.optim.SGD(modules[-1].parameters(), lr=0.1))
            calls, losses = noted_calls(embeddings, monkeypatch), []
            for step in range(4):
                given = arguments_of(step)
                if together:
                    outputs = call_together(modules, given)
                else:
                    outputs = [module(*arguments) for module, arguments in zip(modules, given, strict=True)]
                losses.append(take_step(torch.stack([part.tanh().square().sum() for part in outputs]).sum(), optimizer))
            assert calls == ([["item", "user"]] if together else [["item"], ["user"], ["item"], ["user"]]) * 4
            found.append((losses, {name: start_rows(embeddings, name, NUM_IDS).tolist() for name in embeddings.tables}))
    assert found[0] == found[1]


@pytest.mark.parametrize("where", [*PLACES, "device", "direct"])
def test_modules_called_together_in_eval_are_one_read(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the tables, and one to each server; what two of them look up in one table, too."""
    with embeddings_of(*tables(), where=where) as embeddings:
        modules, given = modules_of(embeddings), arguments_of(0)
        optimizer = embeddings.optimizer()
        torch.cat([part.reshape(-1) for part in call_together(modules, given)]).sum().backward()
        optimizer.step()
        for module in modules:
            module.eval()
        alone = [module(*arguments) for module, arguments in zip(modules, arguments_of(1), strict=True)]
        servers = embeddings.worker.servers
        reads = noted_reads(embeddings, monkeypatch)
        requests = [] if servers is None else noted(servers, "call_servers", monkeypatch)
        together = call_together(modules, arguments_of(1))
        assert reads == [["item", "user"]] and requests == ["lookup"] * (servers is not None)
        assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_only_modules_that_train_and_have_no_hooks_are_looked_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with embeddings_of(*tables()) as embeddings:
        modules, given = modules_of(embeddings), arguments_of(0)
        embeddings.optimizer()
        calls, hooked = noted_calls(embeddings, monkeypatch), []
        modules[0].requires_grad_(False)
        modules[1].register_forward_hook(lambda *_: hooked.append("user"))
        call_together(modules, given)
        assert calls == [["item", "user"], ["user"]] and hooked == ["user"]
        calls.clear()
        with torch.no_grad():
            call_together(modules, given)
        assert not calls


def test_bad_arguments_of_one_look_up_nothing() -> None:
    with embeddings_of(*tables()) as embeddings:
        modules, given = modules_of(embeddings), arguments_of(0)
        embeddings.optimizer()
        with pytest.raises(InputError, match=r"table .item.: ids are torch\.float32"):
            call_together(modules, [*given[:2], (torch.rand(3),), *given[3:]])
        assert not any(len(store) for store in embeddings.tables.values())


def test_no_modules_are_no_lookup() -> None:
    with embeddings_of(item()):
        assert call_together([], []) == []


@pytest.mark.parametrize("where", PLACES)
def test_ids_that_were_not_named_are_one_lookup(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each table is named, so no module finds all of its ids."""
    found: list[Any] = []
    for prefetched in (False, True):
        with embeddings_of(*tables(), where=where) as embeddings:
            torch.manual_seed(0)
            modules = modules_of(embeddings)
            optimizer = embeddings.optimizer(torch.optim.SGD(modules[-1].parameters(), lr=0.1))
            calls, losses = noted_calls(embeddings, monkeypatch), []
            loader: Any = [arguments_of(step) for step in range(4)]
            if prefetched:
                loader = embeddings.prefetch(
                    loader, lambda given: {"item": given[0][0][:1], "user": given[1][0][0, :1]}
                )
            for given in loader:
                outputs = call_together(modules, given)
                losses.append(take_step(torch.stack([part.tanh().square().sum() for part in outputs]).sum(), optimizer))
            assert calls == [["item", "user"]] * 4
            counted = embeddings.counters().module_ids
            assert counted["on the spot"] > 0 and (counted.get("ahead", 0) > 0) is prefetched
            rows = torch.cat([start_rows(embeddings, name, NUM_IDS) for name in embeddings.tables])
            found.append((torch.tensor(losses), rows))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
