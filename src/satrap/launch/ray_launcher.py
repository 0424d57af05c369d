"""The launcher of a Ray cluster: each process of a run is the child of an actor, which Ray places.

driver (this process)                                     a node
RayLauncher.start ──── command, key, meeting ───────────> _Keeper.start ──> the same child as on one machine
RayLauncher.events <── what it said, ready, gone ──────── _Keeper.reports
Ray itself         ──── the actor or its node died ─────> Gone, as if by SIGKILL

Ray carries orders and reports, never rows. A role's processes have a bundle each in a placement group, so one that is
started again is on the same node, as long as there is that node. A server that joins later takes the bundle of one that
has left, or has a group of its own, which goes with it. The only file that imports Ray.
"""

import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from satrap.errors import ConfigError, SatrapError
from satrap.launch.child_processes import GRACE_SECONDS, ChildProcesses, OutputLine, ProcessExited, Report
from satrap.launch.logs import RunLogs
from satrap.launch.process_command import Command, LaunchSite, Script
from satrap.launch.resources import Needs, amounts
from satrap.launch.rows_file import forget_rows, has_rows, rows_file
from satrap.launch.supervisor import Event, How, NoPlace, Plan, Process, Role
from satrap.rpc.keys import Keys, make_keys

_REPORT_SECONDS = 0.5  # a keeper that waits for its child hears an order that late
_CONNECT_SECONDS = 10.0
_FORGET_SECONDS = 60.0  # Ray starts a process on each node for it, which takes long where the cores are busy
_ANSWER_SECONDS = 5.0  # how long Ray may take to answer whether a place is reserved
_START_SECONDS = 300.0  # how long a process may take to start in its place
_STORE_BYTES = 100 << 20  # of a Ray of our own, which carries reports only
_KEYS = {Role.SERVER: ("server.key",), Role.WORKER: ("server.key", "client.key"), Role.TRAINER: ("client.key",)}
_STRATEGIES = {Role.TRAINER: "PACK", Role.SERVER: "SPREAD", Role.WORKER: "SPREAD"}


class _Keeper:
    """An actor: keeps one process, on its node. Its methods run one after the other, in the thread that lives as long
    as the actor does; so does the child."""

    def __init__(self) -> None:
        self._children = ChildProcesses()
        self._host: str = ray.util.get_node_ip_address()
        self._listener: socket.socket | None = None
        self._folder: Path | None = None  # of its keys

    def meet(self) -> str:
        """Where the trainers meet: at this one, on a port that is theirs from now on."""
        self._listener = socket.create_server((self._host, 0))
        return f"tcp://{self._host}:{self._listener.getsockname()[1]}"

    def start(self, command: Command, memory: Path, keys: dict[str, bytes], meeting: str | None) -> list[Report]:
        """Starts the child."""
        if not os.access(memory, os.W_OK | os.X_OK):
            raise ConfigError(f"memory is {os.fspath(memory)!r}, which cannot be written to at {self._host}")
        process, node = command.process, ray.get_runtime_context().get_node_id()
        who = f"{node[:12]}-{process.role}-{process.number}"
        rows, warning = rows_file(memory, command.membership.name, who)
        folder = self._folder = Path(tempfile.mkdtemp(".keys", f"satrap-{command.membership.name}-{who}-", memory))
        for name, key in keys.items():
            with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(key)
        listen = command.listen(f"tcp://{self._host}", has_rows(rows))
        if listen != command.address:
            rows.unlink(missing_ok=True)
        listener = None if self._listener is None else self._listener.fileno()
        spot = LaunchSite(
            listen=listen,
            rows=rows,
            script=Path.cwd() / command.script.path.name,  # Ray has brought its folder
            is_copy=True,
            keys=folder / next(iter(keys)),
            meeting=meeting,
            listener=listener,
        )
        fds = () if listener is None else (listener,)
        self._children.start(process, command.arguments(spot), rows, fds)
        if self._listener is not None:
            self._listener.close()
        return [] if warning is None else [OutputLine(process, "stderr", f"satrap: {warning}\n".encode())]

    def end(self, process: Process, how: How, for_good: bool) -> None:
        """Tells the child to end."""
        self._children.end(process, how, for_good)

    def reports(self) -> list[Report]:
        """What the child did; waits a little for it."""
        reports = self._children.reports(_REPORT_SECONDS)
        if self._folder is not None and any(isinstance(report, ProcessExited) for report in reports):
            shutil.rmtree(self._folder, ignore_errors=True)
        return reports


def _forget(memory: Path, name: str) -> None:
    """On a node: removes what a run left there."""
    for path in memory.glob(f"satrap-{name}-*"):
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)  # a keeper that ends may be at it, too
    forget_rows(memory, name)


@dataclass(slots=True, eq=False)
class _Kept:
    command: Command
    keeper: Any
    since: float
    """When it was asked for, or found to have a place."""
    has_place: bool = False
    has_begun: bool = False
    was_told: bool = False
    for_good: bool = False


