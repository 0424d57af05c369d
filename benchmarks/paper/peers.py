"""Satrap beside plain PyTorch, FBGEMM, TorchRec and PaddlePaddle: training steps of a DLRM, each in its best form.

The suites `benchmarks.train` and `benchmarks.cluster` measure them, one round here (more with --full); their own
commands measure every case with three rounds. A peer that is not installed is left out, with the command that installs
it.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.harness.machine import ROOT
from benchmarks.harness.peers import PADDLE, TORCHREC, Environment, peers_python
from benchmarks.paper.cell import CannotRunError, Cell, Done, Figures

CASES = {
    "train": {
        "in process, fp32": "train/20Mx16/light/fp32/adagrad/2t",
        "in process, bf16": "train/20Mx16/light/bf16/adagrad/2t",
    },
    "cluster": {"over one server, fp32": "train/20Mx16/2t"},
}
"""The cases of each suite, by the names in the plot."""


def cells(*, full: bool) -> list[Cell]:
    """Return a cell for each suite, whose cases share processes."""
    return [
        Cell(f"peers/{suite}", 180, "measured", partial(beside_peers, suite, environment, 3 if full else 1))
        for suite, environment in (("train", TORCHREC), ("cluster", PADDLE))
    ]


def beside_peers(suite: str, environment: Environment, rounds: int, done: Done) -> Figures:
    """Return for each case the samples per second of every contender in its best form."""
    if peers_python(environment) is None:
        raise CannotRunError(f"{environment.name} is not installed: python -m benchmarks.{suite} --quick --make-peers")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.jsonl"
        command = [sys.executable, "-m", f"benchmarks.{suite}", "--case", *CASES[suite].values()]
        command += ["--rounds", str(rounds), "--out", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        records = {record["case"]: record for record in map(json.loads, out.read_text().splitlines())}
    return {name: _best(records[case]["samples_per_s"]) for name, case in CASES[suite].items()}


def _best(rates: Mapping[str, Figures]) -> Figures:
    """Return the rate of each contender's fastest form, and that form."""
    best: dict[str, tuple[float, str]] = {}
    for label, rate in rates.items():
        contender, _, form = label.partition("/")
        if rate["median"] is not None:
            best[contender] = max(best.get(contender, (0.0, "")), (rate["median"], form))
    return {contender: {"samples_per_s": rate, "form": form} for contender, (rate, form) in best.items()}
