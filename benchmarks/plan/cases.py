"""The cases of the planner's benchmark and their targets. Pure data; nothing is run here.

Each case is a run of `job.py`: a fully connected network over 26 features of Criteo's text, in which rows have `dim`
numbers. `satrap plan --calibrate` measures the machine once for all of them, in the same command. The kinds:

    local     one process with the rows, synchronous
    servers   a trainer and two servers, at staleness 4
    trainers  two trainers, which average their gradients, and two servers, at staleness 4

The figures divide a prediction by what the run has: `cpu` seconds of a core for a sample, of all processes together;
`rate` in samples a second; `memory` of a row. CPU time hardly depends on the load of the machine, the rate does.
"""

from dataclasses import replace

from benchmarks.harness.case import Case, Target

WITHIN = 0.25
PROCESSES = {"local": (0, 1), "servers": (2, 1), "trainers": (2, 2)}
"""Servers and trainers of each kind."""
TARGETS = tuple(Target(figure=figure, at_least=1 - WITHIN, at_most=1 + WITHIN) for figure in ("cpu", "rate", "memory"))
BASE = Case(kind="", rows=1_000_000, dim=16, num_warmup=10, num_steps=60, targets=TARGETS)


def full_cases() -> list[Case]:
    """Return the three runs."""
    return [
        replace(BASE, kind="local", stalenesses=(0,)),
        replace(BASE, kind="servers", dim=32, stalenesses=(4,)),
        replace(BASE, kind="trainers", stalenesses=(4,)),
    ]


def quick_cases() -> list[Case]:
    """Return the same, short, to see that all of it runs."""
    return [replace(case, rows=20_000, num_warmup=2, num_steps=6, targets=()) for case in full_cases()]
