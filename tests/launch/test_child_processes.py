"""The child processes of a launcher: an id is signalled only while it is a child's, and output that never ends does not
keep the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from runs import is_running
from satrap.launch.child_processes import ChildExited, ChildProcesses, ProcessOutput, Report
from satrap.launch.run_events import Process, Role
from waiting import wait_until

SERVER = Process(Role.SERVER, 0, 1)


@pytest.fixture
def children() -> Iterator[ChildProcesses]:
    processes = ChildProcesses()
    yield processes
    processes.close()


def start(children: ChildProcesses, folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a shell script in place of `satrap`."""
    (program := folder / "program").write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        children.start(SERVER, [], folder / "rows")


def reports_of(children: ChildProcesses) -> list[Report]:
    """Return the reports of a child until its last one."""
    reports: list[Report] = []

    def has_exited() -> bool:
        reports.extend(children.poll(0.1))
        return any(isinstance(each, ChildExited) for each in reports)

    wait_until(has_exited)
    return reports


@pytest.mark.parametrize("how", ["by itself", "stopped", "closed"])
def test_a_group_is_killed_before_its_id_is_free(
    children: ChildProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Once a child was waited for, another process may have its id, and be the leader of another group."""
    states: list[str] = []

    def record(group: int, _: int) -> None:
        with suppress(FileNotFoundError):
            states.append(Path(f"/proc/{group}/stat").read_text().rsplit(")", 1)[1].split()[0])

    monkeypatch.setattr(os, "killpg", record)
    start(children, tmp_path, "exit 3" if how == "by itself" else "exec sleep 600", monkeypatch)
    if how == "stopped":
        children.stop(SERVER, "terminate")
    if how == "closed":
        children.close()
    else:
        *_, exited = reports_of(children)
        assert isinstance(exited, ChildExited) and exited.status == (3 if how == "by itself" else -15)
    assert states == ["Z"], "the process has exited, and was not waited for"


def test_output_that_never_ends_does_not_keep_the_launcher(
    children: ChildProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in another session outlives the child, and writes faster than the launcher reads."""
    endless = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec yes' &"
    start(children, tmp_path, f"echo first\n{endless}\nwhile [ ! -s {tmp_path}/pid ]; do sleep 0.01; done", monkeypatch)
    output = [each.data for each in reports_of(children) if isinstance(each, ProcessOutput)]
    assert b"".join(output).startswith(b"first\ny\ny\n")
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))  # its pipe is closed
