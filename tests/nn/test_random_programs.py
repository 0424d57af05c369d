"""Random programs over converted modules have the losses and rows of torch's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import satrap
from loop import take_step

LR = 0.02


class Model(torch.nn.Module):
    def __init__(self, num_rows: int, dim: int, padding_idx: int | None, mode: str, last_offset: bool) -> None:
        super().__init__()
        self.one = torch.nn.Embedding(num_rows, dim, padding_idx=padding_idx)
        self.bag = torch.nn.EmbeddingBag(
            num_rows, dim, mode=mode, padding_idx=padding_idx, include_last_offset=last_offset
        )
        self.linear = torch.nn.Linear(dim, 1)


def twice(model: Model, ids: Tensor) -> Tensor:
    """Return a gradient by rows, whose own backward pass reaches them a second time."""
    rows = model.one(ids[:3])
    loss = (model.linear(rows) ** 3).sum()
    gradients: tuple[Tensor, ...] = torch.autograd.grad(loss, rows, create_graph=True)
    return gradients[0]


def without_gradient(model: Model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        rows: Tensor = model.one(ids[:3])
    return rows


def ragged(model: Model, ids: Tensor) -> Tensor:
    offsets = [0, 2, 2, 7] if model.bag.include_last_offset else [0, 2, 2]
    rows: Tensor = model.bag(ids[:7], torch.tensor(offsets))
    return rows


def weighted(model: Model, ids: Tensor) -> Tensor:
    weights = ids[:12].reshape(3, 4).float() / 7 if model.bag.mode == "sum" else None
    rows: Tensor = model.bag(ids[:12].reshape(3, 4), per_sample_weights=weights)
    return rows


def changed_in_place(model: Model, ids: Tensor) -> Tensor:
    """Return a product of the same rows, of which one and a part of another are changed in place."""
    first, second, third = (model.one(ids[:6].reshape(3, 2)) for _ in range(3))
    first *= 1.5
    second[1:] += first[1:]
    rows: Tensor = first * second * third
    return rows


def beside_changed(model: Model, ids: Tensor) -> Tensor:
    """Return a product of rows, where other rows are changed in place before its backward pass reads these."""
    rows: Tensor = model.one(ids[:3])
    product = rows * rows
    changed: Tensor = model.one(ids[3:6]).relu_() + model.bag(ids[:3].reshape(3, 1)).mul_(0.5)
    return product + changed


USES: list[Callable[[Model, Tensor], Tensor]] = [
    lambda model, ids: model.one(ids[:6].reshape(3, 2)),
    lambda model, ids: model.one(ids[0]),
    lambda model, ids: model.one(ids.reshape(4, 6).t()[::2, 1:]),
    lambda model, ids: model.one(ids[:0].reshape(0, 3)),
    lambda model, ids: model.one(ids[:3]).detach(),
    *(twice, without_gradient, ragged, weighted, changed_in_place, beside_changed),
]


def some_ids(ids: Tensor, rng: np.random.Generator) -> list[Tensor]:
    """Return parts of the ids, among them some that uses ask for."""
    parts = [ids[:3], ids[3:6], ids[:6], ids[:6], ids[:7], ids[:12], ids.reshape(4, 6).t()[::2, 1:], ids[:0]]
    return [part for part in parts if rng.random() < 0.6]


Program = list[tuple[Callable[[Model, Tensor], Tensor], Tensor]]


def losses_of(model: Model, optimizer: torch.optim.Optimizer, programs: Iterable[Program]) -> list[float]:
    """Take a step of each program."""
    losses = []
    for program in programs:
        parts = [model.linear(use(model, ids)) for use, ids in program]
        losses.append(take_step(torch.stack([torch.tanh(part).square().sum() for part in parts]).sum(), optimizer))
    return losses


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("run", range(12))
def test_a_random_program(run: int, prefetched: bool, rng: np.random.Generator) -> None:
    num_rows, dim = int(rng.integers(2, 20)), int(rng.integers(1, 6))
    padding = [None, 0, -1, num_rows - 1][int(rng.integers(4))]
    torch.manual_seed(run)
    plain, converted = (
        Model(num_rows, dim, padding, mode, last_offset)
        for mode, last_offset in [(str(rng.choice(["sum", "mean", "max"])), bool(rng.random() < 0.3))] * 2
    )
    converted.load_state_dict(plain.state_dict())
    adaptive = run % 2 == 1
    embeddings = satrap.convert(
        converted, satrap.Adagrad(lr=LR, eps=1e-10) if adaptive else satrap.SGD(lr=LR), weights=True
    )
    make: Any = torch.optim.Adagrad if adaptive else torch.optim.SGD
    programs: list[Program] = []
    for _ in range(6):
        kind = torch.int32 if rng.random() < 0.3 else torch.int64
        programs.append(
            [(USES[i], torch.tensor(rng.integers(0, num_rows, 24)).to(kind)) for i in rng.integers(0, len(USES), 3)]
        )
    loader: Iterable[Program] = programs
    if prefetched:
        loader = embeddings.prefetch(
            programs,
            lambda program: {
                name: [part for _, ids in program for part in some_ids(ids, rng)] for name in ("one", "bag")
            },
        )
    expected = losses_of(plain, make(plain.parameters(), lr=LR), programs)
    found = losses_of(converted, embeddings.optimizer(make(converted.parameters(), lr=LR)), loader)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, module in (("one", plain.one), ("bag", plain.bag)):
        trained = np.delete(np.arange(num_rows), [] if padding is None else padding % num_rows).astype(np.uint64)
        rows = embeddings.tables[name].lookup(trained, train=False)
        np.testing.assert_allclose(rows, module.weight.detach().numpy()[trained.astype(int)], rtol=1e-4, atol=1e-5)
    embeddings.close()
