"""The command line of `python -m benchmarks.train`: training steps beside the peers', one JSON line per case.

Results go to stdout (and are appended to --out), progress, the summary and complaints to stderr.
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.command_line import add_options, parse, run_benchmark
from benchmarks.peers import PADDLE, TORCHREC
from benchmarks.train.cases import full_cases, quick_cases
from benchmarks.train.figures import make_record
from benchmarks.train.plan import plan

CONTENDERS = ("satrap", "torchrec", "fbgemm", "torch", "paddle")
TABLE = ("train/*/adagrad",)
"""The cases of the README's table."""
FULL = {"rounds": 3, "warmup": 5, "steps": 20}
QUICK = {"rounds": 1, "warmup": 2, "steps": 4}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__.split("\n")[0])
    add_options(parser, CONTENDERS, FULL)
    parser.add_argument("--threads", type=int, default=2, help="cores that every contender may use (default 2)")
    return parse(parser, arguments, FULL, QUICK)


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    cases = quick_cases(options.threads) if options.quick else full_cases(options.threads)
    return run_benchmark("train", options, arguments, cases, TABLE, [TORCHREC, PADDLE], plan, make_record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
