"""Which file measures which kind of case: a `measure` for the worker, a `make_record` for the driver; and its peers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import echo, machines, network, restart, rows, train, wire
from benchmarks.cluster.cases import ClusterCase
from benchmarks.runs import Results


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What is done with the cases of a kind."""

    measure: Callable[[Mapping[str, Any]], dict[str, Any]]
    """One round, in a worker; {"streams": {label: {...}}, ...}."""
    make_record: Callable[[ClusterCase, Results], dict[str, Any]]
    unable: Callable[[], str | None] = lambda: None
    """Why it cannot be measured on this machine; None if it can."""
    peers: tuple[str, ...] = ()
    """Measured after the worker in every round, by the file of that name in an environment of its own."""


KINDS = {
    "echo": Kind(measure=echo.measure, make_record=echo.make_record),
    "rows": Kind(measure=rows.measure, make_record=rows.make_record, peers=("paddle",)),
    "train": Kind(measure=train.measure, make_record=train.make_record, peers=("paddle",)),
    "bytes": Kind(measure=wire.measure, make_record=wire.make_record),
    "network": Kind(measure=network.measure, make_record=network.make_record, unable=machines.unable),
    "restart": Kind(measure=restart.measure, make_record=restart.make_record),
}
