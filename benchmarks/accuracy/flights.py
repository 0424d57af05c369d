"""The job of examples/flights.py, unchanged, on the flights in $SATRAP_FLIGHTS; and a linear model of the same inputs.

The linear model has a weight for each number and for each id: a logistic regression. The example's lead over it is the
value of its interactions.
"""

import os
from pathlib import Path
from typing import Any

import torch
from examples import flights

import satrap
from benchmarks.accuracy.loop import Outcome, evaluate, fit

FOLDER = "SATRAP_FLIGHTS"
LINEAR_EPOCHS = 4


class Linear(torch.nn.Module):
    """A linear model: numbers times weights, plus the weight of each id."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Linear(len(flights.NUMBERS), 1)

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Logits [batch]."""
        logits: torch.Tensor = self.numbers(dense).squeeze(1) + embeddings.sum(dim=1)
        return logits


def run(staleness: int, seed: int) -> Outcome:
    """Train as the example does; the seed is that of the order of the samples, the network and the rows."""
    train, test = flights.split(flights.flights(Path(os.environ[FOLDER])))
    model, embeddings = flights.train(train, staleness=staleness, seed=seed, deterministic=True, overlap=False)
    linear = linear_auc(train, test, seed)
    return evaluate(model, embeddings, flights.source(test), linear_auc=linear)


def linear_auc(train: Any, test: Any, seed: int) -> float:
    """Return the AUC of the linear model, trained at staleness 0."""
    torch.manual_seed(seed)
    tables = {name: satrap.Table(name, dim=1, optimizer=satrap.Adagrad(lr=0.05)) for name in flights.IDS}
    embeddings = satrap.Embeddings(tables, deterministic=True, seed=seed)
    model = Linear()
    data = flights.source(train, shuffle=True, epochs=LINEAR_EPOCHS, seed=seed)
    fit(model, embeddings, torch.optim.Adam(model.parameters(), lr=1e-3), data)
    return float(evaluate(model, embeddings, flights.source(test))["auc"])
