"""The cases of the GPU benchmark and their targets. Pure data; nothing is run here.

    resolve   the core's part of a step, without rows: ids to frames, and the runs of an update; beside
              `lookup(train=True)` of a store with rows in memory
    kernels   bytes moved by the kernels beside a plain copy; whole lookups and steps beside those of the peers
    train     whole steps of NVIDIA's small DLRM: 26 features of one id, dim 128, SGD, batches of 65,536 samples
    ablation  the same steps without half precision, without fused tables, and without torch.compile
    tiers     the same steps with all rows on the device, with a half and with a tenth, and the others at home
    largest   the same steps on the largest model that fits the device and this machine's memory together

The precision of a case names what is on: amp, compile. Fused tables are always on but in the ablation.
"""

from dataclasses import replace
from typing import Any

from benchmarks.harness.case import MILLION, Case, Target

SAMPLES = 65_536
QUICK_SAMPLES = 2_048
QUICK_ROWS = 1_500_000
"""Cases with fewer rows are quick ones, but those of `resolve`."""
BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256, 1)
PRECISIONS = ("fp32", "amp", "fp32-compile", "amp-compile")
LARGEST_ROWS = 883 * MILLION
"""NVIDIA's 113 billion parameters, at dim 128."""

# NVIDIA's published 4.55 M samples/s on an A100, times 2, on a device of 2.4 times its bandwidth.
TRAIN = Target(figure="samples_per_s", at_least=9.1e6)
# Twice NVIDIA's published 0.768 M samples/s on an A100 with the tables in host memory.
LARGEST = Target(figure="samples_per_s", at_least=1.54e6)
RESOLVE = Target(figure="ratio", at_least=2.0)
KERNELS = tuple(Target(figure=f"{name}_share", at_least=0.8) for name in ("pool", "update", "exchange"))
MOONSHOTS = {
    "train": Target(figure="samples_per_s", at_least=12e6),
    "resolve": Target(figure="resolve_rows_per_s", at_least=80e6),
}
"""What would be more than the target, by kind. Recorded and never compared by --check; that of `resolve` is for two
threads."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "train": {"samples_per_s": 4.55e6, "fp32_samples_per_s": 2.84e6, "device": "one A100-80"},
    "ablation": {"amp": 1.23, "fused_tables": 1.39, "compile": 3.36, "device": "A100-80"},
    "largest": {"samples_per_s": 0.768e6, "parameters": 113e9, "device": "one A100-80, tables in host memory"},
}
"""NVIDIA's published figures of its DLRM, by kind, which each record has beside its own."""

_DLRM: dict[str, Any] = {"top": "dlrm", "optimizer": "sgd", "num_warmup": 10, "num_steps": 50}
_RESOLVE = Case(kind="resolve", rows=20 * MILLION, dim=16, num_threads=2, num_warmup=10, num_steps=100)
_KERNELS = Case(kind="kernels", rows=32 * MILLION, dim=128, num_warmup=3, num_steps=20)
_TRAIN = Case(kind="train", rows=33 * MILLION, dim=128, **_DLRM)
_ABLATION = replace(_TRAIN, kind="ablation", precision="amp-compile")
_TIERS = replace(_TRAIN, kind="tiers", precision="amp")
_LARGEST = replace(_TRAIN, kind="largest", rows=LARGEST_ROWS, precision="amp-compile")
_IDS = ("zipf", "uniform")


def full_cases() -> list[Case]:
    """Return the cases whose targets the project names."""
    return [
        *(
            replace(_RESOLVE, ids=ids, num_threads=threads, targets=(RESOLVE,) if ids == "zipf" else ())
            for threads in (1, 2)
            for ids in _IDS
        ),
        *(replace(_KERNELS, ids=ids, targets=KERNELS if ids == "uniform" else ()) for ids in _IDS),
        *(
            replace(_TRAIN, ids=ids, precision=precision, targets=(TRAIN,) if precision == "amp-compile" else ())
            for ids in _IDS
            for precision in PRECISIONS
        ),
        *(replace(_ABLATION, ids=ids) for ids in _IDS),
        *(replace(_TIERS, ids=ids) for ids in _IDS),
        *(replace(_LARGEST, ids=ids, targets=(LARGEST,)) for ids in _IDS),
    ]


def quick_cases() -> list[Case]:
    """Return small cases, which show in a minute or two that all of it runs."""
    small: dict[str, Any] = {"rows": 100_000, "num_warmup": 1, "num_steps": 3}
    train = replace(_TRAIN, ids="zipf", **small)
    return [
        replace(_RESOLVE, rows=MILLION, ids="zipf", num_warmup=2, num_steps=10),
        replace(_KERNELS, ids="uniform", **small),
        replace(_TIERS, rows=900_000, dim=16, ids="zipf", num_warmup=1, num_steps=5),
        replace(_ABLATION, ids="zipf", dim=16, **{**small, "rows": 26_000}),
        replace(_LARGEST, ids="zipf", dim=16, **{**small, "rows": 300_000}),
        *(replace(train, precision=precision) for precision in PRECISIONS[:2]),
    ]
