"""Running the rounds of a case: in each a worker process and then its peers, one after another."""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.cluster.cases import ClusterCase
from benchmarks.runs import Results, RunFailed, run_process, say


def run_rounds(
    case: ClusterCase, num_rounds: int, *, batches: Path, pythons: Mapping[str, Path], tmpfs: Path
) -> tuple[Results, list[str]]:
    """The rounds of the worker, if one succeeded, and of every peer of which one did; a line for each that failed.

    batches: a folder for those that several processes get. tmpfs: one in memory, for files of a round. pythons: of the
    peers that take part, their interpreters.
    """
    commands = {"worker": [sys.executable, "-m", "benchmarks.cluster.worker"]}
    commands |= {peer: [str(python), "-m", f"benchmarks.cluster.{peer}"] for peer, python in pythons.items()}
    results: Results = {label: [] for label in commands}
    failures: list[str] = []
    for number in range(num_rounds):
        job = asdict(case) | {"part": number, "batches": str(batches)}
        for label, command in commands.items():
            say(f"{case.name}: round {number + 1} of {num_rounds}, {label}")
            try:
                # Made here and not in the process, which may be killed.
                with tempfile.TemporaryDirectory(prefix="satrap-bench-", dir=tmpfs) as memory:
                    results[label].append(run_process([*command, json.dumps(job | {"tmpfs": memory})]))
            except RunFailed as failure:
                results[label].append(None)
                failures.append(f"{case.name}: {label} failed in round {number + 1}: {failure}")
                say(failures[-1])
    done = {label: rounds for label, rounds in results.items() if any(rounds)}
    return (done if "worker" in done else {}), failures
