"""A loop that trains less than it seems to logs a warning, once; one that trains logs none.

A test whose run logs a warning and does not expect it fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import satrap
from logged import logged
from satrap.nn import Embedding
from satrap.train.batch import Batch

Use = Callable[[Batch], torch.Tensor]
USER, ITEM = "table 'user' (features 'user', 'last')", "table 'item' (features 'item', 'seen')"


def train_with(use: Use, *, staleness: int = 0, passes: int = 1, frozen: bool = False) -> None:
    """Train 30 steps in each pass on what `use` returns for a batch, [batch, 2]."""
    user, item = satrap.Table("user", 2, frozen=frozen), satrap.Table("item", 2)
    features: dict[str, satrap.Feature | satrap.Table] = {
        "user": user,
        "item": item,
        "seen": item.bag("mean"),
        "last": user.sequence(2),
    }
    numbers = np.arange(80) % 7
    lists = [[int(number)] for number in numbers]
    columns = {"user": numbers, "item": numbers, "seen": lists, "last": lists}
    data = satrap.Frame({**columns, "label": numbers % 2 + 0.0}, label="label", batch_size=2)
    with satrap.Embeddings(features, staleness=staleness) as embeddings:
        model = torch.nn.Linear(2, 1)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(passes):
            for batch in embeddings.stream(data):
                optimizer.zero_grad()
                (model(use(batch))[:, 0] - batch.label).square().mean().backward()
                optimizer.step()


def in_no_grad(batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        rows: torch.Tensor = batch["item"] + batch["user"]
        return rows


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("use", "tables"),
    [
        (lambda batch: (batch["item"] + batch["user"]).detach(), f"{USER}, {ITEM}"),
        (in_no_grad, f"{USER}, {ITEM}"),
        (lambda batch: batch["item"] + batch["user"].data, USER),
        (lambda batch: batch["last"].values.sum(1), ITEM),
    ],
    ids=["detach", "no_grad", "data", "ignored"],
)
def test_tables_without_a_gradient_are_named_once(use: Use, tables: str, passes: int, staleness: int) -> None:
    text = f"20 lookups for training brought no gradient, or only zeros, so these are not trained: {tables}. Usual"
    with logged("satrap.train", re.escape(text)) as records:
        train_with(use, staleness=staleness, passes=passes)
    assert len(records) == 1


def test_a_table_is_trained_if_any_of_its_features_is_and_a_frozen_one_is_not_to_be() -> None:
    train_with(lambda batch: batch["seen"] + batch["user"])
    train_with(lambda batch: batch["item"] + batch["last"].values.sum(1))
    train_with(lambda batch: batch["item"] + batch["user"].detach(), frozen=True)


def test_zeros_at_the_start_unused_batches_and_evaluation_are_no_reason() -> None:
    factors = iter([0.0] * 29 + [1.0] * 11)
    train_with(lambda batch: batch["item"] + batch["user"] * next(factors))
    data = satrap.Frame({"item": np.arange(60)}, batch_size=2)
    with satrap.Embeddings({"item": satrap.Table("item", 2)}) as embeddings:
        embeddings.optimizer()
        for _ in embeddings.stream(data):
            pass
        embeddings.eval()
        for batch in embeddings.stream(data):
            _ = batch.embeddings


@pytest.mark.parametrize("staleness", [0, 4])
def test_a_loop_that_uses_no_rows_is_warned_of_once(staleness: int) -> None:
    text = r"no loss has used the rows of the stream's last 20 batches .*, so no table is trained"
    with logged("satrap.train", text) as records:
        train_with(lambda batch: torch.ones(len(batch), 2), staleness=staleness, passes=2)
    assert len(records) == 1


@pytest.mark.parametrize("is_detached", [True, False])
@pytest.mark.parametrize("prefetches", [True, False])
def test_rows_of_modules(*, is_detached: bool, prefetches: bool) -> None:
    def run() -> None:
        with satrap.Embeddings({"item": satrap.Table("item", 2), "user": satrap.Table("user", 2)}) as embeddings:
            item, user = Embedding(embeddings, "item"), Embedding(embeddings, "user")
            model = torch.nn.Linear(2, 1)
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            loader = [torch.arange(3)] * 50
            for ids in embeddings.prefetch(loader, lambda ids: {"item": ids, "user": ids}) if prefetches else loader:
                rows = user(ids)
                model(item(ids) + (rows.detach() if is_detached else rows)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    if not is_detached:
        run()
        return
    with logged("satrap.train", r"not trained: table 'user' \(feature 'user'\)\. ") as records:
        run()
    assert len(records) == 1


# -- gradients that no step takes --------------------------------------------------------------------------------------

Loop = Callable[[torch.optim.Optimizer, torch.optim.Optimizer, Callable[[], None], int], None]
"""One step of a loop: of the optimizer of both halves, the dense one, backward(), and the number of the step."""


def cleared(both: torch.optim.Optimizer, dense: torch.optim.Optimizer, backward: Callable[[], None], _: int) -> None:
    backward()
    both.zero_grad()
    both.step()


def dense_only(both: torch.optim.Optimizer, dense: torch.optim.Optimizer, backward: Callable[[], None], _: int) -> None:
    both.zero_grad()
    backward()
    dense.step()


def without_both(
    both: torch.optim.Optimizer, dense: torch.optim.Optimizer, backward: Callable[[], None], _: int
) -> None:
    dense.zero_grad()
    backward()
    dense.step()


def skips(*numbers: int) -> Loop:
    """Return a loop that skips these steps, as one whose loss is not finite."""

    def loop(
        both: torch.optim.Optimizer, dense: torch.optim.Optimizer, backward: Callable[[], None], number: int
    ) -> None:
        both.zero_grad()
        backward()
        if number not in numbers:
            both.step()

    return loop


def run_stream(loop: Loop, steps: int, accumulate: int = 1) -> None:
    numbers = np.arange(2 * (steps + 1) * accumulate)  # the loop leaves the stream before its end
    data = satrap.Frame({"user": numbers % 7, "label": numbers % 2 + 0.0}, label="label", batch_size=2)
    with satrap.Embeddings({"user": satrap.Table("user", 2)}) as embeddings:
        model = torch.nn.Linear(2, 1)
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        both = embeddings.optimizer(dense)
        waiting: list[Batch] = []

        def backward() -> None:
            for batch in waiting:
                model(batch.embeddings).square().mean().backward()
            waiting.clear()

        for number, batch in enumerate(embeddings.stream(data, accumulate=accumulate)):
            waiting.append(batch)
            if batch.completes_step:
                loop(both, dense, backward, number // accumulate)
            if number + 1 == steps * accumulate:
                break


def run_modules(loop: Loop, steps: int, prefetches: bool = False) -> None:
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Embedding(7, 2), torch.nn.Linear(2, 1))
    with satrap.convert(model, satrap.Adagrad(lr=0.1)) as embeddings:
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        both = embeddings.optimizer(dense)
        loader = [torch.arange(3)] * (steps + 1)
        for number, ids in enumerate(embeddings.prefetch(loader, lambda ids: {"0": ids}) if prefetches else loader):
            if number == steps:
                break
            loop(both, dense, partial(lambda ids: model(ids).sum().backward(), ids), number)


RUNS = {
    "stream": run_stream,
    "accumulation": lambda loop, steps: run_stream(loop, steps, 3),
    "modules": run_modules,
    "prefetch": lambda loop, steps: run_modules(loop, steps, prefetches=True),
}
UNTAKEN = (
    r"no optimizer\.step\(\) has taken the gradients of the last 20 steps"
    r".*zero_grad\(\) between.*optimizer\.dense\.step"
)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("loop", [cleared, dense_only], ids=["cleared", "dense_only"])
def test_gradients_that_no_step_takes_are_warned_of_once(run: Callable[[Loop, int], None], loop: Loop) -> None:
    run(loop, 19)
    with logged("satrap.train", UNTAKEN) as records:
        run(loop, 70)
    assert len(records) == 1


def test_modules_whose_rows_never_step_are_warned_of_once() -> None:
    """Where the optimizer of both halves is never called: gradients wait, and are not dropped."""
    with logged("satrap.train", UNTAKEN) as records:
        run_modules(without_both, 70)
    assert len(records) == 1


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_steps_skipped_now_and_then_are_no_mistake(run: Callable[[Loop, int], None]) -> None:
    run(skips(*range(3, 22), *range(23, 42), *range(50, 90, 2)), 90)


def test_a_dense_optimizer_that_trains_another_model_first_is_no_mistake() -> None:
    data = satrap.Frame({"user": np.arange(60) % 7}, batch_size=2)
    with satrap.Embeddings({"user": satrap.Table("user", 2)}) as embeddings:
        model = torch.nn.Linear(2, 1)
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        both = embeddings.optimizer(dense)
        for _ in range(50):
            model(torch.ones(3, 2)).sum().backward()
            dense.step()
        for batch in embeddings.stream(data):
            both.zero_grad()
            model(batch.embeddings).sum().backward()
            both.step()


# -- a stream without samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"before": ("ts", -1)}, r" with before=\('ts', -1\); expected at least one: train on more or other data"),
        ({"since": ("ts", 99), "share": (0.0, 0.5)}, r" with share=\(0\.0, 0\.5\) and since=\('ts', 99\); expected"),
        ({"batch_size": 50, "drop_last": True}, "; expected"),
    ],
)
def test_a_training_stream_without_samples_says_what_leaves_them_out(options: dict[str, Any], why: str) -> None:
    numbers = np.arange(30)
    data = satrap.Frame({"user": numbers % 7, "ts": numbers}, batch_size=10).replace(**options)
    is_short = "drop_last" in options
    short = r"|30 samples of the source were not trained on: 30 in short last batches"
    with satrap.Embeddings({"user": satrap.Table("user", 2)}) as embeddings:
        embeddings.optimizer()
        text = f"nothing was trained on: there are no samples{why}"
        with logged("satrap.train", text + short * is_short) as records:
            assert not list(embeddings.stream(data))
        assert len(records) == 1 + is_short
        embeddings.eval()
        assert not list(embeddings.stream(data)), "an evaluation warns of its metrics"


def test_a_stream_that_is_left_or_resumed_at_its_end_is_not_without_samples(tmp_path: Path) -> None:
    data = satrap.Frame({"user": np.arange(30) % 7}, batch_size=10)
    for is_first in (True, False):
        with satrap.Embeddings({"user": satrap.Table("user", 2)}) as embeddings:
            model = torch.nn.Linear(2, 1)
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            embeddings.stream(data).close()
            run = satrap.Checkpoint(tmp_path, model, optimizer, embeddings, data)
            assert run.resume() != is_first
            steps = 0
            for batch in embeddings.stream(data):
                optimizer.zero_grad()
                model(batch.embeddings).sum().backward()
                optimizer.step()
                steps += 1
            assert steps == 3 * is_first
            if is_first:
                run.save()
