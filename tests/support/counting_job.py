"""A training job with staleness and a known result: every row ends as minus the number of times its id was seen.

`python counting_job.py RUN STEPS`, run by test_checkpoint.py in child processes that are killed. The loss is the sum of
all embeddings and the tables use SGD with lr 1, so a batch that is updated twice, or never, changes the result.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint_job import NUM_IDS, Source
from lean_torch import skip_compiler
from satrap import SGD, Checkpoint, Constant, Embeddings, Table

STALENESS = 3


def main(run: str, steps: int) -> None:
    tables = {name: Table(name, dim=2, optimizer=SGD(lr=1.0), initial=Constant(0.0)) for name in ("user", "item")}
    embeddings = Embeddings(tables, staleness=STALENESS, num_threads=1)
    model = torch.nn.Linear(3, 1)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    source = Source(steps)
    checkpoint = Checkpoint(run, model, optimizer, embeddings, source, keep=2, full_every=3)
    checkpoint.resume()
    with embeddings.stream(source, overlap=True) as stream:
        for batch in stream:
            loss = batch.embeddings.sum() + model(batch.dense).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.save(every_steps=2)
            print(embeddings.step, flush=True)
    embeddings.drain()
    every = np.arange(NUM_IDS, dtype=np.uint64)
    found: dict[str, Any] = {name: store.read(every).values for name, store in embeddings.tables.items()}
    np.savez(Path(run) / "end.npz", **found | {"step": embeddings.step})


if __name__ == "__main__":
    skip_compiler()
    main(sys.argv[1], int(sys.argv[2]))
