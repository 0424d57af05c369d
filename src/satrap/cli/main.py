"""The command `satrap`: what its commands are given, and what does them. `doctor` looks at this machine; `run` runs a
script on a cluster, and `scale` changes how many servers it has; `keys`, `server`, `worker` and `move` do it by hand.

The only file that reads the command line. Prints plain lines.
"""

import argparse
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from satrap.config.validation import check_integer
from satrap.errors import ConfigError, SatrapError
from satrap.run_context import RunContext

if TYPE_CHECKING:
    from satrap.launch.process_command import Script
    from satrap.launch.scaler import Scaler
    from satrap.launch.supervisor import Plan
    from satrap.rpc import Keys

_RAY_OPTIONS = (
    *("address", "placement_seconds", "server_cpus", "server_memory", "worker_cpus", "worker_memory"),
    *("trainer_cpus", "trainer_gpus", "trainer_memory"),
)
_RUN_USAGE = "satrap run SCRIPT [options] [-- ARGUMENTS]"
_AGAIN = "; run again, it ends what it began"
_MOST_FILES = 1 << 16  # open at a time; each connection of a server or worker is one
_CONVERSATIONS = 4  # threads of a worker that take calls and hand them on


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="satrap", description="Train recommender models whose embeddings do not fit one machine."
    )
    parser.add_argument("--version", action="version", version=f"satrap {version('satrap')}")
    parser.add_argument("--die-with", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="check this installation and time a short training run")
    doctor.add_argument("--dim", type=int, default=16, help="embedding dimension of the timed run (default: 16)")
    doctor.add_argument("--no-run", action="store_true", help="check the installation only")
    keys = commands.add_parser("keys", help="create the key files of a cluster: server.key and client.key")
    keys.add_argument("folder", help="directory for the key files; existing files are never overwritten")
    _add_server_and_worker(commands)
    _add_run(commands)
    _add_scale_and_move(commands)
    own, script_arguments = _split(sys.argv[1:] if arguments is None else arguments)
    given, unknown = parser.parse_known_args(own)
    if unknown:
        hint = "; put the script's own arguments after --" if given.command == "run" else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        if given.die_with is not None:
            from satrap.launch.child_processes import die_with

            die_with(given.die_with)
        if given.command == "run":
            return _run(given, script_arguments)
        if given.command != "trainer":  # whose script's errors are its own to show
            for line in _lines(given):
                print(line, flush=True)
            return 0
    except OSError as error:  # `satrap doctor | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"satrap: {error}", file=sys.stderr)
        return 1
    except SatrapError as error:
        print(f"satrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"satrap: interrupted{_AGAIN if given.command == 'move' else ''}", file=sys.stderr)
        return 130
    from satrap.launch.trainer_main import train

    train(RunContext.from_dict(json.loads(given.place)), given.script, script_arguments, given.listener)
    return 0


def _lines(given: argparse.Namespace) -> Iterator[str]:
    """What a command that prints lines has to say."""
    match given.command:
        case "doctor":
            from satrap.cli.doctor import examine

            return examine(given.dim, run=not given.no_run)
        case "keys":
            return _keys(given.folder)
        case "scale":
            return _scale(given.folder, given.servers)
        case "move":
            return _move(given.now, given.wanted, given.keys)
        case "worker":
            return _worker(given)
        case _:
            return _server(given)


def _add_server_and_worker(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    server = commands.add_parser("server", help="start an embedding parameter server; SIGTERM or Ctrl-C stops it")
    _add_listen(server, "path of server.key; required for tcp://")
    server.add_argument(
        "--shared", metavar="FILE", help="keep rows in this shared-memory file, and attach to the rows it already has"
    )
    server.add_argument(
        "--checkpoints",
        action="append",
        default=[],
        metavar="DIR|URL",
        help="allow checkpoints below this directory or URL only; repeat the option to allow more",
    )
    server.add_argument("--threads", type=int, metavar="N", help="threads per call (default: number of cores)")
    worker = commands.add_parser("worker", help="start an embedding worker; SIGTERM or Ctrl-C stops it")
    _add_listen(worker, "path of server.key, with client.key in the same directory; required for tcp://")
    worker.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="DIR|URL",
        help="allow training data below this directory or URL only; repeat the option to allow more",
    )
    worker.add_argument("--threads", type=int, metavar="N", help="threads per call (default: number of cores)")


def _add_listen(command: argparse.ArgumentParser, keys: str) -> None:
    command.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="address to listen at: ipc:///directory/name, a Unix socket in a directory of mode 0700, or "
        "tcp://10.0.0.5:5555, where port 0 picks a free one",
    )
    command.add_argument("--keys", metavar="FILE", help=keys)
    command.add_argument(
        "--insecure",
        action="store_true",
        help="serve tcp:// without keys: anyone who can reach the port can read, change and end the job, and traffic "
        "is not encrypted",
    )


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="run a training script with servers, workers and trainers", usage=_RUN_USAGE)
    run.add_argument("script", help="training script; arguments after -- are passed to it")
    run.add_argument("--servers", type=int, default=1, metavar="N", help="number of parameter servers (default: 1)")
    run.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="number of worker processes that read data and look up rows (default: 0, trainers do this themselves)",
    )
    run.add_argument(
        "--trainers", type=int, default=1, metavar="N", help="number of processes that run the script (default: 1)"
    )
    _add_folder(run)
    run.add_argument(
        "--memory",
        type=Path,
        default=Path("/dev/shm"),
        metavar="DIR",
        help="directory for the shared-memory files of the servers' rows (default: /dev/shm)",
    )
    run.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="give up after N consecutive failures soon after a start (default: 3)",
    )
    run.add_argument(
        "--max-servers",
        type=int,
        metavar="N",
        help="add servers when memory or work requires it, up to N (default: off)",
    )
    run.add_argument(
        "--server-gib", type=float, metavar="GIB", help="memory for rows in each server (default: the machine's)"
    )
    also = "besides the script's directory and the paths in its arguments; repeat the option to allow more"
    for name, what in (("checkpoints", "checkpoints"), ("data", "training data")):
        run.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="DIR|URL",
            help=f"also allow {what} below this directory or URL, {also}",
        )
    _add_cluster(run)
    trainer = commands.add_parser("trainer")  # not for users: `satrap run` starts it
    trainer.add_argument("--place", required=True)
    trainer.add_argument("--listener", type=int)
    trainer.add_argument("script")


