"""One of several trainers that do not wait for each other, as torchrun starts it: prints a line of JSON when it starts
the batch of `wait_at` (and continues after the next line of input), one at the end of its data, and one when all
trainers are done. Each other line of its input is a job as JSON: rank, world, rendezvous file, and options.

With "whole" the model is one parameter with integer gradients, so that their sum is exact.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ledger_invariants import run_jobs
from loop import Net, batches, loss_of, tables, take_step
from satrap import Checkpoint, CheckpointError, Deployment, Embeddings, Inputs

NUM_WHOLE = 5000


class IntegerModel(torch.nn.Module):
    """A parameter whose gradients depend on trainer and step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(NUM_WHOLE))

    def loss(self, rank: int, batch: Any) -> Tensor:
        total: Tensor = (self.weight * gradient(rank, batch.step)).sum() + batch.embeddings.sum()
        return total


def gradient(rank: int, step: int) -> Tensor:
    """Return an even gradient, so that half of it is an integer, too."""
    return 2.0 * ((torch.arange(NUM_WHOLE) * (3 + rank) + 5 * step) % 11)


def summed(steps: Sequence[int]) -> list[float]:
    """Return the parameter after all gradients, starting from 0."""
    total = np.zeros(NUM_WHOLE, np.float32)
    for rank, last in enumerate(steps):
        for step in range(1, last + 1):
            total -= gradient(rank, step).numpy() / 2
    return [float(each) for each in total]


def data_of(job: dict[str, Any]) -> list[Inputs]:
    """Labels that the dense numbers tell."""
    made = batches(job["batches"])
    for each in made:
        assert each.dense is not None and each.label is not None
        each.label[:] = each.dense[:, 0] > 0
    return made


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main(rank: int, world_size: int, rendezvous: str, job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # the initial values differ, and those of trainer 0 are used
    where = Deployment(job["servers"])
    embeddings = Embeddings(tables(), num_threads=1, staleness=job["staleness"], deployment=where, dense="async")
    model: Any = IntegerModel() if job["whole"] else Net()
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=1.0 if job["whole"] else 0.2))
    data = data_of(job)[: world_size * job["lengths"][rank]] if job["lengths"] else data_of(job)
    run = Checkpoint(job["checkpoint"], model, optimizer, embeddings, data, keep=100) if job["checkpoint"] else None
    resumed = run is not None and run.resume()
    found: dict[str, Any] = {"resumed": resumed, "began": dense(model), "losses": [], "refused": None}
    for _ in range(job["epochs"]):
        for batch in embeddings.stream(data, overlap=job["overlap"]):
            if [rank, batch.step] == job["wait_at"]:
                say({"at": batch.step})
                sys.stdin.readline()
            found["losses"].append(
                take_step(model.loss(rank, batch) if job["whole"] else loss_of(model, batch), optimizer)
            )
            try:
                if run is not None and job["every"]:
                    run.save(every_steps=job["every"][rank])
            except CheckpointError as error:
                found["refused"] = str(error)
    say({"steps": embeddings.step})
    if run is not None:
        run.save()
    dist.barrier()
    embeddings.drain()
    found |= {"dense": dense(model), "lost": embeddings.counters().lost}
    found["stats"] = embeddings.tables["dense.0"].stats()
    dist.barrier()
    embeddings.worker.close()
    dist.destroy_process_group()
    say(found)


def dense(model: torch.nn.Module) -> list[list[float]]:
    return [parameter.detach().reshape(-1).tolist() for parameter in model.parameters()]


if __name__ == "__main__":
    run_jobs(main)
