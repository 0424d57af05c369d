"""The command line of `python -m benchmarks.accuracy`: the cases and their targets, and the record. A round is a seed.

    adult       the example of the original PERSIA, with its settings: does the system reach the original's AUC?
    flights     examples/flights.py: does a job as a user would write it beat a linear model?
    synthetic   synthetic clicks whose truth is known: how much of what can be learnt is learnt?

Every case is trained with several stalenesses from the same seeds: what does staleness cost? A figure is {"mean",
"low", "high", "values"}: one value per seed, and the interval in which their mean lies with 95 % (Student's t). What
staleness costs is a difference of pairs: both runs of a pair have the same seed, so the same samples in the same order,
the same first parameters and the same first rows.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy.flights import FOLDER
from benchmarks.harness.case import Case, Target
from benchmarks.harness.forms import all_cores
from benchmarks.harness.record import Figure, Rounds, interval
from benchmarks.harness.rounds import Run
from benchmarks.harness.suite import Kind, Suite

SAME_AUC = 0.001
"""The difference that staleness may make."""
ORIGINAL_ADULT = 0.8929
"""The AUC that the original's continuous integration asserts, to four digits."""
ABOVE_LINEAR = 0.005
"""How far above the linear model the flights' AUC must be."""
NUM_SEEDS = 5


def full_cases() -> list[Case]:
    """Return every case that the pages quote."""
    low, high = ORIGINAL_ADULT - 0.002, ORIGINAL_ADULT + 0.002
    original = tuple(Target(figure=f"auc_{staleness}", at_least=low, at_most=high) for staleness in (0, 1, 4))
    flights = (Target(figure="auc_0", at_least=0.74), Target(figure="above_linear_0", at_least=ABOVE_LINEAR))
    learnt = tuple(Target(figure=f"share_of_best_{staleness}", at_least=0.9) for staleness in (0, 4))
    setting = (Target(figure="best_auc", at_least=0.75, at_most=0.85), Target(figure="num_rows", at_least=1e6))
    # The staleness is really 4, and costs nothing.
    difference = Target(figure="difference_4", at_least=-SAME_AUC, at_most=SAME_AUC)
    stale = (Target(figure="held_4", at_least=0.98), difference)
    return [
        Case(kind="adult", stalenesses=(0, 1, 4), targets=(*original, *stale)),
        Case(kind="flights", stalenesses=(0, 4), targets=(*flights, *stale)),
        Case(kind="synthetic", stalenesses=(0, 4), targets=(*learnt, *setting, *stale)),
    ]


def quick_cases() -> list[Case]:
    """Return the same without targets: small jobs of few seeds prove nothing."""
    return [replace(case, stalenesses=(0, 4), targets=()) for case in full_cases()]


def plan(group: Sequence[Case], number: int, batches: Path) -> list[Run]:
    """Return a run of each staleness with one seed. A run computes in one thread, so its result is always the same."""
    (case,) = group
    given = {"seed": number}
    if case.kind == "synthetic":
        given["num_ids"] = 3_000_000 if case.targets else 10_000  # a quick case has no target
    job = {"module": "benchmarks.accuracy.loop", "kind": case.kind}
    jobs = {str(late): {**job, "arguments": {**given, "staleness": late}} for late in case.stalenesses}
    environment = all_cores(1).environment
    return [Run(label=label, contender="satrap", job=job, environment=environment) for label, job in jobs.items()]


def record(case: Case, rounds: Rounds) -> dict[str, Any]:
    """Return the record of one case, whose streams are its stalenesses; a seed of which a run failed does not count."""
    complete = [seed for seed, results in enumerate(zip(*rounds.streams.values(), strict=True)) if all(results)]
    outcomes = {label: [stream[seed] or {} for seed in complete] for label, stream in rounds.streams.items()}
    fresh = [outcome["auc"] for outcome in outcomes["0"]]
    figures: dict[str, Figure] = {}
    seen: dict[str, Counter[int]] = {}
    for label, stream in outcomes.items():
        aucs = [outcome["auc"] for outcome in stream]
        figures[f"auc_{label}"] = interval(aucs)
        if label != "0":
            pairs = zip(aucs, fresh, strict=True)
            figures[f"difference_{label}"] = interval([stale - auc for stale, auc in pairs])
        best, linear = ([outcome[name] for outcome in stream] for name in ("best_auc", "linear_auc"))
        if None not in best:
            shares = [(auc - 0.5) / (most - 0.5) for auc, most in zip(aucs, best, strict=True)]
            figures |= {f"share_of_best_{label}": interval(shares), "best_auc": interval(best)}
        if None not in linear:
            above = [auc - other for auc, other in zip(aucs, linear, strict=True)]
            figures |= {f"above_linear_{label}": interval(above), "linear_auc": interval(linear)}
        counts = [Counter({int(held): n for held, n in outcome["staleness_seen"].items()}) for outcome in stream]
        figures[f"held_{label}"] = interval([count[int(label)] / count.total() for count in counts])
        seen[label] = sum(counts, Counter())
    figures["num_rows"] = interval([outcome["num_rows"] for outcome in outcomes["0"]])
    return {
        "seeds": complete,
        "figures": figures,
        "staleness_seen": {label: dict(sorted(counts.items())) for label, counts in seen.items()},
        **{name: outcomes["0"][0][name] for name in ("num_steps", "num_test_samples")},
    }


def without_flights() -> str | None:
    """Return why the flights cannot be measured, None if they can."""
    return None if FOLDER in os.environ else f"its data is not in the project; {FOLDER} names its folder"


SUITE = Suite(
    name="accuracy",
    purpose="Measure AUCs and what staleness costs of them, one JSON line per case. A round is a seed.",
    full_cases=full_cases(),
    quick_cases=quick_cases(),
    kinds={
        **dict.fromkeys(("adult", "synthetic"), Kind(plan=plan, record=record, required="0")),
        "flights": Kind(plan=plan, record=record, required="0", unable=without_flights),
    },
    num_rounds=NUM_SEEDS,
    num_quick_rounds=2,
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
