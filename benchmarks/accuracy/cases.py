"""The cases of the accuracy benchmark and the targets they must reach. Pure data; nothing is run here.

    adult       the original PERSIA's example, with its settings: does the system reach the original's AUC?
    flights     examples/flights.py: does a job as one would write it beat a linear model?
    synthetic   made-up clicks whose truth is known: how much of what can be learnt is learnt?

Every case is trained with several stalenesses from the same seeds: what does staleness cost?
"""

from dataclasses import dataclass

from benchmarks.cases import Target

SAME_AUC = 0.001
"""What staleness may cost, up or down."""
ORIGINAL_ADULT = 0.8929
"""What the original's continuous integration asserts, to four digits."""
CLEARLY = 0.005
"""How far above the linear model the flights' AUC must be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyCase:
    """One line of the results."""

    name: str
    stalenesses: tuple[int, ...]
    """0 is always among them: what the others are compared with."""
    targets: tuple[Target, ...] = ()


def _staleness(staleness: int) -> tuple[Target, ...]:
    """It is really what it is called, and costs nothing."""
    return (
        Target(figure=f"held_{staleness}", at_least=0.98),
        Target(figure=f"difference_{staleness}", at_least=-SAME_AUC, at_most=SAME_AUC),
    )


def full_cases() -> list[AccuracyCase]:
    """Every case that the project's targets speak of."""
    original = tuple(
        Target(figure=f"auc_{staleness}", at_least=ORIGINAL_ADULT - 0.002, at_most=ORIGINAL_ADULT + 0.002)
        for staleness in (0, 1, 4)
    )
    learnt = tuple(Target(figure=f"share_of_best_{staleness}", at_least=0.9) for staleness in (0, 4))
    setting = (Target(figure="best_auc", at_least=0.75, at_most=0.85), Target(figure="num_rows", at_least=1e6))
    flights = (Target(figure="auc_0", at_least=0.74), Target(figure="above_linear_0", at_least=CLEARLY))
    return [
        AccuracyCase(name="adult", stalenesses=(0, 1, 4), targets=(*original, *_staleness(4))),
        AccuracyCase(name="flights", stalenesses=(0, 4), targets=(*flights, *_staleness(4))),
        AccuracyCase(name="synthetic", stalenesses=(0, 4), targets=(*learnt, *setting, *_staleness(4))),
    ]


def quick_cases() -> list[AccuracyCase]:
    """The same without targets: small jobs of few seeds say nothing."""
    return [AccuracyCase(name=case.name, stalenesses=(0, 4)) for case in full_cases()]
