"""Iterables: batches and samples in every accepted form, TorchRec's by their methods, and invalid items."""

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

import clicks
from clicks import OPTIONS, bags_of, expected, make, read
from satrap.config.columns import IdColumn, LabelColumn
from satrap.data.inputs import Inputs, Position
from satrap.data.iterable import IterableSource
from satrap.errors import ConfigError, SourceError


class Jagged:
    """The part of TorchRec's KeyedJaggedTensor that Satrap reads."""

    def __init__(self, bags: dict[str, list[list[int]]], weights: bool = False) -> None:
        flat = [bag for each in bags.values() for bag in each]
        self._keys = list(bags)
        self._values = torch.tensor([i for bag in flat for i in bag], dtype=torch.int64)
        self._offsets = torch.tensor([0, *np.cumsum([len(bag) for bag in flat])], dtype=torch.int32)
        self._weights = torch.arange(len(self._values)) / 2 if weights else None

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def offsets(self) -> torch.Tensor:
        return self._offsets

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights


BAGS = {"a": [[1], [], [2, 3]], "b": [[4, 5], [-6], [7]]}


def test_batches_of_columns_keep_their_sizes() -> None:
    samples = make(90, 0)
    items = [samples[:40], samples[40:41], samples[41:]]
    columns = [{name: [s[name] for s in item] for name in clicks.SCHEMA.names} for item in items]
    batches = list(IterableSource(columns, **OPTIONS).batches(clicks.FEATURES))
    assert [inputs.batch_size for inputs in batches] == [40, 1, 49]
    assert [s for inputs in batches for s in clicks.samples_in(inputs)] == [expected(sample) for sample in samples]
    again = IterableSource(lambda: iter(columns), batch_size=32, epochs=2, **OPTIONS)
    assert read(again) == [expected(sample) for sample in samples] * 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_are_collected_into_batches(shuffle: bool) -> None:
    samples = make(5000, 0)  # more than are converted together
    data = IterableSource(samples, samples=True, batch_size=64, shuffle=shuffle, **OPTIONS)
    found, expected_samples = read(data), [expected(sample) for sample in samples]
    assert sorted(found) == sorted(expected_samples) and (found == expected_samples) is not shuffle
    ranks = [s for rank in range(3) for s in read(data, rank=rank, world_size=3)]
    assert sorted(ranks) == sorted(expected_samples)
    batches = list(data.batches(clicks.FEATURES))
    rest = list(data.batches(clicks.FEATURES, position=batches[70].position))
    assert [s for b in rest for s in clicks.samples_in(b)] == [s for b in batches[71:] for s in clicks.samples_in(b)]


def test_whole_batches_are_split_over_ranks_and_resumed() -> None:
    items = [{"a": np.arange(i, i + n)} for i, n in ((0, 3), (10, 1), (20, 0), (30, 2), (40, 4))]
    data = IterableSource(items, epochs=2)
    ranks = [[inputs.values.tolist() for inputs in data.batches(["a"], rank=rank, world_size=2)] for rank in range(2)]
    assert ranks == [[[0, 1, 2], [40, 41, 42, 43]] * 2, [[10], [30, 31]] * 2]
    whole = list(data.batches(["a"]))
    for i, inputs in enumerate(whole):
        rest = [each.values.tolist() for each in data.batches(["a"], position=inputs.position)]
        assert rest == [each.values.tolist() for each in whole[i + 1 :]]


@pytest.mark.parametrize(
    "column",
    [
        [3, 2**64 - 1],
        np.array([3, -1]),
        np.array([3, -1], np.int8),
        torch.tensor([3, -1]),
        pa.array([3, 2**64 - 1], pa.uint64()),
        pd.Series([3, -1], index=[7, 8]),
        pl.Series([3, -1]),
        (np.array([3, -1]), np.array([0, 1, 2])),
        (torch.tensor([3, -1]), torch.tensor([0, 1, 2])),
        np.array([[3], [-1]]),
        [[3], [2**64 - 1]],
        np.array([np.array([3]), np.array([-1])], object),
    ],
    ids=lambda column: f"{type(column).__module__}.{type(column).__name__}",
)
def test_every_kind_of_column(column: Any) -> None:
    (inputs,) = IterableSource([{"a": column}]).batches(["a"])
    assert bags_of(inputs) == [[[3], [2**64 - 1]]]


