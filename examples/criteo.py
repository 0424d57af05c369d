"""Criteo click logs: predicts clicks from 13 counts and 26 categories, with a DLRM on real files of any size.

PATH is a file, a glob or a folder in Criteo's format (tab-separated, plain or .gz), or a URL of them. Lines are read in
order and once: a second epoch makes the model worse on unseen clicks. The number of samples decides the batch size and
the layers. `--test PATH` prints the AUC on other files; the AUC shown during training is of samples that the model
scored before it trained on them. `--run FOLDER` saves checkpoints there and resumes from the newest. The same script
runs under `satrap run`, with any number of servers, workers and trainers.

Without Criteo's files, generate clicks in their format. This prints the best AUC that a model can reach on test.txt:

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

LINE_BYTES = 240  # as in Criteo's own files
GZ_LINE_BYTES = 100


class Settings(NamedTuple):
    """The settings that depend on the number of samples."""

    batch_size: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]

    @classmethod
    def of(cls, samples: int) -> "Settings":
        """Return the settings for about so many samples.

        The batch size is the largest power of two that leaves about 300 steps, up to 4096: fewer steps do not train the
        layers. The layers grow with the number of samples; the largest are those of MLPerf's DLRM.
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
    """Train, and test if test files are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--test", help="files for the test")
    parser.add_argument("--run", help="folder or URL for checkpoints")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument(
        "--samples",
        type=int,
        help="approximate number of samples in PATH (default: from the sizes of the files)",
    )
    parser.add_argument("--batch-size", type=int, help="of all trainers together (default: from the samples)")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=100_000_000, help="maximum rows of all tables together")
    parser.add_argument("--device", help="device of the dense network, e.g. cuda")
    args = parser.parse_args()
    settings = Settings.of(num_samples(args.path) if args.samples is None else args.samples)
    if args.batch_size is not None:
        settings = settings._replace(batch_size=args.batch_size)

    torch.manual_seed(0)
    # Each feature has a table: the same text in two columns has two meanings, and would be one id in a shared table.
    tables = {
        f"C{i}": satrap.Table(f"C{i}", dim=args.dim, optimizer=satrap.Adagrad(lr=0.05), capacity=args.capacity // 26)
        for i in range(1, 27)
    }
    embeddings = satrap.Embeddings(tables, staleness=args.staleness)
    trainers = embeddings.trainers
    data = satrap.Criteo(args.path, batch_size=max(1, settings.batch_size // trainers.world_size), max_bad_rows=1000)
    network = satrap.models.DLRM(13, embeddings, bottom=settings.bottom, top=settings.top)
    model = embeddings.parallel(network.to(args.device))
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))
    run = satrap.Checkpoint(args.run, model, optimizer, embeddings, data, full_every=10) if args.run else None
    if trainers.rank == 0:
        print(f"batches of {settings.batch_size} samples, bottom {settings.bottom}, top {settings.top}")
    if run is not None and run.resume() and trainers.rank == 0:
        print(f"continues after step {embeddings.step:,}")

    with satrap.Progress(embeddings, sinks=None if trainers.rank == 0 else [], window=1 << 20) as progress:
        for batch in embeddings.stream(data, device=args.device):
            logits = model(batch.dense, batch.embeddings)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.step(batch, loss=loss, scores=logits)
            if run is not None:
                run.save(every_steps=args.save_every)
    if run is not None:
        run.save(every_steps=1)  # no effect if the last step is already saved
    if args.test:
        embeddings.eval()
        model.eval()
        test = embeddings.stream(data.replace(path=args.test), device=args.device)
        evaluation = satrap.evaluate(model, test)  # every trainer tests on all files
        if trainers.rank == 0:
            print(f"test AUC {evaluation.auc():.4f}, normalised entropy {evaluation.normalised_entropy():.4f}")


if __name__ == "__main__":
    main()
