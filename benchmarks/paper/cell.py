"""A cell: one figure or curve of an experiment, which is one line of the record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["measured", "simulated", "computed"]
Figures = dict[str, Any]
Done = Mapping[str, Figures]
"""The figures of the cells before this one, by name."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the record, and how it is made."""

    name: str
    """The experiment and the setting: "convergence/curve/adult/hybrid 4"."""
    seconds: float
    """About how long it takes on two quiet cores; only the progress uses it."""
    kind: Kind
    """Whether its figures are measured, come from a simulation, or are computed from other figures."""
    run: Callable[[Done], Figures]
    """Returns the figures."""


class CannotRunError(Exception):
    """This machine lacks something that a cell needs; the text says what."""
