"""The launcher of a Ray cluster: each process of a run is the child of an actor, which Ray places on a node.

driver (this process)                                     a node
RayLauncher.start ──── spec, keys, rendezvous ──────────> _ProcessActor.start ──> the same child as on one machine
RayLauncher.poll  <─── output, ready, exited ──────────── _ProcessActor.poll
Ray itself        ──── the actor or its node died ──────> ChildExited, as if by SIGKILL
                  ──── the node of a server drains ─────> MachineStopping

Ray carries commands and reports, never rows. The processes of a role have one bundle each in a placement group, so a
process restarts on the same node as long as that node lives. A server that joins later takes the bundle of a server
that left, or gets a separate placement group, which is removed with it. The only file that imports Ray.
"""

import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from satrap.config.cores import num_cores
from satrap.errors import ConfigError, SatrapError
from satrap.event_log import event
from satrap.launch.child_processes import GRACE_SECONDS, ChildExited, ChildProcesses, ProcessOutput, Report
from satrap.launch.logs import RunLogs
from satrap.launch.process_command import LaunchSite, ProcessSpec, Script
from satrap.launch.ray_nodes import NodeReports, job_directory, script_path
from satrap.launch.resources import RayConfig, describe_resources, describe_run, total_cpus
from satrap.launch.rows_file import has_rows, remove_rows, rows_file
from satrap.launch.run_events import Event, MachineStopping, PlacementFailed, Process, Role, StopMode
from satrap.launch.run_monitor import CLIENT_KEY
from satrap.launch.supervisor import RunConfig
from satrap.rpc.keys import Keys, create_keys

_LOG = logging.getLogger("satrap.launch")
_POLL_SECONDS = 0.5  # the longest delay of a command while the actor waits for its child
_CONNECT_SECONDS = 10.0
_REMOVE_SECONDS = 60.0  # Ray starts a process on each node to remove files, which takes long where the cores are busy
_DRAIN_CHECK_SECONDS = 1.0  # between questions to Ray which nodes will stop
_READY_CHECK_SECONDS = 5.0  # time for Ray to answer whether a bundle is reserved
_START_SECONDS = 300.0  # time for Ray to start an actor in its bundle
_STORE_BYTES = 100 << 20  # a private Ray carries reports only
_KEYS = {Role.SERVER: ("server.key",), Role.WORKER: ("server.key", "client.key"), Role.TRAINER: ("client.key",)}
_STRATEGIES = {Role.TRAINER: "PACK", Role.SERVER: "SPREAD", Role.WORKER: "SPREAD"}


