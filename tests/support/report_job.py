"""A training script with a `Progress` that is given all it takes: `report_job.py FOLDER NUM_STEPS`.

It waits at step 60 while the file FOLDER/hold exists. Its settings have markup in their names and values.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from lean_torch import skip_compiler
from loop import Net, batches, loss_of, tables
from satrap import Checkpoint, Embeddings, Progress

STEP_SECONDS = 1 / 256  # on a clock that makes an interval of every four steps
SETTINGS = {"<script>alert(1)</script>": "</script><img src=x onerror=alert(2)>", "folder": Path("data")}


def main(folder: Path, num_steps: int) -> None:
    torch.manual_seed(0)
    embeddings = Embeddings(tables(), staleness=2)
    model = embeddings.parallel(Net())
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    data: Any = batches(num_steps)
    run = Checkpoint(folder / "checkpoints", model, optimizer, embeddings, data)
    run.resume()
    record = folder / "plain" if "--plain" in sys.argv else None
    with Progress(
        embeddings, [], record=record, settings=SETTINGS, clock=lambda: STEP_SECONDS * embeddings.step
    ) as progress:
        for batch in embeddings.stream(data, overlap=True):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            progress.step(batch, loss=loss, scores=model(batch.dense, batch.embeddings))
            run.save(every_steps=20)
            if embeddings.step == 40:
                progress.report_evaluation(40, {"auc": 0.625}, is_best=True)
            while embeddings.step == 60 and (folder / "hold").exists():
                time.sleep(0.01)


if __name__ == "__main__":
    skip_compiler()
    main(Path(sys.argv[1]), int(sys.argv[2]))
