"""The generator: a pure function of (seed, sample) that follows its laws and probabilities, in memory and in files."""

import gzip
import math
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from satrap.data import synthetic
from satrap.data.synthetic import Block, Clicks
from satrap.errors import ConfigError
from satrap.monitor.metrics import auc, log_loss, normalised_entropy


def whole(clicks: Clicks, batch_size: int = 1 << 16) -> Block:
    parts = list(clicks.batches(batch_size))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_same(one: Block, other: Block) -> None:
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
        assert one[name].dtype == other[name].dtype


# -- purity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 100, 4096, 10_000, 1 << 40])
def test_samples_do_not_depend_on_how_they_are_read(batch_size: int) -> None:
    num = min(9000, 50 * batch_size + 3)
    clicks = Clicks(num_samples=num, seed=3)
    assert [len(part["label"]) for part in clicks.batches(batch_size)][:-1] == [batch_size] * ((num - 1) // batch_size)
    assert_same(whole(clicks, batch_size), whole(clicks))
    assert_same(whole(clicks), whole(Clicks(num_samples=num, seed=3)))


def test_following_samples_are_the_rest_of_a_longer_set() -> None:
    clicks = Clicks(num_samples=1000, seed=3)
    rest = whole(clicks.following(500))
    longer = whole(Clicks(num_samples=1500, seed=3))
    assert_same(rest, {name: values[1000:] for name, values in longer.items()})


def test_another_seed_draws_other_samples_of_another_model() -> None:
    one, other = whole(Clicks(num_samples=4000, seed=0)), whole(Clicks(num_samples=4000, seed=1))
    for name in ("label", "dense", "ids", "logit"):
        assert (one[name] == other[name]).mean() < 0.7, name


def test_the_draws_never_change() -> None:
    """A run that is repeated years later has the same data."""
    block = whole(Clicks(num_samples=3))
    assert block["ids"][:, 25].tolist() == [15801107302963338813, 13661272628126206290, 696698295848885826]
    assert block["ranks"][:, 25].tolist() == [190, 21068, 1795]
    assert block["counts"][0].tolist() == [3, 0, 82, 3, 1, 3, 1, 0, 2, 0, 2, 3, 3]
    np.testing.assert_allclose(block["logit"], [-0.93489818, 0.52977664, -1.01282844], atol=1e-8)
    assert block["label"].tolist() == [1, 1, 0]


def test_no_samples() -> None:
    clicks = Clicks(num_samples=0)
    assert list(clicks.blocks()) == []
    with pytest.warns(UserWarning, match="is undefined"):
        assert math.isnan(clicks.best_auc())


def test_memory_is_bounded_by_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are a hundred million ids, and more samples than memory holds at a time."""
    monkeypatch.setattr(synthetic, "_BLOCK", 4096)
    clicks = Clicks(num_samples=100_000, cardinalities=100_000_000)
    tracemalloc.start()
    try:
        for _ in clicks.blocks():
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6


# -- laws --------------------------------------------------------------------------------------------------------------


def test_shapes_names_and_types() -> None:
    clicks = Clicks(num_samples=10, num_dense=2, num_ids=3, cardinalities=[5, 1, 7])
    shapes = {name: (values.dtype.name, values.shape) for name, values in whole(clicks).items()}
    assert shapes == {
        "label": ("float32", (10,)),
        "dense": ("float32", (10, 2)),
        "counts": ("int32", (10, 2)),
        "ids": ("uint64", (10, 3)),
        "ranks": ("int64", (10, 3)),
        "logit": ("float64", (10,)),
    }
    assert all(values.flags.c_contiguous for values in whole(clicks).values())
    assert clicks.dense_names == ("I1", "I2")
    assert clicks.id_names == ("C1", "C2", "C3")


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("cardinality", [1, 3, 1024, 1025, 3000, 100_000])
def test_ranks_follow_the_law(exponent: float, cardinality: int) -> None:
    """With an even grid in place of random numbers, the counts are the law up to rounding."""
    grid = (np.arange(1 << 20) + 0.5) / (1 << 20)
    found = np.cumsum(np.bincount(synthetic._Zipf(cardinality, exponent).ranks(grid), minlength=cardinality)) / len(
        grid
    )
    weights = np.arange(1, cardinality + 1) ** -exponent
    assert len(found) == cardinality
    np.testing.assert_allclose(found, np.cumsum(weights) / weights.sum(), atol=3e-6)


def test_the_ends_of_the_unit_interval_are_valid_ranks() -> None:
    ends = np.array([0.0, 1 - 2.0**-53])
    for cardinality in (1, 1024, 1025, 1 << 32):
        assert synthetic._Zipf(cardinality, 1.05).ranks(ends).tolist() == [0, cardinality - 1]


def test_ids_differ_for_all_features_and_ranks() -> None:
    block = whole(Clicks(num_samples=30_000, num_ids=5, cardinalities=[300, 300, 2000, 1 << 32, 50], zipf=0.5))
    owners: dict[int, tuple[int, int]] = {}
    for feature in range(5):
        for number, rank in zip(block["ids"][:, feature].tolist(), block["ranks"][:, feature].tolist(), strict=True):
            assert owners.setdefault(number, (feature, rank)) == (feature, rank)
    assert len(set(owners.values())) == len(owners)
    numbers = np.array(list(owners), np.uint64)
    assert abs((numbers >> np.uint64(63)).mean() - 0.5) < 0.02  # they fill 64 bits


def test_a_total_is_spread_over_the_features() -> None:
    for total, num_ids in ((104, 26), (1000, 26), (1_000_000, 26), (20_000_000, 26), (4, 1), (9, 2)):
        spread = Clicks(num_samples=1, num_ids=num_ids, cardinalities=total).cardinalities
        assert isinstance(spread, tuple)
        assert sum(spread) == total
        assert len(spread) == num_ids
        assert list(spread) == sorted(spread)
        assert spread[0] >= 4


def test_cardinalities_may_be_an_array() -> None:
    spread: Any = np.array([5, 7])
    assert Clicks(num_samples=1, num_ids=2, cardinalities=spread) == Clicks(
        num_samples=1, num_ids=2, cardinalities=(5, 7)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"base_rate": 0.03, "strength": 0.8},
        {"num_dense": 0, "num_factors": 0},
        {"num_dense": 0, "num_ids": 1, "cardinalities": [50]},
        {"num_factors": 9, "zipf": 0.0, "cardinalities": 5000},
    ],
)
def test_base_rate_and_strength_are_as_declared(options: dict[str, Any]) -> None:
    clicks = Clicks(num_samples=60_000, **options)
    block = whole(clicks)
    spread = math.sqrt(clicks.base_rate * (1 - clicks.base_rate) / clicks.num_samples)
    assert abs(block["label"].mean() - clicks.base_rate) < 5 * spread
    assert block["logit"].std() == pytest.approx(clicks.strength, rel=0.03)


def test_nothing_to_learn() -> None:
    for options in ({"strength": 0.0}, {"num_dense": 0, "num_ids": 1, "cardinalities": [1], "num_factors": 0}):
        clicks = Clicks(num_samples=20_000, **options)
        assert clicks.best_auc() == 0.5
        assert clicks.best_metrics().normalised_entropy == pytest.approx(1.0, abs=0.01)


def test_labels_are_drawn_from_the_logits() -> None:
    block = whole(Clicks(num_samples=200_000))
    order = np.argsort(block["logit"])
    for part in np.array_split(order, 20):
        share = (1 / (1 + np.exp(-block["logit"][part]))).mean()
        assert abs(block["label"][part].mean() - share) < 5 * math.sqrt(share * (1 - share) / len(part))


def test_the_best_is_that_of_the_logits() -> None:
    clicks = Clicks(num_samples=70_000, seed=1)
    block = whole(clicks)
    best = clicks.best_metrics()
    assert best.auc == auc(block["label"], block["logit"]) == clicks.best_auc()
    assert best.log_loss == pytest.approx(log_loss(block["label"], block["logit"]), rel=1e-12)
    assert best.normalised_entropy == pytest.approx(normalised_entropy(block["label"], block["logit"]), rel=1e-12)
    assert 0.75 < best.auc < 0.85
    assert clicks.best_auc(5000) == auc(block["label"][:5000], block["logit"][:5000])


def test_every_part_contributes_to_the_logit() -> None:
    """Dense values, effects and pairs each have their share of the logit's variance."""
    truth = Clicks(num_samples=1)._true_model
    samples = np.arange(20_000, dtype=np.uint64)
    parts = truth._parts(np.log1p(np.maximum(truth._draw_counts(samples), 0)), truth._draw_ranks(samples))
    for name, (mean, factor) in truth._scales.items():
        share = ((parts[name] - mean) * factor).var() / 1.5**2
        assert share == pytest.approx(synthetic._SHARES[name], rel=0.15), name


def test_dense_values_are_those_of_the_counts() -> None:
    block = whole(Clicks(num_samples=20_000))
    missing = block["counts"] < 0
    assert set(block["counts"][missing].tolist()) == {-1}
    assert 0.05 < missing.mean() < 0.35
    np.testing.assert_array_equal(block["dense"], np.log1p(np.maximum(block["counts"], 0)).astype(np.float32))
    assert block["counts"].max() > 100


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["day_0.tsv", "day_0.tsv.gz"])
def test_criteo_text(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_BLOCK", 300)
    clicks = Clicks(num_samples=1000, cardinalities=3000)
    clicks.write_criteo(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    rows = [row.split("\t") for row in text.decode("ascii").removesuffix("\n").split("\n")]
    block = whole(clicks)
    assert [len(row) for row in rows] == [40] * 1000
    assert [float(row[0]) for row in rows] == block["label"].tolist()
    assert [[int(count or -1) for count in row[1:14]] for row in rows] == block["counts"].tolist()
    texts: dict[tuple[int, str], int] = {}
    for row, ids in zip(rows, block["ids"].tolist(), strict=True):
        for feature, number in enumerate(ids):
            word = row[14 + feature]
            assert len(word) == 8 and int(word, 16) >= 0
            assert texts.setdefault((feature, word), number) == number
    assert len(set(texts.values())) == len(texts)  # there are as many words as ids
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_BLOCK", 300)
    clicks = Clicks(num_samples=1000, num_dense=2, num_ids=3, cardinalities=[10, 100, 1000])
    clicks.write_parquet(tmp_path / "part.parquet")
    table = pa.parquet.read_table(tmp_path / "part.parquet")
    block = whole(clicks)
    assert table.column_names == ["label", "I1", "I2", "C1", "C2", "C3"]
    assert table["label"].to_pylist() == block["label"].tolist()
    for at, name in enumerate(clicks.dense_names):
        assert [-1 if count is None else count for count in table[name].to_pylist()] == block["counts"][:, at].tolist()
    for at, name in enumerate(clicks.id_names):
        assert table[name].to_pylist() == block["ids"][:, at].tolist()


def test_several_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The trainers of a run may all write the file that they read."""
    clicks, path = Clicks(num_samples=2_000, num_dense=1, num_ids=2, cardinalities=100), tmp_path / "a.parquet"
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(clicks.write_parquet, path) for _ in range(40)]:
            done.result(timeout=60)
    assert pa.parquet.read_table(path).num_rows == 2_000 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [Clicks.write_criteo, Clicks.write_parquet])
def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("disk full")

    path = tmp_path / "clicks"
    path.write_text("the old file")
    monkeypatch.setattr(synthetic, "_record_batch", broken)
    with pytest.raises(OSError, match="disk full"):
        write(Clicks(num_samples=10), path)
    assert [each.name for each in tmp_path.iterdir()] == ["clicks"]
    assert path.read_text() == "the old file"


@pytest.mark.parametrize("write", [Clicks.write_criteo, Clicks.write_parquet])
def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=rf"Clicks\.{write.__name__} needs pyarrow.*pip install 'satrap\[arrow\]'"):
        write(Clicks(num_samples=10), tmp_path / "clicks")


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_samples", "num_dense", "num_ids", "num_factors", "seed", "first_sample"])
@pytest.mark.parametrize("value", [-1, 1.5, True, None, "4", 1 << 63])
def test_integers_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^Clicks: {name} is .*; expected an integer from [01] to \d+$"):
        Clicks(**{"num_samples": 1, name: value})


@pytest.mark.parametrize("name", ["zipf", "strength", "base_rate"])
@pytest.mark.parametrize("value", [-0.1, 21, math.nan, math.inf, None, True, "1"])
def test_numbers_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^Clicks: {name} is .*; expected a number from \S+ to \S+$"):
        Clicks(num_samples=1, **{name: value})


def test_cardinalities_are_checked() -> None:
    with pytest.raises(ConfigError, match="Clicks: 2 cardinalities for num_ids 3; expected one for each"):
        Clicks(num_samples=1, num_ids=3, cardinalities=[5, 6])
    with pytest.raises(ConfigError, match=r"Clicks: cardinalities\[1\] is 0; expected an integer from 1 to 4294967296"):
        Clicks(num_samples=1, num_ids=2, cardinalities=[5, 0])
    with pytest.raises(ConfigError, match="Clicks: cardinalities is 103; expected an integer from 104 to"):
        Clicks(num_samples=1, cardinalities=103)
    with pytest.raises(ConfigError, match=r"Clicks: cardinalities is 'many' .*; expected an integer"):
        Clicks(num_samples=1, cardinalities="many")  # type: ignore[arg-type]


def test_arguments_of_methods_are_checked() -> None:
    clicks = Clicks(num_samples=10)
    with pytest.raises(ConfigError, match="Clicks: batch_size is 0; expected an integer from 1 to"):
        next(clicks.batches(0))
    with pytest.raises(ConfigError, match="Clicks: num_samples is 11; expected an integer from 0 to 10"):
        clicks.best_metrics(11)
