"""The command line of `python -m benchmarks.train`: its cases and their targets, the processes of a round, the figures.

A case's name is kind/rows x dim/top layers/precision/optimizer/threads. The kinds:

    train   whole steps of a DLRM, each followed by a step of the same model with fixed embeddings, against all peers
    read    Criteo's TSV from a file: how fast it is read, and what reading adds to a step (Satrap only)
    recipe  DLRM-v3's streaming recipe, examples/dlrm_v3.py, with jagged histories: beside plain torch

The cases of a group share one table, so each contender has one process, which trains the group's models one after
another. A heavy step is nine tenths dense products in any form, so heavy models are measured on all cores of one
process only, and for fewer steps. What embeddings cost is compared in milliseconds, each contender's with a dense step
in its own framework; a peer that seems to pay nothing makes no ratio.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness.case import MILLION, Case, Target
from benchmarks.harness.forms import HUGE_PAGES, Form, all_cores, peer_forms, satrap_forms
from benchmarks.harness.record import Ratio, Rounds, each
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind, Suite
from benchmarks.workload import DIMS, TOPS, samples_file, table_bytes

# Ratio of Satrap's samples/s to those of the better way to call TorchRec.
END_TO_END = {("light", 16): 1.7, ("light", 64): 2.1, ("heavy", 16): 1.15, ("heavy", 64): 1.15}
COST, STALE = Target(figure="cost_ratio", at_most=0.25), Target(figure="stale_ratio", at_least=0.97)
MODULES = Target(figure="modules_ratio", at_least=0.95)
READ = (Target(figure="mb_per_s", at_least=150.0), Target(figure="added_share", at_most=0.10))
BASE = Case(kind="train", optimizer="adagrad", num_threads=2, num_warmup=5, num_steps=20)
QUICK = replace(BASE, rows=MILLION, dim=16, num_warmup=2, num_steps=4)
# The mode of each of Satrap's contenders, by label.
SATRAP_MODES = {"satrap": "sync", "satrap_stale": "stale", "satrap_plain": "plain", "satrap_modules": "modules"}
TORCHREC = ("torchrec", "fbgemm")
"""The two ways to call it."""
PEERS = (*TORCHREC, "torch")
RATIOS: dict[str, Ratio] = {
    "ratio": ("satrap", TORCHREC),
    "ratio_plain": ("satrap_plain", TORCHREC),
    "ratio_direct": ("satrap_direct", TORCHREC),
}
TURN = 5
FEWER_STEPS = 4  # divides the steps of a heavy model
FEWER_WARMUP = 2
FRAMEWORK_BYTES = 3 << 30  # activations, batches, what a source reads ahead, and the framework itself
LINE_BYTES = 280  # a line of Criteo's text, at most
# Frameworks draw other first weights and rows, and a step of Adagrad depends on the gradients before it.
SAME_WORK = 0.2


def full_cases() -> list[Case]:
    """Return every case that the pages quote."""
    cases = []
    for dim, top, precision in product(DIMS, TOPS, ("fp32", "bf16")):
        end_to_end = Target(figure="ratio", at_least=END_TO_END[top, dim])
        ways = (COST, STALE, MODULES) if top == "light" else (COST, STALE)
        targets = (end_to_end, *ways) if precision == "fp32" else ways
        cases.append(replace(BASE, rows=20 * MILLION, dim=dim, top=top, precision=precision, targets=targets))
    read = replace(BASE, kind="read", rows=250_000, dim=16, top="heavy", targets=READ)
    recipe = Case(kind="recipe", rows=MILLION, dim=64, num_threads=2, num_warmup=5, num_steps=40)
    return [*cases, *(replace(read, precision=precision) for precision in ("fp32", "bf16")), recipe]


def quick_cases() -> list[Case]:
    """Return a small table with both models, which shows in a minute or two that all of it runs."""
    models = [("light", "fp32"), ("light", "bf16"), ("heavy", "fp32")]
    read = replace(QUICK, kind="read", rows=40_000, top="light", precision="fp32")
    recipe = Case(kind="recipe", rows=MILLION // 5, dim=16, num_threads=2, num_warmup=1, num_steps=4)
    return [*(replace(QUICK, top=top, precision=precision) for top, precision in models), read, recipe]


def has_every_form(case: Case) -> bool:
    """Return whether peers are measured with fewer threads and as several processes, too."""
    return case.top == "light"


def plan_train(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the runs of every contender in all of its forms."""
    cores = group[0].num_threads
    whole, *fewer = satrap_forms(cores)
    without_stale = {label: mode for label, mode in SATRAP_MODES.items() if mode != "stale"}
    planned = [("satrap", SATRAP_MODES, whole), *(("satrap", without_stale, form) for form in fewer)]
    planned += [("satrap_direct", {"satrap_direct": "sync"}, form) for form in (whole, *fewer)]
    for peer in PEERS:
        # The other forms of TorchRec's own module are those of the kernel that it calls.
        own = [all_cores(cores, huge_pages=huge) for huge in (False, True)]
        planned += [(peer, {peer: "sync"}, form) for form in (own if peer == "torchrec" else peer_forms(cores))]
    runs = []
    for name, modes, form in planned:
        cases = [case for case in group if form.threads[0] == cores or has_every_form(case)]
        if cases:
            runs.append(train_run(cases, number, batches, name, modes, form))
    return runs


