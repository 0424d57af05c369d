"""One of several trainers on emulated machines: `python -m benchmarks.cluster.trainer '<job as JSON>'`.

It trains the light DLRM in the loop that a user writes, in turns: a line on stdin says with which staleness (`Turn`), a
line on stdout how long a step took. The dense gradients go round by DDP over gloo; with "async" the model is its own,
and its embeddings have servers of their own, since their job is another. Every turn begins with steps that are not
timed, and is left while more batches are on their way: a step in its middle is timed, not the way in and out.
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
from benchmarks.cluster.prediction import ASYNC
from benchmarks.cluster.turn import BATCH, Turn
from benchmarks.train.cases import BOTTOM, TOPS
from benchmarks.train.contenders import FEATURES
from benchmarks.train.model import SEED, DenseStep
from benchmarks.train.workload import NUM_DENSE, load_batches
from benchmarks.workload import NUM_FEATURES, SAMPLES, hashed_ids
from satrap import Embeddings
from satrap.data.inputs import Inputs
from satrap.models import DLRM
from satrap.worker.sharded_rows import ShardedWorker

TIMEOUT = timedelta(seconds=120)
MOST_STALENESS = 16


class Training:
    """A model with its embeddings."""

    def __init__(self, job: Mapping[str, Any], server: str, *, apart: bool) -> None:
        """apart: the dense parameters are on the servers too."""
        options: dict[str, Any] = {"dense": "async"} if apart else {}
        self.world = int(job["world"])
        self.embeddings = Embeddings(
            tables.one_table(int(job["rows"]), int(job["dim"])),
            seed=1,
            staleness=MOST_STALENESS,
            num_threads=1,
            servers=[server],
            keys=job["keys"],
            **options,
        )
        torch.manual_seed(SEED)
        model: torch.nn.Module = DLRM(NUM_DENSE, self.embeddings, bottom=BOTTOM, top=TOPS["light"])
        self.step = DenseStep(model if apart else DistributedDataParallel(model), "fp32")
        self.optimizer = self.embeddings.optimizer(self.step.optimizer)

    def take(self, turn: Turn, batches: Sequence[Inputs]) -> dict[str, float]:
        """The seconds of a step, and how many batches were looked up. batches: of all trainers; each has its share."""
        worker = self.embeddings.worker
        assert isinstance(worker, ShardedWorker)
        # What the options of two `Embeddings` would be; two would need the rows twice.
        self.embeddings.staleness = turn.staleness
        worker.servers.together = self.world if turn.staleness == 0 else 0
        last = turn.num_untimed + turn.num_steps
        count = self.world * (last + turn.staleness + 1)
        start = 0.0
        with self.embeddings.stream(list(islice(cycle(batches), count))) as stream:
            for number, batch in enumerate(stream, 1):
                loss = self.step.loss(batch.dense, batch.embeddings, batch.label)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                if number == turn.num_untimed:
                    start = time.perf_counter()
                if number == last:
                    break
            seconds = (time.perf_counter() - start) / turn.num_steps
        self.embeddings.drain()
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {float(loss)} in mode {turn.mode}")
        return {"seconds": seconds, "lookups": sum(stream.staleness_seen.values())}


def batches_of(job: Mapping[str, Any]) -> list[Inputs]:
    """Small batches: parts of the file's large ones."""
    drawn, found = load_batches(Path(job["file"])), []
    for rows, dense, labels in zip(drawn.rows, drawn.dense, drawn.labels, strict=True):
        ids = hashed_ids(rows).reshape(NUM_FEATURES, SAMPLES)
        for at in range(0, SAMPLES, BATCH):
            part = slice(at, at + BATCH)
            values = ids[:, part].ravel()
            found.append(Inputs(names=FEATURES, values=values, batch_size=BATCH, dense=dense[part], label=labels[part]))
    return found


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    how = {"init_method": job["meeting"], "rank": job["rank"], "world_size": job["world"], "timeout": TIMEOUT}
    dist.init_process_group("gloo", **how)
    batches = batches_of(job)
    trainings = {name: Training(job, server, apart=name == ASYNC) for name, server in job["servers"].items()}
    print(len(batches) // job["world"], flush=True)
    for line in sys.stdin:
        turn = Turn(**json.loads(line))
        found = trainings[ASYNC if turn.mode == ASYNC else "sync"].take(turn, batches)
        dist.barrier()  # nobody begins the next turn, or another network, while one is at this
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
