"""Synthetic clicks that resemble Criteo's, in any number. Their true model is known, and so is the best possible AUC.

Every sample is a pure function of (seed, its number), and the effects of an id are a pure function of (seed, feature,
id). There is no table, so memory does not grow with samples or ids, and any range can be drawn anywhere. (The last bit
of a logit depends on the machine's exp and log; a label almost never does.) NumPy only; writing files needs pyarrow.

A sample is drawn in four steps:
1. dense: counts, log-normal, some missing; a model gets log(1 + count), 0 where missing.
2. ids: each feature draws a rank from a bounded Zipf law; the id is a hash of (feature, rank), so ids fill 64 bits.
3. logit: a weighted sum of the dense values, plus an effect of each id, plus the dot products of the latent factors of
   each two ids, as in a factorisation machine. The rarer an id, the smaller its effect and factors: no model can learn
   from an id that occurs once or twice, and the best AUC would be out of reach.
4. label: 1 with probability sigmoid(logit).
Scale and offset of the logit come from a fixed draw, so that `strength` and `base_rate` mean the same in any setting.
"""

import math
import numbers
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from satrap.config.location import local_path
from satrap.config.optional_deps import pyarrow_for
from satrap.config.validation import KnownArguments, check_integer
from satrap.errors import ConfigError
from satrap.monitor.metrics import Evaluation

_Floats = NDArray[np.float64]
_Hashes = NDArray[np.uint64]
_Ranks = NDArray[np.int64]

Block = dict[str, NDArray[Any]]
"""Samples: one for each row of the arrays.

label: float32 [n]. dense: float32 [n, num_dense]. counts: int32 like dense, -1 where missing. ids: uint64 [n, num_ids].
ranks: int64 like ids, the id's number within its feature from 0, most frequent first. logit: float64 [n], the true one.
"""

_BLOCK = 1 << 16  # samples
_CHUNK = 1 << 12  # samples drawn together, so that intermediate results stay in the cache
_CALIBRATION = range(1 << 63, (1 << 63) + (1 << 15))  # samples that set scale and offset; never part of a data set
_LARGEST = 1 << 62
_SMALLEST = 4  # ids of the smallest feature where a total is spread
_HEAD = 1024  # ranks whose shares are tabulated; beyond, summing and integrating differ by less than 1e-7
_SHARES = {"dense": 0.3, "effects": 0.55, "pairs": 0.15}  # shares of the variance of the logit
_DENSE, _MISSING, _RANK, _LABEL, _WEIGHT, _EFFECT = range(6)  # the purposes of hashes


class BestMetrics(NamedTuple):
    """The metrics of the true probabilities on the drawn labels; a model can be better only by luck."""

    auc: float
    """The AUC."""
    log_loss: float
    """The log loss."""
    normalised_entropy: float
    """The log loss divided by the entropy of the labels' mean."""


