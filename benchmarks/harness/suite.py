"""The command line of a benchmark: its options, the header of every line, measuring group after group.

Results go to stdout (and are appended to --out); progress, the summary and complaints go to stderr.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, peers
from benchmarks.harness.case import Case, group_cases, select_cases
from benchmarks.harness.record import Rounds, complaints, make_record
from benchmarks.harness.rounds import Results, Run, Settings, run_rounds, say
from benchmarks.summary import summary

LEAST = {"rounds": 1, "warmup": 0, "steps": 1, "threads": 1}
LOCAL_OPTIONS = ("--out", "--peers-home", "--tmpfs", "--batches")
"""Options that name places on one machine and change no figure, so no record has them."""
PATH_OPTIONS = ("--flights",)
"""Options whose value is such a place, but which a command needs."""


Plan = Callable[[Sequence[Case], int, Path], Sequence[Run]]
"""Returns the runs of a round, by its number, for cases that share a table; the folder is that of the batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How the cases of a kind are measured and recorded."""

    record: Callable[[Case, Rounds], dict[str, Any]]
    """Returns the figures of a case, and whatever else its record says."""
    plan: Plan = lambda group, number, batches: ()
    shares_table: bool = False
    """Whether its cases with the same table share processes."""
    required: str | None = None
    """Label of the run without which there is no record."""
    unable: Callable[[], str | None] = lambda: None
    """Returns why it cannot be measured on this machine, None if it can."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark: its cases, how each kind of them is measured, and the defaults of its command line."""

    name: str
    purpose: str
    """One sentence, for --help."""
    full_cases: Callable[[], Sequence[Case]]
    quick_cases: Callable[[], Sequence[Case]]
    kinds: Mapping[str, Kind]
    contenders: tuple[str, ...] = ()
    num_rounds: int = 3
    num_quick_rounds: int = 1
    table: tuple[str, ...] = ("*",)
    """Patterns of the cases that are measured without --case: those of the README's table."""
    with_threads: Callable[[Case, int], Case] | None = None
    """Returns a case for another number of threads; None: there is no option for it."""

    @property
    def program(self) -> str:
        return f"python -m benchmarks.{self.name}"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of a benchmark that runs contenders in processes."""
        names = list(self.contenders)
        parser.add_argument("--rounds", type=int, help=f"rounds of all contenders (default {self.num_rounds})")
        parser.add_argument("--warmup", type=int, help="steps before the timed ones (default: those of the case)")
        parser.add_argument("--steps", type=int, help="timed steps of a round (default: those of the case)")
        parser.add_argument("--contenders", nargs="+", choices=names, default=names)
        parser.add_argument("--make-peers", action="store_true", help="install missing peers under --peers-home")
        home, memory = Path(peers.DEFAULT_HOME), Path("/dev/shm")
        parser.add_argument("--peers-home", type=Path, default=home, help=f"default {home}")
        parser.add_argument("--tmpfs", type=Path, default=memory, help=f"a folder in memory (default {memory})")
        parser.add_argument("--batches", type=Path, help="keep the batches in this folder (default: a temporary one)")
        if self.with_threads:
            parser.add_argument("--threads", type=int, default=2, help="cores of every contender (default 2)")

    def check_options(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """Refuse options out of range."""
        for name, least in LEAST.items():
            value = getattr(options, name, None)
            if value is not None and value < least:
                parser.error(f"--{name} must be at least {least}, found {value}")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options; --quick changes defaults only."""
        names = "names of cases, their beginnings, or patterns"
        parser = argparse.ArgumentParser(prog=self.program, description=self.purpose)
        parser.add_argument("--case", nargs="+", action="extend", default=[], metavar="NAME", help=names)
        parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
        parser.add_argument(
            "--quick", action="store_true", help="small cases, few steps: a minute or two, not a result"
        )
        parser.add_argument("--check", action="store_true", help="exit 1 and name the targets that were missed")
        parser.add_argument("--out", type=Path, metavar="FILE", help="append the JSON lines here too")
        self.add_options(parser)
        options = parser.parse_args(arguments)
        if options.rounds is None:
            options.rounds = self.num_quick_rounds if options.quick else self.num_rounds
        self.check_options(parser, options)
        return options

    def cases(self, options: argparse.Namespace) -> list[Case]:
        """Return every case, with the threads and steps that the options name."""
        cases = list(self.quick_cases() if options.quick else self.full_cases())
        if self.with_threads:
            cases = [self.with_threads(case, options.threads) for case in cases]
        steps = {f"num_{name}": getattr(options, name, None) for name in ("warmup", "steps")}
        changes: dict[str, Any] = {name: value for name, value in steps.items() if value is not None}
        return [replace(case, **changes) for case in cases]

    def obstacle(self, options: argparse.Namespace) -> str | None:
        """Return why nothing can be measured, None if something can."""
        if "satrap" in options.contenders and peers.find_python(options.peers_home, "satrap") is None:
            return f"satrap does not import in {sys.executable}: `make setup`, then `.venv/bin/{self.program}`"
        return None

    def measure(self, group: Sequence[Case], options: argparse.Namespace, folder: Path) -> tuple[Results, list[str]]:
        """Return the rounds of a group of cases and a line for every failure. folder: a temporary one."""
        case, kind = group[0], self.kinds[group[0].kind]
        if reason := kind.unable():
            say(f"{case.name} is not run: {reason}")
            return {}, [f"{case.name} was not run: {reason}"]
        batches: Path = (options.batches or folder).absolute()
        batches.mkdir(parents=True, exist_ok=True)
        settings = Settings(
            num_rounds=options.rounds,
            contenders=tuple(options.contenders),
            peers_home=options.peers_home,
            tmpfs=options.tmpfs,
        )
        return run_rounds(case.name, lambda number: kind.plan(group, number, batches), settings)

    def header(self, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
        """Return what every line says about the command that made it."""
        return {
            "benchmark": self.name,
            "command": " ".join([self.program, *_public(arguments)]),
            "commit": machine.describe_commit(),
            "date": machine.now(),
            "num_rounds": options.rounds,
            "machine": machine.describe_machine(),
        }

    def main(self, arguments: Sequence[str]) -> int:
        """Run the cases that the options select, by default those of the README's table; return the exit status."""
        options = self.parse(arguments)
        if getattr(options, "make_peers", False):
            for environment in peers.environments_of(options.contenders):
                say(f"{environment.name} is ready: {peers.make_peers(options.peers_home, environment)}")
        every = self.cases(options)
        if options.list:
            print("\n".join(case.name for case in select_cases(every, options.case)))
            return 0
        chosen = select_cases(every, options.case or ("*" if options.quick else self.table))
        problem = (
            self.obstacle(options) if chosen else f"--case: no case has such a name; {self.program} --list prints them"
        )
        if problem:
            say(problem)
            return 2
        header, start, records, wrong = self.header(options, arguments), time.monotonic(), [], list[str]()
        for record, complaint in self.records(chosen, options):
            wrong += complaint
            if record is None:
                continue
            records.append({**header, **record})
            line = json.dumps(records[-1])
            print(line, flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(line + "\n")
        say("\n".join(["", *summary(records), f"took {(time.monotonic() - start) / 60:.1f} minutes"]))
        if wrong:
            say("\n".join(["", "missed, failed or not measured:", *wrong]))
        return 1 if wrong and options.check else 0

    def records(
        self, cases: Sequence[Case], options: argparse.Namespace
    ) -> Iterator[tuple[dict[str, Any] | None, list[str]]]:
        """Yield the record of each case as soon as its group is done, None if there is none, and what went wrong."""
        with tempfile.TemporaryDirectory(prefix="satrap-bench-") as folder:
            for group in group_cases(cases, lambda case: self.kinds[case.kind].shares_table):
                start, kind = time.monotonic(), self.kinds[group[0].kind]
                results, failures = self.measure(group, options, Path(folder))
                seconds = round(time.monotonic() - start, 1)
                yield None, failures
                for case in group:
                    if not results or (kind.required and kind.required not in results):
                        yield None, [f"{case.name}: {target.figure} was not measured" for target in case.targets]
                        continue
                    record = make_record(case, results, kind.record) | {"seconds": seconds}
                    if not any(record["clean_rounds"]):
                        say(f"{case.name}: other processes or the host disturbed every round")
                    yield record, complaints(record)


def _public(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments without those that name places on this machine."""
    words = iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in (*LOCAL_OPTIONS, *PATH_OPTIONS):
            yield word
            continue
        if not equals:
            next(words, None)
        if name in PATH_OPTIONS:
            yield f"{name} PATH"
