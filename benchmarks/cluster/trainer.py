"""One of several trainers on emulated machines: `python -m benchmarks.cluster.trainer '<job as JSON>'`.

It trains the light DLRM in the loop that a user writes, in turns: a line on stdin names the staleness (`Turn`), a line
on stdout has the seconds of a step. DDP reduces the dense gradients over gloo; with "async" the model has no DDP, and
its embeddings have another server, since their job is another. Every turn starts with steps that are not timed and ends
while more batches are in flight, so that neither the start nor the end of the pipeline is timed.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster import tables
from benchmarks.cluster.network import ASYNC, BATCH, Turn
from benchmarks.contenders.satrap_table import inputs_of
from benchmarks.train.model import DenseStep, satrap_model
from benchmarks.workload import NUM_FEATURES, SAMPLES, load_batches
from satrap import Deployment, Embeddings
from satrap.data.inputs import Inputs

TIMEOUT = timedelta(seconds=120)
MAX_STALENESS = 16


class Training:
    """A model with its embeddings."""

    def __init__(self, job: Mapping[str, Any], server: str, *, is_async: bool) -> None:
        """is_async: the dense parameters are on the servers too."""
        options: dict[str, Any] = {"dense": "async"} if is_async else {}
        self.world_size = job["world_size"]
        self.embeddings = Embeddings(
            tables.one_table(job["rows"], job["dim"]),
            seed=1,
            staleness=MAX_STALENESS,
            num_threads=1,
            deployment=Deployment([server], keys=job["keys"]),
            **options,
        )
        model = satrap_model(self.embeddings, "light")
        self.step = DenseStep(model if is_async else DistributedDataParallel(model), "fp32")
        self.optimizer = self.embeddings.optimizer(self.step.optimizer)

    def take(self, turn: Turn, batches: Sequence[Inputs]) -> dict[str, float]:
        """Return the seconds of a step and the number of lookups. batches: those of all trainers together."""
        worker = self.embeddings.worker
        assert worker.servers is not None
        # Two `Embeddings` with these as options would need the rows twice.
        self.embeddings.staleness = turn.staleness
        worker.servers.barrier_size = self.world_size if turn.staleness == 0 else 0
        last = turn.num_untimed + turn.num_steps
        count = self.world_size * (last + turn.staleness + 1)
        start, final_loss = 0.0, torch.tensor(torch.nan)
        with self.embeddings.stream(list(islice(cycle(batches), count))) as stream:
            for number, loss in enumerate(self.step.train(self.optimizer, stream), 1):
                if number == turn.num_untimed:
                    start = time.perf_counter()
                if number == last:
                    final_loss = loss
                    break
            seconds = (time.perf_counter() - start) / turn.num_steps
        self.embeddings.drain()
        if not torch.isfinite(final_loss):
            raise RuntimeError(f"expected a finite loss in mode {turn.mode}, found {float(final_loss)}")
        return {"seconds": seconds, "lookups": sum(stream.staleness_seen.values())}


def batches_of(job: Mapping[str, Any]) -> list[Inputs]:
    """Return small batches: parts of the file's large ones."""
    large, inputs = load_batches(Path(job["file"])), []
    for rows, dense, labels in zip(large.rows, large.dense, large.labels, strict=True):
        for begin in range(0, SAMPLES, BATCH):
            part = slice(begin, begin + BATCH)
            inputs.append(inputs_of(rows.reshape(NUM_FEATURES, SAMPLES)[:, part].ravel(), dense[part], labels[part]))
    return inputs


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=job["rendezvous"], rank=job["rank"], world_size=job["world_size"], timeout=TIMEOUT
    )
    batches = batches_of(job)
    trainings = {name: Training(job, server, is_async=name == ASYNC) for name, server in job["servers"].items()}
    print(len(batches) // job["world_size"], flush=True)
    for line in sys.stdin:
        turn = Turn(**json.loads(line))
        figures = trainings[ASYNC if turn.mode == ASYNC else "sync"].take(turn, batches)
        dist.barrier()  # no trainer starts the next turn, or another network, before all have finished this one
        print(json.dumps(figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
