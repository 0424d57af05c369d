"""Reading Criteo's text: how fast `satrap.Criteo` alone reads batches from a file, and what reading adds to a step.

The file is in a folder in memory, so that no disk is measured; `satrap.synthetic.Clicks` writes it. What reading
adds is the time of training on the whole file, less that of training on the same batches in memory, as a share of the
latter. The source reads ahead in other threads, so the two take turns pass by pass, not step by step.
"""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import satrap
from benchmarks.contenders import EPS, LR
from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.harness.ranks import use_threads
from benchmarks.train.model import DenseStep, satrap_model
from benchmarks.workload import SAMPLES
from satrap.data.synthetic import Clicks

NUM_IDS = 2_000_000  # all features have so many together
READ_PASSES = 5
TRAIN_PASSES = 3


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Read a file alone, then train every model of the job on it and on its batches in memory."""
    use_threads(int(job["num_threads"]))
    path, clicks = Path(job["folder"]) / "day.tsv", Clicks(num_samples=job["lines"], cardinalities=NUM_IDS)
    clicks.write_criteo(path)
    source = satrap.Criteo(str(path), batch_size=SAMPLES, drop_last=True)
    rate = measure_rate(source, path.stat().st_size, clicks.id_names)
    table = satrap.Table("ids", dim=job["dim"], optimizer=satrap.Adagrad(lr=LR, eps=EPS))
    embeddings = satrap.Embeddings(dict.fromkeys(clicks.id_names, table), seed=1)
    streams = {
        f"{model['top']}/{model['precision']}:satrap": rate | measure_training(embeddings, source, model)
        for model in job["models"]
    }
    return {"streams": streams}


def measure_rate(source: Any, size: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Return bytes of the file over the time to read its batches, in MB/s; the median of some passes after one more."""
    rates = []
    for _ in range(1 + READ_PASSES):
        start = time.perf_counter()
        samples = sum(batch.batch_size for batch in source.batches(names))
        rates.append(size / (time.perf_counter() - start) / 1e6)
    return {"mb_per_s": round(statistics.median(rates[1:]), 1), "file_bytes": size, "samples": samples}


def measure_training(embeddings: satrap.Embeddings, source: Any, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what reading adds to the steps of a pass (`added_share`), the median of some pairs of passes."""
    step = DenseStep(satrap_model(embeddings, model["top"]), model["precision"])
    batches = list(source.batches(embeddings.features))

    def train(data: Any) -> float:
        """Train one pass; return its seconds."""
        optimizer = embeddings.optimizer(step.optimizer)
        start = time.perf_counter()
        for _ in step.train(optimizer, embeddings.stream(data)):
            pass
        return time.perf_counter() - start

    train(batches)  # creates every row, and warms up
    noise = read_cpu()
    pairs = [(train(source), train(batches)) for _ in range(TRAIN_PASSES)]
    memory_ms = statistics.median(1e3 * memory / len(batches) for _, memory in pairs)
    return {
        "added_share": round(statistics.median(read / memory - 1.0 for read, memory in pairs), 4),
        "memory_step_ms": round(memory_ms, 3),
        **noise_between(noise, read_cpu()),
    }
