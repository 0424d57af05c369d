"""What a node does with the reports of its process: it copies the output, and gives addresses that others can call."""

from __future__ import annotations

import os
from pathlib import Path

from logged import logged
from satrap.launch.child_processes import MetricsServed, ProcessOutput, Report
from satrap.launch.node_reports import NodeReports
from satrap.launch.run_events import Process, ProcessReady, Role

SERVER = Process(Role.SERVER, 0, 1)


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
