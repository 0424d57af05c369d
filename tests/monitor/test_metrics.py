"""Metrics: AUC against counted pairs, windows and passes against arrays, bounds against the exact value, undefined
values."""

import math
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from satrap.errors import ConfigError, InputError
from satrap.monitor.metrics import Evaluation, Window, auc, log_loss, mode_of, normalised_entropy

may_be_undefined = pytest.mark.filterwarnings("ignore:.* is undefined")
# A few values, so that ties are frequent; and the extremes.
scores = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([0.0, -0.0, 1e-300, math.inf, -math.inf]))
samples = st.lists(st.tuples(st.booleans(), scores), max_size=40)


def by_pairs(labels: list[bool], values: list[float]) -> Fraction | None:
    """Return Mann-Whitney's statistic by its definition."""
    ones = [value for label, value in zip(labels, values, strict=True) if label]
    zeros = [value for label, value in zip(labels, values, strict=True) if not label]
    if not ones or not zeros:
        return None
    wins = sum((one > zero) + Fraction(one == zero, 2) for one in ones for zero in zeros)
    return Fraction(wins) / (len(ones) * len(zeros))


def same(found: float, expected: float) -> None:
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15, nan_ok=True)


@may_be_undefined
@given(samples)
def test_auc_counts_pairs(drawn: list[tuple[bool, float]]) -> None:
    labels, values = [label for label, _ in drawn], [value for _, value in drawn]
    expected = by_pairs(labels, values)
    found = auc(np.array(labels, bool), np.array(values))
    assert math.isnan(found) if expected is None else found == float(expected)


def test_log_loss_and_entropy_by_hand() -> None:
    logits = np.log(np.array([0.8, 0.4, 0.1]) / np.array([0.2, 0.6, 0.9]))
    expected = -(math.log(0.8) + math.log(0.6) + math.log(0.9)) / 3
    same(log_loss([1, 0, 0], logits), expected)
    entropy = -(math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3)
    same(normalised_entropy([1, 0, 0], logits), expected / entropy)
    base_rate = np.full(3, math.log(1 / 2))  # predicts the share of ones
    same(normalised_entropy([1, 0, 0], base_rate), 1.0)


def test_log_loss_of_huge_logits() -> None:
    same(log_loss([1, 0], [1000.0, -1000.0]), 0.0)
    same(log_loss([0, 1], [1000.0, -1000.0]), 1000.0)
    same(log_loss([1, 0], [math.inf, -math.inf]), 0.0)
    assert log_loss([0, 1], [math.inf, 0.0]) == math.inf


