"""A DLRM on synthetic clicks like Criteo's, whose truth is known: how much of what can be learnt is learnt.

Each seed trains on different samples, drawn as they are read; all are tested on the same ones, which come after them.
"""

from collections.abc import Iterator

import numpy as np
import torch

import satrap
from benchmarks.accuracy.loop import Outcome, evaluate, fit
from satrap.data.synthetic import Clicks

MAX_SEEDS = 10  # the test samples come after those of so many seeds
SAMPLES_PER_ID, TESTS_PER_SAMPLE = 2 / 3, 1 / 4
DIM, BATCH_SIZE = 16, 2048
BOTTOM, TOP = (64,), (128, 64, 1)


def run(staleness: int, seed: int, num_ids: int) -> Outcome:
    """Train one pass; the seed is that of the samples, the network and the rows, not of the truth."""
    torch.manual_seed(seed)
    count = round(SAMPLES_PER_ID * num_ids)
    clicks = Clicks(num_samples=count, cardinalities=num_ids, first_sample=seed * count)
    test = Clicks(num_samples=round(TESTS_PER_SAMPLE * count), cardinalities=num_ids, first_sample=MAX_SEEDS * count)
    table = satrap.Table("ids", dim=DIM, optimizer=satrap.Adagrad(lr=0.05))  # no two features share an id
    embeddings = satrap.Embeddings(
        dict.fromkeys(clicks.id_names, table), staleness=staleness, deterministic=True, seed=seed
    )
    model = satrap.models.DLRM(clicks.num_dense, embeddings, bottom=BOTTOM, top=TOP)
    fit(model, embeddings, torch.optim.Adam(model.parameters(), lr=1e-3), batches(clicks, BATCH_SIZE))
    return evaluate(model, embeddings, batches(test, BATCH_SIZE), best_auc=test.best_auc())


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
