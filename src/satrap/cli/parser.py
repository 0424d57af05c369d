"""The command line of `satrap`: its commands, their options and their help."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from satrap.cli.completion import add_completion
from satrap.cli.import_command import add_import
from satrap.cli.options import (
    Commands,
    Group,
    add_changes,
    add_choice,
    add_folder,
    add_http,
    add_keys,
    add_log_format,
    add_names,
    add_number,
    add_path,
    add_permitted,
    add_split,
    path_option,
)
from satrap.cli.process_parser import add_server, add_trainer, add_worker
from satrap.cli.train_command import add_train
from satrap.config.validation import suggest


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="satrap",
        description="Train recommender models whose embeddings do not fit in the memory of one machine.",
        epilog="Run 'satrap COMMAND --help' for the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"satrap {version('satrap')}")
    parser.add_argument("--die-with", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", action=_CommandAction, parser_class=_CommandParser
    )
    add_train(commands)
    _add_run(commands)
    _add_scale(commands)
    _add_status(commands)
    _add_report(commands)
    _add_plan(commands)
    add_import(commands)
    add_server(commands)
    add_worker(commands)
    _add_migrate(commands)
    _add_keys_and_doctor(commands)
    add_trainer(commands)
    _add_deploy(commands)
    add_completion(commands)
    commands.choices = None  # type: ignore[assignment]  # `_CommandAction` refuses others
    return parser


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command. It names the option nearest to one that does not exist, and shows the usage of the
    command. Options are not abbreviated: an abbreviation would change its meaning when a release adds an option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the arguments; end the process if some are unknown."""
        known = self._option_string_actions
        unknown = [arg for arg in args or () if arg.startswith("--") and arg.partition("=")[0] not in known]
        if self._subparsers is None and unknown:  # before an option that is missing for that reason is asked for
            name, names = unknown[0].partition("=")[0].lstrip("-"), [option.lstrip("-") for option in known]
            near = get_close_matches(name, names, n=1)
            self._refuse(unknown, f"; did you mean --{near[0]}?" if near else "")
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown, "")
        return namespace, []

    def error(self, message: str) -> NoReturn:
        """Say how words became those of an option, if others are missing, and end the process."""
        if message.endswith("are required: FILES") and any(
            option.nargs == "+" for option in self._option_string_actions.values()
        ):
            message += " (put them first: an option such as --ids takes all words after it)"
        super().error(message)

    def _refuse(self, unknown: Sequence[str], hint: str) -> None:
        if self.prog.split()[-1] in ("run", "trainer", "plan"):
            hint += "; put the script's own arguments after --"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


class _CommandAction(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Selects a command, and names the nearest one instead of one that does not exist."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values[0] not in self._name_parser_map:
            parser.error(f"there is no command {values[0]!r}; {suggest(values[0], list(self._name_parser_map))}")
        super().__call__(parser, namespace, values, option_string)


def _add_run(commands: Commands) -> None:
    run = commands.add_parser(
        "run",
        help="run a training script on servers, workers and trainers",
        usage="satrap run SCRIPT [options] [-- ARGUMENTS]",
        description="Run a training script in one or more trainers, with parameter servers and optional workers, until "
        "the script has ended. A process that fails is restarted; if a trainer fails, all trainers restart and the "
        "script resumes from its last checkpoint, but a script that fails within a minute of its first start ends the "
        "run. The exit status is the script's. Ctrl-C stops the run; the same command resumes it.",
        epilog="Example: satrap run train.py --servers 2 --trainers 2 -- --epochs 3",
    )
    run.add_argument("script", metavar="SCRIPT", help="Python file to run; it receives the arguments after --")
    processes = run.add_argument_group("processes")
    for option, what, default in (
        ("--servers", "number of parameter servers, which hold the embedding rows", 1),
        ("--workers", "number of workers, which read data and look up rows; without any, trainers do", 0),
        ("--trainers", "number of trainers, which run the script", 1),
        (
            "--restarts",
            "stop the run when a process has failed more than N times in a row, each time within 5 minutes of its "
            "start",
            3,
        ),
    ):
        add_number(processes, option, what, default)
    scaling = run.add_argument_group("autoscaling")
    add_number(
        scaling,
        "--max-servers",
        "add servers when memory or load requires it, up to N, and remove them when fewer are enough, down to "
        "--servers (default: do not scale)",
    )
    add_number(
        scaling,
        "--server-gib",
        "memory in GiB that each server may use for rows; requires --max-servers (default: --server-memory, or "
        "all memory of the machine or container)",
        metavar="GIB",
        kind=float,
    )
    add_http(
        run.add_argument_group("monitoring"),
        "; each process of the run serves its own at this port, or the next free one of its machine, and /targets "
        "lists them all",
    )
    _add_paths(run.add_argument_group("files and folders"))
    _add_cluster(run)
    add_log_format(run.add_argument_group("log"))


def _add_paths(group: Group) -> None:
    add_folder(group, "folder for the run's state and logs; only one run can use it at a time")
    add_path(group, "--memory", "folder in shared memory for the servers' rows", "/dev/shm", metavar="DIR")
    for option, what in (("--checkpoints", "servers write checkpoints"), ("--data", "workers read training data")):
        add_permitted(
            group,
            option,
            f"let {what} below this folder or URL, too; may be repeated (always allowed: the script's "
            "folder and the paths in its arguments)",
        )


def _add_cluster(run: argparse.ArgumentParser) -> None:
    where = "where processes start: on this machine, or on a Ray cluster"
    add_choice(run.add_argument_group("cluster"), "--cluster", where, ("local", "ray"))
    ray = run.add_argument_group("Ray cluster (with --cluster ray)")
    ray.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the cluster's head node, or auto for the cluster that this machine belongs to (default: start "
        "a private Ray on this machine)",
    )
    seconds = "time for Ray to find a node for a process (default: 60)"
    add_number(ray, "--placement-seconds", seconds, metavar="SECONDS", kind=float)
    add_path(
        ray,
        "--node-output",
        "file on each node for a copy of its processes' output and logs; /proc/1/fd/1 is the standard output of a "
        "container (default: output is in the run's logs only)",
    )
    for role in ("server", "worker", "trainer"):
        add_number(ray, f"--{role}-cpus", f"CPUs and threads of each {role} (default: 1)")
        reserved = f"memory to reserve for each {role}, such as 64GiB (default: none)"
        ray.add_argument(f"--{role}-memory", metavar="SIZE", help=reserved)
        for option, metavar, what in (
            ("resource", "NAME=AMOUNT", f"custom resource of Ray that each {role} requests"),
            ("label", "NAME=VALUE", f"label that a node of Ray must have for a {role}"),
        ):
            more = f"{what}; may be repeated (default: none)"
            ray.add_argument(f"--{role}-{option}", action="append", metavar=metavar, help=more)
    add_number(ray, "--trainer-gpus", "GPUs of each trainer (default: 0)")


