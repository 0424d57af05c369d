"""Validation during training: the best is the best of what was evaluated, training is not changed by it, and several
trainers agree."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from checkpoint_job import Job, Source
from contents import bits
from example_reports import Clock, ListSink
from loop import batches, job, loss_of, train_step
from satrap import (
    Checkpoint,
    CheckpointError,
    ConfigError,
    Embeddings,
    Frame,
    JsonLines,
    Progress,
    Reader,
    Table,
    Validation,
    evaluate,
)
from trainers import Trainers

METRICS = ("auc", "log_loss", "normalised_entropy")
VALID = batches(6, seed=99)
values = st.lists(st.one_of(st.just(math.nan), st.sampled_from([0.1, 0.2, 0.3]), st.floats(0, 1)), max_size=20)


class Evaluated(Validation):
    """A Validation with given results, at steps that the test sets."""

    def __init__(self, results: list[float], **options: Any) -> None:
        embeddings, model, _ = job()
        super().__init__(model, embeddings, None, **options)
        self.results, self._embeddings = iter(results), Steps()  # type: ignore[assignment]

    def _evaluate(self) -> dict[str, float]:
        return {self._metric: next(self.results)}


class Steps:
    """Embeddings of which only the step is known."""

    step = 0


class Saves:
    """A checkpoint that counts."""

    num_saves = 0

    def save(self, *, best: bool) -> bool:
        assert best
        self.num_saves += 1
        return True


# -- what is the best, and when it is over -----------------------------------------------------------------------------


@given(values, st.sampled_from(METRICS), st.integers(1, 4), st.integers(0, 20))
def test_the_best_and_the_end_are_those_of_the_list(
    results: list[float], metric: str, patience: int, resumed_after: int
) -> None:
    """Also where a resumed run continues."""
    sign = 1 if metric == "auc" else -1
    validation, saves, num_saves = Evaluated(results, metric=metric, patience=patience), Saves(), 0
    for number in range(1, len(results) + 1):
        if number == resumed_after:
            state = json.loads(json.dumps(validation.state_dict()))
            validation = Evaluated(results[number - 1 :], metric=metric, patience=patience)
            validation.load_state_dict(state)
        validation._embeddings.step = 10 * number  # type: ignore[misc]
        is_best = validation.step(checkpoint=saves)
        before = [sign * value for value in results[: number - 1] if not math.isnan(value)]
        assert is_best == (sign * results[number - 1] > max(before, default=-math.inf))
        num_saves += is_best
        known = [sign * value for value in results[:number] if not math.isnan(value)]
        if not known:
            assert (validation.best, validation.best_step, validation.num_worse) == (None, 0, number)
        else:
            first = next(i for i, value in enumerate(results, 1) if sign * value == max(known))
            found = validation.best, validation.best_step, validation.num_worse
            assert found == (sign * max(known), 10 * first, number - first)
        assert validation.is_over == (validation.num_worse >= patience) and saves.num_saves == num_saves
    assert not Evaluated([]).is_over


def test_an_interval_evaluates_each_multiple_once() -> None:
    validation, evaluated = Evaluated([0.5] * 100), []
    for step in [0, 1, 2, 3, 3, 3, 4, 5, 6, 6, 7]:  # a step of several batches is seen several times
        validation._embeddings.step = step  # type: ignore[misc]
        before = validation.num_worse
        evaluated += [step] if validation.step(every_steps=3) or validation.num_worse > before else []
    assert evaluated == [3, 6]
    validation.step()  # now, at whatever step
    assert validation.num_worse == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "rmse"}, "the metric is 'rmse'; expected one of an Evaluation: the nearest known one is 'mse'"),
        ({"metric": "AUC"}, "the metric is 'AUC'; expected one of an Evaluation: the nearest known one is 'auc'"),
        ({"metric": "calibration"}, "Validation: whether a high 'calibration' is good is not known; expected mode="),
        ({"metric": "mine", "metrics": {"mine": len}, "mode": "up"}, "mode is 'up'.*; expected one of 'max', 'min'"),
        ({"metric": "ndcg@5"}, "Validation: metric is 'ndcg@5' without a group; expected group='user_id'"),
        ({"patience": 0}, "Validation: patience is 0; expected an integer from 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    embeddings, model, _ = job()
    with pytest.raises(ConfigError, match=message):
        Validation(model, embeddings, VALID, **options)
    with pytest.raises(ConfigError, match="Validation: every_steps is 0; expected an integer from 1"):
        Validation(model, embeddings, VALID).step(every_steps=0)


def test_arguments_in_another_place_are_refused_before_an_evaluation() -> None:
    embeddings, model, _ = job()
    with pytest.raises(ConfigError, match=r"embeddings is a Net; expected .*Validation\(model, embeddings, data\)"):
        Validation(embeddings, model, VALID)  # type: ignore[arg-type]
    embeddings.eval()
    with (
        embeddings.stream(VALID) as stream,
        pytest.raises(ConfigError, match=r"data is a stream, .*; expected the source"),
    ):
        Validation(model, embeddings, stream)
    validation = Validation(model, embeddings, VALID)
    wrong: dict[str, Any] = {"checkpoint": "c1", "progress": print}
    for name, value in wrong.items():
        with pytest.raises(
            ConfigError, match=rf"Validation\.step: {name} is an? .*; expected a satrap\.{name.title()}"
        ):
            validation.step(every_steps=10**6, **{name: value})
    assert not validation.metrics


@pytest.mark.parametrize("epochs", [None, 1, 3])
def test_an_evaluation_is_one_pass_whatever_the_epochs_of_its_source(epochs: int | None) -> None:
    ids = np.arange(64)
    data = Frame({"item": ids, "label": ids % 2, "x": np.zeros(64)}, label="label", dense="x", epochs=epochs)
    with Embeddings({"item": Table("item", dim=2)}) as embeddings:
        validation = Validation(
            torch.nn.Identity(),
            embeddings,
            data,
            score=lambda batch: batch.dense[:, 0],
            metrics={"samples": lambda labels, _: float(len(labels))},
        )
        embeddings.tables["item"].write([1], np.ones((1, 2), np.float32))
        validation.step()
    assert validation.metrics["samples"] == 64 and data.epochs == epochs


def test_several_asynchronous_trainers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, model, _ = job()
    embeddings.dense, embeddings.trainers.world_size = "async", 2
    with pytest.raises(ConfigError, match=r"Validation: trainers with dense='async' .*expected a single trainer"):
        Validation(model, embeddings, VALID)


# -- in a training loop ------------------------------------------------------------------------------------------------


class WithDropout(torch.nn.Module):
    """A model that computes something else in training, and a part of which never trains."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.dropout, self.frozen = model, torch.nn.Dropout(0.5), torch.nn.Dropout(0.9)
        self.frozen.eval()

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> Any:
        return self.model(dense, self.frozen(self.dropout(embeddings)))


