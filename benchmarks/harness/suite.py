"""The command line of a benchmark: its options, the header of every line, measuring group after group.

Results go to stdout (and are appended to --out); progress, the summary and complaints go to stderr.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, peers
from benchmarks.harness.case import Case, group_cases, select_cases
from benchmarks.harness.record import Rounds, complaints, make_record
from benchmarks.harness.rounds import Results, Run, run_rounds, say
from benchmarks.summary import summary

LOCAL_OPTIONS = ("--out", "--tmpfs")
"""Options that name places on one machine and change no figure, so no record has them."""
Plan = Callable[[Sequence[Case], int, Path], Sequence[Run]]
"""Returns the runs of a round, by its number, for cases that share a table; the folder is that of the batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How the cases of a kind are measured and recorded."""

    plan: Plan
    record: Callable[[Case, Rounds], dict[str, Any]]
    """Returns the figures of a case, and whatever else its record says."""
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
    full_cases: Sequence[Case]
    quick_cases: Sequence[Case]
    kinds: Mapping[str, Kind]
    contenders: tuple[str, ...] = ("satrap",)
    num_rounds: int = 3
    num_quick_rounds: int = 1
    table: tuple[str, ...] = ("*",)
    """Patterns of the cases that are measured without --case: those of the README's table."""

    @property
    def program(self) -> str:
        return f"python -m benchmarks.{self.name}"

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options; --quick changes defaults only."""
        names, memory = list(self.contenders), Path("/dev/shm")
        parser = argparse.ArgumentParser(prog=self.program, description=self.purpose)
        add = parser.add_argument
        add("--case", nargs="+", action="extend", default=[], metavar="NAME", help="names, beginnings or patterns")
        add("--list", action="store_true", help="print the names of the cases and stop")
        add("--quick", action="store_true", help="small cases, few steps: a minute or two, not a result")
        add("--check", action="store_true", help="exit 1 and name the targets that were missed")
        add("--out", type=Path, metavar="FILE", help="append the JSON lines here too")
        add("--rounds", type=int, help=f"rounds of all contenders (default {self.num_rounds})")
        add("--steps", type=int, help="timed steps of a round (default: those of the case)")
        add("--contenders", nargs="+", choices=names, default=names)
        add("--make-peers", action="store_true", help=f"install missing peers under {peers.HOME}")
        add("--tmpfs", type=Path, default=memory, help=f"a folder in memory (default {memory})")
        options = parser.parse_args(arguments)
        if options.rounds is None:
            options.rounds = self.num_quick_rounds if options.quick else self.num_rounds
        for name in ("rounds", "steps"):
            if (value := getattr(options, name)) is not None and value < 1:
                parser.error(f"--{name} must be at least 1, found {value}")
        return options

    def cases(self, options: argparse.Namespace) -> list[Case]:
        """Return every case, with the number of steps that the options name."""
        cases = self.quick_cases if options.quick else self.full_cases
        return [replace(case, num_steps=options.steps or case.num_steps) for case in cases]

    def measure(self, group: Sequence[Case], options: argparse.Namespace, batches: Path) -> tuple[Results, list[str]]:
        """Return the rounds of a group of cases and a line for every failure. batches: a temporary folder."""
        case, kind = group[0], self.kinds[group[0].kind]
        if reason := kind.unable():
            say(f"{case.name} is not run: {reason}")
            return {}, [f"{case.name} was not run: {reason}"]
        plan = [kind.plan(group, number, batches) for number in range(options.rounds)]
        return run_rounds(case.name, plan, options.contenders, options.tmpfs)

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
        if options.make_peers:
            for environment in peers.environments_of(options.contenders):
                say(f"{environment.name} is ready: {peers.make_peers(environment)}")
        every = self.cases(options)
        if options.list:
            print("\n".join(case.name for case in select_cases(every, options.case)))
            return 0
        chosen = select_cases(every, options.case or ("*" if options.quick else self.table))
        if not chosen:
            say(f"--case: no case has such a name; {self.program} --list prints them")
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
        if name not in LOCAL_OPTIONS:
            yield word
        elif not equals:
            next(words, None)
