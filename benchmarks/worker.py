"""One measurement in a process of its own: `python -m benchmarks.worker '<job as JSON>'` prints the result as JSON.

A driver (benchmarks.store, benchmarks.train) starts one of these at a time, so that only one contender's tables are in
memory, and runs it with the interpreter of the environment that has the contender. The last line of stdout is the
result; whatever else a framework prints goes before it. A job that fails ends with a traceback and a non-zero exit
status.
"""

import json
import sys
import warnings
from typing import Any

import numpy as np

from benchmarks import upkeep
from benchmarks.clock import peak_resident_bytes, time_steps
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.ranks import join, run_ranks, use_threads
from benchmarks.train.pairs import measure_training
from benchmarks.train.reading import measure_reading
from benchmarks.workload import BATCH_IDS, Floats, RowNumbers, Share

PROBE_ROWS = 256


def measure_steps(job: dict[str, Any]) -> dict[str, Any]:
    """Build one contender and time its streams, one after another, on the same table.

    A stream is {"label", "mode", "file", "num_threads"}. `change` is the mean absolute change of some rows over the
    first stream's warm-up; contenders that do the same work agree on it.
    """
    table: dict[str, Any] = dict(job["table"])
    use_threads(table["num_threads"], job.get("rank", 0))
    ranks = join(job)
    if ranks.size > 1:
        table["share"] = Share(rank=ranks.rank, size=ranks.size)
    contender: Contender = CONTENDERS[job["contender"]](**table)
    streams: dict[str, Any] = {}
    result: dict[str, Any] = {"streams": streams}
    num_warmup = int(job["num_warmup"])
    for position, stream in enumerate(job["streams"]):
        rows: RowNumbers = np.load(stream["file"])
        step = getattr(contender, stream["mode"])
        use_threads(stream["num_threads"], ranks.rank)
        if position == 0 and job["compare"]:
            result["change"] = _change_over(contender, step, rows[:num_warmup])
            rows = rows[num_warmup:]
        skipped = len(rows) - int(job["num_steps"])
        batches = contender.prepare(rows)
        streams[stream["label"]] = time_steps(step, batches, num_warmup=skipped, ids_per_step=BATCH_IDS, ranks=ranks)
        ranks.barrier()  # rank 0 has read the counters of the others
    result |= {"peak_resident_bytes": peak_resident_bytes(ranks.others), "versions": contender.versions()}
    ranks.barrier()
    return result


def _change_over(contender: Contender, step: Any, rows: RowNumbers) -> float:
    probed = np.unique(rows[0])[:PROBE_ROWS]
    before: Floats = contender.probe(probed)
    for batch in contender.prepare(rows):
        step(batch)
    return float(np.abs(contender.probe(probed) - before).mean())


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The result of one job; its `kind` names the measurement."""
    if job.get("num_processes", 1) > 1 and "rank" not in job:
        return run_ranks(job, run)
    kinds = {
        "steps": measure_steps,
        "memory": upkeep.measure_memory,
        "growth": upkeep.measure_growth,
        "snapshot": upkeep.measure_snapshot,
        "train": measure_training,
        "read": measure_reading,
    }
    return kinds[job["kind"]](job)


def main() -> None:
    # torch announces on every sparse step that it does not check its own indices.
    warnings.filterwarnings("ignore", message="Sparse invariant checks", category=UserWarning)
    print(json.dumps(run(json.loads(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
