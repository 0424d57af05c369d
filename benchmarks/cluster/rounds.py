"""Running the rounds of a case: one worker process for each, one after another."""

import json
import subprocess
import sys
from dataclasses import asdict

from benchmarks.cluster.cases import ClusterCase
from benchmarks.machine import ROOT
from benchmarks.runs import TIMEOUT_SECONDS, Results, say


def run_rounds(case: ClusterCase, num_rounds: int, num_warmup: int, num_steps: int) -> tuple[Results, list[str]]:
    """The rounds of the worker, if one succeeded, and a line for every one that failed."""
    results: Results = {"worker": []}
    failures: list[str] = []
    for number in range(num_rounds):
        say(f"{case.name}: round {number + 1} of {num_rounds}")
        job = asdict(case) | {"num_warmup": num_warmup, "num_steps": num_steps, "part": number}
        command = [sys.executable, "-m", "benchmarks.cluster.worker", json.dumps(job)]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
            result = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
            told = f"exit status {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}"
        except subprocess.TimeoutExpired:
            result, told = None, f"still running after {TIMEOUT_SECONDS} s"
        results["worker"].append(result)
        if result is None:
            failures.append(f"{case.name}: round {number + 1} failed: {told}")
            say(failures[-1])
    return (results if any(results["worker"]) else {}), failures
