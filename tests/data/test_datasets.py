"""Hugging Face datasets as frames: their selection is honoured, and their files are not loaded into memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import satrap

datasets = pytest.importorskip("datasets")
N = 1000


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    """A dataset in files, as `load_dataset` returns."""
    columns = {
        "user": [f"user {i % 7}" for i in range(N)],
        "item": list(range(N)),
        "history": [list(range(i % 4)) for i in range(N)],
        "embedding": [[float(i), -1.0] for i in range(N)],
        "click": [i % 3 == 0 for i in range(N)],
    }
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "clicks", num_shards=3)
    return datasets.load_from_disk(tmp_path / "clicks")


@pytest.mark.parametrize(
    "selected",
    [
        lambda data: data,
        lambda data: data.select(range(100, 900)),
        lambda data: data.select(range(900, 100, -7)),
        lambda data: data.filter(lambda row: row["item"] % 5 == 0),
        lambda data: data.shuffle(seed=3),
        lambda data: data.shuffle(seed=3).select(range(50)).with_format("numpy"),
        lambda data: datasets.concatenate_datasets([data.select([5, 3]), data.select([])]),
        lambda data: data.select([]),
    ],
)
@pytest.mark.parametrize("num_threads", [0, 2])
def test_the_selection_of_a_dataset_is_read(selected: Any, num_threads: int, dataset: Any) -> None:
    data = selected(dataset)
    source = satrap.Frame(
        data,
        dense=satrap.DenseColumn("embedding", width=2),
        label="click",
        batch_size=64,
        block_rows=50,
        num_threads=num_threads,
    )
    items = [int(i) for i in data.with_format(None)["item"]]
    batches = list(source.batches(["item"]))
    assert [int(i) for inputs in batches for i in inputs.values] == items
    assert [x for inputs in batches for x in np.asarray(inputs.dense).tolist()] == [[float(i), -1.0] for i in items]
    assert [x for inputs in batches for x in np.asarray(inputs.label).tolist()] == [float(i % 3 == 0) for i in items]
    parts = [list(source.batches(["item"], rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(int(i) for part in parts for inputs in part for i in inputs.values) == sorted(items)


def test_texts_and_lists_of_a_dataset(dataset: Any) -> None:
    data = satrap.Frame(dataset.select([8, 3, 2]))
    (inputs,) = data.batches(["user", "history"])
    assert inputs.values.tolist() == [
        *satrap.data.hashing.hash_strings(["user 1", "user 3", "user 2"]).tolist(), *[0, 1, 2, 0, 1]
    ]  # fmt: skip
    assert inputs.offsets is not None and np.diff(inputs.offsets).tolist() == [1, 1, 1, 0, 3, 2]


def test_only_required_columns_and_ranges_of_rows_are_read(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset is never converted as a whole."""
    requested = []
    original = datasets.Dataset.__getitem__

    def recorded(self: Any, key: Any) -> Any:
        requested.append((self.column_names, key.stop - key.start))
        return original(self, key)

    monkeypatch.setattr(datasets.Dataset, "__getitem__", recorded)
    list(satrap.Frame(dataset.shuffle(seed=1), block_rows=100, num_threads=0).batches(["item"]))
    assert requested == [(["item"], 0), *[(["item"], 100)] * 10]


def test_datasets_that_are_no_frames_are_refused(dataset: Any) -> None:
    splits = datasets.DatasetDict({"train": dataset, "test": dataset})
    with pytest.raises(
        satrap.ConfigError,
        match=r"found a DatasetDict of \['train', 'test'\]; expected one split: give data\['train'\]",
    ):
        satrap.Frame(splits)
    streamed = dataset.to_iterable_dataset()
    with pytest.raises(satrap.ConfigError, match=r"found an IterableDataset, .*IterableSource\(data, samples"):
        satrap.Frame(streamed)
    source = satrap.IterableSource(streamed, samples=True, batch_size=100, label="click")
    assert [int(i) for inputs in source.batches(["item"]) for i in inputs.values] == list(range(N))
    with pytest.raises(satrap.SourceError, match=r"no column 'usr' \(feature 'usr'\); the nearest known one is 'user'"):
        list(satrap.Frame(dataset).batches(["usr"]))
