"""Evaluation of a model over one pass of a stream, without gradients and without changing any table."""

from collections.abc import Callable, Iterable

import torch

from satrap.errors import InputError
from satrap.monitor import metrics
from satrap.train.batch import Batch
from satrap.train.process_group import unwrap


def evaluate(
    model: torch.nn.Module,
    stream: Iterable[Batch],
    *,
    score: Callable[[Batch], torch.Tensor] | None = None,
    label: Callable[[Batch], torch.Tensor] | None = None,
) -> metrics.Evaluation:
    """Return AUC, log loss and normalised entropy of the logits `model(batch.dense, batch.embeddings)`.

    The model's train() or eval() mode is left unchanged. The stream must have been started after `embeddings.eval()`.
    Of a model in DistributedDataParallel the model itself is called, so trainers may evaluate different numbers of
    batches.

    score, label: functions that return a batch's logits and labels, one per sample, for models with other inputs or
        several heads.
    """
    result, model = metrics.Evaluation(), unwrap(model)
    with torch.no_grad():
        for batch in stream:
            if batch.step:
                raise InputError("the stream trains its tables: call embeddings.eval() before embeddings.stream(...)")
            logits = model(batch.dense, batch.embeddings) if score is None else score(batch)
            truth = batch.label if label is None else label(batch)
            result.add(truth.cpu().numpy(), logits.float().cpu().numpy())
    return result


def auc(model: torch.nn.Module, stream: Iterable[Batch]) -> float:
    """Return the area under the ROC curve of the model over the stream."""
    return evaluate(model, stream).auc()
