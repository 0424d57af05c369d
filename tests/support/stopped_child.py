"""A trainer that is suspended and replaced: trains over servers endlessly, prints each step's number, and saves once,
at the given step. Arguments: the servers as JSON, the run's folder, that step."""

import json
import sys

import torch

from lean_torch import skip_compiler
from loop import batches, job, train_step
from satrap import Checkpoint


def main(servers: list[str], run: str, save_at: int) -> None:
    torch.set_num_threads(1)
    embeddings, model, optimizer = job(staleness=2, deterministic=True, servers=servers)
    data = batches(20_000)
    checkpoint = Checkpoint(run, model, optimizer, embeddings, data)
    for batch in embeddings.stream(data):
        train_step(model, optimizer, batch)
        if batch.step == save_at:
            checkpoint.save()
        print(batch.step, flush=True)


if __name__ == "__main__":
    skip_compiler()
    main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
