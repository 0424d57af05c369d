"""Reads a job from its training script: a child process runs the script, alone, and ends before step N + 1.

The child runs what the script does before that step: it reads data, creates tables in its memory, and resumes a
checkpoint if the script does so. What a few steps cannot show is given on the command line or assumed: the requested
rate, and the rows at the end of training of tables without a capacity.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from satrap.errors import ConfigError
from satrap.planning.workload import BACKWARD

_SECONDS = 600.0


def observe_script(script: Path, arguments: Sequence[str], num_steps: int) -> dict[str, Any]:
    """Return the job of a script in the form of a description, found by running so many of its steps."""
    if not script.is_file():
        raise ConfigError(
            f"there is no file {str(script)!r}; expected a training script, or a description of the job in TOML"
        )
    with tempfile.TemporaryDirectory(prefix="satrap-plan-") as folder:
        answer = Path(folder) / "model.json"
        command = [sys.executable, "-m", "satrap.planning.job_script", str(answer), str(num_steps), str(script)]
        try:
            # The output of the script is of interest if it fails, and would otherwise mix with the plan.
            run = subprocess.run(
                [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{script} took more than {_SECONDS:.0f} s for {num_steps} steps; reduce --steps, or describe the "
                "job in "
                "TOML"
            ) from None
        if not answer.exists():
            last = "\n".join(run.stdout.splitlines()[-8:])
            raise ConfigError(
                f"{script} exited with status {run.returncode} before {num_steps} steps; expected a script that trains "
                f"with satrap.Embeddings for longer (--steps asks for fewer). The end of its output:\n{last}"
            )
        content: dict[str, Any] = json.loads(answer.read_text())
        return content


def model_of(steps: Any) -> dict[str, Any]:
    """Return observed steps (`satrap.train.step_observer.ObservedSteps`) in the form of a description."""
    samples = steps.samples
    tables = []
    for table in steps.features.tables:
        name, ids = table.name, steps.ids[table.name]
        own = [feature for feature in steps.features.values() if feature.table.name == name]
        vectors = sum(feature.max_length or (ids / samples if feature.jagged else 1) for feature in own)
        tables.append(
            table.to_dict()
            | {
                "vectors_per_sample": float(vectors),
                "ids_per_sample": ids / samples,
                "unique_share": min(1.0, steps.unique_ids[name] / ids) if ids else None,
            }
        )
    return {
        "training": {
            "batch_size": round(samples / steps.batches),
            "dense_flops": steps.flops / BACKWARD / samples,
            "dense_parameters": steps.dense_parameters,
            "dense_features": steps.dense_features,
            "staleness": steps.staleness,
        },
        "tables": tables,
    }


def assumptions_of(content: Mapping[str, Any], num_steps: int) -> list[str]:
    """Return what a plan from a script assumes."""
    notes = [f"the {num_steps} observed steps are like all others: ids of a sample, their repetition, operations"]
    full = [table["name"] for table in content["tables"] if table.get("capacity") is not None and "rows" not in table]
    if full:
        notes.append(f"tables with a capacity become full: {', '.join(full)}")
    return notes


def _write_and_exit(path: Path, steps: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(model_of(steps)))
    part.rename(path)
    sys.stdout.flush()
    os._exit(0)  # the script must not save, evaluate or train after the observed steps


def _main(path: Path, num_steps: int, script: str, arguments: Sequence[str]) -> None:
    from satrap.train.step_observer import observe_steps

    observe_steps(num_steps, lambda steps: _write_and_exit(path, steps))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
