"""Evaluation of a model: equals metrics of the plain numbers, handles short batches, and changes nothing."""

import numpy as np
import pytest
import torch

import satrap
from satrap.errors import InputError
from satrap.monitor import metrics

NAMES = ("a", "b")


class Sum(torch.nn.Module):
    """A logit that is easy to compute by hand."""

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        return dense.sum(1) + embeddings.sum(1)


def batches(num: int, *, label: bool = True) -> list[satrap.Inputs]:
    rng = np.random.default_rng(0)
    found = []
    for i in range(num):
        size = 7 if i == num - 1 else 32
        found.append(
            satrap.Inputs(
                names=NAMES,
                values=rng.integers(0, 50, 2 * size, dtype=np.uint64),
                batch_size=size,
                dense=rng.standard_normal((size, 3)).astype(np.float32),
                label=rng.integers(0, 2, size).astype(np.float32) if label else None,
            )
        )
    return found


def embeddings() -> satrap.Embeddings:
    return satrap.Embeddings({name: satrap.Table(name, dim=4) for name in NAMES})


@pytest.mark.parametrize("overlap", [False, True])
def test_metrics_equal_those_of_plain_numbers(overlap: bool) -> None:
    ours, model, data = embeddings(), Sum(), batches(5)
    optimizer = ours.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    for batch in ours.stream(data[:2]):  # so that some ids have rows
        model(batch.dense, batch.embeddings).square().mean().backward()
        optimizer.step()
    rows = {name: len(store) for name, store in ours.tables.items()}
    ours.eval()
    found = satrap.evaluate(model, ours.stream(data, overlap=overlap))
    with torch.no_grad():
        logits = np.concatenate([model(batch.dense, batch.embeddings).numpy() for batch in map(ours, data)])
    labels = np.concatenate([each.label for each in data if each.label is not None])
    assert found.auc() == metrics.auc(labels, logits)
    assert found.log_loss() == pytest.approx(metrics.log_loss(labels, logits), rel=1e-6)
    assert found.normalised_entropy() == pytest.approx(metrics.normalised_entropy(labels, logits), rel=1e-6)
    assert satrap.auc(model, ours.stream(data)) == found.auc()
    assert {name: len(store) for name, store in ours.tables.items()} == rows


def test_a_training_stream_is_refused() -> None:
    ours = embeddings()
    ours.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    with pytest.raises(InputError, match=r"call embeddings\.eval\(\) before"), ours.stream(batches(2)) as stream:
        satrap.evaluate(Sum(), stream)


def test_a_batch_without_a_label_is_refused() -> None:
    ours = embeddings().eval()
    with pytest.raises(InputError, match="has no label"), pytest.warns(UserWarning, match="no table has a row"):
        satrap.evaluate(Sum(), ours.stream(batches(2, label=False)))


def test_models_with_further_inputs_and_several_heads() -> None:
    ours, data = embeddings().eval(), batches(3)
    with pytest.warns(UserWarning, match="no table has a row"):
        plain = satrap.evaluate(Sum(), ours.stream(data))
        found = satrap.evaluate(
            Sum(),
            ours.stream(data),
            score=lambda batch: batch.dense.sum(1) + sum(part.sum(1) for part in (batch[name] for name in batch)),
            label=lambda batch: torch.stack([batch.label, 1 - batch.label], 1)[:, 0],
        )
    assert found.auc() == pytest.approx(plain.auc(), abs=1e-6)
    numbers = f"auc={plain.auc():.4f}, log_loss={plain.log_loss():.4f}, ne={plain.normalised_entropy():.4f}"
    assert repr(plain) == f"Evaluation(71 samples, {numbers})"
    assert repr(metrics.Evaluation()) == "Evaluation(no samples)"
