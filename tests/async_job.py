"""A script for trainers that do not wait for each other, whose shares are of unequal length: `async_job.py FOLDER
LENGTHS EVERY [with]`, with the number of batches of each trainer, joined by commas.

Its one parameter's gradients are whole numbers of trainer and step, so what it must end as is known. It saves on its
way only, and ends by sys.exit, as scripts do; with the last argument inside a `with` block of its embeddings. A trainer
that resumes says the step and what the parameter is then.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from async_child import Whole
from loop import batches, tables
from satrap import Checkpoint, Embeddings


def main(embeddings: Embeddings, folder: Path, lengths: list[int], every: int) -> int:
    model = Whole()
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    rank = embeddings.trainers.rank
    data = batches(lengths[rank] * len(lengths))
    run = Checkpoint(folder / "checkpoints", model, optimizer, embeddings, data, full_every=2)
    if run.resume():
        (folder / f"resumed-{rank}").write_text(json.dumps([embeddings.step, model.weight.tolist()]))
    for batch in embeddings.stream(data, overlap=True):
        optimizer.zero_grad()
        model.loss(rank, batch).backward()
        optimizer.step()
        run.save(every_steps=every)
    return 0


if __name__ == "__main__":
    embeddings = Embeddings(tables(), staleness=2, num_threads=1, dense="async")
    with embeddings if "with" in sys.argv[4:] else nullcontext():
        sys.exit(main(embeddings, Path(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")], int(sys.argv[3])))