def _add_scale_and_move(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    scale = commands.add_parser("scale", help="change the number of servers of a live run")
    scale.add_argument("--servers", type=int, required=True, metavar="N", help="number of parameter servers to reach")
    _add_folder(scale)
    move = commands.add_parser("move", help="move rows between servers that were started by hand")
    move.add_argument(
        "--now",
        nargs="+",
        action="extend",
        required=True,
        metavar="ADDRESS",
        help="addresses of all current servers, in order",
    )
    move.add_argument(
        "--wanted",
        nargs="+",
        action="extend",
        required=True,
        metavar="ADDRESS",
        help="addresses of the servers that are to hold the rows, in order",
    )
    move.add_argument("--keys", metavar="FILE", help="path of client.key; required for tcp:// servers with keys")


def _add_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--folder",
        type=Path,
        default=Path("satrap-run"),
        metavar="DIR",
        help="directory for the run's state and logs; one run at a time uses it (default: satrap-run)",
    )


def _add_cluster(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--cluster", choices=["local", "ray"], default="local", help="where to start the processes (default: local)"
    )
    ray = run.add_argument_group("options of --cluster ray")
    ray.add_argument("--address", help="host:port of a Ray cluster, or auto (default: start Ray on this machine)")
    ray.add_argument(
        "--placement-seconds",
        type=float,
        metavar="S",
        help="seconds to wait until Ray has placed a process (default: 60)",
    )
    for role in ("server", "worker", "trainer"):
        ray.add_argument(f"--{role}-cpus", type=int, metavar="N", help=f"CPUs for each {role} (default: 1)")
        ray.add_argument(f"--{role}-memory", metavar="SIZE", help=f"memory for each {role}, for example 64GiB")
    ray.add_argument("--trainer-gpus", type=int, metavar="N", help="GPUs for each trainer (default: 0)")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Before and after the first "--"."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _run(given: argparse.Namespace, arguments: list[str]) -> int:
    from satrap.launch.local_launcher import LocalLauncher
    from satrap.launch.logs import RunLogs
    from satrap.launch.run_loop import folder_of_one_run, run
    from satrap.launch.supervisor import Plan

    plan = Plan(
        servers=given.servers,
        workers=given.workers,
        trainers=given.trainers,
        restarts=given.restarts,
        max_servers=given.max_servers,
    )
    gib = given.server_gib
    if gib is not None and (given.max_servers is None or not 0 < gib < math.inf):
        why = f"server-gib is {gib}" if given.max_servers is not None else "there is --server-gib and no --max-servers"
        raise ConfigError(f"run: {why}; wanted a size above 0, for --max-servers to add servers by")
    if given.cluster == "ray":
        return _run_on_ray(given, plan, arguments)
    if alone := [name for name in _RAY_OPTIONS if getattr(given, name) is not None]:
        raise ConfigError(f"--{alone[0].replace('_', '-')} requires --cluster ray: add it, or remove this option")
    cores = len(os.sched_getaffinity(0))
    counts = {"trainer": plan.trainers, "worker": plan.workers, "server": plan.servers}
    script = _script(given, arguments, {role: max(1, cores // max(1, count)) for role, count in counts.items()})
    with folder_of_one_run(given.folder), RunLogs(given.folder / "logs") as output:
        launcher = LocalLauncher(given.folder, output, given.memory)
        return run(script, plan, given.folder, launcher, output, _resizer(given))


def _script(given: argparse.Namespace, arguments: list[str], threads: Mapping[str, int]) -> "Script":
    """threads: of each process of a role."""
    from satrap.launch.process_command import Script

    return Script(
        path=Path(given.script),
        arguments=tuple(arguments),
        checkpoints=tuple(given.checkpoints),
        data=tuple(given.data),
        trainer_threads=threads["trainer"],
        worker_threads=threads["worker"],
        server_threads=threads["server"],
    )


def _resizer(given: argparse.Namespace, keys: "Keys | None" = None, memory_bytes: int = 0) -> "Scaler":
    """memory_bytes: that each server was given; 0: its machine's."""
    from satrap.launch.scaler import Scaler
    from satrap.sharding.autoscaler import ScaleLimits

    most = given.max_servers
    bounds = None if most is None else ScaleLimits(min_servers=given.servers, max_servers=most)
    limit = memory_bytes if given.server_gib is None else given.server_gib * 2**30
    return Scaler(given.folder, keys, bounds, limit or None)


def _scale(folder: Path, servers: int) -> Iterator[str]:
    from satrap.launch.scaler import ask_for

    ask_for(folder, check_integer("scale", "servers", servers, 1, 65535))
    yield f"asked for {servers} server{'s'[: servers != 1]}; the run says what comes of it"


def _move(now: Sequence[str], wanted: Sequence[str], keys: str | None) -> Iterator[str]:
    from satrap.rpc import Keys
    from satrap.server.migration.coordinator import Migration

    moved = Migration(now, wanted, keys=None if keys is None else Keys.read(keys)).run()
    yield (
        f"{moved.buckets} buckets, {moved.rows:,} rows, {moved.bytes / 2**20:,.0f} MiB in {moved.seconds:.1f} s; none "
        f"was closed for more than {moved.longest_frozen_seconds:.2f} s"
    )


def _run_on_ray(given: argparse.Namespace, plan: "Plan", arguments: list[str]) -> int:
    try:
        from satrap.launch.ray_launcher import on_ray
    except ImportError as error:
        raise ConfigError(f"--cluster ray needs Ray ({error}): pip install 'ray>=2.52'") from error
    from satrap.launch.logs import RunLogs
    from satrap.launch.resources import Needs, Resources, size_in_bytes
    from satrap.launch.run_loop import folder_of_one_run, run

    def resources(role: str) -> Resources:
        memory = getattr(given, f"{role}_memory")
        cpus, gpus = getattr(given, f"{role}_cpus"), getattr(given, f"{role}_gpus", None)
        return Resources(
            cpus=1 if cpus is None else cpus,
            gpus=gpus or 0,
            memory_bytes=0 if memory is None else size_in_bytes(memory),
        )

    needs = Needs(server=resources("server"), worker=resources("worker"), trainer=resources("trainer"))
    threads = {"trainer": needs.trainer.cpus, "worker": needs.worker.cpus, "server": needs.server.cpus}
    script = _script(given, arguments, threads)
    where = {
        "address": given.address,
        "memory": given.memory,
        "seconds": 60.0 if given.placement_seconds is None else given.placement_seconds,
        "most_servers": given.max_servers or 0,
    }
    with folder_of_one_run(given.folder), RunLogs(given.folder / "logs") as output:
        try:
            with on_ray(script, plan, needs, output, **where) as launcher:
                resizer = _resizer(given, launcher.keys, needs.server.memory_bytes)
                return run(script, plan, given.folder, launcher, output, resizer)
        except KeyboardInterrupt:  # before it began
            return 130


def _keys(folder: str) -> Iterator[str]:
    if not folder:
        raise ConfigError("the folder is ''; wanted the name of one for the two key files")
    from satrap.rpc.keys import make_keys

    for path in make_keys(folder):
        yield f"{path}: for every {path.stem}, readable by you only; copy it there over a safe way"


def _server(given: argparse.Namespace) -> Iterator[str]:
    from satrap.rpc import Keys, Limits, Service
    from satrap.server.protocol import ServerCalls
    from satrap.server.server import Server

    wait_for_end = _told_to_end()
    _prepare_to_listen(given)
    keys = None if given.keys is None else Keys.read(given.keys)
    server = Server(shared=given.shared, num_threads=given.threads, checkpoints=given.checkpoints)
    limits = Limits(max_bytes=16 << 30)  # the parts of all trainers wait for the last one
    with Service(server, ServerCalls, given.listen, keys, insecure=given.insecure, limits=limits) as service:
        yield f"satrap server: listening at {service.address}"
        wait_for_end()


def _worker(given: argparse.Namespace) -> Iterator[str]:
    from satrap.rpc import Keys, Service
    from satrap.worker.remote.protocol import WorkerCalls
    from satrap.worker.remote.service import WorkerService

    wait_for_end = _told_to_end()
    _prepare_to_listen(given)
    own = None if given.keys is None else Keys.read(given.keys)
    client = None if given.keys is None else Keys.read(Path(given.keys).with_name("client.key"))
    host = WorkerService(keys=client, num_threads=given.threads, data=given.data)
    how: dict[str, Any] = {"insecure": given.insecure, "num_threads": _CONVERSATIONS}
    try:
        with Service(host, WorkerCalls, given.listen, own, **how) as service:
            yield f"satrap worker: listening at {service.address}"
            wait_for_end()
    finally:
        host.close()


def _prepare_to_listen(given: argparse.Namespace) -> None:
    if given.insecure and given.keys is not None:
        raise ConfigError("there are --keys and --insecure; wanted one of the two: leave --insecure out")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
    if files != resource.RLIM_INFINITY and files < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _told_to_end() -> Callable[[], object]:
    """Returns what waits until SIGTERM or Ctrl-C has come, from now on. A handler that sets an Event would not do: if
    the signal comes just before the Event's waiter falls asleep, it sleeps on."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return partial(os.read, reader, 1)