class RayLauncher:
    """Satisfies `satrap.launch.run_loop.Launcher`."""

    def __init__(self, output: RunLogs, plan: Plan, needs: Needs, memory: Path, seconds: float) -> None:
        """memory: a folder in shared memory, on every node. seconds: within which Ray must find a place."""
        self._output, self._plan, self._needs, self._memory, self._seconds = output, plan, needs, memory, seconds
        self._groups: dict[Role, PlacementGroup] = {}
        self._bundles: dict[int, tuple[PlacementGroup, int]] = {}  # of the servers that stay, by their numbers
        self._kept: dict[Any, _Kept] = {}  # by what Ray will answer next
        self._meeting: Any = None
        with tempfile.TemporaryDirectory() as folder:
            self._keys = {path.name: path.read_bytes() for path in make_keys(folder)}
            self.keys = Keys.read(Path(folder) / "client.key")
            """With which servers of the run can be called."""

    def place(self) -> None:
        """Reserves what the run needs, or raises."""
        deadline = time.monotonic() + self._seconds
        counts = {Role.TRAINER: self._plan.trainers, Role.SERVER: self._plan.servers, Role.WORKER: self._plan.workers}
        for role, count in counts.items():
            if count:
                bundles = [self._needs.of(role).bundle()] * count
                self._groups[role] = placement_group(bundles, strategy=_STRATEGIES[role])
        for group in self._groups.values():
            while not group.wait(1):  # a Ctrl-C is heard in between
                if time.monotonic() > deadline:
                    raise ConfigError(self._no_place(self._needs.asked(self._plan)))

    def forget(self, name: str) -> None:
        """See Launcher."""
        forget: Any = ray.remote(_forget)
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        on = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        asked = [forget.options(num_cpus=0, scheduling_strategy=each).remote(self._memory, name) for each in on]
        ray.wait(asked, num_returns=len(asked), timeout=_FORGET_SECONDS)
        for node, ref in zip(nodes, asked, strict=True):
            try:
                ray.get(ref, timeout=0)
            except RayError as error:
                what = type(error).__name__
                self._output.say(f"node {node}: {self._memory}/satrap-{name}-* may be left there ({what})")

    def start(self, command: Command) -> None:
        """See Launcher."""
        self._output.begin(command.process)
        self._keep(command, time.monotonic())

    def end(self, process: Process, how: How, for_good: bool) -> None:
        """See Launcher."""
        for kept in self._kept.values():
            if kept.command.process == process:
                kept.was_told, kept.for_good = True, kept.for_good or for_good
                if for_good and self._is_first(process.number):
                    del self._bundles[process.number]  # the next one waits there until this one is gone
                if kept.has_begun:
                    kept.keeper.end.remote(process, how, for_good)
                else:
                    ray.kill(kept.keeper)

    def events(self, timeout: float) -> list[Event]:
        """See Launcher."""
        if overdue := [ref for ref, kept in self._kept.items() if self._is_overdue(kept, time.monotonic())]:
            return [self._give_up(self._kept.pop(ref)) for ref in overdue]
        ray.wait(list(self._kept), num_returns=1, timeout=timeout)
        done, _ = ray.wait(list(self._kept), num_returns=len(self._kept), timeout=0)
        return self._output.hear([report for ref in done for report in self._answer(ref)])

    def close(self) -> None:
        """See Launcher."""
        for kept in self._kept.values():
            ray.kill(kept.keeper)
        if gone := [kept.keeper.reports.remote() for kept in self._kept.values()]:
            ray.wait(gone, num_returns=len(gone), timeout=GRACE_SECONDS)
        for group in {*self._groups.values(), *(group for group, _ in self._bundles.values())}:
            with suppress(RayError):
                remove_placement_group(group)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _bundle(self, role: Role, number: int) -> tuple[PlacementGroup, int]:
        """Where a process has its place."""
        first = self._groups[role]
        if role is not Role.SERVER:
            return first, number
        if number not in self._bundles:
            taken = {index for group, index in self._bundles.values() if group == first}
            free = [index for index in range(self._plan.servers) if index not in taken]
            own = [self._needs.server.bundle()]
            self._bundles[number] = (first, free[0]) if free else (placement_group(own), 0)
        return self._bundles[number]

    def _is_first(self, number: int) -> bool:
        """Whether a server has one of the places that the run began with."""
        return number in self._bundles and self._bundles[number][0] == self._groups[Role.SERVER]

    def _give_back(self, process: Process) -> None:
        """A server is gone for good."""
        found = self._bundles.pop(process.number, None)
        if found is not None and found[0] != self._groups[Role.SERVER]:
            remove_placement_group(found[0])

    def _is_overdue(self, kept: _Kept, now: float) -> bool:
        """Whether Ray has found no place for it in time, or has not started it there."""
        if kept.has_begun or kept.was_told:
            return False
        if kept.has_place:
            return now - kept.since > _START_SECONDS
        if now - kept.since <= self._seconds:
            return False
        group, _ = self._bundle(kept.command.process.role, kept.command.process.number)
        kept.has_place, kept.since = group.wait(_ANSWER_SECONDS), now
        return not kept.has_place

    def _give_up(self, kept: _Kept) -> NoPlace:
        process = kept.command.process
        ray.kill(kept.keeper)
        if process.role is Role.SERVER:
            self._give_back(process)
        if kept.has_place:
            return NoPlace(process, f"Ray has a place for {process}, and did not start it within {_START_SECONDS:g} s")
        return NoPlace(process, self._no_place(f"{process} with {self._needs.of(process.role)}"))

    def _keep(self, command: Command, since: float) -> None:
        process, role = command.process, command.process.role
        needs = self._needs.of(role)
        keeper: Any = (
            ray.remote(_Keeper)
            .options(
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                memory=needs.memory_bytes or None,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(*self._bundle(role, process.number)),
            )
            .remote()
        )
        if role is Role.TRAINER and process.number == 0:  # the first to be started of its launch
            self._meeting = keeper.meet.remote() if self._plan.trainers > 1 else None
        meeting = self._meeting if role is Role.TRAINER else None
        keys = {name: self._keys[name] for name in _KEYS[role]}
        ref = keeper.start.remote(command, self._memory, keys, meeting)
        self._kept[ref] = _Kept(command, keeper, since)

    def _answer(self, ref: Any) -> list[Report]:
        """What a keeper reports; then it is asked for more."""
        kept = self._kept.pop(ref)
        try:
            reports: list[Report] = ray.get(ref)
            kept.has_begun = True
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            if isinstance(cause, SatrapError):
                raise cause from None
            if self._was_never_there(kept, error):
                self._keep(kept.command, kept.since)
                return []
            reports = [self._lost(kept, error)]
        if any(isinstance(report, ProcessExited) for report in reports):
            ray.kill(kept.keeper)
            if kept.for_good:
                self._give_back(kept.command.process)
        else:
            self._kept[kept.keeper.reports.remote()] = kept
        return reports

    def _was_never_there(self, kept: _Kept, error: RayError) -> bool:
        """Ray gave it a place on a node that was gone already: it gives it another. Trainers know where the first one
        meets them, so they begin anew together."""
        if kept.has_begun or kept.was_told or kept.command.process.role is Role.TRAINER:
            return False
        return isinstance(error, RayActorError) and not error.actor_init_failed

    def _lost(self, kept: _Kept, error: RayError) -> ProcessExited:
        """With its actor a process is gone."""
        process = kept.command.process
        if kept.was_told:
            return ProcessExited(process, -signal.SIGTERM, True)
        self._output.say(f"{process}: its actor is gone: {str(error).strip().splitlines()[-1].strip()}")
        return ProcessExited(process, -signal.SIGKILL, False)

    def _no_place(self, what: str) -> str:
        total, free = ray.cluster_resources(), ray.available_resources()
        count = sum(node["Alive"] for node in ray.nodes())
        return (
            f"Ray found no place for {what}, within {self._seconds:g} s: its nodes ({count}) have {amounts(total)}, "
            f"of which {amounts(free)} are free; ask for less, add nodes, or wait longer (--placement-seconds)"
        )


