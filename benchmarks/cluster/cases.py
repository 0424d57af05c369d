"""The cases of the cluster benchmark and the targets they must reach. Pure data; nothing is run here.

A case's name says all of it: kind/rows x dim/threads of the server. The kinds:

    echo    ids there and rows back through satrap.rpc, against a loop over plain TCP sockets

Everywhere: batches of 26 features x 4096 ids, drawn by Zipf(1.05), each id sent once.
"""

from dataclasses import dataclass

from benchmarks.cases import DIMS, MILLION, Target


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterCase:
    """One line of the results."""

    kind: str
    dim: int
    rows: int = 20 * MILLION
    num_threads: int = 2
    """Of the server, that run methods."""
    targets: tuple[Target, ...] = ()

    @property
    def name(self) -> str:
        rows = f"{self.rows // MILLION}M" if self.rows % MILLION == 0 else f"{self.rows // 1000}k"
        return f"{self.kind}/{rows}x{self.dim}/{self.num_threads}t"

    @property
    def table(self) -> tuple[object, ...]:
        """No two cases share a process."""
        return (self.name,)


def full_cases() -> list[ClusterCase]:
    """Every case that the project's targets speak of."""
    ratio = Target(figure="ratio", at_least=0.7)
    return [ClusterCase(kind="echo", dim=dim, targets=(ratio,)) for dim in DIMS]


def quick_cases() -> list[ClusterCase]:
    """The same, small, to see in seconds that all of it runs."""
    return [ClusterCase(kind="echo", dim=dim, rows=26_000) for dim in DIMS]
