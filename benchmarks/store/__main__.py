"""The command line of `python -m benchmarks.store`."""

import sys
from dataclasses import replace

from benchmarks.harness.case import Case
from benchmarks.harness.suite import Suite
from benchmarks.store.cases import full_cases, quick_cases
from benchmarks.store.plan import KINDS


def with_threads(case: Case, num_threads: int) -> Case:
    """Return the case for another number of threads; the targets are those of two."""
    return replace(case, num_threads=num_threads, targets=case.targets if num_threads == 2 else ())


SUITE = Suite(
    name="store",
    purpose="Measure the speed and size of Satrap's table beside its peers, one JSON line per case.",
    full_cases=full_cases,
    quick_cases=quick_cases,
    kinds=KINDS,
    contenders=("satrap", "satrap_direct", "torch", "fbgemm", "index_select"),
    table=("train/*/adagrad/zipf", "lookup"),
    with_threads=with_threads,
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