def _add_scale(commands: Commands) -> None:
    scale = commands.add_parser(
        "scale",
        help="change the number of servers of a live run",
        description="Change the number of servers of a live run. Rows migrate to the servers that join and "
        "from those that leave, while training continues. The command returns at once: the output of the run reports "
        "the result, and 'satrap status' the progress. While servers start or rows migrate, the newest request waits.",
    )
    scale.add_argument("--servers", type=int, required=True, metavar="N", help="new number of parameter servers")
    add_folder(scale, "folder of the run: the --folder of satrap run")


def _add_status(commands: Commands) -> None:
    status = commands.add_parser(
        "status",
        help="show what a live run does",
        description="Show the processes of a live run, their rows and memory, the rate of lookups, the staleness, the "
        "last checkpoint, migrations and faults. This does not slow down training.",
    )
    add_folder(status, "folder of the run: the --folder of satrap run")
    add_names(status, "--servers", "addresses of one or more servers that were started by hand, instead of --folder")
    add_keys(status)
    status.add_argument("--watch", action="store_true", help="show the state repeatedly, until the run ends or Ctrl-C")
    status.add_argument("--json", action="store_true", help="print JSON instead; with --watch one object at a time")
    seconds = "time over which rates are measured, and time between two outputs of --watch"
    add_number(status, "--seconds", seconds, 1.0, metavar="SECONDS", kind=float)