def train_and_call(
    steps: int, during: Callable[[Any, torch.nn.Module], None], staleness: int = 0, overlap: bool = False
) -> list[bytes]:
    embeddings, net, optimizer = job(staleness, deterministic=True)
    model = WithDropout(net)
    with embeddings.stream(batches(steps), overlap=overlap) as stream:
        for batch in stream:
            train_step(model, optimizer, batch)
            during(embeddings, model)
            assert [each.training for each in (model, net, model.dropout, model.frozen)] == [True, True, True, False]
    embeddings.drain()
    return bits(embeddings, net)


@pytest.mark.parametrize(("staleness", "overlap"), [(0, False), (0, True), (2, True)])
def test_training_is_not_changed_by_it(staleness: int, overlap: bool) -> None:
    found: list[tuple[int, float]] = []
    validations: list[Validation] = []

    def validate(embeddings: Any, model: torch.nn.Module) -> None:
        if not validations:
            validations.append(Validation(model, embeddings, VALID))
        validations[0].step(every_steps=3)
        if embeddings.step % 3 == 0:
            found.append((embeddings.step, validations[0].metrics["auc"]))

    undisturbed = train_and_call(9, lambda *_: None, staleness, overlap)
    assert train_and_call(9, validate, staleness, overlap) == undisturbed
    assert [step for step, _ in found] == [3, 6, 9]
    expected: list[float] = []

    def evaluate_alone(embeddings: Any, model: torch.nn.Module) -> None:
        if embeddings.step == 6:
            embeddings.drain()
            plain = copy.deepcopy(model).eval()
            expected.append(evaluate(plain, embeddings.stream(VALID, train=False)).auc())

    train_and_call(6, evaluate_alone, staleness, overlap)
    assert found[1][1] == expected[0], "of the rows after exactly six steps"


