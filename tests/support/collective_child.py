"""One of several trainers, for rows on their devices: a job of trainer_child.py, or, with "compare", random steps on
two workers, with rows on the devices and in the trainers' memory, whose results must be the same bits; or, with
"refused", options that several trainers cannot have; or, with "differs", a trainer that does not do as the others; or,
with "unequal", evaluations; or, with "slowly", several streams; or, with "launches", what the devices are given; or,
with "visits", what updates do with ids."""

from __future__ import annotations

import gc
import json
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainer_child
from contents import PLACE, counted_contents
from ledger_invariants import run_jobs
from loop import Net, batches, loss_of, train_step
from satrap import (
    SGD,
    Adagrad,
    Adam,
    Checkpoint,
    Embeddings,
    Ftrl,
    MinCount,
    Normal,
    Reader,
    RowWiseAdagrad,
    Table,
    Validation,
)
from satrap import evaluate as evaluate_model
from satrap.config.features import Feature, Features
from satrap.config.tables import Always
from satrap.data.inputs import Inputs
from satrap.device.direct_owned_rows import DirectOwnedRows
from satrap.device.exchange import Exchange, LaunchOrder
from satrap.device.runs import Runs
from satrap.device.segments import JoinedIds
from satrap.errors import ConfigError, StreamError
from satrap.interrupts import SLICE_SECONDS
from satrap.train import open_worker

NUM_IDS = 40
UNCOUNTED = (*PLACE, "lookups", "hits", "refused")
"""An id that several trainers look up together counts once."""
SHARDED = {"replicated": ("item", "user", "rare", "last"), "columns": ("item", "tiny", "rare", "last")}


def ids_of(num: int, *, numbered: bool = False) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([*range(num), *([] if numbered else [2**63, 2**64 - 1])], np.uint64)


def features(shard: str = "rows", num_rows: int | None = None, *, jagged: bool = True) -> dict[str, Any]:
    """Return tables of three layouts, with every kind of pooling, of 16 bits too. shard: of some of the tables.
    num_rows: of all tables. jagged: whether there are jagged sequences."""

    def of(name: str) -> Any:
        return shard if name in SHARDED.get(shard, ("user", "last")) else "rows"

    item = Table("item", dim=5, optimizer=Adagrad(lr=0.1), initial=Normal(std=0.5), num_buckets=16, shard=of("item"))
    user = Table(
        "user",
        dim=8,
        optimizer=RowWiseAdagrad(lr=0.1),
        initial=Normal(std=0.5),
        dtype="bfloat16",
        frozen=range(5, 12),
        shard=of("user"),
    )
    tiny = Table(
        "tiny",
        dim=8,
        optimizer=SGD(lr=0.1, momentum=0.9),
        initial=Normal(std=0.5),
        num_buckets=1,
        dtype="float16",
        shard=of("tiny"),
    )
    rare = Table(
        "rare",
        dim=5,
        optimizer=Adam(lr=0.1),
        admission=MinCount(2),
        expire_after=4,
        frozen=[5, 6, 8, 11],
        shard=of("rare"),
    )
    last = Table(
        "last",
        dim=5,
        optimizer=Ftrl(lr=0.1, l1=0.01),
        initial=Normal(std=0.5),
        on_nonfinite="skip",
        shard=of("last"),
    )
    if num_rows is not None:
        numbered: dict[str, Any] = {"num_rows": num_rows, "admission": Always(), "expire_after": None}
        item, user, tiny, rare, last = (replace(table, **numbered) for table in (item, user, tiny, rare, last))
    declared = {
        "bag": Feature(item, "mean"),
        "item": Feature(item),
        "user": Feature(user, "sum", weighted=True),
        "tiny": Feature(tiny, "sqrtn"),
        "rare": Feature(rare, "sum"),
        "path": item.sequence(3),
        "last": last.bag("mean"),
        "padded": rare.sequence(2, keep="first", padding_id=4),
        "jagged": item.sequence(padding_id=4),
        "jagged last": rare.sequence(2, jagged=True),
    }
    return {name: feature for name, feature in declared.items() if jagged or not name.startswith("jagged")}


