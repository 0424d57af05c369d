"""A table that is looked up for training and gets no gradient is named in the log, once; one that trains is not.

A test whose run logs a warning and does not expect it fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable

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
    text = f"20 lookups for training brought no gradient, so these are not trained: {tables}. Usual causes are detach()"
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