def test_submitted_updates_are_applied_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, net, optimizer = job(staleness=2)
    update, release = embeddings.worker.update, threading.Event()

    def update_later(*arguments: Any, **options: Any) -> None:
        assert release.wait(300)
        update(*arguments, **options)

    with embeddings.stream(batches(3), overlap=True) as stream:
        for batch in stream:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            if batch.step == 2:
                monkeypatch.setattr(embeddings.worker, "update", update_later)
            optimizer.step()
            if batch.step == 2:
                break
        threading.Timer(0.5, release.set).start()
        validation = Validation(net, embeddings, VALID)
        validation.step()
        assert validation.metrics["auc"] == evaluate(net, embeddings.stream(VALID, train=False)).auc()
        assert release.is_set()


def test_an_error_leaves_the_model_training() -> None:
    embeddings, net, _ = job()
    with pytest.raises(ZeroDivisionError):
        Validation(net, embeddings, VALID, score=lambda _: 1 // 0).step()  # type: ignore[arg-type,return-value]
    assert net.training


def test_a_metric_of_ones_own_decides() -> None:
    embeddings, net, optimizer = job()
    options: dict[str, Any] = {"group": lambda batch: batch.inputs.values[: len(batch)] % 3, "mode": "min"}
    options["metrics"] = {"bias": lambda labels, predictions: abs((predictions - labels).mean())}
    ours, lists = (Validation(net, embeddings, VALID, metric=metric, **options) for metric in ("bias", "ndcg@3"))
    with embeddings.stream(batches(4)) as stream:
        for batch in stream:
            train_step(net, optimizer, batch)
            ours.step(), lists.step()
    found = evaluate(net, embeddings.stream(VALID, train=False), group=options["group"], metrics=options["metrics"])
    assert ours.metrics == found.values() and lists.metrics == {**found.values(), "ndcg@3": found.ndcg(3)}
    assert ours.best is not None and ours.best <= ours.metrics["bias"]


# -- with progress and checkpoints -------------------------------------------------------------------------------------


def test_progress_reports_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that it takes is not training's."""
    clock, kept = Clock(), ListSink()
    monkeypatch.setattr("time.monotonic", clock)
    validation = Evaluated([0.75, 0.5])
    evaluate_ = validation._evaluate

    def slowly() -> dict[str, float]:
        clock.now += 100.0
        return evaluate_()

    monkeypatch.setattr(validation, "_evaluate", slowly)
    with Progress(None, [kept, JsonLines(tmp_path / "log")], clock=clock, every_seconds=1e6) as progress:
        for step in (1, 2):
            clock.now += 2.0
            progress.step(type("B", (), {"step": step, "__len__": lambda _: 10})())
            validation._embeddings.step = step  # type: ignore[misc]
            validation.step(progress=progress)
    assert [report.samples_per_second for report in kept.reports] == [5.0, 5.0]
    assert [(report.step, report.validation, report.is_best) for report in kept.reports] == [
        (1, {"auc": 0.75}, True),
        (2, {"auc": 0.5}, False),
    ]
    assert {report.best_by for report in kept.reports} == {"auc"}
    lines = [json.loads(text) for text in (tmp_path / "log").read_text().splitlines()]
    assert [(each["validation/auc"], each["validation/is_best"]) for each in lines] == [(0.75, 1), (0.5, 0)]


class Validated(Job):
    """A job with a validation every second step, whose results the test gives by step."""

    def __init__(self, run: str, num_steps: int, results: dict[int, float], patience: int | None = None) -> None:
        super().__init__(run, num_steps)

        class Given(Validation):
            def _evaluate(self) -> dict[str, float]:
                return super()._evaluate() | {"auc": results[self._embeddings.step]}

        self.validation = Given(self.model, self.embeddings, Source(3), patience=patience, score=self.logits)
        extra_state = {"scheduler": self.scheduler, "validation": self.validation}
        self.run = Checkpoint(
            run, self.model, self.optimizer, self.embeddings, self.source, keep=1, full_every=2, extra_state=extra_state
        )

    def train(self, every_steps: int = 1, *, wait: bool = True) -> None:
        with self.embeddings.stream(self.source) as stream:
            for batch in stream:
                self.step(batch)
                self.validation.step(every_steps=2, checkpoint=self.run)
                if self.validation.is_over:
                    break
                self.run.save(every_steps=every_steps)


def saved(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.name[0].isdigit())


def test_the_best_checkpoint_is_kept_until_there_is_a_better_one(tmp_path: Path) -> None:
    results = {2: 0.5, 4: 0.8, 6: 0.6, 8: 0.9, 10: 0.1, 12: 0.2}
    steps = {2: 2, 3: 2, 5: 4, 7: 4, 9: 8, 12: 8}  # which is the best after these steps
    for last, best in steps.items():
        job = Validated(str(tmp_path), last, results)
        assert job.run.resume() == (last > 2)
        job.train()
        assert job.run.best is not None and job.run.best.endswith(f"-step-{best}"), (last, job.run.best)
        assert job.run.best in saved(tmp_path) and saved(tmp_path)[-1].endswith(f"-step-{last}")
        assert (job.validation.best, job.validation.best_step) == (results[best], best)
    with Reader(tmp_path) as reader:
        assert reader.step == 12


def test_a_resumed_run_ends_like_one_that_was_never_interrupted(tmp_path: Path) -> None:
    results = {2: 0.5, 4: 0.8, 6: 0.6, 8: 0.7, 10: 0.75, 12: 0.9}
    whole = Validated(str(tmp_path / "whole"), 12, results, patience=3)
    whole.train()
    assert whole.embeddings.step == 10 and whole.validation.is_over
    for steps in (3, 7, 12):
        part = Validated(str(tmp_path / "parts"), steps, results, patience=3)
        part.run.resume()
        part.train()
    assert part.embeddings.step == 10
    assert part.validation.state_dict() == whole.validation.state_dict()
    assert part.run.best is not None and part.run.best.endswith("-step-4")
    found = part.state()
    for name, value in whole.state().items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_best_checkpoint_of_another_run_is_not_mine(tmp_path: Path) -> None:
    job = Validated(str(tmp_path), 2, {2: 0.5})
    assert job.run.best is None
    job.train()
    with pytest.raises(CheckpointError, match="neither saved nor resumed"):
        Validated(str(tmp_path), 2, {2: 0.5}).train()


# -- several trainers --------------------------------------------------------------------------------------------------


@pytest.mark.draw(1)
@pytest.mark.parametrize("staleness", [0, 2])
def test_several_trainers_agree(trainers: Trainers, staleness: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batches": 24, "patience": 2, "checkpoint": str(tmp_path / "run")}
    one, other = trainers.run_on_servers(2, 2, tmp_path, staleness=staleness, overlap=bool(staleness), **options)
    assert one["validation"] == other["validation"] and len(one["seen"]) == len(other["seen"])
    assert one["metrics"] == other["metrics"] and set(METRICS) < set(one["metrics"])
    assert one["validation"]["best_step"] > 0
    assert one["best"] == other["best"] and one["best"].endswith(f"-step-{one['validation']['best_step']}")
