"""One of several trainers whose modules look rows up inside forward. Each line of its input is a job as JSON; it prints
the losses of its part of each batch, and the rows, as one line."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from module_jobs import NUM_IDS, Scores, batch, loss_of, start_rows, tables
from satrap import Deployment, Embeddings
from trainer_child import join

STEPS = 5


def main(rank: int, world_size: int, rendezvous: str, job: dict[str, Any]) -> None:
    join(rank, world_size, rendezvous, job)
    torch.manual_seed(0)
    deployment = Deployment(job["servers"]) if job["servers"] else None
    with Embeddings({each.name: each for each in tables()}, num_threads=1, deployment=deployment) as embeddings:
        scores = Scores.over(embeddings)
        model = embeddings.parallel(scores)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        for step in range(STEPS):
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
        print(json.dumps({"losses": losses, "rows": rows, "step": embeddings.step}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for line in sys.stdin:
        main(*json.loads(line))
