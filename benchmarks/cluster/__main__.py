"""The command line of `python -m benchmarks.cluster`: the network beside its peers, one JSON line per case.

Results go to stdout (and are appended to --out), progress and complaints to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import group_by_table, select_cases
from benchmarks.cluster.cases import ClusterCase, full_cases, quick_cases
from benchmarks.cluster.kinds import KINDS
from benchmarks.cluster.rounds import run_rounds
from benchmarks.command_line import add_options, describe_run, finish, measure, parse
from benchmarks.runs import Results, say

CONTENDERS = ("satrap",)
FULL = {"rounds": 5, "warmup": 50, "steps": 400}
QUICK = {"rounds": 1, "warmup": 5, "steps": 20}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.split("\n")[0])
    add_options(parser, CONTENDERS, FULL)
    return parse(parser, arguments, FULL, QUICK)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    every = quick_cases() if options.quick else full_cases()
    cases = select_cases(every, options.case, [case.num_threads for case in every])
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not cases:
        say("no case has such a name; --list prints them")
        return 2

    def rounds_of(group: Sequence[ClusterCase]) -> tuple[Results, list[str]]:
        return run_rounds(group[0], options.rounds, options.warmup, options.steps)

    def make_record(case: ClusterCase, results: Results) -> dict[str, Any]:
        return KINDS[case.kind].make_record(case, results)

    header = describe_run("cluster", options, arguments)
    return finish(measure(group_by_table(cases), rounds_of, make_record, header, options.out), check=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
