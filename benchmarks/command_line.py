"""What the command lines of the benchmarks share: their options, the header of every line, running group after group.

`benchmarks.store` and `benchmarks.train` say which cases there are, which runs a round of a group needs and how a
record is made of them; `run_benchmark` does the rest.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import machine
from benchmarks.cases import AnyCase, group_by_table, select_cases
from benchmarks.peers import DEFAULT_HOME, Environment, find_pythons, make_peers
from benchmarks.records import complaints
from benchmarks.runs import Results, Run, Settings, run_rounds, say
from benchmarks.summary import summary

C = TypeVar("C", bound=AnyCase)
Defaults = Mapping[str, int]
"""Of --rounds, --warmup and --steps."""
# They say where things are on one machine, which is nobody else's business, and change no figure.
PATH_OPTIONS = ("--out", "--peers-home", "--tmpfs", "--batches")


def add_options(parser: argparse.ArgumentParser, contenders: Sequence[str], full: Defaults) -> None:
    """The options that every benchmark has."""
    names = "names, their beginnings, or patterns"
    parser.add_argument("--case", nargs="+", action="extend", default=[], metavar="NAME", help=names)
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--quick", action="store_true", help="small cases, few steps: a minute or two, not a result")
    parser.add_argument("--rounds", type=int, help=f"rounds of all contenders (default {full['rounds']})")
    parser.add_argument("--warmup", type=int, help=f"steps before those timed (default {full['warmup']})")
    parser.add_argument("--steps", type=int, help=f"steps timed per round (default {full['steps']})")
    parser.add_argument("--contenders", nargs="+", choices=contenders, default=list(contenders))
    parser.add_argument("--check", action="store_true", help="exit 1 and name the targets that were missed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the JSON lines here too")
    parser.add_argument("--make-peers", action="store_true", help="install the peers under --peers-home if need be")
    parser.add_argument("--peers-home", type=Path, default=Path(DEFAULT_HOME), help=f"default {DEFAULT_HOME}")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory (default /dev/shm)")
    parser.add_argument("--batches", type=Path, help="keep the batches in this folder (default: a temporary one)")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str], full: Defaults, quick: Defaults
) -> argparse.Namespace:
    """The command line; --quick only changes defaults."""
    parsed = parser.parse_args(arguments)
    for name, value in (quick if parsed.quick else full).items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
        least = 0 if name == "warmup" else 1
        if getattr(parsed, name) < least:
            parser.error(f"--{name} must be at least {least}")
    return parsed


def run_benchmark(
    name: str,
    options: argparse.Namespace,
    arguments: Sequence[str],
    cases: Sequence[C],
    table: Sequence[str],
    environments: Sequence[Environment],
    plan: Callable[[Sequence[C], int, Settings], Sequence[Run]],
    make_record: Callable[[C, Results], dict[str, Any]],
) -> int:
    """Run the cases that the options select, by default those of the README's `table`; the exit status."""
    for environment in environments if options.make_peers else ():
        say(f"{environment.name} is ready: {make_peers(options.peers_home, environment)}")
    if options.list:
        print("\n".join(case.name for case in select_cases(cases, options.case)))
        return 0
    chosen = select_cases(cases, options.case or ("*" if options.quick else table))
    if not chosen:
        say("no case has such a name; --list prints them")
        return 2
    pythons = find_pythons(options.peers_home)
    if "satrap" in options.contenders and "satrap" not in pythons:
        command = f".venv/bin/python -m benchmarks.{name}"
        say(f"satrap does not import in {sys.executable}: `make setup`, then `{command}`")
        return 2
    with tempfile.TemporaryDirectory(prefix="satrap-bench-") as temporary:
        settings = settings_of(options, pythons, Path(temporary))

        def rounds_of(group: Sequence[C]) -> tuple[Results, list[str]]:
            return run_rounds(group[0].name, lambda number: plan(group, number, settings), settings)

        header, start = describe_run(name, options, arguments), time.monotonic()
        wrong = measure(group_by_table(chosen), rounds_of, make_record, header, options.out)
    say(f"took {(time.monotonic() - start) / 60:.1f} minutes")
    return finish(wrong, check=options.check)


def settings_of(options: argparse.Namespace, pythons: dict[str, Path], temporary: Path) -> Settings:
    """What the runs are told; batches are kept in a temporary folder unless an option names one."""
    batches: Path = options.batches or temporary
    batches.mkdir(parents=True, exist_ok=True)
    return Settings(
        num_rounds=options.rounds,
        num_warmup=options.warmup,
        num_steps=options.steps,
        contenders=tuple(options.contenders),
        pythons=pythons,
        batches=batches,
        tmpfs=options.tmpfs,
    )


def describe_run(benchmark: str, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """What every line says about the run it belongs to."""
    command = ["python", "-m", f"benchmarks.{benchmark}"]
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
        "benchmark": benchmark,
        "command": " ".join(command),
        "commit": machine.describe_commit(),
        "date": machine.now(),
        "num_rounds": options.rounds,
        "num_warmup": options.warmup,
        "num_steps": options.steps,
        "machine": machine.describe_machine(),
    }


def measure(
    groups: Sequence[Sequence[C]],
    run_rounds: Callable[[Sequence[C]], tuple[Results, list[str]]],
    make_record: Callable[[C, Results], dict[str, Any]],
    header: Mapping[str, Any],
    out: Path | None,
) -> list[str]:
    """Run all groups, print a line for each case as soon as its group is done; what went wrong or missed its target.

    The summary of all cases goes to stderr in the end.
    """
    wrong: list[str] = []
    records = []
    for group in groups:
        results, failures = run_rounds(group)
        wrong += failures
        for case in group:
            if not results:
                wrong += [f"{case.name}: {target.figure} was not measured" for target in case.targets]
                continue
            record = make_record(case, results)
            wrong += complaints(record)
            if not any(record["clean_rounds"]):
                say(f"{case.name}: other processes or the host disturbed every round")
            records.append({**header, **record})
            line = json.dumps(records[-1])
            print(line, flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(line + "\n")
    say("\n".join(["", *summary(records)]))
    return wrong


def finish(wrong: Sequence[str], *, check: bool) -> int:
    """The exit status, after saying what went wrong."""
    if wrong:
        say("\n".join(["", "missed, failed or not measured:", *wrong]))
    return 1 if wrong and check else 0
