"""Reading Criteo's text: how fast `satrap.Criteo` alone makes batches of a file, and what reading adds to a step.

The file is written first, in a folder in memory, so that no disk is measured: a label, 13 counts, 26 texts of eight
hexadecimal digits drawn by Zipf(1.05), and some of either missing. What reading adds is the time of training on the
whole file, less that of training on the same batches kept in memory, as a share of the latter. The source reads ahead
in threads of its own, so the two cannot be taken step by step: they are taken pass by pass.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.contenders import EPS, LR
from benchmarks.ranks import use_threads
from benchmarks.train.workload import NUM_DENSE
from benchmarks.workload import NUM_FEATURES, SAMPLES, hashed_ids, row_numbers

SEED = 3
NUM_ROWS = 2_000_000  # that ids are drawn from
READ_PASSES = 5
TRAIN_PASSES = 3
MISSING_COUNTS = 0.2
MISSING_TEXTS = 0.05


def measure_reading(job: Mapping[str, Any]) -> dict[str, Any]:
    """Read a file alone, then train every model of the job on it and on its batches in memory."""
    use_threads(int(job["num_threads"]))
    from satrap import Criteo

    with tempfile.TemporaryDirectory(prefix="satrap-bench-", dir=job["folder"]) as folder:
        path = Path(folder) / "day.tsv"
        write_text(path, int(job["lines"]))
        rate = measure_rate(Criteo(str(path), batch_size=SAMPLES, drop_last=True), path.stat().st_size)
        trained = Training(Criteo(str(path), batch_size=SAMPLES, drop_last=True), job)
        models = [(each["top"], each["precision"]) for each in job["models"]]
        streams = {f"{top}/{precision}:satrap": rate | trained.measure(top, precision) for top, precision in models}
    return {"streams": streams, "peak_resident_bytes": peak_resident_bytes(), "versions": trained.versions()}


def measure_rate(source: Any, size: int) -> dict[str, Any]:
    """Bytes of the file over the time to make batches of it, in MB/s; the median of some passes, after one more."""
    names = [f"C{number}" for number in range(1, NUM_FEATURES + 1)]
    rates = []
    for _ in range(1 + READ_PASSES):
        start = time.perf_counter()
        samples = sum(batch.batch_size for batch in source.batches(names))
        rates.append(size / (time.perf_counter() - start) / 1e6)
    return {"mb_per_s": round(statistics.median(rates[1:]), 1), "file_bytes": size, "samples": samples}


class Training:
    """Satrap's tables and a source."""

    def __init__(self, source: Any, job: Mapping[str, Any]) -> None:
        import torch

        import satrap

        torch.set_num_threads(int(job["num_threads"]))
        table = satrap.Table("ids", dim=job["dim"], optimizer=satrap.Adagrad(lr=LR, eps=EPS))
        names = [f"C{number}" for number in range(1, NUM_FEATURES + 1)]
        self.embeddings = satrap.Embeddings(dict.fromkeys(names, table), seed=1)
        self.source = source
        self.batches = list(source.batches(self.embeddings.features))

    def measure(self, top: str, precision: str) -> dict[str, Any]:
        """`added_share`: what reading adds to the steps of a pass, the median of some pairs of passes."""
        import torch

        from benchmarks.train.cases import BOTTOM, TOPS
        from benchmarks.train.model import SEED as MODEL_SEED
        from benchmarks.train.model import DenseStep
        from satrap.models import DLRM

        torch.manual_seed(MODEL_SEED)
        step = DenseStep(DLRM(NUM_DENSE, self.embeddings, bottom=BOTTOM, top=TOPS[top]), precision)
        self.train(step, self.batches)  # every row exists, and everything is warm
        noise = read_cpu()
        pairs = [(self.train(step, self.source), self.train(step, self.batches)) for _ in range(TRAIN_PASSES)]
        memory_ms = statistics.median(1e3 * memory / len(self.batches) for _, memory in pairs)
        return {
            "added_share": round(statistics.median(read / memory - 1.0 for read, memory in pairs), 4),
            "memory_step_ms": round(memory_ms, 3),
            **noise_between(noise, read_cpu()),
        }

    def train(self, step: Any, data: Any) -> float:
        """Seconds of one pass."""
        optimizer = self.embeddings.optimizer(step.optimizer)
        start = time.perf_counter()
        for batch in self.embeddings.stream(data):
            loss = step.loss(batch.dense, batch.embeddings, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - start

    def versions(self) -> dict[str, str]:
        from importlib.metadata import version

        import torch

        return {"satrap": version("satrap"), "torch": str(torch.__version__), "numpy": np.__version__}


def write_text(path: Path, num_lines: int) -> None:
    """A file in Criteo's format, the same for the same number of lines."""
    rng = np.random.default_rng([SEED, num_lines])
    with path.open("w") as file:
        for part in range(-(-num_lines // SAMPLES)):
            count = min(SAMPLES, num_lines - part * SAMPLES)
            file.write("".join(_lines(rng, part, count)))


def _lines(rng: np.random.Generator, part: int, count: int) -> list[str]:
    """The lines of one batch."""
    numbers = row_numbers(NUM_ROWS, "zipf", 1, part).reshape(NUM_FEATURES, SAMPLES)[:, :count]
    texts = (hashed_ids(numbers) >> np.uint64(32)).T.tolist()
    counts = np.minimum(np.exp(rng.exponential(2.0, (count, NUM_DENSE))), 1e6).astype(np.int64).tolist()
    labels = (rng.random(count) < 0.25).astype(np.int64).tolist()
    missing = rng.random((count, NUM_DENSE + NUM_FEATURES))
    missing = (missing < np.array([MISSING_COUNTS] * NUM_DENSE + [MISSING_TEXTS] * NUM_FEATURES)).tolist()
    lines = []
    for label, numbers_of, texts_of, gone in zip(labels, counts, texts, missing, strict=True):
        fields = [str(number) for number in numbers_of] + [f"{text:08x}" for text in texts_of]
        fields = ["" if absent else field for field, absent in zip(fields, gone, strict=True)]
        lines.append("\t".join([str(label), *fields]) + "\n")
    return lines