def models_of(cases: Sequence[Case]) -> list[dict[str, Any]]:
    models = []
    for case in cases:
        warmup, steps = case.num_warmup, case.num_steps
        if not has_every_form(case):
            warmup, steps = min(warmup, FEWER_WARMUP), -(-steps // FEWER_STEPS)
        models.append({"top": case.top, "precision": case.precision, "num_warmup": warmup, "num_steps": steps})
        models[-1]["in_every_form"] = has_every_form(case)
    return models


def train_run(
    cases: Sequence[Case], number: int, batches: Path, contender: str, modes: Mapping[str, str], form: Form
) -> Run:
    """Return one contender's run. Modes share a table, so each has other batches; peers get those of the first mode."""
    case, jobs = cases[0], {}
    for label, mode in modes.items():
        position = list(SATRAP_MODES).index(label) if label in SATRAP_MODES else 0
        part = len(SATRAP_MODES) * number + position
        file = samples_file(batches, case.rows, case.num_warmup + case.num_steps, part)
        jobs[label] = {"mode": mode, "file": str(file)}
    table = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer, "num_threads": form.threads[0]}
    job: dict[str, Any] = {"module": "benchmarks.train.pairs", "contender": contender, "table": table}
    job |= {"models": models_of(cases), "modes": jobs, "turn": TURN, "num_processes": form.num_processes}
    job["forms"] = [
        {"num_threads": count, "labels": {label: form.label(label, count) for label in modes}} for count in form.threads
    ]
    size = table_bytes(case.rows, case.dim, case.optimizer) + FRAMEWORK_BYTES
    return Run(
        label=form.label(contender), contender=contender, job=job, needed_bytes=size, environment=form.environment
    )


def plan_read(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the run of Satrap that reads a file."""
    case = group[0]
    job = {"module": "benchmarks.train.reading", "lines": case.rows, "dim": case.dim}
    job |= {"num_threads": case.num_threads, "models": models_of(group)}
    return [
        Run(
            label="satrap",
            contender="satrap",
            job=job,
            needed_bytes=case.rows * LINE_BYTES + FRAMEWORK_BYTES,
            folder_bytes=case.rows * LINE_BYTES,
            environment=all_cores(case.num_threads).environment,
        )
    ]


def plan_recipe(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the runs of Satrap and of plain torch, which take turns to be the first. Both need Satrap's packages."""
    case = group[0]
    job = {"module": "benchmarks.train.recipe", "rows": case.rows, "dim": case.dim, "num_threads": case.num_threads}
    job |= {"num_warmup": case.num_warmup, "num_steps": case.num_steps}
    size = 3 * table_bytes(case.rows, case.dim, "rowwise") + FRAMEWORK_BYTES
    names = ("satrap", "torch") if number % 2 == 0 else ("torch", "satrap")
    form = all_cores(case.num_threads)
    return [
        Run(
            label=name,
            contender="satrap",
            job=job | {"contender": name},
            needed_bytes=size,
            environment=form.environment if name == "satrap" else form.environment | HUGE_PAGES,
        )
        for name in names
    ]


def record_train(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return rates and costs of every contender, their ratios, losses, and what each changed."""
    names = ("samples_per_s", "step_ms", "dense_ms", "cost_ms")
    record: dict[str, Any] = {name: rounds.spreads(name) for name in names}
    others = {
        "cost_ratio": rounds.against("satrap", PEERS, rounds.values("cost_ms"), min),
        "cost_ratio_direct": rounds.against("satrap_direct", PEERS, rounds.values("cost_ms"), min),
        # The step times are medians, taken in turn in one process, so an outlier of either moves neither.
        "stale_ratio": rounds.against("satrap", ("satrap_stale",), rounds.values("step_ms")),
        "modules_ratio": rounds.against("satrap", ("satrap_modules",), rounds.values("step_ms"), min),
    }
    figures = rounds.ratios(RATIOS, "samples_per_s")
    record["figures"] = figures | {name: figure for name, figure in others.items() if figure is not None}
    # By contender, since their environments differ.
    versions = {
        label: {name: version for result in each(done, "versions") if result for name, version in result.items()}
        for label, done in rounds.results.items()
    }
    return record | {"loss": rounds.losses(), **rounds.work(SAME_WORK), "versions": versions}


def record_recipe(case: Case, rounds: Rounds) -> dict[str, Any]:
    figures = rounds.ratios({"ratio": ("satrap", ("torch",))}, "samples_per_s")
    record: dict[str, Any] = {name: rounds.spreads(name) for name in ("samples_per_s", "step_ms")}
    return record | {"figures": figures, "loss": rounds.losses()}


def record_read(case: Case, rounds: Rounds) -> dict[str, Any]:
    return {"figures": rounds.figures_of("satrap")}


SUITE = Suite(
    name="train",
    purpose="Measure training steps of a DLRM beside the peers', one JSON line per case.",
    full_cases=full_cases(),
    quick_cases=quick_cases(),
    kinds={
        "train": Kind(plan=plan_train, record=record_train, shares_table=True),
        "read": Kind(plan=plan_read, record=record_read, shares_table=True),
        "recipe": Kind(plan=plan_recipe, record=record_recipe),
    },
    contenders=("satrap", "satrap_direct", *PEERS),
    table=("train",),
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
