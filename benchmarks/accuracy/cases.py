"""The cases of the accuracy benchmark and their targets. Pure data; nothing is run here.

    adult       the example of the original PERSIA, with its settings: does the system reach the original's AUC?
    flights     examples/flights.py: does a job as a user would write it beat a linear model?
    synthetic   synthetic clicks whose truth is known: how much of what can be learnt is learnt?

Every case is trained with several stalenesses from the same seeds: what does staleness cost?
"""

from dataclasses import replace

from benchmarks.harness.case import Case, Target

SAME_AUC = 0.001
"""The difference that staleness may make."""
ORIGINAL_ADULT = 0.8929
"""The AUC that the original's continuous integration asserts, to four digits."""
ABOVE_LINEAR = 0.005
"""How far above the linear model the flights' AUC must be."""


def full_cases() -> list[Case]:
    """Return every case that the project's targets name."""
    low, high = ORIGINAL_ADULT - 0.002, ORIGINAL_ADULT + 0.002
    original = tuple(Target(figure=f"auc_{staleness}", at_least=low, at_most=high) for staleness in (0, 1, 4))
    flights = (Target(figure="auc_0", at_least=0.74), Target(figure="above_linear_0", at_least=ABOVE_LINEAR))
    learnt = tuple(Target(figure=f"share_of_best_{staleness}", at_least=0.9) for staleness in (0, 4))
    setting = (Target(figure="best_auc", at_least=0.75, at_most=0.85), Target(figure="num_rows", at_least=1e6))
    # The staleness is really 4, and costs nothing.
    stale = (
        Target(figure="held_4", at_least=0.98),
        Target(figure="difference_4", at_least=-SAME_AUC, at_most=SAME_AUC),
    )
    return [
        Case(kind="adult", stalenesses=(0, 1, 4), targets=(*original, *stale)),
        Case(kind="flights", stalenesses=(0, 4), targets=(*flights, *stale)),
        Case(kind="synthetic", stalenesses=(0, 4), targets=(*learnt, *setting, *stale)),
    ]


def quick_cases() -> list[Case]:
    """Return the same without targets: small jobs of few seeds prove nothing."""
    return [replace(case, stalenesses=(0, 4), targets=()) for case in full_cases()]
