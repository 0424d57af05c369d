"""A training script that the planner observes: two tables, a linear model, and a file that it writes at its end."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import satrap

BATCH, STEPS = 64, 50
end, fault = Path(sys.argv[1]), sys.argv[2:]

user, item = satrap.Table("user", dim=8, capacity=1 << 20), satrap.Table("item", dim=4)
features: dict[str, satrap.Feature | satrap.Table] = {
    "user": user,
    "clicked": item.bag("sum"),
    "history": item.sequence(5),
}
embeddings = satrap.Embeddings(features, staleness=2)
model = torch.nn.Linear(3 + 8 + 4 + 5 * 4, 1)
optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def batches() -> Iterator[satrap.Inputs]:
    for step in range(3 if fault else STEPS):
        every = np.arange(BATCH, dtype=np.uint64) + BATCH * step
        bags = np.arange(0, 2 * BATCH + 1, 2)
        yield satrap.Inputs(
            names=tuple(embeddings.features.names),
            values=np.concatenate([every // 4, np.repeat(every, 2), every]),  # each user 4 times, each item 3 times
            offsets=np.concatenate([np.arange(BATCH + 1), BATCH + bags[1:], 3 * BATCH + 1 + np.arange(BATCH)]),
            batch_size=BATCH,
            dense=np.ones((BATCH, 3), np.float32),
            label=np.zeros(BATCH, np.float32),
        )


for batch in embeddings.stream(satrap.IterableSource(batches())):
    history = batch["history"].values.flatten(1)
    logits = model(torch.cat([batch.dense, batch.embeddings, history], 1))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), batch.label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if fault:
    raise RuntimeError("the script's own error")
end.touch()
