"""What a run is doing, for `satrap status` and `--http`: its processes, restarts, faults and migration; and what it
did, for `satrap report`.

    run_loop ──events, commands──> RunMonitor ──> status.json and records/run.jsonl in the run's folder,
                                                  samples, targets

It observes the supervisor and decides nothing. status.json is for readers beside the run: it is replaced whole, is not
flushed to disk, and is removed at the end of the run. The record remains.
"""

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from satrap.event_log import place_of_process
from satrap.launch.run_events import (
    Command,
    Event,
    ExitRun,
    MigrationEnded,
    PlacementFailed,
    Process,
    ProcessExited,
    ProcessReady,
    Role,
    StartProcess,
    StopProcess,
)
from satrap.launch.supervisor import Supervisor, describe_exit
from satrap.monitor.hidden_secrets import hide_secrets
from satrap.monitor.memory import memory
from satrap.monitor.record_file import FOLDER, RecordFile
from satrap.monitor.samples import Sample, memory_samples

STATUS, CLIENT_KEY = "status.json", "client.key"
_LOG = logging.getLogger("satrap.launch")
_MAX_FAULTS = 20


class RunMonitor:
    """Records what a run does."""

    def __init__(
        self,
        folder: Path,
        places: Mapping[Process, str],
        metrics: Mapping[Process, str],
        client_key: bytes | None = None,
        settings: Mapping[str, Any] | None = None,
        show: Callable[[str | None, int], None] | None = None,
        memory: dict[Process, int] | None = None,
    ) -> None:
        """folder: the run's folder. places, metrics: where each process runs, and the URL of its metrics, as
        `satrap.launch.logs.RunLogs` learns them. client_key: content of the key file with which to call the run's
        servers, which only this user may read while the run lives; None: they have no keys.
        settings: the run's, for its record. show: called with what the run does instead of training, and the number of
        restarts, for which all trainers count as one process. memory: bytes of processes, which are taken out and
        recorded."""
        self._path, self._places, self._metrics = folder / STATUS, places, metrics
        self._key_path = folder / CLIENT_KEY
        self._key_path.unlink(missing_ok=True)  # a run that was killed leaves its key
        if client_key is not None:
            with open(os.open(self._key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(client_key)
        self.url: str | None = None
        """URL of the run's own metrics."""
        self._processes: dict[Process, dict[str, Any]] = {}
        self._stopped: set[Process] = set()
        self._starts: Counter[tuple[Role, int]] = Counter()
        self._restarts: Counter[Role] = Counter()
        self._faults: deque[dict[str, Any]] = deque(maxlen=_MAX_FAULTS)
        self._num_faults = 0
        self._started_at = time.time()
        self._has_failed = False  # to write the file
        self._has_exited = False
        self._launch = self._num_servers = 0  # as recorded
        self._show, self._memory = show, {} if memory is None else memory
        self._record = self._open_record(folder / FOLDER / "run.jsonl")
        self._append("run", where=place_of_process(), version=version("satrap"), settings=hide_secrets(settings or {}))
        self._status: dict[str, Any] = self._summary("servers and workers are starting", 0, 0, None)

    def observe(
        self,
        events: Iterable[Event],
        commands: Iterable[Command],
        supervisor: Supervisor,
        migration: tuple[int, int] | None,
    ) -> None:
        """Record what has happened. migration: buckets that the one in progress has moved, and moves."""
        for event in events:
            self._on_event(event)
        for command in commands:
            if isinstance(command, StopProcess):
                self._stopped.add(command.process)
            elif isinstance(command, StartProcess):
                self._on_start(command.process)
            elif isinstance(command, ExitRun):
                self._append_exit(command.status)
        if self._memory:
            self._append("memory", bytes={str(process): size for process, size in self._memory.items()})
            self._memory.clear()
        state = supervisor.run_state
        if state.launch != self._launch and state.launch >= state.first_launch:
            self._append("launch", launch=state.launch, first_launch=state.first_launch, servers=len(state.servers))
        elif self._launch and len(state.servers) != self._num_servers:
            self._append("servers", servers=len(state.servers))
        self._launch = state.launch if state.launch >= state.first_launch else 0
        self._num_servers = len(state.servers)
        launches = max(0, state.launch - state.first_launch + 1)
        status = self._summary(supervisor.phase, state.launch, launches, migration)
        if status != self._status:
            self._status = status
            self._write()
        if self._show is not None:
            of_others = self._restarts.total() - self._restarts[Role.TRAINER]
            self._show(self.not_ready() or None, max(0, launches - 1) + of_others)

    def close(self) -> None:
        """Remove the files, except the record."""
        if not self._has_exited:
            self._append_exit(None)
        if self._record is not None:
            self._record.close()
            self._record = None
        self._path.unlink(missing_ok=True)
        self._key_path.unlink(missing_ok=True)

    # -- what the endpoint serves, in its threads ----------------------------------------------------------------------

    def samples(self) -> list[Sample]:
        """Return the samples of the run."""
        status, restarts, processes = self._status, self._restarts.copy(), Counter[tuple[str, str]]()
        for process in status["processes"]:
            processes[process["role"], process["state"]] += 1
        migration = status["migration"] or {"moved": 0, "all": 0}
        return [
            *memory_samples(memory()),
            Sample("satrap_run_launches", status["launches"]),
            Sample("satrap_run_faults", status["faults"]["count"]),
            *(Sample("satrap_run_restarts", restarts[role], {"process": role}) for role in Role),
            *(
                Sample("satrap_run_processes", processes[role, state], {"process": role, "state": state})
                for role in Role
                for state in ("starting", "ready")
            ),
            *(Sample("satrap_migration_buckets", number, {"state": state}) for state, number in migration.items()),
        ]

    def targets(self) -> list[dict[str, Any]]:
        """Return the processes that serve metrics, in the form of Prometheus's discovery over HTTP."""
        endpoints = [] if self.url is None else [(self.url, {"role": "run", "number": "0"})]
        for process in self._status["processes"]:
            if process["metrics"] is not None:
                endpoints.append((process["metrics"], {"role": process["role"], "number": str(process["number"])}))
        return [
            {"targets": [url.removeprefix("http://").removesuffix("/metrics")], "labels": labels}
            for url, labels in endpoints
        ]

    def not_ready(self) -> str:
        """Return why the run does not train; "" if it does."""
        trainers = [process for process in self._status["processes"] if process["role"] == Role.TRAINER]
        return "" if trainers else str(self._status["phase"])

    # -- internals -----------------------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case ProcessReady(process, address) if process in self._processes:
                self._processes[process] |= {"state": "ready", "address": address}
            case ProcessExited(process, status):
                if status != 0 and process not in self._stopped:
                    self._add_fault(f"{process} {describe_exit(status)}")
                self._forget(process)
            case PlacementFailed(process, reason):
                self._add_fault(reason)
                self._forget(process)
            case MigrationEnded(failure) if failure is not None:
                self._add_fault(f"buckets could not be moved: {failure}")

    def _on_start(self, process: Process) -> None:
        self._starts[process.role, process.number] += 1
        restarts = self._starts[process.role, process.number] - 1
        self._restarts[process.role] += restarts > 0
        if restarts and process.role is not Role.TRAINER:
            self._append("restart", process=str(process))
        self._processes[process] = {
            "role": process.role.value,
            "number": process.number,
            "incarnation": process.incarnation,
            "state": "ready" if process.role is Role.TRAINER else "starting",
            "address": None,
            "started_at": time.time(),
            "restarts": restarts,
        }

    def _forget(self, process: Process) -> None:
        self._processes.pop(process, None)
        self._stopped.discard(process)

    def _add_fault(self, what: str) -> None:
        self._num_faults += 1
        self._faults.append({"at": time.time(), "what": what})
        self._append("fault", what=what)

    def _append_exit(self, status: int | None) -> None:
        """status: None: the run itself failed."""
        self._has_exited = True
        self._append("exit", status=status)

    def _append(self, kind: str, **values: Any) -> None:
        if self._record is not None:
            self._record.append(kind, at=time.time(), **values)

    def _open_record(self, path: Path) -> RecordFile | None:
        try:
            return RecordFile.open(path)
        except OSError as error:
            _LOG.warning("%s cannot be written (%s); satrap report will lack it", path, error.strerror)
            return None

    def _summary(self, phase: str, launch: int, launches: int, migration: Sequence[int] | None) -> dict[str, Any]:
        return {
            "where": place_of_process(),
            "started_at": self._started_at,
            "phase": phase,
            "launch": launch,
            "launches": launches,
            "metrics": self.url,
            "processes": [
                {**process_state, "where": self._places.get(process), "metrics": self._metrics.get(process)}
                for process, process_state in self._processes.items()
            ],
            "migration": None if migration is None else dict(zip(("moved", "all"), migration, strict=True)),
            "faults": {"count": self._num_faults, "last": list(self._faults)},
        }

    def _write(self) -> None:
        temporary = self._path.with_name(f".{STATUS}.tmp")
        try:
            temporary.write_text(json.dumps(self._status))
            temporary.replace(self._path)
            self._has_failed = False
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._has_failed:
                _LOG.warning("%s cannot be written (%s); satrap status is not current", self._path, error.strerror)
            self._has_failed = True
