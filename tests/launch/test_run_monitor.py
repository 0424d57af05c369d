"""What a run records for `satrap status` and `--http`, from the events and commands of its supervisor."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from logged import logged
from report_records import read_records
from satrap.launch.child_processes import ChildExited, ProcessOutput
from satrap.launch.logs import RunLogs
from satrap.launch.run_events import (
    Event,
    MigrationEnded,
    PlacementFailed,
    Process,
    ProcessExited,
    ProcessReady,
    Role,
    ScaleRequested,
    StartProcess,
    StopRequested,
)
from satrap.launch.run_monitor import CLIENT_KEY, STATUS, RunMonitor
from satrap.launch.run_state import RunState
from satrap.launch.supervisor import RunConfig, Supervisor
from satrap.monitor.record_file import encode
from satrap.monitor.samples import Sample

SERVERS = [Process(Role.SERVER, number, 1) for number in (0, 1)]


class Run:
    """A supervisor whose events a monitor observes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.places: dict[Process, str] = {}
        self.metrics: dict[Process, str] = {}
        self.folder = folder
        self.monitor = RunMonitor(folder, self.places, self.metrics, **options)
        self.supervisor = Supervisor(
            RunConfig(servers=2, workers=0, trainers=1), RunState(name="a", launch=4, first_launch=5)
        )
        self.monitor.observe([], self.supervisor.start(0.0), self.supervisor, None)

    def handle(self, event: Event, migration: tuple[int, int] | None = None) -> None:
        self.monitor.observe([event], self.supervisor.handle(event, 1.0), self.supervisor, migration)

    def start(self) -> None:
        for server in SERVERS:
            self.handle(ProcessReady(server, f"ipc:///folder/{server.number}"))

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / STATUS).read_text())
        return found

    @property
    def states(self) -> dict[str, str]:
        return {f"{each['role']} {each['number']}": each["state"] for each in self.status["processes"]}

    @property
    def numbers(self) -> dict[str, Any]:
        def name(sample: Sample) -> str:
            return ".".join((sample.name.removeprefix("satrap_"), *sample.labels.values()))

        return {name(sample): sample.value for sample in self.monitor.samples()}


