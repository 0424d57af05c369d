"""The command `satrap`. `satrap doctor` says what is installed, what the core runs on, what bounds a short run here;
`satrap run` runs a script on a cluster; `satrap keys`, `satrap server` and `satrap worker` are its parts, by hand.

The only file that reads the command line. Prints plain lines; a number that was not measured here is not printed.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from satrap import _core
from satrap.checks import check_integer
from satrap.config import Table
from satrap.errors import ConfigError, SatrapError
from satrap.inputs import Inputs
from satrap.place import Place

if TYPE_CHECKING:
    from satrap.cluster.supervisor import Plan

_PACKAGES = (
    *("satrap", "numpy", "torch", "pyarrow", "safetensors", "fsspec", "tensorboard", "pandas", "polars", "pyzmq"),
    "ray",
)
_RAY_OPTIONS = (
    *("address", "placement_seconds", "server_cpus", "server_memory", "worker_cpus", "worker_memory"),
    *("trainer_cpus", "trainer_gpus", "trainer_memory"),
)
_RUN_USAGE = "satrap run SCRIPT [options] [-- ARGUMENTS]"
_AGAIN = "; run again, it ends what it began"
_CONVERSATIONS = 4  # threads of a worker that take calls and hand them on
_NUM_FEATURES, _BATCH, _ROWS, _STEPS = 26, 4096, 1_000_000, 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="satrap", description="Train recommender models whose embeddings are large.")
    parser.add_argument("--die-with", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="what is installed, and what bounds a short run")
    doctor.add_argument("--dim", type=int, default=16, help="of the run's embeddings (default 16)")
    doctor.add_argument("--no-run", action="store_true", help="leave the short run out")
    keys = commands.add_parser("keys", help="make the two key files of a cluster: server.key and client.key")
    keys.add_argument("folder", help="where to write them; files that are there are never replaced")
    server = commands.add_parser("server", help="run a server until it is told to end (SIGTERM, Ctrl-C)")
    server.add_argument("--listen", required=True, metavar="ADDRESS", help="e.g. tcp://10.0.0.5:5555; port 0: any")
    server.add_argument("--keys", metavar="FILE", help="server.key; without it only this machine may call")
    server.add_argument("--shared", metavar="FILE", help="keep the rows in this shared-memory file, or find them there")
    server.add_argument("--threads", type=int, help="of a call (default: the cores)")
    worker = commands.add_parser("worker", help="run an embedding worker until it is told to end (SIGTERM, Ctrl-C)")
    worker.add_argument("--listen", required=True, metavar="ADDRESS", help="e.g. tcp://10.0.0.7:5556; port 0: any")
    worker.add_argument(
        "--keys", metavar="FILE", help="server.key, with client.key beside it; else of this machine only"
    )
    worker.add_argument("--threads", type=int, help="of a call (default: the cores)")
    _add_run(commands)
    own, script_arguments = _split(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(own)
    try:
        if given.die_with is not None:
            from satrap.cluster.children import die_with

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
    from satrap.cluster.trainer import train

    train(Place.from_dict(json.loads(given.place)), given.script, script_arguments, given.listener)
    return 0


def _lines(given: argparse.Namespace) -> Iterator[str]:
    """What a command that prints lines has to say."""
    match given.command:
        case "doctor":
            return _doctor(given.dim, run=not given.no_run)
        case "keys":
            return _keys(given.folder)
        case "scale":
            return _scale(given.folder, given.servers)
        case "move":
            return _move(given.now, given.wanted, given.keys)
        case "worker":
            return _worker(given.listen, given.keys, given.threads)
        case _:
            return _server(given.listen, given.keys, given.shared, given.threads)


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="run a script with servers and trainers", usage=_RUN_USAGE)
    run.add_argument("script", help="as one would run it with Python; what follows -- are its arguments")
    run.add_argument("--servers", type=int, default=1, metavar="N", help="that hold the rows (default 1)")
    run.add_argument(
        "--workers", type=int, default=0, metavar="N", help="that read and look up (default: the trainers)"
    )
    run.add_argument("--trainers", type=int, default=1, metavar="N", help="that run the script (default 1)")
    run.add_argument("--folder", type=Path, default=Path("satrap-run"), help="of its logs (default satrap-run)")
    run.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="for the rows (default /dev/shm)")
    run.add_argument("--restarts", type=int, default=3, metavar="N", help="in a row, soon after a start (default 3)")
    run.add_argument("--max-servers", type=int, metavar="N", help="add servers by memory and work, up to so many")
    run.add_argument("--server-gib", type=float, metavar="GIB", help="of rows a server may hold (default: its memory)")
    _add_cluster(run)
    scale = commands.add_parser("scale", help="change how many servers a run has, while it trains")
    scale.add_argument("--servers", type=int, required=True, metavar="N")
    scale.add_argument("--folder", type=Path, default=Path("satrap-run"), help="of the run (default satrap-run)")
    move = commands.add_parser("move", help="move the buckets of servers that were started by hand")
    move.add_argument("--now", nargs="+", required=True, metavar="ADDRESS", help="all servers of the job, in order")
    move.add_argument(
        "--wanted", nargs="+", required=True, metavar="ADDRESS", help="all that there are to be, in order"
    )
    move.add_argument("--keys", metavar="FILE", help="client.key")
    trainer = commands.add_parser("trainer")  # not for users: `satrap run` starts it
    trainer.add_argument("--place", required=True)
    trainer.add_argument("--listener", type=int)
    trainer.add_argument("script")


def _add_cluster(run: argparse.ArgumentParser) -> None:
    run.add_argument("--cluster", choices=["local", "ray"], default="local", help="where it runs (default local)")
    ray = run.add_argument_group("with --cluster ray")
    ray.add_argument("--address", help="host:port of a Ray cluster, or auto (default: a Ray of this machine's own)")
    ray.add_argument("--placement-seconds", type=float, metavar="S", help="to find a place in (default 60)")
    for role in ("server", "worker", "trainer"):
        ray.add_argument(f"--{role}-cpus", type=int, metavar="N", help=f"of each {role} (default 1)")
        ray.add_argument(f"--{role}-memory", metavar="SIZE", help=f"of each {role}, such as 64GiB")
    ray.add_argument("--trainer-gpus", type=int, metavar="N", help="of each trainer (default 0)")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Before and after the first "--"."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


def _run(given: argparse.Namespace, arguments: list[str]) -> int:
    from satrap.cluster.command import Script
    from satrap.cluster.output import Output
    from satrap.cluster.processes import LocalLauncher
    from satrap.cluster.resizer import Resizer
    from satrap.cluster.run import folder_of_one_run, run
    from satrap.cluster.supervisor import Plan
    from satrap.scaling import Bounds

    plan = Plan(servers=given.servers, workers=given.workers, trainers=given.trainers, restarts=given.restarts)
    gib = given.server_gib
    if gib is not None and (given.max_servers is None or not 0 < gib < math.inf):
        why = f"server-gib is {gib}" if given.max_servers is not None else "there is --server-gib and no --max-servers"
        raise ConfigError(f"run: {why}; wanted a size above 0, for --max-servers to add servers by")
    if given.cluster == "ray":
        return _run_on_ray(given, replace(plan, resizable=False), arguments)
    if alone := [name for name in _RAY_OPTIONS if getattr(given, name) is not None]:
        raise ConfigError(f"--{alone[0].replace('_', '-')} is of --cluster ray: add that, or leave this out")
    cores = len(os.sched_getaffinity(0))
    script = Script(
        path=Path(given.script),
        arguments=tuple(arguments),
        trainer_threads=max(1, cores // plan.trainers),
        worker_threads=max(1, cores // plan.servers),
        server_threads=max(1, cores // plan.servers),
    )
    with folder_of_one_run(given.folder):
        most = given.max_servers
        bounds = None if most is None else Bounds(min_servers=min(given.servers, most), max_servers=most)
        limit = None if gib is None else gib * 2**30
        output, resizer = Output(given.folder / "logs"), Resizer(given.folder, bounds=bounds, limit_bytes=limit)
        launcher = LocalLauncher(given.folder, output, given.memory)
        return run(script, plan, given.folder, launcher, output, resizer)


def _scale(folder: Path, servers: int) -> Iterator[str]:
    from satrap.cluster.resizer import ask_for

    ask_for(folder, check_integer("scale", "servers", servers, 1, 65535))
    yield f"asked for {servers} servers; the run says what comes of it"


def _move(now: Sequence[str], wanted: Sequence[str], keys: str | None) -> Iterator[str]:
    from satrap.mover import Mover
    from satrap.rpc.keys import Keys

    moved = Mover(now, wanted, keys=None if keys is None else Keys.read(keys)).run()
    yield (
        f"{moved.buckets} buckets, {moved.rows:,} rows, {moved.bytes / 2**20:,.0f} MiB in {moved.seconds:.1f} s; none "
        f"was closed for more than {moved.longest_frozen_seconds:.2f} s"
    )


def _run_on_ray(given: argparse.Namespace, plan: "Plan", arguments: list[str]) -> int:
    try:
        from satrap.cluster.rays import on_ray
    except ImportError as error:
        raise ConfigError(f"--cluster ray needs Ray ({error}): pip install 'satrap[ray]'") from error
    from satrap.cluster.command import Script
    from satrap.cluster.output import Output
    from satrap.cluster.resizer import Resizer
    from satrap.cluster.resources import Needs, Resources, size_in_bytes
    from satrap.cluster.run import folder_of_one_run, run

    if given.max_servers is not None:
        raise ConfigError("--max-servers is of --cluster local: on Ray a run keeps the servers that it began with")

    def resources(role: str) -> Resources:
        memory = getattr(given, f"{role}_memory")
        cpus, gpus = getattr(given, f"{role}_cpus"), getattr(given, f"{role}_gpus", None)
        return Resources(
            cpus=1 if cpus is None else cpus,
            gpus=gpus or 0,
            memory_bytes=0 if memory is None else size_in_bytes(memory),
        )

    needs = Needs(server=resources("server"), worker=resources("worker"), trainer=resources("trainer"))
    script = Script(
        path=Path(given.script),
        arguments=tuple(arguments),
        trainer_threads=needs.trainer.cpus,
        worker_threads=needs.worker.cpus,
        server_threads=needs.server.cpus,
    )
    seconds = 60.0 if given.placement_seconds is None else given.placement_seconds
    with folder_of_one_run(given.folder):
        output = Output(given.folder / "logs")
        try:
            where = {"address": given.address, "memory": given.memory, "seconds": seconds}
            with on_ray(script, plan, needs, output, **where) as launcher:
                return run(script, plan, given.folder, launcher, output, Resizer(given.folder))
        except KeyboardInterrupt:  # before it began
            return 130


def _doctor(dim: int, *, run: bool) -> Iterator[str]:
    yield f"python {platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    for package in _PACKAGES:
        yield f"{package:12} {_version(package)}"
    yield f"SIMD         {_core.simd_paths()[0]} (this machine has {', '.join(_core.simd_paths())})"
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield f"cores        {cores} for this process"
    yield f"memory       {memory / 2**30:.1f} GiB, {_available() / 2**30:.1f} GiB available"
    yield f"huge pages   {_huge_pages()}"
    if _version("torch") == "not installed":
        yield "torch is not installed: tables work, training does not; pip install torch"
        return
    import torch

    from satrap.threads import spare_cores

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield f"devices      {', '.join(devices) or 'none'}"
    beside = spare_cores()
    how = f"{cores}, between the steps of the dense network" + (
        f"; with staleness {beside} beside it" if beside else ""
    )
    yield f"threads      torch {torch.get_num_threads()}, tables {how}"
    if run:
        needed = (2 * _ROWS + 6 * _NUM_FEATURES * _BATCH) * 4 * dim  # rows and their states; a batch in all its forms
        if needed > _available() / 2:
            raise ConfigError(
                f"--dim {dim}: the short run would take some {needed / 2**30:.1f} GiB, and {_available() / 2**30:.1f} "
                "are available; name a smaller dim, or --no-run"
            )
        yield from _short_run(dim)


def _keys(folder: str) -> Iterator[str]:
    if not folder:
        raise ConfigError("the folder is ''; wanted the name of one for the two key files")
    from satrap.rpc.keys import make_keys

    for path in make_keys(folder):
        yield f"{path}: for every {path.stem}, readable by you only; copy it there over a safe way"


def _server(listen: str, keys: str | None, shared: str | None, threads: int | None) -> Iterator[str]:
    from satrap.calls import ServerCalls
    from satrap.rpc import Limits
    from satrap.rpc.keys import Keys
    from satrap.rpc.service import Service
    from satrap.server import Server

    ended = _told_to_end()
    server = Server(shared=shared, num_threads=threads)
    limits = Limits(max_bytes=16 << 30)  # the parts of all trainers wait for the last one
    with Service(server, ServerCalls, listen, None if keys is None else Keys.read(keys), limits=limits) as service:
        yield f"satrap server: listening at {service.address}"
        ended.wait()


def _worker(listen: str, keys: str | None, threads: int | None) -> Iterator[str]:
    from satrap.host import Host
    from satrap.rpc.keys import Keys
    from satrap.rpc.service import Service
    from satrap.worker_calls import WorkerCalls

    ended = _told_to_end()
    own = None if keys is None else Keys.read(keys)
    client = None if keys is None else Keys.read(Path(keys).with_name("client.key"))
    host = Host(keys=client, num_threads=threads)
    try:
        with Service(host, WorkerCalls, listen, own, num_threads=_CONVERSATIONS) as service:
            yield f"satrap worker: listening at {service.address}"
            ended.wait()
    finally:
        host.close()


def _told_to_end() -> threading.Event:
    """Set at SIGTERM or Ctrl-C."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    return ended


