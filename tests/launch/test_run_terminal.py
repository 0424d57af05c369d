"""What `satrap run` shows on a terminal: one line for all trainers, below the output, in any width and encoding."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from child_processes import SATRAP, child_process
from pty_screen import PtyScreen, pty_screen
from runs import JOB, name_processes, num_checkpoints, write_changed_job
from satrap.launch.terminal import Terminal
from waiting import DEADLINE_SECONDS, wait_until

REPORT_JOB = JOB.with_name("report_job.py")
HELD_AT, STEPS = 60, 120
"""Steps of each trainer."""


def write_job(folder: Path) -> Path:
    """Write a job that reports each of its steps to the run, prints lines, and waits at step 60."""
    (folder / "hold").touch()
    return write_changed_job(
        folder,
        ("STEP_SECONDS * embeddings.step", "1.0 * embeddings.step"),
        ("    run.resume()\n", '    print("resumed" if run.resume() else "began", flush=True)\n'),
        ("every_steps=20", "every_steps=25"),  # so that steps before step 60 are trained again
        ("embeddings, [], record", "embeddings, None, record"),
        job=REPORT_JOB,
    )


@contextmanager
def run_on(
    screen: PtyScreen,
    folder: Path,
    trainers: int = 1,
    environment: dict[str, str] | None = None,
    script: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "memory").mkdir(exist_ok=True)
    job = str(write_job(folder) if script is None else script)
    places = ["--folder", str(folder / "run"), "--memory", str(folder / "memory")]
    command = [str(SATRAP), "run", job, *places, "--trainers", str(trainers), "--", str(folder), str(trainers * STEPS)]
    streams: dict[str, Any] = {"stdout": screen.stream, "stderr": screen.stream, "stdin": subprocess.DEVNULL}
    environment = os.environ | {"TERM": "xterm"} | (environment or {})
    with child_process(command, 4 * DEADLINE_SECONDS, env=environment, **streams) as run:
        yield run


def kill_trainer(run: subprocess.Popen[bytes]) -> None:
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(name_processes(children)["trainer 0"], signal.SIGKILL)


def test_one_line_for_all_trainers_continues_after_a_restart(tmp_path: Path) -> None:
    with pty_screen(140) as screen, run_on(screen, tmp_path, trainers=2) as run:
        held = screen.wait_for(lambda rows: f"step {HELD_AT}" in rows[-1])[-1]
        assert re.match(r"█+░+  50%( \d\d:\d\d left)? \| \d+ samples, ", held), held
        assert "| 960 samples, " in held, "60 steps of 8 samples, of two trainers"
        wait_until(lambda: num_checkpoints(tmp_path) >= 2)
        kill_trainer(run)
        screen.wait_for(lambda rows: "1 restart" in rows[-1] and f"step {HELD_AT}" in rows[-1])
        assert "| 960 samples, " in screen.rows()[-1], "steps that are trained again count once"
        (tmp_path / "hold").unlink()
        assert run.wait(DEADLINE_SECONDS) == 0
        *output, last, cursor = screen.wait_for(lambda rows: rows[-1] == "")
    assert last.startswith("█" * 20 + " 100%") and "| 1.92k samples, " in last and "step 120 of 120" in last
    assert cursor == "" and not [row for row in output if "samples" in row and "evaluation" not in row]
    assert output.count("began") == output.count("resumed") == 1
    assert any(row.startswith("satrap run: finished; to draw it: satrap report ") for row in output), output
    assert any("evaluation auc 0.6250 (best)" in row for row in output)
    assert not [row for row in output if "█" in row or "░" in row], output
    assert any(row.startswith("satrap run: launch 2 continues after step 50, from ") for row in output), output
    assert not [row for row in output if " INFO " in row or "attempt" in row or " begun" in row], output
    assert b'"progress"' not in (tmp_path / "run" / "records" / "trainer-0.jsonl").read_bytes()
    assert "samples in" in (tmp_path / "run" / "logs" / "trainer-0.log").read_text()


def test_a_narrow_terminal_without_blocks_is_resized_and_the_run_stopped(tmp_path: Path) -> None:
    """The encoding is ASCII, and NO_COLOR is set: `PtyScreen` refuses every escape sequence but that of an erasure."""
    environment = {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "LC_ALL": "C"}
    with pty_screen(20, "ascii") as screen, run_on(screen, tmp_path, environment=environment) as run:
        screen.wait_for(lambda rows: re.fullmatch(r"##\.\.  50%.*", rows[-1]))
        screen.resize(50)
        wide = screen.wait_for(lambda rows: len(rows[-1]) > 20)[-1]
        assert re.fullmatch(r"#{6}\.{6}  50%.* \| 480 samples, .*", wide), wide
        screen.resize(4)
        screen.wait_for(lambda rows: len(rows[-1]) == 3)
        screen.resize(120)
        screen.wait_for(lambda rows: f"step {HELD_AT} of 120" in rows[-1])
        run.send_signal(signal.SIGTERM)
        assert run.wait(DEADLINE_SECONDS) == 130
        rows = screen.wait_for(lambda rows: rows[-1] == "")
    assert "50%" in rows[-2] and "480 samples" in rows[-2], "what was reached remains"
    assert " left " not in rows[-2], "the run is over"


def test_a_terminal_that_cannot_erase_gets_lines(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with pty_screen(200) as screen, run_on(screen, tmp_path, environment={"TERM": "dumb"}) as run:
        screen.wait_for(lambda rows: any("evaluation auc" in row for row in rows))
        (tmp_path / "hold").unlink()
        assert run.wait(DEADLINE_SECONDS) == 0
        rows = screen.wait_for(lambda rows: any(row.startswith("step 120 of 120 | 960 samples") for row in rows))
    assert b"\x1b" not in screen.received and not any("█" in row for row in rows)


def test_a_script_without_progress_leaves_no_line(tmp_path: Path) -> None:
    (script := tmp_path / "plain.py").write_text("print('hello')\n")
    with pty_screen(100) as screen, run_on(screen, tmp_path, script=script) as run:
        assert run.wait(DEADLINE_SECONDS) == 0
        rows = screen.wait_for(lambda rows: "hello" in rows and rows[-1] == "")
    assert "\r\x1b[Kservers and workers are starting" in screen.received.decode()
    assert not [row for row in rows if row.startswith(("servers and", "the run is stopping"))]


def test_output_without_a_line_break_is_not_drawn_over() -> None:
    with pty_screen(40) as screen, os.fdopen(os.dup(screen.stream), "w", encoding="utf-8") as stream:
        terminal = Terminal(stream)
        terminal.show("half")
        screen.wait_for(lambda rows: rows == ["half"])
        terminal.write(b"first\nsecond")
        screen.wait_for(lambda rows: rows == ["first", "second"])
        terminal.show("more")
        terminal.write(b" ends\n")
        screen.wait_for(lambda rows: rows == ["first", "second ends", "more"])
        terminal.show("")
        screen.wait_for(lambda rows: rows == ["first", "second ends", ""])
        terminal.show("last")
        assert terminal.close() == 0
        screen.wait_for(lambda rows: rows == ["first", "second ends", "last", ""])


def test_a_paused_terminal_gets_the_newest_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader has not read yet is one line, not one for each change; and the end does not wait for it."""
    monkeypatch.setattr("satrap.launch.terminal._STALL_SECONDS", 0.1)
    ours, theirs = os.openpty()
    os.set_blocking(theirs, False)
    with suppress(BlockingIOError):
        while os.write(theirs, b"x" * 1024):  # until it is full
            pass
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        terminal = Terminal(stream)
        for number in range(10_000):
            terminal.show(f"line {number}")
        assert terminal.close() == 0
        received = b""
        while not received.endswith(b"line 9999\r\n"):
            received += os.read(ours, 1 << 16)
    assert received.count(b"line") < 10, "a terminal that refuses a kilobyte may still accept some lines"
    os.close(ours)
