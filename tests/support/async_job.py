"""A script for trainers that do not wait for each other, with shards of unequal length: `async_job.py FOLDER LENGTHS
EVERY [with]`, where LENGTHS has the number of batches of each trainer, joined by commas.

The gradients of its only parameter are integers that depend on trainer and step, so its final value is known. It saves
only during training, and exits by sys.exit, as scripts do; with the last argument inside a `with` block of its
embeddings. A trainer that resumes writes the step and the parameter.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from async_child import IntegerModel
from lean_torch import skip_compiler
from loop import batches, tables
from satrap import Checkpoint, Embeddings


def main(embeddings: Embeddings, folder: Path, lengths: list[int], every: int) -> int:
    model = IntegerModel()
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
    skip_compiler()
    embeddings = Embeddings(tables(), staleness=2, num_threads=1, dense="async")
    with embeddings if "with" in sys.argv[4:] else nullcontext():
        sys.exit(main(embeddings, Path(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")], int(sys.argv[3])))
