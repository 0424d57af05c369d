"""One of several trainers that prefetch around loaders, which may differ in length. Each line of its input is a job as
JSON; it prints the losses, the rows and the batches of each pass, or its error, as one line."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ledger_invariants import run_jobs
from logged import Records
from module_jobs import NUM_IDS, Scores, batch, loss_of, start_rows, tables
from satrap import Checkpoint, Deployment, Embeddings, Validation
from satrap.errors import SatrapError
from trainer_child import join

VALID = [batch(step) for step in (90, 91)]


def clicked(ids: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return ids[0] % 2


class Parts:
    """A loader of a trainer's part of each batch, with a state."""

    def __init__(self, rank: int, world_size: int, num_batches: int) -> None:
        self._rank, self._world_size, self._num_batches = rank, world_size, num_batches
        self._next = 0

    def __iter__(self) -> Iterator[tuple[int, list[torch.Tensor]]]:
        while self._next < self._num_batches:
            self._next += 1
            yield self._next, [each.chunk(self._world_size)[self._rank] for each in batch(self._next)]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def named(item: tuple[int, list[torch.Tensor]]) -> dict[str, Any]:
    _, (user, seen, shown) = item
    return {"item": [seen, shown, shown], "user": user}


def main(rank: int, world_size: int, rendezvous: str, job: dict[str, Any]) -> None:
    join(rank, world_size, rendezvous, job)
    torch.manual_seed(0)
    found: dict[str, Any] = {"losses": [], "passes": [], "error": ""}
    logging.getLogger("satrap.train").addHandler(records := Records())
    try:
        train_prefetched(rank, world_size, job, found)
    except SatrapError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["warnings"] = records.messages
    logging.getLogger("satrap.train").removeHandler(records)
    with suppress(RuntimeError):
        dist.destroy_process_group()
    print(json.dumps(found), flush=True)


def train_prefetched(rank: int, world_size: int, job: dict[str, Any], found: dict[str, Any]) -> None:
    num_rows = NUM_IDS if job.get("direct") else None
    declared = {each.name: replace(each, num_rows=num_rows) for each in tables()}
    where: dict[str, Any] = {"device": job.get("device"), "staleness": job["staleness"]}
    where |= {"deployment": Deployment(job["servers"], workers=job["workers"])} if job["servers"] else {}
    with Embeddings(declared, num_threads=1, **where) as embeddings:
        model = embeddings.parallel(scores := Scores.over(embeddings))
        validation = Validation(model, embeddings, VALID, score=lambda ids: scores(*ids), label=clicked)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = Parts(*((0, 1) if job.get("undivided") else (rank, world_size)), job["lengths"][rank])
        ids = (lambda item: {"user": named(item)["user"]}) if job.get("few") else named
        run = Checkpoint(job["checkpoint"], model, optimizer, embeddings, loader) if job["checkpoint"] else None
        if job.get("resumes"):
            assert run is not None and run.resume()
        accumulate = job["accumulate"]
        batches = embeddings.prefetch(loader, ids, accumulate=accumulate, overlap=job["overlap"])
        for _ in range(job["epochs"]):
            found["passes"].append([])
            for number, (name, part) in enumerate(batches if job.get("prefetched", True) else loader, 1):
                if job.get("leaves") in ([rank, number], ["all", number]):
                    break
                found["passes"][-1].append(name)
                loss = loss_of(model, *part) / accumulate
                if number % accumulate == 1 % accumulate:
                    optimizer.zero_grad()
                loss.backward()
                if number % accumulate == 0:
                    optimizer.step()
                found["losses"].append(loss.item())
                if job.get("validated") and not validation.step(every_steps=2):
                    assert model.training
                if run is not None and embeddings.step == job["until"]:
                    run.save()
                    if job.get("stops"):
                        return
        embeddings.drain()
        dist.barrier()
        found["rows"] = {name: start_rows(embeddings, name, NUM_IDS).tolist() for name in embeddings.tables}
        found["step"], found["metrics"] = embeddings.step, dict(validation.metrics)
        dist.barrier()


if __name__ == "__main__":
    run_jobs(main)
