"""A model of a `Worker` in plain loops, for its tests.

`pooled` makes block and sequences of the rows that the tables hold; `summed` takes gradients apart into one for each
id in a bag, and sums those of one id in order of appearance, as `torch.index_add_` does; `follow` trains a worker and
judges each row after each step by one_row.py, which asks torch. Each step reads the rows again from the store, so that
differences of an ulp never add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from one_row import F32, assert_step, fma
from satrap.config.features import Features
from satrap.config.tables import Feature, Pooling
from satrap.data.inputs import Inputs
from satrap.worker.worker import LookupResult

UNIVERSE = np.array([*range(12), 2**63, 2**64 - 1], np.uint64)
Rows = dict[str, dict[int, F32]]  # for each table: the values of each id


@dataclass
class Bags:
    """A batch as lists: bags[feature][sample] is a list of (id, weight)."""

    features: Features
    bags: list[list[list[tuple[int, np.float32]]]]

    @property
    def batch_size(self) -> int:
        return len(self.bags[0])

    def inputs(self, *, offsets: bool = True) -> Inputs:
        flat = [pair for feature in self.bags for bag in feature for pair in bag]
        lengths = [len(bag) for feature in self.bags for bag in feature]
        weighted = any(feature.weighted for feature in self.features.values())
        return Inputs(
            names=self.features.names,
            values=np.array([id_ for id_, _ in flat], np.uint64),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64) if offsets else None,
            weights=np.array([weight for _, weight in flat], np.float32) if weighted else None,
            batch_size=self.batch_size,
        )

    def real(self, index: int, sample: int) -> list[tuple[int, np.float32]]:
        """Returns the ids of a bag without padding."""
        padding = list(self.features.values())[index].padding_id
        return [pair for pair in self.bags[index][sample] if pair[0] != padding]

    def kept(self, index: int, sample: int) -> list[tuple[int, np.float32]]:
        """Returns the ids of a bag that are looked up."""
        feature, real = list(self.features.values())[index], self.real(index, sample)
        if feature.max_length is None or len(real) <= feature.max_length:
            return real
        return real[-feature.max_length :] if feature.keep == "last" else real[: feature.max_length]

    def longest(self, index: int) -> int:
        """Returns the most ids of a bag that are looked up."""
        return max((len(self.kept(index, sample)) for sample in range(self.batch_size)), default=0)

    def offsets(self, index: int) -> list[int]:
        """Returns where each bag of a jagged sequence begins, and where the last one ends."""
        return [0, *accumulate(len(self.kept(index, sample)) for sample in range(self.batch_size))]

    def cut(self) -> dict[str, int]:
        """Returns how many ids of each sequence are not looked up."""
        return {
            name: sum(len(self.real(i, s)) - len(self.kept(i, s)) for s in range(self.batch_size))
            for i, (name, feature) in enumerate(self.features.items())
            if feature.pooling == "none"
        }


def draw_bags(rng: np.random.Generator, features: Features, batch_size: int, *, single: bool = False) -> Bags:
    """Draws bags of all lengths, or of one id each, with many repeated ids."""
    most = [1 if single else int(rng.integers(1, 7)) for _ in features]
    return Bags(
        features,
        [
            [
                [
                    (int(rng.choice(UNIVERSE)), np.float32(rng.normal()) if rng.random() < 0.9 else np.float32(1))
                    for _ in range(1 if single else rng.integers(0, longest + 1))
                ]
                for _ in range(batch_size)
            ]
            for longest in most
        ],
    )


def divisor(pooling: Pooling, length: int) -> np.float32:
    match pooling:
        case "mean":
            return np.float32(length)
        case "sqrtn":
            return np.float32(np.sqrt(np.float32(length)))
    return np.float32(1)


def pool(feature: Feature, rows: Sequence[F32], weights: Sequence[np.float32]) -> F32:
    """Pools one bag: sums in order of appearance, then divides."""
    total = np.zeros(feature.table.dim, np.float32)
    for k, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        if not feature.weighted:
            total = row if k == 0 else total + row
        else:
            total = weight * row if k == 0 else fma(np.full_like(row, weight), row, total)
    result: F32 = total / divisor(feature.pooling, max(1, len(rows)))
    return result


def pooled(bags: Bags, rows: Rows) -> tuple[F32, dict[str, F32], dict[str, NDArray[np.bool_]]]:
    """Returns (block, sequences, masks)."""
    features = bags.features
    block = np.full((bags.batch_size, features.total_dim), np.nan, np.float32)
    sequences: dict[str, F32] = {}
    masks: dict[str, NDArray[np.bool_]] = {}
    for i, (name, feature) in enumerate(features.items()):
        if feature.pooling == "none":
            length = bags.longest(i) if feature.padded_length is None else feature.padded_length
            sequences[name] = np.zeros((bags.batch_size, length, feature.table.dim), np.float32)
            masks[name] = np.zeros((bags.batch_size, length), np.bool_)
        for s in range(bags.batch_size):
            pairs = bags.kept(i, s)
            found = [rows[feature.table.name][id_] for id_, _ in pairs]
            if feature.pooling == "none":
                for k, row in enumerate(found):
                    sequences[name][s, k], masks[name][s, k] = row, True
            else:
                columns = slice(features.columns[i], features.columns[i] + features.dims[i])
                block[s, columns] = pool(feature, found, [weight for _, weight in pairs])
        if feature.jagged:  # the rows of the padded form, one after another
            sequences[name] = sequences[name][masks.pop(name)]
    return block, sequences, masks


def summed(
    batches: Sequence[Bags], gradients: Sequence[tuple[F32 | None, dict[str, F32]]], scale: float
) -> dict[str, dict[int, F32]]:
    """Returns for each table and id with a gradient the sum, in order of appearance."""
    ids: dict[str, list[int]] = {}
    parts: dict[str, list[F32]] = {}
    for bags, (block, sequences) in zip(batches, gradients, strict=True):
        for i, (name, feature) in enumerate(bags.features.items()):
            for s in range(bags.batch_size):
                for k, (id_, weight) in enumerate(bags.kept(i, s)):
                    if feature.pooling == "none":
                        if name not in sequences:
                            continue
                        gradient = sequences[name][bags.offsets(i)[s] + k if feature.jagged else (s, k)]
                    else:
                        if block is None:
                            continue
                        gradient = block[s, bags.features.columns[i] :][: feature.table.dim]
                    gradient = gradient * np.float32(scale)
                    if feature.weighted:
                        gradient = gradient * weight
                    if feature.pooling != "none":
                        gradient = gradient / divisor(feature.pooling, len(bags.kept(i, s)))
                    ids.setdefault(feature.table.name, []).append(id_)
                    parts.setdefault(feature.table.name, []).append(gradient)
    return {table: _index_add(ids[table], parts[table]) for table in ids}


def _index_add(ids: list[int], gradients: list[F32]) -> dict[int, F32]:
    unique = list(dict.fromkeys(ids))
    index = torch.tensor([unique.index(id_) for id_ in ids])
    total = torch.zeros(len(unique), len(gradients[0])).index_add_(0, index, torch.from_numpy(np.stack(gradients)))
    return dict(zip(unique, total.numpy(), strict=True))


def read(worker: Any) -> dict[str, dict[int, tuple[F32, F32]]]:
    """Returns (values, state) of each table's rows of the universe."""
    found: dict[str, dict[int, tuple[F32, F32]]] = {}
    for name, store in worker.tables.items():
        rows = store.read(UNIVERSE)
        found[name] = {
            int(id_): (rows.values[i].copy(), rows.state[i].copy()) for i, id_ in enumerate(UNIVERSE) if rows.present[i]
        }
    return found


