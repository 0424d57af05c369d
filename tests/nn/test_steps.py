"""The steps of modules that look rows up inside forward: what a step applies, once, and what is an error or counted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from module_jobs import (
    DIM,
    PLACES,
    embeddings_of,
    item,
    start_rows,
)
from satrap import (
    SGD,
    ConfigError,
    IterableSource,
    MinCount,
    NonFiniteError,
    StreamError,
    Table,
)
from satrap.nn import Embedding, EmbeddingBag
from satrap.worker.worker import Worker


def test_a_loss_that_reaches_an_ended_step_is_an_error() -> None:
    with embeddings_of(item()) as embeddings:
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer()
        rows = module(torch.tensor([1]))
        rows.sum().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(StreamError, match=r"step 1: a loss reached a lookup of table 'item' after optimizer\.step"):
            rows.sum().backward()
        rows = module(torch.tensor([1]))
        stream = embeddings.stream([{"item": np.array([1])}])
        with pytest.raises(StreamError, match=r"step 2: a loss reached .* after these lookups had ended"):
            rows.sum().backward()
        stream.close()


def test_cleared_and_refused_gradients_are_counted() -> None:
    with embeddings_of(item()) as embeddings:
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer()
        before = start_rows(embeddings, "item", 3)
        rows = module(torch.tensor([1]))
        rows.sum().backward(retain_graph=True)
        optimizer.zero_grad()
        optimizer.step()
        assert embeddings.step == 0 and torch.equal(before, start_rows(embeddings, "item", 3))
        (rows * float("nan")).sum().backward()
        with pytest.raises(NonFiniteError, match="table 'item'"):
            optimizer.step()
        assert torch.equal(before, start_rows(embeddings, "item", 3))
        module(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert embeddings.step == 2 and embeddings.counters().lost == {"batches/zero_grad": 1, "batches/failed": 1}
        assert not torch.equal(before, start_rows(embeddings, "item", 3))


@pytest.mark.parametrize("where", PLACES)
def test_an_interrupted_update_is_applied_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with embeddings_of(item(), where=where) as embeddings:
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer()
        update = Worker.update

        def interrupted(*arguments: Any, **options: Any) -> None:
            update(*arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(Worker, "update", interrupted)
        rows = module(torch.tensor([1]))
        rows.sum().backward(retain_graph=True)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        monkeypatch.undo()
        with pytest.raises(StreamError, match="after optimizer"):
            rows.sum().backward()
        optimizer.step()
        assert embeddings.step == 1 and embeddings.tables["item"].read(np.array([1])).state[0, 0] == 1
        (2 * module(torch.tensor([1]))).sum().backward()
        optimizer.step()
        assert embeddings.step == 2 and embeddings.tables["item"].read(np.array([1])).state[0, 0] == 1 + 4


def test_ids_may_change_after_forward() -> None:
    with embeddings_of(item()) as embeddings:
        ids, optimizer = torch.tensor([1]), embeddings.optimizer()
        loss = Embedding(embeddings, "item")(ids).sum()
        ids[0] = 2
        loss.backward()
        ids[0] = 3
        optimizer.step()
        assert embeddings.tables["item"].ids().tolist() == [1]
        assert embeddings.tables["item"].read(np.array([1])).state[0, 0] == 1


@pytest.mark.parametrize("where", PLACES)
def test_training_continues_after_a_refused_step(where: str) -> None:
    with embeddings_of(item(), where=where) as embeddings:
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer()
        module(torch.tensor([1])).mul(float("inf")).sum().backward()
        with pytest.raises(NonFiniteError):
            optimizer.step()
        module(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert embeddings.tables["item"].read(np.array([1])).state[0, 0] == 1


def test_an_overflow_changes_nothing_and_scaled_gradients_are_unscaled() -> None:
    with embeddings_of(item(optimizer=SGD(lr=1.0))) as embeddings:
        module, dense = Embedding(embeddings, "item"), torch.nn.Parameter(torch.ones(1))
        optimizer = embeddings.optimizer(torch.optim.SGD([dense], lr=1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = start_rows(embeddings, "item", 2)
        for factor, moved in ((float("inf"), 0.0), (1.0, 1.0)):
            loss = (module(torch.tensor([1])) * factor).sum() + dense.sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(start_rows(embeddings, "item", 2)[1], before[1] - moved)
            assert dense.item() == 1.0 - moved
        assert embeddings.counters().lost == {"batches/overflow": 1} and embeddings.step == 1


def test_clipping_includes_the_rows() -> None:
    with embeddings_of(item(optimizer=SGD(lr=1.0))) as embeddings:
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer()
        before = start_rows(embeddings, "item", 2)
        loss = module(torch.tensor([1])).sum()
        for _ in range(2):  # the leaf is in the optimizer once
            loss.backward(retain_graph=True)
        torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
        optimizer.step()
        torch.testing.assert_close(start_rows(embeddings, "item", 2)[1], before[1] - 0.5)


def test_lookups_without_a_backward_pass_are_freed() -> None:
    with embeddings_of(item()) as embeddings:
        module = Embedding(embeddings, "item")
        embeddings.optimizer()
        rows = module(torch.tensor([1]))
        node: Any = rows.grad_fn
        while not hasattr(node, "variable"):
            node = node.next_functions[0][0]
        leaf = node.variable
        hook = weakref.ref(next(iter(leaf._post_accumulate_grad_hooks.values())))
        assert hook() is not None
        del rows, node, leaf
        gc.collect()
        assert hook() is None


@pytest.mark.parametrize("where", PLACES)
def test_a_step_counts_one_sighting_of_an_id(where: str) -> None:
    with embeddings_of(item(admission=MinCount(2)), where=where) as embeddings:
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer()
        for rows in (0, 1):
            (module(torch.tensor([1])) + module(torch.tensor([1]))).sum().backward()
            optimizer.step()
            assert len(embeddings.tables["item"]) == rows


@pytest.mark.parametrize("where", PLACES)
def test_rows_of_the_open_step_are_not_evicted(where: str) -> None:
    with embeddings_of(item(capacity=4, num_buckets=1), where=where) as embeddings:
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer()
        for first in (0, 4):
            (module(torch.arange(first, first + 2)) + module(torch.arange(first + 2, first + 4))).sum().backward()
            optimizer.step()
            assert sorted(embeddings.tables["item"].ids().tolist()) == list(range(first, first + 4))


def test_streams_and_modules_train_one_after_the_other() -> None:
    with embeddings_of(item(optimizer=SGD(lr=1.0))) as embeddings:
        module = Embedding(embeddings, "item")
        with pytest.raises(StreamError, match=r"no optimizer: call embeddings\.optimizer"):
            module(torch.tensor([1]))
        optimizer = embeddings.optimizer()
        before = start_rows(embeddings, "item", 2)
        stream = embeddings.stream([{"item": np.array([1])}] * 2)
        for number, each in enumerate(stream, 1):
            each["item"].sum().backward()
            if number == 1:
                assert torch.equal(module(torch.tensor([1])), each["item"])
            optimizer.step()
        module(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert embeddings.step == 3
        for each in embeddings.stream(IterableSource([{"item": np.array([1])}])):
            assert each.step == 4
            each["item"].sum().backward()
            optimizer.step()
        assert torch.equal(start_rows(embeddings, "item", 2)[1], before[1] - 4)


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.tensor([1, 2]), torch.tensor([1])),
        (torch.tensor([1, 2]), torch.tensor([0, 5])),
        (torch.tensor([1, 2]),),
        (torch.tensor([[1, 2]]), torch.tensor([0])),
        (torch.tensor([[1, 2]]), None, torch.ones(3)),
    ],
)
def test_arguments_that_torch_refuses_insert_no_row(arguments: Any) -> None:
    with embeddings_of(item()) as embeddings:
        module = EmbeddingBag(embeddings, "item", mode="sum")
        embeddings.optimizer()
        with pytest.raises((ValueError, RuntimeError)):
            module(*arguments)
        assert len(embeddings.tables["item"]) == 0


@pytest.mark.parametrize("beside", [False, True])
def test_another_optimizer_holds_the_rows_that_wait_for_its_step(beside: bool) -> None:
    """Else clipping and GradScaler would not see them."""
    with embeddings_of(item(optimizer=SGD(lr=1.0))) as embeddings:
        module, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        for number, _ in enumerate(embeddings.stream([{"item": [2]}] * 3) if beside else range(3)):
            if number:
                optimizer = embeddings.optimizer()
            before = start_rows(embeddings, "item", 2)[1]
            (module(torch.tensor([1])) * 100).sum().backward()
            if number == 2:
                optimizer = embeddings.optimizer()
            leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
            assert torch.nn.utils.clip_grad_norm_(leaves, 1.0).item() == 200
            optimizer.step()
            optimizer.zero_grad()
            moved = before - start_rows(embeddings, "item", 2)[1]
            torch.testing.assert_close(moved, torch.full((4,), 0.5))


class Stopped(torch.autograd.Function):
    """Passes values on, and no gradient back."""

    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_function_of_the_model_may_stop_gradients(ahead: bool, where: str) -> None:
    """Torch then calls the backward pass of a lookup without any gradient, and nn.Embedding gets none."""
    with embeddings_of(item(optimizer=SGD(lr=1.0)), where=where) as embeddings:
        module, dense = Embedding(embeddings, "item"), torch.nn.Parameter(torch.ones(4))
        optimizer = embeddings.optimizer(torch.optim.SGD([dense], lr=0.0))
        batches = [(torch.tensor([1]), torch.tensor([2])), (torch.tensor([3]), torch.tensor([1]))]
        before = start_rows(embeddings, "item", 4)
        for number, ids in enumerate(
            embeddings.prefetch(batches, lambda ids: {"item": list(ids)}) if ahead else batches
        ):
            stopped, other = (module(part) for part in ids)
            stop: Any = Stopped.apply
            rows = stop(stopped) + (stop(other) if number else other)
            (rows * dense).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(before[[0, 1, 3]], start_rows(embeddings, "item", 4)[[0, 1, 3]])
        assert torch.equal(before[2] - 1, start_rows(embeddings, "item", 4)[2])


def test_a_scaled_step_of_rows_that_were_only_read_is_an_error() -> None:
    """Nothing has a gradient, so GradScaler knows of no overflow."""
    with embeddings_of(item()) as embeddings:
        module, optimizer = Embedding(embeddings, "item").eval(), embeddings.optimizer()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(module(torch.tensor([1])).sum() + torch.ones((), requires_grad=True)).backward()
        with pytest.raises(StreamError, match=r"over table 'item' was in eval\(\)"):
            scaler.step(optimizer)


def test_a_frozen_module_reads_and_trains_nothing() -> None:
    with embeddings_of(item()) as embeddings:
        module, other, optimizer = Embedding(embeddings, "item"), Embedding(embeddings, "item"), embeddings.optimizer()
        before = start_rows(embeddings, "item", 3)
        assert module.requires_grad_(False) is module and repr(module) == "Embedding('item', 4, frozen)"
        rows = module(torch.arange(3))
        assert torch.equal(rows, before) and not rows.requires_grad and len(embeddings.tables["item"]) == 0
        (rows * other(torch.tensor([1, 1, 1]))).sum().backward()
        optimizer.step()
        assert embeddings.tables["item"].ids().tolist() == [1]
        assert module.requires_grad_()(torch.tensor([1])).requires_grad


def test_a_step_of_rows_that_were_only_read_is_an_error() -> None:
    """A loop that forgets model.train() after an evaluation would train the dense half alone."""
    with embeddings_of(item()) as embeddings:
        module, dense = Embedding(embeddings, "item"), torch.nn.Parameter(torch.ones(4))
        optimizer = embeddings.optimizer(torch.optim.SGD([dense], lr=1.0))
        (module.eval()(torch.tensor([1])) * dense).sum().backward()
        with pytest.raises(
            StreamError, match=r"over table 'item' was in eval\(\).* call model\.train\(\) before forward"
        ):
            optimizer.step()
        assert dense.tolist() == [1.0] * 4
        (module.train()(torch.tensor([1])) * dense).sum().backward()
        optimizer.step()
        assert embeddings.step == 1
        with torch.no_grad():
            module.eval()(torch.tensor([1]))
        module.requires_grad_(False)
        (module(torch.tensor([1])) * dense).sum().backward()
        optimizer.step()
        assert embeddings.step == 1


@pytest.mark.parametrize("where", PLACES)
def test_frozen_rows_of_a_table_have_no_gradient(where: str) -> None:
    some, whole = item(optimizer=SGD(lr=1.0), frozen=range(2, 4)), Table("user", DIM, frozen=True)
    with embeddings_of(some, whole, where=where) as embeddings:
        items, users, optimizer = Embedding(embeddings, "item"), Embedding(embeddings, "user"), embeddings.optimizer()
        before = {name: start_rows(embeddings, name, 6) for name in embeddings.tables}
        ids = torch.arange(6)
        for seen in embeddings.prefetch([ids, ids], ids=lambda seen: {"item": seen, "user": seen}):
            rows = users(seen)
            assert torch.equal(rows, before["user"]) and not rows.requires_grad
            (items(seen).sum() + rows.sum()).backward()
            optimizer.step()
        rows = users(ids)
        (items(ids).sum() + rows.sum()).backward()
        optimizer.step()
        assert embeddings.step == 3 and not rows.requires_grad
        assert embeddings.counters().module_ids == {"on the spot": 12, "ahead": 24}
        steps = torch.tensor([3.0, 3, 0, 0, 3, 3])[:, None]
        assert torch.equal(start_rows(embeddings, "item", 6), before["item"] - steps)
        assert torch.equal(start_rows(embeddings, "user", 6), before["user"])
        with pytest.raises(
            ConfigError, match=r"table 'user' is frozen, and requires_grad is True: leave frozen=True out"
        ):
            users.requires_grad_()
