"""The process of the accuracy benchmark that trains one model, in the plain loop of a user, and tests it.

The order is deterministic, and no table work overlaps the dense network: at staleness 4 every batch but the first four
is looked up without exactly the last four updates, the worst case of a run with overlap.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

import satrap
from benchmarks.harness.ranks import use_threads

Outcome = dict[str, Any]
"""What a run found: `auc` on the test samples, `best_auc` and `linear_auc` of other models on them (None: there is no
such model), `num_steps`, `num_rows` after training, `num_test_samples`, and `staleness_seen`: how many batches were
looked up before the last n steps were applied, by n."""


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train and test once, in one thread, since the order of torch's sums depends on their number."""
    use_threads(1)
    outcome: Outcome = importlib.import_module(f"benchmarks.accuracy.{job['kind']}").run(**job["arguments"])
    return {"streams": {f"{job['kind']}:{job['arguments']['staleness']}": outcome}}


def fit(model: torch.nn.Module, embeddings: satrap.Embeddings, dense: torch.optim.Optimizer, data: Any) -> None:
    """Train both halves on all of the data."""
    optimizer = embeddings.optimizer(dense)
    for batch in embeddings.stream(data, overlap=False):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.embeddings), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate(model: torch.nn.Module, embeddings: satrap.Embeddings, test: Any, **others: float) -> Outcome:
    """Test the trained model. others: the AUCs of other models on the same data."""
    embeddings.eval()
    model.eval()
    result = satrap.evaluate(model, embeddings.stream(test, overlap=False))
    counters = embeddings.counters()
    return {
        "auc": result.auc(),
        "num_steps": embeddings.step,
        "num_rows": sum(counters.rows.values()),
        "staleness_seen": dict(counters.staleness),
        "num_test_samples": result.num_samples,
        "best_auc": others.get("best_auc"),
        "linear_auc": others.get("linear_auc"),
    }