def test_values_offsets_and_weights() -> None:
    ids, offsets, weights = np.array([1, 2, 3], np.uint64), np.array([0, 2, 2, 3]), np.array([0.5, 1, 2], np.float32)
    (inputs,) = IterableSource([{"a": (ids, offsets, weights), "b": [7, 8, 9]}]).batches(["a", "b"])
    assert bags_of(inputs) == [[[1, 2], [], [3]], [[7], [8], [9]]]
    assert bags_of(inputs, inputs.weights) == [[[0.5, 1], [], [2]], [[1], [1], [1]]]


# -- TorchRec ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["alone", "tuple", "batch"])
def test_keyed_jagged_tensors(form: str) -> None:
    jagged, dense, label = Jagged(BAGS), torch.arange(6.0).reshape(3, 2), torch.tensor([1, 0, 1])
    item: Any = {
        "alone": jagged,
        "tuple": (dense, jagged, label),
        "batch": SimpleNamespace(dense_features=dense, sparse_features=jagged, labels=label),
    }[form]
    (inputs,) = IterableSource([item], ids={"c": "a"}).batches(["b", "c"])
    assert bags_of(inputs) == [[[4, 5], [2**64 - 6], [7]], [[1], [], [2, 3]]]
    assert inputs.batch_size == 3 and inputs.weights is None
    if form == "alone":
        assert inputs.dense is None and inputs.label is None
    else:
        assert inputs.dense is not None and inputs.dense.tolist() == dense.tolist()
        assert inputs.label is not None and inputs.label.tolist() == [1, 0, 1]
    (inputs,) = IterableSource([Jagged(BAGS, weights=True)]).batches(["b"])
    assert bags_of(inputs, inputs.weights) == [[[1.5, 2], [2.5], [3]]]


def test_keyed_jagged_tensors_are_cut_to_the_batch_size() -> None:
    data = IterableSource([Jagged(BAGS)] * 4, batch_size=5)
    batches = list(data.batches(["a", "b"]))
    assert [inputs.batch_size for inputs in batches] == [5, 5, 2]
    found = [list(map(list, zip(*bags_of(inputs), strict=True))) for inputs in batches]
    expected_samples = [[[1], [4, 5]], [[], [2**64 - 6]], [[2, 3], [7]]] * 4
    assert [sample for each in found for sample in each] == expected_samples


# -- Inputs ------------------------------------------------------------------------------------------------------------


def test_inputs_are_passed_on_unchanged() -> None:
    values, offsets = np.arange(6, dtype=np.uint64), np.array([0, 1, 3, 3, 6])
    weights, dense = np.arange(6, dtype=np.float32), np.ones((2, 3), np.float32)
    for item in (
        Inputs(names=("a", "b"), values=values, offsets=offsets, weights=weights, batch_size=2, dense=dense),
        Inputs(names=("a", "b"), values=values[:4], batch_size=2, label=np.array([0, 1], np.float32)),
        Inputs(names=("a", "b"), values=values[:4], batch_size=2, label=np.zeros((2, 2), np.float32)),
        Inputs(names=("a", "b"), values=values[:0], batch_size=2, offsets=np.zeros(5, np.int64), extra={"x": [1, 2]}),
    ):
        (found,) = IterableSource([item], extra=tuple(item.extra)).batches(["a", "b"])
        for name in ("values", "offsets", "weights", "dense", "label"):
            one, other = getattr(item, name), getattr(found, name)
            assert (one is None) == (other is None) and np.array_equal(one, other), name
        assert (found.names, found.batch_size) == (item.names, 2)
        assert {name: column.to_pylist() for name, column in found.extra.items()} == item.extra
        (swapped,) = IterableSource([item], extra=tuple(item.extra)).batches(["b"])
        assert bags_of(swapped) == bags_of(item)[1:]


def generate_inputs(sizes: list[int], *, flat: bool = True, bags: bool = True) -> list[Inputs]:
    """Return items of two features. The id of `b` identifies a sample; its label and dense number derive from it."""
    items, first = [], 0
    for size in sizes:
        own = np.arange(first, first + size)
        lengths = np.concatenate([own % 3 if bags else np.ones(size, np.int64), np.ones(size, np.int64)])
        label = (own % 2).astype(np.float32)
        items.append(
            Inputs(
                names=("a", "b"),
                values=np.concatenate([np.repeat(own, lengths[:size]) + 1000, own]).astype(np.uint64),
                offsets=np.append(0, np.cumsum(lengths)) if bags else None,
                batch_size=size,
                dense=own[:, None].astype(np.float32),
                label=label if flat else label[:, None],
                position=Position(7, 7, 7),  # its position in another source has no meaning here
                extra={"x": own.tolist()},
            )
        )
        first += size
    return items


