"""`python -m benchmarks.store`: how fast and how small Satrap's table is, beside its peers, one JSON line per case.

This file is the command line. Results go to stdout (and are appended to --out), progress and complaints to stderr.
cases.py lists what is measured and the targets, runs.py starts the contenders in turn, records.py makes the lines;
benchmarks/README.md says how a number is made.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import Case, full_cases, group_by_table, quick_cases, select_cases
from benchmarks.command_line import add_options, describe_run, finish, measure, parse, settings_of
from benchmarks.peers import imports, make_peers, peers_python
from benchmarks.plan import plan
from benchmarks.records import make_record
from benchmarks.runs import Results, run_rounds, say

CONTENDERS = ("satrap", "torch", "fbgemm", "index_select")
FULL = {"rounds": 3, "warmup": 5, "steps": 30}
QUICK = {"rounds": 1, "warmup": 3, "steps": 8}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__.split("\n")[0])
    add_options(parser, CONTENDERS, FULL)
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1], help="cases with these thread counts")
    return parse(parser, arguments, FULL, QUICK)


def find_pythons(home: Path) -> dict[str, Path]:
    """The interpreter for each contender that is installed: this one where it will do, else the peers' environment."""
    here, peers = Path(sys.executable), peers_python(home)
    pythons: dict[str, Path] = {}
    if imports(here, "satrap.store"):
        pythons["satrap"] = here
    torch = here if imports(here, "torch") else peers
    if torch is not None:
        pythons |= {"torch": torch, "index_select": torch}
    if peers is not None:
        pythons["fbgemm"] = peers
    return pythons


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    cases = select_cases(quick_cases() if options.quick else full_cases(), options.case, options.threads)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.make_peers:
        say(f"FBGEMM is ready: {make_peers(options.peers_home)}")
    if not cases:
        say("no case has such a name; --list prints them")
        return 2
    pythons = find_pythons(options.peers_home)
    if "satrap" in options.contenders and "satrap" not in pythons:
        say(f"satrap does not import in {sys.executable}: `make setup`, then `.venv/bin/python -m benchmarks.store`")
        return 2
    with tempfile.TemporaryDirectory(prefix="satrap-bench-") as temporary:
        settings = settings_of(options, pythons, Path(temporary))

        def rounds_of(group: Sequence[Case]) -> tuple[Results, list[str]]:
            return run_rounds(group[0].name, lambda number: plan(group, number, settings), settings)

        header = describe_run("store", options, arguments)
        wrong = measure(group_by_table(cases), rounds_of, make_record, header, options.out)
    return finish(wrong, check=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