def assert_pooled(bags: Bags, looked: LookupResult, rows: dict[str, dict[int, tuple[F32, F32]]]) -> None:
    values = {table: {id_: row[0] for id_, row in each.items()} for table, each in rows.items()}
    block, sequences, masks = pooled(bags, values)
    np.testing.assert_array_equal(looked.block, block)
    assert looked.sequences.keys() == sequences.keys() == looked.masks.keys() | looked.offsets.keys()
    for i, (name, feature) in enumerate(bags.features.items()):
        if feature.pooling != "none":
            continue
        np.testing.assert_array_equal(looked.sequences[name], sequences[name])
        if feature.jagged:
            assert looked.offsets[name].tolist() == bags.offsets(i)
        else:
            np.testing.assert_array_equal(looked.masks[name], masks[name])


def draw_gradients(rng: np.random.Generator, looked: LookupResult) -> tuple[F32, dict[str, F32]]:
    def draw(like: F32) -> F32:
        gradients = rng.normal(size=like.shape).astype(np.float32)
        gradients[rng.random(like.shape) < 0.05] = 0.0
        return gradients

    return draw(looked.block), {name: draw(rows) for name, rows in looked.sequences.items()}


def update(
    worker: Any, looked: LookupResult, block: F32 | None, sequences: dict[str, F32] | None = None, **options: Any
) -> None:
    """Applies the gradients of one batch."""
    assert looked.ticket
    worker.update([looked.ticket], [block], [sequences or {}], **options)


def follow(
    worker: Any,
    rng: np.random.Generator,
    *,
    num_steps: int,
    accumulate: int = 1,
    scale: float = 1.0,
    batch_size: int = 6,
    **how: Any,
) -> None:
    """Trains with random bags and gradients; checks block, sequences and every row. Every second step of bags of one
    id goes without offsets."""
    cut = dict.fromkeys(worker.truncated, 0)
    for step in range(1, num_steps + 1):
        batches = [draw_bags(rng, worker.features, batch_size, **how) for _ in range(accumulate)]
        inputs = [bags.inputs(offsets=not how.get("single") or step % 2 == 0) for bags in batches]
        looked = [worker.lookup(each, step=step) for each in inputs]
        before = read(worker)
        for bags, each in zip(batches, looked, strict=True):
            assert_pooled(bags, each, before)
            cut = {name: count + cut[name] for name, count in bags.cut().items()}
        gradients = [draw_gradients(rng, each) for each in looked]
        tickets = [each.ticket for each in looked if each.ticket is not None]
        worker.update(tickets, [b for b, _ in gradients], [s for _, s in gradients], step=step, scale=scale)
        assert_stepped(worker, before, summed(batches, gradients, scale))
    assert worker.truncated == cut
    for store in worker.tables.values():
        store.check()


def assert_stepped(
    worker: Any,
    before: dict[str, dict[int, tuple[F32, F32]]],
    gradients: dict[str, dict[int, F32]],
) -> None:
    """Checks that rows with a gradient made one step, and the others none."""
    for name, rows in read(worker).items():
        table = worker.tables[name].table
        assert rows.keys() == before[name].keys()
        for id_, new in rows.items():
            gradient = gradients.get(name, {}).get(id_)
            if gradient is None:
                np.testing.assert_array_equal(np.concatenate(before[name][id_]), np.concatenate(new))
            else:
                assert_step(table.optimizer, table.optimizer.lr, before[name][id_], gradient, new, table.dtype)
