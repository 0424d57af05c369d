"""One of several trainers with rows on their devices: a job of collective_child.py, or, with "refuses", a stream with a
batch that the core refuses; or, with "costs", what steps of tables with `num_rows` ask of the host and of the network.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import collective_child
import trainer_child
from ledger_invariants import run_jobs
from loop import Net, batches, train_step
from satrap import Adagrad, Embeddings, Table
from satrap.config.features import Features
from satrap.data.inputs import Inputs
from satrap.device.direct_collective_rows import DirectCollectiveRows
from satrap.errors import InputError
from satrap.train import open_worker
from torch_calls import READS, CountedCalls, IdleKernels

WRONG: dict[str, Any] = {"too large": 10**6, "negative": -1}


def refuse(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train on batches of which trainer 1 has a wrong one in step 3, then on the batches after it. Return the error and
    the rows."""
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    embeddings, net, error = trainer_child.embeddings_of(job), Net(), ""
    assert isinstance(embeddings.worker.rows, DirectCollectiveRows) == (job.get("num_users") is not None)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    data, bad = batches(6 * world_size), 2 * world_size + 1
    if job["refuses"] in WRONG:
        values: Any = data[bad].values.astype(np.int64)
        values[-1 if len(values) > 16 else 0] = WRONG[job["refuses"]]
        data[bad] = replace(data[bad], values=values if job["refuses"] == "negative" else values.view(np.uint64))
    parts = [data[: 2 * world_size], data[2 * world_size : 3 * world_size], data[3 * world_size :]]
    before = ""
    for number, part in enumerate(parts):
        if number == 1 and job["refuses"] == "nothing":
            continue
        try:
            with embeddings.stream(part, overlap=job["overlap"]) as stream:
                for batch in stream:
                    train_step(model, optimizer, batch)
        except InputError as found:
            error = str(found)
            embeddings.drain()
            dist.barrier()
            before = trainer_child.state_of(embeddings, model)["rows"]
            dist.barrier()
    embeddings.drain()
    dist.barrier()
    state = {"error": error, "before": before} | trainer_child.state_of(embeddings, model)
    dist.barrier()
    embeddings.close()
    return state


def count_costs(job: dict[str, Any]) -> dict[str, Any]:
    """Take steps with 26 tables, each found ahead. For each batch size return what a step asks for: operations of
    torch, tensors that the host reads, collectives of the devices; or, with "seconds", those of CPU: of the calling
    thread, and of the threads of lookups and updates."""
    if dist.get_world_size() == 1:
        open_worker._open_on_device = open_worker._open_among_devices
    tables = [Table(f"t{number}", dim=4, optimizer=Adagrad(lr=0.1), num_rows=60) for number in range(26)]
    embeddings = Embeddings({table.name: table for table in tables}, device="cpu", num_threads=1)
    worker: Any = embeddings.worker
    rows: Any = worker.rows
    if job.get("stubs"):
        rows._kernels = rows._updates._owned()._kernels = IdleKernels
    counts: dict[str, Any] = dict.fromkeys(("operations", "reads", "ids and rows"), 0)
    counts["seconds"] = 0.0
    count = partial(_timed, counts) if job.get("seconds") else partial(_counted, counts)
    for rounds, name in ((rows._lookups, "_rows"), (rows._updates, "_run")):
        setattr(rounds, name, partial(count, getattr(rounds, name)))
    _count_reads(rows, counts)
    stream, found = worker.open_stream(1), []
    features: Features = worker.features
    for step, size in enumerate(job["costs"], 1):
        values = (np.arange(26 * size) * 7 % 60).astype(np.uint64)
        inputs = Inputs(names=features.names, values=values, batch_size=size)

        def take(inputs: Inputs = inputs, step: int = step, size: int = size) -> None:
            looked = worker.lookup_resolved(worker.resolve(inputs, step=step, oldest_open=step))
            worker.update([looked.ticket], [torch.ones(size, 26 * 4)], step=step)

        counts.update(dict.fromkeys(counts, 0))
        count(take)
        found.append(dict(counts))
        dist.barrier()
    stream.end_lookups()
    stream.end_updates()
    dist.barrier()
    embeddings.close()
    return {"costs": found}


def _counted(counts: dict[str, Any], call: Any, *args: Any) -> Any:
    calls: Any = CountedCalls()  # type: ignore[no-untyped-call]
    with calls:
        result = call(*args)
    counts["operations"] += calls.count
    return result


def _timed(counts: dict[str, Any], call: Any, *args: Any) -> Any:
    began = time.thread_time()
    try:
        return call(*args)
    finally:
        counts["seconds"] += time.thread_time() - began


def _count_reads(rows: Any, counts: dict[str, Any]) -> None:
    """Count the tensors that any thread reads: where they are a device's, it waits for them."""
    all_to_all = dist.all_to_all_single

    def note(*args: Any, **options: Any) -> Any:
        counts["ids and rows"] += options["group"] is rows.launches.group
        return all_to_all(*args, **options)

    dist.all_to_all_single = note
    for name in READS:
        setattr(torch.Tensor, name, _noted(getattr(torch.Tensor, name), counts))


def _noted(read: Any, counts: dict[str, int]) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        counts["reads"] += 1
        return read(self, *args, **options)

    return call


def main(rank: int, world_size: int, rendezvous: str, job: dict[str, Any]) -> None:
    if not {"refuses", "costs"} & job.keys():
        collective_child.main(rank, world_size, rendezvous, job)
        return
    trainer_child.join(rank, world_size, rendezvous, job)
    found = refuse(job, rank) if "refuses" in job else count_costs(job)
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_jobs(main)
