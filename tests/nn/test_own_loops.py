"""Progress, evaluate and Validation where modules look rows up: around a loader of a user, a source read without a
stream, and `prefetch`. Their numbers are those of the same model through a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from example_reports import ListSink
from loop import take_step
from module_jobs import DIM, embeddings_of, item, tables
from satrap import ConfigError, Embeddings, Frame, InputError, IterableSource, Progress, Validation, evaluate
from satrap.nn import Embedding

NAMES = ("user", "item")
KINDS = ("counts", "inputs", "prefetched counts", "prefetched inputs")


def drawn(num: int, seed: int, epochs: int = 1) -> Frame:
    rng = np.random.default_rng(seed)
    columns = {name: rng.integers(0, 40, num) for name in NAMES}
    return Frame(columns | {"click": rng.integers(0, 2, num)}, label="click", batch_size=16, epochs=epochs)


DATA, VALID = drawn(100, seed=0, epochs=2), drawn(90, seed=1)


class Head(torch.nn.Module):
    """Scores rows of users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2 * DIM, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        logits: Tensor = self.layer(torch.cat([user, item], 1)).squeeze(1)
        return logits


class WithModules(torch.nn.Module):
    """The same, of their ids."""

    def __init__(self, embeddings: Embeddings, head: Head) -> None:
        super().__init__()
        self.user, self.item = (Embedding(embeddings, name) for name in NAMES)
        self.head = head

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        logits: Tensor = self.head(self.user(user), self.item(item))
        return logits


class Loop:
    """One way in which the batches of a source reach a model."""

    def __init__(self, kind: str, embeddings: Embeddings) -> None:
        torch.manual_seed(0)
        self.kind, self.embeddings, head = kind, embeddings, Head()
        self.model = head if kind == "stream" else WithModules(embeddings, head)
        self.optimizer = embeddings.optimizer(torch.optim.SGD(head.parameters(), lr=0.1))

    def read(self, data: Frame) -> Any:
        """Return what an evaluation reads, from its start."""
        if self.kind == "stream":
            return data
        if self.kind.endswith("inputs"):
            return lambda: data.batches(NAMES)
        samples = [torch.from_numpy(np.asarray(data.data[name])) for name in (*NAMES, "click")]
        return DataLoader(TensorDataset(*samples), batch_size=16)

    def batches(self, data: Frame) -> Iterator[Any]:
        if self.kind == "stream":
            return self.embeddings.stream(data)
        read = self.read(data)
        loader = data.batches(NAMES) if callable(read) else [batch for _ in range(data.epochs or 0) for batch in read]
        if not self.kind.startswith("prefetched"):
            return iter(loader)
        return iter(self.embeddings.prefetch(loader, lambda batch: dict(zip(NAMES, self.ids(batch), strict=True))))

    def ids(self, batch: Any) -> list[Tensor]:
        if not self.kind.endswith("inputs"):
            return list(batch[:2])
        return [torch.from_numpy(batch.bags(name)[0].view("int64")) for name in NAMES]

    def score(self, batch: Any) -> Tensor:
        rows = [batch[name] for name in NAMES] if self.kind == "stream" else self.ids(batch)
        logits: Tensor = self.model(*rows)
        return logits

    def label(self, batch: Any) -> Any:
        return batch[2] if self.kind.endswith("counts") else torch.as_tensor(batch.label)

    @property
    def evaluated(self) -> dict[str, Any]:
        """The options of an evaluation."""
        options: dict[str, Any] = {"score": self.score, "group": "user"}
        if self.kind.endswith("counts"):
            options |= {"label": self.label, "group": lambda batch: batch[0]}
        return options


def progress_of(kind: str, staleness: int, folder: Path) -> list[Any]:
    """Train, and return the reports, the steps at which an epoch began, the evaluations and a last one."""
    sink = ListSink()
    with embeddings_of(*tables(), staleness=staleness, deterministic=True) as embeddings:
        loop = Loop(kind, embeddings)
        validation = Validation(loop.model, embeddings, loop.read(VALID), metric="ndcg@3", **loop.evaluated)
        evaluations = []
        with Progress(embeddings, [sink], every_seconds=1e-9, record=folder / kind) as progress:
            for batch in loop.batches(DATA):
                scores, labels = loop.score(batch), loop.label(batch)
                loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels.float())
                take_step(loss, loop.optimizer)
                if kind.endswith("counts"):
                    progress.step(len(labels), loss=loss, scores=scores, labels=labels)
                else:
                    progress.step(batch, loss=loss, scores=scores)
                validation.step(every_steps=3, progress=progress)
                evaluations.append((validation.best_step, validation.metrics))
        assert loop.model.training
        last = loop.read(VALID)
        last = embeddings.stream(VALID, train=False) if kind == "stream" else last() if callable(last) else last
        last = evaluate(loop.model, last, **loop.evaluated).values()
    lines = [json.loads(text) for text in (folder / kind / "records/trainer-0.jsonl").read_text().split("\n") if text]
    epochs = [step for line in lines for step in line.get("epochs") or []]
    names = ["step", "samples", "steps", "loss", "auc", "normalised_entropy", "window", "learning_rates"]
    names += ["rows"] if staleness == 0 else []
    reports = [[getattr(report, name) for name in (*names, "validation", "is_best")] for report in sink.reports]
    return [reports, evaluations, last, [] if kind.endswith("counts") else epochs]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    known: dict[int, list[Any]] = {}

    def get(staleness: int) -> list[Any]:
        if staleness not in known:
            known[staleness] = progress_of("stream", staleness, tmp_path_factory.mktemp("stream"))
        return known[staleness]

    return get


