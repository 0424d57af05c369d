"""The command line of `python -m benchmarks.cluster`: the network beside its peers, one JSON line per case.

Results go to stdout (and are appended to --out), progress and complaints to stderr.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import group_by_table, select_cases
from benchmarks.cluster.cases import ClusterCase, full_cases, quick_cases
from benchmarks.cluster.kinds import KINDS
from benchmarks.cluster.rounds import run_rounds
from benchmarks.command_line import add_options, describe_run, finish, measure, parse
from benchmarks.peers import PADDLE, make_peers, peers_python
from benchmarks.runs import Results, say

CONTENDERS = ("satrap", "paddle")
FULL = {"rounds": 5, "warmup": 50, "steps": 400}
"""Steps of `echo`; the other kinds, whose steps do more, have fewer."""
LEAST = {"num_warmup": 0, "num_steps": 1}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """--warmup and --steps stay None where every case takes its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.split("\n")[0])
    add_options(parser, CONTENDERS, FULL)
    options = parse(parser, arguments, {"rounds": FULL["rounds"]}, {"rounds": 1})
    for name, least in LEAST.items():
        option = name.removeprefix("num_")
        if (value := getattr(options, option)) is not None and value < least:
            parser.error(f"--{option} must be at least {least}")
    return options


def paced(case: ClusterCase, options: argparse.Namespace) -> ClusterCase:
    """The case with the steps that the command line asks for, if it does."""
    given = {name: getattr(options, name.removeprefix("num_")) for name in LEAST}
    return replace(case, **{name: value for name, value in given.items() if value is not None})


def find_pythons(cases: Sequence[ClusterCase], options: argparse.Namespace) -> dict[str, Path]:
    """The interpreters of the peers that are wanted and installed."""
    if not any("paddle" in KINDS[case.kind].peers for case in cases):
        return {}
    if "paddle" not in options.contenders:
        say("paddle left out: not among --contenders")
        return {}
    if options.make_peers:
        say(f"{PADDLE.name} is ready: {make_peers(options.peers_home, PADDLE)}")
    python = peers_python(options.peers_home, PADDLE)
    if python is None:
        say("paddle left out: it is not installed; --make-peers installs it")
    return {} if python is None else {"paddle": python}


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    every = quick_cases() if options.quick else full_cases()
    cases = select_cases(every, options.case)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not cases:
        say("no case has such a name; --list prints them")
        return 2
    cases = [paced(case, options) for case in cases]
    pythons = find_pythons(cases, options)

    def make_record(case: ClusterCase, results: Results) -> dict[str, Any]:
        pace = {"num_warmup": case.num_warmup, "num_steps": case.num_steps}
        return pace | KINDS[case.kind].make_record(case, results)

    with tempfile.TemporaryDirectory(prefix="satrap-bench-") as temporary:
        batches: Path = options.batches or Path(temporary)
        batches.mkdir(parents=True, exist_ok=True)

        def rounds_of(group: Sequence[ClusterCase]) -> tuple[Results, list[str]]:
            (case,) = group
            if why := KINDS[case.kind].unable():
                say(f"{case.name} is not run: {why}")
                return {}, [f"{case.name} was not run: {why}"]
            present = {name: python for name, python in pythons.items() if name in KINDS[case.kind].peers}
            return run_rounds(case, options.rounds, batches=batches.absolute(), pythons=present, tmpfs=options.tmpfs)

        header = describe_run("cluster", options, arguments)
        wrong = measure(group_by_table(cases), rounds_of, make_record, header, options.out)
    return finish(wrong, check=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
