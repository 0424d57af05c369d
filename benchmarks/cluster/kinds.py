"""Which file measures which kind of case: a `measure` for the worker and a `make_record` for the driver."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import echo
from benchmarks.cluster.cases import ClusterCase
from benchmarks.runs import Results


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What is done with the cases of a kind."""

    measure: Callable[[Mapping[str, Any]], dict[str, Any]]
    """One round, in a worker; {"streams": {label: {...}}, ...}."""
    make_record: Callable[[ClusterCase, Results], dict[str, Any]]


KINDS = {"echo": Kind(measure=echo.measure, make_record=echo.make_record)}
