"""A trainer of `network.py`, in the loop that a user writes: `python -m benchmarks.paper.link_trainer '<JSON>'`."""

import json
import sys
import time
from datetime import timedelta
from itertools import cycle, islice

import numpy as np
import torch
import torch.distributed as dist

import satrap
from benchmarks.paper.network import BATCH, DEVICE_SECONDS, DIM, NUM_FEATURES, NUM_IDS, WARM_UP


def batches(rank: int, count: int) -> list[satrap.Inputs]:
    """Draw batches of ids that repeat as real ones do."""
    random = np.random.default_rng(rank)
    names = tuple(f"C{number}" for number in range(NUM_FEATURES))
    drawn = []
    for _ in range(count):
        ranks = np.exp(random.random((NUM_FEATURES, BATCH)) * np.log(NUM_IDS)).astype(np.uint64)
        ids = ranks + (np.arange(NUM_FEATURES, dtype=np.uint64) << np.uint64(32))[:, None]
        label = (random.random(BATCH) < 0.3).astype(np.float32)
        drawn.append(satrap.Inputs(names=names, values=ids.reshape(-1), batch_size=BATCH, dense=None, label=label))
    return drawn


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=job["rendezvous"], rank=job["rank"], world_size=job["world_size"],
        timeout=timedelta(seconds=300),
    )  # fmt: skip
    kind, _, late = job["mode"].partition(" ")
    drawn = batches(job["rank"], 16)
    table = satrap.Table("ids", dim=DIM, optimizer=satrap.RowWiseAdagrad(lr=0.05))
    embeddings = satrap.Embeddings(
        dict.fromkeys(drawn[0].names, table), staleness=int(late or 0), num_threads=1,
        deployment=satrap.Deployment(job["servers"], keys=job["keys"]), dense="async" if kind == "async" else "sync",
    )  # fmt: skip
    net = torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES * DIM, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    model = embeddings.parallel(net)
    optimizer = embeddings.optimizer(torch.optim.Adagrad(net.parameters(), lr=0.01))

    def train(steps: int) -> tuple[float, float]:
        """Take steps; return the seconds and the CPU seconds of one, without those of the warm-up."""
        start, cpu = 0.0, 0.0
        # More batches than steps, so that the last timed step has others in flight behind it.
        data = [*islice(cycle(drawn), (WARM_UP + steps + int(late or 0) + 1) * job["world_size"])]
        with embeddings.stream(data) as stream:
            for number, batch in enumerate(stream, 1):
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    model(batch.embeddings).squeeze(1), batch.label
                )
                optimizer.zero_grad()
                time.sleep(DEVICE_SECONDS)  # before the backward pass, at whose end a device sends its gradients
                loss.backward()
                optimizer.step()
                if number == WARM_UP:
                    start, cpu = time.perf_counter(), time.process_time()
                if number == WARM_UP + steps:
                    break
            seconds, cpu = (time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps
        embeddings.drain()
        return seconds, cpu

    train(8)
    dist.barrier()
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    seconds, cpu = train(job["steps"])
    dist.barrier()  # no trainer leaves while others still train
    embeddings.close()
    steps = WARM_UP + job["steps"]
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "all_steps": steps}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
