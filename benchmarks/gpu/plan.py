"""The processes of a round of the GPU benchmark, and the figures of a case. Starts nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import roofline
from benchmarks.gpu.cases import MOONSHOTS, PUBLISHED, QUICK_ROWS, QUICK_SAMPLES, SAMPLES
from benchmarks.gpu.devices import describe_device, device, incomparable, sheet_of
from benchmarks.harness.case import Case
from benchmarks.harness.record import Figure, Rounds, judge
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind
from benchmarks.store.plan import table_bytes

FRAMEWORK_BYTES = 4 << 30
NEEDS_GPU = "import torch; assert torch.cuda.is_available()"
NEEDS_FBGEMM = "import fbgemm_gpu"
SHARES = {"all": 1.0, "half": 0.5, "tenth": 0.1}
"""Shares of the rows that are on the device; the others are at home."""
ON = ("amp", "fused", "compile")
ABLATION = {"all": ON, **{f"no_{name}": tuple(each for each in ON if each != name) for name in ON}}
"""What is on in each run of the ablation."""
CONTENDERS = {
    "resolve": ("satrap",),
    "kernels": ("satrap", "torch", "fbgemm"),
    "train": ("satrap", "torch"),
    "ablation": tuple(ABLATION),
    "tiers": tuple(SHARES),
    "largest": ("satrap",),
}
PEERS = ("torch", "fbgemm")
"""Both are measured in this interpreter, whose torch is that of the device."""


def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return the runs of a case: each contender once. At full size a device is a GPU."""
    case = group[0]
    is_quick = case.rows < QUICK_ROWS
    job: dict[str, Any] = {
        "device": device().type,
        "samples": QUICK_SAMPLES if is_quick else SAMPLES,
        "part": number,
        "dtype": "float16" if case.kind == "largest" else "float32",
        "sizes_itself": case.kind == "largest",
        "bounded": case.kind == "ablation",
        **{name: getattr(case, name) for name in ("rows", "dim", "ids", "top", "precision", "num_threads")},
        **{name: getattr(case, name) for name in ("num_warmup", "num_steps")},
    }
    in_memory = case.kind in ("resolve", "tiers") or device().type == "cpu"
    needed = table_bytes(case.rows, case.dim, "adagrad") if in_memory else case.rows * 64
    return [
        Run(
            label=name,
            contender="torch" if name in PEERS else "satrap",
            job={**job, "module": f"benchmarks.gpu.{_module(case, name)}", "contender": name}
            | {"share": SHARES.get(name, 1.0), "switches": _switches(case, name)},
            needed_bytes=FRAMEWORK_BYTES + (0 if job["sizes_itself"] else needed),
            needs=_needs(case, name, is_quick),
        )
        for name in CONTENDERS[case.kind]
    ]


def _module(case: Case, name: str) -> str:
    if case.kind == "kernels":
        return "peer_kernels" if name in PEERS else "kernels"
    return "resolve" if case.kind == "resolve" else "training"


def _switches(case: Case, name: str) -> list[str]:
    """Return what is on in a run."""
    return list(ABLATION.get(name, ())) if case.kind == "ablation" else ["fused", *case.precision.split("-")]


def _needs(case: Case, name: str, is_quick: bool) -> tuple[str, ...]:
    of_gpu = () if case.kind == "resolve" or is_quick else (NEEDS_GPU,)
    return (*of_gpu, NEEDS_FBGEMM) if name == "fbgemm" else of_gpu


def record_resolve(case: Case, rounds: Rounds) -> dict[str, Any]:
    rates = rounds.spreads("rows_per_s")
    figures = rounds.ratios({"ratio": ("resolve", ("lookup",))}, "rows_per_s")
    figures |= {f"{name}_rows_per_s": rates[name] for name in ("resolve", "update")}
    both = (rates["resolve"]["median"], rates["update"]["median"])
    return {
        "rows_per_s": rates,
        "figures": figures,
        "roofline": roofline.of_host(*both, case.num_threads),
        **_beside(case, figures, is_comparable=case.num_threads == 2),
    }


def record_kernels(case: Case, rounds: Rounds) -> dict[str, Any]:
    figures = rounds.figures_of("satrap")
    for name in ("pool", "step"):
        ratios = {f"{name}_ratio_{peer}": ("satrap", (peer,)) for peer in ("torch", "fbgemm")}
        figures |= rounds.ratios(ratios, f"{name}_rows_per_s")
    sheet = sheet_of(describe_device())
    return {
        "device": describe_device(),
        "figures": figures,
        "roofline": {
            "memory_gb_per_s": {"copy": figures["copy_gb_per_s"]["median"], **_of_sheet(sheet, "memory_bytes_per_s")},
            "bus_gb_per_s": {"copy": figures["bus_gb_per_s"]["median"], **_of_sheet(sheet, "bus_bytes_per_s")},
        },
        **_beside(case, figures),
    }


