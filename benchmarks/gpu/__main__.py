"""The command line of `python -m benchmarks.gpu`."""

import sys
from dataclasses import replace

from benchmarks.gpu.cases import full_cases, quick_cases
from benchmarks.gpu.plan import KINDS
from benchmarks.harness.case import Case
from benchmarks.harness.suite import Suite


def with_threads(case: Case, num_threads: int) -> Case:
    """Return the case for another number of threads, which only resolving depends on."""
    return replace(case, num_threads=num_threads) if case.kind == "resolve" else case


SUITE = Suite(
    name="gpu",
    purpose="Measure rows on a device: resolving ids, kernels, whole steps of a DLRM; one JSON line per case.",
    full_cases=full_cases,
    quick_cases=quick_cases,
    kinds=KINDS,
    contenders=("satrap", "torch"),
    with_threads=with_threads,
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
