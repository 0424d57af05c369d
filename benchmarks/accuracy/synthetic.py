"""A DLRM on synthetic clicks like Criteo's, whose truth is known: how much of what can be learnt is learnt.

Each seed trains on different samples, drawn as they are read; all are tested on the same ones, which come after them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

import satrap
from benchmarks.accuracy.training import Outcome, evaluate, fit
from satrap.data.synthetic import Clicks

MAX_SEEDS = 10  # the test samples come after those of so many seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of the data and of the model."""

    num_samples: int
    num_test_samples: int
    num_ids: int
    """Number of ids of all features together."""
    dim: int = 16
    batch_size: int = 2048
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (128, 64, 1)


FULL = Size(num_samples=2_000_000, num_test_samples=500_000, num_ids=3_000_000)
QUICK = Size(num_samples=20_000, num_test_samples=10_000, num_ids=10_000, dim=4, batch_size=512, top=(16, 1))


def run(staleness: int, seed: int, size: Size) -> Outcome:
    """Train one pass; the seed is that of the samples, the network and the rows, not of the truth."""
    torch.manual_seed(seed)
    clicks = Clicks(num_samples=size.num_samples, cardinalities=size.num_ids, first_sample=seed * size.num_samples)
    test = Clicks(
        num_samples=size.num_test_samples, cardinalities=size.num_ids, first_sample=MAX_SEEDS * size.num_samples
    )
    table = satrap.Table("ids", dim=size.dim, optimizer=satrap.Adagrad(lr=0.05))  # no two features share an id
    embeddings = satrap.Embeddings(
        dict.fromkeys(clicks.id_names, table), staleness=staleness, deterministic=True, seed=seed
    )
    model = satrap.models.DLRM(clicks.num_dense, embeddings, bottom=size.bottom, top=size.top)
    fit(model, embeddings, torch.optim.Adam(model.parameters(), lr=1e-3), batches(clicks, size.batch_size))
    return evaluate(model, embeddings, batches(test, size.batch_size), best_auc=test.best_auc())


def batches(clicks: Clicks, batch_size: int) -> Iterator[satrap.Inputs]:
    """Yield the samples as a source would, without a file."""
    for block in clicks.batches(batch_size):
        yield satrap.Inputs(
            names=clicks.id_names,
            values=np.ascontiguousarray(block["ids"].T).reshape(-1),
            batch_size=len(block["label"]),
            dense=block["dense"],
            label=block["label"],
        )
