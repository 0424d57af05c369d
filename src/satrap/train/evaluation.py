"""Evaluation of a model over one pass of a stream or a loader, without gradients and without changing any table."""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from satrap.config.validation import kind_of, known_arguments, suggest
from satrap.data.inputs import Inputs
from satrap.data.source import Source
from satrap.errors import ConfigError, InputError
from satrap.monitor.metrics import Evaluation, probabilities
from satrap.train.batch import Batch
from satrap.train.prefetched_batches import PrefetchedBatches
from satrap.train.process_group import unwrap

Metric = Any  # a function, or an object with update() and compute()
Group = str | Callable[[Any], Any]


@known_arguments()
def evaluate(
    model: torch.nn.Module,
    stream: Iterable[Any],
    *,
    score: Callable[[Any], torch.Tensor] | None = None,
    label: Callable[[Any], torch.Tensor] | None = None,
    group: Group | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluation:
    """Return the metrics of the scores `model(batch.dense, batch.embeddings)`.

    The model's train() or eval() mode is left unchanged. The stream must have been started after `embeddings.eval()`.
    A model in DistributedDataParallel is called without it, so trainers may evaluate different numbers of batches.

    stream: a stream; with `score` and `label` any loader, for a model whose modules look rows up.
    score, label: functions that return a batch's scores and labels, one per sample, for models with other inputs or
        several heads.
    group: the column whose equal values form a ranked list, such as "user_id": an extra column of the source, or a
        feature with one id in each sample. Or a function that returns a batch's values.
    metrics: metrics of your own by name: functions as in scikit-learn, `function(labels, predictions)` over arrays of
        the whole pass, or objects of torchmetrics, which are copied. If all labels are 0 or 1, the predictions are
        probabilities; otherwise they are the scores. Holds all samples, 5 to 9 bytes each.
    """
    own = check_metrics("evaluate", metrics)
    if score is None and not callable(model):
        raise InputError(
            f"evaluate: model is {kind_of(model)}; expected a model and a stream of batches. For arrays write "
            "satrap.Evaluation().add(labels, scores)"
        )
    if isinstance(stream, Source):
        raise InputError(
            f"evaluate: stream is {kind_of(stream)}; expected a stream of its batches: "
            "embeddings.stream(data, train=False)"
        )
    result = Evaluation(exact_samples=None) if own or group is not None else Evaluation()
    model = unwrap(model)
    with torch.no_grad():
        for batch in stream.loader if isinstance(stream, PrefetchedBatches) else stream:
            if not isinstance(batch, Batch):
                _require_functions(batch, score, label)
            elif batch.step:
                raise InputError("the stream trains its tables: call embeddings.eval() before embeddings.stream(...)")
            scores = _scores(model, batch) if score is None else score(batch)
            truth: Any = batch.label if label is None else label(batch)
            _require_tensors(model, scores, truth, has_score=score is not None)
            if label is None and truth.ndim == 2 and truth.shape[1] > 1:
                raise InputError(
                    f"evaluate: the batches have {truth.shape[1]} labels; expected one: choose it and its scores by "
                    "label=lambda batch: batch.label[:, 0] and score=..."
                )
            groups = None if group is None else _groups(batch, group)
            truth = truth.cpu().numpy() if isinstance(truth, torch.Tensor) else truth
            result.add(truth, scores.float().cpu().numpy(), groups)
    result.add_metrics(_compute(own, result, has_groups=group is not None))
    return result


def _require_tensors(model: torch.nn.Module, scores: object, truth: object, *, has_score: bool) -> None:
    """Raise InputError if the model or a function of the user returned something else, such as two vectors."""
    if not isinstance(scores, torch.Tensor):
        source = "score" if has_score else f"{type(model).__name__}(batch.dense, batch.embeddings)"
        raise InputError(
            f"evaluate: {source} returned {kind_of(scores)}; expected a tensor with the score of each sample: give "
            "score=..., a function of a batch; of two vectors, such as TwoTower's, a score is the dot product"
        )
    if not isinstance(truth, torch.Tensor | np.ndarray):
        raise InputError(f"evaluate: label returned {kind_of(truth)}; expected a tensor with the label of each sample")


def _require_functions(batch: Any, score: object, label: object) -> None:
    """Raise InputError if a batch that is no stream's needs a function that is missing."""
    has_label = isinstance(batch, Inputs) and batch.label is not None
    if missing := [name for name, given in (("score", score), ("label", label or has_label)) if not given]:
        raise InputError(
            f"evaluate: a batch is {kind_of(batch)}, and there is no {' and no '.join(missing)}; expected batches of "
            f"embeddings.stream(data, train=False), or {' and '.join(f'{name}=...' for name in missing)}: "
            "functions of such a batch"
        )


def _scores(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    try:
        scores: torch.Tensor = model(batch.dense, batch.embeddings)
    except TypeError as error:
        if "positional argument" in str(error):
            error.add_note(
                "evaluate called model(batch.dense, batch.embeddings); for a model with other inputs give score=..., "
                "such as score=lambda batch: model(batch)"
            )
        raise
    return scores


@known_arguments()
def auc(model: torch.nn.Module, stream: Iterable[Batch]) -> float:
    """Return the area under the ROC curve of the model over the stream; nan, with a warning, without both labels."""
    return evaluate(model, stream).auc()


def check_metrics(where: str, metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Return the metrics of a user by name, after checking that each is a function or has update() and compute()."""
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(
            f"{where}: metrics is a {type(metrics).__name__}; expected metrics by name, {{'mine': function}}"
        )
    for name, metric in (metrics or {}).items():
        if not callable(metric) and not _is_object(metric):
            raise ConfigError(
                f"{where}: metrics[{name!r}] is a {type(metric).__name__}; expected function(labels, predictions), or "
                "an object with update(predictions, labels) and compute()"
            )
    return dict(metrics or {})


def _is_object(metric: Metric) -> bool:
    return callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))


def _groups(batch: Any, group: Group) -> NDArray[Any]:
    """Return the value of each sample that says to which list it belongs."""
    if not isinstance(group, str):
        return np.asarray(group(batch))
    inputs = getattr(batch, "inputs", batch)
    if not isinstance(inputs, Inputs):
        raise InputError(
            f"evaluate: group is {group!r} and a batch is {kind_of(batch)}, which has no columns; expected a function "
            "of the batch: group=lambda batch: ..."
        )
    if group in inputs.extra:
        return np.asarray(inputs.extra[group])
    if group in inputs.names and len(inputs.values):
        ids, offsets = inputs.bags(group)
        if (np.diff(offsets) == 1).all():
            return ids
    if group in inputs.names and len(inputs.values):
        raise InputError(
            f"group is {group!r}, a feature with several ids, or none, in some samples; expected one with one id in "
            "each, an extra column, or a function that returns a value for each sample of a batch"
        )
    nearest = suggest(group, list(dict.fromkeys([*inputs.extra, *inputs.names])))
    raise InputError(
        f"group is {group!r}; expected an extra column of the source, or a feature with one id in each sample, which "
        f"no worker process reads: declare extra=[{group!r}] in the source; {nearest}"
    )


def _compute(metrics: Mapping[str, Metric], result: Evaluation, *, has_groups: bool) -> dict[str, float]:
    """Return the values of a user's metrics over all samples; one that has several values names each NAME/VALUE."""
    labels, scores = result.held()
    labels = labels.astype(np.int64 if result.is_binary else np.float32)
    predictions = (probabilities(scores) if result.is_binary else scores).astype(np.float32)
    values: dict[str, float] = {}
    for name, given in metrics.items():
        if not _is_object(given):
            values[name] = float(given(labels, predictions))
            continue
        metric: Any = copy.deepcopy(given)
        modules: Iterable[Any] = metric.cpu().modules() if isinstance(given, torch.nn.Module) else ()
        for module in modules:
            module.distributed_available_fn = lambda: False  # each trainer that evaluates has all samples
        if hasattr(metric, "reset"):
            metric.reset()
        tensors = torch.from_numpy(predictions), torch.from_numpy(labels)
        if has_groups and "indexes" in inspect.signature(metric.update).parameters:
            metric.update(*tensors, indexes=torch.from_numpy(result.held_groups()))
        else:
            metric.update(*tensors)
        value = metric.compute()
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": float(number) for key, number in value.items()}
        else:
            values[name] = float(value)
    return values
