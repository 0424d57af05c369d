"""The command line of `python -m benchmarks.train`."""

import sys
from dataclasses import replace

from benchmarks.harness.suite import Suite
from benchmarks.train.cases import full_cases, quick_cases
from benchmarks.train.plan import KINDS

SUITE = Suite(
    name="train",
    purpose="Measure training steps of a DLRM beside the peers', one JSON line per case.",
    full_cases=full_cases,
    quick_cases=quick_cases,
    kinds=KINDS,
    contenders=("satrap", "torchrec", "fbgemm", "torch", "paddle"),
    table=("train/*/adagrad",),
    with_threads=lambda case, num_threads: replace(case, num_threads=num_threads),
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