@contextmanager
def telling(labels: list[int] | None) -> Iterator[None]:
    """Expects that AUC and normalised entropy each tell why they are undefined; None: that neither does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if labels is None:
        assert not caught
        return
    why = f"all {len(labels)} labels are {labels[0]}" if labels else "there are no samples"
    for metric, each in zip(("auc", "normalised_entropy"), caught, strict=True):
        assert str(each.message).startswith(f"{metric} is undefined (nan): {why}; expected labels 0 and labels 1: ")
        assert each.filename == __file__, "it names the line that called"


@pytest.mark.parametrize("labels", [[], [1, 1], [0, 0, 0]])
def test_undefined_values_are_nan(labels: list[int]) -> None:
    logits = np.linspace(-1, 1, len(labels))
    for metrics in (Window(8), Evaluation(), Evaluation(exact_samples=1, num_bins=1)):
        metrics.add(labels, logits)
        with telling(None if isinstance(metrics, Window) else labels):
            assert math.isnan(metrics.auc())
            assert math.isnan(metrics.normalised_entropy())
        assert math.isnan(metrics.log_loss()) == (not labels)
        same(metrics.log_loss(), log_loss(labels, logits))
    with telling(labels):
        assert math.isnan(auc(labels, logits))
        assert math.isnan(normalised_entropy(labels, logits))


@may_be_undefined
@given(samples, st.integers(1, 12), st.lists(st.integers(0, 9), max_size=12))
def test_a_window_holds_the_last_samples(drawn: list[tuple[bool, float]], size: int, cuts: list[int]) -> None:
    labels, values = np.array([label for label, _ in drawn], bool), np.array([value for _, value in drawn])
    window, at = Window(size), 0
    for step in [*cuts, len(drawn)]:
        window.add(labels[at : at + step], values[at : at + step])
        at = min(at + step, len(drawn))
        last = slice(max(0, at - size), at)
        assert window.num_samples == at - last.start
        same(window.auc(), auc(labels[last], values[last]))
        same(window.log_loss(), log_loss(labels[last], values[last]))
        same(window.normalised_entropy(), normalised_entropy(labels[last], values[last]))


@may_be_undefined
@given(
    samples,
    st.sampled_from([None, 1, 2, 7, 100]),
    st.sampled_from([1, 2, 5, 100]),
    st.lists(st.integers(0, 9), max_size=12),
)
def test_a_pass_is_exact_or_within_its_bound(
    drawn: list[tuple[bool, float]], exact: int | None, num_bins: int, cuts: list[int]
) -> None:
    labels, values = np.array([label for label, _ in drawn], bool), np.array([value for _, value in drawn])
    metrics, at = Evaluation(exact_samples=exact, num_bins=num_bins), 0
    for step in [*cuts, len(drawn)]:
        metrics.add(labels[at : at + step], values[at : at + step])
        at = min(at + step, len(drawn))
        expected = auc(labels[:at], values[:at])
        if exact is None or at <= exact:
            assert metrics.auc_error() == 0.0
        if math.isnan(expected):
            assert math.isnan(metrics.auc())
        else:
            assert abs(metrics.auc() - expected) <= metrics.auc_error() + 1e-12
        same(metrics.log_loss(), log_loss(labels[:at], values[:at]))
        same(metrics.normalised_entropy(), normalised_entropy(labels[:at], values[:at]))
    assert metrics.num_samples == len(drawn)


def test_the_bound_of_a_long_pass_is_small(rng: np.random.Generator) -> None:
    labels = rng.random(200_000) < 0.3
    logits = rng.normal(size=labels.size) + labels
    metrics = Evaluation(exact_samples=20_000, num_bins=1000)
    for start in range(0, labels.size, 4096):
        metrics.add(labels[start : start + 4096], logits[start : start + 4096])
    error = metrics.auc_error()
    assert abs(metrics.auc() - auc(labels, logits)) <= error < 2 / (2 * 1000)


def test_shared_scores_cause_no_error(rng: np.random.Generator) -> None:
    labels, logits = rng.random(5000) < 0.5, rng.integers(0, 50, 5000) / 7
    metrics = Evaluation(exact_samples=1000, num_bins=50)
    for part in np.split(np.arange(5000), 10):
        metrics.add(labels[part], logits[part])
    assert metrics.auc_error() == 0.0
    same(metrics.auc(), auc(labels, logits))


def test_the_bound_grows_when_scores_change(rng: np.random.Generator) -> None:
    """The bins were built for other scores: all of these fall into one bin."""
    metrics = Evaluation(exact_samples=100, num_bins=100)
    metrics.add(rng.random(101) < 0.5, rng.normal(size=101))
    labels = rng.random(10_000) < 0.5
    metrics.add(labels, 100 + rng.normal(size=10_000) + 5 * labels)
    assert 0.4 < metrics.auc_error() <= 0.5


def test_a_long_pass_holds_no_samples(rng: np.random.Generator) -> None:
    metrics = Evaluation(exact_samples=10_000, num_bins=100)
    labels, logits = rng.random(10_000) < 0.5, rng.normal(size=10_000)
    tracemalloc.start()
    try:
        for _ in range(20):
            metrics.add(labels, logits)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert metrics.num_samples == 200_000
    assert held < 50_000


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_a_pass_keeps_its_scores_exactly(rng: np.random.Generator, dtype: Any) -> None:
    labels, logits = rng.random(300) < 0.5, (1 + rng.random(300) / 1000).astype(dtype)
    expected = auc(labels, logits)
    metrics = Evaluation()
    metrics.add(labels[:100], logits[:100])
    metrics.add(labels[100:], logits[100:])
    labels[:], logits[:] = False, 0  # the caller may reuse the arrays
    assert metrics.auc() == expected


def test_tensors_and_any_kind_of_number_are_accepted() -> None:
    for labels in (torch.tensor([0.0, 1.0]), torch.tensor([False, True]), np.array([0, 1], np.int8), [0, 1]):
        assert auc(labels, torch.tensor([0.0, 1.0])) == 1.0


CALLS: list[Callable[..., Any]] = [auc, log_loss, normalised_entropy, Window(4).add, Evaluation().add]


@pytest.mark.parametrize("call", CALLS)
def test_wrong_input_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"labels have the shape \(2,\) and scores \(3,\); expected a label and"):
        call([0, 1], [0.0, 1.0, 2.0])
    with pytest.raises(InputError, match=r"shape \(2, 2\).*labels\[:, 0\]"):
        call([[0, 1], [1, 0]], [[0.0, 1.0], [1.0, 0.0]])
    for_any_label = getattr(call, "__self__", None).__class__ is Evaluation
    with nullcontext() if for_any_label else pytest.raises(InputError, match=r"label 1 is 0.5; expected 0 or 1"):
        call([0, 0.5], [0.0, 1.0])
    with pytest.raises(InputError, match=r"label (0 )?is nan"):
        call([math.nan, 1.0], [0.0, 1.0])
    with pytest.raises(InputError, match=r"score 1 is nan; expected a number: has the model diverged\?"):
        call([0, 1], [0.0, math.nan])
    with pytest.raises(InputError, match=r"labels is .*; expected numbers"):
        call(["0", "1"], [0.0, 1.0])
    with pytest.raises(InputError, match=r"scores is a Tensor that cannot be read.*pass \.detach\(\)\.float\(\)\.cpu"):
        call([0, 1], torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_sizes_are_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Window: num_samples is .*; expected an integer of at least 1"):
        Window(value)
    with pytest.raises(ConfigError, match=r"Evaluation: num_bins is .*; expected an integer of at least 1"):
        Evaluation(num_bins=value)
    if value is not None:
        with pytest.raises(ConfigError, match=r"Evaluation: exact_samples is .*; expected an integer of at least 1"):
            Evaluation(exact_samples=value)


# -- numbers and ranked lists ------------------------------------------------------------------------------------------


def by_lists(drawn: list[tuple[int, float, int]], k: int) -> dict[str, float]:
    """Return the metrics of ranked lists by their definitions, list by list."""
    found: dict[str, list[float]] = {"gauc": [], "mrr": [], "ndcg": [], "recall": [], "hit_rate": []}
    weights = []
    for group in {each[0] for each in drawn}:
        samples = [(score, label) for key, score, label in drawn if key == group]
        if (area := by_pairs([label > 0 for _, label in samples], [score for score, _ in samples])) is not None:
            found["gauc"].append(float(area) * len(samples))
            weights.append(len(samples))
        ranked = [label for _, label in sorted(samples, key=lambda each: (-each[0], each[1]))]
        relevant = [rank for rank, label in enumerate(ranked, 1) if label > 0]
        if relevant:
            gain, best = (
                sum(label / math.log2(rank + 1) for rank, label in enumerate(each[:k], 1))
                for each in (ranked, sorted(ranked, reverse=True))
            )
            found["ndcg"].append(gain / best)
            found["recall"].append(sum(rank <= k for rank in relevant) / len(relevant))
            found["hit_rate"].append(relevant[0] <= k)
            found["mrr"].append(1 / relevant[0])
    means = {name: sum(each) / len(each) if each else math.nan for name, each in found.items()}
    means["gauc"] = sum(found["gauc"]) / sum(weights) if weights else math.nan
    return {name if name in ("gauc", "mrr") else f"{name}@{k}": value for name, value in means.items()}


@given(st.lists(st.tuples(st.integers(0, 4), scores, st.integers(0, 3)), max_size=40), st.integers(1, 5), st.booleans())
def test_ranked_lists_equal_their_definitions(drawn: list[tuple[int, float, int]], k: int, binary: bool) -> None:
    """Also with equal scores, graded labels, lists without a relevant sample, and batches that divide lists."""
    drawn = [(key, score, min(label, 1) if binary else label) for key, score, label in drawn]
    found, half = Evaluation(exact_samples=1), len(drawn) // 2
    for part in (drawn[:half], drawn[half:]):
        keys, values, labels = ([each[i] for each in part] for i in range(3))
        found.add(np.array(labels, np.int64), np.array(values), np.array([f"user {key}" for key in keys], object))
    expected = by_lists(drawn, k)
    if not found.is_binary:
        del expected["gauc"]
        with pytest.raises(InputError, match=r"gauc: a label is [23]; expected 0 or 1"):
            found.gauc()
    for name, value in expected.items():
        same(found[name], value)


def test_lists_equal_torchmetrics(rng: np.random.Generator) -> None:
    """For scores without ties and above 0: its hits leave out scores that are negative."""
    retrieval = pytest.importorskip("torchmetrics.retrieval")
    users, labels, values = rng.integers(0, 50, 1000), rng.random(1000) < 0.2, rng.random(1000)
    found = Evaluation()
    found.add(labels, values, users)
    others = {
        "ndcg@5": retrieval.RetrievalNormalizedDCG(empty_target_action="skip", top_k=5),
        "recall@5": retrieval.RetrievalRecall(empty_target_action="skip", top_k=5),
        "hit_rate@5": retrieval.RetrievalHitRate(empty_target_action="skip", top_k=5),
        "mrr": retrieval.RetrievalMRR(empty_target_action="skip"),
    }
    for name, other in others.items():
        other.update(torch.tensor(values), torch.tensor(labels), indexes=torch.tensor(users))
        assert found[name] == pytest.approx(float(other.compute()), rel=1e-5), name


@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.floats(-9, 9, width=32)), min_size=1, max_size=30))
def test_numbers_have_mse_and_mae(drawn: list[tuple[float, float]]) -> None:
    labels, values = np.array(drawn).T
    found = Evaluation(exact_samples=3)
    for part in np.array_split(np.arange(len(drawn)), 3):
        found.add(labels[part], values[part])
    same(found.mse(), sum((a - b) ** 2 for a, b in drawn) / len(drawn))
    same(found.mae(), sum(abs(a - b) for a, b in drawn) / len(drawn))
    if not found.is_binary:
        assert found.values() == {"mse": found.mse(), "mae": found.mae()}
        for name in ("auc", "log_loss", "normalised_entropy", "calibration", "accuracy"):
            with pytest.raises(InputError, match=rf"{name}: a label is .*; expected 0 or 1: ask for mse or mae"):
                found[name]


@may_be_undefined
@given(samples)
def test_calibration_and_accuracy_by_hand(drawn: list[tuple[bool, float]]) -> None:
    labels, values = np.array([label for label, _ in drawn], bool), np.array([value for _, value in drawn])
    found = Evaluation()
    found.add(labels, values)
    expected = [1 / (1 + math.exp(-value)) if value > -math.inf else 0.0 for value in values]
    same(found.calibration(), sum(expected) / sum(labels) if any(labels) else math.nan)
    right = [(value > 0) == label for label, value in drawn]
    same(found.accuracy(), sum(right) / len(right) if right else math.nan)


def test_wrong_groups_and_names_are_refused() -> None:
    found = Evaluation()
    with pytest.raises(InputError, match="a sample has no group"):
        found.add([0, 1], [0.0, 1.0], np.array(["a", None], object))
    with pytest.raises(InputError, match=r"groups have the shape \(1,\); expected \(2,\)"):
        found.add([0, 1], [0.0, 1.0], [7])
    assert found.num_samples == 0
    found.add([0, 1], [0.0, 1.0])
    with pytest.raises(InputError, match="some batches have groups and others have none"):
        found.add([0, 1], [0.0, 1.0], [7, 7])
    for name in ("gauc", "mrr", "ndcg@3"):
        with pytest.raises(InputError, match=rf"{name[:4]}: the samples have no groups; expected .*group='user_id'"):
            found[name]
    for name in ("ndgc@3", "ndcg", "ndcg@0", "auc@2"):
        with pytest.raises(
            ConfigError, match=rf"the metric is '{name}'; expected one of an Evaluation: the nearest known"
        ):
            found[name]
    negative = Evaluation()
    negative.add([-1, 1], [0.0, 1.0], [7, 7])
    with pytest.raises(InputError, match="mrr: a label is -1; expected relevances from 0"):
        negative.mrr()
    assert [mode_of(name, {"mine": 0}) for name in ("auc", "mse", "recall@7", "mine", "mine/part")] == [
        "max",
        "min",
        "max",
        None,
        None,
    ]
