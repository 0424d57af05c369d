"""The command line of `python -m benchmarks.train`: training steps beside the peers', one JSON line per case.

Results go to stdout (and are appended to --out), progress and complaints to stderr.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import group_by_table, select_cases
from benchmarks.command_line import add_options, describe_run, finish, measure, parse, settings_of
from benchmarks.peers import FBGEMM, PADDLE, TORCHREC, imports, make_peers, peers_python
from benchmarks.runs import Results, run_rounds, say
from benchmarks.train.cases import TrainCase, full_cases, quick_cases
from benchmarks.train.figures import make_record
from benchmarks.train.plan import plan

CONTENDERS = ("satrap", "torchrec", "fbgemm", "torch", "paddle")
FULL = {"rounds": 3, "warmup": 5, "steps": 30}
QUICK = {"rounds": 1, "warmup": 2, "steps": 5}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__.split("\n")[0])
    add_options(parser, CONTENDERS, FULL)
    parser.add_argument("--threads", type=int, default=2, help="cores that every contender may use (default 2)")
    return parse(parser, arguments, FULL, QUICK)


def find_pythons(home: Path) -> dict[str, Path]:
    """The interpreter for each contender that is installed: this one where it will do, else the peers' environments."""
    here, torchrec, paddle = Path(sys.executable), peers_python(home, TORCHREC), peers_python(home, PADDLE)
    pythons: dict[str, Path] = {}
    if imports(here, "satrap.store"):
        pythons["satrap"] = here
    fbgemm = torchrec or peers_python(home, FBGEMM)
    torch = here if imports(here, "torch") else fbgemm
    found = {"torchrec": torchrec, "fbgemm": fbgemm, "torch": torch, "paddle": paddle}
    return pythons | {name: python for name, python in found.items() if python is not None}


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    every = quick_cases(options.threads) if options.quick else full_cases(options.threads)
    cases = select_cases(every, options.case, [options.threads])
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.make_peers:
        for environment in (TORCHREC, PADDLE):
            say(f"{environment.name} is ready: {make_peers(options.peers_home, environment)}")
    if not cases:
        say("no case has such a name; --list prints them")
        return 2
    pythons = find_pythons(options.peers_home)
    if "satrap" in options.contenders and "satrap" not in pythons:
        say(f"satrap does not import in {sys.executable}: `make setup`, then `.venv/bin/python -m benchmarks.train`")
        return 2
    with tempfile.TemporaryDirectory(prefix="satrap-bench-") as temporary:
        settings = settings_of(options, pythons, Path(temporary))

        def rounds_of(group: Sequence[TrainCase]) -> tuple[Results, list[str]]:
            return run_rounds(group[0].name, lambda number: plan(group, number, settings), settings)

        header = describe_run("train", options, arguments)
        wrong = measure(group_by_table(cases), rounds_of, make_record, header, options.out)
    return finish(wrong, check=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
