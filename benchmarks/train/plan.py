"""The processes of a round of the training benchmark, and the figures of a case. Starts nothing.

The cases of a group share one table, so each contender has one process, which trains the group's models one after
another. PaddlePaddle has no row-wise Adagrad and is measured in fp32. A heavy step is nine tenths dense products in
any form, so heavy models are measured on all cores of one process only, and for fewer steps. What embeddings cost is
compared in milliseconds, each contender's with a dense step in its own framework; a peer that seems to pay nothing
makes no ratio.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.case import Case
from benchmarks.harness.forms import Form, all_cores, peer_forms, satrap_forms
from benchmarks.harness.record import Ratio, Rounds, each
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind
from benchmarks.store.plan import table_bytes
from benchmarks.workload import samples_file

# The mode of each of Satrap's contenders, by label.
SATRAP_MODES = {"satrap": "sync", "satrap_stale": "stale", "satrap_plain": "plain"}
TORCHREC = ("torchrec", "fbgemm")
"""The two ways to call it."""
TORCH_PEERS = (*TORCHREC, "torch")
TURN = 5
FEWER_STEPS = 4  # divides the steps of a heavy model
FEWER_WARMUP = 2
FRAMEWORK_BYTES = 3 << 30  # activations, batches, what a source reads ahead, and the framework itself
LINE_BYTES = 260  # of Criteo's text, at most
NEEDS_TRAINING = ("from satrap import Embeddings", "from satrap.models import DLRM")
# Frameworks draw other first weights and rows, and a step of Adagrad depends on the gradients before it.
SAME_WORK = 0.2


def peers_of(case: Case) -> tuple[str, ...]:
    """Return the peers that can do a case."""
    paddle = case.precision == "fp32" and case.optimizer == "adagrad"
    return (*TORCH_PEERS, "paddle") if paddle else TORCH_PEERS


def has_every_form(case: Case) -> bool:
    """Return whether peers are measured with fewer threads and as several processes, too."""
    return case.top == "light"


def plan_train(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the runs of every contender in all of its forms."""
    cores = group[0].num_threads
    whole, *fewer = satrap_forms(cores)
    without_stale = {label: mode for label, mode in SATRAP_MODES.items() if mode != "stale"}
    planned = [("satrap", SATRAP_MODES, whole), *(("satrap", without_stale, form) for form in fewer)]
    for peer in TORCH_PEERS:
        # The other forms of TorchRec's own module are those of the kernel that it calls.
        own = [all_cores(cores, huge_pages=huge) for huge in (False, True)]
        planned += [(peer, {peer: "sync"}, form) for form in (own if peer == "torchrec" else peer_forms(cores))]
    planned.append(("paddle", {"paddle": "sync"}, all_cores(cores)))
    runs = []
    for name, modes, form in planned:
        able = [case for case in group if name in ("satrap", *peers_of(case))]
        cases = [case for case in able if form.threads[0] == cores or has_every_form(case)]
        if cases:
            runs.append(_train_run(cases, number, batches, name, modes, form))
    return runs


def _models(cases: Sequence[Case]) -> list[dict[str, Any]]:
    models = []
    for case in cases:
        warmup, steps = case.num_warmup, case.num_steps
        if not has_every_form(case):
            warmup, steps = min(warmup, FEWER_WARMUP), -(-steps // FEWER_STEPS)
        models.append({"top": case.top, "precision": case.precision, "num_warmup": warmup, "num_steps": steps})
        models[-1]["in_every_form"] = has_every_form(case)
    return models


def _train_run(
    cases: Sequence[Case], number: int, batches: Path, contender: str, modes: dict[str, str], form: Form
) -> Run:
    """Return one contender's run. Modes share a table, so each has other batches; peers get those of the first mode."""
    case = cases[0]
    jobs = {}
    for label, mode in modes.items():
        position = list(SATRAP_MODES).index(label) if label in SATRAP_MODES else 0
        part = len(SATRAP_MODES) * number + position
        jobs[label] = {
            "mode": mode,
            "file": str(samples_file(batches, case.rows, case.num_warmup + case.num_steps, part)),
        }
    table = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer, "num_threads": form.threads[0]}
    job: dict[str, Any] = {"module": "benchmarks.train.pairs", "contender": contender, "table": table}
    job |= {"models": _models(cases), "modes": jobs, "turn": TURN, "num_processes": form.num_processes}
    job["forms"] = [
        {"num_threads": count, "labels": {label: form.label(label, count) for label in modes}} for count in form.threads
    ]
    return Run(
        label=form.label(contender),
        contender=contender,
        job=job,
        needed_bytes=table_bytes(case.rows, case.dim, case.optimizer) + FRAMEWORK_BYTES,
        needs=NEEDS_TRAINING if contender == "satrap" else (),
        environment=form.environment,
    )


def plan_read(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the run of Satrap that reads a file."""
    case = group[0]
    job: dict[str, Any] = {"module": "benchmarks.train.reading", "lines": case.rows, "dim": case.dim}
    job |= {"num_threads": case.num_threads, "models": _models(group)}
    file_bytes = case.rows * LINE_BYTES
    return [
        Run(
            label="satrap",
            contender="satrap",
            job=job,
            needed_bytes=file_bytes + FRAMEWORK_BYTES,
            folder_bytes=file_bytes,
            needs=(*NEEDS_TRAINING, "from satrap import Criteo"),
            environment=all_cores(case.num_threads).environment,
        )
    ]


def record_train(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return rates and costs of every contender, their ratios, losses, and what each changed."""
    record: dict[str, Any] = {
        name: rounds.spreads(name) for name in ("samples_per_s", "step_ms", "dense_ms", "cost_ms")
    }
    for label, intervals in rounds.values("cost_interval_ms").items():
        record["cost_ms"][label]["intervals"] = intervals
    peers = peers_of(case)
    ratios: dict[str, Ratio] = {
        "ratio": ("satrap", TORCHREC),
        "ratio_stale": ("satrap_stale", TORCHREC),
        "ratio_plain": ("satrap_plain", TORCHREC),
        "ratio_torch": ("satrap", ("torch",)),
    }
    if "paddle" in peers:
        ratios["ratio_paddle"] = ("satrap", ("paddle",))
    costs, steps = rounds.values("cost_ms"), rounds.values("step_ms")
    others = {
        "cost_ratio": rounds.against("satrap", peers, costs, min),
        "cost_ratio_stale": rounds.against("satrap_stale", peers, costs, min),
        # The step times are medians, taken in turn in one process, so an outlier of either moves neither.
        "stale_ratio": rounds.against("satrap", ("satrap_stale",), steps),
    }
    figures = rounds.ratios(ratios, "samples_per_s")
    record["figures"] = figures | {name: figure for name, figure in others.items() if figure is not None}
    # By contender, since their environments differ.
    versions = {
        label: {name: version for found in each(done, "versions") if found for name, version in found.items()}
        for label, done in rounds.results.items()
    }
    return record | {"loss": rounds.losses(), **rounds.work(SAME_WORK), "versions": versions}


def record_read(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the figures of reading, and the versions by contender as in other lines."""
    return {"figures": rounds.figures_of("satrap"), "versions": {"satrap": rounds.processes()["versions"]}}


KINDS = {
    "train": Kind(plan=plan_train, record=record_train, shares_table=True),
    "read": Kind(plan=plan_read, record=record_read, shares_table=True),
}
