"""Criteo click logs: predicts clicks from 13 counts and 26 categories, with a DLRM on real files of any size.

PATH is a file, a glob or a folder in Criteo's format (tab-separated, plain or .gz), or a URL of them. Lines are read in
their order, once. Give `--test PATH` for an AUC on other files; else the AUC shown is of samples that the model scored
before it trained on them. `--run FOLDER` keeps checkpoints there and goes on from the newest.
"""

import argparse

import torch

import satrap


def main() -> None:
    """Trains, and tests where there is something to test on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--test", help="files to test on")
    parser.add_argument("--run", help="a folder or URL for checkpoints")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=100_000_000, help="rows of all tables together")
    parser.add_argument("--device", help="of the dense network, e.g. cuda")
    given = parser.parse_args()

    torch.manual_seed(0)
    data = satrap.Criteo(given.path, batch_size=given.batch_size, max_bad_rows=1000)
    # A table for each feature: the same text in two columns is two different things, and would be one id of one table.
    tables = {
        f"C{i}": satrap.Table(f"C{i}", dim=given.dim, optimizer=satrap.Adagrad(lr=0.05), capacity=given.capacity // 26)
        for i in range(1, 27)
    }
    embeddings = satrap.Embeddings(tables, staleness=given.staleness)
    model = satrap.models.DLRM(13, embeddings, bottom=(512, 256), top=(1024, 1024, 512, 256, 1)).to(given.device)
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    run = satrap.Checkpoint(given.run, model, optimizer, embeddings, data, full_every=10) if given.run else None
    if run is not None and run.resume():
        print(f"goes on after step {embeddings.step}")

    with satrap.Progress(embeddings, window=1 << 20) as progress:
        for batch in embeddings.stream(data, device=given.device):
            logits = model(batch.dense, batch.embeddings)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.step(batch, loss=loss, scores=logits)
            if run is not None:
                run.save(every_steps=given.save_every)
    if run is not None:
        run.save(every_steps=1)  # unless the last step is saved already
    if given.test:
        embeddings.eval()
        model.eval()
        found = satrap.evaluate(model, embeddings.stream(data.replace(path=given.test), device=given.device))
        print(f"test AUC {found.auc():.4f}, normalised entropy {found.normalised_entropy():.4f}")


if __name__ == "__main__":
    main()
