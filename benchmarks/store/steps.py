"""Timing lookups and updates of one contender: a run of the store benchmark."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import build
from benchmarks.harness.clock import peak_resident_bytes, time_steps
from benchmarks.harness.ranks import join, use_threads
from benchmarks.workload import BATCH_IDS, Floats, RowNumbers

CONTENDERS = {
    "satrap": "contenders.satrap_table:SatrapTable",
    "satrap_direct": "contenders.satrap_table:SatrapDirectTable",
    "torch": "contenders.torch_table:TorchTable",
    "fbgemm": "contenders.fbgemm_table:FbgemmTable",
    "index_select": "contenders.torch_table:PlainArray",
}
PROBE_ROWS = 256


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Build one contender and time its streams, one after another, on the same table.

    A stream is {"label", "mode", "file", "num_threads"}. `change` is the mean absolute change of some rows over the
    first stream's warm-up; contenders that do the same work agree on it. A job with a folder has its rows in a file.
    """
    table: dict[str, Any] = dict(job["table"])
    use_threads(table["num_threads"], job.get("rank", 0))
    ranks = join(job)
    if "folder" in job:
        table["shared"] = str(Path(job["folder"]) / "table")
    contender = build(CONTENDERS[job["contender"]], table, ranks)
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
    result["peak_resident_bytes"] = peak_resident_bytes(ranks.others)
    ranks.barrier()
    return result


def _change_over(contender: Any, step: Any, rows: RowNumbers) -> float:
    probed = np.unique(rows[0])[:PROBE_ROWS]
    before: Floats = contender.probe(probed)
    for batch in contender.prepare(rows):
        step(batch)
    return float(np.abs(contender.probe(probed) - before).mean())
