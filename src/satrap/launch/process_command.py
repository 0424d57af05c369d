"""What a process of a run is: a command of `satrap`, which it becomes where it is started.

A value that knows the run, and is told the spot: the address, the files and the script of the machine that it is on.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from satrap.config.path_allowlist import is_url, without_glob
from satrap.errors import ConfigError
from satrap.launch.run_state import RunState
from satrap.launch.supervisor import Plan, Process, Role
from satrap.run_context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the trainers run."""

    path: Path
    arguments: tuple[str, ...] = ()
    trainer_threads: int | None = None
    """Of torch, of each trainer."""
    worker_threads: int | None = None
    server_threads: int | None = None
    checkpoints: tuple[str, ...] = ()
    """Below which servers write, besides what is named anyway."""
    data: tuple[str, ...] = ()
    """Below which workers read, besides what is named anyway."""

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ConfigError(f"run: there is no script {os.fspath(self.path)!r}; wanted the path of a Python file")

    def named(self) -> list[str]:
        """Folders, files and URLs that the command line names: the script's folder, and whatever among its arguments
        may be one, "--path=A,B" and globs included, but for the root."""
        words = [word.partition("=")[2] if word.startswith("-") else word for word in self.arguments]
        pieces = [without_glob(piece) for word in words for piece in (word, *word.split(",")) if piece]
        found = [piece if is_url(piece) else os.path.abspath(os.path.expanduser(piece)) for piece in pieces]
        return list(dict.fromkeys([os.path.abspath(self.path.parent), *(each for each in found if each != "/")]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSite:
    """Where a process is started."""

    listen: str
    """Where a server or worker listens."""
    rows: Path
    """The shared-memory file of a server."""
    script: Path
    is_copy: bool = False
    """The script's folder is one that was brought here."""
    keys: Path | None = None
    """The server's, with the client's beside it for a worker; a trainer's is the client's."""
    meeting: str | None = None
    """Where several trainers find each other."""
    listener: int | None = None
    """The file descriptor of the first trainer that listens at the meeting already."""


@dataclass(frozen=True, slots=True)
class Command:
    """One start of a process."""

    process: Process
    address: str | None
    """Where it was before; None: it finds nothing of what was before."""
    script: Script
    plan: Plan
    membership: RunState

    def listen(self, folder: str, has_rows: bool) -> str:
        """Where it listens, at a Unix socket in "ipc:///folder" or a port of "tcp://host": where it was, but a server
        only with its rows: who finds it there finds them. One that listens elsewhere is to begin empty."""
        known = self.address or ""
        if known.startswith((f"{folder}/", f"{folder}:")) and (has_rows or self.process.role is not Role.SERVER):
            return known
        process = self.process
        return (
            f"{folder}:0" if folder.startswith("tcp:") else f"{folder}/{process.role}-{process.number}.{process.start}"
        )

    def arguments(self, spot: LaunchSite) -> list[str]:
        """What follows `satrap`."""
        script, role = self.script, self.process.role
        if role is Role.TRAINER:
            listener = [] if spot.listener is None else ["--listener", str(spot.listener)]
            place = ["--place", json.dumps(self._place(spot).to_dict())]
            return ["trainer", *place, *listener, str(spot.script), "--", *script.arguments]
        keys = [] if spot.keys is None else ["--keys", str(spot.keys)]
        number = script.server_threads if role is Role.SERVER else script.worker_threads
        threads = [] if number is None else ["--threads", str(number)]
        shared = ["--shared", str(spot.rows)] if role is Role.SERVER else []
        flag, more = ("--checkpoints", script.checkpoints) if role is Role.SERVER else ("--data", script.data)
        permitted = [f"{flag}={each}" for each in (os.path.abspath(spot.script.parent), *script.named(), *more)]
        return [role.value, "--listen", spot.listen, *shared, *keys, *threads, *permitted]

    def _place(self, spot: LaunchSite) -> RunContext:
        return RunContext(
            rank=self.process.number,
            world=self.plan.trainers,
            launch=self.process.start,
            first_launch=self.membership.first_launch,
            servers=self.membership.servers,
            workers=self.membership.workers,
            is_copy=spot.is_copy,
            keys=None if spot.keys is None else str(spot.keys),
            meeting=spot.meeting if self.plan.trainers > 1 else None,
            num_threads=self.script.trainer_threads,
        )
