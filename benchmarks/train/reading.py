"""Reading Criteo's text: how fast `satrap.Criteo` alone reads batches from a file, and what reading adds to a step.

The file is in a folder in memory, so that no disk is measured: a label, 13 counts, 26 texts of eight hexadecimal digits
drawn by Zipf(1.05), and some of either missing. What reading adds is the time of training on the whole file, less that
of training on the same batches in memory, as a share of the latter. The source reads ahead in other threads, so the two
take turns pass by pass, not step by step.
"""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import EPS, LR
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.harness.ranks import use_threads
from benchmarks.workload import NUM_DENSE, NUM_FEATURES, SAMPLES, hashed_ids, row_numbers

NAMES = [f"C{number}" for number in range(1, NUM_FEATURES + 1)]
SEED = 3
NUM_ROWS = 2_000_000  # that ids are drawn from
READ_PASSES = 5
TRAIN_PASSES = 3
MISSING_COUNTS = 0.2
MISSING_TEXTS = 0.05


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Read a file alone, then train every model of the job on it and on its batches in memory."""
    use_threads(int(job["num_threads"]))
    from satrap import Criteo

    path = Path(job["folder"]) / "day.tsv"
    write_text(path, int(job["lines"]))
    rate = measure_rate(Criteo(str(path), batch_size=SAMPLES, drop_last=True), path.stat().st_size)
    training = Training(Criteo(str(path), batch_size=SAMPLES, drop_last=True), job)
    models = [(model["top"], model["precision"]) for model in job["models"]]
    streams = {f"{top}/{precision}:satrap": rate | training.measure(top, precision) for top, precision in models}
    return {"streams": streams}


def measure_rate(source: Any, size: int) -> dict[str, Any]:
    """Return bytes of the file over the time to read its batches, in MB/s; the median of some passes after one more."""
    rates = []
    for _ in range(1 + READ_PASSES):
        start = time.perf_counter()
        samples = sum(batch.batch_size for batch in source.batches(NAMES))
        rates.append(size / (time.perf_counter() - start) / 1e6)
    return {"mb_per_s": round(statistics.median(rates[1:]), 1), "file_bytes": size, "samples": samples}


class Training:
    """Satrap's tables and a source."""

    def __init__(self, source: Any, job: Mapping[str, Any]) -> None:
        import torch

        import satrap

        torch.set_num_threads(int(job["num_threads"]))
        table = satrap.Table("ids", dim=job["dim"], optimizer=satrap.Adagrad(lr=LR, eps=EPS))
        self.embeddings = satrap.Embeddings(dict.fromkeys(NAMES, table), seed=1)
        self.source = source
        self.batches = list(source.batches(self.embeddings.features))

    def measure(self, top: str, precision: str) -> dict[str, Any]:
        """Return what reading adds to the steps of a pass (`added_share`), the median of some pairs of passes."""
        from benchmarks.train.model import DenseStep, satrap_model

        step = DenseStep(satrap_model(self.embeddings, top), precision)
        self.train(step, self.batches)  # creates every row, and warms up
        noise = read_cpu()
        pairs = [(self.train(step, self.source), self.train(step, self.batches)) for _ in range(TRAIN_PASSES)]
        memory_ms = statistics.median(1e3 * memory / len(self.batches) for _, memory in pairs)
        return {
            "added_share": round(statistics.median(read / memory - 1.0 for read, memory in pairs), 4),
            "memory_step_ms": round(memory_ms, 3),
            **noise_between(noise, read_cpu()),
        }

    def train(self, step: Any, data: Any) -> float:
        """Train one pass; return its seconds."""
        optimizer = self.embeddings.optimizer(step.optimizer)
        start = time.perf_counter()
        for _ in step.train(optimizer, self.embeddings.stream(data)):
            pass
        return time.perf_counter() - start


def write_text(path: Path, num_lines: int) -> None:
    """Write a file in Criteo's format, the same for the same number of lines."""
    rng = np.random.default_rng([SEED, num_lines])
    with path.open("w") as file:
        for part in range(-(-num_lines // SAMPLES)):
            count = min(SAMPLES, num_lines - part * SAMPLES)
            file.write("".join(_lines(rng, part, count)))


def _lines(rng: np.random.Generator, part: int, count: int) -> list[str]:
    """Return the lines of one batch."""
    numbers = row_numbers(NUM_ROWS, "zipf", 1, part).reshape(NUM_FEATURES, SAMPLES)[:, :count]
    texts = (hashed_ids(numbers) >> np.uint64(32)).T.tolist()
    counts = np.minimum(np.exp(rng.exponential(2.0, (count, NUM_DENSE))), 1e6).astype(np.int64).tolist()
    labels = (rng.random(count) < 0.25).astype(np.int64).tolist()
    missing = rng.random((count, NUM_DENSE + NUM_FEATURES))
    missing = (missing < np.array([MISSING_COUNTS] * NUM_DENSE + [MISSING_TEXTS] * NUM_FEATURES)).tolist()
    lines = []
    for label, line_counts, line_texts, absent in zip(labels, counts, texts, missing, strict=True):
        fields = [str(number) for number in line_counts] + [f"{text:08x}" for text in line_texts]
        fields = ["" if is_absent else field for field, is_absent in zip(fields, absent, strict=True)]
        lines.append("\t".join([str(label), *fields]) + "\n")
    return lines
