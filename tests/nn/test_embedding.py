"""Modules that look rows up inside forward train as plain torch does: every optimizer, any number of lookups in a step,
in this process and on servers. A step applies each gradient once; what would be lost is an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag
from torch.utils.checkpoint import checkpoint

import module_child
from cluster import running_servers
from module_jobs import (
    DIM,
    NUM_IDS,
    PLACES,
    Scores,
    batch,
    embeddings_of,
    item,
    loss_at,
    loss_of,
    minimize,
    start_rows,
    tables,
)
from remote_worker_parts import working
from satrap import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Checkpoint,
    ConfigError,
    Deployment,
    Embeddings,
    InputError,
    StreamError,
    Table,
)
from satrap.nn import Embedding, EmbeddingBag
from trainers import Trainers

STEPS = 6
OPTIMIZERS: list[tuple[Any, Any, dict[str, float]]] = [
    (SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    (Adagrad(lr=0.1), torch.optim.Adagrad, {"lr": 0.1}),
    (Adam(lr=0.02), torch.optim.Adam, {"lr": 0.02}),
    (AdamW(lr=0.02, weight_decay=0.1), torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("optimizer", "kind", "options"), OPTIMIZERS, ids=lambda each: type(each).__name__)
def test_training_equals_torch(where: str, optimizer: Any, kind: Any, options: dict[str, float]) -> None:
    both = item(optimizer=optimizer), Table("user", DIM, optimizer=optimizer, num_rows=NUM_IDS)
    with embeddings_of(*both, where=where) as embeddings:
        own = Scores(Embedding(embeddings, "item"), Embedding(embeddings, both[0]), Embedding(embeddings, "user"))
        shared, user = torch.nn.Embedding(NUM_IDS, DIM), torch.nn.Embedding(NUM_IDS, DIM)
        with torch.no_grad():
            shared.weight.copy_(start_rows(embeddings, "item", NUM_IDS))
            user.weight.copy_(start_rows(embeddings, "user", NUM_IDS))
        plain = Scores(shared, shared, user)
        plain.head.load_state_dict(own.head.state_dict())
        combined = embeddings.optimizer(torch.optim.SGD(own.parameters(), lr=0.1))
        of_torch = [torch.optim.SGD(plain.head.parameters(), lr=0.1)]
        of_torch.append(kind([shared.weight, user.weight], **options))
        ours = minimize([combined], lambda step: loss_at(own, step), STEPS)
        torch.testing.assert_close(
            ours, minimize(of_torch, lambda step: loss_at(plain, step), STEPS), rtol=0, atol=1e-6
        )
        for name, expected in (("item", shared.weight), ("user", user.weight)):
            found = start_rows(embeddings, name, NUM_IDS)
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)
        assert embeddings.step == STEPS and not embeddings.counters().lost


def train_scores(*declared: Table, **options: Any) -> tuple[list[float], list[Any]]:
    """Return the losses and the rows."""
    with embeddings_of(*declared, **options) as embeddings:
        torch.manual_seed(0)
        model = Scores.over(embeddings)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = minimize([optimizer], partial(loss_at, model), STEPS)
        assert embeddings.step == STEPS and not embeddings.counters().lost
        return losses, [start_rows(embeddings, name, NUM_IDS).tolist() for name in embeddings.tables]


def test_the_rows_have_the_same_bits_here_and_on_servers() -> None:
    here, on_servers = (train_scores(*tables(), where=where) for where in PLACES)
    assert here == on_servers


MODES = ("sum", "mean", "max", "weighted")
BAGS: dict[str, tuple[Tensor, Tensor | None, dict[str, Any]]] = {
    "two dimensions": (torch.tensor([[1, 2, 2], [3, 1, 7]]), None, {}),
    "offsets": (torch.tensor([1, 2, 2, 3, 1, 7]), torch.tensor([0, 0, 2, 5]), {}),
    "last offset": (torch.tensor([1, 2, 2, 3]), torch.tensor([0, 3, 3, 4]), {"include_last_offset": True}),
    "int32": (torch.tensor([1, 2, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), {}),
    "padding": (torch.tensor([[0, 2, 0], [0, 0, 0], [1, 2, 3]]), None, {"padding_idx": 0}),
    "no padding": (torch.tensor([[1, 2, 3]]), None, {"padding_idx": -12}),
    "only padding": (torch.tensor([[0, 0]]), None, {"padding_idx": 0}),
    "single ids": (torch.tensor([1, 0, 2]), torch.arange(3), {"padding_idx": 0}),
    "single ids, last offset": (torch.tensor([1, 1, 2]), torch.arange(4), {"include_last_offset": True}),
    "one column": (torch.tensor([[1], [0], [1]]), None, {"padding_idx": 0}),
    "no id": (torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]), {}),
}


@pytest.mark.draw(18)
@pytest.mark.parametrize(("where", "mode"), [*(("here", mode) for mode in MODES), ("servers", "weighted")])
@pytest.mark.parametrize("name", BAGS)
def test_bags_equal_torch(name: str, where: str, mode: Any) -> None:
    ids, offsets, options = BAGS[name]
    kind: Any = "sum" if mode == "weighted" else mode
    with embeddings_of(item(num_rows=NUM_IDS, optimizer=SGD(lr=1.0)), where=where) as embeddings:
        own = EmbeddingBag(embeddings, "item", mode=kind, **options)
        weight = start_rows(embeddings, "item", NUM_IDS).requires_grad_()
        weights = [torch.rand(ids.shape).requires_grad_() if mode == "weighted" else None] * 2
        weights[1] = None if weights[0] is None else weights[0].detach().clone().requires_grad_()
        optimizer = embeddings.optimizer()
        pooled = own(ids, offsets, weights[0])
        expected = embedding_bag(ids, weight, offsets, mode=kind, per_sample_weights=weights[1], **options)
        torch.testing.assert_close(pooled, expected)
        for each in (pooled, expected):
            (each * torch.arange(each.numel()).view_as(each)).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        found = start_rows(embeddings, "item", NUM_IDS)
        torch.testing.assert_close(found, (weight - weight.grad).detach())
        if weights[0] is not None and weights[1] is not None:
            torch.testing.assert_close(weights[0].grad, weights[1].grad)


@pytest.mark.parametrize("where", PLACES)
def test_gradients_of_a_step_are_one_update(where: str) -> None:
    """Adagrad's state is the square of the sum over lookups and backward passes, not a sum of squares."""
    with embeddings_of(item(), Table("other", 2), where=where) as embeddings:
        one, two, other = (Embedding(embeddings, name) for name in ("item", "item", "other"))
        optimizer = embeddings.optimizer()
        ids = torch.tensor([[3, 3], [4, 3]])
        (one(ids).sum() + two(ids[0]).sum()).backward()
        rows = one(torch.tensor(3))
        rows.sum().backward(retain_graph=True)
        rows.sum().backward()
        other(ids).sum()  # no backward pass reaches it
        optimizer.step()
        read = embeddings.tables["item"].read(np.array([3, 4]))
        assert read.state[:, 0].tolist() == [(3 + 2 + 2) ** 2, 1] and embeddings.step == 1
        assert embeddings.tables["other"].read(np.array([3, 4])).state.tolist() == [[0, 0], [0, 0]]
        optimizer.step()
        assert embeddings.step == 1, "a step without gradients stays open"


