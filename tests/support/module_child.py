"""One of several trainers whose modules look rows up inside forward. Each line of its input is a job as JSON; it prints
the losses of its part of each batch, and the rows, as one line."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ledger_invariants import run_jobs
from module_jobs import DIM, NUM_IDS, Scores, batch, loss_of, start_rows, tables
from satrap import SGD, Deployment, Embeddings, Table, Zeros
from satrap.nn import Embedding
from trainer_child import join

STEPS = 5


def main(rank: int, world_size: int, rendezvous: str, job: dict[str, Any]) -> None:
    join(rank, world_size, rendezvous, job)
    torch.manual_seed(0)
    deployment = Deployment(job["servers"], workers=job["workers"]) if job["servers"] else None
    if job.get("counts"):
        count(rank, job["counts"], deployment)
        return
    with Embeddings({each.name: each for each in tables()}, num_threads=1, deployment=deployment) as embeddings:
        scores = Scores.over(embeddings)
        model = embeddings.parallel(scores)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        users = [part.numpy() for step in range(STEPS) for part in batch(step)[0].chunk(world_size)]  # divided in turn
        stream = iter(embeddings.stream([{"item": ids, "user": ids} for ids in users])) if job.get("stream") else None
        for step in range(STEPS):
            if stream is not None:
                scores.user = Returned(next(stream), "user")
            part = [each.chunk(world_size)[rank] for each in batch(step)]
            loss = loss_of(model, *part)
            if job["without"] == [rank, step]:  # no gradient reaches a row
                scores.eval()
                loss = loss_of(model, *part)
                scores.train()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        dist.barrier()
        rows = {name: start_rows(embeddings, name, NUM_IDS).tolist() for name in embeddings.tables}
        found = {"losses": losses, "rows": rows, "step": embeddings.step}
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


class Returned(torch.nn.Module):
    """Takes the place of a module whose rows a batch of a stream has."""

    def __init__(self, looked_up: Any, name: str) -> None:
        super().__init__()
        self._looked_up, self._name = looked_up, name

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._looked_up[self._name]
        return rows


def count(rank: int, how: dict[str, Any], deployment: Deployment | None) -> None:
    """Train rows and a dense parameter that become minus the sum of their gradients, in any order of the updates."""
    table = Table("item", DIM, optimizer=SGD(lr=1.0), initial=Zeros())
    with Embeddings({"item": table}, dense=how["dense"], num_threads=1, deployment=deployment) as embeddings:
        module = embeddings.parallel(Embedding(embeddings, "item"))  # has no Parameter, which DDP refuses
        dense = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(dense.weight, 8.0)
        optimizer = embeddings.optimizer(torch.optim.SGD(dense.parameters(), lr=1.0))
        data = [{"item": np.array([step // 2], np.uint64)} for step in range(2 * STEPS)]  # divided in turn
        stream = iter(embeddings.stream(data)) if how["stream"] else None
        for step in range(STEPS):
            score = dense(torch.ones(1, 2)).sum()  # before the first lookup
            if stream is not None:
                score = score + next(stream)["item"].sum()
            score = score + module(torch.tensor([step, rank])).sum()
            optimizer.zero_grad()
            score.backward()
            optimizer.step()
        embeddings.drain()
        dist.barrier()
        embeddings.drain()
        found: dict[str, Any] = {
            "rows": start_rows(embeddings, "item", NUM_IDS)[:, 0].tolist(),
            "dense": dense.weight[0].tolist(),
        }
        found["step"] = embeddings.step
        dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_jobs(main)
