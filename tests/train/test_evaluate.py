"""Evaluation of a model: equals metrics of the plain numbers, handles short batches, and changes nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import satrap
from loop import batches, job, tables, train
from satrap.errors import InputError
from satrap.monitor import metrics


class Sum(torch.nn.Module):
    """A logit that is easy to compute by hand."""

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        return dense.sum(1) + embeddings.sum(1)


class SumInColumn(Sum):
    """The same as [batch, 1], which is what a linear layer returns."""

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        return super().forward(dense, embeddings)[:, None]


class Of(torch.nn.Module):
    """A model that takes a batch."""

    def forward(self, batch: satrap.Batch) -> torch.Tensor:
        return batch.embeddings.sum(1)


class Broken(torch.nn.Module):
    """Raises a TypeError that is not about its arguments."""

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        return dense + "a"  # type: ignore[operator]


DATA = [*batches(4, size=32), *batches(1, size=7)]


@pytest.mark.parametrize("overlap", [False, True])
def test_metrics_equal_those_of_plain_numbers(overlap: bool) -> None:
    ours, net, optimizer = job()
    train(ours, net, optimizer, DATA[:2])  # so that some ids have rows
    model = Sum()
    rows = {name: len(store) for name, store in ours.tables.items()}
    ours.eval()
    found = satrap.evaluate(model, ours.stream(DATA, overlap=overlap))
    with torch.no_grad():
        logits = np.concatenate([model(batch.dense, batch.embeddings).numpy() for batch in map(ours, DATA)])
    labels = np.concatenate([each.label for each in DATA if each.label is not None])
    assert found.auc() == metrics.auc(labels, logits)
    assert found.log_loss() == pytest.approx(metrics.log_loss(labels, logits), rel=1e-6)
    assert found.normalised_entropy() == pytest.approx(metrics.normalised_entropy(labels, logits), rel=1e-6)
    assert satrap.auc(model, ours.stream(DATA)) == found.auc()
    assert satrap.auc(SumInColumn(), ours.stream(DATA)) == found.auc()
    assert {name: len(store) for name, store in ours.tables.items()} == rows


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_between_steps_has_every_update(staleness: int) -> None:
    """The update of the last step is in progress in a thread when the evaluation starts."""
    table = satrap.Table("item", 2, optimizer=satrap.SGD(lr=1.0), initial=satrap.Zeros())
    ids = {"item": np.arange(4096)}
    with satrap.Embeddings({"item": table}, staleness=staleness) as embeddings:
        optimizer = embeddings.optimizer()
        for batch in embeddings.stream([ids] * 20, overlap=True):
            batch.embeddings.sum().backward()
            optimizer.step()
            with embeddings.stream([ids], train=False) as stream:
                rows = next(stream).embeddings
            assert rows.unique().tolist() == [-batch.step]


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_label_is_warned_of(label: float) -> None:
    ours, net, optimizer = job()
    train(ours, net, optimizer, DATA[:1])
    ours.eval()
    data = [replace(each, label=np.full(each.batch_size, label, np.float32)) for each in DATA]
    words = rf"auc is undefined \(nan\): all 135 labels are {label:.0f}; expected labels 0 and labels 1: evaluate on"
    found = satrap.evaluate(Sum(), ours.stream(data))
    with pytest.warns(UserWarning, match=words):
        assert np.isnan(found.auc())
    with pytest.warns(UserWarning, match=words.replace("auc", "normalised_entropy")):
        assert np.isnan(found.normalised_entropy())
    with pytest.warns(UserWarning, match=words), ours.stream(data) as stream:
        assert np.isnan(satrap.auc(Sum(), stream))
    assert found.log_loss() > 0  # which is defined


def test_a_training_stream_is_refused() -> None:
    with pytest.raises(InputError, match=r"call embeddings\.eval\(\) before"), job()[0].stream(DATA) as stream:
        satrap.evaluate(Sum(), stream)


def test_a_source_instead_of_a_stream_is_refused() -> None:
    source = satrap.Frame({"item": [1], "label": [0.0]}, label="label", batch_size=1)
    with pytest.raises(
        InputError, match=r"stream is a Frame; expected a stream .*embeddings\.stream\(data, train=False"
    ):
        satrap.evaluate(torch.nn.Identity(), source)  # type: ignore[arg-type]


def test_arrays_in_place_of_a_model_name_what_takes_them() -> None:
    for call in (satrap.auc, satrap.evaluate):
        with pytest.raises(InputError, match=r"model is a list; expected a model and .* satrap\.Evaluation\(\)\.add"):
            call([0.1, 0.2], [0, 1])  # type: ignore[arg-type, list-item]


def test_a_model_with_other_inputs_gets_a_note_about_score() -> None:
    ours, _, _ = job()
    ours.eval()
    with pytest.raises(TypeError, match="2 positional arguments but 3") as raised:
        satrap.evaluate(Of(), ours.stream(DATA))
    assert "give score=" in raised.value.__notes__[0]
    with pytest.raises(TypeError, match="unsupported") as raised:
        satrap.evaluate(Broken(), ours.stream(DATA))
    assert not hasattr(raised.value, "__notes__")


def test_what_is_no_score_or_label_of_each_sample_is_named() -> None:
    ours, net, optimizer = job()
    train(ours, net, optimizer, DATA[:2])
    ours.eval()
    towers = satrap.models.TwoTower(ours, query=["user", "history"], item=["item"], num_dense=2)
    with pytest.raises(
        InputError, match=r"TwoTower\(batch.dense, .*\) returned a tuple; expected a tensor.*give score="
    ):
        satrap.evaluate(towers, ours.stream(DATA))
    for name in ("score", "label"):
        options: dict[str, Any] = {name: lambda batch: batch.label.tolist()}
        with pytest.raises(InputError, match=f"evaluate: {name} returned a list; expected a tensor"):
            satrap.evaluate(Sum(), ours.stream(DATA), **options)


def test_a_batch_without_a_label_is_refused() -> None:
    unlabelled = [replace(each, label=None) for each in DATA]
    with pytest.raises(InputError, match="no label"), pytest.warns(UserWarning, match="no table has a row") as caught:
        satrap.evaluate(Sum(), satrap.Embeddings(tables()).eval().stream(unlabelled))
    assert caught[0].filename == __file__


def test_models_with_further_inputs_and_several_heads() -> None:
    ours = satrap.Embeddings(tables()).eval()
    with pytest.warns(UserWarning, match="no table has a row"):
        plain = satrap.evaluate(Sum(), ours.stream(DATA))
        found = satrap.evaluate(
            Sum(),
            ours.stream(DATA),
            score=lambda batch: batch.dense.sum(1) + sum(part.sum(1) for part in (batch[name] for name in batch)),
            label=lambda batch: torch.stack([batch.label, 1 - batch.label], 1)[:, 0],
        )
    assert found.auc() == pytest.approx(plain.auc(), abs=1e-6)
    assert repr(plain).startswith(f"Evaluation(135 samples, auc={plain.auc():.4f}, log_loss={plain.log_loss():.4f}, ")
    assert repr(metrics.Evaluation()) == "Evaluation(no samples)"


def scores_and_labels() -> tuple[satrap.Embeddings, np.ndarray, np.ndarray]:
    ours = satrap.Embeddings(tables()).eval()
    with torch.no_grad():
        logits = np.concatenate([Sum()(batch.dense, batch.embeddings).numpy() for batch in map(ours, DATA)])
    return ours, logits, np.concatenate([each.label for each in DATA if each.label is not None])


@pytest.mark.filterwarnings("ignore:.*no table has a row")
def test_lists_are_grouped_by_a_column_a_feature_or_a_function() -> None:
    ours, logits, labels = scores_and_labels()
    users = [np.arange(each.batch_size) % 5 for each in DATA]
    expected = metrics.Evaluation()
    expected.add(labels, logits, np.concatenate(users))
    data = [replace(each, extra={"user": user}) for each, user in zip(DATA, users, strict=True)]
    for group in ("user", lambda batch: batch.inputs.extra["user"]):
        found = satrap.evaluate(Sum(), ours.stream(data), group=group)
        assert found.values() == pytest.approx(expected.values()) and found["ndcg@2"] == expected.ndcg(2)
    single = satrap.Embeddings({"first": satrap.Table("first", dim=4), "user": satrap.Table("user", dim=4)}).eval()
    ids = [{"first": np.arange(len(user)), "user": user} for user in users]
    inputs = [
        replace(single(each).inputs, label=part.label, dense=part.dense) for each, part in zip(ids, DATA, strict=True)
    ]
    found = satrap.evaluate(Sum(), single.stream(inputs), group="user", score=lambda batch: batch.dense.sum(1))
    expected = metrics.Evaluation()
    expected.add(
        labels, np.concatenate([each.dense.sum(1) for each in DATA if each.dense is not None]), np.concatenate(users)
    )
    assert found.gauc() == pytest.approx(expected.gauc(), abs=1e-6) and found.mrr() == pytest.approx(expected.mrr())
    with pytest.raises(InputError, match=r"group is 'usr'; expected an extra column .*extra=\['usr'\].*'user'"):
        satrap.evaluate(Sum(), ours.stream(data), group="usr")
    with pytest.raises(InputError, match=r"group is 'history', a feature with several ids, or none, in some samples"):
        satrap.evaluate(Sum(), ours.stream(data), group="history")


def test_errors_name_each_column_once_and_the_argument_that_chooses_a_label() -> None:
    columns = {"item": [1, 2], "shop": [1, 2], "a": [0, 1], "b": [1, 0]}
    with satrap.Embeddings({"item": satrap.Table("item", dim=4)}) as embeddings:
        embeddings.tables["item"].write([1], np.ones((1, 4), np.float32))
        embeddings.eval()
        stream = embeddings.stream(satrap.Frame(columns, label="a", extra=["item", "shop"]))
        with pytest.raises(InputError, match=r"known are 'item', 'shop'$"):
            satrap.evaluate(Sum(), stream, group="cluster")
        two = satrap.Frame(columns, label=["a", "b"])
        with pytest.raises(InputError, match=r"the batches have 2 labels; .* label=lambda batch: batch\.label\[:, 0\]"):
            satrap.evaluate(Sum(), embeddings.stream(two))
        choose: Any = {"label": lambda batch: batch.label[:, 1], "score": lambda batch: batch.embeddings[:, 0]}
        assert satrap.evaluate(Sum(), embeddings.stream(two), **choose).values()


@pytest.mark.filterwarnings("ignore:.*no table has a row")
@pytest.mark.parametrize("binary", [True, False])
def test_metrics_of_ones_own_see_the_whole_pass(binary: bool) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    ours, logits, labels = scores_and_labels()
    labels = labels if binary else labels * 3
    data = DATA if binary else [replace(each, label=each.label * 3) for each in DATA if each.label is not None]
    predictions = 1 / (1 + np.exp(-logits)) if binary else logits
    squared = torchmetrics.MeanSquaredError()
    own = {"sum": lambda labels, predictions: (labels * predictions).sum(), "squared": squared}
    both = {"auroc": torchmetrics.classification.BinaryAUROC(), "map": torchmetrics.retrieval.RetrievalMAP()}
    collection = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
    own |= {"all": collection} | (both if binary else {})
    group = lambda batch: np.arange(len(batch)) % 5  # noqa: E731
    found = satrap.evaluate(Sum(), ours.stream(data), metrics=own, group=group)
    assert found["sum"] == pytest.approx((labels * predictions).sum(), rel=1e-5)
    assert found["squared"] == pytest.approx(((labels - predictions) ** 2).mean(), rel=1e-5)
    assert found["all/MeanAbsoluteError"] == pytest.approx(np.abs(labels - predictions).mean(), rel=1e-5)
    assert squared.update_count == 0, "a copy was used"
    assert set(own) - {"all"} <= set(found.values())
    if binary:
        assert found["auroc"] == pytest.approx(found.auc(), abs=1e-6)
    else:
        assert found.mse() == pytest.approx(found["squared"], rel=1e-5) and "auc" not in found.values()


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(satrap.ConfigError, match=r"evaluate: metrics\['mine'\] is a str; expected function"):
        satrap.evaluate(Sum(), [], metrics={"mine": "auc"})
    with pytest.raises(satrap.ConfigError, match="evaluate: metrics is a list; expected metrics by name"):
        satrap.evaluate(Sum(), [], metrics=[len])  # type: ignore[arg-type]