@pytest.mark.parametrize("where", PLACES)
def test_evaluation_reads_and_changes_nothing(where: str) -> None:
    with embeddings_of(item(), where=where) as embeddings:
        module, expected = Embedding(embeddings, "item", padding_idx=2), start_rows(embeddings, "item", 5)
        expected[2] = 0
        assert torch.equal(module.eval()(torch.arange(5)), expected)
        with torch.no_grad():
            assert torch.equal(module.train()(torch.arange(5).view(5, 1)).squeeze(1), expected)
        assert len(embeddings.tables["item"]) == 0 and embeddings.step == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_applies_gradients_once(reentrant: bool) -> None:
    found = []
    for recompute in (False, True):
        with embeddings_of(*tables()) as embeddings:
            torch.manual_seed(0)
            model = Scores.over(embeddings)
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            anchor = torch.zeros(1, requires_grad=True)  # the reentrant kind passes gradients only if an input has one

            def score(*ids: Tensor, model: Scores = model) -> Tensor:
                return torch.nn.functional.softplus(model(*ids[1:])).mean() + ids[0].sum()

            def loss(step: int, anchor: Tensor = anchor, score: Any = score, recompute: bool = recompute) -> Tensor:
                ids = anchor, *batch(step)
                found: Tensor = checkpoint(score, *ids, use_reentrant=reentrant) if recompute else score(*ids)
                return found

            losses = minimize([optimizer], loss, STEPS)
            found.append((losses, start_rows(embeddings, "item", NUM_IDS).tolist()))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides its warning, which is an error here
