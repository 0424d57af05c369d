"""The command line of `python -m benchmarks.gpu`."""

import argparse
import sys
from dataclasses import replace

from benchmarks.gpu.cases import full_cases, quick_cases
from benchmarks.gpu.devices import describe_device, incomparable
from benchmarks.gpu.plan import KINDS
from benchmarks.harness.case import Case
from benchmarks.harness.rounds import say
from benchmarks.harness.suite import Suite


def with_threads(case: Case, num_threads: int) -> Case:
    """Return the case for another number of threads, which only resolving with several depends on."""
    return replace(case, num_threads=num_threads) if case.num_threads > 1 else case


class GpuSuite(Suite):
    """A suite whose targets are those of a GPU, but for resolving, which the host does."""

    def cases(self, options: argparse.Namespace) -> list[Case]:
        """Return every case once, without targets of another device than this machine's."""
        cases = list(dict.fromkeys(super().cases(options)))
        if (reason := incomparable(describe_device())) is None:
            return cases
        if options.check:
            say(f"no target but those of resolve is compared: {reason}")
        return [case if case.kind == "resolve" else replace(case, targets=()) for case in cases]


SUITE = GpuSuite(
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