@contextmanager
def on_ray(
    script: Script,
    plan: Plan,
    needs: Needs,
    output: RunLogs,
    *,
    address: str | None,
    memory: Path,
    seconds: float,
    most_servers: int,
) -> Iterator[RayLauncher]:
    """A launcher whose processes are placed on the Ray cluster at the address, or on a Ray of this machine that is
    started for the run, with room for so many servers, and ends with it."""
    brought, logs = script.path.absolute().parent, output.folder.absolute()
    left = [f"/{logs.relative_to(brought)}"] if logs.is_relative_to(brought) else []
    if not seconds > 0:
        raise ConfigError(f"placement-seconds is {seconds}; wanted more than 0")
    how: dict[str, Any] = {"runtime_env": {"working_dir": str(brought), "excludes": left}}
    if address is None:
        needed = needs.cpus(replace(plan, servers=max(plan.servers, most_servers)))
        cpus = max(len(os.sched_getaffinity(0)), needed)  # as on one machine they share the cores
        how |= {"address": "local", "num_cpus": cpus, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    else:
        _check_address(address)
        how["address"] = address
    # Ray prints of workers and nodes that died; the terminal is the first trainer's.
    with open(output.folder / "ray.log", "a") as log, redirect_stdout(log):
        try:
            _connect(address, how)
            launcher = RayLauncher(output, plan, needs, memory, seconds)
            launcher.place()
            yield launcher
        finally:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Ray would wait for ever for a head that is not there."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or "/" in host or not port.isdecimal():
        raise ConfigError(f"address is {address!r}; wanted host:port of the cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"address is {address!r}, where no Ray answers ({error}); wanted that of its head") from error


def _connect(address: str | None, how: dict[str, Any]) -> None:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **how)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(f"Ray at {address or 'this machine'} cannot be used: {error}") from error
