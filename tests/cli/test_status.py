"""`satrap status` and `--http` of a live run: what they show is what happens, and training does not notice."""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import pty
import random
import re
import signal
import struct
import subprocess
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from child_processes import SATRAP, child_process, silent_server
from cluster import batch, one_table, running_servers, sharded_worker
from runs import (
    JOB,
    assert_nothing_is_left,
    name_processes,
    num_checkpoints,
    scale_to,
    start_run,
    wait_for_exit,
    wait_for_output,
)
from satrap.cli import status
from satrap.cli.main import main
from satrap.cli.status import RunReader
from satrap.cli.status_table import as_lines, fit, summarize
from satrap.config import durable
from satrap.errors import ConfigError
from satrap.launch.run_monitor import STATUS
from satrap.launch.run_state import RunState
from scrape import get, number, scrape
from waiting import wait_until


def status_of(folder: Path) -> dict[str, Any]:
    command = [str(SATRAP), "status", "--folder", str(folder / "run"), "--json", "--seconds", "0.2"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def processes(status: dict[str, Any], key: str) -> dict[str, Any]:
    return {f"{each['role']} {each['number']}": each[key] for each in status["processes"]}


def targets(url: str) -> dict[str, str]:
    """Return the URL of each process's metrics, as Prometheus discovers them."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        found = json.load(answer)
    return {
        f"{each['labels']['role']} {each['labels']['number']}": f"http://{each['targets'][0]}/metrics" for each in found
    }


def watch_in_a_terminal(folder: Path, columns: int, lines: int) -> bytes:
    """Return what `--watch` writes to a terminal until it has drawn three tables and gets a Ctrl-C."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    command = [str(SATRAP), "status", "--watch", "--seconds", "0.1", "--folder", str(folder / "run")]
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}  # if it hangs, SIGABRT shows where
    process = subprocess.Popen(
        command, stdin=secondary, stdout=secondary, stderr=secondary, start_new_session=True, env=environment
    )
    os.close(secondary)
    timer = threading.Timer(120, process.send_signal, (signal.SIGABRT,))
    timer.start()
    written, is_interrupted = b"", False
    try:
        with suppress(OSError):  # at its end
            while True:  # a terminal reads on: otherwise the process could not write its last lines
                written += os.read(primary, 1 << 16)
                if not is_interrupted and written.count(b"\x1b[H") >= 4:
                    process.send_signal(signal.SIGINT)
                    is_interrupted = True
        assert process.wait() == 0, written.decode()
    finally:
        timer.cancel()
        timer.join()
        process.kill()
        process.wait()
        os.close(primary)
    return written


def check_metrics(urls: dict[str, str], run: subprocess.Popen[str]) -> None:
    """Check the numbers of a run that waits at step 30."""
    assert urls.keys() == {"run 0", "server 0", "server 1", "worker 0", "trainer 0"}
    assert all(get(url.replace("metrics", "readyz")) == (200, "ready\n") for url in urls.values())
    wait_until(lambda: number(scrape(urls["trainer 0"]), "satrap_checkpoints_total") == 6, run)
    numbers = scrape(urls["trainer 0"])
    assert number(numbers, "satrap_step") == number(numbers, "satrap_last_checkpoint_step") == 30
    assert number(numbers, "satrap_staleness_bound_steps") == 2
    looked_up = number(numbers, "satrap_staleness_steps_count")
    assert 30 <= looked_up <= 33 and number(numbers, "satrap_staleness_steps_bucket", le="2.0") == looked_up
    stages = ("read", "lookup", "update")
    assert all(number(numbers, "satrap_stage_seconds_total", stage=stage) > 0 for stage in stages)
    assert number(scrape(urls["worker 0"]), "satrap_sessions") == 1
    numbers = scrape(urls["run 0"])
    assert number(numbers, "satrap_run_launches_total") == 1 and number(numbers, "satrap_run_faults_total") == 0
    assert number(numbers, "satrap_run_processes", process="server", state="ready") == 2


def check_status(status: dict[str, Any], urls: dict[str, str], pids: dict[str, int]) -> None:
    """Check the status of a run that waits at step 30."""
    assert status["phase"] == "trainers are running" and status["launch"] == 1
    servers = [scrape(urls[name]) for name in ("server 0", "server 1")]
    rows = [sum(value for (name, _), value in each.items() if name == "satrap_table_rows") for each in servers]
    assert status["rows"] == sum(rows) > 0 and status["step"] >= 30
    assert [processes(status, "rows")[name] for name in ("server 0", "server 1")] == rows
    assert processes(status, "metrics") == {name: url for name, url in urls.items() if name != "run 0"}
    assert status["rows_per_second"] == 0.0 and status["faults"] == {"count": 0, "last": []}
    last = status["last_checkpoint"]
    assert last["name"] == "000006-step-30" and last["is_published"] and Path(last["folder"]).is_dir()
    places = processes(status, "where")
    assert all(places[name].startswith(f"process {pid} on ") for name, pid in pids.items() if name != "worker")


