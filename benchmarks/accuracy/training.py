"""Training and testing one model in a user's plain loop, which gives the same AUC to the last bit every time.

The order is deterministic and no table work overlaps the dense network: at staleness 4 every batch but the first four
is looked up without exactly the last four updates, the worst case of a run with overlap. `one_thread` is needed because
the order of torch's sums depends on the number of threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import satrap


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one run."""

    auc: float
    """AUC on the test samples."""
    num_steps: int
    num_rows: int
    """Rows of all tables after training."""
    staleness_seen: dict[int, int]
    """Number of batches that were looked up before the last n steps were applied, by n."""
    num_test_samples: int
    best_auc: float | None = None
    """AUC of the truth on the same test samples, if it is known."""
    linear_auc: float | None = None
    """AUC of a linear model of the same inputs, if there is one."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute in this thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fit(model: torch.nn.Module, embeddings: satrap.Embeddings, dense: torch.optim.Optimizer, data: Any) -> None:
    """Train both halves on all of the data."""
    optimizer = embeddings.optimizer(dense)
    for batch in embeddings.stream(data, overlap=False):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.embeddings), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate(
    model: torch.nn.Module,
    embeddings: satrap.Embeddings,
    test: Any,
    *,
    best_auc: float | None = None,
    linear_auc: float | None = None,
) -> Outcome:
    """Test the trained model; the other AUCs are those of other models on the same data."""
    embeddings.eval()
    model.eval()
    result = satrap.evaluate(model, embeddings.stream(test, overlap=False))
    counters = embeddings.counters()
    return Outcome(
        auc=result.auc(),
        num_steps=embeddings.step,
        num_rows=sum(counters.rows.values()),
        staleness_seen=dict(counters.staleness),
        num_test_samples=result.num_samples,
        best_auc=best_auc,
        linear_auc=linear_auc,
    )
