"""Metrics for scores of a binary outcome: AUC, log loss, normalised entropy; of arrays, of a window, or of a whole
pass.

Labels are 0 or 1, scores are logits: AUC needs only their order, and the log loss of a logit never rounds a probability
to 0 or 1. The module uses NumPy only; callers convert tensors to arrays. Undefined values are NaN: AUC and normalised
entropy without both a 0 and a 1, of which a UserWarning tells, and the log loss of no samples. A score that is NaN is
refused.

`Window` holds the last samples, and `Evaluation` covers a whole pass: exact up to a size, then by counts in bins, with
a bound on the error. The cost is that of a sort; adding a sample costs a copy.
"""

import math
import numbers
import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from satrap.errors import ConfigError, InputError

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
    """The last `num_samples` samples, and their exact metrics. Allocates 9 bytes per sample in advance. Warns of
    nothing: a window that begins to fill may well have one label only."""

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


class Evaluation:
    """The metrics of all samples of a pass, of any length, in bounded memory.

    Without both a 0 and a 1 among the labels, AUC and normalised entropy are NaN, and a UserWarning says so.
    Log loss and normalised entropy are exact. AUC is exact for the first `exact_samples`, which are held (5 to 9 bytes
    each). Beyond that samples are counted in bins and not held: the bins end at `num_bins` values that cut the samples
    held so far into equal parts, and each such value is a bin itself, so that a score shared by many samples costs
    nothing. From then on a pair whose two scores fall between the same two values counts half. So the AUC is off by at
    most half the share of such pairs; `auc_error` returns that bound for the actual samples. While scores are
    distributed like the first ones the bound is about 1 / (2 num_bins), 8e-6 by default.
    """

    def __init__(self, *, exact_samples: int | None = 1 << 22, num_bins: int = 1 << 16) -> None:
        """exact_samples: None holds all samples, however many."""
        self._limit = None if exact_samples is None else _count("Evaluation", "exact_samples", exact_samples)
        self._num_bins = _count("Evaluation", "num_bins", num_bins)
        self._chunks: list[tuple[_Labels, NDArray[np.floating[Any]]]] = []
        self._bins: _Bins | None = None
        self._num_samples = self._num_ones = 0
        self._loss = 0.0

    def __repr__(self) -> str:
        if not self._num_samples:
            return "Evaluation(no samples)"
        shown = f"auc={self.auc():.4f}, log_loss={self.log_loss():.4f}, ne={self.normalised_entropy():.4f}"
        return f"Evaluation({self._num_samples} samples, {shown})"

    def add(self, labels: ArrayLike, logits: ArrayLike) -> None:
        """Add the samples of a batch."""
        truth, scores = _checked("Evaluation.add", labels, logits)
        self._num_samples += truth.size
        self._num_ones += int(np.count_nonzero(truth))
        self._loss += float(_losses(truth, scores).sum())
        if self._bins is not None:
            self._bins.add(truth, scores)
            return
        narrow = scores.astype(np.float32)
        self._chunks.append((truth.copy(), narrow if np.array_equal(narrow, scores) else scores.copy()))
        if self._limit is not None and self._num_samples > self._limit:
            held = self._held()
            self._bins = _Bins(held[1], self._num_bins)
            self._bins.add(*held)
            self._chunks = []

    @property
    def num_samples(self) -> int:
        """Number of samples added."""
        return self._num_samples

    def auc(self) -> float:
        """Return the AUC of all samples; exact while `auc_error()` is 0."""
        _warn_of_one_label("auc", _only_label(self._num_ones, self._num_samples))
        return _auc(*self._held()) if self._bins is None else self._bins.auc()

    def auc_error(self) -> float:
        """Return a bound on the error of `auc`; 0 while all samples are held."""
        return 0.0 if self._bins is None else self._bins.auc_error()

    def log_loss(self) -> float:
        """Return the log loss of all samples."""
        return _ratio(self._loss, self._num_samples)

    def normalised_entropy(self) -> float:
        """Return the normalised entropy of all samples."""
        _warn_of_one_label("normalised_entropy", _only_label(self._num_ones, self._num_samples))
        return _over_entropy(self.log_loss(), self._num_ones, self._num_samples)

    def _held(self) -> tuple[_Labels, _Scores]:
        if len(self._chunks) > 1:  # joined once, not in every call
            labels, scores = (np.concatenate(parts) for parts in zip(*self._chunks, strict=True))
            self._chunks = [(labels, scores)]
        if not self._chunks:
            return np.zeros(0, np.bool_), np.zeros(0)
        return self._chunks[0][0], self._chunks[0][1].astype(np.float64)


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


def _warn_of_one_label(metric: str, only_label: str | None) -> None:
    if only_label is not None:
        warnings.warn(
            f"{metric} is undefined (nan): {only_label}; expected labels 0 and labels 1: evaluate on more or other "
            "data, or use the log loss",
            stacklevel=3,
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _checked(where: str, labels: ArrayLike, scores: ArrayLike) -> tuple[_Labels, _Scores]:
    truth, values = _array(where, "labels", labels), _array(where, "scores", scores)
    if truth.shape != values.shape or truth.ndim != 1:
        raise InputError(
            f"{where}: labels have the shape {truth.shape} and scores {values.shape}; expected one dimension and the "
            "same length: pass one label column, e.g. labels[:, 0]"
        )
    ones = truth == 1
    wrong = ~(ones | (truth == 0))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{where}: label {at} is {truth[at]}; expected 0 or 1")
    values = values.astype(np.float64, copy=False)
    wrong = np.isnan(values)
    if wrong.any():
        raise InputError(f"{where}: score {int(np.argmax(wrong))} is nan; expected a number: has the model diverged?")
    return ones, values


def _array(where: str, name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except Exception as error:  # any type, e.g. from a tensor on a GPU or one that requires a gradient
        raise InputError(
            f"{where}: {name} is a {type(values).__name__} that cannot be read as an array ({error}); for a tensor "
            "pass .detach().float().cpu()"
        ) from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{where}: {name} is {array.dtype}; expected numbers")
    return array


def _count(where: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ConfigError(f"{where}: {name} is {value!r} ({type(value).__name__}); expected an integer of at least 1")
    return int(value)