class _ProcessActor:
    """An actor that runs one process on its node. Its methods run one at a time, in a thread that lives as long as the
    actor, and so does the child process."""

    def __init__(self) -> None:
        self._children = ChildProcesses()
        self._host: str = ray.util.get_node_ip_address()
        self._listener: socket.socket | None = None
        self._reports: NodeReports | None = None
        self._key_folder: Path | None = None

    def bind_rendezvous(self) -> str:
        """Bind a port of this node for the rendezvous of the trainers, and return its URL."""
        self._listener = socket.create_server((self._host, 0))
        return f"tcp://{self._host}:{self._listener.getsockname()[1]}"

    def start(
        self, spec: ProcessSpec, script: Path, ray_config: RayConfig, keys: dict[str, bytes], rendezvous: str | None
    ) -> list[Report]:
        """script: its path, relative to the folder that Ray has copied, where this actor starts."""
        memory = ray_config.memory
        if not os.access(memory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"memory is {os.fspath(memory)!r}, which cannot be written to on node {self._host}; choose another "
                "folder with --memory"
            )
        if not (here := Path.cwd() / script).is_file():
            raise ConfigError(
                f"there is no script {os.fspath(here)!r} on node {self._host}; expected it below the job's working "
                "directory (`ray job submit --working-dir`), or under one path on every node"
            )
        self._reports = NodeReports(self._host, spec.script.http, ray_config.node_output)
        process, node = spec.process, ray.get_runtime_context().get_node_id()
        name = f"{node[:12]}-{process.role}-{process.number}"
        rows, warning = rows_file(memory, spec.run_state.name, name)
        folder = self._key_folder = Path(tempfile.mkdtemp(".keys", f"satrap-{spec.run_state.name}-{name}-", memory))
        for key_name, key in keys.items():
            with open(os.open(folder / key_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(key)
        listen = spec.listen(f"tcp://{self._host}", has_rows(rows))
        if listen != spec.address:
            rows.unlink(missing_ok=True)
        listener = None if self._listener is None else self._listener.fileno()
        site = LaunchSite(
            listen=listen,
            rows=rows,
            script=here,
            is_copy=True,
            keys=folder / next(iter(keys)),
            rendezvous=rendezvous,
            listener=listener,
        )
        pass_fds = () if listener is None else (listener,)
        self._children.start(process, spec.arguments(site), rows, pass_fds)
        if self._listener is not None:
            self._listener.close()
        return [] if warning is None else [ProcessOutput(process, "stderr", f"satrap: {warning}\n".encode())]

    def stop(self, process: Process, mode: StopMode, release: bool) -> None:
        self._children.stop(process, mode, release)

    def poll(self) -> list[Report]:
        """Return new reports of the child process; wait a short time for one."""
        reports = self._children.poll(_POLL_SECONDS)
        if any(isinstance(report, ChildExited) for report in reports):
            self._remove_keys()
        return reports if self._reports is None else self._reports.handle(reports)

    def close(self) -> None:
        """Kill the child process, and remove its rows and its keys."""
        self._children.close(release=True)
        if self._reports is not None:
            self._reports.close()
        self._remove_keys()

    def _remove_keys(self) -> None:
        if self._key_folder is not None:
            shutil.rmtree(self._key_folder, ignore_errors=True)


# One class for each role: Ray's dashboard and `ray list actors` show the name of the class.


class ServerActor(_ProcessActor):
    """An actor that runs a server."""


class WorkerActor(_ProcessActor):
    """An actor that runs a worker."""


class TrainerActor(_ProcessActor):
    """An actor that runs a trainer."""


_ACTORS = {Role.TRAINER: TrainerActor, Role.SERVER: ServerActor, Role.WORKER: WorkerActor}


def _remove_node_files(memory: Path, name: str) -> None:
    for path in memory.glob(f"satrap-{name}-*"):
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)  # an actor that exits may remove it at the same time
    remove_rows(memory, name)


@dataclass(slots=True, eq=False)
class _ActorRecord:
    """The driver's view of an actor."""

    spec: ProcessSpec
    actor: Any
    waiting_since: float
    """When the actor was requested, or when its bundle was found to be reserved."""
    is_placed: bool = False
    is_started: bool = False
    was_stopped: bool = False
    release: bool = False
    is_draining: bool = False
    """Whether its node will stop, and the supervisor knows."""


class RayLauncher:
    """Implements `satrap.launch.run_loop.Launcher`."""

    def __init__(self, run_config: RunConfig, ray_config: RayConfig, logs: RunLogs, script: Path) -> None:
        """script: its path, relative to the folder that Ray has copied."""
        self._run_config, self._ray_config, self._logs, self._script = run_config, ray_config, logs, script
        self._resources = ray_config.resources
        self._groups: dict[Role, PlacementGroup] = {}
        self._bundles: dict[int, tuple[PlacementGroup, int]] = {}  # servers' bundles by number
        self._records: dict[Any, _ActorRecord] = {}  # by the reference of the pending call
        self._rendezvous: Any = None
        self._run_name: str | None = None
        self._drain_check_at = 0.0
        self._may_have_left_files = False  # an actor died before it had removed its rows and keys
        self._num_actors: Counter[str] = Counter()  # by name
        with tempfile.TemporaryDirectory() as folder:
            self._keys = {path.name: path.read_bytes() for path in create_keys(folder)}
            self.keys = Keys.read(Path(folder) / "client.key")
            """The client's keys, for calls to the run's servers."""
            self.client_key = self._keys["client.key"]
            """The same, as the content of a key file."""
        self.host: str = ray.util.get_node_ip_address()
        """The address of this node for others."""

    def reserve(self) -> None:
        """Reserve the resources of the run; ConfigError if Ray cannot."""
        deadline = time.monotonic() + self._ray_config.placement_seconds
        for role, strategy in _STRATEGIES.items():
            if count := self._run_config.counts[role]:
                self._groups[role] = self._place(role, count, strategy=strategy, name=f"satrap-{role}s")
        for group in self._groups.values():
            while not group.wait(1):  # in short waits, so that Ctrl-C is handled
                if time.monotonic() > deadline:
                    raise ConfigError(self._placement_error(describe_run(self._resources, self._run_config)))

    def remove_files(self, name: str) -> None:
        """Remove the files of an earlier run. Actors remove those of this one, unless one of them died."""
        if name == self._run_name and not self._may_have_left_files:
            return
        remove_files: Any = ray.remote(_remove_node_files)
        memory = self._ray_config.memory
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        on = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        options: dict[str, Any] = {"num_cpus": 0, "name": f"satrap-{name}-remove-files"}
        refs = [remove_files.options(**options, scheduling_strategy=strategy).remote(memory, name) for strategy in on]
        ray.wait(refs, num_returns=len(refs), timeout=_REMOVE_SECONDS)
        for node, ref in zip(nodes, refs, strict=True):
            try:
                ray.get(ref, timeout=0)
            except RayError as error:
                what = type(error).__name__
                _LOG.warning("node %s: %s/satrap-%s-* could not be removed (%s)", node, memory, name, what)

    def start(self, spec: ProcessSpec) -> None:
        self._run_name = spec.run_state.name
        self._logs.record_start(spec.process)
        self._create_actor(spec, time.monotonic())

    def stop(self, process: Process, mode: StopMode, release: bool) -> None:
        for record in self._records.values():
            if record.spec.process == process:
                record.was_stopped, record.release = True, record.release or release
                if release and self._has_initial_bundle(process.number):
                    del self._bundles[process.number]  # the next server waits in it until this one has exited
                if record.is_started:
                    record.actor.stop.remote(process, mode, release)
                else:
                    ray.kill(record.actor)

    def poll(self, timeout: float) -> list[Event]:
        if overdue := [ref for ref, record in self._records.items() if self._is_overdue(record, time.monotonic())]:
            return [self._give_up(self._records.pop(ref)) for ref in overdue]
        if draining := self._draining_servers(time.monotonic()):
            return [MachineStopping(process) for process in draining]
        ray.wait(list(self._records), num_returns=1, timeout=timeout)
        done, _ = ray.wait(list(self._records), num_returns=len(self._records), timeout=0)
        return self._logs.handle([report for ref in done for report in self._collect(ref)])

    def close(self) -> None:
        started = [record.actor for record in self._records.values() if record.is_started]
        closing = [actor.close.remote() for actor in started]
        closed = ray.wait(closing, num_returns=len(closing), timeout=GRACE_SECONDS)[0] if closing else []
        self._may_have_left_files |= len(closed) < len(self._records)
        for record in self._records.values():
            ray.kill(record.actor)
        if refs := [record.actor.poll.remote() for record in self._records.values()]:
            ray.wait(refs, num_returns=len(refs), timeout=GRACE_SECONDS)
        for group in {*self._groups.values(), *(group for group, _ in self._bundles.values())}:
            with suppress(RayError):
                remove_placement_group(group)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _bundle(self, role: Role, number: int) -> tuple[PlacementGroup, int]:
        """Return the placement group of a process and the index of its bundle."""
        first = self._groups[role]
        if role is not Role.SERVER:
            return first, number
        if number not in self._bundles:
            taken = {index for group, index in self._bundles.values() if group == first}
            free = [index for index in range(self._run_config.servers) if index not in taken]
            self._bundles[number] = (first, free[0]) if free else (self._place(role, 1), 0)
        return self._bundles[number]

    def _place(self, role: Role, count: int, **options: Any) -> PlacementGroup:
        """Request a placement group for so many processes of a role."""
        resources = self._resources[role]
        selectors = [dict(resources.labels)] * count if resources.labels else None
        bundles = [resources.bundle()] * count
        group: PlacementGroup = placement_group(bundles, bundle_label_selector=selectors, **options)
        return group

    def _draining_servers(self, now: float) -> list[Process]:
        """Return the servers whose nodes have begun to drain since the last call: Ray places nothing there any more."""
        if now < self._drain_check_at:
            return []
        self._drain_check_at = now + _DRAIN_CHECK_SECONDS
        draining = ray._private.state.state.get_draining_nodes()
        processes = []
        for record in self._records.values() if draining else ():
            process = record.spec.process
            if process.role is not Role.SERVER or not record.is_started or record.was_stopped or record.is_draining:
                continue
            group, index = self._bundles[process.number]
            record.is_draining = placement_group_table(group)["bundles_to_node_id"][index] in draining
            processes += [process] if record.is_draining else []
        return processes

    def _has_initial_bundle(self, number: int) -> bool:
        """Return whether a server has one of the bundles that the run started with."""
        return number in self._bundles and self._bundles[number][0] == self._groups[Role.SERVER]

    def _release_bundle(self, process: Process) -> None:
        """Release the bundle of a server that will not restart."""
        bundle = self._bundles.pop(process.number, None)
        if bundle is not None and bundle[0] != self._groups[Role.SERVER]:
            remove_placement_group(bundle[0])

    def _is_overdue(self, record: _ActorRecord, now: float) -> bool:
        """Return whether Ray did not place the actor in time, or placed it and did not start it in time."""
        if record.is_started or record.was_stopped:
            return False
        if record.is_placed:
            return now - record.waiting_since > _START_SECONDS
        if now - record.waiting_since <= self._ray_config.placement_seconds:
            return False
        group, _ = self._bundle(record.spec.process.role, record.spec.process.number)
        record.is_placed, record.waiting_since = group.wait(_READY_CHECK_SECONDS), now
        return not record.is_placed

    def _give_up(self, record: _ActorRecord) -> PlacementFailed:
        process = record.spec.process
        ray.kill(record.actor)
        if process.role is Role.SERVER:
            self._release_bundle(process)
        if record.is_placed:
            return PlacementFailed(process, f"Ray placed {process} but did not start it within {_START_SECONDS:g} s")
        return PlacementFailed(process, self._placement_error(f"{process} with {self._resources[process.role]}"))

    def _create_actor(self, spec: ProcessSpec, waiting_since: float) -> None:
        process, role = spec.process, spec.process.role
        resources = self._resources[role]
        name = f"{role}-{process.number}.{process.incarnation}"
        self._num_actors[name] += 1
        again = self._num_actors[name] - 1  # the actor before was placed on a node that had died
        actor: Any = (
            ray.remote(_ACTORS[role])
            .options(
                name=f"{name}-{again}" if again else name,
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                memory=resources.memory_bytes or None,
                resources=dict(resources.custom),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(*self._bundle(role, process.number)),
            )
            .remote()
        )
        if role is Role.TRAINER and process.number == 0:  # the first one that a launch starts
            self._rendezvous = actor.bind_rendezvous.remote() if self._run_config.trainers > 1 else None
        rendezvous = self._rendezvous if role is Role.TRAINER else None
        keys = {name: self._keys[name] for name in _KEYS[role]}
        ref = actor.start.remote(spec, self._script, self._ray_config, keys, rendezvous)
        self._records[ref] = _ActorRecord(spec, actor, waiting_since)

    def _collect(self, ref: Any) -> list[Report]:
        """Return the reports of an actor and request the next ones."""
        record = self._records.pop(ref)
        try:
            reports: list[Report] = ray.get(ref)
            record.is_started = True
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            if isinstance(cause, SatrapError):
                raise cause from None
            if self._has_never_started(record, error):
                self._create_actor(record.spec, record.waiting_since)
                return []
            reports = [self._actor_lost(record, error)]
        if any(isinstance(report, ChildExited) for report in reports):
            ray.kill(record.actor)
            if record.release:
                self._release_bundle(record.spec.process)
        else:
            self._records[record.actor.poll.remote()] = record
        return reports

    def _has_never_started(self, record: _ActorRecord, error: RayError) -> bool:
        """Return whether Ray placed the actor on a node that had already died, so that it can be placed again.
        Trainers know the rendezvous on the first one's node, so they are relaunched together instead."""
        if record.is_started or record.was_stopped or record.spec.process.role is Role.TRAINER:
            return False
        return isinstance(error, RayActorError) and not error.actor_init_failed

    def _actor_lost(self, record: _ActorRecord, error: RayError) -> ChildExited:
        """Report the exit of a process whose actor died."""
        process = record.spec.process
        self._may_have_left_files = True
        if record.was_stopped:
            return ChildExited(process, -signal.SIGTERM, True)
        _LOG.warning("%s: its Ray actor died: %s", process, str(error).strip().splitlines()[-1].strip())
        return ChildExited(process, -signal.SIGKILL, False)

    def _placement_error(self, what: str) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        custom = dict.fromkeys(name for resource in self._resources.values() for name in resource.custom)
        count = sum(node["Alive"] for node in ray.nodes())
        return (
            f"Ray could not place {what} within {self._ray_config.placement_seconds:g} s: its {count} nodes have "
            f"{describe_resources(total, custom)}, of which {describe_resources(free, custom)} are free; request less, "
            "add nodes, or wait longer with --placement-seconds"
        )


@contextmanager
def open_ray_launcher(
    script: Script, run_config: RunConfig, ray_config: RayConfig, logs: RunLogs
) -> Iterator[RayLauncher]:
    """Return a launcher on the Ray cluster of `ray_config`. Without an address, starts a private Ray on this machine,
    with room for all servers that the run may have, and shuts it down at the end."""
    script_folder, log_folder = script.path.absolute().parent, logs.folder.absolute()
    excludes = [f"/{log_folder.relative_to(script_folder)}"] if log_folder.is_relative_to(script_folder) else []
    excludes.append(CLIENT_KEY)  # every user of a node can read what Ray copies there: no keys of live runs
    options: dict[str, Any] = {"runtime_env": {"working_dir": str(script_folder), "excludes": excludes}}
    if ray_config.address is None:
        # More CPUs than there are, if need be: processes share the cores, as without Ray.
        cpus = max(num_cores(), total_cpus(ray_config.resources, run_config))
        options |= {"address": "local", "num_cpus": cpus}
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    else:
        _check_address(ray_config.address)
        options["address"] = ray_config.address
    # Ray prints messages about workers and nodes that died; the terminal shows only the first trainer's output.
    with open(logs.folder / "ray.log", "a") as log, redirect_stdout(log):
        try:
            context, in_job = _connect(options)
            _log_cluster(context, log_folder)
            path = script_path(script.path, job_directory(Path.cwd()) if in_job else None)
            launcher = RayLauncher(run_config, ray_config, logs, path)
            launcher.reserve()
            yield launcher
        finally:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Check that the head answers: Ray would wait forever for one that does not exist."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or "/" in host or not port.isdecimal():
        raise ConfigError(f"address is {address!r}; expected host:port of the cluster's head node, or auto")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"address is {address!r}, where no Ray answers ({error}); expected that of the cluster's head node"
        ) from error


