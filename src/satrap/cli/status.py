"""`satrap status`: reads what a live run does, and prints it once or continuously.

    status.json of the run's folder ──> addresses ──> call `status` of servers and workers ──> status_table

The call takes no lock and starts no attempt, so no process waits for it. Without a run's folder, the address of one
server is enough: it knows the others.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import UnionType
from typing import Any, TextIO

from satrap.cli.status_table import as_lines, fit, summarize
from satrap.config.durable import parse_json
from satrap.config.location import is_url
from satrap.config.regular_file import MAX_JSON_BYTES, read_regular
from satrap.config.validation import check_number
from satrap.errors import ConfigError, DeadlineError, SatrapError
from satrap.launch.run_monitor import CLIENT_KEY, STATUS
from satrap.launch.run_state import is_live
from satrap.monitor.record_file import FOLDER
from satrap.rpc import Client, Gathers, Keys, Origin, PendingCall
from satrap.server.protocol import ServerCalls
from satrap.sharding.shard_map import check_addresses
from satrap.worker.remote.protocol import WorkerCalls

_ANSWER_SECONDS = 3.0
_TABLE = re.compile(r"(.*)/([^/]+)/tables/\d+")  # a checkpoint, while it is written
_CLEAR_LINE, _CLEAR_BELOW, _HOME, _CLEAR = "\x1b[K", "\x1b[J", "\x1b[H", "\x1b[2J"


class RunReader:
    """Reads the status of one run, repeatedly. A context manager."""

    def __init__(self, folder: Path | None, servers: Sequence[str] = (), keys: Keys | None = None) -> None:
        """folder: the folder of a live run. servers: or the addresses of one or more servers."""
        if folder is None:
            check_addresses(servers)
        if folder is not None and keys is None and (folder / CLIENT_KEY).exists():
            keys = Keys.read(folder / CLIENT_KEY)
        self._folder, self._servers, self._keys = folder, list(servers), keys
        self._clients: dict[str, Client[Any]] = {}
        self._gathers, self._stack = Gathers(), ExitStack()

    def read(self) -> dict[str, Any]:
        """Return a reading, as `satrap.cli.status_table.summarize` takes it."""
        run = None if self._folder is None else _read_run(self._folder)
        if run is None:
            roles = dict.fromkeys(self._servers, "server")
        else:
            known = [process for process in run["processes"] if process["address"] is not None]
            roles = {process["address"]: process["role"] for process in known}
        answers = self._ask(roles)
        if run is None:
            others = {address for answer in answers.values() for address in answer.get("addresses", ())}
            answers |= self._ask(dict.fromkeys(sorted(others - answers.keys()), "server"))
            if all("error" in answer for answer in answers.values()):
                raise DeadlineError("; ".join(answer["error"] for answer in answers.values()))
        return {
            "at": time.time(),
            "clock": time.monotonic(),
            "run": run,
            "answers": answers,
            "checkpoint": _last_checkpoint(answers),
            "restored": _restored(answers),
        }

    def result(self) -> str | None:
        """Return how the run ended; None if it has not, or if there is no run's folder."""
        if self._folder is None or is_live(self._folder):
            return None
        try:
            record = (self._folder / FOLDER / "run.jsonl").read_text().splitlines()
            last = parse_json(record[-1].encode())
        except (OSError, ValueError, IndexError):
            return "the run has ended"
        status = last.get("status") if isinstance(last, dict) and last.get("kind") == "exit" else None
        return "the run has failed" if status is None else f"the run has ended with exit status {status}"

    def __enter__(self) -> "RunReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _ask(self, roles: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Call all processes at once; those that do not answer in time cost the others nothing."""
        pending: dict[PendingCall, str] = {}
        answers: dict[str, dict[str, Any]] = {}
        for address, role in roles.items():
            try:
                if address not in self._clients:
                    protocol: Any = ServerCalls if role == "server" else WorkerCalls
                    client = Client(protocol, address, self._keys, deadline=_ANSWER_SECONDS)
                    self._clients[address] = self._stack.enter_context(client)
                call = self._clients[address].prepare("status", Origin())
                call.send()
                pending[call] = address
            except SatrapError as error:
                answers[address] = {"error": str(error)}
        with self._gathers.waiting_for(pending) as gather:
            while pending:
                for call in gather.wait(_ANSWER_SECONDS):
                    address = pending.pop(call)
                    try:
                        answers[address] = call.result()
                    except SatrapError as error:
                        answers[address] = {"error": str(error)}
        return {address: answers[address] for address in roles}


def _read_run(folder: Path) -> dict[str, Any]:
    if is_live(folder) is False:
        raise ConfigError(
            f"the run in {str(folder)!r} has ended; give the --folder of a live run, or --servers of servers that were "
            "started by hand"
        )
    try:
        run: dict[str, Any] = parse_json(read_regular(folder / STATUS, MAX_JSON_BYTES))
        if not _has(run, _RUN):
            raise ValueError("it lacks what a release like this one writes")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / STATUS} cannot be read ({error}): the run is starting or ending, or another release started "
            "it; try again"
        ) from None
    return run


