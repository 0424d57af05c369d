"""The nodes of a Ray cluster, without Ray: where the script is, in the job's working directory or on every node; and
the reports of a process, whose output is copied, and whose address of metrics is one that others can call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from logged import logged
from satrap.launch.child_processes import MetricsServed, ProcessOutput, Report
from satrap.launch.ray_nodes import NodeReports, job_directory, script_path
from satrap.launch.run_events import Process, ProcessReady, Role

SERVER = Process(Role.SERVER, 0, 1)
COPY = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_12")


def test_output_is_copied_and_passed_on(tmp_path: Path) -> None:
    (file := tmp_path / "output").write_text("before\n")
    node = NodeReports("10.0.0.7", None, str(file))
    reports: list[Report] = [
        ProcessOutput(SERVER, "stdout", b"one\n"),
        ProcessOutput(SERVER, "stderr", b"two\n"),
        ProcessOutput(SERVER, "record", b"{}\n"),
        ProcessReady(SERVER, "tcp://10.0.0.7:5555"),
    ]
    assert node.handle(reports) == reports
    node.close()
    assert file.read_text() == "before\none\ntwo\n", "not the record"
    assert node.handle(reports) == reports and file.read_text() == "before\none\ntwo\n"


def test_a_reader_that_stops_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        node = NodeReports("10.0.0.7", None, str(path))
        for _ in range(100):
            node.handle([ProcessOutput(SERVER, "stdout", bytes(4096))])
        node.close()
    finally:
        os.close(reader)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with logged("satrap.launch", r"missing/output cannot be written \(No such file"):
        node = NodeReports("10.0.0.7", None, str(tmp_path / "missing/output"))
    output = ProcessOutput(SERVER, "stdout", b"one\n")
    assert node.handle([output]) == [output]
    node.close()


def test_the_address_of_metrics_is_that_of_the_node() -> None:
    node = NodeReports("10.0.0.7", "*:9100-9355", None)
    served = MetricsServed(SERVER, "http://clicks-servers-worker-x7:9101/metrics")
    assert node.handle([served]) == [MetricsServed(SERVER, "http://10.0.0.7:9101/metrics")]
    assert NodeReports("10.0.0.7", None, None).handle([served]) == [served]


@pytest.mark.parametrize("folder", [COPY, COPY / "jobs/deep"])
def test_the_copy_of_the_working_directory(folder: Path) -> None:
    assert job_directory(folder) == COPY
    assert job_directory(Path("/elsewhere/x")) == Path("/elsewhere/x")


def test_the_path_of_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert script_path(Path("a/job.py"), None) == Path("job.py")
    assert script_path(Path("a/job.py"), tmp_path) == Path("a/job.py")
    assert script_path(tmp_path / "a/job.py", tmp_path) == Path("a/job.py")
    assert script_path(Path("/app/job.py"), tmp_path) == Path("/app/job.py")
