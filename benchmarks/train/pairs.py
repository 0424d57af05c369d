"""Timing one contender: every whole step is followed by a step of the same model with fixed embeddings.

The cost of the embeddings is a whole step minus a step of the dense network alone. Both drift by more than the
difference, so they are taken in turn and subtracted pair by pair. Several modes of a contender on one table (staleness
0 and 4) take turns of a few steps, so that noise of the machine affects them alike.

The process is pinned to as many cores as the case has threads: no contender may use more, and work beside a whole step
cannot hide in the dense step that follows, since torch has all cores.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.contenders import build
from benchmarks.harness.clock import noise_between, peak_resident_bytes, read_cpu
from benchmarks.harness.ranks import ALONE, Ranks, join, use_threads
from benchmarks.workload import SAMPLES, RowNumbers, load_batches

CONTENDERS = {
    "satrap": "train.trainers:SatrapTrain",
    "satrap_direct": "train.trainers:SatrapDirectTrain",
    "torch": "contenders.torch_table:TorchTable",
    "fbgemm": "contenders.fbgemm_table:FbgemmTable",
    "torchrec": "contenders.fbgemm_table:TorchrecTable",
}
PROBE_ROWS = 256
LOSS_STEPS = 4  # averaged at either end


@dataclass(kw_only=True)
class Stream:
    """A mode's batches and measurements."""

    trainer: Any
    batches: list[Any]
    whole: list[float] = field(default_factory=list)
    """Seconds of each step, warm-up included."""
    alone: list[float] = field(default_factory=list)
    """Seconds of the dense step after it."""
    losses: list[Any] = field(default_factory=list)


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Build one contender and measure its modes with every model, one model after another, on the same tables.

    The job's forms give the thread counts, one after another. Ranks step together, so rank 0's times are those of all.
    `change` is the mean absolute change of some rows over the first mode's warm-up with the first model; contenders
    that do the same work about agree on it.
    """
    from benchmarks.train.trainers import trainer_of  # which needs torch, as the contenders do; not so Paddle

    use_threads(int(job["table"]["num_threads"]), job.get("rank", 0))
    ranks = join(dict(job))
    contender = build(CONTENDERS[job["contender"]], job["table"], ranks)
    loaded = {label: load_batches(mode["file"]) for label, mode in job["modes"].items()}
    prepared = {label: contender.prepare_samples(batches) for label, batches in loaded.items()}
    probed: RowNumbers = np.unique(next(iter(loaded.values())).rows[0])[:PROBE_ROWS]
    del loaded
    before = contender.probe(probed)
    result: dict[str, Any] = {"streams": {}}
    for form in job["forms"]:
        use_threads(form["num_threads"], ranks.rank)
        for model in job["models"]:
            if form is not job["forms"][0] and not model["in_every_form"]:
                continue
            num_warmup = model["num_warmup"]
            streams = {
                label: Stream(
                    trainer=trainer_of(contender, mode["mode"], model["top"], model["precision"]),
                    batches=prepared[label][: num_warmup + model["num_steps"]],
                )
                for label, mode in job["modes"].items()
            }
            for stream in streams.values():
                take_turn(stream, 0, num_warmup)
                result.setdefault("change", float(np.abs(contender.probe(probed) - before).mean()))
            noise = take_turns(list(streams.values()), num_warmup, int(job["turn"]), ranks)
            for label, stream in streams.items():
                named = f"{model['top']}/{model['precision']}:{form['labels'][label]}"
                result["streams"][named] = {**summarize(stream, num_warmup), **noise}
    result["peak_resident_bytes"] = peak_resident_bytes(ranks.others)
    ranks.barrier()  # rank 0 has read the counters of the others
    return result


def take_turns(streams: Sequence[Stream], first: int, turn: int, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Run the batches of all streams from `first` on, `turn` of each in turn; return the noise."""
    noise = read_cpu(ranks.others)
    for begin in range(first, max(len(stream.batches) for stream in streams), turn):
        for stream in streams:
            take_turn(stream, begin, begin + turn)
    return noise_between(noise, read_cpu(ranks.others))


def take_turn(stream: Stream, begin: int, end: int) -> None:
    """Run some batches of one stream, a dense step after every whole step."""
    batches = stream.batches[begin:end]
    whole, alone = stream.trainer.steps(batches), stream.trainer.dense_steps(batches)
    for _ in batches:
        start = time.perf_counter()
        loss = next(whole)
        middle = time.perf_counter()
        next(alone)
        finish = time.perf_counter()
        stream.whole.append(middle - start)
        stream.alone.append(finish - middle)
        stream.losses.append(loss)
    if batches:
        start = time.perf_counter()
        if next(whole, None) is not None:
            raise RuntimeError("a contender took more steps than it has batches")
        stream.whole[-1] += time.perf_counter() - start  # the work that it deferred to the end of its batches


def summarize(stream: Stream, num_warmup: int) -> dict[str, Any]:
    """Return the figures of one mode with one model; times in milliseconds."""
    whole, alone = stream.whole[num_warmup:], stream.alone[num_warmup:]
    costs = [1e3 * (step - dense) for step, dense in zip(whole, alone, strict=True)]
    return {
        "samples_per_s": round(SAMPLES * len(whole) / sum(whole)),
        "step_ms": round(1e3 * statistics.median(whole), 3),
        "dense_ms": round(1e3 * statistics.median(alone), 3),
        "cost_ms": round(statistics.median(costs), 3),
        **first_and_last(stream.losses),
    }


def first_and_last(losses: Sequence[Any]) -> dict[str, float]:
    """Return the loss at both ends, which shows whether a contender trains."""
    numbers = [float(loss) for loss in losses]
    if not all(map(math.isfinite, numbers)):
        raise RuntimeError(f"expected finite losses, found {numbers}")
    ends = {"loss_first": numbers[:LOSS_STEPS], "loss_last": numbers[-LOSS_STEPS:]}
    return {name: round(statistics.fmean(some), 4) for name, some in ends.items()}