def _has(value: object, kinds: Mapping[str, Any]) -> bool:
    """Return whether a value from JSON is an object with these keys, whose values are of these kinds: types, tests, or
    objects of their own."""
    if not isinstance(value, dict) or not kinds.keys() <= value.keys():
        return False
    for name, kind in kinds.items():
        if isinstance(kind, Mapping):
            is_valid = _has(value[name], kind)
        elif isinstance(kind, type | UnionType):
            is_valid = isinstance(value[name], kind)
        else:
            is_valid = kind(value[name])
        if not is_valid:
            return False
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15  # also not NaN


def _all_have(kinds: Mapping[str, Any]) -> Callable[[object], bool]:
    return lambda values: isinstance(values, list) and all(_has(value, kinds) for value in values)


_PROCESS = {
    "role": lambda role: role in ("server", "worker", "trainer"),
    "number": _is_number,
    "address": str | None,
    "where": str | None,
    "state": str,
    "restarts": _is_number,
    "metrics": str | None,
}
_MIGRATION = {"moved": _is_number, "all": _is_number}
_RUN: Mapping[str, Any] = {
    "phase": str,
    "launch": _is_number,
    "started_at": _is_number,
    "processes": _all_have(_PROCESS),
    "migration": lambda value: value is None or _has(value, _MIGRATION),
    "faults": {"count": _is_number, "last": _all_have({"at": _is_number, "what": str})},
}
"""What is read of status.json."""


def _last_checkpoint(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the last save that the servers completed, and whether its checkpoint was published, which only a local
    folder can tell."""
    servers = [
        answer for answer in answers.values() if "snapshots" in answer and answer["snapshots"]["save"]["completed"]
    ]
    if not servers:
        return None
    saves = [server["snapshots"]["save"] for server in servers]
    at, folders = max((save["ended_at"], server["save_folders"]) for save, server in zip(saves, servers, strict=True))
    save_shown: dict[str, Any] = {"at": at, "seconds": max(save["seconds"] for save in saves), "name": "unknown"}
    save_shown |= {"is_published": None, "folder": None}
    if not folders or (match := _TABLE.fullmatch(folders[-1])) is None:
        return save_shown
    directory, written = match.groups()
    if is_url(directory):
        return save_shown | {"name": written, "folder": f"{directory}/{written}"}
    name = written.rpartition(".")[2]  # from .<random>.<name>
    folder = Path(directory, name)
    published = (folder / "checkpoint.json").exists() if os.path.isdir(directory) else None
    return save_shown | {"name": name, "is_published": published, "folder": str(folder)}


def _restored(answers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the name of the checkpoint from which the servers were restored; None if they were not."""
    folders = [folder for answer in answers.values() for folder in answer.get("restore_folders", ())]
    match = _TABLE.fullmatch(folders[0]) if folders else None
    return match[2] if match else folders[0] if folders else None


def show_status(reader: RunReader, *, watch: bool, as_json: bool, seconds: float, out: TextIO | None = None) -> None:
    """Print the status once, or every `seconds` until the run ends or Ctrl-C: a table that is drawn in place on a
    terminal, tables one after the other elsewhere, or one JSON object per line. Then print how the run ended."""
    check_number("status", "seconds", seconds, 0.1)
    out = sys.stdout if out is None else out
    in_place = watch and not as_json and out.isatty()
    if in_place:
        out.write(_CLEAR)
    for summary in _summaries(reader, watch, seconds):
        if as_json:
            text = json.dumps(summary) + "\n"
        elif in_place:
            size = os.get_terminal_size(out.fileno())
            lines = fit(as_lines(summary), max(1, size.columns or 80), max(2, (size.lines or 24) - 1))
            text = _HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_BELOW
        else:
            text = "".join(f"{line}\n" for line in as_lines(summary)) + ("\n" if watch else "")
        out.write(text)
        out.flush()
    if watch and (result := reader.result()) is not None:
        out.write(json.dumps({"result": result}) + "\n" if as_json else f"{result}\n")


def _summaries(reader: RunReader, watch: bool, seconds: float) -> Iterator[dict[str, Any]]:
    before, is_first = reader.read(), True
    while is_first or watch:
        time.sleep(seconds)
        try:
            now = reader.read()
        except ConfigError:
            if watch and _has_ended(reader):
                return
            raise
        yield summarize(now, before)
        before, is_first = now, False


def _has_ended(reader: RunReader) -> bool:
    """Return whether the run has ended, or ends within a few seconds: it removes status.json a little before."""
    end = time.monotonic() + _ANSWER_SECONDS
    while (result := reader.result()) is None and time.monotonic() < end:
        time.sleep(0.05)
    return result is not None