def content_of(inputs: Inputs) -> tuple[Any, ...]:
    assert inputs.dense is not None and inputs.label is not None
    return inputs.position, inputs.label.shape, bags_of(inputs), inputs.dense.tolist(), inputs.label.tolist()


def rows_of(batches: list[Inputs]) -> list[tuple[Any, ...]]:
    """Return the samples of batches, one by one."""
    found = []
    for inputs in batches:
        assert inputs.dense is not None and inputs.label is not None
        a, b = bags_of(inputs)
        x = inputs.extra["x"].to_pylist()
        found += list(zip(x, a, b, inputs.dense.ravel().tolist(), inputs.label.ravel().tolist(), strict=True))
    return found


def expected_rows(n: int) -> list[tuple[Any, ...]]:
    return [(i, [i + 1000] * (i % 3), [i], float(i), float(i % 2)) for i in range(n)]


SIZES = [3, 1, 0, 5, 4]


@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_every_kind_of_iterable_passes_on_the_same_inputs(flat: bool, bags: bool) -> None:
    items = generate_inputs(SIZES, flat=flat, bags=bags)
    forms: list[Any] = [items, tuple(items), iter(items), (each for each in items), lambda: iter(items)]
    found = [list(IterableSource(form).batches(["a", "b"])) for form in forms]
    for batches in found:
        assert list(map(content_of, batches)) == list(map(content_of, found[0]))
        filled = [item for item in items if item.batch_size]
        for inputs, item in zip(batches, filled, strict=True):
            assert inputs.values is item.values and inputs.label is item.label and inputs.extra == item.extra
    assert [inputs.position for inputs in found[0]] == [
        Position(0, 0, number, sample, end=1) for number, sample in ((1, 3), (2, 4), (3, 9), (4, 13))
    ]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_inputs_are_cut_to_the_batch_size_and_permuted(size: int, flat: bool, shuffle: bool) -> None:
    data = IterableSource(generate_inputs(SIZES, flat=flat), batch_size=size, shuffle=shuffle, extra="x", epochs=2)
    batches = list(data.batches(["a", "b"]))
    epochs = [
        [inputs for inputs in batches if inputs.position is not None and inputs.position.epoch == e] for e in (0, 1)
    ]
    for epoch in epochs:
        assert sorted(rows_of(epoch)) == expected_rows(13)
        assert (rows_of(epoch) == expected_rows(13)) is not shuffle
        sizes = [inputs.batch_size for inputs in epoch]
        assert sum(sizes) == 13 and set(sizes[:-1]) <= {size}
    assert (rows_of(epochs[0]) == rows_of(epochs[1])) is not shuffle
    for inputs in batches:
        assert inputs.label is not None and inputs.label.ndim == (1 if flat else 2)
    for i, inputs in enumerate(batches):
        rest = list(data.batches(["a", "b"], position=inputs.position))
        assert list(map(content_of, rest)) == list(map(content_of, batches[i + 1 :]))


@pytest.mark.parametrize("flat", [True, False])
def test_resuming_within_an_item_yields_the_rest_of_it(flat: bool) -> None:
    data = IterableSource(generate_inputs(SIZES, flat=flat), extra="x")
    for inputs in data.replace(batch_size=2).batches(["a", "b"]):
        assert inputs.position is not None
        batches = list(data.batches(["a", "b"], position=inputs.position))
        assert rows_of(batches) == expected_rows(13)[inputs.position.sample :]
        assert {each.label.ndim for each in batches if each.label is not None} <= {1 if flat else 2}


