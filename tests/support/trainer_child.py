"""One of several trainers, as torchrun starts it: trains a job under DDP with its rows on servers, and prints the
result as one line of JSON. Each line of its input is a job as JSON: rank, world, rendezvous file, and options.

With "ahead" it takes all batches of an epoch before the first step. With "counted" the embeddings' gradients are
integers, so that rows are exact in any order of updates. With "tells" a trainer also prints a line at its third step.
With "patience" it evaluates every second step. With "beside" it saves while it trains; with "continues" it also
continues after a save that fails. Without servers the trainers share the rows; with "machines" as if each were on
another one. "dense" is the device of the network, "device" that of the rows.
"""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from ledger_invariants import run_jobs
from loop import NUM_IDS, Net, batches, counting_tables, loss_of, tables
from satrap import CSV, Checkpoint, Deployment, Embeddings, IdColumn, Parquet, Validation
from satrap.errors import SatrapError
from satrap.train import trainer_server


def main(rank: int, world_size: int, rendezvous: str, job: dict[str, Any]) -> None:
    join(rank, world_size, rendezvous, job)
    torch.manual_seed(0)
    embeddings, dense = embeddings_of(job), job.get("dense", "cpu")
    net = Net().to(dense)
    if job.get("patience"):
        net.register_buffer("unused", torch.zeros(1))  # DistributedDataParallel broadcasts it before each forward pass
    model = DistributedDataParallel(net)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    scaler = scaler_of(job.get("scaler"), dense)
    seen, failed = [], []
    data = data_of(job)
    run = Checkpoint(job["checkpoint"], model, optimizer, embeddings, data, full_every=2) if job["checkpoint"] else None
    validation = Validation(model, embeddings, batches(3, seed=9), patience=job.get("patience"))
    began = run is not None and run.resume()
    for epoch in range(job["epochs"]):
        if epoch and job.get("again"):
            assert run is not None and run.resume(job["again"])
        how: dict[str, Any] = {"overlap": job["overlap"], "accumulate": job["accumulate"], "device": dense}
        with embeddings.stream(data, **how) as stream:
            for number, batch in enumerate(list(stream) if job.get("ahead") else stream, 1):
                if batch.step == job["until"]:
                    break
                if job.get("tells") and batch.step == 3:
                    print(json.dumps({"step": 3}), flush=True)
                extra = batch.inputs.extra
                seen.append(list(map(int, extra["number"].to_pylist())) if extra else batch.inputs.values.tolist())
                if [rank, number] == job.get("overflow"):  # in a gradient that DDP does not reduce
                    batch.embeddings.register_hook(lambda gradient: gradient * np.inf)
                loss = counted_loss(model, batch, world_size) if job.get("counted") else loss_of(model, batch)
                scaler.scale(loss).backward()
                if [rank, number] in job["dropped"] or [None, number] in job["dropped"]:
                    optimizer.zero_grad()
                    continue
                if batch.completes_step:
                    if job.get("scaler") == "sharded":
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                if job.get("patience"):
                    validation.step(every_steps=2, checkpoint=run)
                    if validation.is_over:
                        break
                if run is not None and (error := save(run, job)):
                    failed.append([batch.step, error])
        if run is not None and job["until"] is None:
            run.save()
    embeddings.drain()
    dist.barrier()
    found = {"seen": seen, "resumed": began, "failed": failed, "scale": scaler.get_scale()}
    found["validation"] = validation.state_dict()
    found |= {"metrics": validation.metrics, "best": None if run is None else run.best}
    found |= state_of(embeddings, model)
    dist.barrier()
    embeddings.worker.close()
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


def join(rank: int, world_size: int, rendezvous: str, job: dict[str, Any]) -> None:
    """Join the other trainers: by gloo, and with rows or a network on GPUs, of which each trainer has one, by NCCL."""
    torch.set_num_threads(1)
    backend = "gloo"
    if "cuda" in (job.get("dense"), job.get("device")):
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)


def save(run: Checkpoint, job: dict[str, Any]) -> str:
    """Save every second step; return the error of a job that continues after it."""
    try:
        run.save(every_steps=2, wait=not job.get("beside"))
    except SatrapError as error:
        if not job.get("continues"):
            raise
        return str(error)
    return ""


def embeddings_of(job: dict[str, Any]) -> Embeddings:
    if job.get("machines"):
        trainer_server._is_own_folder = lambda name: False
    where = Deployment(job["servers"], workers=job.get("workers"))
    shards = job.get("shards", ("rows", "rows"))
    how: dict[str, Any] = {"num_users": job.get("num_users"), "frozen": job.get("frozen", (False, False))}
    features = counting_tables(shards) if job.get("counted") else tables(shards=shards, **how)
    how = {name: job.get(name) for name in ("device", "device_memory")}
    how["deterministic"] = job.get("deterministic", False)
    how["output_dtype"] = job.get("output_dtype", "float32")
    return Embeddings(features, num_threads=1, staleness=job["staleness"], deployment=where, **how)


def state_of(embeddings: Embeddings, model: torch.nn.Module) -> dict[str, Any]:
    ids = np.arange(NUM_IDS, dtype=np.uint64)
    return {
        "lost": embeddings.counters().lost,
        "dense": [parameter.detach().reshape(-1).tolist() for parameter in model.parameters()],
        "rows": {name: table.read(ids).values.tolist() for name, table in embeddings.tables.items()},
        "updated": {name: table.stats()["updated"] for name, table in embeddings.tables.items()},
    }


def data_of(job: dict[str, Any]) -> Any:
    """Return batches in memory, or from the job's files."""
    if job.get("file") is None:
        return batches(job["batches"])
    how: dict[str, Any] = {"dense": ["d0", "d1"], "label": "label", "batch_size": 8, "extra": "number"}
    how |= job.get("how", {})
    if job["file"].endswith(".parquet"):
        return Parquet(job["file"], block_rows=24, **how)
    ids = {name: IdColumn(kind="integer") for name in ("user", "item")}
    ids["history"] = IdColumn(kind="integer", separator="|")
    return CSV(job["file"], block_bytes=500, ids=ids, **how)


def counted_loss(model: torch.nn.Module, batch: Any, world_size: int) -> torch.Tensor:
    loss: torch.Tensor = world_size * batch.embeddings.sum() + model(batch.dense, batch.embeddings.detach()).mean()
    return loss


def scaler_of(kind: str | None, device: str = "cpu") -> torch.amp.GradScaler:
    if kind == "sharded":
        return ShardedGradScaler(device, init_scale=1024.0)
    return torch.amp.GradScaler(device, init_scale=1024.0, enabled=kind is not None)


if __name__ == "__main__":
    run_jobs(main)
