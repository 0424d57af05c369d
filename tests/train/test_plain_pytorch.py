"""Synchronous training by a user's loop equals plain PyTorch: every pooling with every optimizer, for some steps.

The plain job keeps each row as a separate Parameter with a separate optimizer, so that a row which no sample uses is
not stepped; torch pools the rows and sums their gradients. Both jobs start with the same bits and must stay within the
float32 error of summing in another order. worker/test_bags.py compares the tables bit by bit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from one_row import closed_form, ftrl_state, rowwise_state
from satrap import SGD, Adagrad, Adam, AdamW, Embeddings, Feature, Ftrl, Inputs, RowWiseAdagrad, Table, Uniform

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
    "two features": lambda table: table.bag("mean"),
}


class OneRow(torch.optim.Optimizer):
    """Optimizers that torch lacks: row-wise Adagrad and FTRL-proximal by their papers, in double precision."""

    def __init__(self, row: Parameter, optimizer: RowWiseAdagrad | Ftrl) -> None:
        super().__init__([row], {})
        self.row, self.optimizer = row, optimizer
        w = row.detach().numpy().astype(np.float64)
        if isinstance(optimizer, RowWiseAdagrad):
            self.kept = np.full(1, optimizer.initial_accumulator_value)
        else:
            z = -(w * (optimizer.beta / optimizer.lr + optimizer.l2)) - np.sign(w) * optimizer.l1
            self.kept = np.concatenate([z, np.zeros_like(z)])

    def step(self, closure: Any = None) -> Any:
        if self.row.grad is None:
            return
        values, gradient = self.row.detach().numpy(), self.row.grad.numpy()
        if isinstance(self.optimizer, RowWiseAdagrad):
            self.kept, _ = rowwise_state(self.optimizer, values, self.kept, gradient)
        else:
            self.kept, _ = ftrl_state(self.optimizer, values, self.kept, gradient, self.optimizer.lr)
        state: Any = self.kept
        new, _ = closed_form(self.optimizer, values, state, gradient, self.optimizer.lr)
        with torch.no_grad():
            self.row.copy_(torch.from_numpy(new))


def plain_optimizer(row: Parameter, optimizer: Any) -> torch.optim.Optimizer:
    match optimizer:
        case SGD(lr=lr):
            return torch.optim.SGD(
                [row], lr, optimizer.momentum, nesterov=optimizer.nesterov, weight_decay=optimizer.weight_decay
            )
        case Adagrad(lr=lr):
            start = optimizer.initial_accumulator_value
            return torch.optim.Adagrad([row], lr, initial_accumulator_value=start, eps=optimizer.eps)
        case Adam(lr=lr):
            return torch.optim.Adam([row], lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
        case AdamW(lr=lr):
            return torch.optim.AdamW([row], lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
    return OneRow(row, optimizer)


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


def loss_of(head: Tensor, vectors: Tensor) -> Tensor:
    """Return a nonlinear loss, so that gradients depend on the rows. head is [features * DIM] or, for sequences, one
    per position."""
    loss: Tensor = torch.nn.functional.softplus((torch.tanh(vectors) * head).sum(-1)).mean()
    return loss


@pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=lambda each: type(each).__name__ + str(getattr(each, "momentum", ""))
)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_with_every_optimizer(pooling: str, optimizer: Any) -> None:
    table = Table("item", dim=DIM, optimizer=optimizer, initial=Uniform(low=-0.5, high=0.5))
    names = ("a", "b") if pooling == "two features" else ("a",)
    embeddings = Embeddings({name: POOLINGS[pooling](table) for name in names}, num_threads=1)
    feature = embeddings.features["a"]
    data = batches(names, bags=pooling != "one id", weighted=feature.weighted)
    every = np.arange(NUM_IDS, dtype=np.uint64)
    rows = [Parameter(torch.from_numpy(row)) for row in embeddings.tables["item"].lookup(every, train=False).copy()]
    steppers = [plain_optimizer(row, optimizer) for row in rows]
    sequence = feature.pooling == "none"

    torch.manual_seed(0)
    head = Parameter(torch.randn(DIM * (1 if sequence else len(names))))
    plain_head = Parameter(head.detach().clone())
    both = embeddings.optimizer(torch.optim.SGD([head], lr=0.1))
    plain_dense = torch.optim.SGD([plain_head], lr=0.1)
    losses, plain_losses = [], []
    for batch in embeddings.stream(data):
        loss = loss_of(head, batch["a"].values if sequence else batch.embeddings)
        both.zero_grad()
        loss.backward()
        both.step()
        losses.append(loss.item())
    for inputs in data:
        size = inputs.batch_size
        columns = [
            torch.stack([pooled(rows, inputs, feature, f * size + s) for s in range(size)]) for f in range(len(names))
        ]
        for stepper in (plain_dense, *steppers):
            stepper.zero_grad()
        loss = loss_of(plain_head, columns[0] if sequence else torch.cat(columns, 1))
        loss.backward()
        for stepper in (plain_dense, *steppers):
            stepper.step()
        plain_losses.append(loss.item())

    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    np.testing.assert_allclose(head.detach().numpy(), plain_head.detach().numpy(), rtol=1e-4, atol=1e-6)
    values, _, present = embeddings.tables["item"].read(every)
    used = {id_ for inputs in data for i in range(len(names) * inputs.batch_size) for id_ in bag_of(inputs, i)[0]}
    assert present.sum() >= len(used) - (NUM_IDS if sequence else 0)
    for id_ in np.flatnonzero(present):
        np.testing.assert_allclose(values[id_], rows[id_].detach().numpy(), rtol=1e-4, atol=2e-6, err_msg=f"id {id_}")