def _add_report(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        help="write a page about a run, live or not",
        description="Write one HTML page about a run, which any browser shows without a network: curves of loss, AUC "
        "and samples per second, validation, staleness, time of each stage, rows and memory of each table, faults and "
        "launches, settings. With a second run, its curves are drawn into the same charts. This does not slow down "
        "training. The page shows the script's arguments and settings: look at them before you share it.",
    )
    report.add_argument(
        "folder",
        nargs="?",
        type=path_option,
        default=Path("satrap-run"),
        metavar="RUN",
        help="folder of the run: the --folder of satrap run, or the folder that the script gave to "
        "satrap.Progress(record=...) (default: %(default)s)",
    )
    report.add_argument(
        "other", nargs="?", type=path_option, metavar="OTHER", help="folder of a second run, to compare the two"
    )
    output = "file to write the page to (default: report.html in RUN; of two runs, comparison.html)"
    add_path(report, "--output", output)


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="find the cheapest machines for a job, before it runs",
        usage="satrap plan JOB --machines FILE [options] [-- ARGUMENTS]",
        description="Find the cheapest machines on which a job reaches the requested samples per second. Print "
        "how many servers, workers and trainers they run, their memory, links and cores, what limits the rate, and the "
        "price. JOB is a description in TOML (docs/planning.md), or a training script, of which a few steps are run. "
        "The exit status is 3 if no machines reach the rate.",
        epilog="Example: satrap plan train.py --machines machines.toml --samples-per-second 1e6 -- --epochs 3",
    )
    plan.add_argument(
        "job", nargs="?", type=path_option, metavar="JOB", help="description of the job in TOML, or a training script"
    )
    machines = "list of machine types with their prices, such as examples/planning/machines.toml; required with JOB"
    add_path(plan, "--machines", machines)
    rate = "requested rate of all trainers together (default: the description's); required for a script"
    add_number(plan, "--samples-per-second", rate, kind=float)
    add_changes(
        plan,
        "the job or the price list: training.staleness=4, 'tables.*.zipf=1.2', machines.NAME.available=10 or "
        "limits.memory=0.7",
    )
    add_number(plan, "--steps", "number of steps of a script to run", 8)
    coefficients = "what work costs: a file that --calibrate wrote, or is to write (default: built-in coefficients)"
    add_path(plan, "--coefficients", coefficients)
    plan.add_argument(
        "--calibrate",
        action="store_true",
        help="measure the coefficients of this machine, which takes about half a minute of CPU time, and write them to "
        "--coefficients; JOB is optional",
    )
    add_path(
        plan,
        "--deploy",
        "write the number, size and machine type of the processes to this file, for 'satrap deploy render'; the "
        "plan then has servers for the rows",
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")


def _add_deploy(commands: Commands) -> None:
    deploy = commands.add_parser(
        "deploy",
        help="write manifests for Kubernetes",
        description="Write the manifests of a training run on Kubernetes.",
    )
    actions = deploy.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    render = actions.add_parser(
        "render",
        help="write the manifests that a job file describes",
        usage="satrap deploy render JOB [JOB ...] [--target TARGET] [--output DIR] [--set KEY=VALUE ...]",
        description="Write the manifests that a job file describes: for KubeRay a RayJob, in which 'satrap run' starts "
        "all processes; for plain Kubernetes a StatefulSet of servers, one of workers and an Indexed Job of trainers.",
        epilog="Example: satrap deploy render deploy.toml --target kuberay --set servers.count=8",
    )
    render.add_argument(
        "job",
        nargs="+",
        type=path_option,
        metavar="JOB",
        help="job file in TOML (docs/deploy.md); values of a later file replace those of an earlier one, so a file of "
        "'satrap plan --deploy' may follow",
    )
    add_choice(render, "--target", "manifests for KubeRay, or for plain Kubernetes", ("kuberay", "kubernetes"))
    output = "folder for the manifests; it may have files of an earlier rendering, which are replaced"
    add_path(render, "--output", output, "manifests", metavar="DIR")
    add_changes(render, "the job file, such as trainers.gpus=1")


def _add_migrate(commands: Commands) -> None:
    migrate = commands.add_parser(
        "migrate",
        help="migrate rows between servers that were started by hand",
        description="Migrate rows between servers that were started by hand, while trainers use them. Afterwards the "
        "target servers own equal shares; the others are empty and may be stopped. If the command is interrupted, run "
        "it again.",
    )
    for option, name, which in (("--from", "current", "all current servers"), ("--to", "target", "the target servers")):
        add_names(migrate, option, f"addresses of {which}, in order", dest=name, required=True)
    add_keys(migrate)
    add_log_format(migrate)


def _add_keys_and_doctor(commands: Commands) -> None:
    keys = commands.add_parser(
        "keys",
        help="create the key files of a cluster",
        description="Create the key files of a cluster: server.key for its servers and workers, client.key for its "
        "trainers and workers. Existing files are never overwritten.",
    )
    keys.add_argument(
        "folder", type=path_option, metavar="DIR", help="folder for the key files; created with mode 0700 if missing"
    )
    doctor = commands.add_parser(
        "doctor",
        help="check this installation and time a short training run",
        description="Print the installed packages and the hardware, then time a short training run stage by stage. "
        "With FILES, print instead how often their ids repeat from batch to batch, and what staleness that permits.",
    )
    doctor.add_argument(
        "files",
        nargs="*",
        metavar="FILES",
        help="CSV, TSV, Parquet or Arrow files with --ids; without --ids Criteo's click logs",
    )
    doctor.add_argument("--ids", nargs="+", default=[], metavar="COLUMN", help="the columns of ids in FILES")
    add_split(doctor)
    add_number(doctor, "--batch-size", "samples of a batch of FILES", 4096)
    add_number(doctor, "--batches", "read so many batches at most, 17 or more", 100)
    add_number(doctor, "--max-bad-rows", "malformed rows of FILES that are left out, before one is an error", 0)
    add_number(doctor, "--dim", "embedding dimension of the timed run", 16)
    doctor.add_argument("--no-run", action="store_true", help="do not time a training run")