def test_inputs_that_are_not_complete_batches_are_converted() -> None:
    """They have another order of features, offsets of a slice, other types, or read-only memory."""
    (item,) = generate_inputs([4], flat=False)
    assert item.offsets is not None and item.dense is not None
    read_only = item.values.copy()
    read_only.flags.writeable = False
    for changes in (
        {"values": np.append(np.append(9, item.values), 9).astype(np.uint64), "offsets": item.offsets + 1},
        {"values": item.values.astype(np.int64), "offsets": item.offsets.astype(np.int32)},
        {"values": np.repeat(item.values, 2)[::2], "dense": np.asfortranarray(np.repeat(item.dense, 2, 1))[:, :1]},
        {"values": read_only, "dense": item.dense.astype(np.float64)},
        {"values": torch.from_numpy(item.values.view(np.int64)), "label": torch.from_numpy(item.label)},
        {"names": list(item.names)},
    ):
        (found,) = IterableSource([dataclasses.replace(item, **changes)]).batches(["a", "b"])
        (expected_inputs,) = IterableSource([item]).batches(["a", "b"])
        assert content_of(found) == content_of(expected_inputs) and found.values.dtype == np.uint64
        assert found.values.flags.writeable and not np.shares_memory(found.values, item.values)
    (found,) = IterableSource([item], extra="x").batches(["b", "a"])
    assert bags_of(found) == bags_of(item)[::-1] and found.label is not None and found.label.shape == (4, 1)
    (found,) = IterableSource([item], ids={"a": "b", "b": "a"}).batches(["a", "b"])
    assert bags_of(found) == bags_of(item)[::-1]


def test_an_items_label_keeps_its_shape_and_a_declared_label_is_flat() -> None:
    jagged, column = Jagged(BAGS), torch.tensor([[1.0], [0.0], [1.0]])
    for size in (None, 2):
        for label, dims in ((column, 2), (column[:, 0], 1)):
            items = [(None, jagged, label)] * 2
            for inputs in IterableSource(items, batch_size=size).batches(["a"]):
                assert inputs.label is not None and inputs.label.ndim == dims
        columns = [{"a": [1, 2, 3], "y": [1.0, 0.0, 1.0]}] * 2
        for declared, dims in (("y", 1), (["y"], 2)):
            for inputs in IterableSource(columns, label=declared, batch_size=size).batches(["a"]):
                assert inputs.label is not None and inputs.label.ndim == dims
    mixed = generate_inputs([2, 2]) + generate_inputs([2], flat=False)
    assert [content_of(inputs)[1] for inputs in IterableSource(mixed).batches(["a"])] == [(2,), (2,), (2, 1)]
    batches = IterableSource(mixed, batch_size=3).batches(["a"])
    next(batches)
    with pytest.raises(
        SourceError, match=r"of items with labels \[n\] and of items with labels \[n, 1\]; give all items"
    ):
        next(batches)


def test_inputs_are_released() -> None:
    """No reference to an item remains once the next is taken; this needs no garbage collector."""
    alive: list[weakref.ref[Any]] = []

    def items() -> Iterator[Inputs]:
        for item in range(10):
            values = np.full(4, item, np.uint64)
            alive.append(weakref.ref(values))
            yield Inputs(names=("a",), values=values, batch_size=4)
            del values

    gc.disable()
    try:
        batches = IterableSource(items()).batches(["a"])
        for _ in range(10):
            next(batches)
            assert sum(each() is not None for each in alive) <= 2
        assert next(batches, None) is None
        assert not any(each() is not None for each in alive)
    finally:
        gc.enable()


# -- iteration ---------------------------------------------------------------------------------------------------------


def test_items_are_taken_in_the_callers_thread_one_at_a_time() -> None:
    taken = 0

    def items() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for _ in range(10):
            assert threading.current_thread() is threading.main_thread()
            taken += 1
            yield {"a": [taken]}

    for i, inputs in enumerate(IterableSource(items).batches(["a"]), 1):
        assert taken == i and inputs.values.tolist() == [i]


def test_an_iterable_may_reuse_its_arrays() -> None:
    def items() -> Iterator[Any]:
        column, weights, offsets = np.zeros(3, np.int64), np.zeros(3, np.float32), np.array([0, 1, 2, 3])
        for i in range(5):
            column[:], weights[:] = range(3 * i, 3 * i + 3), i
            yield {"a": (column, offsets, weights), "b": column}
            column[:], weights[:], offsets[1] = -1, -1, 3
            offsets[1] = 1

    (inputs,) = IterableSource(items, batch_size=100).batches(["a", "b"])
    assert inputs.values.tolist() == [*range(15), *range(15)]
    assert inputs.weights is not None and inputs.weights[:15].tolist() == [i for i in range(5) for _ in range(3)]

    def whole() -> Iterator[Inputs]:
        values = np.zeros(3, np.uint64)
        for i in range(5):
            values[:] = range(3 * i, 3 * i + 3)
            yield Inputs(names=("a",), values=values, batch_size=3)

    for shuffle in (False, True):
        found = [inputs.values for inputs in IterableSource(whole, batch_size=2, shuffle=shuffle).batches(["a"])]
        assert sorted(np.concatenate(found).tolist()) == list(range(15))