def inputs(
    rng: np.random.Generator, batch_size: int, ids: np.ndarray[Any, np.dtype[np.uint64]], names: tuple[str, ...]
) -> Inputs:
    lengths = rng.integers(0, 5, len(names) * batch_size)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    return Inputs(
        names=names,
        values=rng.choice(ids, offsets[-1]),
        offsets=offsets,
        weights=rng.normal(size=offsets[-1]).astype(np.float32),
        batch_size=batch_size,
    )


def compare(job: dict[str, Any]) -> dict[str, Any]:
    """Take random steps on both workers. Return how many rows there are at the end, and how many left the devices."""
    num_rows, largest, jagged = job.get("num_rows"), job.get("batch_size", 11), job.get("jagged", True)
    ids = ids_of(job.get("ids", NUM_IDS), numbered=num_rows is not None)
    if dist.get_world_size() == 1:  # has no need of collectives, but may use them: NCCL needs a GPU for each trainer
        open_worker._open_on_device = open_worker._open_among_devices
    rng, common = np.random.default_rng([job["compare"], dist.get_rank()]), np.random.default_rng(job["compare"])
    shards, place = ("rows", job["shard"]), job.get("device", "cpu")
    how: dict[str, Any] = {"seed": 3, "num_threads": 1, "output_dtype": job.get("output_dtype", "float32")}
    both = [
        Embeddings(features(shard, num_rows, jagged=jagged), device=device, device_memory=memory, **how)
        for shard, device, memory in zip(shards, (None, place), (None, job.get("device_memory")), strict=True)
    ]
    workers: list[Any] = [each.worker for each in both]
    stream = workers[1].open_stream(1)
    is_direct = isinstance(workers[1].rows._updates._owned(), DirectOwnedRows)
    assert is_direct == (num_rows is not None and job["shard"] in ("rows", "table") and not jagged)
    names = both[0].features.names
    for step in range(1, job["steps"] + 1):
        micro_batches, most = int(common.integers(1, 3)), int(common.integers(1, largest + 1))
        looked: list[list[Any]] = [[], []]
        for micro_batch in range(micro_batches):
            looks_up = micro_batch == 0 and step % dist.get_world_size() == dist.get_rank()  # as in a stream, one does
            if rng.random() < 0.2 and not looks_up:
                workers[1].pad(step, step)
                continue
            batch = inputs(rng, int(rng.integers(1, most + 1)), ids, names)
            for worker, of_worker in zip(workers, looked, strict=True):
                of_worker.append(worker.lookup(batch, step=step))
            require_same([looked[0][-1], looked[1][-1]])
        if looked[0] and rng.random() < 0.8:
            update(workers, looked, rng, step, both[0].features)
        else:
            for worker, of_worker in zip(workers, looked, strict=True):
                for each in of_worker:
                    worker.drop(each.ticket)
                worker.skip(step)
                worker.settle()
        if step % 3 == 0:
            workers[1].pause()
            dist.barrier()
            evaluate(workers, inputs(rng, 3, ids, names))
            dist.barrier()
    stream.end_lookups()
    stream.end_updates()
    dist.barrier()
    found = [counted_contents(worker, ids, UNCOUNTED) for worker in workers]
    assert workers[1].truncated == workers[0].truncated
    for name, expected in found[0].items():
        assert found[1][name] == expected, name
    rows = {name: len(table) for name, table in workers[1].tables.items()}
    moved, at_home = (
        {name: table.stats().get(count, 0) for name, table in workers[1].tables.items()}
        for count in ("moved_out", "at_home")
    )
    dist.barrier()
    for each in both:
        each.close()
    return {"rows": rows, "moved_out": moved, "at_home": at_home}


def refusal(options: dict[str, Any]) -> dict[str, Any]:
    """Return what Embeddings says about a table with these options."""
    try:
        Embeddings({"item": Table("item", **options)}, device="cpu")
    except ConfigError as error:
        return {"refused": str(error)}
    return {}


