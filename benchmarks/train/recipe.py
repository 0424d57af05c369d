"""DLRM-v3's streaming recipe, as examples/dlrm_v3.py trains it, beside plain torch on the same windows.

Both train the same HSTU with Adam and the same first parameters, and their tables by row-wise Adagrad. Plain torch has
an `nn.Embedding` with sparse gradients for each table, which holds every row from the start; Satrap creates the rows
that it sees. The windows are drawn before anything is timed. Satrap's time has that of reading the arrays.
"""

import importlib
import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import LR, RANGE
from benchmarks.contenders.torch_table import rowwise_step
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.harness.ranks import use_threads

WINDOWS, FIRST_WINDOW = 100, 8  # by the first one that is trained on, histories are at their longest
HISTORY, LAYERS, HEADS, REQUESTS = 64, 1, 2, 128
LOSS_STEPS = 4  # averaged at either end
TABLES = {
    "user": "user",
    "history": "item",
    "history_category": "category",
    "candidate": "item",
    "candidate_category": "category",
}
NUMBERS = {"history": "action", "candidate": "good"}


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train one contender on the windows; return requests a second, and the losses."""
    use_threads(int(job["num_threads"]))
    torch.set_num_threads(int(job["num_threads"]))
    recipe: Any = importlib.import_module("examples.dlrm_v3")
    count = job["num_warmup"] + job["num_steps"]
    requests = recipe.Requests(job["rows"], WINDOWS, HISTORY)
    drawn = (batch for window in range(FIRST_WINDOW, WINDOWS) for batch in requests.batches(window, REQUESTS))
    batches = list(islice(drawn, count))
    torch.manual_seed(1)
    network = recipe.Ranker(job["dim"], HISTORY, LAYERS, HEADS)
    train = {"satrap": train_satrap, "torch": train_torch}[job["contender"]]
    seconds, losses, start, noise = [], [], time.perf_counter(), read_cpu()
    for loss in train(recipe, network, job, batches):
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
        start = time.perf_counter()
    timed = seconds[job["num_warmup"] :]
    result = {
        "samples_per_s": round(REQUESTS * len(timed) / sum(timed), 1),
        "step_ms": round(1e3 * statistics.median(timed), 3),
        "loss_first": round(statistics.mean(losses[:LOSS_STEPS]), 4),
        "loss_last": round(statistics.mean(losses[-LOSS_STEPS:]), 4),
        **noise_between(noise, read_cpu()),
    }
    return {"streams": {f"recipe:{job['contender']}": result}}


def train_satrap(recipe: Any, network: Any, job: Mapping[str, Any], batches: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield the loss of each step, in the loop of the example."""
    import satrap

    ids = {name: satrap.IdColumn(numbers=column) for name, column in NUMBERS.items()}
    features = recipe.features(job["dim"], HISTORY, LR)
    embeddings = satrap.Embeddings(features, num_threads=job["num_threads"])
    optimizer = embeddings.optimizer(torch.optim.Adam(network.parameters(), lr=1e-3))
    for batch in embeddings.stream(satrap.IterableSource(batches, ids=ids, extra="window")):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(network(batch), recipe.label(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


class PlainBatch(dict[str, Any]):
    """The rows of a batch by feature, as the model reads them; its length is that of the batch."""

    def __len__(self) -> int:
        return len(self["user"])


def train_torch(recipe: Any, network: Any, job: Mapping[str, Any], batches: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield the loss of each step with tables of plain torch. The rows of a sequence are in Satrap's class for them."""
    from satrap.train.sequence import JaggedSequence

    num_users = recipe.Requests(job["rows"], WINDOWS, HISTORY).num_users
    sizes, tables, sums = {"item": job["rows"], "category": recipe.CATEGORIES, "user": num_users}, {}, {}
    for name, size in sizes.items():
        weight = torch.empty(size, job["dim"]).uniform_(-RANGE, RANGE)
        tables[name], sums[name] = torch.nn.Embedding(size, job["dim"], sparse=True, _weight=weight), torch.zeros(size)
    adam = torch.optim.Adam(network.parameters(), lr=1e-3)
    for arrays in batches:
        batch = PlainBatch(user=tables["user"](torch.from_numpy(arrays["user"])))
        for name in TABLES.keys() - {"user"}:
            ids, bounds = arrays[name]
            column = NUMBERS.get(name)
            numbers = {} if column is None else {column: torch.from_numpy(arrays[column][0]).double()}
            rows = tables[TABLES[name]](torch.from_numpy(np.ascontiguousarray(ids)))
            batch[name] = JaggedSequence(rows, torch.from_numpy(bounds), bounds, numbers)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(network(batch), recipe.label(batch))
        adam.zero_grad()
        for table in tables.values():
            table.weight.grad = None
        loss.backward()
        adam.step()
        for name, table in tables.items():
            rowwise_step(table.weight, sums[name])
        yield loss.detach()
