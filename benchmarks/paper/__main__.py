"""The command line of `python -m benchmarks.paper`: runs the cells that the record lacks, then makes the pages."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.clock import available_bytes
from benchmarks.harness.machine import ROOT, describe_commit, describe_machine, now
from benchmarks.harness.rounds import say
from benchmarks.paper import (
    baselines,
    campaign,
    capacity,
    convergence,
    devices,
    network,
    peers,
    reuse,
    samples,
    simulation,
    theory,
)  # fmt: skip
from benchmarks.paper.cell import CannotRunError, Cell, Figures
from benchmarks.paper.page import Record, files, html, markdown
from benchmarks.paper.sections import sections

EXPERIMENTS = (
    "theory", "convergence", "network", "simulation", "peers", "reuse", "capacity", "campaign", "baselines", "devices"
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit status."""
    options = parse(arguments)
    record = Record(run(cells_of(options), options.out, full=options.full))
    pages = sections(record)
    options.html.parent.mkdir(parents=True, exist_ok=True)
    options.html.write_text(html(record, pages))
    say(f"page: {options.html}")
    if options.docs:
        (ROOT / "docs" / "internals" / "paper.md").write_text(markdown(record, pages))
        for name, text in files(pages).items():
            (ROOT / "docs" / "figures" / name).write_text(text)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    today = ROOT / "benchmarks" / "results" / f"paper-{now()[:10]}.jsonl"
    parser.add_argument("--out", type=Path, default=today, help="the record; a cell that it has is not run again")
    parser.add_argument("--html", type=Path, default=ROOT / "build" / "paper.html", help="the page to write")
    parser.add_argument("--docs", action="store_true", help="also write docs/internals/paper.md and its plots")
    parser.add_argument("--full", action="store_true", help="more seeds and samples, longer campaigns: hours")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, metavar="NAME",
                        help=f"experiments to run: {', '.join(EXPERIMENTS)}")  # fmt: skip
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=PATH",
                        help=f"published files to train on as well: {', '.join(samples.NAMES)}")  # fmt: skip
    parser.add_argument("--memory", type=float, default=round(available_bytes() / 2**31, 1), metavar="GIB",
                        help="memory that the ladder's last rung fills (default: half of what is free)")  # fmt: skip
    options = parser.parse_args(arguments)
    options.paths = {"adult": None, "synthetic": None}
    for text in options.data:
        name, _, path = text.partition("=")
        if name not in samples.NAMES or not Path(path).exists():
            parser.error(
                f"--data {text}: expected NAME=PATH with one of {', '.join(samples.NAMES)} and a path that exists"
            )
        options.paths[name] = path
    return options


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells of the chosen experiments."""
    made = {
        "theory": lambda: theory.cells(full=options.full),
        "convergence": lambda: convergence.cells(options.paths, full=options.full),
        "network": lambda: network.cells(full=options.full),
        "simulation": simulation.cells,
        "peers": lambda: peers.cells(full=options.full),
        "reuse": lambda: reuse.cells(options.paths, full=options.full),
        "capacity": lambda: capacity.cells(options.memory, full=options.full),
        "campaign": lambda: campaign.cells(full=options.full),
        "baselines": lambda: baselines.cells(options.paths, full=options.full),
        "devices": devices.cells,
    }
    return [cell for name in EXPERIMENTS if name in options.only for cell in made[name]()]


def read(path: Path) -> dict[str, Figures]:
    """Return the lines of a record by the names of their cells; the last line of a cell counts.

    The last line may be torn: the command was killed while it wrote it.
    """
    lines: dict[str, Figures] = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        lines[line["case"]] = line
    return lines


def run(cells: Sequence[Cell], path: Path, *, full: bool) -> dict[str, Figures]:
    """Run the cells that the record lacks, and add a line for each. Return all lines."""
    lines = {name: line for name, line in read(path).items() if line["full"] == full}
    left = [cell for cell in cells if not lines.get(cell.name, {}).get("figures")]
    say(f"{len(cells) - len(left)} of {len(cells)} cells are in {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_text().endswith("\n"):
        with path.open("a") as file:  # ends a torn line
            file.write("\n")
    origin = {"commit": describe_commit(), "machine": describe_machine(), "full": full}
    spent = expected = 0.0
    for number, cell in enumerate(left):
        start = time.perf_counter()
        done = {name: line["figures"] for name, line in lines.items() if line["figures"]}
        line: Figures = {"case": cell.name, "kind": cell.kind, "figures": {}}
        try:
            line["figures"] = cell.run(done)
        except CannotRunError as error:
            line["missing"] = str(error)
        seconds = time.perf_counter() - start
        line |= {"seconds": round(seconds, 2), "load": os.getloadavg()[0], "date": now(), **origin}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        lines[cell.name] = line
        spent, expected = spent + seconds, expected + cell.seconds
        remaining = sum(later.seconds for later in left[number + 1 :]) * spent / expected
        outcome = f"left out: {line['missing']}" if "missing" in line else f"{seconds:.1f} s"
        say(f"[{number + 1}/{len(left)}] {cell.name}: {outcome}; about {max(1, round(remaining / 60))} min left")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
