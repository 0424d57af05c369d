"""Evaluation of a model over one pass of a stream, without gradients and without changing any table; and `Validation`,
which evaluates every so many steps of training, and knows the best evaluation so far.

In a validation trainer 0 evaluates, after the updates of all trainers are applied, while the others wait; they then
agree on the result and so on what follows from it: whether this was the best, and whether training should stop.
Progress reports it beside the training metrics, and a checkpoint of the best evaluation outlives those that `keep`
removes.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch

from satrap.config.validation import check_choice, check_integer
from satrap.errors import ConfigError, InputError, StreamError
from satrap.monitor import metrics
from satrap.monitor.progress import Progress
from satrap.train.batch import Batch
from satrap.train.embeddings import Embeddings, session_of
from satrap.train.process_group import unwrap

Metric = Literal["auc", "log_loss", "normalised_entropy"]
_METRICS = ("auc", "log_loss", "normalised_entropy")
_MAX_COUNT = 2**31 - 1


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


class SavesBest(Protocol):
    """An object that saves the best version of a run: `Checkpoint`."""

    def save(self, *, best: bool) -> bool:
        """Save a version, which later ones do not remove."""


class Validation:
    """Evaluates a model during training. Pass it to `Checkpoint(..., extra_state={"validation": validation})`, so that
    a resumed run still knows its best evaluation.

    for batch in embeddings.stream(data):
        ...
        optimizer.step()
        validation.step(every_steps=1000, progress=progress, checkpoint=run)
        if validation.is_over:
            break
    """

    def __init__(
        self,
        model: torch.nn.Module,
        embeddings: Embeddings,
        data: Any,
        *,
        metric: Metric = "auc",
        patience: int | None = None,
        score: Callable[[Batch], torch.Tensor] | None = None,
        label: Callable[[Batch], torch.Tensor] | None = None,
    ) -> None:
        """data: the source to evaluate on, one pass for each evaluation.

        metric: what decides which evaluation is the best: the highest AUC, or the lowest of the others.
        patience: number of consecutive evaluations without a new best after which `is_over` is True; None: any number.
        score, label: as those of `evaluate`. Trainer 0 alone calls them, so they call the model itself, not its
            DistributedDataParallel.
        """
        check_choice("Validation", "metric", metric, _METRICS)
        if patience is not None:
            check_integer("Validation", "patience", patience, 1, _MAX_COUNT)
        if embeddings.dense == "async" and embeddings.trainers.world_size > 1:
            raise ConfigError(
                "Validation: trainers with dense='async' are at different steps and cannot evaluate together; expected "
                "a single trainer: evaluate with a Reader beside the run instead"
            )
        self.metrics: Mapping[str, float] = {}
        """AUC, log loss and normalised entropy of the last evaluation; empty before the first."""
        self.best: float | None = None
        """The best value of the metric so far."""
        self.best_step = 0
        """The step of the best evaluation."""
        self.num_worse = 0
        """Number of evaluations since the best one."""
        self._model, self._embeddings, self._data = unwrap(model), embeddings, data
        self._metric, self._patience, self._score, self._label = metric, patience, score, label
        self._step = 0  # of the last evaluation

    @property
    def is_over(self) -> bool:
        """Whether training should stop, since `patience` evaluations were worse than the best."""
        return self._patience is not None and self.num_worse >= self._patience

    def step(
        self, *, every_steps: int | None = None, progress: Progress | None = None, checkpoint: SavesBest | None = None
    ) -> bool:
        """Evaluate; return whether the result is the best so far. every_steps: evaluate only if the step is a multiple,
        once. Several trainers all call this at the same step.

        progress: where the result is reported.
        checkpoint: saves a version if the result is the best so far, which it keeps until there is a better one.
        """
        if every_steps is not None:
            check_integer("Validation", "every_steps", every_steps, 1, _MAX_COUNT)
        step = self._embeddings.step
        if every_steps is not None and (step == 0 or step % every_steps != 0 or step == self._step):
            return False
        start = time.monotonic()
        self._step, self.metrics = step, self._evaluate()
        value = self.metrics[self._metric]
        is_best = not math.isnan(value) and (self.best is None or self._is_better(value, self.best))
        if is_best:
            self.best, self.best_step, self.num_worse = value, step, 0
        else:
            self.num_worse += 1
        if progress is not None:
            progress.report_evaluation(step, self.metrics, is_best=is_best, seconds=time.monotonic() - start)
        if is_best and checkpoint is not None:
            checkpoint.save(best=True)
        return is_best

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, for a checkpoint."""
        return {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.best, self.best_step = state["best"], state["best_step"]
        self.num_worse, self._step = state["num_worse"], state["step"]

    def _is_better(self, value: float, best: float) -> bool:
        return value > best if self._metric == "auc" else value < best

    def _evaluate(self) -> dict[str, float]:
        """Evaluate on trainer 0, and return its metrics on all trainers."""
        trainers, found = self._embeddings.trainers, torch.zeros(len(_METRICS), dtype=torch.float64)

        def evaluate_here() -> None:
            device = next((each.device for each in self._model.parameters()), torch.device("cpu"))
            with self._embeddings.stream(self._data, device=device, train=False) as stream:
                result = evaluate(self._model, stream, score=self._score, label=self._label)
            found[:] = torch.tensor([getattr(result, name)() for name in _METRICS], dtype=torch.float64)

        if (joint := session_of(self._embeddings).joint) is not None:
            joint.evaluate()
        self._embeddings.drain()
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            trainers.run_first(evaluate_here, StreamError)
        finally:
            for module, mode in modes.items():
                module.training = mode
        trainers.broadcast_(found)
        return dict(zip(_METRICS, found.tolist(), strict=True))
