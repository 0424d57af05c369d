"""A training script without any server addresses: `run_job.py FOLDER NUM_BATCHES [STALENESS [FILE [DEVICE]]]`.

It trains on generated batches or, if FILE is not "", on those of a Parquet file. At step 30 it waits while the file
FOLDER/hold exists. At the end trainer 0 writes the result to FOLDER/end.npz. At staleness 0 the result has the same
bits however often the job was interrupted.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lean_torch import skip_compiler
from loop import NUM_IDS, Net, batches, loss_of, tables
from satrap import Checkpoint, Embeddings, Parquet


def main(folder: Path, num_batches: int, staleness: int = 0, file: str = "", device: str = "cpu") -> None:
    torch.manual_seed(0)
    embeddings = Embeddings(tables(), staleness=staleness)
    net = Net().to(device)
    model = embeddings.parallel(net)
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    data: Any = batches(num_batches)
    if file:
        data = Parquet(file, dense=["d0", "d1"], label="label", batch_size=8)
    run = Checkpoint(folder / "checkpoints", model, optimizer, embeddings, data, full_every=2)
    print("resumed" if run.resume() else "began", flush=True)
    for batch in embeddings.stream(data, device=device):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        run.save(every_steps=5)
        while embeddings.step == 30 and (folder / "hold").exists():
            time.sleep(0.01)
    embeddings.drain()
    every = np.arange(NUM_IDS, dtype=np.uint64)
    found: dict[str, Any] = {
        name: np.concatenate(table.read(every)[:2], axis=1) for name, table in embeddings.tables.items()
    }
    found |= {f"dense{i}": each.detach().cpu().numpy() for i, each in enumerate(model.parameters())}
    if embeddings.trainers.rank == 0:
        np.savez(folder / "end.npz", **found | {"step": embeddings.step})


if __name__ == "__main__":
    skip_compiler()
    given = [*sys.argv[1:], "0"][:3]
    main(Path(given[0]), int(given[1]), int(given[2]), *sys.argv[4:6])
