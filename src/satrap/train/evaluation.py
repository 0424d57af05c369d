"""A model's quality over a stream: one pass without gradients, without a change of any table."""

from collections.abc import Callable, Iterable

import torch

from satrap.errors import InputError
from satrap.monitor import metrics
from satrap.train.batch import Batch


def evaluate(
    model: torch.nn.Module,
    stream: Iterable[Batch],
    *,
    score: Callable[[Batch], torch.Tensor] | None = None,
    label: Callable[[Batch], torch.Tensor] | None = None,
) -> metrics.Evaluation:
    """AUC, log loss and normalised entropy of `model(batch.dense, batch.embeddings)`, which are logits.

    The model's train() or eval() stays as it is. The stream is one begun after `embeddings.eval()`.
    score, label: of a batch its logits and labels, one for each sample, where a model takes more or has several heads.
    """
    found = metrics.Evaluation()
    with torch.no_grad():
        for batch in stream:
            if batch.step:
                raise InputError("the stream trains its tables: call embeddings.eval() before embeddings.stream(...)")
            logits = model(batch.dense, batch.embeddings) if score is None else score(batch)
            truth = batch.label if label is None else label(batch)
            found.add(truth.cpu().numpy(), logits.float().cpu().numpy())
    return found


def auc(model: torch.nn.Module, stream: Iterable[Batch]) -> float:
    """The area under the ROC curve of the model over the stream."""
    return evaluate(model, stream).auc()
