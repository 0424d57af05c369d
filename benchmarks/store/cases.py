"""The cases of the store benchmark and their targets. Pure data; nothing is run here.

A case's name is kind/rows x dim/optimizer/ids/threads. The kinds:

    train       lookup + update of a batch, all rows present, against plain PyTorch and FBGEMM
    lookup      lookup alone, against index_select on an array
    first_seen  lookup + update in a table that starts empty, rows created on first touch (Satrap only)
    shared      train with the rows in a shared-memory file, against anonymous memory
    memory      bytes of a row beyond its values and state, at capacity
    growth      the longest batch while a table without a capacity grows, and its bytes beyond values and state
    snapshot    save to and load from memory-backed files
    save_beside training while a thread saves: the longest step during a save
    resolve     the core's part of a step of rows on a device, ids to frames, beside a lookup of rows in memory
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from benchmarks.harness.case import MILLION, Case, Target

OPTIMIZERS = ("adagrad", "rowwise")
ALL_OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise", "adam", "adamw", "ftrl")
DISTRIBUTIONS = ("zipf", "uniform")
DIMS = (16, 64)
BASE = Case(kind="", optimizer="adagrad", num_threads=2, num_warmup=5, num_steps=30)
QUICK = replace(BASE, num_warmup=3, num_steps=8)
_RESOLVE = replace(BASE, kind="resolve", rows=20 * MILLION, dim=16, num_warmup=10, num_steps=100)


def full_cases() -> list[Case]:
    """Return every case that the project's targets name."""
    reading = tuple(Target(figure=figure, at_least=0.8) for figure in ("ratio", "ratio_eval"))
    memory = (Target(figure="overhead_bytes_per_row", at_most=24.0),)
    sizes = [*((2 * MILLION, name) for name in ALL_OPTIMIZERS), (20 * MILLION, "adagrad")]
    stall = (Target(figure="stall_ms", at_most=50.0),)
    growth = (
        *stall,
        Target(figure="overhead_bytes_per_row", at_most=32.0),
        Target(figure="resident_overhead_bytes_per_row", at_most=40.0),
    )
    speed = tuple(Target(figure=figure, at_least=1.0) for figure in ("save_gb_per_s", "load_gb_per_s"))
    return [
        *_train_cases(BASE, (MILLION, 20 * MILLION)),
        replace(BASE, kind="lookup", rows=20 * MILLION, dim=64, ids="uniform", targets=reading),
        *(
            replace(BASE, kind="first_seen", rows=rows, dim=dim, ids=ids)
            for rows, dim, ids in product((MILLION, 20 * MILLION), DIMS, DISTRIBUTIONS)
        ),
        *(
            replace(BASE, kind="shared", rows=5 * MILLION, dim=dim, ids=ids)
            for dim, ids in product(DIMS, DISTRIBUTIONS)
        ),
        *(
            replace(BASE, kind="memory", rows=rows, dim=16, optimizer=optimizer, targets=memory)
            for rows, optimizer in sizes
        ),
        *(replace(BASE, kind="growth", rows=20 * MILLION, dim=dim, targets=growth) for dim in DIMS),
        replace(BASE, kind="snapshot", rows=5 * MILLION, dim=64, targets=speed),
        replace(BASE, kind="save_beside", rows=20 * MILLION, dim=16, num_threads=1, targets=stall),
        *(
            replace(_RESOLVE, ids=ids, targets=(Target(figure="ratio", at_least=2.0),) if ids == "zipf" else ())
            for ids in DISTRIBUTIONS
        ),
    ]


def quick_cases() -> list[Case]:
    """Return a few small cases of every kind, which show in a minute or two that all of it runs."""
    half = MILLION // 2
    return [
        *_train_cases(QUICK, (half,)),
        replace(QUICK, kind="lookup", rows=MILLION, dim=64, ids="uniform"),
        replace(QUICK, kind="first_seen", rows=MILLION, dim=16, ids="zipf"),
        replace(QUICK, kind="shared", rows=half, dim=16, ids="zipf"),
        *(replace(QUICK, kind="memory", rows=half, dim=16, optimizer=name) for name in ("adagrad", "adam")),
        replace(QUICK, kind="growth", rows=2 * MILLION, dim=16),
        replace(QUICK, kind="snapshot", rows=half, dim=64),
        replace(QUICK, kind="save_beside", rows=MILLION, dim=16, num_threads=1),
        replace(QUICK, kind="resolve", rows=MILLION, dim=16, ids="zipf"),
    ]


def _train_cases(base: Case, sizes: Iterable[int]) -> list[Case]:
    cases = []
    for rows, dim, optimizer, ids in product(sizes, DIMS, OPTIMIZERS, DISTRIBUTIONS):
        target = Target(figure="ratio", at_least=5.0 if rows > MILLION else 3.0)
        targets = (target,) if ids == "zipf" else ()
        cases.append(replace(base, kind="train", rows=rows, dim=dim, optimizer=optimizer, ids=ids, targets=targets))
    return cases
