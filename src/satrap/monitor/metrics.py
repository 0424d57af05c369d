"""Metrics of a model's scores: of binary outcomes, of numbers, and of ranked lists; over arrays, a window, or a pass.

Labels of binary outcomes are 0 or 1, and their scores are logits: AUC needs only their order, and the log loss of a
logit never rounds a probability to 0 or 1. The module uses NumPy only; callers convert tensors to arrays. Undefined
values are NaN: AUC and normalised entropy without both a 0 and a 1, of which a UserWarning tells, and the log loss of
no samples. A score that is NaN is refused.

`Window` holds the last samples, and `Evaluation` covers a whole pass: exact up to a size, then by counts in bins, with
a bound on the error. The cost is that of a sort; adding a sample costs a copy.
"""

import math
import numbers
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap.config.validation import known_arguments, suggest
from satrap.errors import ConfigError, InputError
from satrap.hidden_names import internal

Mode = Literal["max", "min"]
_BINARY: dict[str, Mode | None] = {
    "auc": "max",
    "log_loss": "min",
    "normalised_entropy": "min",
    "calibration": None,
    "accuracy": "max",
}
_REAL: dict[str, Mode | None] = {"mse": "min", "mae": "min"}
_LISTS: dict[str, Mode | None] = {"gauc": "max", "mrr": "max"}
_TOP: tuple[str, ...] = ("ndcg", "recall", "hit_rate")  # computed over the first k of each list, e.g. "ndcg@10"
_Labels = NDArray[np.bool_]
_Scores = NDArray[np.float64]


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the share of pairs (a 1, a 0) whose 1 has the higher score, with ties counted half; exact, by sorting.

    This is the Mann-Whitney statistic over the number of pairs, and the area under the ROC curve.
    """
    truth, values = _checked("auc", labels, scores)
    _warn_of_one_label("auc", _only_label(int(np.count_nonzero(truth)), truth.size))
    return _auc(truth, values)


def log_loss(labels: ArrayLike, logits: ArrayLike) -> float:
    """Return the mean of -log p(label), where p(1) = sigmoid(logit), in nats; infinite after one infinitely sure
    mistake."""
    truth, sure = _checked("log_loss", labels, logits)
    return _ratio(float(_losses(truth, sure).sum()), truth.size)


def normalised_entropy(labels: ArrayLike, logits: ArrayLike) -> float:
    """Return the log loss relative to that of a model that always predicts the share of ones; below 1 is better."""
    truth, sure = _checked("normalised_entropy", labels, logits)
    num_ones = int(np.count_nonzero(truth))
    _warn_of_one_label("normalised_entropy", _only_label(num_ones, truth.size))
    return _over_entropy(log_loss(truth, sure), num_ones, truth.size)


class Window:
    """The last `num_samples` samples, and their exact metrics. Allocates 9 bytes per sample in advance. Never
    warns, since a window that has just begun to fill may well have one label only."""

    def __init__(self, num_samples: int) -> None:
        size = _count("Window", "num_samples", num_samples)
        self._labels = np.zeros(size, np.bool_)
        self._scores = np.zeros(size, np.float64)
        self._next = 0  # index for the next sample: after the newest, on the oldest once full
        self._held = 0

    def add(self, labels: ArrayLike, logits: ArrayLike) -> None:
        """Add the samples of a batch, replacing the oldest."""
        truth, scores = _checked("Window.add", labels, logits)
        size = self._labels.size
        truth, scores = truth[-size:], scores[-size:]
        first = min(truth.size, size - self._next)
        for ring, new in ((self._labels, truth), (self._scores, scores)):
            ring[self._next : self._next + first] = new[:first]
            ring[: new.size - first] = new[first:]
        self._next = (self._next + truth.size) % size
        self._held = min(self._held + truth.size, size)

    @property
    def num_samples(self) -> int:
        """Number of samples held."""
        return self._held

    @property
    def only_label(self) -> str | None:
        """What all labels held are; None if there are both."""
        return _only_label(int(np.count_nonzero(self._labels[: self._held])), self._held)

    def auc(self) -> float:
        """Return the AUC of the samples held."""
        return _auc(self._labels[: self._held], self._scores[: self._held])

    def log_loss(self) -> float:
        """Return the log loss of the samples held."""
        return log_loss(self._labels[: self._held], self._scores[: self._held])

    def normalised_entropy(self) -> float:
        """Return the normalised entropy of the samples held."""
        return _over_entropy(self.log_loss(), int(np.count_nonzero(self._labels[: self._held])), self._held)


@internal("held held_groups")
class Evaluation:
    """The metrics of all samples of a pass, of any length; `found["ndcg@10"]` is a metric by its name, and `values()`
    are those that suit the labels.

    Labels 0 and 1 have `auc`, `log_loss`, `normalised_entropy`, `calibration` and `accuracy`, for scores that are
    logits. All labels have `mse` and `mae`, for scores that predict the label itself. Samples with a group, such as
    their user, are ranked lists: `gauc`, `ndcg`, `recall`, `hit_rate` and `mrr`, which hold all samples (9 to 16 bytes
    each). There a label above 0 is relevant, lists without a relevant sample are left out, and among equal scores the
    least relevant sample ranks first, so a model that scores all alike gains nothing.

    Without groups, memory is bounded. All metrics but AUC are exact. AUC is exact for the first `exact_samples`, which
    are held (5 to 9 bytes each). Beyond that samples are counted in bins: the bins end at `num_bins` values that cut
    the samples held so far into equal parts, and each such value is a bin itself, so that a score shared by many
    samples costs nothing. From then on a pair whose two scores fall between the same two values counts half. So the AUC
    is off by at most half the share of such pairs; `auc_error` returns that bound for the actual samples. While scores
    are distributed like the first ones the bound is about 1 / (2 num_bins), 8e-6 by default.
    """

    @known_arguments()
    def __init__(self, *, exact_samples: int | None = 1 << 22, num_bins: int = 1 << 16) -> None:
        """exact_samples: None holds all samples, however many."""
        self._limit = None if exact_samples is None else _count("Evaluation", "exact_samples", exact_samples)
        self._num_bins = _count("Evaluation", "num_bins", num_bins)
        self._chunks: list[tuple[NDArray[Any], NDArray[np.floating[Any]]]] = []
        self._groups: list[NDArray[np.int64]] = []
        self._group_numbers: dict[Any, int] = {}
        self._bins: _Bins | None = None
        self._num_samples = self._num_ones = self._num_right = 0
        self._loss = self._expected_ones = self._square = self._absolute = 0.0
        self._other_label: float | None = None
        self._further: dict[str, float] = {}

    def __repr__(self) -> str:
        if not self._num_samples:
            return "Evaluation(no samples)"
        shown = ", ".join(f"{name}={value:.4f}" for name, value in self.values().items())
        return f"Evaluation({self._num_samples} samples, {shown})"

    def __getitem__(self, name: str) -> float:
        """Return a metric by its name."""
        if name in self._further:
            return self._further[name]
        mode_of(name, self._further)
        metric, _, k = name.partition("@")
        value: float = getattr(self, metric)(*([int(k)] if k else []))
        return value

    def values(self) -> dict[str, float]:
        """Return the metrics that suit the labels, by name: of binary outcomes or of numbers; with groups also of
        ranked lists (the first 10 samples of each); and the metrics that `evaluate(metrics=)` added."""
        binary, lists = self._other_label is None, bool(self._groups)
        names = [*(_BINARY if binary else _REAL)]
        names += [*(["gauc"] if binary else []), "mrr", *(f"{name}@10" for name in _TOP)] if lists else []
        return {name: self[name] for name in names} | self._further

    def add(self, labels: ArrayLike, scores: ArrayLike, groups: ArrayLike | None = None) -> None:
        """Add the samples of a batch. groups: of each sample the list that it belongs to, numbers or texts."""
        truth, values = _numbers("Evaluation.add", labels, scores)
        wrong = (truth != 0) & (truth != 1)
        if not np.isfinite(truth).all():
            raise InputError(f"Evaluation.add: a label is {truth[~np.isfinite(truth)][0]}; expected finite numbers")
        if self._num_samples and (groups is None) != (not self._groups):
            raise InputError("Evaluation.add: some batches have groups and others have none; expected groups in all")
        if groups is not None:
            self._groups.append(self._numbers_of(groups, truth.size))
        if wrong.any() and self._other_label is None:
            self._other_label = float(truth[wrong][0])
        self._num_samples += truth.size
        ones = truth == 1
        self._num_ones += int(np.count_nonzero(ones))
        self._num_right += int(np.count_nonzero(ones == (values > 0)))
        self._loss += float(_losses(ones, values).sum())
        self._expected_ones += float(probabilities(values).sum())
        self._square += float(((values - truth) ** 2).sum())
        self._absolute += float(np.abs(values - truth).sum())
        if self._bins is not None:
            self._bins.add(ones, values)
            return
        narrow = values.astype(np.float32)
        held_labels = truth.astype(np.float32) if wrong.any() else ones
        self._chunks.append((held_labels, narrow if np.array_equal(narrow, values) else values.copy()))
        if self._limit is not None and self._num_samples > self._limit and not self._groups:
            if self._other_label is None:
                held, held_scores = self.held()
                self._bins = _Bins(held_scores, self._num_bins)
                self._bins.add(held, held_scores)
            self._chunks = []

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add values of further metrics, which `values()` returns beside its own."""
        self._further |= metrics

    @property
    def num_samples(self) -> int:
        """Number of samples added."""
        return self._num_samples

    @property
    def is_binary(self) -> bool:
        """Whether all labels are 0 or 1."""
        return self._other_label is None

    def auc(self) -> float:
        """Return the AUC of all samples; exact while `auc_error()` is 0."""
        self._require_both_labels("auc")
        return _auc(*self.held()) if self._bins is None else self._bins.auc()

    def auc_error(self) -> float:
        """Return a bound on the error of `auc`; 0 while all samples are held."""
        return 0.0 if self._bins is None else self._bins.auc_error()

    def log_loss(self) -> float:
        """Return the log loss of all samples."""
        self._require_binary("log_loss")
        return _ratio(self._loss, self._num_samples)

    def normalised_entropy(self) -> float:
        """Return the normalised entropy of all samples."""
        self._require_both_labels("normalised_entropy")
        return _over_entropy(self.log_loss(), self._num_ones, self._num_samples)

    def calibration(self) -> float:
        """Return the sum of the predicted probabilities over the number of ones; 1 is best."""
        self._require_binary("calibration")
        return _ratio(self._expected_ones, self._num_ones)

    def accuracy(self) -> float:
        """Return the share of samples whose label is the more probable one; probability 1/2 predicts 0."""
        self._require_binary("accuracy")
        return _ratio(self._num_right, self._num_samples)

    def mse(self) -> float:
        """Return the mean squared difference of score and label."""
        return _ratio(self._square, self._num_samples)

    def mae(self) -> float:
        """Return the mean absolute difference of score and label."""
        return _ratio(self._absolute, self._num_samples)

    def gauc(self) -> float:
        """Return the mean AUC of the groups with both labels, weighted by their numbers of samples."""
        self._require_binary("gauc")
        return _group_auc(*self.held(), self.held_groups("gauc"))

    def ndcg(self, k: int) -> float:
        """Return the mean over lists of the normalised discounted cumulative gain of the first k; the gain of a sample
        is its label."""
        labels, lists, ranks = self._ranked("ndcg")
        best = labels[np.lexsort((-labels, lists))]
        discount = (ranks < _count("ndcg", "k", k)) / np.log2(ranks + 2.0)
        gain, most = (np.bincount(lists, gains * discount) for gains in (labels, best))
        return _mean(gain[most > 0] / most[most > 0])

    def recall(self, k: int) -> float:
        """Return the mean over lists of the share of their relevant samples that is among the first k."""
        labels, lists, ranks = self._ranked("recall")
        hits = np.bincount(lists, (labels > 0) & (ranks < _count("recall", "k", k)))
        relevant = np.bincount(lists, labels > 0)
        return _mean(hits[relevant > 0] / relevant[relevant > 0])

    def hit_rate(self, k: int) -> float:
        """Return the share of lists with a relevant sample among the first k."""
        return _mean(self._first_ranks("hit_rate") < _count("hit_rate", "k", k))

    def mrr(self) -> float:
        """Return the mean over lists of 1 / rank of the first relevant sample, with ranks from 1."""
        return _mean(1.0 / (self._first_ranks("mrr") + 1.0))

    def held(self) -> tuple[NDArray[Any], _Scores]:
        """Return the labels and scores of the samples held: all, unless there are more than `exact_samples`."""
        if len(self._chunks) > 1:  # joined once, not in every call
            labels, scores = (np.concatenate(parts) for parts in zip(*self._chunks, strict=True))
            self._chunks = [(labels, scores)]
        if not self._chunks:
            return np.zeros(0, np.bool_), np.zeros(0)
        return self._chunks[0][0], self._chunks[0][1].astype(np.float64)

    def held_groups(self, metric: str = "groups") -> NDArray[np.int64]:
        """Return the number of each sample's group; raise InputError if there are no groups."""
        if not self._groups and self._num_samples:
            raise InputError(
                f"{metric}: the samples have no groups; expected a list for each: pass group='user_id', the column "
                "whose equal values form a list, to evaluate or Validation"
            )
        if len(self._groups) > 1:
            self._groups = [np.concatenate(self._groups)]
        return self._groups[0] if self._groups else np.zeros(0, np.int64)

    def _ranked(self, metric: str) -> tuple[_Scores, NDArray[np.int64], NDArray[np.int64]]:
        """Return labels, number of the list and rank from 0, list after list and in each by rank."""
        groups, (labels, scores) = self.held_groups(metric), self.held()
        if (labels < 0).any():
            raise InputError(f"{metric}: a label is {labels.min():g}; expected relevances from 0")
        order = np.lexsort((labels, -scores, groups))
        starts = np.flatnonzero(_is_new(groups[order]))
        lists = np.cumsum(_is_new(groups[order])) - 1
        return labels[order].astype(np.float64), lists, np.arange(lists.size) - starts[lists]

    def _first_ranks(self, metric: str) -> NDArray[np.int64]:
        """Return the rank of the first relevant sample of each list that has one."""
        labels, lists, ranks = self._ranked(metric)
        relevant = labels > 0
        return ranks[relevant][_is_new(lists[relevant])]

    def _numbers_of(self, groups: ArrayLike, num_samples: int) -> NDArray[np.int64]:
        """Return a number for each sample's group, equal for equal ones in all batches."""
        keys = np.asarray(groups)
        if keys.shape != (num_samples,):
            raise InputError(f"Evaluation.add: groups have the shape {keys.shape}; expected ({num_samples},)")
        if any(key is None or key != key for key in (keys if keys.dtype.kind in "fO" else ())):
            raise InputError("Evaluation.add: a sample has no group; expected a number or text for each sample")
        distinct, inverse = np.unique(keys.astype(str) if keys.dtype.kind == "O" else keys, return_inverse=True)
        numbers = self._group_numbers
        return np.array([numbers.setdefault(key, len(numbers)) for key in distinct.tolist()], np.int64)[inverse]

    def _require_binary(self, metric: str) -> None:
        if self._other_label is not None:
            raise InputError(
                f"{metric}: a label is {self._other_label:g}; expected 0 or 1: ask for mse or mae, or declare "
                "LabelColumn(..., above=...)"
            )

    def _require_both_labels(self, metric: str) -> None:
        self._require_binary(metric)
        _warn_of_one_label(metric, _only_label(self._num_ones, self._num_samples), stacklevel=4)


