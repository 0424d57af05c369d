"""The cases of the GPU benchmark and their targets. Pure data; nothing is run here.

    resolve   ids to frames in the core, without rows, beside `lookup(train=True)` of a store with rows in memory
    kernels   bytes moved by the kernels and by a plain copy
    train     whole steps of NVIDIA's small DLRM: 26 features of one id, dim 128, SGD, batches of 65,536 samples
    tiers     the same steps with all rows on the device, with a half and with a tenth, and the others at home

The name of a `train` case ends with what is on: amp, compile.
"""

from dataclasses import replace

from benchmarks.harness.case import MILLION, Case, Target

SAMPLES = 65_536
QUICK_SAMPLES = 2_048
BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256, 1)
PRECISIONS = ("fp32", "amp", "fp32-compile", "amp-compile")
# NVIDIA's published 4.55 M samples/s on an A100, times 2, on a device of 2.4 times its bandwidth.
TRAIN = Target(figure="samples_per_s", at_least=9.1e6)
RESOLVE = Target(figure="ratio", at_least=2.0)
KERNELS = tuple(Target(figure=name, at_least=0.8) for name in ("pool_share", "update_share"))

_RESOLVE = Case(kind="resolve", rows=20 * MILLION, dim=16, num_threads=2, num_warmup=10, num_steps=100)
_KERNELS = Case(kind="kernels", rows=32 * MILLION, dim=128, num_warmup=3, num_steps=20)
_TIERS = Case(
    kind="tiers", rows=33 * MILLION, dim=128, top="dlrm", precision="amp", optimizer="sgd", num_warmup=10, num_steps=50
)
_TRAIN = Case(kind="train", rows=33 * MILLION, dim=128, top="dlrm", optimizer="sgd", num_warmup=10, num_steps=50)


def full_cases() -> list[Case]:
    """Return the cases whose targets the project names."""
    return [
        *(replace(_RESOLVE, ids=ids, targets=(RESOLVE,) if ids == "zipf" else ()) for ids in ("zipf", "uniform")),
        *(replace(_KERNELS, ids=ids, targets=KERNELS if ids == "uniform" else ()) for ids in ("zipf", "uniform")),
        *(
            replace(_TRAIN, ids=ids, precision=precision, targets=(TRAIN,) if precision == "amp-compile" else ())
            for ids in ("zipf", "uniform")
            for precision in PRECISIONS
        ),
        *(replace(_TIERS, ids=ids) for ids in ("zipf", "uniform")),
    ]


def quick_cases() -> list[Case]:
    """Return small cases, which show in a minute or two that all of it runs."""
    kernels, train = (replace(case, rows=100_000, num_warmup=1, num_steps=3) for case in (_KERNELS, _TRAIN))
    return [
        replace(_RESOLVE, rows=MILLION, ids="zipf", num_warmup=2, num_steps=10),
        replace(kernels, ids="uniform"),
        replace(_TIERS, rows=900_000, dim=16, ids="zipf", num_warmup=1, num_steps=5),
        *(replace(train, ids="zipf", precision=precision) for precision in PRECISIONS[:2]),
    ]