def test_an_iterator_can_be_read_once() -> None:
    data = IterableSource(iter([{"a": [1]}, {"a": [2]}]))
    assert [inputs.values.tolist() for inputs in data.batches(["a"])] == [[1], [2]]
    with pytest.raises(SourceError, match="this list_iterator was read before; give a list, or a function"):
        data.batches(["a"])


def test_an_error_of_the_iterable_reaches_the_caller() -> None:
    def items() -> Iterator[dict[str, Any]]:
        yield {"a": [1]}
        raise ZeroDivisionError("mine")

    batches = IterableSource(items).batches(["a"])
    next(batches)
    with pytest.raises(ZeroDivisionError, match="mine"):
        next(batches)


INPUTS = Inputs(names=("a",), values=np.arange(2, dtype=np.uint64), batch_size=2)


def malformed(**changes: Any) -> Inputs:
    return dataclasses.replace(INPUTS, **changes)


class Uneven(Jagged):
    def offsets(self) -> torch.Tensor:
        return super().offsets()[:-1]


class Floats(Jagged):
    def values(self) -> torch.Tensor:
        return super().values() / 2


INVALID_ITEMS: list[tuple[Any, dict[str, Any], str]] = [
    ([3], {}, "item 0 is an int; expected a dict of columns, Arrow data, an Inputs, or"),
    ([{"a": [1]}, {"b": [1]}], {}, r"item 1 has no column 'a' \(feature 'a'\); known are 'b'"),
    ([{"a": [1, 2], "x": [1.0]}], {"dense": "x"}, "item 0 has columns of different lengths"),
    ([{"a": ([1],)}], {}, r"item 0: feature 'a' has 1 arrays; expected \(values, offsets\[, weights\]\)"),
    ([{"a": ["x", 1]}], {}, "item 0: column 'a' is a list that cannot be read"),
    ([{"a": [1], "y": [None]}], {"label": "y"}, "item 0, sample 0: the label, column 'y', is missing"),
    ([{"a": [1, 2], "y": (0, 1)}], {"label": "y"}, "item 0: column 'y' is a tuple that cannot be read"),
    ([{"a": [1, 2, 3], "y": (0, 1, 1)}], {"label": "y"}, "item 0: column 'y' has 3 arrays; expected .values, offsets"),
    ([Jagged({"b": [[1]]})], {}, "item 0 has no feature 'a'; known are 'b'"),
    ([Jagged({})], {}, "item 0 has no feature 'a'; it has none"),
    ([Uneven(BAGS)], {}, "item 0: 6 offsets of 2 keys; expected one batch size for all keys"),
    ([Floats(BAGS)], {}, "item 0: values are float32; expected integers"),
    ([Jagged(BAGS)], {"dense": "x"}, "item 0 contains its own dense; leave out dense="),
    ([Jagged(BAGS)], {"extra": "x"}, "item 0: a KeyedJaggedTensor has no column 'x'; leave out extra"),
    ([(torch.zeros(2, 1), Jagged(BAGS), None)], {}, "item 0: rows of dense are 2, expected 3"),
    ([malformed(batch_size=3)], {}, r"item 0: values have the shape \(2,\); expected \(3,\) for 1 features of 3"),
    ([malformed(offsets=np.array([0, 1]))], {}, r"item 0: offsets have the shape \(2,\); expected \(3,\)"),
    ([malformed(offsets=np.array([0, 2, 1]))], {}, "item 0: feature 0: offsets must rise within its 2 ids"),
    ([malformed(offsets=np.array([0, 1, 3]))], {}, "item 0: feature 0: offsets must rise within its 2 ids"),
    ([malformed(weights=np.ones(3, np.float32))], {}, r"item 0: weights have the shape \(3,\); expected \(2,\)"),
    ([malformed(label=np.ones(1, np.float32))], {}, "item 0: rows of label are 1, expected 2"),
    ([malformed(dense=np.ones((3, 1), np.float32))], {}, "item 0: rows of dense are 3, expected 2"),
    ([malformed(values=np.ones(2))], {}, "item 0: values are float64; expected integers"),
    ([malformed(offsets=np.array([0.0, 1, 2]))], {}, "item 0: offsets are float64; expected integers"),
    ([malformed(extra={"x": [1]})], {"extra": "x"}, "extra 'x' has 1 values; expected one for each of 2 samples"),
    ([INPUTS], {"label": "x"}, "item 0 contains its own label"),
    ([INPUTS], {"weights": {"a": "w"}}, "item 0 contains its own weights"),
    ([INPUTS], {"ids": {"a": "b"}}, "item 0 has no feature 'b'; known are 'a'"),
    ([INPUTS], {"extra": "x"}, r"item 0 has no extra 'x'; it has \[\]"),
    ([3], {"samples": True, "batch_size": 2}, r"item 0 is 3 \(int\); expected a dict, one sample"),
    ([{"b": 1}], {"samples": True, "batch_size": 2}, "items from 0 on has no column 'a'"),
    ([{"a": 1, "y": 1}, {"a": 2}], {"samples": True, "batch_size": 2, "label": "y"}, "item 1: the label, column 'y'"),
]