@dataclass(frozen=True, kw_only=True)
class Clicks(KnownArguments):
    """A set of samples. Reading it draws them, always the same ones.

    num_samples: the number of samples.
    num_dense: the number of dense features: I1, I2, ...
    num_ids: the number of features with one id each: C1, C2, ...
    cardinalities: the number of ids of each feature, in a list; or of all features together, which then grow by a
        constant factor from 4 ids on: 1000 for three features gives 4, 61 and 935.
    zipf: the share of a feature's k-th most frequent id falls with k ** -zipf; 0 is uniform.
    num_factors: the number of latent factors of an id: the rank of the interaction of each two features.
    base_rate: the share of labels that are 1.
    strength: the standard deviation of the logit: how much there is to learn. The default's best AUC is about 0.82.
    seed: the seed of the true model and of the draws.
    first_sample: the number of the first sample.
    """

    num_samples: int
    num_dense: int = 13
    num_ids: int = 26
    cardinalities: int | Sequence[int] = 1_000_000
    zipf: float = 1.05
    num_factors: int = 4
    base_rate: float = 0.25
    strength: float = 1.5
    seed: int = 0
    first_sample: int = 0

    def __post_init__(self) -> None:
        for name, low in (("num_samples", 0), ("num_dense", 0), ("num_factors", 0), ("first_sample", 0), ("seed", 0)):
            check_integer("Clicks", name, getattr(self, name), low, _LARGEST)
        check_integer("Clicks", "num_ids", self.num_ids, 1, 1 << 20)
        _number("zipf", self.zipf, 0.0, 10.0)
        _number("strength", self.strength, 0.0, 20.0)
        _number("base_rate", self.base_rate, 1e-6, 1 - 1e-6)
        object.__setattr__(self, "cardinalities", _cardinalities(self.cardinalities, self.num_ids))

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The names of the dense columns in files."""
        return tuple(f"I{number}" for number in range(1, self.num_dense + 1))

    @property
    def id_names(self) -> tuple[str, ...]:
        """The names of the id columns in files."""
        return tuple(f"C{number}" for number in range(1, self.num_ids + 1))

    def following(self, num_samples: int) -> Self:
        """Return the samples after these, from the same true model: a test set."""
        return replace(self, num_samples=num_samples, first_sample=self.first_sample + self.num_samples)

    def batches(self, batch_size: int) -> Iterator[Block]:
        """Yield all samples in order; the last batch may be short."""
        size = check_integer("Clicks", "batch_size", batch_size, 1, _LARGEST)
        for start in range(0, self.num_samples, size):
            yield self._range(start, min(start + size, self.num_samples))

    def blocks(self) -> Iterator[Block]:
        """Yield all samples in order, 65536 at a time."""
        return self.batches(_BLOCK)

    def best_metrics(self, num_samples: int | None = None) -> BestMetrics:
        """Return the metrics of the true probabilities on the first `num_samples` samples; None: on all."""
        size = self.num_samples if num_samples is None else num_samples
        check_integer("Clicks", "num_samples", size, 0, self.num_samples)
        metrics = Evaluation()
        for block in replace(self, num_samples=size).blocks():
            metrics.add(block["label"], block["logit"])
        return BestMetrics(metrics.auc(), metrics.log_loss(), metrics.normalised_entropy())

    def best_auc(self, num_samples: int | None = None) -> float:
        """Return the AUC of the true probabilities on the first samples: the best for any model. None: all samples."""
        return self.best_metrics(num_samples).auc

    def write_criteo(self, path: str | os.PathLike[str]) -> None:
        """Write Criteo's text: label, counts and ids between tabs.

        An id is 8 hex digits, a missing count is empty. A file whose name ends with .gz is compressed.
        """
        arrow = pyarrow_for("Clicks.write_criteo", ConfigError)
        from pyarrow import csv

        schema = self._schema(arrow, arrow.string())
        options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        compression = "gzip" if str(path).endswith(".gz") else None
        with (
            _atomic_write(path) as part,
            arrow.output_stream(str(part), compression=compression) as file,
            csv.CSVWriter(file, schema, write_options=options) as writer,
        ):
            for block in self.blocks():
                texts = [_hex(arrow, feature, ranks) for feature, ranks in enumerate(block["ranks"].T)]
                writer.write_batch(_record_batch(arrow, schema, block, texts))

    def write_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write Parquet: label (int8), I1... (int32, null where missing), C1... (uint64, the ids)."""
        arrow = pyarrow_for("Clicks.write_parquet", ConfigError)
        from pyarrow.parquet import ParquetWriter

        schema = self._schema(arrow, arrow.uint64())
        with _atomic_write(path) as part, ParquetWriter(str(part), schema) as writer:
            for block in self.blocks():
                ids = [arrow.array(np.ascontiguousarray(column)) for column in block["ids"].T]
                writer.write_batch(_record_batch(arrow, schema, block, ids))

    def _schema(self, arrow: Any, id_type: Any) -> Any:
        counts = [(name, arrow.int32()) for name in self.dense_names]
        return arrow.schema([("label", arrow.int8()), *counts, *((name, id_type) for name in self.id_names)])

    @cached_property
    def _true_model(self) -> "_TrueModel":
        return _TrueModel(self)

    def _range(self, start: int, stop: int) -> Block:
        block: Block = {}
        for at in range(start, stop, _CHUNK):
            end = min(at + _CHUNK, stop)
            chunk = self._true_model.draw(self.first_sample + at, end - at)
            if not block:
                block = {name: np.empty((stop - start, *part.shape[1:]), part.dtype) for name, part in chunk.items()}
            for name, part in chunk.items():
                block[name][at - start : end - start] = part
        return block