def _log_cluster(context: Any, log_folder: Path) -> None:
    """Log where Ray is, and where it shows and logs what its processes do."""
    address, url = context.address_info["address"], context.dashboard_url
    dashboard = f"its dashboard at http://{url}" if url else "without a dashboard"
    extra = event("ray", address=address, dashboard=url or None, session=context.address_info["session_dir"])
    text = "Ray at %s, %s; its messages in %s, its log on each node in %s"
    _LOG.info(text, address, dashboard, log_folder / "ray.log", context.address_info["session_dir"], extra=extra)


def _connect(options: dict[str, Any]) -> tuple[Any, bool]:
    """Connect to Ray, and return its description of the connection, and whether this process belongs to a Ray job
    with a working directory."""
    options = {"log_to_driver": False, "logging_level": logging.ERROR, **options}
    try:
        try:
            return ray.init(**options), False
        except ValueError:  # such a job permits no other folder
            if ray.is_initialized():
                raise
            context = ray.init(**{name: value for name, value in options.items() if name != "runtime_env"})
            if not ray.get_runtime_context().runtime_env.get("working_dir"):
                raise
            return context, True
    except Exception as error:  # Ray also raises the class itself, e.g. if a node does not start in time
        where = "this machine" if options["address"] == "local" else options["address"]
        raise ConfigError(f"cannot connect to Ray at {where}: {error}") from error
