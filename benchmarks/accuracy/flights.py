"""The job of examples/flights.py, as it stands, on the flights in a folder that the caller has; and a linear model.

The linear model gets the same inputs: a weight for each number and for each id, which is a logistic regression. What
the example reaches beyond it is what its interactions are worth.
"""

from pathlib import Path
from typing import Any

import torch
from examples import flights

import satrap
from benchmarks.accuracy.training import Outcome, fit, tested

LINEAR_EPOCHS = 4


class Linear(torch.nn.Module):
    """Numbers times weights, plus the weight of each id."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.nn.Linear(len(flights.NUMBERS), 1)

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Logits [batch]."""
        logits: torch.Tensor = self.numbers(dense).squeeze(1) + embeddings.sum(dim=1)
        return logits


def run(staleness: int, seed: int, folder: Path) -> Outcome:
    """Trains as the example does; the seed is of the order of the samples, the network and the rows."""
    train, test = flights.split(flights.flights(folder))
    model, embeddings = flights.train(train, staleness=staleness, seed=seed, deterministic=True, overlap=False)
    linear = linear_auc(train, test, seed)
    return tested(model, embeddings, flights.source(test), linear_auc=linear)


def linear_auc(train: Any, test: Any, seed: int) -> float:
    """Of the linear model, trained in full synchrony."""
    torch.manual_seed(seed)
    tables = {name: satrap.Table(name, dim=1, optimizer=satrap.Adagrad(lr=0.05)) for name in flights.IDS}
    embeddings = satrap.Embeddings(tables, deterministic=True, seed=seed)
    model = Linear()
    data = flights.source(train, shuffle=True, epochs=LINEAR_EPOCHS, seed=seed)
    fit(model, embeddings, torch.optim.Adam(model.parameters(), lr=1e-3), data)
    return tested(model, embeddings, flights.source(test)).auc
