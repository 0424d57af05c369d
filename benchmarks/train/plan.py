"""Which processes a group of training cases needs in a round, and what each is told to do. Starts nothing.

The cases of a group share one table, so each contender has one process, which takes the group's models one after
another. A contender that cannot do a case is not asked to: PaddlePaddle has no row-wise Adagrad, and is run in fp32.
Models that are not measured in every form are so by processes that use all cores alone, and for fewer steps.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.forms import Form, own_forms, peer_forms
from benchmarks.plan import table_bytes
from benchmarks.runs import Run, Settings
from benchmarks.train.cases import TrainCase
from benchmarks.train.workload import batches_file

# By label, the mode of the contender.
SATRAP_MODES = {"satrap": "sync", "satrap_stale": "stale", "satrap_plain": "plain"}
TORCHREC = ("torchrec", "fbgemm")
"""The two ways to call it."""
TORCH_PEERS = (*TORCHREC, "torch")
TURN = 5
FEW_STEPS = 4  # times fewer, of a model that takes long
FEW_WARMUP = 2
FRAMEWORK_BYTES = 3 << 30  # activations, batches, what a source reads ahead, and the framework itself
LINE_BYTES = 260  # of Criteo's text, at most
NEEDS_TRAINING = ("from satrap import Embeddings", "from satrap.models import DLRM")


def peers_of(case: TrainCase) -> tuple[str, ...]:
    """The peers that can do a case."""
    paddle = case.precision == "fp32" and case.optimizer == "adagrad"
    return (*TORCH_PEERS, "paddle") if paddle else TORCH_PEERS


def plan(group: Sequence[TrainCase], round_number: int, settings: Settings) -> list[Run]:
    """The runs of one round for cases that share a table."""
    if group[0].kind == "read":
        return [_read_run(group, settings)]
    cores = group[0].num_threads
    all_cores, *fewer = own_forms(cores)
    less = {label: mode for label, mode in SATRAP_MODES.items() if mode != "stale"}
    forms = [("satrap", SATRAP_MODES, all_cores), *(("satrap", less, form) for form in fewer)]
    for peer in TORCH_PEERS:
        forms += [(peer, {peer: "sync"}, form) for form in _forms(peer, cores)]
    forms.append(("paddle", {"paddle": "sync"}, Form(cores=cores, threads=(cores,))))
    runs = []
    for name, modes, form in forms:
        whole = form.threads[0] == cores
        cases = [case for case in group if name in ("satrap", *peers_of(case)) and (whole or case.in_every_form)]
        if cases:
            runs.append(_train_run(cases, round_number, settings, name, modes, form))
    return runs


def _forms(peer: str, cores: int) -> list[Form]:
    """TorchRec's own module is measured on all cores alone: the other forms are those of the kernel that it calls."""
    if peer == "torchrec":
        return [Form(cores=cores, threads=(cores,), huge_pages=huge) for huge in (False, True)]
    return peer_forms(cores)


def _models(cases: Sequence[TrainCase], settings: Settings) -> list[dict[str, Any]]:
    models = []
    for case in cases:
        warmup, steps = settings.num_warmup, settings.num_steps
        if not case.in_every_form:
            warmup, steps = min(warmup, FEW_WARMUP), -(-steps // FEW_STEPS)
        models.append({"top": case.top, "precision": case.precision, "num_warmup": warmup, "num_steps": steps})
        models[-1]["in_every_form"] = case.in_every_form
    return models


def _train_run(
    cases: Sequence[TrainCase],
    round_number: int,
    settings: Settings,
    contender: str,
    modes: dict[str, str],
    form: Form,
) -> Run:
    """Every mode draws batches of its own, since modes share a table; the first mode's are the peers' too."""
    case = cases[0]
    num_steps = settings.num_warmup + settings.num_steps
    told = {}
    own = {label: number for number, label in enumerate(SATRAP_MODES)}
    for label, mode in modes.items():
        part = len(SATRAP_MODES) * round_number + own.get(label, 0)
        told[label] = {"mode": mode, "file": str(batches_file(settings.batches, case.rows, num_steps, part))}
    table = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer, "num_threads": form.threads[0]}
    job: dict[str, Any] = {"kind": "train", "contender": contender, "table": table}
    job |= {"models": _models(cases, settings), "modes": told, "turn": TURN, "num_processes": form.num_processes}
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


def _read_run(group: Sequence[TrainCase], settings: Settings) -> Run:
    case = group[0]
    job: dict[str, Any] = {"kind": "read", "lines": case.rows, "dim": case.dim, "num_threads": case.num_threads}
    job |= {"models": _models(group, settings), "folder": str(settings.tmpfs)}
    file_bytes = case.rows * LINE_BYTES
    return Run(
        label="satrap",
        contender="satrap",
        job=job,
        needed_bytes=file_bytes + FRAMEWORK_BYTES,
        shared_bytes=file_bytes,
        needs=(*NEEDS_TRAINING, "from satrap import Criteo"),
    )