def mode_of(name: str, further: Mapping[str, object]) -> Mode | None:
    """Return whether a higher or a lower value of a metric is better, None: unknown; raise ConfigError if there is no
    metric of that name, neither here nor among `further` ones."""
    known: dict[str, Mode | None] = {**_BINARY, **_REAL, **_LISTS, **dict.fromkeys(further)}
    metric, at, k = name.partition("@")
    if name in known or name.partition("/")[0] in further:
        return known.get(name)
    if metric in _TOP and at and k.isdecimal() and int(k) > 0:
        return "max"
    names = [*known, *(f"{ranking}@10" for ranking in _TOP)]
    expected = f"expected one of an Evaluation: {suggest(name, names)} (@10: any number)"
    raise ConfigError(f"the metric is {name!r}; {expected}")


def needs_groups(name: str) -> bool:
    """Return whether the metric of this name is one of ranked lists."""
    return name.partition("@")[0] in (*_LISTS, *_TOP)


def probabilities(logits: _Scores) -> _Scores:
    """Return the sigmoid of the logits, without overflow."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


class _Bins:
    """Counts of zeros and ones per bin; bin 2i + 1 is the value edges[i] alone, bin 2i is what lies before it."""

    def __init__(self, scores: _Scores, num_bins: int) -> None:
        values = np.unique(scores)
        if values.size > num_bins:
            # Equal parts of the samples, not of the values: where samples are dense, bins are narrow.
            values = np.unique(np.sort(scores)[np.linspace(0, scores.size - 1, num_bins).astype(np.int64)])
        self._edges = values
        self._zeros = np.zeros(2 * values.size + 1, np.int64)
        self._ones = np.zeros_like(self._zeros)

    def add(self, labels: _Labels, scores: _Scores) -> None:
        at = np.searchsorted(self._edges, scores)
        on_edge = self._edges[np.minimum(at, self._edges.size - 1)] == scores
        bins = 2 * at + on_edge
        self._ones += np.bincount(bins[labels], minlength=self._ones.size)
        self._zeros += np.bincount(bins[~labels], minlength=self._zeros.size)

    def auc(self) -> float:
        # Floats: the number of pairs outgrows 64 bits at about 4e9 samples.
        zeros, ones = self._zeros.astype(np.float64), self._ones.astype(np.float64)
        below = np.cumsum(zeros) - zeros
        return _ratio(float(ones @ (below + zeros / 2)), float(zeros.sum() * ones.sum()))

    def auc_error(self) -> float:
        zeros, ones = self._zeros.astype(np.float64), self._ones.astype(np.float64)
        return _ratio(float(zeros[::2] @ ones[::2]) / 2, float(zeros.sum() * ones.sum()))


def _auc(labels: _Labels, scores: _Scores) -> float:
    ones, zeros = np.sort(scores[labels]), np.sort(scores[~labels])
    # Sorted needles keep the binary searches in the cache. Twice the count of wins, so that halves stay integers.
    wins = np.searchsorted(zeros, ones, "left").sum() + np.searchsorted(zeros, ones, "right").sum()
    return _ratio(int(wins), 2 * ones.size * zeros.size)


def _group_auc(labels: _Labels, scores: _Scores, groups: NDArray[np.int64]) -> float:
    order = np.lexsort((scores, groups))
    labels, scores, groups = labels[order], scores[order], groups[order]
    starts, number = np.flatnonzero(_is_new(groups)), np.cumsum(_is_new(groups)) - 1
    is_new_score = _is_new(groups) | _is_new(scores)
    first = np.flatnonzero(is_new_score)
    middle = (first + np.append(first[1:], scores.size) - 1) / 2  # equal scores share the middle of their ranks
    ranks = middle[np.cumsum(is_new_score) - 1] - starts[number]
    sizes, ones = np.bincount(number), np.bincount(number, labels)
    pairs = ones * (sizes - ones)
    wins = np.bincount(number, ranks * labels) - ones * (ones - 1) / 2
    both = pairs > 0
    return _ratio(float((sizes[both] * wins[both] / pairs[both]).sum()), float(sizes[both].sum()))


def _is_new(ordered: NDArray[Any]) -> _Labels:
    """Return where a value differs from the one before."""
    return np.append(np.ones(min(1, ordered.size), np.bool_), ordered[1:] != ordered[:-1])


def _mean(values: NDArray[Any]) -> float:
    return _ratio(float(values.sum()), values.size)


def _losses(labels: _Labels, logits: _Scores) -> _Scores:
    against = np.where(labels, -logits, logits)  # how far the logit points the wrong way
    return np.maximum(against, 0.0) + np.log1p(np.exp(-np.abs(against)))


def _over_entropy(loss: float, num_ones: int, num_samples: int) -> float:
    if num_ones in (0, num_samples):
        return math.nan
    rate = num_ones / num_samples
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def _only_label(num_ones: int, num_samples: int) -> str | None:
    """Return what all labels are; None if there are both."""
    if num_ones not in (0, num_samples):
        return None
    return f"all {num_samples} labels are {min(num_ones, 1)}" if num_samples else "there are no samples"


def _warn_of_one_label(metric: str, only_label: str | None, stacklevel: int = 3) -> None:
    if only_label is not None:
        warnings.warn(
            f"{metric} is undefined (nan): {only_label}; expected labels 0 and labels 1: evaluate on more or other "
            "data, or use the log loss",
            stacklevel=stacklevel,
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _checked(where: str, labels: ArrayLike, scores: ArrayLike) -> tuple[_Labels, _Scores]:
    truth, values = _numbers(where, labels, scores)
    ones = truth == 1
    wrong = ~(ones | (truth == 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{where}: label {at} is {truth[at]}; expected 0 or 1")
    return ones, values


def _numbers(where: str, labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[Any], _Scores]:
    truth, values = _array(where, "labels", labels), _array(where, "scores", scores)
    if truth.shape != values.shape or truth.ndim != 1:
        raise InputError(
            f"{where}: labels have the shape {truth.shape} and scores {values.shape}; expected a label and a score for "
            "each sample: choose a column of the one that has several, such as labels[:, 0] or scores[:, 0]"
        )
    values = values.astype(np.float64, copy=False)
    wrong = np.isnan(values)
    if wrong.any():
        raise InputError(f"{where}: score {int(np.argmax(wrong))} is nan; expected a number: has the model diverged?")
    return truth, values


def _array(where: str, name: str, values: ArrayLike) -> NDArray[Any]:
    """Return the values of samples; those of [n, 1], which is what a model's last layer returns, as [n]."""
    try:
        array = np.asarray(values)
    except Exception as error:  # any type, e.g. from a tensor on a GPU or one that requires a gradient
        raise InputError(
            f"{where}: {name} is a {type(values).__name__} that cannot be read as an array ({error}); for a tensor "
            "pass .detach().float().cpu()"
        ) from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{where}: {name} is {array.dtype}; expected numbers")
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _count(where: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ConfigError(f"{where}: {name} is {value!r} ({type(value).__name__}); expected an integer of at least 1")
    return int(value)