@pytest.mark.parametrize(("items", "options", "message"), INVALID_ITEMS)
def test_invalid_items_are_refused_with_their_numbers(items: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        list(IterableSource(items, **options).batches(["a"]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: IterableSource(3), r"found 3 \(int\); expected an iterable, or a function that returns one"),
        (
            lambda: IterableSource("clicks/"),
            r"found 'clicks/' \(str\); expected batches. To read files, use satrap.Parquet",
        ),
        (lambda: IterableSource("a.json"), "JSON, TFRecord or Criteo; parse others to dicts, one for each sample"),
        (lambda: IterableSource(PurePath("clicks")), "expected batches. To read files, use satrap.Parquet"),
        (lambda: IterableSource(iter([]), epochs=2), "epochs is 2 and a list_iterator can be read once; give a list"),
        (lambda: IterableSource([], shuffle=True), "batch_size is None and shuffle or samples is True; set batch_size"),
        (lambda: IterableSource([], samples=True), "batch_size is None and shuffle or samples is True"),
        (lambda: IterableSource([], samples=1, batch_size=1), r"samples is 1 \(int\); expected True or False"),  # type: ignore[arg-type]
    ],
)
def test_invalid_declarations_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_columns_check_themselves_and_have_a_dict_form() -> None:
    for column in (
        IdColumn("a", missing=-1, separator="|", weights="w"),
        LabelColumn("y", values={"a": 1.0}, missing=0),
    ):
        assert type(column).from_dict(column.to_dict()) == column
    assert IdColumn(missing=-1).missing == 2**64 - 1
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: IdColumn("a", kind="int"), "id column 'a': kind is 'int' .*; expected one of 'string', 'integer'"),  # type: ignore[arg-type]
        (lambda: IdColumn(hash=1), r"IdColumn: hash is 1 \(int\)"),  # type: ignore[arg-type]
        (lambda: IdColumn(kind="string", hash=True), "hash=True is for integers; strings are always hashed"),
        (lambda: IdColumn(separator="::"), "separator is '::' .*; expected one ASCII character, e.g. '|'"),
        (lambda: IdColumn(missing=0.5), "missing is 0.5"),  # type: ignore[arg-type]
        (lambda: IdColumn(weights=""), "IdColumn: the column is ''"),
        (lambda: LabelColumn(""), "LabelColumn: the column is ''"),
        (lambda: LabelColumn("y", values={}), "label column 'y': values is {} .*; expected strings and numbers"),
        (lambda: LabelColumn("y", values={"a": 1}, true="a"), "expected strings and numbers, without `true`"),
        (lambda: LabelColumn("y", values={"a": "b"}), r"values\['a'\] is 'b'"),  # type: ignore[dict-item]
        (lambda: LabelColumn("y", true=3), "label column 'y': true is 3"),  # type: ignore[arg-type]
        (lambda: LabelColumn("y", true="a", above=1), "above is for numbers, values and true are for strings"),
        (lambda: LabelColumn("y", above=float("nan")), "above is nan"),
        (lambda: LabelColumn("y", missing="skip"), "missing is 'skip' .*; expected one of 'refuse', 'drop'"),  # type: ignore[arg-type]
        (lambda: LabelColumn("y", missing=float("inf")), "missing is inf"),
    ]
    for call, message in wrong:
        with pytest.raises(ConfigError, match=message):
            call()
