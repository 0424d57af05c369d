"""The command line of `python -m benchmarks.cluster`."""

import sys

from benchmarks.cluster.cases import full_cases, quick_cases
from benchmarks.cluster.kinds import KINDS
from benchmarks.harness.suite import Suite

SUITE = Suite(
    name="cluster",
    purpose="Measure what rows on servers cost beside the peers, one JSON line per case.",
    full_cases=full_cases,
    quick_cases=quick_cases,
    kinds=KINDS,
    contenders=("satrap", "paddle"),
    num_rounds=5,
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
