"""The cases of the store benchmark and the targets some of them must reach. Pure data; nothing is run here.

A case's name says all of it: kind/rows x dim/optimizer/ids/threads. The kinds:

    train       lookup + update of a batch, all rows present, against plain PyTorch and FBGEMM
    lookup      lookup alone, against index_select on an array
    first_seen  lookup + update in a table that starts empty, rows made on first touch (Satrap only)
    shared      train with the rows in a shared-memory file, against anonymous memory
    memory      bytes a row beyond values and state, at capacity
    growth      the longest batch while a table without a capacity grows
    snapshot    save to and load from memory-backed files
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Protocol, TypeVar

MILLION = 1_000_000
OPTIMIZERS = ("adagrad", "rowwise")
ALL_OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise", "adam", "adamw", "ftrl")
DISTRIBUTIONS = ("zipf", "uniform")
DIMS = (16, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A figure's median over the rounds must be at least, or at most, a limit."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def met_by(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def wanted(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


class AnyCase(Protocol):
    """What every benchmark's cases have."""

    @property
    def name(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def targets(self) -> tuple[Target, ...]: ...
    @property
    def table(self) -> tuple[object, ...]: ...


C = TypeVar("C", bound=AnyCase)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the results."""

    kind: str
    rows: int
    dim: int
    optimizer: str = "adagrad"
    ids: str | None = None
    """How the ids are drawn; None where every id occurs once."""
    num_threads: int = 2
    """That a contender may use in all; peers are measured with fewer, too."""
    targets: tuple[Target, ...] = ()

    @property
    def name(self) -> str:
        rows = f"{self.rows // MILLION}M" if self.rows % MILLION == 0 else f"{self.rows // 1000}k"
        parts = [self.kind, f"{rows}x{self.dim}", self.optimizer, self.ids, f"{self.num_threads}t"]
        return "/".join(part for part in parts if part)

    @property
    def table(self) -> tuple[object, ...]:
        """Cases that agree on this are measured on one table. One that starts empty shares it with no other."""
        alone = self.ids if self.kind == "first_seen" else None
        return (self.kind, self.rows, self.dim, self.optimizer, self.num_threads, alone)


def full_cases(num_threads: int) -> list[Case]:
    """Every case that the project's targets speak of."""
    reading = tuple(Target(figure=figure, at_least=0.8) for figure in ("ratio", "ratio_eval"))
    cases = [
        *_train_cases((MILLION, 20 * MILLION)),
        Case(kind="lookup", rows=20 * MILLION, dim=64, ids="uniform", targets=reading),
        *(
            Case(kind="first_seen", rows=rows, dim=dim, ids=ids)
            for rows, dim, ids in product((MILLION, 20 * MILLION), DIMS, DISTRIBUTIONS)
        ),
        *(Case(kind="shared", rows=5 * MILLION, dim=dim, ids=ids) for dim, ids in product(DIMS, DISTRIBUTIONS)),
    ]
    memory = (Target(figure="overhead_bytes_per_row", at_most=24.0),)
    for rows, optimizer in [*((2 * MILLION, name) for name in ALL_OPTIMIZERS), (20 * MILLION, "adagrad")]:
        cases.append(Case(kind="memory", rows=rows, dim=16, optimizer=optimizer, targets=memory))
    stall = (Target(figure="stall_ms", at_most=50.0),)
    cases.extend(Case(kind="growth", rows=20 * MILLION, dim=dim, targets=stall) for dim in DIMS)
    speed = tuple(Target(figure=figure, at_least=1.0) for figure in ("save_gb_per_s", "load_gb_per_s"))
    return _with_threads(num_threads, [*cases, Case(kind="snapshot", rows=5 * MILLION, dim=64, targets=speed)])


def quick_cases(num_threads: int) -> list[Case]:
    """One small case or a few of every kind, to see in a minute or two that all of it runs and roughly how fast."""
    cases = [
        *_train_cases((MILLION // 2,)),
        Case(kind="lookup", rows=MILLION, dim=64, ids="uniform"),
        Case(kind="first_seen", rows=MILLION, dim=16, ids="zipf"),
        Case(kind="shared", rows=MILLION // 2, dim=16, ids="zipf"),
        *(Case(kind="memory", rows=MILLION // 2, dim=16, optimizer=name) for name in ("adagrad", "adam")),
        Case(kind="growth", rows=2 * MILLION, dim=16),
        Case(kind="snapshot", rows=MILLION // 2, dim=64),
    ]
    return _with_threads(num_threads, cases)


def _train_cases(sizes: Iterable[int]) -> list[Case]:
    cases = []
    for rows, dim, optimizer, ids in product(sizes, DIMS, OPTIMIZERS, DISTRIBUTIONS):
        target = Target(figure="ratio", at_least=5.0 if rows > MILLION else 3.0)
        targets = (target,) if ids == "zipf" else ()
        cases.append(Case(kind="train", rows=rows, dim=dim, optimizer=optimizer, ids=ids, targets=targets))
    return cases


def _with_threads(num_threads: int, cases: Iterable[Case]) -> list[Case]:
    """The cases with this many threads; the targets are those of two."""
    return [replace(case, num_threads=num_threads, targets=case.targets if num_threads == 2 else ()) for case in cases]


def select_cases(cases: Iterable[C], patterns: Sequence[str]) -> list[C]:
    """The cases whose name matches a pattern, or begins with it; all without one."""
    wanted = [f"{pattern}*" for pattern in patterns] or ["*"]
    return [case for case in cases if any(fnmatchcase(case.name, pattern) for pattern in wanted)]


def group_by_table(cases: Iterable[C]) -> list[list[C]]:
    """The cases in their order, those of one table together."""
    groups: dict[tuple[object, ...], list[C]] = {}
    for case in cases:
        groups.setdefault(case.table, []).append(case)
    return list(groups.values())
