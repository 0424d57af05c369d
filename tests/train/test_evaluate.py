"""Evaluation of a model: equals metrics of the plain numbers, handles short batches, and changes nothing."""

from dataclasses import replace

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
    assert {name: len(store) for name, store in ours.tables.items()} == rows


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


def test_a_batch_without_a_label_is_refused() -> None:
    unlabelled = [replace(each, label=None) for each in DATA]
    with pytest.raises(InputError, match="has no label"), pytest.warns(UserWarning, match="no table has a row"):
        satrap.evaluate(Sum(), satrap.Embeddings(tables()).eval().stream(unlabelled))


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
    numbers = f"auc={plain.auc():.4f}, log_loss={plain.log_loss():.4f}, ne={plain.normalised_entropy():.4f}"
    assert repr(plain) == f"Evaluation(135 samples, {numbers})"
    assert repr(metrics.Evaluation()) == "Evaluation(no samples)"