class _TrueModel:
    """The true model. It draws any range of samples; its arrays are [features, n]."""

    def __init__(self, clicks: Clicks) -> None:
        self._strength, self._num_factors = clicks.strength, clicks.num_factors
        dense, ids = range(clicks.num_dense), range(clicks.num_ids)
        cardinalities: Any = clicks.cardinalities  # one for each feature: __post_init__ has spread a total
        self._zipfs = [_Zipf(cardinality, clicks.zipf) for cardinality in cardinalities]
        self._dense = _keys(clicks.seed, _DENSE, dense)
        self._missing = _keys(clicks.seed, _MISSING, dense)
        self._missing_rate = 0.4 * _uniform(_keys(clicks.seed, _MISSING, dense))
        self._weights = _uniform(_keys(clicks.seed, _WEIGHT, dense)) - 0.5
        self._ranks = _keys(clicks.seed, _RANK, ids)
        self._label = _keys(clicks.seed, _LABEL, range(1))
        # One hash yields four numbers; an id needs its effect and its factors.
        self._effects = [_keys(clicks.seed, _EFFECT + group, ids) for group in range(clicks.num_factors // 4 + 1)]
        self._scales = dict.fromkeys(_SHARES, (0.0, 0.0))  # mean and factor of each part
        self._offset = 0.0
        self._calibrate(clicks.base_rate)

    def draw(self, first: int, num: int) -> Block:
        samples = np.arange(first, first + num, dtype=np.uint64)
        counts, ranks = self._draw_counts(samples), self._draw_ranks(samples)
        dense = np.log1p(np.maximum(counts, 0)).astype(np.float32)
        logit = self._logit(self._parts(dense, ranks))
        label = _uniform(_hash(samples, self._label)[0]) < _sigmoid(logit)
        columns: Block = {"dense": dense, "counts": counts, "ids": _ids(ranks), "ranks": ranks}
        block: Block = {name: np.ascontiguousarray(values.T) for name, values in columns.items()}
        return {"label": label.astype(np.float32), **block, "logit": logit}

    def _draw_counts(self, samples: _Hashes) -> NDArray[np.int32]:
        first, second, third, fourth = _quarters(_hash(samples, self._dense))
        nearly_normal = (first + second + third + fourth) / 2
        counts = np.exp(1.2 * nearly_normal + 1.5).astype(np.int32)
        counts[_uniform(_hash(samples, self._missing)) < self._missing_rate] = -1
        return counts

    def _draw_ranks(self, samples: _Hashes) -> _Ranks:
        uniform = _uniform(_hash(samples, self._ranks))
        ranks = np.empty(uniform.shape, np.int64)
        for zipf_law, row, out in zip(self._zipfs, uniform, ranks, strict=True):
            out[:] = zipf_law.ranks(row)
        return ranks

    def _parts(self, dense: NDArray[np.float32], ranks: _Ranks) -> dict[str, _Floats]:
        weight, factor_weight = 1 / np.sqrt(1 + ranks / 100), 1 / (1 + ranks / 10)
        pairs = np.zeros(ranks.shape[1])
        for group, keys in enumerate(self._effects):
            values = _quarters(_hash(ranks.astype(np.uint64), keys))
            for number, value in enumerate(values[: self._num_factors + 1 - 4 * group], 4 * group):
                if number == 0:
                    effects = _total(value * weight)
                else:  # all pairs at once: half of the sum squared, less the squares
                    value *= factor_weight
                    pairs += (_total(value) ** 2 - _total(value * value)) / 2
        return {"dense": _total(self._weights * dense), "effects": effects, "pairs": pairs}

    def _logit(self, parts: dict[str, _Floats]) -> _Floats:
        logit = np.full(parts["dense"].shape, self._offset)
        for name, (mean, factor) in self._scales.items():
            logit += (parts[name] - mean) * factor
        return logit

    def _calibrate(self, base_rate: float) -> None:
        drawn = [
            self._parts(np.log1p(np.maximum(self._draw_counts(samples), 0)), self._draw_ranks(samples))
            for start in _CALIBRATION[::_CHUNK]
            for samples in [np.arange(start, start + _CHUNK, dtype=np.uint64)]
        ]
        parts = {name: np.concatenate([draw[name] for draw in drawn]) for name in _SHARES}
        for name, part in parts.items():
            self._scales[name] = (float(part.mean()), _ratio(math.sqrt(_SHARES[name]), part))
        ratio = _ratio(self._strength, self._logit(parts))
        self._scales = {name: (mean, factor * ratio) for name, (mean, factor) in self._scales.items()}
        logit = self._logit(parts)
        low, high = -300.0, 300.0
        for _ in range(60):
            self._offset = (low + high) / 2
            if float(_sigmoid(logit + self._offset).mean()) < base_rate:
                low = self._offset
            else:
                high = self._offset


def _total(rows: _Floats) -> _Floats:
    """Sum over the features in their order; rows.sum(axis=0) uses another order when there is a single sample."""
    total = np.zeros(rows.shape[1])
    for row in rows:
        total += row
    return total


def _ratio(target: float, values: _Floats) -> float:
    """Return the factor that scales the standard deviation to `target`; 0 if values differ only by rounding."""
    spread = float(values.std())
    return target / spread if spread > 1e-9 else 0.0


class _Zipf:
    """Draws ranks from 0 to cardinality - 1, rank r in proportion to (r + 1) ** -exponent, by inverting the law."""

    def __init__(self, cardinality: int, exponent: float) -> None:
        self._cardinality, self._head = cardinality, min(cardinality, _HEAD)
        self._cumulative = np.cumsum(np.arange(1, self._head + 1) ** -float(exponent))
        self._power = 1 - exponent if abs(1 - exponent) > 1e-6 else 0.0
        self._low = self._integral(self._head + 0.5)
        self._total = float(self._cumulative[-1] + self._integral(cardinality + 0.5) - self._low)

    def _integral(self, x: float) -> float:
        return x**self._power / self._power if self._power else math.log(x)

    def ranks(self, uniform: _Floats) -> _Ranks:
        mass = uniform * self._total
        ranks = np.searchsorted(self._cumulative, mass, side="right")
        tail = ranks == self._head
        if tail.any():  # also values that rounding moved beyond the last tabulated rank
            area = self._low + (mass[tail] - self._cumulative[-1])
            x = (area * self._power) ** (1 / self._power) if self._power else np.exp(area)
            ranks[tail] = np.clip(np.floor(x - 0.5), 0, self._cardinality - 1)
        return ranks


# -- hashes ------------------------------------------------------------------------------------------------------------


def _mix(x: _Hashes) -> _Hashes:
    """Mix 64 bits, in place, by a bijection after which every bit depends on all: the last step of SplitMix64."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _hash(values: _Hashes, keys: _Hashes) -> _Hashes:
    """Hash each value with each feature's key: [features, n]."""
    return _mix(values * np.uint64(0x9E3779B97F4A7C15) + keys)


def _keys(seed: int, purpose: int, features: range) -> _Hashes:
    """Return a key for each feature: [features, 1]. Keys of different purposes are independent."""
    root = _mix(_mix(np.array([seed], np.uint64) + np.uint64(1)) + np.uint64(purpose))
    return _hash(np.arange(len(features), dtype=np.uint64).reshape(-1, 1), root)


def _uniform(hashes: _Hashes) -> _Floats:
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _quarters(hashes: _Hashes) -> list[_Floats]:
    """Return four independent, uniformly distributed numbers of mean 0 and variance 1 from each hash."""
    words = hashes.astype("<u8", copy=False).view("<u2").reshape(*hashes.shape, 4)
    return [(words[..., at] - 32767.5) / math.sqrt((65536**2 - 1) / 12) for at in range(4)]


def _ids(ranks: _Ranks) -> _Hashes:
    """Return the ids. They differ for all features and ranks, since every step is a bijection."""
    features = np.arange(1, len(ranks) + 1, dtype=np.uint64).reshape(-1, 1)
    return _mix((features << np.uint64(40)) | ranks.astype(np.uint64))


def _hex(arrow: Any, feature: int, ranks: _Ranks) -> Any:
    """Return an Arrow array of 8 hex digits for each rank, by a bijection of 32 bits, the size of Criteo's ids."""
    x = ranks.astype(np.uint32) ^ _mix(np.array([feature], np.uint64)).astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    halves = (x[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & np.uint32(15)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[halves]
    ends = np.arange(0, 8 * len(x) + 1, 8, dtype=np.int32)
    return arrow.StringArray.from_buffers(len(x), arrow.py_buffer(ends), arrow.py_buffer(digits))


def _sigmoid(logit: _Floats) -> _Floats:
    share: _Floats = 1 / (1 + np.exp(-logit))
    return share


# -- files -------------------------------------------------------------------------------------------------------------


def _record_batch(arrow: Any, schema: Any, block: Block, ids: list[Any]) -> Any:
    counts = [arrow.array(column, mask=column < 0) for column in np.ascontiguousarray(block["counts"].T)]
    return arrow.record_batch([arrow.array(block["label"].astype(np.int8)), *counts, *ids], schema=schema)


@contextmanager
def _atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to. The complete file gets its final name; after an error it is removed.

    Its name is random, so several trainers may write the same file at the same time.
    """
    whole = local_path(path, "path")
    part = Path(f"{whole}.{secrets.token_hex(4)}.part")
    try:
        yield part
        os.replace(part, whole)
    finally:
        part.unlink(missing_ok=True)


# -- settings ----------------------------------------------------------------------------------------------------------


def _cardinalities(value: object, num_ids: int) -> tuple[int, ...]:
    """Return a cardinality for each feature; a total is spread."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        if len(value) != num_ids:
            raise ConfigError(f"Clicks: {len(value)} cardinalities for num_ids {num_ids}; expected one for each")
        return _checked(value)
    total = check_integer("Clicks", "cardinalities", value, _SMALLEST * num_ids, num_ids << 32)
    low, high = 1.0, float(total)
    for _ in range(200):  # the factor from one feature to the next, by bisection
        factor = (low + high) / 2
        spread = [_SMALLEST * math.exp(min(700.0, at * math.log(factor))) for at in range(num_ids)]
        low, high = (factor, high) if sum(spread) < total else (low, factor)
    rounded = [max(_SMALLEST, int(_SMALLEST * low**at)) for at in range(num_ids)]
    rounded[-1] += total - sum(rounded)
    return _checked(rounded)


def _checked(cardinalities: Iterable[object]) -> tuple[int, ...]:
    return tuple(check_integer("Clicks", f"cardinalities[{i}]", n, 1, 1 << 32) for i, n in enumerate(cardinalities))


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= float(value) <= high:
        raise ConfigError(f"Clicks: {name} is {value!r}; expected a number from {low:g} to {high:g}")
