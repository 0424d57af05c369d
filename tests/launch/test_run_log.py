"""The log of a whole run, in both formats: every line is parsed, and each event is found where logs.md has it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loop import tables
from runs import name_processes, num_checkpoints, request_scale, start_run, wait_for_exit, write_changed_job
from satrap import Deployment, Embeddings, Table
from satrap.errors import ConfigError
from waiting import wait_until

TEXT = re.compile(
    r"(?P<time>\S+Z) (?P<level>[A-Z]+) (?P<role>\w+) (?P<number>\d+|-) job=(?P<job>[0-9a-f]{8}|-) "
    r"step=(?P<step>\d+|-) (?P<logger>satrap\.[a-z]+): (?P<message>.*)"
)
# For each file the events that a run with the faults below logs, by name, with their texts.
EXPECTED = {
    "server-0.log": {
        "started": r"started: satrap \S+, process \d+, listening at ipc://",
        "rows_not_found": r"no rows found, starting empty: .*-server-0 has none",
        "job": r"job: 2 tables; server 0 of 1, under bucket map 1",
        "attempt": r"attempt \d+ replaces attempt \d+",
        "hello_refused": r"hello refused: the server belongs to another job: tables, in their order: \['x'\]",
        "save_begun": r"save of tables 'user', 'item' at step \d+ begun",
        "save_done": r"save of tables 'user', 'item' at step \d+ done: [\d.]+ \w+ in [\d.]+ s",
        "rows_found": r"found \d+ rows of 2 tables in .*-server-0, of attempt \d+, up to step \d+",
        "peer_lost": r"process \d+ on .* is lost, or was replaced: its lease has expired",
        "restore_begun": r"restore of tables 'user', 'item' begun",
        "restore_done": r"restore of tables 'user', 'item' done: [\d.]+ \w+ in",
        "move": r"bucket map \d+: \d+ buckets left and 0 arrived; this server owns \d+ of \d+",
        "stopped": "stopped",
    },
    "server-1.log": {"job": r"job: 2 tables; server 1 of 2", "move": r"bucket map \d+: 0 buckets left and \d+ arrived"},
    "trainer-0.log": {
        "started": r"started: process \d+, trainer 0 of 1, launch 2",
        "attempt": r"attempt \d+ started",
        "save_begun": r"save of step \d+ into .*checkpoints begun",
        "save_done": r"save of step \d+ into .*checkpoints done: [\d.]+ KiB in [\d.]+ s",
        "verify_done": r"verification of the files by the servers done in [\d.]+ s",
        "restore_begun": r"restore of step \d+ from .*-step-\d+ begun",
        "restore_done": r"restore of step \d+ from .*-step-\d+ done: [\d.]+ KiB in [\d.]+ s",
        "resumed": r"launch 2 continues after step \d+, from .*-step-\d+",
    },
    "run.log": {
        "started": r"started: process \d+, logs in .*/run/logs",
        "move_begun": r"move of \d+ buckets from 1 to 2 servers begun",
        "move_done": r"move of \d+ buckets from 1 to 2 servers done: [\d.]+ \w+ in [\d.]+ s",
    },
}


@pytest.mark.draw(1)
@pytest.mark.parametrize("form", ["text", "json"])
def test_every_event_of_a_run_is_a_line(tmp_path: Path, form: str) -> None:
    (tmp_path / "hold").touch()
    logs = tmp_path / "run" / "logs"
    script = write_changed_job(tmp_path, ("embeddings.step == 30", "embeddings.step >= 30"))
    with start_run(tmp_path, script, "--log-format", form, arguments=(str(tmp_path), "80")) as run:
        children = f"/proc/{run.pid}/task/{run.pid}/children"
        wait_until(lambda: num_checkpoints(tmp_path) >= 6, run)  # the script waits at step 30
        (server,) = json.loads((tmp_path / "run" / "run.json").read_text())["servers"]
        with pytest.raises(ConfigError, match="belongs to another job"):
            Embeddings({"x": Table("x", dim=len(tables()))}, deployment=Deployment([server]))
        for victim, text in (("trainer 0", "lease has expired"), ("server 0", " tables in ")):
            os.kill(name_processes(Path(children).read_text().split())[victim], signal.SIGKILL)
            wait_until(lambda text=text: text in (logs / "server-0.log").read_text(), run)  # type: ignore[misc]
            wait_until(lambda: "continues after step" in (logs / "trainer-0.log").read_text(), run)
        request_scale(tmp_path, 2)
        wait_until(lambda: "buckets moved: the run has 2 servers" in (logs / "run.log").read_text(), run)
        (tmp_path / "hold").unlink()
        status, out, err = wait_for_exit(run)
    assert status == 0 and out.splitlines() == ["began", "resumed"], err
    for name, events in EXPECTED.items():
        lines = list(parse(logs / name, form))
        for event, text in events.items():
            found = [line for line in lines if re.match(text, line["message"])]
            assert found and all(line.get("event", event) == event for line in found), (name, event, lines)
            if event in ("save_done", "restore_done", "move_done") and form == "json":
                assert all(line["bytes"] > 0 and line["seconds"] >= 0 for line in found)
        role, _, number = name.removesuffix(".log").partition("-")
        assert {(line["role"], str(line["number"])) for line in lines} == {(role, number or none_as(form))}
        jobs = {line["job"] for line in lines} - {None, "-"}
        assert len(jobs) == (name != "run.log")
    if form == "json":
        assert any(json.loads(line).get("event") == "move_done" for line in err.splitlines() if line[0] == "{")
    else:
        assert "satrap run: launch 2: starting 1 trainer\n" in err
    shown = [line for line in err.splitlines() if "server 0 | " in line]
    assert any("hello refused" in line for line in shown), "the end of a killed server's log"
    assert not any(" begun" in line for line in shown), "without its routine events"


def none_as(form: str) -> str:
    return "None" if form == "json" else "-"


def parse(path: Path, form: str) -> Iterator[dict[str, Any]]:
    """Yields the log lines of a file; all others must be output."""
    for line in path.read_text().splitlines():
        match = TEXT.fullmatch(line)
        if form == "json" and line.startswith("{"):
            yield json.loads(line)
        elif form == "text" and match is not None:
            yield match.groupdict()
        else:
            assert re.fullmatch(r"--- .*|began|resumed|satrap server: listening at .*", line), line
