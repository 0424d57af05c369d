"""The cases of the cluster benchmark and the targets they must reach. Pure data; nothing is run here.

A case's name says all of it: kind/rows x dim/threads of the server. The kinds:

    echo    ids there and rows back through satrap.rpc, against a loop over plain TCP sockets
    rows    lookup and update on one server, against the same on rows in the worker and Paddle's parameter server
    train   whole steps of the light DLRM over one server, against Paddle's parameter server
    bytes   what a lookup and an update put on the wire, against a row and a gradient for every id of a batch
    network whole steps of two trainers over emulated networks, by staleness, against what a bound on them says
    restart a server that is killed with its rows in shared memory, until it answers again

Everywhere: batches of 26 features x 4096 ids, drawn by Zipf(1.05); `network` takes quarters of them.
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
    num_warmup: int = 5
    """Steps before those timed, and those timed, unless the command line says otherwise."""
    num_steps: int = 40
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
    echo = tuple(Target(figure=figure, at_least=0.7) for figure in ("ratio", "ratio_free"))
    rows = (Target(figure="ratio_local", at_least=0.55), Target(figure="ratio_paddle", at_least=7.12))
    train = tuple(Target(figure=figure, at_least=3.0) for figure in ("ratio", "ratio_stale"))
    share = (Target(figure="share", at_most=0.55), Target(figure="share_float16", at_most=0.30))
    network = tuple(
        Target(figure=f"of_predicted/{name}", at_least=0.85) for name in ("10gbit-0.2ms", "10gbit-1ms", "1gbit-0.2ms")
    )
    slow = (Target(figure="ratio/1gbit-0.2ms", at_least=2.6), Target(figure="of_async/1gbit-0.2ms", at_least=0.95))
    away = Target(figure="away_s", at_most=2.0)
    return [
        *(ClusterCase(kind="echo", dim=dim, num_warmup=50, num_steps=400, targets=echo) for dim in DIMS),
        *(ClusterCase(kind="rows", dim=dim, num_steps=200, targets=rows) for dim in DIMS),
        *(ClusterCase(kind="train", dim=dim, targets=train) for dim in DIMS),
        *(ClusterCase(kind="bytes", dim=dim, num_warmup=1, num_steps=10, targets=share) for dim in DIMS),
        ClusterCase(kind="network", dim=16, num_warmup=2, num_steps=16, targets=network),
        ClusterCase(kind="network", dim=64, num_warmup=2, num_steps=16, targets=(*network, *slow)),
        *(ClusterCase(kind="restart", rows=10 * MILLION, dim=dim, num_steps=3, targets=(away,)) for dim in DIMS),
    ]


def quick_cases() -> list[ClusterCase]:
    """The same, small, to see in seconds that all of it runs."""
    return [
        *(ClusterCase(kind="echo", dim=dim, rows=26_000, num_warmup=5, num_steps=20) for dim in DIMS),
        *(
            ClusterCase(kind=kind, dim=16, rows=26_000, num_warmup=1, num_steps=4)
            for kind in ("rows", "train", "bytes", "network", "restart")
        ),
    ]