def check_terminal(written: str, columns: int, lines: int) -> None:
    for drawn in written.split("\x1b[H")[1:-1]:
        table = re.sub(r"\x1b\[[0-9]*[A-Z]", "", drawn).splitlines()
        assert len(table) == lines - 1 and max(map(len, table)) <= columns and table[-1].startswith("... ")
        assert "trainers are running" in table[0] and table[2].startswith("last checkpoint: 000006-step-30")


def test_status_and_metrics_of_a_live_run(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    options = ("--servers", "2", "--workers", "1", "--trainers", "1", "--http", "0")
    with start_run(tmp_path, JOB, *options, arguments=(str(tmp_path), "60", "2")) as run:
        assert run.stderr is not None
        lines = iter(run.stderr.readline, "")
        found = (re.search(r"metrics at (\S+); those of all processes: (\S+)\n", line) for line in lines)
        match = next(each for each in found if each is not None)
        wait_until(lambda: num_checkpoints(tmp_path) == 6, run)  # it waits at step 30
        urls = targets(match[2])
        assert urls["run 0"] == match[1]
        check_metrics(urls, run)
        pids = name_processes(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
        before = status_of(tmp_path)
        check_status(before, urls, pids)
        check_terminal(watch_in_a_terminal(tmp_path, 70, 9).decode(), 70, 9)
        attempt = number(scrape(urls["server 0"]), "satrap_attempt")
        # A fault, and more servers.
        os.kill(pids["server 1"], signal.SIGKILL)
        wait_for_output(run, "server 1: listening at")
        wait_until(lambda: processes(status_of(tmp_path), "state")["server 1"] != "no answer", run)
        scale_to(tmp_path, run, 3)
        after = status_of(tmp_path)
        assert after["faults"]["count"] == 1 and after["faults"]["last"][0]["what"] == "server 1 was killed by signal 9"
        assert processes(after, "restarts")["server 1"] == 1 and "server 2" in processes(after, "rows")
        assert after["rows"] == before["rows"] and after["migration"]["rows_received"] > 0
        numbers = scrape(urls["run 0"])
        assert number(numbers, "satrap_run_restarts_total", process="server") == 1
        assert number(numbers, "satrap_run_faults_total") == 1
        assert number(scrape(targets(match[2])["server 2"]), "satrap_moved_rows_total", direction="in") > 0
        assert number(scrape(urls["server 0"]), "satrap_attempt") == attempt
        (tmp_path / "hold").unlink()
        status, out, err = wait_for_exit(run)
    assert (status, out) == (0, "began\n"), err
    assert "launch 2" not in err and "AttemptError" not in err
    assert_nothing_is_left(tmp_path, [])
    assert not (tmp_path / "run/status.json").exists()


def test_servers_by_hand_are_found_by_one_address(capsys: pytest.CaptureFixture[str]) -> None:
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        assert main(["status", "--servers", addresses[1], "--seconds", "0.1"]) == 0
        assert "no trainer has given this server its job yet" in capsys.readouterr().out
        with sharded_worker(one_table(), addresses) as worker:
            found = worker.lookup(batch(np.arange(100)), step=1)
            assert found.ticket is not None
            with RunReader(None, [addresses[1]]) as reader:
                before = reader.read()
                worker.lookup(batch(np.arange(50)), step=2, oldest_open=1)
                summary = summarize(reader.read(), before)
        assert summary["rows"] == 100 and summary["step"] == 2 and summary["staleness"] == {"0": 1}
        assert [process["address"] for process in summary["processes"][:2]] == addresses
        assert processes(summary, "state")["trainer 0"] == "ready"
        seconds = 50 / summary["rows_per_second"]
        assert 0 < seconds < 60 and summary["steps_per_second"] == pytest.approx(1 / seconds)
        lines = as_lines(summary)
        assert "servers started by hand" in lines[0] and any(f"process {os.getpid()} on" in line for line in lines)


def test_a_server_that_does_not_answer_is_shown() -> None:
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        with sharded_worker(one_table(), addresses), RunReader(None, addresses) as reader:
            reader.read()
            services[1].close()
            summary = summarize(reader.read(), None)
    assert [each["state"] for each in summary["processes"][:2]] == ["ready", "no answer"]
    assert summary["rows_per_second"] is None and any("server" in line for line in as_lines(summary)[-1:])


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 400 MiB, in either version of the kernel's interface."""
    name = f"satrap-test-{os.getpid()}"
    for parent, limit in (("memory", "memory.limit_in_bytes"), (".", "memory.max")):
        group = Path("/sys/fs/cgroup", parent, name)
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(400 << 20))
                yield group
            finally:
                wait_until(lambda group=group: not (group / "cgroup.procs").read_text())  # type: ignore[misc]
                group.rmdir()
            return
    pytest.skip("needs the permission to create a control group that limits memory")


@pytest.mark.alone
def test_servers_that_do_not_answer_are_waited_for_together() -> None:
    """A rack is lost, say: its servers neither refuse a connection nor answer."""
    with ExitStack() as stack:
        (service,) = stack.enter_context(running_servers(1))
        addresses = [stack.enter_context(silent_server())[1] for _ in range(10)]
        reader = stack.enter_context(RunReader(None, [*addresses[:5], service.address, *addresses[5:]]))
        start = time.monotonic()
        answers = reader.read()["answers"]
        assert time.monotonic() - start < 3 * status._ANSWER_SECONDS
        assert list(answers) == [*addresses[:5], service.address, *addresses[5:]]
        assert [address for address, answer in answers.items() if "error" not in answer] == [service.address]
        assert all("no connection within 3 s" in answers[address]["error"] for address in addresses)


def test_the_limit_of_a_servers_own_container_is_shown(
    tmp_path: Path, memory_group: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file system of its rows is the machine's, far larger than the container."""
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/server"
    command = [str(SATRAP), "server", "--listen", address, "--threads", "1", "--shared", str(tmp_path / "rows")]
    enter = partial((memory_group / "cgroup.procs").write_text, "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter) as server:
        try:
            assert server.stdout is not None and server.stdout.readline()
            with sharded_worker(one_table(), [address]) as worker:
                worker.lookup(batch([1, 2, 3]), step=1)
                assert main(["status", "--servers", address, "--seconds", "0.1"]) == 0
        finally:
            server.terminate()
            server.wait(60)
    assert re.search(r"\(\d+% of 400\.0 MiB in use\)", capsys.readouterr().out)


def test_json_is_one_object_per_line_until_the_reader_leaves() -> None:
    with running_servers(1) as services, sharded_worker(one_table(), [services[0].address]) as worker:
        worker.lookup(batch([1, 2, 3]), step=1)
        command = [str(SATRAP), "status", "--watch", "--json", "--seconds", "0.1", "--servers", services[0].address]
        with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            seen = [json.loads(process.stdout.readline()) for _ in range(3)]
            process.stdout.close()
            assert process.wait() == 1 and process.stderr.read() == ""
    assert [each["rows"] for each in seen] == [3, 3, 3] and seen[0]["at"] < seen[1]["at"] < seen[2]["at"]


def test_a_run_that_is_not_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--folder", str(tmp_path)]) == 1
    assert "there is no run in" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}")
    assert main(["status", "--folder", str(tmp_path)]) == 1
    assert "has ended" in capsys.readouterr().err
    assert main(["status", "--servers", "ipc:///nowhere"]) == 1
    assert main(["status", "--seconds", "0", "--folder", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("records", "result"),
    [
        ([{"kind": "run"}, {"kind": "exit", "status": 3}], "the run has ended with exit status 3"),
        ([{"kind": "run"}, {"kind": "exit", "status": None}], "the run has failed"),
        ([], "the run has ended"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_watch_ends_with_the_result_of_the_run(
    records: list[dict[str, Any]], result: str, as_json: bool, tmp_path: Path
) -> None:
    """Also if status.json is removed a little before the run gives up its folder."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "status.json").write_text(json.dumps(GOOD))
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "run.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    out = io.StringIO()
    with durable.opened(tmp_path) as lock, RunReader(tmp_path) as reader, ExitStack() as stack:
        assert durable.try_lock(lock)
        read = reader.read
        readings = itertools.count()

        def read_thrice() -> dict[str, Any]:
            if next(readings) == 3:
                (tmp_path / "status.json").unlink()
                timer = threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN))
                timer.start()
                stack.callback(timer.join)
            return read()

        reader.read = read_thrice  # type: ignore[method-assign]
        status.show_status(reader, watch=True, as_json=as_json, seconds=0.1, out=out)
    *tables, last = out.getvalue().splitlines()
    assert last == (json.dumps({"result": result}) if as_json else result)
    assert out.getvalue().count("trainers are running") == 2 and tables


GOOD: dict[str, Any] = {
    "phase": "trainers are running", "launch": 1, "started_at": 1e9, "migration": {"moved": 1, "all": 2},
    "processes": [
        {"role": "trainer", "number": 0, "address": None, "where": "", "state": "up", "restarts": 0, "metrics": None}
    ],
    "faults": {"count": 1, "last": [{"at": 1e9, "what": "trainer 0 \x1b[2J was\nkilled"}]},
}  # fmt: skip


def test_there_is_no_rate_of_steps_over_a_resume() -> None:
    """The rows of a checkpoint come with its step."""
    counts = {"tables": {}, "staleness": {}, "snapshots": {}, "moved_rows": {"in": 0}, "buckets": {"frozen": 0}}
    before, after = (
        {"at": 0.0, "clock": clock, "checkpoint": None, "restored": None, "answers": {"a": {**counts, "step": step}}}
        for clock, step in ((1.0, 0), (2.0, 600))
    )
    for launch, rate in ((1, 600.0), (2, None)):
        now = {**after, "run": {**GOOD, "launch": launch}}
        assert summarize(now, {**before, "run": GOOD})["steps_per_second"] == rate


ODD: list[Any] = [None, True, -1, 2**70, 10**400, 1.5, "", "x", "ipc:///x", [], [1], {}, {"a": 1}, [{}], [None], 1e300]


def test_a_forged_file_is_refused_or_shown(tmp_path: Path, seed: int) -> None:
    """It may have values of any types, be deeply nested, huge or no file. No text controls the terminal."""
    rng = random.Random(seed)
    RunState(name="a").write(tmp_path / "run.json")
    with durable.opened(tmp_path) as folder, RunReader(tmp_path) as reader:
        assert durable.try_lock(folder)  # as a live run does
        (tmp_path / STATUS).write_text(json.dumps(GOOD))
        assert "trainer 0  [2J was killed" in "\n".join(as_lines(summarize(reader.read(), None)))
        refused = 0
        for _ in range(300):
            node = forged = json.loads(json.dumps(GOOD))
            while True:
                key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
                if not isinstance(node[key], dict | list) or rng.random() < 0.3:
                    break
                node = node[key]
            node[key] = rng.choice(ODD)
            (tmp_path / STATUS).write_text(json.dumps(forged))
            try:
                summary = summarize(reader.read(), None)
            except ConfigError as error:
                assert "cannot be read (" in str(error)
                refused += 1
            else:
                assert json.dumps(summary) and all(map(str.isprintable, as_lines(summary)))
        assert refused > 100
        (tmp_path / STATUS).write_bytes(b"[" * 100_000)
        with pytest.raises(ConfigError, match="it is nested too deeply"):
            reader.read()
        os.truncate(tmp_path / STATUS, 1 << 30)
        with pytest.raises(ConfigError, match="it has more than"):
            reader.read()
        (tmp_path / STATUS).unlink()
        os.mkfifo(tmp_path / STATUS)
        with pytest.raises(ConfigError, match="it is a FIFO"):
            reader.read()


def test_a_clock_that_was_set_back() -> None:
    """Times of the wall clock are only shown, and rates are measured by another clock."""
    run = GOOD | {"started_at": 2e9, "faults": {"count": 1, "last": [{"at": 2e9, "what": "w"}]}}
    checkpoint = {"at": 2e9, "seconds": 1.0, "name": "a", "is_published": True, "folder": None}
    reading = {"at": 1e9, "clock": 5.0, "run": run, "answers": {}, "checkpoint": checkpoint, "restored": None}
    text = "\n".join(as_lines(summarize(reading, reading | {"at": 3e9, "clock": 4.0})))
    assert "running for 0:00:00" in text and "0:00:00 ago: w" in text and "a, 0:00:00 ago" in text


@given(st.lists(st.text(max_size=20), max_size=12), st.integers(1, 15), st.integers(2, 10))
def test_a_table_fits_its_terminal(lines: list[str], columns: int, rows: int) -> None:
    found = fit(lines, columns, rows)
    assert len(found) == min(len(lines), rows) and all(len(line) <= columns for line in found)
    kept = found if len(lines) <= rows else found[:-1]
    assert kept == [line[:columns] for line in lines[: len(kept)]]


@pytest.mark.parametrize(
    ("written", "name", "folder"),
    [
        ("/gone/run/.0a1b2c3d.000002-step-8/tables/1", "000002-step-8", "/gone/run/000002-step-8"),
        ("s3://run/000002-step-8-5f0c2a9e/tables/1", "000002-step-8-5f0c2a9e", "s3://run/000002-step-8-5f0c2a9e"),
        ("/elsewhere/mine", "unknown", None),
    ],
)
def test_the_last_checkpoint_is_known_by_the_folders_that_servers_wrote(
    written: str, name: str, folder: str | None
) -> None:
    idle = {"snapshots": {"save": {"completed": 0}}}
    answers = {
        server: {"snapshots": {"save": {"completed": 1, "ended_at": at, "seconds": 9.0 - at}}, "save_folders": folders}
        for server, at, folders in (("a", 3.0, [written]), ("b", 2.0, ["/old/tables/0"]))
    }
    found = status._last_checkpoint({**answers, "c": idle, "d": {"error": "no answer"}})
    assert found == {"at": 3.0, "seconds": 7.0, "name": name, "is_published": None, "folder": folder}
    assert status._last_checkpoint({"c": idle}) is None


def test_a_restore_is_shown_until_the_next_save(tmp_path: Path) -> None:
    folder = tmp_path / "000006-step-30" / "tables" / "0"
    with running_servers(2) as services:
        addresses = [service.address for service in services]
        with sharded_worker(one_table(), addresses) as worker, RunReader(None, addresses) as reader:
            worker.lookup(batch(np.arange(100)), step=1)
            folder.parent.mkdir(parents=True)
            worker.tables["t"].save(folder)
            worker.tables.restore({"t": [folder]})
            summary = summarize(reader.read(), None)
            assert summary["restored_from"] == "000006-step-30"
            assert as_lines(summary)[2] == "last checkpoint: none since 000006-step-30 was restored"
            worker.tables.clear()
            assert as_lines(summarize(reader.read(), None))[2] == "last checkpoint: none since the servers started"


def test_a_server_without_tables_has_no_memory_of_tables() -> None:
    answer = {"where": "process 1 on a", "not_ready": "no trainer", "memory": {"machine": [1 << 30, 4 << 30]}}
    reading = {"at": 0.0, "clock": 1.0, "run": None, "checkpoint": None, "restored": None, "answers": {"a": answer}}
    assert "  - (25% of 4.0 GiB in use)" in as_lines(summarize(reading, None))[-2]


def test_work_in_progress_is_shown() -> None:
    """A save, a migration and faults, as a supervisor and two servers report them."""
    saving = {"running": 1, "bytes": 400 << 10, "total": 1000 << 10, "seconds_left": 12}
    idle = {"running": 0, "bytes": 0, "total": 0, "seconds_left": None}
    answer = {
        "where": "process 1 on a",
        "not_ready": "",
        "memory": {"machine": [1, 4]},
        "leases": {},
        "step": 12,
        "tables": {"t": {"rows": 500, "bytes": 1 << 21, "lookups": 900}},
        "staleness": {"0": 3},
        "snapshots": {"save": saving, "restore": idle},
        "moved_rows": {"in": 7000, "out": 0},
        "buckets": {"owned": 8, "frozen": 2, "incoming": 0},
    }
    process = {"role": "server", "where": None, "state": "ready", "metrics": None, "restarts": 0}
    run = {
        "phase": "trainers are running",
        "launch": 2,
        "started_at": 0.0,
        "migration": {"moved": 12, "all": 64},
        "processes": [
            {**process, "number": 1, "address": "b"},
            {**process, "number": 0, "address": "a"},
            {**process, "number": 2, "address": None, "state": "starting"},
            {**process, "role": "trainer", "number": 0, "address": None},
        ],
        "faults": {"count": 5, "last": [{"at": 90.0 + i, "what": f"fault {i}"} for i in range(5)]},
    }
    reading = {"at": 3700.0, "clock": 10.0, "run": run, "answers": {"a": answer, "b": answer}}
    reading |= {"checkpoint": None, "restored": None}
    summary = summarize(reading, {**reading, "clock": 8.0, "answers": {"a": answer}})
    lines = as_lines(summary)
    assert lines[0].endswith("| trainers are running | launch 2 | running for 1:01:40")
    assert lines[1] == "step 12 | 0.0 steps/s | 1k rows | 4.0 MiB"  # no rate: one of the servers was not read before
    assert lines[2].endswith("| save in progress: 40 %, 800.0 KiB, about 12 s left")
    assert lines[3] == "migration: 12 of 64 buckets | 14k rows moved so far"
    assert lines[4:8] == ["faults: 5", *(f"  1:00:0{10 - i} ago: fault {i}" for i in (2, 3, 4))]
    assert [line.split()[:2] for line in lines[10:]] == [["server", str(i)] for i in (0, 1, 2)] + [["trainer", "0"]]
    assert [each["rows_per_second"] for each in summary["processes"]] == [0.0, None, None, None]
    assert summary["processes"][3]["staleness"] == 3
