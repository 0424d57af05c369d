"""Cases, targets and the selection of cases by name. Pure data; nothing is run here."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The limits that a figure must keep."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def met_by(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def limits(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least:g} to {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the results. Fields that a benchmark does not use are empty, and are in neither name nor record."""

    kind: str
    rows: int = 0
    """Number of rows of all tables together; of a text file, its lines."""
    dim: int = 0
    top: str = ""
    """Name of the top layers."""
    precision: str = ""
    """"fp32", or "bf16" for torch's autocast of the dense network."""
    optimizer: str = ""
    """Optimizer of the tables."""
    ids: str = ""
    """Distribution of the ids; empty where every id occurs once."""
    num_threads: int = 0
    """Threads that a contender may use in all."""
    num_warmup: int = 0
    """Steps before the timed ones."""
    num_steps: int = 0
    """Timed steps of a round."""
    stalenesses: tuple[int, ...] = ()
    """Stalenesses that a job is trained with; 0 is among them, since the others are compared with it."""
    targets: tuple[Target, ...] = ()

    @property
    def name(self) -> str:
        rows = f"{self.rows // MILLION}M" if self.rows % MILLION == 0 else f"{self.rows // 1000}k"
        parts = [self.kind, f"{rows}x{self.dim}" if self.rows else "", self.top, self.precision, self.optimizer]
        parts += [self.ids, f"{self.num_threads}t" if self.num_threads else ""]
        return "/".join(part for part in parts if part)

    @property
    def stream(self) -> str:
        """The prefix of this case's streams, which tells them from those of the other cases of its table."""
        return f"{self.top}/{self.precision}:" if self.top else f"{self.ids or self.kind}:"

    def describe(self) -> dict[str, Any]:
        """Return the fields for a record."""
        used = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "targets"}
        return {
            "case": self.name,
            **{name: value for name, value in used.items() if value or (name == "num_warmup" and self.num_steps)},
        }


def select_cases(cases: Iterable[Case], patterns: Sequence[str]) -> list[Case]:
    """Return the cases whose name matches a pattern or begins with it; all cases if there is no pattern."""
    globs = [f"{pattern}*" for pattern in patterns] or ["*"]
    return [case for case in cases if any(fnmatchcase(case.name, glob) for glob in globs)]


def group_cases(cases: Iterable[Case], share_tables: Callable[[Case], bool]) -> list[list[Case]]:
    """Return the cases in their order, grouped by table where `share_tables` allows it."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        table = (case.kind, case.rows, case.dim, case.optimizer, case.num_threads)
        groups.setdefault(table if share_tables(case) else (case.name,), []).append(case)
    return list(groups.values())
