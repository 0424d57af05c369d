"""`python -m benchmarks.store`: how fast and how small Satrap's table is, beside its peers, one JSON line per case.

This file is the command line. Results go to stdout (and are appended to --out), progress, the summary and complaints to
stderr. cases.py lists what is measured and the targets, forms.py the forms of the peers, runs.py starts the contenders
in turn, records.py makes the lines; benchmarks/README.md says how a number is made.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.cases import full_cases, quick_cases
from benchmarks.command_line import add_options, parse, run_benchmark
from benchmarks.peers import TORCHREC
from benchmarks.plan import plan
from benchmarks.records import make_record

CONTENDERS = ("satrap", "torch", "fbgemm", "index_select")
TABLE = ("train/*/adagrad/zipf", "lookup")
"""The cases of the README's table, and lookups."""
FULL = {"rounds": 3, "warmup": 5, "steps": 30}
QUICK = {"rounds": 1, "warmup": 3, "steps": 8}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__.split("\n")[0])
    add_options(parser, CONTENDERS, FULL)
    parser.add_argument("--threads", type=int, default=2, help="cores that every contender may use (default 2)")
    return parse(parser, arguments, FULL, QUICK)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    cases = quick_cases(options.threads) if options.quick else full_cases(options.threads)
    return run_benchmark("store", options, arguments, cases, TABLE, [TORCHREC], plan, make_record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
