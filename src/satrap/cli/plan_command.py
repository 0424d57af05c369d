"""`satrap plan`: reads a job and a price list, and prints the cheapest machines for it."""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import count

from satrap.config.durable import replace_file
from satrap.config.validation import check_integer
from satrap.errors import ConfigError
from satrap.monitor.status_line import StatusLine
from satrap.planning.coefficients import DEFAULTS, Coefficients
from satrap.planning.input_files import (
    read_coefficients,
    read_description,
    read_prices,
    split_changes,
    workload_of,
    write_coefficients,
)
from satrap.planning.planner import make_plan
from satrap.planning.report import deploy_toml, json_of, lines_of
from satrap.planning.workload import Workload


def print_plan(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the plan. Returns 0 if it reaches the requested rate, else 3."""
    _check(options)
    changes, price_changes = split_changes(options.changes)
    prices = None if options.machines is None else read_prices(options.machines, price_changes)
    if options.calibrate:
        costs = _calibrated(options)
    elif options.coefficients is not None:
        costs = read_coefficients(options.coefficients)
    else:
        costs = DEFAULTS
    if options.job is None or prices is None:
        return 0
    workload = _workload(options, arguments, changes)
    plan = make_plan(workload, prices, costs, needs_servers=options.deploy is not None)
    script = ["train.py" if options.job.suffix == ".toml" else str(options.job), *arguments]
    if options.deploy is not None:
        try:
            text = deploy_toml(workload.name, plan.estimate.layout, plan.estimate.requests)
            replace_file(options.deploy, text.encode())
        except OSError as error:
            raise ConfigError(
                f"--deploy {options.deploy} cannot be written ({error.strerror}); choose another file"
            ) from error
    if options.json:
        print(json.dumps(json_of(plan, script)))
    else:
        print("\n".join(lines_of(plan, script)))
    return 0 if plan.meets else 3


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    if options.job is None and not options.calibrate:
        raise ConfigError("plan: no job was given; expected a training script or a description in TOML, or --calibrate")
    if options.job is not None and options.machines is None:
        raise ConfigError("plan: --machines is missing; expected a price list, such as examples/planning/machines.toml")
    if options.job is None and options.coefficients is None:
        raise ConfigError(
            "plan: --calibrate without a job needs --coefficients FILE, the file to write the coefficients to"
        )
    check_integer("plan", "steps", options.steps, 1, 1_000_000)


def _calibrated(options: argparse.Namespace) -> Coefficients:
    from satrap.planning.calibration import NUM_MEASUREMENTS, calibrate

    with StatusLine() as line:
        numbers = count()

        def report(name: str) -> None:
            if line.is_shown:
                line.show(f"measuring {name}", next(numbers), NUM_MEASUREMENTS)
            else:
                print(f"satrap plan: measuring {name}", file=sys.stderr, flush=True)

        costs = calibrate(report)
    if options.coefficients is not None:
        write_coefficients(options.coefficients, costs)
        print(f"satrap plan: {options.coefficients} has the coefficients of this machine", file=sys.stderr)
    return costs


def _workload(options: argparse.Namespace, arguments: Sequence[str], changes: list[str]) -> Workload:
    if options.samples_per_second is not None:
        changes = [*changes, f"training.samples_per_second={options.samples_per_second!r}"]
    if options.job.suffix == ".toml":
        if arguments:
            raise ConfigError(
                f"plan: arguments after -- are for a script, and {options.job} is a description: remove them"
            )
        return read_description(options.job, changes)
    from satrap.planning.job_script import assumptions_of, observe_script

    content = observe_script(options.job, arguments, options.steps)
    return workload_of(str(options.job), content, changes, assumptions_of(content, options.steps))
