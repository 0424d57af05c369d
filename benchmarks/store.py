"""`python -m benchmarks.store`: how fast and how small Satrap's table is, beside its peers, one JSON line per case.

This file is the command line. Results go to stdout (and are appended to --out), progress and complaints to stderr.
cases.py lists what is measured and the targets, runs.py starts the contenders in turn, records.py makes the lines;
benchmarks/README.md says how a number is made.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cases import Case, full_cases, group_by_table, quick_cases, select_cases
from benchmarks.peers import DEFAULT_HOME, imports, make_peers, peers_python
from benchmarks.records import complaints, make_record
from benchmarks.runs import Settings, run_rounds, say

CONTENDERS = ("satrap", "torch", "fbgemm", "index_select")
FULL = {"rounds": 3, "warmup": 5, "steps": 30}
QUICK = {"rounds": 1, "warmup": 3, "steps": 8}
# They say where things are on one machine, which is nobody else's business, and change no figure.
PATH_OPTIONS = ("--out", "--peers-home", "--tmpfs", "--batches")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; --quick only changes defaults."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__.split("\n")[0])
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="names, their beginnings, or patterns")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--quick", action="store_true", help="small cases, few steps: about a minute, not a result")
    parser.add_argument("--rounds", type=int, help=f"rounds of all contenders (default {FULL['rounds']})")
    parser.add_argument("--warmup", type=int, help=f"steps before those timed (default {FULL['warmup']})")
    parser.add_argument("--steps", type=int, help=f"steps timed per round (default {FULL['steps']})")
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1], help="cases with these thread counts")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--check", action="store_true", help="exit 1 and name the targets that were missed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the JSON lines here too")
    parser.add_argument(
        "--make-peers", action="store_true", help="install FBGEMM under --peers-home if it is not there"
    )
    parser.add_argument("--peers-home", type=Path, default=Path(DEFAULT_HOME), help=f"default {DEFAULT_HOME}")
    parser.add_argument("--peer-huge-pages", action="store_true", help="give torch and FBGEMM huge pages as well")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory (default /dev/shm)")
    parser.add_argument("--batches", type=Path, help="keep the batches in this folder (default: a temporary one)")
    parsed = parser.parse_args(arguments)
    defaults = QUICK if parsed.quick else FULL
    for name, value in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
        least = 0 if name == "warmup" else 1
        if getattr(parsed, name) < least:
            parser.error(f"--{name} must be at least {least}")
    return parsed


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


def describe_run(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """What every line says about the run it belongs to."""
    command = ["python", "-m", "benchmarks.store"]
    skip = False
    for argument in arguments:
        name = argument.split("=")[0]
        if name in PATH_OPTIONS:
            skip = "=" not in argument
        elif skip:
            skip = False
        else:
            command.append(argument)
    return {
        "benchmark": "store",
        "command": " ".join(command),
        "commit": machine.describe_commit(),
        "date": machine.now(),
        "num_rounds": options.rounds,
        "num_warmup": options.warmup,
        "num_steps": options.steps,
        "peer_huge_pages": options.peer_huge_pages,
        "machine": machine.describe_machine(),
    }


def measure(cases: Sequence[Case], settings: Settings, header: dict[str, Any], out: Path | None) -> list[str]:
    """Run all cases, print a line for each as soon as its group is done; what went wrong or missed its target."""
    wrong: list[str] = []
    for group in group_by_table(cases):
        results, failures = run_rounds(group, settings)
        wrong += failures
        for case in group:
            if not results:
                wrong += [f"{case.name}: {target.figure} was not measured" for target in case.targets]
                continue
            record = make_record(case, results)
            wrong += complaints(record)
            if not any(record["clean_rounds"]):
                say(f"{case.name}: other processes or the host disturbed every round")
            line = json.dumps({**header, **record})
            print(line, flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(line + "\n")
    return wrong


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    cases = select_cases(quick_cases() if options.quick else full_cases(), options.case, options.threads)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.make_peers:
        say(f"FBGEMM is ready: {make_peers(options.peers_home)}")
    if not cases:
        say("no case has such a name; --list prints them")
        return 2
    with tempfile.TemporaryDirectory(prefix="satrap-bench-") as temporary:
        batches = options.batches or Path(temporary)
        batches.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            num_rounds=options.rounds,
            num_warmup=options.warmup,
            num_steps=options.steps,
            contenders=tuple(options.contenders),
            pythons=find_pythons(options.peers_home),
            batches=batches,
            tmpfs=options.tmpfs,
            peer_huge_pages=options.peer_huge_pages,
        )
        wrong = measure(cases, settings, describe_run(options, arguments), options.out)
    if wrong:
        say("\n".join(["", "missed, failed or not measured:", *wrong]))
    return 1 if wrong and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