def differ(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train until trainer 1, or every trainer, does something else at step 3. Return the error and the rows."""
    way, after_error = job["differs"], dist.new_group(backend="gloo")  # the gradients of a step may be in the other one
    torch.manual_seed(0)
    embeddings, net, error = trainer_child.embeddings_of(job), Net(), ""
    net.register_buffer("unused", torch.zeros(1))  # DistributedDataParallel broadcasts it before each forward pass
    model = DistributedDataParallel(net)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    run = Checkpoint(job["checkpoint"], model, optimizer, embeddings)
    try:
        with embeddings.stream(batches(5 * dist.get_world_size()), overlap=job["overlap"]) as stream:
            for batch in list(stream) if job["ahead"] else stream:
                here = batch.step == 3 and (rank == 1 or job.get("all"))
                if here and way == "leaves out":
                    continue
                if here and way == "saves":
                    run.save()
                if here and way == "resumes":
                    run.resume("best")
                if here and way == "evaluates":
                    Validation(model, embeddings, batches(1)).step()
                if here and way == "ends":
                    break
                loss = loss_of(model, batch)
                if here and way == "no backward pass":
                    continue
                loss.backward()
                if here and way == "no step":
                    continue
                optimizer.step()
                optimizer.zero_grad()
    except StreamError as found:
        error = str(found)
    embeddings.drain() if not error else None
    dist.barrier(group=after_error)
    state = {"error": error} | trainer_child.state_of(embeddings, model)
    dist.barrier(group=after_error)
    embeddings.close()
    return state


def evaluate_unequally(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train, and after each step evaluate another number of batches than the other trainers, also with a Reader. Return
    what the batches showed."""
    torch.manual_seed(0)
    embeddings, net = trainer_child.embeddings_of(job), Net()
    net.register_buffer("unused", torch.zeros(1))  # DistributedDataParallel broadcasts it before each forward pass
    model, valid = DistributedDataParallel(net), batches(5, seed=9)
    shown: list[list[str]] = []
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    def score(batch: Any) -> torch.Tensor:
        shown[-1].append(float(batch.embeddings.double().sum()).hex())
        logits: torch.Tensor = net(batch.dense, batch.embeddings)
        return logits

    with embeddings.stream(batches(4 * dist.get_world_size()), overlap=job["overlap"]) as stream:
        for batch in stream:
            train_step(model, optimizer, batch)
            part = valid[: (2 * rank + batch.step) % 5] if job["unequal"] else []
            shown.append([])
            evaluate_model(model, embeddings.stream(part, train=False, overlap=job["overlap"]), score=score)
            evaluate_model(model, embeddings.stream(part, train=False))
    embeddings.drain()
    dist.barrier()
    embeddings.eval()
    assert evaluate_model(model, embeddings.stream(valid[: rank + 1])).num_samples == 8 * (rank + 1)
    servers: Any = embeddings.worker.servers
    with Reader(servers=list(servers.addresses), features=embeddings.features) as reader:
        for each in valid[rank:]:
            np.testing.assert_array_equal(reader(each).embeddings, embeddings(each).embeddings)
    found = {"shown": shown} | trainer_child.state_of(embeddings, model)
    dist.barrier()
    embeddings.close()
    return found


def train_slowly(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train on three streams, with a trainer that the others wait for. Meanwhile the earlier streams are collected, or
    closed again by one trainer. Return the rows."""
    torch.manual_seed(0)
    embeddings, model = trainer_child.embeddings_of(job), DistributedDataParallel(Net())
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    kept: list[Any] = []
    for _ in range(3):
        with embeddings.stream(batches(3 * dist.get_world_size())) as stream:
            for batch in stream:
                train_step(model, optimizer, batch)
                gc.collect()
                if rank == 1:
                    for each in kept:
                        each.close()
                    time.sleep(3 * SLICE_SECONDS)
        if job["slowly"] == "kept":
            kept.append(stream)
    embeddings.drain()
    dist.barrier()
    found = trainer_child.state_of(embeddings, model)
    dist.barrier()
    embeddings.close()
    return found


class NormNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(torch.nn.BatchNorm1d(1))


def train_in_order(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train with threads that are held up at random, differently on each trainer. Return the order in which this
    trainer gave collectives to its device: which kind of exchange each was of, or "gradients" or "buffers" of the dense
    network; and the buffers that the last step found."""
    rng, all_to_all = np.random.default_rng([job["seed"], rank]), Exchange._all_to_all
    launched, buffers = list[Any](), list[Any]()
    all_reduce, broadcast, agree = dist.all_reduce, dist.broadcast, LaunchOrder.agree
    kinds: dict[int, str] = {}

    def note(self: Exchange, *given: Any) -> None:
        kind = kinds.setdefault(id(self), threading.current_thread().name.rsplit("-", 1)[1])
        if given[-1] is self._launches.group:
            launched.append(kind)
        elif rng.random() < 0.5:
            time.sleep(rng.random() * 0.02)
        all_to_all(self, *given)

    def noted(kind: str, collective: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if options.get("group") is embeddings.worker.launches.group:
                launched.append(kind)
            return collective(*args, **options)

        return call

    def agree_later(self: LaunchOrder) -> int:
        time.sleep(rng.random() * 0.01)
        return agree(self)

    Exchange._all_to_all, LaunchOrder.agree = note, agree_later  # type: ignore[assignment, method-assign]
    try:
        torch.manual_seed(0)
        embeddings = trainer_child.embeddings_of(job)
        net = NormNet()
        norm = net.layers[3]
        norm.register_forward_pre_hook(lambda *_: buffers.append([each.tolist() for each in norm.buffers()]))
        model = embeddings.parallel(net)
        dist.all_reduce, dist.broadcast = noted("gradients", all_reduce), noted("buffers", broadcast)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        with embeddings.stream(batches(job["num_batches"]), overlap=True) as stream:
            for batch in stream:
                train_step(model, optimizer, batch)
        embeddings.drain()
        dist.barrier()
        found = trainer_child.state_of(embeddings, model)
        dist.barrier()
        embeddings.close()
    finally:
        Exchange._all_to_all, LaunchOrder.agree = all_to_all, agree  # type: ignore[method-assign]
        dist.all_reduce, dist.broadcast = all_reduce, broadcast
    return found | {"launched": launched, "buffers": buffers[-1]}


def count_visits(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Take steps whose ids are resolved ahead; trainer 1 drops one. For each step return what the update called in the
    core, and which calls exchanged, joined or copied something for each id."""
    declared = {name: each for name, each in features(jagged=False).items() if each.table.name != "rare"}
    embeddings = Embeddings(declared, device="cpu", num_threads=1)
    worker: Any = embeddings.worker
    rows, stream, calls, found = worker.rows, worker.open_stream(1), list[str](), list[list[str]]()
    lookups, engine = rows._lookup_thread._thread, rows._updates._owned()._engine

    def noted(name: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            answer = call(*args, **options)
            if threading.current_thread() is not lookups:
                calls.append(name if answer is None or name != "update_ordered_frames" else f"{name}: found again")
            return answer

        return run

    class Noted:
        def __init__(self, core: Any) -> None:
            self._core = core

        def __getattr__(self, name: str) -> Any:
            return noted(name, getattr(self._core, name))

    plain = Exchange.ids, JoinedIds.join, Runs.to_device
    engine.core, rows._split = Noted(engine.core), Noted(rows._split)
    Exchange.ids = noted("send ids", Exchange.ids)  # type: ignore[method-assign]
    JoinedIds.join = noted("join ids", JoinedIds.join)  # type: ignore[method-assign]
    Runs.to_device = noted("copy runs", Runs.to_device)  # type: ignore[method-assign]
    rng = np.random.default_rng(rank)
    try:
        for step in range(1, job["visits"] + 1):
            batch = inputs(rng, 4, ids_of(NUM_IDS), worker.features.names)
            looked = worker.lookup_resolved(worker.resolve(batch, step=step, oldest_open=step))
            rows._lookup_thread.submit(lambda: None).result(60)  # it has ordered what the lookup has found
            calls.clear()
            if rank == 1 and step == job["drops"]:
                worker.drop(looked.ticket)
                worker.skip(step)
                worker.settle()
            else:
                gradients = {name: torch.ones_like(of_rows) for name, of_rows in looked.sequences.items()}
                worker.update([looked.ticket], [torch.ones_like(looked.block)], [gradients], step=step)
            found.append(sorted(set(calls)))
            dist.barrier()
    finally:
        Exchange.ids, JoinedIds.join, Runs.to_device = plain  # type: ignore[method-assign]
    stream.end_lookups()
    stream.end_updates()
    dist.barrier()
    embeddings.close()
    return {"calls": found}


def require_same(looked: list[Any]) -> None:
    host, device = looked
    for rows, expected in (
        (device.block, host.block),
        *((device.sequences[name], host.sequences[name]) for name in host.sequences),
    ):
        assert torch.equal(rows.cpu(), torch.from_numpy(expected).to(rows.dtype))
    for masks, expected in ((device.masks, host.masks), (device.offsets, host.offsets)):
        assert masks.keys() == expected.keys()
        for name, mask in expected.items():
            np.testing.assert_array_equal(masks[name], mask)


def evaluate(workers: list[Any], batch: Inputs) -> None:
    require_same([worker.lookup(batch, train=False) for worker in workers])


def update(
    workers: list[Any], looked: list[list[Any]], rng: np.random.Generator, step: int, of_features: Features
) -> None:
    """Make the same update on both workers; now and then without a gradient, or with one that is not finite."""
    at = of_features.columns[of_features.names.index("last")]
    blocks: list[Any] = [rng.normal(size=each.block.shape).astype(np.float32) for each in looked[0]]
    sequences = [
        {name: rng.normal(size=rows.shape).astype(np.float32) for name, rows in each.sequences.items()}
        for each in looked[0]
    ]
    if rng.random() < 0.3:
        blocks[0][0, at] = np.inf
    if rng.random() < 0.3:
        blocks[-1] = None
    if rng.random() < 0.3:
        del sequences[0]["path"]
    how: dict[str, Any] = {"step": step, "scale": 0.5, "lrs": {"item": 0.1 / step}}
    place, dtype = workers[1].device, looked[1][0].block.dtype
    tensors = [None if block is None else torch.from_numpy(block).to(dtype) for block in blocks]
    of_sequences = [{name: torch.from_numpy(rows).to(dtype) for name, rows in each.items()} for each in sequences]
    rounded = [None if block is None else block.float().numpy() for block in tensors]
    of_rounded = [{name: rows.float().numpy() for name, rows in each.items()} for each in of_sequences]
    workers[0].update([each.ticket for each in looked[0]], rounded, of_rounded, **how)
    there = [None if block is None else block.to(place) for block in tensors]
    of_there = [{name: rows.to(place) for name, rows in each.items()} for each in of_sequences]
    workers[1].update([each.ticket for each in looked[1]], there, of_there, **how)


def main(rank: int, world_size: int, rendezvous: str, job: dict[str, Any]) -> None:
    if not {"compare", "launches", "refused", "differs", "unequal", "slowly", "visits"} & job.keys():
        trainer_child.main(rank, world_size, rendezvous, job)
        return
    trainer_child.join(rank, world_size, rendezvous, job)
    if "differs" in job:
        found = differ(job, rank)
    elif "unequal" in job:
        found = evaluate_unequally(job, rank)
    elif "slowly" in job:
        found = train_slowly(job, rank)
    elif "launches" in job:
        found = train_in_order(job, rank)
    elif "visits" in job:
        found = count_visits(job, rank)
    elif "compare" in job:
        found = compare(job)
    else:
        found = refusal(job["refused"])
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_jobs(main)