def record_train(case: Case, rounds: Rounds) -> dict[str, Any]:
    figures = {"samples_per_s": rounds.spreads("samples_per_s")["satrap"]}
    figures |= rounds.ratios({"ratio": ("satrap", ("torch",))}, "samples_per_s")
    return _steps(case, rounds, figures, "satrap")


def record_ablation(case: Case, rounds: Rounds) -> dict[str, Any]:
    names = {"amp": "no_amp", "fused_tables": "no_fused", "compile": "no_compile"}
    figures = rounds.ratios({name: ("all", (without,)) for name, without in names.items()}, "samples_per_s")
    return _steps(case, rounds, figures, "all")


def record_tiers(case: Case, rounds: Rounds) -> dict[str, Any]:
    figures = rounds.ratios({"half": ("half", ("all",)), "tenth": ("tenth", ("all",))}, "samples_per_s")
    return _steps(case, rounds, figures, "all") | {"moved_rows_per_step": rounds.spreads("moved_rows_per_step")}


def record_largest(case: Case, rounds: Rounds) -> dict[str, Any]:
    found = {name: rounds.spreads(name)["satrap"] for name in ("rows_found", "on_device_share", "moved_rows_per_step")}
    figures = {"samples_per_s": rounds.spreads("samples_per_s")["satrap"], **found}
    parameters = int((figures["rows_found"]["median"] or 0) * case.dim)
    return _steps(case, rounds, figures, "satrap") | {"parameters": parameters}


def _steps(case: Case, rounds: Rounds, figures: dict[str, Figure], label: str) -> dict[str, Any]:
    """Return what the records of whole steps have in common. label: of the run that the roofline is of."""
    return {
        "device": describe_device(),
        **{name: rounds.spreads(name) for name in ("samples_per_s", "step_ms")},
        "figures": figures,
        "loss": rounds.losses(),
        "roofline": _roofline(case, rounds, label),
        **_beside(case, figures),
    }


def _roofline(case: Case, rounds: Rounds, label: str) -> dict[str, Any]:
    """Return the limits of a run's steps from what the same run measured: copies, and ids resolved alone. The products
    are those of a data sheet, if there is one."""

    def measured(name: str) -> float:
        return float(rounds.spreads(name)[label]["median"] or 0.0)

    is_half, samples = "amp" in case.precision, QUICK_SAMPLES if case.rows < QUICK_ROWS else SAMPLES
    sample = roofline.sample_of(
        case.dim,
        measured("unique_per_sample"),
        is_half=is_half,
        value_bytes=2 if case.kind == "largest" else roofline.FLOAT,
        moved=measured("moved_rows_per_step") / samples,
    )
    sheet = sheet_of(describe_device())
    rates = {
        "memory": 1e9 * measured("copy_gb_per_s"),
        "bus": 1e9 * measured("bus_gb_per_s"),
        "host": measured("resolve_ids_per_s"),
        "flops": None if sheet is None else sheet.flops if is_half else sheet.tf32_flops,
    }
    sources = {"memory": "a copy", "bus": "a copy", "host": "lookups alone, without updates", "flops": "data sheet"}
    return roofline.describe(sample, rates, measured("samples_per_s"), sources)


def _of_sheet(sheet: Any, name: str) -> dict[str, float]:
    return {} if sheet is None else {"data_sheet": getattr(sheet, name) / 1e9}


def _beside(case: Case, figures: Mapping[str, Figure], *, is_comparable: bool | None = None) -> dict[str, Any]:
    """Return what a record has beside its figures: the published ones, what would be more than the target, and why
    targets are not compared. is_comparable: whether the moonshot is of this case; None: if targets are compared."""
    reason = None if case.kind == "resolve" else incomparable(describe_device())
    found: dict[str, Any] = {} if reason is None else {"not_compared": reason}
    if case.kind in PUBLISHED:
        found["published"] = PUBLISHED[case.kind]
    if case.kind in MOONSHOTS:
        moonshot = judge(MOONSHOTS[case.kind], figures)
        is_comparable = reason is None if is_comparable is None else is_comparable
        found["moonshot"] = moonshot if is_comparable else moonshot | {"met": None}
    return found


KINDS = {
    "resolve": Kind(plan=plan, record=record_resolve, required="satrap"),
    "kernels": Kind(plan=plan, record=record_kernels, required="satrap"),
    "train": Kind(plan=plan, record=record_train, required="satrap"),
    "ablation": Kind(plan=plan, record=record_ablation, required="all"),
    "tiers": Kind(plan=plan, record=record_tiers, required="all"),
    "largest": Kind(plan=plan, record=record_largest, required="satrap"),
}