def test_a_compiled_model_has_a_graph_break_and_trains_alike() -> None:
    reset: Any = torch.compiler.reset
    found = []
    for compiled in (False, True):
        with embeddings_of(*tables()) as embeddings:
            torch.manual_seed(0)
            reset()
            model: Any = Scores.over(embeddings)
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            if compiled:
                whole: Any = torch.compile(model, backend="eager", fullgraph=True)
                with pytest.raises(Exception, match="disable"):
                    whole(*batch(0))
                reset()
                model = torch.compile(model, backend="eager")
            losses = minimize([optimizer], partial(loss_at, model), STEPS)
            found.append((losses, start_rows(embeddings, "item", NUM_IDS).tolist()))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("where", PLACES)
def test_a_resumed_run_equals_an_uninterrupted_one(where: str, tmp_path: Path) -> None:
    found = []
    for parts in ([range(STEPS)], [range(3), range(3, STEPS)]):
        for steps in parts:
            with embeddings_of(*tables(), where=where) as embeddings:
                torch.manual_seed(0)
                model = Scores.over(embeddings)
                optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
                run = Checkpoint(tmp_path / str(len(parts)), model, optimizer, embeddings)
                assert run.resume() == (steps.start > 0) and embeddings.step == steps.start
                losses = minimize([optimizer], partial(loss_at, model), len(steps), first=steps.start)
                run.save()
                rows = start_rows(embeddings, "item", NUM_IDS).tolist()
        found.append((losses[-3:], rows))
    assert found[0] == found[1]


def test_a_state_dict_without_its_rows_is_refused(tmp_path: Path) -> None:
    with embeddings_of(item()) as embeddings:
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer()
        module.load_state_dict(module.state_dict())
        module(torch.tensor([1])).sum().backward()
        optimizer.step()
        state = module.state_dict()
        module.load_state_dict(state)
        module.eval()(torch.tensor([1]))
    with embeddings_of(item()) as embeddings:
        module = Embedding(embeddings, "item").eval()
        module.load_state_dict(state)
        with pytest.raises(StreamError, match=r"state of step 1, but table 'item' is at step 0: .* satrap\.Checkpoint"):
            module(torch.tensor([1]))


def test_what_a_module_is_not_is_an_error() -> None:
    with embeddings_of(item(num_rows=NUM_IDS), Table("open", 2)) as embeddings:
        module = Embedding(embeddings, "item", padding_idx=-1)
        assert (module.num_embeddings, module.embedding_dim, module.padding_idx) == (NUM_IDS, DIM, NUM_IDS - 1)
        unbounded = Embedding(embeddings, "open")
        assert unbounded.num_embeddings is None
        assert not list(module.parameters()) and not list(module.buffers())
        assert repr(module) == "Embedding('item', 4, padding_idx=11)"
        with pytest.raises(AttributeError, match="weight is all rows of table 'open', and the table has no num_rows"):
            _ = unbounded.weight
        with pytest.raises(AttributeError, match="no attribute 'weights'"):
            _ = module.weights
        with pytest.raises(TypeError, match="table 'item' can be neither copied nor pickled"):
            copy.deepcopy(torch.nn.Sequential(module))
        with pytest.raises(InputError, match=r"ids are torch\.float32; expected a tensor of int64 or int32"):
            module(torch.zeros(2))
        with pytest.raises(InputError, match=r"ids are torch\.uint64; .*: pass ids\.view\(torch\.int64\)"):
            module(torch.zeros(2, dtype=torch.uint64))
        with pytest.raises(InputError, match="ids are a list"):
            module([1])
        with pytest.raises(InputError, match="12"):
            module.eval()(torch.tensor([NUM_IDS]))
        for padding in (NUM_IDS, -NUM_IDS - 1, 1.5):
            with pytest.raises(ConfigError, match=r"table 'item'.*padding_idx"):
                Embedding(embeddings, "item", padding_idx=padding)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"table 'open'.*padding_idx"):
            Embedding(embeddings, "open", padding_idx=-1)
        with pytest.raises(ConfigError, match=r"table is 'itm', which the embeddings do not have; .*'item'"):
            Embedding(embeddings, "itm")
        with pytest.raises(ConfigError, match="table 'item' is configured differently"):
            Embedding(embeddings, item())
        with pytest.raises(ConfigError, match=r"embeddings is .*; expected the satrap\.Embeddings"):
            Embedding(torch.nn.Embedding(2, 2), "item")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="mode is 'avg'"):
            EmbeddingBag(embeddings, "item", mode="avg")  # type: ignore[arg-type]


