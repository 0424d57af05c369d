"""Synchronous training by a user's loop equals plain PyTorch: every pooling with every optimizer, for some steps.

The plain job keeps each row as a separate Parameter with a separate optimizer, so that a row which no sample uses is
not stepped; torch pools the rows and sums their gradients. Both jobs start with the same bits and must stay within the
float32 error of summing in another order. worker/test_bags.py compares the tables bit by bit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from one_row import closed_form, initial_state, reference_state, torch_optimizer
from satrap import SGD, Adagrad, Adam, AdamW, Embeddings, Feature, Ftrl, Inputs, RowWiseAdagrad, Table, Uniform

TABLES = ("item", "user")
DIM, NUM_IDS, SIZE, STEPS, LONGEST = 5, 12, 9, 6, 4
OPTIMIZERS = (
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adagrad(lr=0.1, initial_accumulator_value=0.1),
    Adam(lr=0.02, weight_decay=0.01),
    AdamW(lr=0.02, weight_decay=0.1),
    RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.1),
    Ftrl(lr=0.1, l1=0.001, l2=0.1),
)
POOLINGS: dict[str, Callable[[Table], Feature | Table]] = {
    "one id": lambda table: table,
    "sum": lambda table: table.bag("sum"),
    "mean": lambda table: table.bag("mean"),
    "sqrtn": lambda table: table.bag("sqrtn"),
    "weighted sum": lambda table: table.bag("sum", weighted=True),
    "weighted mean": lambda table: table.bag("mean", weighted=True),
    "sequence": lambda table: table.sequence(LONGEST - 1),  # shorter than the longest bag
    "two tables": lambda table: table.bag("mean"),  # and two features of the first
}


class OneRow(torch.optim.Optimizer):
    """Optimizers that torch lacks: row-wise Adagrad and FTRL-proximal by their papers, in double precision."""

    def __init__(self, row: Parameter, optimizer: RowWiseAdagrad | Ftrl) -> None:
        super().__init__([row], {})
        self.row, self.optimizer = row, optimizer
        self.kept: Any = initial_state(optimizer, row.detach().numpy(), optimizer.lr)

    def step(self, closure: Any = None) -> Any:
        if self.row.grad is None:
            return
        given = self.row.grad.numpy(), self.optimizer.lr
        values = self.row.detach().numpy()
        self.kept, _ = reference_state(self.optimizer, values, self.kept, *given)
        new, _ = closed_form(self.optimizer, values, self.kept, *given)
        with torch.no_grad():
            self.row.copy_(torch.from_numpy(new))


def plain_optimizer(row: Parameter, optimizer: Any) -> torch.optim.Optimizer:
    if isinstance(optimizer, RowWiseAdagrad | Ftrl):
        return OneRow(row, optimizer)
    return torch_optimizer(optimizer, row, optimizer.lr)


def batches(names: tuple[str, ...], *, bags: bool, weighted: bool) -> list[Inputs]:
    rng = np.random.default_rng(3)
    made = []
    for step in range(STEPS):
        size = SIZE if step < STEPS - 1 else 2  # the last batch is short
        count = len(names) * size
        lengths = rng.integers(0, LONGEST + 1, count) if bags else np.ones(count, np.int64)
        total = int(lengths.sum())
        made.append(
            Inputs(
                names=names,
                values=rng.integers(0, NUM_IDS, total, dtype=np.uint64),
                offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64) if bags else None,
                weights=rng.random(total, np.float32) if weighted else None,
                batch_size=size,
                dense=rng.standard_normal((size, 2)).astype(np.float32),
                label=rng.integers(0, 2, size).astype(np.float32),
            )
        )
    return made


def bag_of(inputs: Inputs, index: int) -> tuple[list[int], list[float]]:
    a, b = (index, index + 1) if inputs.offsets is None else (inputs.offsets[index], inputs.offsets[index + 1])
    weights = np.ones(b - a) if inputs.weights is None else inputs.weights[a:b]
    return [int(value) for value in inputs.values[a:b]], [float(weight) for weight in weights]


def pooled(rows: list[Parameter], inputs: Inputs, feature: Feature, index: int) -> Tensor:
    """Return one bag: [DIM], or for a sequence [LONGEST - 1, DIM]."""
    ids, weights = bag_of(inputs, index)
    if feature.pooling == "none":
        used = [rows[id_] for id_ in ids[1 - LONGEST :]]
        return torch.stack(used + [torch.zeros(DIM)] * (LONGEST - 1 - len(used)))
    if not ids:
        return torch.zeros(DIM)
    factors = torch.tensor(weights)[:, None] if feature.weighted else torch.ones(len(ids), 1)
    total: Tensor = (torch.stack([rows[id_] for id_ in ids]) * factors).sum(0)
    divisor = {"sum": 1.0, "mean": float(len(ids)), "sqrtn": len(ids) ** 0.5}[feature.pooling]
    return torch.div(total, divisor)


def loss_of(head: Tensor, vectors: Tensor, dense: Tensor, label: Tensor) -> Tensor:
    """Return a nonlinear loss, so that gradients depend on the rows. vectors: of a sequence there is one per
    position."""
    scores = (torch.tanh(vectors) * head).sum(-1).reshape(len(dense), -1).sum(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(scores + dense.sum(1), label)


PENALTIES = (
    SGD(lr=0.1, weight_decay=0.3),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.3),
    Adagrad(lr=0.1, weight_decay=0.3),
    RowWiseAdagrad(lr=0.1, weight_decay=0.3),
    Adam(lr=0.02, weight_decay=0.3),
)


@pytest.mark.parametrize(
    "optimizer", PENALTIES, ids=lambda each: type(each).__name__ + str(getattr(each, "momentum", ""))
)
def test_weight_decay_is_an_l2_penalty_on_the_rows_of_the_batch(optimizer: Any) -> None:
    """Half of it times the square of each row of the batch, once however often the batch has the row."""
    table = Table("item", dim=DIM, optimizer=optimizer, initial=Uniform(low=-0.5, high=0.5))
    with Embeddings({"item": table.bag("sum")}, num_threads=1) as embeddings:
        (store,) = embeddings.tables.values()
        start = store.lookup(np.arange(NUM_IDS, dtype=np.uint64), train=False)
        rows = [Parameter(torch.from_numpy(row.copy())) for row in start]
        steppers = [plain_optimizer(row, replace(optimizer, weight_decay=0.0)) for row in rows]
        data, combined = batches(("item",), bags=True, weighted=False), embeddings.optimizer()
        for batch in embeddings.stream(data):
            torch.tanh(batch["item"]).sum().backward()
            combined.step()
        for inputs in data:
            bags = [pooled(rows, inputs, embeddings.features["item"], s) for s in range(inputs.batch_size)]
            penalty = sum(rows[id_].square().sum() for id_ in set(inputs.values.tolist()))
            for row in rows:
                row.grad = None
            (torch.tanh(torch.stack(bags)).sum() + 0.3 / 2 * penalty).backward()
            for stepper in steppers:
                stepper.step()
        found = store.read(np.arange(NUM_IDS, dtype=np.uint64)).values
        np.testing.assert_allclose(found, torch.stack([*rows]).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__ + str(getattr(each, "momentum", ""))
)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_with_every_optimizer(pooling: str, optimizer: Any) -> None:
    item, user = (Table(name, dim=DIM, optimizer=optimizer, initial=Uniform(low=-0.5, high=0.5)) for name in TABLES)
    tables = {"a": item, "b": item, "c": user} if pooling == "two tables" else {"a": item}
    embeddings = Embeddings({name: POOLINGS[pooling](table) for name, table in tables.items()}, num_threads=1)
    names, feature = embeddings.features.names, embeddings.features["a"]
    data = batches(names, bags=pooling != "one id", weighted=feature.weighted)
    every = np.arange(NUM_IDS, dtype=np.uint64)
    rows = {
        name: [Parameter(torch.from_numpy(row)) for row in store.lookup(every, train=False).copy()]
        for name, store in embeddings.tables.items()
    }
    steppers = [plain_optimizer(row, optimizer) for each in rows.values() for row in each]
    sequence = feature.pooling == "none"

    torch.manual_seed(0)
    head = Parameter(torch.randn(DIM * (1 if sequence else len(names))))
    plain_head = Parameter(head.detach().clone())
    both = embeddings.optimizer(torch.optim.SGD([head], lr=0.1))
    plain_dense = torch.optim.SGD([plain_head], lr=0.1)
    losses, plain_losses = [], []
    for batch in embeddings.stream(data):
        loss = loss_of(head, batch["a"].values if sequence else batch.embeddings, batch.dense, batch.label)
        both.zero_grad()
        loss.backward()
        both.step()
        losses.append(loss.item())
    for inputs in data:
        size = inputs.batch_size
        columns = [
            torch.stack([pooled(rows[tables[name].name], inputs, feature, f * size + s) for s in range(size)])
            for f, name in enumerate(names)
        ]
        for stepper in (plain_dense, *steppers):
            stepper.zero_grad()
        given: Any = (torch.from_numpy(each) for each in (inputs.dense, inputs.label))
        loss = loss_of(plain_head, columns[0] if sequence else torch.cat(columns, 1), *given)
        loss.backward()
        for stepper in (plain_dense, *steppers):
            stepper.step()
        plain_losses.append(loss.item())

    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    np.testing.assert_allclose(head.detach().numpy(), plain_head.detach().numpy(), rtol=1e-4, atol=1e-6)
    for name, store in embeddings.tables.items():
        expected = torch.stack(tuple(rows[name])).detach().numpy()
        np.testing.assert_allclose(store.lookup(every, train=False), expected, rtol=1e-4, atol=2e-6, err_msg=name)
