"""One run in a separate process: `python -m benchmarks.harness.worker '<job as JSON>'`.

The job's `module` names the file whose `measure(job)` does the work. The harness starts one worker at a time, with the
interpreter of the environment that has the contender, so that only one contender's tables are in memory. The last line
of stdout is the result as JSON, with versions and peak memory unless `measure` returns them; a job that fails ends with
a traceback and a non-zero exit status.
"""

import importlib
import json
import sys
import warnings
from typing import Any

from benchmarks.harness.clock import peak_resident_bytes
from benchmarks.harness.machine import imported_versions
from benchmarks.harness.ranks import run_ranks


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one job, on all of its ranks."""
    if job.get("num_processes", 1) > 1 and "rank" not in job:
        return run_ranks(job, run)
    result: dict[str, Any] = importlib.import_module(job["module"]).measure(job)
    own = {"peak_resident_bytes": peak_resident_bytes(), "versions": imported_versions()}
    return {**own, **result}


if __name__ == "__main__":
    # torch announces on every sparse step that it does not check its own indices.
    warnings.filterwarnings("ignore", message="Sparse invariant checks", category=UserWarning)
    print(json.dumps(run(json.loads(sys.argv[1]))), flush=True)
