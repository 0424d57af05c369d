"""One model trained and tested once, by a user's plain loop, so that a second time gives the same AUC to the last bit.

The order is deterministic and no table work overlaps the dense network: at staleness 4 every batch but the first four
is looked up without exactly the last four updates, the worst that a run with overlap may see. `one_thread` does the
rest: torch adds up in another order for another number of threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import satrap


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one run reached."""

    auc: float
    """On the test samples."""
    num_steps: int
    num_rows: int
    """Of all tables, after training."""
    staleness_seen: dict[int, int]
    """How many batches were looked up while n earlier steps were not yet applied."""
    num_test_samples: int
    best_auc: float | None = None
    """Of the truth on the same test samples, where that is known."""
    linear_auc: float | None = None
    """Of a linear model of the same inputs, where there is one."""


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in this thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fit(model: torch.nn.Module, embeddings: satrap.Embeddings, dense: torch.optim.Optimizer, data: Any) -> None:
    """Trains both halves on all of the data."""
    optimizer = embeddings.optimizer(dense)
    for batch in embeddings.stream(data, overlap=False):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.embeddings), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def tested(
    model: torch.nn.Module,
    embeddings: satrap.Embeddings,
    test: Any,
    *,
    best_auc: float | None = None,
    linear_auc: float | None = None,
) -> Outcome:
    """What the trained model reaches on the test data, beside what others do there."""
    embeddings.eval()
    model.eval()
    found = satrap.evaluate(model, embeddings.stream(test, overlap=False))
    counters = embeddings.counters()
    return Outcome(
        auc=found.auc(),
        num_steps=embeddings.step,
        num_rows=sum(counters.rows.values()),
        staleness_seen=dict(counters.staleness),
        num_test_samples=found.num_samples,
        best_auc=best_auc,
        linear_auc=linear_auc,
    )
