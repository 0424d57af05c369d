"""The processes of a round of the GPU benchmark, and the figures of a case. Starts nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import QUICK_SAMPLES, SAMPLES
from benchmarks.harness.case import MILLION, Case
from benchmarks.harness.record import Rounds
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind
from benchmarks.store.plan import table_bytes

FRAMEWORK_BYTES = 4 << 30
NEEDS_GPU = "import torch; assert torch.cuda.is_available()"
SHARES = {"all": 1.0, "half": 0.5, "tenth": 0.1}
"""Of the rows, how many are on the device; the others are at home."""
CONTENDERS = {"resolve": ("satrap",), "kernels": ("satrap",), "train": ("satrap", "torch"), "tiers": tuple(SHARES)}
MODULES = {"resolve": "resolve", "kernels": "kernels", "train": "training", "tiers": "training"}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the runs of a case: each contender once. At full size a device is a GPU."""
    case = group[0]
    job: dict[str, Any] = {
        "module": f"benchmarks.gpu.{MODULES[case.kind]}",
        "device": device(),
        "samples": SAMPLES if case.rows >= MILLION else QUICK_SAMPLES,
        "part": number,
        **{name: getattr(case, name) for name in ("rows", "dim", "ids", "top", "precision", "num_threads")},
        **{name: getattr(case, name) for name in ("num_warmup", "num_steps")},
    }
    in_memory = case.kind in ("resolve", "tiers") or device() == "cpu"
    needed = table_bytes(case.rows, case.dim, "adagrad") if in_memory else case.rows * 64
    needs = () if case.kind == "resolve" or case.rows < MILLION else (NEEDS_GPU,)
    return [
        Run(
            label=name,
            contender="satrap" if case.kind == "tiers" else name,
            job={**job, "contender": name, "share": SHARES.get(name, 1.0)},
            needed_bytes=needed + FRAMEWORK_BYTES,
            needs=needs,
        )
        for name in CONTENDERS[case.kind]
    ]


def record_resolve(case: Case, rounds: Rounds) -> dict[str, Any]:
    ratios = rounds.ratios({"ratio": ("resolve", ("lookup",))}, "rows_per_s")
    return {"rows_per_s": rounds.spreads("rows_per_s"), "figures": ratios}


def record_kernels(case: Case, rounds: Rounds) -> dict[str, Any]:
    return {"device": describe_device(), "figures": rounds.figures_of("satrap")}


def record_train(case: Case, rounds: Rounds) -> dict[str, Any]:
    figures = {"samples_per_s": rounds.spreads("samples_per_s")["satrap"]}
    figures |= rounds.ratios({"ratio": ("satrap", ("torch",))}, "samples_per_s")
    return {
        "device": describe_device(),
        **{name: rounds.spreads(name) for name in ("samples_per_s", "step_ms")},
        "figures": figures,
        "loss": rounds.losses(),
    }


def record_tiers(case: Case, rounds: Rounds) -> dict[str, Any]:
    return {
        "device": describe_device(),
        **{name: rounds.spreads(name) for name in ("samples_per_s", "step_ms", "moved_rows_per_step")},
        "figures": rounds.ratios({"half": ("half", ("all",)), "tenth": ("tenth", ("all",))}, "samples_per_s"),
        "loss": rounds.losses(),
    }


def describe_device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


KINDS = {
    "resolve": Kind(plan=plan, record=record_resolve),
    "kernels": Kind(plan=plan, record=record_kernels),
    "tiers": Kind(plan=plan, record=record_tiers, required="all"),
    "train": Kind(plan=plan, record=record_train, required="satrap"),
}
