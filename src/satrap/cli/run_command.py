"""`satrap run`: checks the options of a run, and starts it on this machine or on a Ray cluster."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from satrap.byte_sizes import parse_bytes
from satrap.cli.http import monitor_run
from satrap.config.cores import num_cores
from satrap.errors import ConfigError
from satrap.launch.local_launcher import LocalLauncher
from satrap.launch.logs import RunLogs
from satrap.launch.process_command import Script
from satrap.launch.resources import RayConfig, Resources, parse_custom, parse_labels
from satrap.launch.run_events import Role
from satrap.launch.run_loop import lock_run_folder, run
from satrap.launch.scaler import Scaler
from satrap.launch.supervisor import RunConfig
from satrap.monitor.endpoint import address_of_processes
from satrap.rpc import Keys
from satrap.rpc.open_files import require_files
from satrap.sharding.autoscaler import ScaleLimits

_RAY_OPTIONS = (
    *("address", "placement_seconds", "node_output", "server_cpus", "server_memory", "worker_cpus", "worker_memory"),
    *("trainer_cpus", "trainer_gpus", "trainer_memory"),
    *(f"{role}_{name}" for role in Role for name in ("resource", "label")),
)

_FILES_PER_PROCESS, _FILES = 4, 10
"""Descriptors for each process of a run on this machine, and for a start of one, logs and connections."""


def run_script(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the script with these arguments to its end, and return its exit status."""
    run_config = RunConfig(**{field.name: getattr(options, field.name) for field in fields(RunConfig)})
    _check_server_gib(options)
    if options.cluster == "ray":
        return _run_on_ray(options, arguments, run_config)
    if ray_only := [name for name in _RAY_OPTIONS if getattr(options, name) is not None]:
        raise ConfigError(f"--{ray_only[0].replace('_', '-')} requires --cluster ray: add it, or remove this option")
    cores = num_cores()
    threads = {role: max(1, cores // max(1, count)) for role, count in run_config.counts.items()}
    script = _script(options, arguments, threads)
    processes = sum(run_config.counts.values()) + max(0, (options.max_servers or 0) - options.servers)
    require_files(_FILES_PER_PROCESS * processes + _FILES, f"the pipes of {processes} processes")
    with lock_run_folder(options.folder), RunLogs(options.folder / "logs", options.log_format) as logs:
        launcher = LocalLauncher(options.folder, logs, options.memory)
        settings = _settings(options, arguments, run_config)
        with monitor_run(options.http, options.folder, logs, settings) as monitor:
            return run(script, run_config, options.folder, launcher, _scaler(options), monitor)


def _run_on_ray(options: argparse.Namespace, arguments: Sequence[str], run_config: RunConfig) -> int:
    try:
        from satrap.launch.ray_launcher import open_ray_launcher
    except ImportError as error:
        raise ConfigError(f"--cluster ray requires Ray ({error}): pip install 'satrap[ray]'") from error
    resources = {role: _resources(options, role) for role in Role}
    ray_config = RayConfig(
        address=options.address,
        memory=options.memory,
        placement_seconds=60.0 if options.placement_seconds is None else options.placement_seconds,
        resources=resources,
        node_output=None if options.node_output is None else str(options.node_output),
    )
    script = _script(options, arguments, {role: resources[role].cpus for role in Role})
    settings = _settings(options, arguments, run_config)
    with (
        lock_run_folder(options.folder),
        RunLogs(options.folder / "logs", options.log_format) as logs,
        open_ray_launcher(script, run_config, ray_config, logs) as launcher,
        monitor_run(options.http, options.folder, logs, settings, launcher.client_key, launcher.host) as monitor,
    ):
        scaler = _scaler(options, launcher.keys, resources[Role.SERVER].memory_bytes)
        return run(script, run_config, options.folder, launcher, scaler, monitor)


def _settings(options: argparse.Namespace, arguments: Sequence[str], run_config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run, for its record."""
    script = {"script": str(options.script), "arguments": list(arguments), "cluster": options.cluster}
    return script | asdict(run_config)


def _check_server_gib(options: argparse.Namespace) -> None:
    problem = f"server-gib is {options.server_gib}"
    if options.server_gib is None or (options.max_servers is not None and 0 < options.server_gib < math.inf):
        return
    if options.max_servers is None:
        problem = "--server-gib was given without --max-servers"
    raise ConfigError(f"run: {problem}; expected a size above 0, together with --max-servers")


def _resources(options: argparse.Namespace, role: Role) -> Resources:
    given: dict[str, Any] = {name: getattr(options, f"{role}_{name}", None) for name in ("cpus", "gpus", "memory")}
    if (memory := given.pop("memory")) is not None:
        given["memory_bytes"] = parse_bytes(f"--{role}-memory", memory)
    given["custom"] = parse_custom(getattr(options, f"{role}_resource") or ())
    given["labels"] = parse_labels(getattr(options, f"{role}_label") or ())
    return Resources(**{name: amount for name, amount in given.items() if amount is not None})


def _script(options: argparse.Namespace, arguments: Sequence[str], threads: Mapping[Role, int]) -> Script:
    return Script(
        path=Path(options.script),
        arguments=tuple(arguments),
        threads=threads,
        checkpoints=tuple(options.checkpoints),
        data=tuple(options.data),
        http=None if options.http is None else address_of_processes(options.http),
        log_format=options.log_format,
    )


def _scaler(options: argparse.Namespace, keys: Keys | None = None, reserved_bytes: int = 0) -> Scaler:
    """reserved_bytes: memory reserved for each server; 0: none, so a server may use all of its machine's."""
    limits = None
    if options.max_servers is not None:
        limits = ScaleLimits(min_servers=options.servers, max_servers=options.max_servers)
    server_bytes = reserved_bytes if options.server_gib is None else options.server_gib * 2**30
    return Scaler(options.folder, keys, limits, server_bytes or None)