def _short_run(dim: int) -> Iterator[str]:
    """A few steps of a DLRM on random ids, stage by stage."""
    import torch

    from satrap.embeddings import Embeddings
    from satrap.models import DLRM

    tables = {f"f{i}": Table(f"f{i}", dim=dim) for i in range(_NUM_FEATURES)}
    embeddings = Embeddings(tables)
    model = DLRM(13, embeddings)
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters()))
    rng = np.random.default_rng(0)
    batches = [
        Inputs(
            names=embeddings.features.names,
            values=rng.integers(0, _ROWS // _NUM_FEATURES, _NUM_FEATURES * _BATCH, dtype=np.uint64),
            batch_size=_BATCH,
            dense=rng.standard_normal((_BATCH, 13)).astype(np.float32),
            label=rng.integers(0, 2, _BATCH).astype(np.float32),
        )
        for _ in range(_STEPS)
    ]
    for _ in range(2):  # the first pass meets new rows and cold caches
        seconds = {"forward and backward": 0.0, "dense optimizer": 0.0}
        began = time.perf_counter()
        with embeddings.stream(batches, overlap=False) as stream:
            for batch in stream:
                start = time.perf_counter()
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    model(batch.dense, batch.embeddings), batch.label
                )
                optimizer.zero_grad()
                loss.backward()
                middle = time.perf_counter()
                seconds["forward and backward"] += middle - start
                before = stream.seconds.update
                optimizer.step()
                seconds["dense optimizer"] += time.perf_counter() - middle - (stream.seconds.update - before)
            took = stream.seconds
            seconds |= {"read": took.read, "lookup": took.lookup, "update": took.update}
        total = time.perf_counter() - began
    yield (
        f"short run    {_STEPS * _BATCH / total:,.0f} samples/s: DLRM, {_NUM_FEATURES} features of dim {dim}, "
        f"batches of {_BATCH}, ids in memory"
    )
    for stage, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        yield f"  {stage:22} {1000 * spent / _STEPS:7.1f} ms a step {100 * spent / total:5.0f} %"
    yield f"bounded by {max(seconds, key=lambda stage: seconds[stage])}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _available() -> int:
    with open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def _huge_pages() -> str:
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            text = file.read()
    except OSError:
        return "not known to this kernel"
    chosen = text.partition("[")[2].partition("]")[0]
    return "never: large tables will be slower" if chosen == "never" else chosen
