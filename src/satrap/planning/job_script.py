"""Reads a job from its training script: a child process runs the script, alone, and ends before step N + 1.

The child runs what the script does before that step: it reads data and creates tables in its memory. It resumes and
saves no checkpoint and records nothing. What a few steps cannot show is given on the command line or assumed: the
requested rate, and the rows at the end of training of tables without a capacity.
"""

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from satrap.errors import ConfigError
from satrap.planning.workload import BACKWARD
from satrap.run_context import begin_trial

_SECONDS = 600.0
_END_BYTES = 1 << 14


def observe_script(script: Path, arguments: Sequence[str], num_steps: int) -> dict[str, Any]:
    """Return the job of a script in the form of a description, found by running so many of its steps."""
    if not script.is_file():
        raise ConfigError(
            f"there is no file {str(script)!r}; expected a training script, or a description of the job in TOML"
        )
    with tempfile.TemporaryDirectory(prefix="satrap-plan-") as folder:
        answer, output = Path(folder) / "model.json", Path(folder) / "output"
        command = [sys.executable, "-m", "satrap.planning.job_script", str(answer), str(num_steps), str(script)]
        status = _status_of([*command, *arguments], output)
        if status is None:
            raise ConfigError(
                f"{script} took more than {_SECONDS:.0f} s for {num_steps} steps; reduce --steps, or describe the "
                "job in TOML"
            )
        if not answer.exists():
            last = "\n".join(_end_of(output).splitlines()[-8:])
            raise ConfigError(
                f"{script} exited with status {status} before {num_steps} steps; expected a script that trains "
                f"with satrap.Embeddings for longer (--steps asks for fewer). The end of its output:\n{last}"
            )
        content: dict[str, Any] = json.loads(answer.read_text())
        return content


def _status_of(command: Sequence[str], output: Path) -> int | None:
    """Run a command, with its output in a file: it is of interest if the command fails, and would otherwise mix with
    the plan. Return its exit status; None if it took too long. Processes that it has started end with it: it has no
    chance to stop them itself."""
    with open(output, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    pidfd = os.pidfd_open(process.pid)
    try:
        is_over = bool(select.select([pidfd], [], [], _SECONDS)[0])
    finally:  # also after Ctrl-C
        os.close(pidfd)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode if is_over else None


def _end_of(output: Path) -> str:
    with open(output, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        return file.read().decode(errors="replace")


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

    begin_trial()
    observe_steps(num_steps, lambda steps: _write_and_exit(path, steps))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
