"""Dense parameters in tables on the servers, with one trainer: results equal torch's, across checkpoints and killed
servers; and invalid configurations are refused. Several trainers: tests/train/test_async_trainers.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster import batch, running_servers
from contents import IDS, bits
from faults import killed_at_random
from loop import Net, batches, deployed, loss_of, rows, tables, train, train_step
from loop import job as synchronous_job
from one_row import ulp
from satrap import Checkpoint, ConfigError, Deployment, Embeddings, StreamError, Table
from satrap.config.features import Features
from satrap.config.tables import Zeros
from satrap.errors import CheckpointError, NonFiniteError
from satrap.server.migration.coordinator import Migration
from satrap.train.embeddings import session_of
from satrap.worker.server_group import ServerGroup
from satrap.worker.sharded_rows import sharded_worker

Kind = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Kind] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1, eps=1e-6),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), betas=(0.8, 0.99), eps=1e-6),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
}
pytestmark = pytest.mark.draw(6)
NOWHERE = Deployment(["tcp://127.0.0.1:1"])
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@contextmanager
def job(
    addresses: list[str], kind: Kind = KINDS["SGD"], model: Any = None, lr_scale: float = 1.0, **options: Any
) -> Iterator[tuple[Embeddings, Any, Any]]:
    torch.manual_seed(0)
    embeddings = Embeddings(tables(), **deployed({"num_threads": 1, "servers": addresses, "dense": "async", **options}))
    model = Net() if model is None else model
    optimizer = embeddings.optimizer(kind(model.parameters()), lr_scale=lr_scale)
    try:
        yield embeddings, model, optimizer
    finally:
        embeddings.worker.close()


@contextmanager
def job_on_servers(num_servers: int = 2, **options: Any) -> Iterator[tuple[Embeddings, Any, Any]]:
    """Yield a job on new servers."""
    with running_servers(num_servers) as services, job([each.address for each in services], **options) as made:
        yield made


def local_job(kind: Kind, num: int) -> tuple[list[float], torch.nn.Module, Embeddings]:
    """Return the same job with everything in this process."""
    torch.manual_seed(0)
    embeddings, model = Embeddings(tables(), num_threads=1), Net()
    losses = train(embeddings, model, embeddings.optimizer(kind(model.parameters())), batches(num))
    return losses, model, embeddings


def values_of(model: torch.nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


# -- torch's steps -----------------------------------------------------------------------------------------------------


@each_kind
def test_each_step_equals_torchs(kind: Kind) -> None:
    """Parameters agree within 2 ulp, also for a parameter without gradient in every third step, and with a schedule."""
    with job_on_servers(kind=kind) as (embeddings, model, optimizer):
        shadows = [torch.nn.Parameter(each.detach().clone()) for each in model.parameters()]
        plain = kind(shadows)
        start = values_of(model)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, plain)]
        for one in embeddings.stream(batches(12)):
            before = values_of(model)
            loss = loss_of(model, one)
            optimizer.zero_grad()
            loss.backward()
            if one.step % 3 == 0:
                next(model.parameters()).grad = None
            for shadow, was, parameter in zip(shadows, before, model.parameters(), strict=True):
                shadow.data.copy_(torch.from_numpy(was))
                shadow.grad = None if parameter.grad is None else parameter.grad.clone()
            optimizer.step()
            plain.step()
            for each in schedules:
                each.step()
            embeddings.drain()
            for first, was, now, shadow in zip(start, before, values_of(model), shadows, strict=True):
                expected = shadow.detach().numpy()
                assert (np.abs(now - expected) <= 2 * ulp(first, was, now, expected)).all()
                assert np.array_equal(now, was) == (shadow.grad is None)
        embeddings.tables["dense.0"].check()


class OneSlope(torch.nn.Module):
    """A model whose gradient is always 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("kind", "lr_scale", "expected"),
    [
        (KINDS["SGD"], 1.0, 1.0),
        (KINDS["Adam"], 1.0, 4.0),
        (KINDS["Adam"], 0.25, 1.0),
        (KINDS["AdamW"], 0.25, 1.0),
        (lambda p: torch.optim.Adagrad(p, lr=0.05), 1.0, 2.0),
        (lambda p: torch.optim.Adagrad(p, lr=0.05), 0.5, 1.0),
    ],
    ids=["SGD", "Adam", "Adam scaled", "AdamW scaled", "Adagrad", "Adagrad scaled"],
)
def test_how_far_four_trainers_go(
    kind: Kind, lr_scale: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 25 synchronous steps torch goes a distance; four trainers send 100 gradients, each divided by four. Servers do
    not distinguish their senders, so that one trainer can send all of them."""
    plain = OneSlope()
    stepper = kind(plain.parameters())
    for _ in range(25):
        plain.weight.grad = torch.ones(3)
        stepper.step()
    with job_on_servers(1, kind=kind, model=OneSlope(), lr_scale=lr_scale) as (embeddings, model, optimizer):
        with embeddings.stream(batches(4) * 25) as stream:
            monkeypatch.setattr(embeddings.trainers, "world_size", 4)
            for one in stream:
                optimizer.zero_grad()
                (model.weight.sum() + one.embeddings.sum()).backward()
                optimizer.step()
            monkeypatch.undo()
        embeddings.drain()
        assert optimizer.param_groups[0]["lr"] == stepper.param_groups[0]["lr"]
        distance = float((model.weight / plain.weight).detach().mean())
    assert distance == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize(
    ("dense", "lr_scale", "match"),
    [("sync", 0.5, "lr_scale is 0.5 with dense='sync'"), ("async", -1.0, "lr_scale"), ("async", "a", "lr_scale")],
)
def test_an_lr_scale_that_has_no_meaning_is_refused(dense: Any, lr_scale: Any, match: str) -> None:
    embeddings = Embeddings(tables(), dense=dense, deployment=NOWHERE if dense == "async" else None)
    with pytest.raises(ConfigError, match=match):
        embeddings.optimizer(torch.optim.SGD(Net().parameters(), lr=0.1), lr_scale=lr_scale)


@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])
@pytest.mark.parametrize("kind", [KINDS["SGD"], KINDS["Adam"]], ids=["SGD", "Adam"])
def test_a_loop_equals_the_synchronous_one(kind: Kind, overlap: bool) -> None:
    losses, there, local = local_job(kind, 40)
    with job_on_servers(kind=kind) as (embeddings, model, optimizer):
        assert train(embeddings, model, optimizer, batches(40), overlap=overlap) == pytest.approx(losses, rel=1e-5)
        for parameter, expected in zip(model.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-5, atol=1e-6)
        for name, values in rows(local).items():
            np.testing.assert_allclose(rows_of(embeddings, name), values, rtol=1e-5, atol=1e-6)
        assert embeddings.counters().staleness == {0: 40}


def rows_of(embeddings: Embeddings, name: str) -> np.ndarray:
    return embeddings.tables[name].read(IDS[: len(IDS) // 2]).values


def test_each_param_group_has_its_own_table() -> None:
    def kind(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.Adam([{"params": [first], "lr": 0.1, "betas": (0.5, 0.9)}, {"params": others}], lr=0.01)

    losses, there, _ = local_job(kind, 15)
    with job_on_servers(kind=kind) as (embeddings, model, optimizer):
        assert train(embeddings, model, optimizer, batches(15)) == pytest.approx(losses, rel=1e-4)
        assert list(embeddings.tables) == ["user", "item", "dense.0", "dense.1"]
        assert [group.get("table") for group in optimizer.param_groups] == [None, None, "user", "item"]
        for parameter, expected in zip(model.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


def test_stale_steps_are_all_applied_within_the_bound() -> None:
    with job_on_servers(staleness=3, wire="float16") as (embeddings, model, optimizer):
        train(embeddings, model, optimizer, batches(30), overlap=True)
        stats = embeddings.tables["dense.0"].stats()
        assert (stats["updated"], stats["repeated"]) == (30 * len(embeddings.tables["dense.0"]), 0)
        assert max(embeddings.counters().staleness) <= 3


# -- torch's rules -----------------------------------------------------------------------------------------------------


def test_accumulation_makes_one_step() -> None:
    with job_on_servers() as (embeddings, model, optimizer):
        for number, one in enumerate(embeddings.stream(batches(6), accumulate=2), 1):
            if number % 2 == 1:
                optimizer.zero_grad()
                before, total = values_of(model), [np.zeros_like(each) for each in values_of(model)]
            else:
                assert all(map(np.array_equal, before, values_of(model))), "parameters do not change within a step"
            loss_of(model, one).backward()
            if number % 2 == 0:
                total = [each.grad.numpy().copy() for each in model.parameters()]
                optimizer.step()
                embeddings.drain()
                for was, gradient, now in zip(before, total, values_of(model), strict=True):
                    np.testing.assert_allclose(now, was - 0.05 * gradient, rtol=1e-5, atol=1e-7)
        stats = embeddings.tables["dense.0"].stats()
        assert stats["lookups"] == stats["updated"] == 3 * stats["rows"], "updated once per step"


def test_a_batch_that_is_dropped_changes_nothing() -> None:
    with job_on_servers() as (embeddings, model, optimizer):
        before = values_of(model)
        for one in embeddings.stream(batches(3)):
            loss_of(model, one).backward()
            optimizer.zero_grad()
        assert all(map(np.array_equal, before, values_of(model)))
        assert embeddings.tables["dense.0"].stats()["updated"] == 0
        assert embeddings.counters().lost == {"batches/zero_grad": 3}


def test_an_overflow_changes_nothing_and_scaled_steps_are_unscaled() -> None:
    losses, _, _ = local_job(KINDS["SGD"], 4)
    with job_on_servers() as (embeddings, model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found = []
        for one in embeddings.stream([*batches(4), *batches(1)]):
            loss = loss_of(model, one)
            optimizer.zero_grad()
            scaler.scale(loss * (np.inf if one.step == 5 else 1.0)).backward()
            before = values_of(model)
            scaler.step(optimizer)
            scaler.update()
            embeddings.drain()
            found.append(loss.item())
            assert all(map(np.array_equal, before, values_of(model))) == (one.step == 5)
        assert found[:4] == pytest.approx(losses, rel=1e-5)
        assert embeddings.counters().lost == {"batches/overflow": 1}


def test_a_gradient_that_is_not_finite_is_refused_before_anything_is_sent() -> None:
    with job_on_servers() as (embeddings, model, optimizer):
        for one in embeddings.stream(batches(1)):
            loss_of(model, one).backward()
            list(model.parameters())[2].grad[0, 3] = np.nan
            with pytest.raises(NonFiniteError, match="step 1: the gradient of dense parameter 2 holds NaN"):
                optimizer.step()
            break
        assert [each.stats()["updated"] for each in embeddings.tables.values()] == [0, 0, 0]


def test_evaluation_uses_the_latest_parameters() -> None:
    """A stream's parameters are those of the step's lookup; an evaluation inside it uses those after the step."""
    with job_on_servers(staleness=2) as (embeddings, model, optimizer):
        for one in embeddings.stream(batches(4), overlap=False):
            before = values_of(model)
            train_step(model, optimizer, one)
            assert all(map(np.array_equal, before, values_of(model)))
            embeddings.eval()
            with embeddings.stream(batches(1)):
                assert not any(map(np.array_equal, before, values_of(model)))
            embeddings.train()


# -- checkpoints and killed servers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KINDS["SGD"], KINDS["Adam"]], ids=["SGD", "Adam"])
def test_a_resumed_run_equals_an_uninterrupted_one(kind: Kind, tmp_path: Path) -> None:
    data = batches(12)
    with job_on_servers(2, kind=kind) as (embeddings, model, optimizer):
        train(embeddings, model, optimizer, data)
        expected = values_of(model)
    with job_on_servers(2, kind=kind) as (embeddings, model, optimizer):
        run = Checkpoint(tmp_path, model, optimizer, embeddings, data)
        assert not run.resume()
        for one in embeddings.stream(data):
            if one.step == 8:
                break
            train_step(model, optimizer, one)
            if run.save(every_steps=3):
                saved = values_of(model)
    with job_on_servers(3, kind=kind) as (embeddings, model, optimizer):
        with torch.no_grad():
            next(model.parameters()).fill_(1.0)
        run = Checkpoint(tmp_path, model, optimizer, embeddings, data)
        assert run.resume() and embeddings.step == 6
        assert all(map(np.array_equal, saved, values_of(model)))
        session_of(embeddings).dense.refresh()
        assert all(map(np.array_equal, saved, values_of(model))), "initial values and rows are those of the checkpoint"
        train(embeddings, model, optimizer, data)
        assert all(map(np.array_equal, expected, values_of(model)))


def test_a_checkpoint_of_the_other_dense_option_is_refused(tmp_path: Path) -> None:
    with job_on_servers(1) as (embeddings, model, optimizer):
        train(embeddings, model, optimizer, batches(2))
        Checkpoint(tmp_path, model, optimizer, embeddings).save()
    embeddings, model, optimizer = synchronous_job()
    with pytest.raises(CheckpointError, match=r"has tables \['dense.0', 'item', 'user'\]; this job has"):
        Checkpoint(tmp_path, model, optimizer, embeddings).resume()


def test_killed_servers_lose_nothing(tmp_path: Path, seed: int) -> None:
    with job_on_servers(kind=KINDS["Adam"]) as (embeddings, model, optimizer):
        train(embeddings, model, optimizer, batches(80))
        expected = values_of(model)
    with (
        killed_at_random(tmp_path, seed, 6) as (servers, over),
        job([each.address for each in servers], KINDS["Adam"]) as (embeddings, model, optimizer),
    ):
        for number, one in enumerate(embeddings.stream(batches(80)), 1):
            train_step(model, optimizer, one)
            if number == 70:
                over.wait()
        assert all(map(np.array_equal, expected, values_of(model)))
        for table in embeddings.tables.values():
            table.check()


def test_migrations_lose_nothing() -> None:
    with job_on_servers(kind=KINDS["Adam"]) as (embeddings, model, optimizer):
        train(embeddings, model, optimizer, batches(40))
        expected = values_of(model)
    with running_servers(3) as services:
        addresses = [service.address for service in services]
        with job(addresses[:1], KINDS["Adam"]) as (embeddings, model, optimizer):
            for number, one in enumerate(embeddings.stream(batches(40)), 1):
                optimizer.zero_grad()
                loss_of(model, one).backward()
                if number % 10 == 0:  # with a batch in flight
                    now = 1 if number == 10 else number // 10
                    Migration(addresses[:now], addresses[: 1 + number // 10 % 3], pause_ratio=0.0).run()
                optimizer.step()
            assert all(map(np.array_equal, expected, values_of(model)))


def test_a_finished_trainer_keeps_no_row_from_eviction() -> None:
    """Another trainer, at a later step, may need the room."""
    table = Table("t", dim=2, capacity=8, num_buckets=1, initial=Zeros())
    features = Features({"id": table})
    with running_servers(1) as services:
        embeddings = Embeddings(features, num_threads=1, deployment=Deployment([services[0].address]), dense="async")
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = embeddings.optimizer(torch.optim.SGD([weight], lr=0.1))
        for one in embeddings.stream([batch(range(8))]):
            (one.embeddings.sum() * weight.sum()).backward()
            optimizer.step()
        assert embeddings.worker.servers is not None
        own = embeddings.worker.servers
        other = ServerGroup(own.job, own.addresses, trainer=1, attempt=own.attempt)
        sharded_worker(features, other, num_threads=1).lookup(batch(range(20, 28)), step=5)
        assert embeddings.tables["t"].read(np.arange(20, 28)).present.all()
        other.close()
        own.close()


# -- invalid input ----------------------------------------------------------------------------------------------------


def test_invalid_jobs_are_refused() -> None:
    with pytest.raises(ConfigError, match="dense='async' without servers"):
        Embeddings(tables(), dense="async")
    with pytest.raises(ConfigError, match="dense is 'late'"):
        Embeddings(tables(), dense="late")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"table 'dense.x': dense='async' reserves the names that begin with"):
        Embeddings({"id": Table("dense.x", dim=2)}, dense="async", deployment=NOWHERE)
    embeddings = Embeddings(tables(), dense="async", deployment=NOWHERE)
    with pytest.raises(StreamError, match=r"no tables yet: call optimizer\(...\) first"):
        embeddings.stream(batches(1))


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (lambda p: torch.optim.RMSprop(p), "tables have no RMSprop; expected one of torch's SGD, Adagrad"),
        (lambda p: torch.optim.AdamW(p), "AdamW has weight_decay=0.01, which tables do not support"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), "weight_decay=0.5"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "dampening=0.5"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), "maximize=True"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "lr_decay=0.1"),
    ],
)
def test_unsupported_optimizers_are_refused(kind: Kind, found: str) -> None:
    embeddings = Embeddings(tables(), dense="async", deployment=NOWHERE)
    with pytest.raises(ConfigError, match=f"dense='async': .*{found}"):
        embeddings.optimizer(kind(Net().parameters()))


def test_unsupported_parameters_are_refused() -> None:
    embeddings = Embeddings(tables(), dense="async", deployment=NOWHERE)
    with pytest.raises(ConfigError, match=r"parameter 0 is torch\.float64; expected torch\.float32"):
        embeddings.optimizer(torch.optim.SGD(Net().double().parameters(), lr=0.1))
    used = KINDS["Adam"](Net().parameters())
    for parameter in used.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    used.step()
    with pytest.raises(ConfigError, match="this Adam has already stepped; expected a new one"):
        embeddings.optimizer(used)


def test_changes_during_training_are_refused() -> None:
    with job_on_servers(kind=KINDS["Adam"]) as (embeddings, model, optimizer):
        with pytest.raises(ConfigError, match="was already called; use the optimizer that it returned"):
            embeddings.optimizer(torch.optim.SGD(Net().parameters(), lr=0.1))
        with pytest.raises(ConfigError, match="add it before"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        with embeddings.stream(batches(4)) as stream:
            loss_of(model, next(stream)).backward()
            optimizer.param_groups[0]["betas"] = (0.5, 0.9)
            with pytest.raises(ConfigError, match=r"param group 0 was .* and is now .*; expected only lr to change"):
                optimizer.step()
            optimizer.param_groups[0]["betas"] = (0.8, 0.99)
            optimizer.step()
            model.layers[0].bias.grad = torch.ones(8)
            next(stream)
            with pytest.raises(StreamError, match="gradients of dense parameters, but no batch"):
                optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.layers[0].bias.add_(1.0)
            further = next(stream)
            with pytest.raises(StreamError, match="parameter 1 was changed in this process, but the servers own it"):
                _ = further.embeddings
            with pytest.raises(StreamError, match="parameter 1 was changed in this process"):
                stream.close()


def test_reading_ahead_equals_the_plain_loop() -> None:
    """The first use of a batch fetches the dense parameters of its step, and reading `dense` counts as a use."""

    def run(*, ahead: bool) -> list[bytes]:
        with job_on_servers(kind=KINDS["Adam"]) as (embeddings, model, optimizer):
            stream = embeddings.stream(batches(6))
            for batch in list(stream) if ahead else stream:
                bottom = model.layers[0](torch.cat([batch.dense, batch.embeddings], 1))
                model.layers[2](model.layers[1](bottom)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            stream.close()
            assert not stream.dropped and embeddings.step == 6
            return bits(embeddings, model)

    assert run(ahead=True) == run(ahead=False)


def test_a_sparse_gradient_is_refused() -> None:
    model = torch.nn.Embedding(4, 3, sparse=True)
    with job_on_servers(model=model) as (embeddings, _, optimizer):
        for one in embeddings.stream(batches(1)):
            (one.embeddings.sum() + model(torch.tensor([1])).sum()).backward()
            with pytest.raises(ConfigError, match="parameter 0 has a sparse gradient; expected a dense one"):
                optimizer.step()
            optimizer.zero_grad()


def test_a_model_in_ddp_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(Net())
        refused = pytest.raises(ConfigError, match="the model is in a DistributedDataParallel")
        with job_on_servers(model=model) as (embeddings, _, _), refused:
            embeddings.stream(batches(1))
    finally:
        torch.distributed.destroy_process_group()
