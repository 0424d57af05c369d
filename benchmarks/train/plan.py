"""Which processes a group of training cases needs in a round, and what each is told to do. Starts nothing.

The cases of a group share one table, so each contender has one process, which takes the group's models one after
another. A contender that cannot do a case is not asked to: PaddlePaddle has no row-wise Adagrad, and is run in fp32.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.plan import table_bytes
from benchmarks.runs import TORCH_HUGE_PAGES, Run, Settings
from benchmarks.train.cases import TrainCase
from benchmarks.train.workload import batches_file

# By label, the mode of the contender.
SATRAP_MODES = {"satrap": "sync", "satrap_stale": "stale", "satrap_plain": "plain"}
TORCHREC = ("torchrec", "fbgemm")
"""The two ways to call it."""
TORCH_PEERS = (*TORCHREC, "torch")
TURN = 5
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
    environment = TORCH_HUGE_PAGES if settings.peer_huge_pages else {}
    runs = [_train_run(group, round_number, settings, "satrap", SATRAP_MODES, {})]
    for peer in (*TORCH_PEERS, "paddle"):
        cases = [case for case in group if peer in peers_of(case)]
        if cases:
            runs.append(_train_run(cases, round_number, settings, peer, {peer: "sync"}, environment))
    return runs


def _models(cases: Sequence[TrainCase]) -> list[dict[str, str]]:
    return [{"top": case.top, "precision": case.precision} for case in cases]


def _train_run(
    cases: Sequence[TrainCase],
    round_number: int,
    settings: Settings,
    contender: str,
    modes: dict[str, str],
    environment: dict[str, str],
) -> Run:
    """Every mode draws batches of its own, since modes share a table; the first mode's are the peers' too."""
    case = cases[0]
    num_steps = settings.num_warmup + settings.num_steps
    told = {}
    for number, (label, mode) in enumerate(modes.items()):
        part = len(SATRAP_MODES) * round_number + number
        told[label] = {"mode": mode, "file": str(batches_file(settings.batches, case.rows, num_steps, part))}
    table = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer, "num_threads": case.num_threads}
    job: dict[str, Any] = {"kind": "train", "contender": contender, "table": table, "models": _models(cases)}
    job |= {"modes": told, "num_warmup": settings.num_warmup, "turn": TURN}
    return Run(
        label=contender,
        contender=contender,
        job=job,
        needed_bytes=table_bytes(case.rows, case.dim, case.optimizer) + FRAMEWORK_BYTES,
        needs=NEEDS_TRAINING if contender == "satrap" else (),
        environment=environment,
    )


def _read_run(group: Sequence[TrainCase], settings: Settings) -> Run:
    case = group[0]
    job: dict[str, Any] = {"kind": "read", "lines": case.rows, "dim": case.dim, "num_threads": case.num_threads}
    job |= {"models": _models(group), "folder": str(settings.tmpfs)}
    file_bytes = case.rows * LINE_BYTES
    return Run(
        label="satrap",
        contender="satrap",
        job=job,
        needed_bytes=file_bytes + FRAMEWORK_BYTES,
        shared_bytes=file_bytes,
        needs=(*NEEDS_TRAINING, "from satrap import Criteo"),
    )
