"""Criteo click logs: predicts clicks from 13 counts and 26 categories, with a DLRM on real files of any size.

PATH is a file, a glob or a folder in Criteo's format (tab-separated, plain or .gz), or a URL of them. Lines are read in
their order, once: a second epoch makes the model worse on clicks that it has not seen. The batch size and the layers
follow from the number of samples. Give `--test PATH` for an AUC on other files; else the AUC shown is of samples that
the model scored before it trained on them. `--run FOLDER` keeps checkpoints there and goes on from the newest. The same
script runs under `satrap run`, with any number of servers, workers and trainers.

Without Criteo's files, write clicks in their format; this prints the best AUC that a model can reach on test.txt:

    from satrap.data.synthetic import Clicks

    clicks = Clicks(num_samples=300_000, cardinalities=225_000)
    clicks.write_criteo("train.txt")
    test = clicks.following(40_000)
    test.write_criteo("test.txt")
    print(test.best_auc())
"""

import argparse
from typing import NamedTuple

import fsspec
import torch

import satrap

LINE_BYTES = 240  # of Criteo's own files
GZ_LINE_BYTES = 100


class Settings(NamedTuple):
    """What the number of samples decides."""

    batch_size: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @classmethod
    def of(cls, samples: int) -> "Settings":
        """Return the settings for about so many samples.

        The batch size is the largest power of two that leaves some 300 steps, up to 4096: fewer steps do not train the
        layers. The layers grow with what there is to learn them from; the largest are those of MLPerf's DLRM.
        """
        batch_size = min(4096, max(64, 1 << max(1, samples // 300).bit_length() - 1))
        if samples < 1_000_000:
            return cls(batch_size, (64,), (128, 64, 1))
        if samples < 10_000_000:
            return cls(batch_size, (256, 64), (512, 256, 1))
        return cls(batch_size, (512, 256), (1024, 1024, 512, 256, 1))


def num_samples(path: str) -> int:
    """Estimate the number of samples from the sizes of the files."""
    filesystem, inside = fsspec.core.url_to_fs(path)
    files = [each for each in filesystem.expand_path(inside, recursive=True) if filesystem.isfile(each)]
    return sum(filesystem.size(each) // (GZ_LINE_BYTES if each.endswith(".gz") else LINE_BYTES) for each in files)


def main() -> None:
    """Trains, and tests where there is something to test on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--test", help="files to test on")
    parser.add_argument("--run", help="a folder or URL for checkpoints")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument(
        "--samples", type=int, help="about how many PATH has, for the settings (default: by the sizes of the files)"
    )
    parser.add_argument("--batch-size", type=int, help="of all trainers together (default: by the number of samples)")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=100_000_000, help="rows of all tables together")
    parser.add_argument("--device", help="of the dense network, e.g. cuda")
    given = parser.parse_args()
    settings = Settings.of(num_samples(given.path) if given.samples is None else given.samples)
    if given.batch_size is not None:
        settings = settings._replace(batch_size=given.batch_size)

    torch.manual_seed(0)
    # A table for each feature: the same text in two columns is two different things, and would be one id of one table.
    tables = {
        f"C{i}": satrap.Table(f"C{i}", dim=given.dim, optimizer=satrap.Adagrad(lr=0.05), capacity=given.capacity // 26)
        for i in range(1, 27)
    }
    embeddings = satrap.Embeddings(tables, staleness=given.staleness)
    trainers = embeddings.trainers
    data = satrap.Criteo(given.path, batch_size=max(1, settings.batch_size // trainers.world), max_bad_rows=1000)
    network = satrap.models.DLRM(13, embeddings, bottom=settings.bottom, top=settings.top)
    model = embeddings.parallel(network.to(given.device))
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    run = satrap.Checkpoint(given.run, model, optimizer, embeddings, data, full_every=10) if given.run else None
    if trainers.rank == 0:
        print(f"batches of {settings.batch_size} samples, bottom {settings.bottom}, top {settings.top}")
    if run is not None and run.resume() and trainers.rank == 0:
        print(f"goes on after step {embeddings.step}")

    with satrap.Progress(embeddings, sinks=None if trainers.rank == 0 else [], window=1 << 20) as progress:
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
        test = embeddings.stream(data.replace(path=given.test), device=given.device)
        found = satrap.evaluate(model, test)  # every trainer tests on all of it
        if trainers.rank == 0:
            print(f"test AUC {found.auc():.4f}, normalised entropy {found.normalised_entropy():.4f}")


if __name__ == "__main__":
    main()