@pytest.mark.parametrize(
    ("kind", "staleness"), [*((kind, 0) for kind in KINDS), *((kind, 2) for kind in KINDS if "prefetched" in kind)]
)
def test_the_numbers_are_those_of_a_stream(
    kind: str, staleness: int, streamed: Callable[[int], list[Any]], tmp_path: Path
) -> None:
    """But for the number of rows: those of later batches are inserted ahead."""
    reports, evaluations, last, epochs = progress_of(kind, staleness, tmp_path)
    expected = streamed(staleness)
    assert len(reports) == 14 + 4 and reports == expected[0]
    assert evaluations == expected[1] and last == expected[2]
    assert kind.endswith("counts") or epochs == expected[3] == [8]


def test_what_prefetches_is_evaluated_without_training() -> None:
    """The loader is read, so no step is taken and no row inserted."""
    with embeddings_of(*tables()) as embeddings:
        loop = Loop("prefetched counts", embeddings)
        loader = loop.read(VALID)
        batches = embeddings.prefetch(loader, lambda batch: {"user": batch[0]})
        result = evaluate(loop.model, batches, score=loop.score, label=loop.label)
        assert result.values() == evaluate(loop.model, loader, score=loop.score, label=loop.label).values()
        assert embeddings.step == 0 and not any(map(len, embeddings.tables.values()))


def test_a_progress_without_embeddings_counts_the_steps() -> None:
    sink = ListSink()
    with Progress(None, [sink], every_seconds=1e-9) as progress:
        for num_samples in (3, np.int64(4), 0):
            progress.step(num_samples, loss=1.0)  # type: ignore[arg-type]
    assert [(report.step, report.samples) for report in sink.reports] == [(1, 3), (2, 7), (3, 7)]


def test_what_is_missing_is_named() -> None:
    with embeddings_of(*tables()) as embeddings, Progress(embeddings, []) as progress:
        for wrong in (True, -1, 1.5, (torch.zeros(2), torch.zeros(2)), torch.zeros(2)):
            with pytest.raises(InputError, match=r"batch is a \w+; .* its number of samples, as in step\(len\(label\)"):
                progress.step(wrong)  # type: ignore[arg-type]
        inputs = next(iter(DATA.replace(label=None).batches(NAMES)))
        for unlabelled in (2, inputs):
            with pytest.raises(InputError, match=r"scores have no labels beside them; expected labels=\.\.\."):
                progress.step(unlabelled, scores=torch.zeros(2))
        loop, pairs = Loop("counts", embeddings), [(torch.zeros(2), torch.zeros(2))]
        wrong_calls: list[tuple[Any, dict[str, Any], str]] = [
            (pairs, {}, "no score and no label"),
            (pairs, {"score": loop.score}, "no label"),
            ([inputs], {"score": loop.score}, "no label"),
            (DATA.batches(NAMES), {}, "no score"),
        ]
        for batches, options, what in wrong_calls:
            with pytest.raises(InputError, match=rf"evaluate: a batch is .*, and there is {what}; expected batches of"):
                evaluate(loop.model, batches, **options)
        with pytest.raises(InputError, match=r"group is 'user' and a batch is a list.* a function of the batch"):
            evaluate(loop.model, loop.read(VALID), score=loop.score, label=loop.label, group="user")
        with pytest.raises(ConfigError, match=r"Validation: data is a Batches, which can be read once; .*lambda"):
            Validation(loop.model, embeddings, DATA.batches(NAMES), score=loop.score)


def test_a_source_is_streamed_beside_modules() -> None:
    """Any iterable is, once it is declared as one."""
    with embeddings_of(item()) as embeddings:
        clicked, optimizer = Embedding(embeddings, "item"), embeddings.optimizer()
        data = [{"item": np.arange(8), "click": np.arange(8) % 2}] * 2
        for batch in embeddings.stream(data):
            take_step((batch["item"] * clicked(torch.arange(8))).mean(), optimizer)
        options: dict[str, Any] = {"score": lambda batch: (batch["item"] * clicked(batch.ids("item"))).sum(1)}
        validation = Validation(clicked, embeddings, IterableSource(data, label="click"), **options)
        validation.step()
        rows = torch.from_numpy(embeddings.tables["item"].lookup(np.arange(8), train=False))
        result = evaluate(clicked, [rows], score=lambda rows: (rows * rows).sum(1), label=lambda _: torch.arange(8) % 2)
        assert validation.metrics["auc"] == result.auc()
        with pytest.raises(InputError, match="a batch is a dict, and there is no label; expected"):
            Validation(clicked, embeddings, data, **options).step()