def test_processes_and_their_places(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.states == {"server 0": "starting", "server 1": "starting"} and "starting" in run.monitor.not_ready()
    run.start()
    assert run.states == {"server 0": "ready", "server 1": "ready", "trainer 0": "ready"}
    assert (run.monitor.not_ready(), run.status["phase"], run.status["launch"]) == ("", "trainers are running", 5)
    run.places[SERVERS[1]] = "process 7 on here"
    run.metrics[SERVERS[1]] = "http://127.0.0.1:9101/metrics"
    run.monitor.url = "http://127.0.0.1:9100/metrics"
    run.handle(ProcessReady(SERVERS[1], "ipc:///folder/1"))
    found = run.status["processes"][1]
    assert (found["where"], found["address"]) == ("process 7 on here", "ipc:///folder/1")
    assert run.monitor.targets() == [
        {"targets": ["127.0.0.1:9100"], "labels": {"role": "run", "number": "0"}},
        {"targets": ["127.0.0.1:9101"], "labels": {"role": "server", "number": "1"}},
    ]
    run.monitor.close()
    assert [each.name for each in tmp_path.iterdir()] == ["records"]


def test_restarts_and_faults_are_counted_and_stops_are_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start()
    run.handle(ProcessExited(SERVERS[0], -9))
    assert run.states["server 0"] == "starting"
    run.handle(ProcessReady(Process(Role.SERVER, 0, 2), "ipc:///folder/0"))
    run.handle(ProcessExited(Process(Role.TRAINER, 0, 5), -11))  # the next launch starts
    assert run.status["launch"] == 6
    run.handle(ScaleRequested(3, "test"))
    run.handle(ProcessReady(Process(Role.SERVER, 2, 1), "ipc:///folder/2"), (0, 0))
    run.handle(MigrationEnded("a server is slow"), (3, 8))
    assert run.status["migration"] == {"moved": 3, "all": 8} and run.numbers["migration_buckets.moved"] == 3
    run.handle(MigrationEnded(), None)
    run.handle(StopRequested("SIGTERM"))
    run.handle(ProcessExited(Process(Role.TRAINER, 0, 6), -15))
    numbers, faults = run.numbers, run.status["faults"]
    assert [each["what"] for each in faults["last"]] == [
        "server 0 was killed by signal 9",
        "trainer 0 was killed by signal 11",
        "buckets could not be moved: a server is slow",
    ]
    assert faults["count"] == numbers["run_faults"] == 3 and numbers["run_launches"] == 2
    assert (numbers["run_restarts.server"], numbers["run_restarts.trainer"], numbers["run_restarts.worker"]) == (
        1,
        1,
        0,
    )
    assert run.status["migration"] is None and "stopping" in run.monitor.not_ready()


def test_a_process_without_a_place_is_a_fault(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.handle(PlacementFailed(SERVERS[1], "no node has room"))
    assert run.status["faults"]["last"][0]["what"] == "no node has room" and run.states == {"server 0": "starting"}


def test_the_last_faults_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number in range(1, 31):
        process = Process(Role.SERVER, 0, number)
        run.monitor.observe([ProcessExited(process, 1)], [StartProcess(process)], run.supervisor, None)
    assert run.status["faults"]["count"] == 30 and len(run.status["faults"]["last"]) == 20


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    run = Run(folder)
    shutil.rmtree(folder)
    with logged("satrap.launch", "status.json cannot be written") as records:
        run.start()
        run.handle(ProcessExited(SERVERS[0], -9))
    assert len(records) == 1
    folder.mkdir()
    run.handle(ProcessReady(Process(Role.SERVER, 0, 2), "ipc:///folder/0"))
    assert run.states["server 0"] == "ready"


def test_the_key_of_a_run_is_private_and_removed(tmp_path: Path) -> None:
    (tmp_path / CLIENT_KEY).write_text("of a run that was killed")
    run = Run(tmp_path, client_key=b"key")
    assert (tmp_path / CLIENT_KEY).read_bytes() == b"key" and (tmp_path / CLIENT_KEY).stat().st_mode & 0o777 == 0o600
    run.monitor.close()
    assert [each.name for each in tmp_path.iterdir()] == ["records"]


def test_a_run_records_its_launches_faults_and_end(tmp_path: Path) -> None:
    run = Run(tmp_path, settings={"script": "a.py"})
    run.start()
    run.handle(ProcessExited(SERVERS[0], -9))
    run.handle(ProcessReady(Process(Role.SERVER, 0, 2), "ipc:///folder/0"))
    run.handle(ProcessExited(Process(Role.TRAINER, 0, 5), -11))
    run.handle(ProcessExited(Process(Role.TRAINER, 0, 6), 0))
    for server in (Process(Role.SERVER, 0, 2), SERVERS[1]):
        run.handle(ProcessExited(server, 0))
    run.monitor.close()
    lines = read_records(tmp_path / "records" / "run.jsonl").lines
    assert all(each.pop("at") > 1e9 for each in lines)
    assert lines[0]["settings"] == {"script": "a.py"} and lines[0]["where"].startswith("process ")
    assert [{name: value for name, value in each.items() if name != "first_launch"} for each in lines[1:]] == [
        {"kind": "launch", "launch": 5, "servers": 2},
        {"kind": "fault", "what": "server 0 was killed by signal 9"},
        {"kind": "restart", "process": "server 0"},
        {"kind": "fault", "what": "trainer 0 was killed by signal 11"},
        {"kind": "launch", "launch": 6, "servers": 2},
        {"kind": "exit", "status": 0},
    ]


def test_a_run_that_fails_itself_records_an_end_without_status(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.monitor.close()
    assert [each["kind"] for each in read_records(tmp_path / "records" / "run.jsonl").lines] == ["run", "exit"]


def test_a_record_that_cannot_be_opened_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "records").touch()
    with logged("satrap.launch", r"run\.jsonl cannot be written"):
        run = Run(tmp_path)
    run.start()
    run.monitor.close()


def test_records_of_trainers_come_through_the_run(tmp_path: Path) -> None:
    """Also if the disk is full for a while, for which a directory of the file's name stands."""
    path = tmp_path / "records" / "trainer-0.jsonl"
    with RunLogs(tmp_path / "logs") as logs:
        write_records(logs, path, tmp_path / "kept")
    found = read_records(path)
    assert [each["number"] for each in found.lines if each["kind"] == "a"] == [1, 2, 6, 7]
    assert (found.missing, found.damaged) == (3, 2)
    assert b"number" not in (tmp_path / "logs" / "trainer-0.log").read_bytes()


def test_a_log_line_that_arrives_in_parts_is_shown_as_if_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer, stamp = Process(Role.TRAINER, 0, 1), "2026-11-29T02:03:04.123Z INFO trainer 0 job=- step=-"
    routine = f"{stamp} satrap.worker: attempt 1 started\n"
    done = f"{stamp} satrap.checkpoint: save of step 3 into run done: 1 KiB in 0.1 s\n"
    text = f"mine\n{routine}{done}{stamp.replace('INFO', 'WARNING')} satrap.worker: full\nmine, too".encode()
    for cut in (text.index(b"attempt 1"), text.index(b"0.1 s"), text.index(b"full"), len(text)):
        with RunLogs(tmp_path / f"{cut}" / "logs") as logs:
            logs.record_start(trainer)
            assert logs.handle([ProcessOutput(trainer, "stderr", part) for part in (text[:cut], text[cut:])]) == []
        shown = capfd.readouterr().err.splitlines()[1:]  # the first is the event of the run's start
        assert shown == [
            "mine",
            "satrap run: save of step 3 into run done: 1 KiB in 0.1 s",
            f"{stamp.replace('INFO', 'WARNING')} satrap.worker: full",
            "mine, too",
        ]
        assert text in (tmp_path / f"{cut}" / "logs" / "trainer-0.log").read_bytes()


@pytest.mark.parametrize("has_bar", [True, False])
@pytest.mark.parametrize("num_saves", [0, 1, 2, 5])
def test_beside_a_bar_only_the_first_save_and_the_last_are_shown(
    num_saves: int, has_bar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("satrap.launch.logs.draws_in_place", lambda _: has_bar)
    trainer, stamp = Process(Role.TRAINER, 0, 1), "2026-11-29T02:03:04.123Z INFO trainer 0 job=- step=-"
    saves = [f"save of step {step},000 into run done: 1 KiB in 0.1 s" for step in range(1, num_saves + 1)]
    with RunLogs(tmp_path / "logs") as logs:
        logs.record_start(trainer)
        for save in saves:
            logs.handle([ProcessOutput(trainer, "stderr", f"{stamp} satrap.checkpoint: {save}\nmine\n".encode())])
        logs.handle([ChildExited(trainer, status=0, was_stopped=False)])
    written = re.sub(r"\r|\x1b\[K", "", capfd.readouterr().err).splitlines()
    expected = [line for save in saves for line in (save, "mine")]
    if has_bar and num_saves > 1:
        expected = [saves[0], *["mine"] * num_saves, saves[-1]]
    assert [line.removeprefix("satrap run: ") for line in written[1:] if line] == expected
    assert (tmp_path / "logs" / "trainer-0.log").read_text().count(" done: ") == num_saves


def write_records(logs: RunLogs, path: Path, kept: Path) -> None:
    trainer = Process(Role.TRAINER, 0, 1)

    def write(*numbers: int) -> None:
        data = b"".join(encode({"kind": "a", "number": number}) for number in numbers)
        assert logs.handle([ProcessOutput(trainer, "record", data)]) == []

    logs.record_start(trainer)
    write(1, 2)
    path.rename(kept)
    path.mkdir()
    with logged("satrap.launch", r"trainer-0\.jsonl cannot be written") as warnings:
        write(3, 4)
        write(5)
    assert len(warnings) == 1
    path.rmdir()
    kept.rename(path)
    with path.open("ab") as torn:
        torn.write(b'{"kind": "a", "nu')
    write(6)
    with path.open("ab") as torn:
        torn.write(b'{"kind": "a", "nu')
    logs.record_start(Process(Role.TRAINER, 0, 2))
    write(7)
