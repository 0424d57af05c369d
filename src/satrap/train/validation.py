"""Validation during training: evaluates a model every so many steps, and knows the best evaluation so far.

Trainer 0 evaluates, after the updates of all trainers are applied, while the others wait; they then agree on the result
and so on what follows from it: whether this was the best, and whether training should stop. Progress reports it beside
the training metrics, and a checkpoint of the best evaluation outlives those that `keep` removes.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, get_args

import torch

from satrap.config.validation import check_choice, check_integer, kind_of, known_arguments
from satrap.data.source import Source
from satrap.errors import ConfigError, StreamError
from satrap.monitor.metrics import Mode, mode_of, needs_groups
from satrap.monitor.progress import Progress
from satrap.train.embeddings import Embeddings, session_of
from satrap.train.evaluation import Group, Metric, check_metrics, evaluate
from satrap.train.process_group import unwrap
from satrap.train.stream import Stream

_MAX_COUNT = 2**31 - 1


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

    @known_arguments()
    def __init__(
        self,
        model: torch.nn.Module,
        embeddings: Embeddings,
        data: Any,
        *,
        metric: str = "auc",
        mode: Mode | None = None,
        patience: int | None = None,
        score: Callable[[Any], torch.Tensor] | None = None,
        label: Callable[[Any], torch.Tensor] | None = None,
        group: Group | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        """data: the source to evaluate on, one pass for each evaluation, whatever its `epochs`. If modules of
            `satrap.nn` look rows up, it may be a loader, or a function that returns one, such as
            `lambda: data.batches(["items"])`: `score` and `label` receive its batches.

        metric: name of the metric that decides which evaluation is the best: one of `Evaluation`, such as "log_loss" or
            "ndcg@10", or one of `metrics`.
        mode: whether the highest ("max") or the lowest ("min") value is the best; needed for a metric of your own.
        patience: number of consecutive evaluations without a new best after which `is_over` is True; None: any number.
        score, label, group, metrics: as in `evaluate`. Only trainer 0 calls them, so let them call the model itself,
            not its DistributedDataParallel.
        """
        data = _one_pass(embeddings, data)
        own = check_metrics("Validation", metrics)
        known_mode = mode_of(metric, own)
        if needs_groups(metric) and group is None:
            raise ConfigError(f"Validation: metric is {metric!r} without a group; expected group='user_id', e.g.")
        if mode is not None:
            check_choice("Validation", "mode", mode, get_args(Mode))
        elif known_mode is None:
            raise ConfigError(
                f"Validation: whether a high {metric!r} is good is not known; expected mode='max' or mode='min'"
            )
        if patience is not None:
            check_integer("Validation", "patience", patience, 1, _MAX_COUNT)
        if embeddings.dense == "async" and embeddings.trainers.world_size > 1:
            raise ConfigError(
                "Validation: trainers with dense='async' are at different steps and cannot evaluate together; expected "
                "a single trainer: evaluate with a Reader beside the run instead"
            )
        self.metrics: Mapping[str, float] = {}
        """The metrics of the last evaluation, those of `Evaluation.values()`; empty before the first."""
        self.best: float | None = None
        """The best value of the metric so far."""
        self.best_step = 0
        """The step of the best evaluation."""
        self.num_worse = 0
        """Number of evaluations since the best one."""
        self._batches = _own_batches(embeddings, data)
        self._model, self._embeddings, self._data = unwrap(model), embeddings, data
        self._metric, self._mode, self._patience = metric, mode or known_mode, patience
        self._options: dict[str, Any] = {"score": score, "label": label, "group": group, "metrics": own}
        self._step = 0  # at the last evaluation

    def __repr__(self) -> str:
        best = "nothing evaluated yet" if self.best is None else f"best {self.best:.6g} at step {self.best_step}"
        return f"Validation({self._metric}, {best})"

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
        if progress is not None and not hasattr(progress, "report_evaluation"):
            raise ConfigError(f"Validation.step: progress is {kind_of(progress)}; expected a satrap.Progress")
        if checkpoint is not None and not hasattr(checkpoint, "save"):
            raise ConfigError(f"Validation.step: checkpoint is {kind_of(checkpoint)}; expected a satrap.Checkpoint")
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
            seconds = time.monotonic() - start
            progress.report_evaluation(step, self.metrics, is_best=is_best, best_by=self._metric, seconds=seconds)
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
        return value > best if self._mode == "max" else value < best

    def _evaluate(self) -> dict[str, float]:
        """Evaluate on trainer 0, and return its metrics on all trainers."""
        trainers, values = self._embeddings.trainers, dict[str, float]()

        def evaluate_here() -> None:
            device = next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))
            if self._batches is not None:
                result = evaluate(self._model, self._batches(), **self._options)
            else:
                with self._embeddings.stream(self._data, device=device, train=False) as stream:
                    result = evaluate(self._model, stream, **self._options)
            values.update(result.values(), **{self._metric: result[self._metric]})

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
        received: dict[str, float] = json.loads(trainers.gather(json.dumps(values).encode())[0])
        return received


def _one_pass(embeddings: Embeddings, data: Any) -> Any:
    """Return the data for one pass; raise ConfigError if an argument is in the place of another."""
    if not isinstance(embeddings, Embeddings):
        raise ConfigError(
            f"Validation: embeddings is {kind_of(embeddings)}; expected the satrap.Embeddings: "
            "Validation(model, embeddings, data)"
        )
    if isinstance(data, Stream):
        raise ConfigError("Validation: data is a stream, which has one pass; expected the source that it reads")
    return data.replace(epochs=1) if isinstance(data, Source) and data.epochs != 1 else data


def _own_batches(embeddings: Embeddings, data: Any) -> Callable[[], Iterable[Any]] | None:
    """Return a function that returns the batches of a user's own loader; None: a stream reads the data."""
    if not session_of(embeddings).has_modules or hasattr(data, "batches"):
        return None
    if isinstance(data, Iterator):
        raise ConfigError(
            f"Validation: data is {kind_of(data)}, which can be read once; expected a loader, a list, or a function "
            "that returns the batches of each evaluation: data=lambda: ..."
        )
    batches: Callable[[], Iterable[Any]] = data if callable(data) else lambda: data
    return batches
