"""The command line of a process of a run.

A `ProcessSpec` knows the run; a `LaunchSite` adds what depends on the machine that the process starts on: its address,
its files and the path of the script.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from satrap.config.location import Location
from satrap.errors import ConfigError
from satrap.launch.run_events import Process, Role
from satrap.launch.run_state import RunState
from satrap.launch.supervisor import RunConfig
from satrap.monitor.hidden_secrets import is_secret_name
from satrap.run_context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The script that the trainers run, and the threads and paths that its processes may use."""

    path: Path
    arguments: tuple[str, ...] = ()
    threads: Mapping[Role, int] = field(default_factory=dict)
    """Number of threads in each process of a role; a role that is left out has the default."""
    checkpoints: tuple[str, ...] = ()
    """Directories and URLs that servers may write below, besides those on the command line."""
    data: tuple[str, ...] = ()
    """Directories and URLs that workers may read below, besides those on the command line."""
    http: str | None = None
    """Where each process serves its metrics, `address_of_processes`; None: nowhere."""
    log_format: str = "text"
    """The form of the processes' logs."""

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ConfigError(f"run: there is no script {os.fspath(self.path)!r}; expected the path of a Python file")

    def named_paths(self) -> list[str]:
        """Return the folders, files and URLs that the command line names: the script's folder and every
        argument that may be a path, including "--path=A,B", "path=A" and globs, except the root folder. What looks
        like a URL and is none permits nothing: if the script passes it on as a path, that raises. Nor does what may be
        a password, which a server's command line and its errors would show."""
        words: list[str] = []
        option = ""  # the word before, if it may have this one as its value
        for word in self.arguments:
            name, is_pair, value = word.partition("=")
            may_be_secret = is_secret_name(option) or (is_pair != "" and is_secret_name(name))
            texts = (value,) if word.startswith("-") else (word, value)
            words += [text for text in texts if not may_be_secret or _is_path(text)]
            option = word if word.startswith("-") and not is_pair else ""
        pieces = [piece for word in words for piece in (word, *word.split(",")) if piece]
        paths = []
        for piece in pieces:
            with suppress(ConfigError):
                paths.append(str(Location.parse(piece).without_glob().absolute()))
        return list(dict.fromkeys([os.path.abspath(self.path.parent), *(path for path in paths if path != "/")]))


def _is_path(text: str) -> bool:
    """Return whether what may be a secret is a path or URL. A secret in base64 may have slashes, too, but no dot."""
    if "/" not in text or "." in text or "://" in text:
        return "/" in text
    begin = text[: text.find("/", 1)] if "/" in text[1:] else text
    return os.path.lexists(os.path.expanduser(begin))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSite:
    """The machine-dependent part of a process's command line."""

    listen: str
    """Address for a server or worker to listen at."""
    rows: Path
    """Shared-memory file of a server."""
    script: Path
    is_copy: bool = False
    """Whether the script's folder is a copy that was made for the run."""
    keys: Path | None = None
    """Key file: the server's, with the client's beside it for a worker; for a trainer the client's."""
    rendezvous: str | None = None
    """URL at which several trainers find each other."""
    listener: int | None = None
    """File descriptor with which the first trainer already listens at the rendezvous."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start for one incarnation of a process."""

    process: Process
    address: str | None
    """Address of the previous incarnation; None: the process starts empty."""
    script: Script
    run_config: RunConfig
    run_state: RunState

    def listen(self, folder: str, has_rows: bool) -> str:
        """Return the address to listen at: a Unix socket in "ipc:///folder", or a port of "tcp://host".

        It is the previous address, for a server only if it still has its rows: clients that find a server at its
        address rely on them. A server at a new address must start empty.
        """
        previous = self.address or ""
        if previous.startswith((f"{folder}/", f"{folder}:")) and (has_rows or self.process.role is not Role.SERVER):
            return previous
        process = self.process
        if folder.startswith("tcp:"):
            return f"{folder}:0"
        return f"{folder}/{process.role}-{process.number}.{process.incarnation}"

    def arguments(self, site: LaunchSite) -> list[str]:
        """Return the arguments of the command `satrap`."""
        script, role = self.script, self.process.role
        http = [] if script.http is None else ["--http", script.http]
        log_format = ["--log-format", script.log_format]
        if role is Role.TRAINER:
            listener = [] if site.listener is None else ["--listener", str(site.listener)]
            context = ["--context", json.dumps(self._run_context(site).to_dict())]
            return ["trainer", *context, *listener, *http, *log_format, str(site.script), "--", *script.arguments]
        keys = [] if site.keys is None else ["--keys", str(site.keys)]
        threads = ["--threads", str(script.threads[role])] if role in script.threads else []
        shared = ["--shared", str(site.rows)] if role is Role.SERVER else []
        flag, paths = ("--checkpoints", script.checkpoints) if role is Role.SERVER else ("--data", script.data)
        allowed = [f"{flag}={path}" for path in (os.path.abspath(site.script.parent), *script.named_paths(), *paths)]
        number = ["--number", str(self.process.number)]
        options = [*http, *shared, *keys, *threads, *allowed, *number, *log_format]
        return [role.value, "--listen", site.listen, *options]

    def _run_context(self, site: LaunchSite) -> RunContext:
        return RunContext(
            rank=self.process.number,
            world_size=self.run_config.trainers,
            launch=self.process.incarnation,
            first_launch=self.run_state.first_launch,
            servers=self.run_state.servers,
            workers=self.run_state.workers,
            is_copy=site.is_copy,
            keys=None if site.keys is None else str(site.keys),
            rendezvous=site.rendezvous if self.run_config.trainers > 1 else None,
            num_threads=self.script.threads.get(Role.TRAINER),
        )
