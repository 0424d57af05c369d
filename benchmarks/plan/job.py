"""The job that the planner's benchmark predicts and runs: a fully connected network on Criteo's text.

It writes what its steps after the warm-up took: wall time, and the CPU time of all processes of the run, which are
those that its parent process started.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import satrap

NUM_DENSE, NUM_FEATURES = 13, 26
HIDDEN = (256, 128)
BATCH = 2048
_TICKS = os.sysconf("SC_CLK_TCK")


def tables_of(dim: int) -> dict[str, satrap.Table]:
    """Return the table of each feature."""
    return {f"C{number}": satrap.Table(f"C{number}", dim=dim) for number in range(1, NUM_FEATURES + 1)}


def cpu_seconds() -> float:
    """Return the CPU time so far of all children of this process's parent, which are alive."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == os.getppid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def train(job: dict[str, Any]) -> None:
    torch.manual_seed(0)
    embeddings = satrap.Embeddings(tables_of(job["dim"]), staleness=job["staleness"])
    network = satrap.models.FFNN(NUM_DENSE, embeddings, hidden=HIDDEN)
    model = embeddings.parallel(network)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.02))
    source = satrap.Criteo(job["path"], batch_size=BATCH, epochs=1000)
    warmup, steps = job["num_warmup"], job["num_steps"]
    begin = began = 0.0
    for number, batch in enumerate(embeddings.stream(source)):
        if number == warmup:
            begin, began = time.perf_counter(), cpu_seconds()
        if number == warmup + steps:
            break
        logits = model(batch.dense, batch.embeddings)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds, cpu = time.perf_counter() - begin, cpu_seconds() - began
    counted = embeddings.counters()
    if embeddings.trainers.rank == 0:
        measured = {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "samples": steps * BATCH * embeddings.trainers.world_size,
            "row_bytes": sum(counted.bytes.values()) / sum(counted.rows.values()),
            "rows": counted.rows,
        }
        Path(job["out"]).write_text(json.dumps(measured))
    embeddings.close()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
