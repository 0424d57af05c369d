"""The cases of the cluster benchmark and their targets. Pure data; nothing is run here.

A case's name is kind/rows x dim/threads of the server. The kinds:

    echo    ids out and rows back through satrap.rpc, against a loop over plain TCP sockets
    rows    lookup and update on one server, against the same on rows in the worker and Paddle's parameter server
    train   whole steps of the light DLRM over one server, against Paddle's parameter server
    bytes   what a lookup and an update put on the wire, against a row and a gradient for every id of a batch
    network whole steps of two trainers over emulated networks, by staleness, against a predicted bound
    restart a server that is killed with its rows in shared memory, until it answers again
    fan_out CPU time of a step over 1 to 120 servers, at the trainer and at a server

All use batches of 26 features x 4096 ids, drawn by Zipf(1.05); `network` uses quarters of them, `fan_out` eighths.
"""

from dataclasses import replace

from benchmarks.harness.case import MILLION, Case, Target
from benchmarks.store.cases import DIMS

BASE = Case(kind="", rows=20 * MILLION, num_threads=2, num_warmup=5, num_steps=40)
QUICK = replace(BASE, rows=26_000, dim=16, num_warmup=1, num_steps=4)


def full_cases() -> list[Case]:
    """Return every case that the project's targets name."""
    ratios = tuple(Target(figure=figure, at_least=0.7) for figure in ("ratio", "ratio_free"))
    peers = (Target(figure="ratio_local", at_least=0.55), Target(figure="ratio_paddle", at_least=7.12))
    steps = tuple(Target(figure=figure, at_least=3.0) for figure in ("ratio", "ratio_stale"))
    share = (Target(figure="share", at_most=0.55), Target(figure="share_float16", at_most=0.30))
    predicted = tuple(
        Target(figure=f"of_predicted/{name}", at_least=0.85) for name in ("10gbit-0.2ms", "10gbit-1ms", "1gbit-0.2ms")
    )
    slow = (Target(figure="ratio/1gbit-0.2ms", at_least=2.6), Target(figure="of_async/1gbit-0.2ms", at_least=0.95))
    away = (Target(figure="away_s", at_most=2.0),)
    fan_out = (
        Target(figure="fan_out_ms/64", at_most=5.0),
        Target(figure="fan_out_ms/120", at_most=10.0),
        Target(figure="call_ms/64", at_most=0.1),
    )
    every = [
        replace(BASE, kind="echo", num_warmup=50, num_steps=400, targets=ratios),
        replace(BASE, kind="rows", num_steps=200, targets=peers),
        replace(BASE, kind="train", targets=steps),
        replace(BASE, kind="bytes", num_warmup=1, num_steps=10, targets=share),
        replace(BASE, kind="network", num_warmup=2, num_steps=16, targets=(*predicted, *slow)),
        replace(BASE, kind="restart", rows=10 * MILLION, num_steps=3, targets=away),
    ]
    cases = [replace(case, dim=dim) for case in every for dim in DIMS]
    cases.append(replace(BASE, kind="fan_out", rows=260_000, dim=16, num_steps=100, targets=fan_out))
    # The targets of the slow network are for dim 64.
    return [replace(case, targets=predicted) if (case.kind, case.dim) == ("network", 16) else case for case in cases]


def quick_cases() -> list[Case]:
    """Return the same, small, to see in seconds that all of it runs."""
    kinds = ("rows", "train", "bytes", "network", "restart", "fan_out")
    echo = replace(QUICK, kind="echo", num_warmup=5, num_steps=20)
    return [*(replace(echo, dim=dim) for dim in DIMS), *(replace(QUICK, kind=kind) for kind in kinds)]