def test_dense_parameters_on_servers_need_an_optimizer() -> None:
    with running_servers(1) as services:
        deployment = Deployment([services[0].address])
        embeddings = Embeddings({"item": item()}, dense="async", deployment=deployment)
        with pytest.raises(ConfigError, match=r"dense is a NoneType; expected a torch\.optim\.Optimizer"):
            embeddings.optimizer()


@pytest.mark.parametrize(("memory", "num_rows"), [(None, None), (4096, None), (None, NUM_IDS)])
def test_rows_on_a_device_are_those_in_memory(memory: int | None, num_rows: int | None) -> None:
    declared = [replace(table, num_rows=num_rows) for table in tables()]
    assert train_scores(*declared, device="cpu", device_memory=memory) == train_scores(*declared)


def test_embeddings_in_a_closed_session_are_refused() -> None:
    embeddings: Embeddings
    with embeddings_of(item()) as embeddings:
        module = Embedding(embeddings, "item").eval()
    with pytest.raises(StreamError, match="these embeddings are closed"):
        module(torch.tensor([1]))


@pytest.fixture(scope="module")
def module_trainers() -> Iterator[Trainers]:
    with Trainers(2, Path(module_child.__file__)) as found:
        yield found


@pytest.mark.parametrize("num_servers", [0, 2])
@pytest.mark.parametrize(("without", "stream"), [(None, False), ([1, 2], False), (None, True)])
def test_trainers_equal_one_on_their_joined_batch(
    module_trainers: Trainers, num_servers: int, without: list[int] | None, stream: bool, tmp_path: Path
) -> None:
    """Without servers the trainers share the rows. without: a trainer and its step in which no row has a gradient.
    stream: the users' rows come from a stream."""
    found = module_trainers.run_on_servers(num_servers, 2, tmp_path, without=without, stream=stream)
    assert found[0]["rows"] == found[1]["rows"] and [each["step"] for each in found] == [module_child.STEPS] * 2
    with embeddings_of(*tables()) as embeddings:
        torch.manual_seed(0)
        model = Scores.over(embeddings)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def loss(step: int) -> Tensor:
            losses = []
            for rank in range(2):
                model.train(without != [rank, step])
                losses.append(loss_of(model, *(each.chunk(2)[rank] for each in batch(step))))
            return torch.stack(losses).mean()

        losses = minimize([optimizer], loss, module_child.STEPS)
        together = np.mean([each["losses"] for each in found], axis=0)
        torch.testing.assert_close(losses, together.tolist(), rtol=0, atol=1e-6)
        for name, values in found[0]["rows"].items():
            torch.testing.assert_close(torch.tensor(values), start_rows(embeddings, name, NUM_IDS))


@pytest.mark.parametrize("dense", ["sync", "async"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_trainers_apply_each_gradient_once(
    module_trainers: Trainers, dense: str, stream: bool, num_workers: int, tmp_path: Path
) -> None:
    """Two trainers, each with its own steps if the dense parameter is on the servers; with worker processes, too."""
    counts = {"dense": dense, "stream": stream}
    with working(num_workers) as workers:
        addresses = [each.address for each in workers] or None
        found = module_trainers.run_on_servers(2, 2, tmp_path, without=None, counts=counts, workers=addresses)
    expected = np.zeros(NUM_IDS)
    for step in range(module_child.STEPS):
        for rank in range(2):
            expected[step] -= 0.5 * (1 + stream)
            expected[rank] -= 0.5
    for each in found:
        assert each["rows"] == expected.tolist() and each["step"] == module_child.STEPS
        assert each["dense"] == [8.0 - module_child.STEPS] * 2
