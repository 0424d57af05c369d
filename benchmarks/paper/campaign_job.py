"""The script that the campaign trains: `campaign_job.py FOLDER STEPS`. At staleness 0 its result has the same bits
however often it was interrupted."""

import sys
from pathlib import Path

import numpy as np
import torch

import satrap
from satrap.data.synthetic import Clicks

BATCH, DIM = 64, 8


def main(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    clicks = Clicks(num_samples=2 * steps * BATCH, num_ids=4, cardinalities=2000)
    table = satrap.Table("ids", dim=DIM, optimizer=satrap.Adagrad(lr=0.05))
    embeddings = satrap.Embeddings(dict.fromkeys(clicks.id_names, table))
    net = torch.nn.Sequential(torch.nn.Linear(clicks.num_dense + 4 * DIM, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model = embeddings.parallel(net)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    blocks = list(clicks.batches(BATCH))
    data = [
        satrap.Inputs(names=clicks.id_names, values=np.ascontiguousarray(block["ids"].T).reshape(-1), batch_size=BATCH,
                      dense=block["dense"], label=block["label"])
        for block in blocks
    ]  # fmt: skip
    run = satrap.Checkpoint(folder / "checkpoints", model, optimizer, embeddings, data)
    run.resume()
    for batch in embeddings.stream(data):
        logits = model(torch.cat([batch.dense, batch.embeddings], 1)).squeeze(1)
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label).backward()
        optimizer.step()
        run.save(every_steps=10)
    embeddings.drain()
    ids = np.unique(np.concatenate([block["ids"].reshape(-1) for block in blocks]))
    rows = embeddings.tables["ids"].read(ids)
    if embeddings.trainers.rank == 0:
        dense = np.concatenate([weights.detach().numpy().reshape(-1) for weights in net.parameters()])
        np.savez(folder / "end.npz", values=rows[0], state=rows[1], dense=dense)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
