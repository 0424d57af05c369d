"""Commands that take seconds say on a terminal how far they are, and leave no trace of it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from child_processes import SATRAP
from pty_screen import PtyScreen, pty_screen
from satrap.cli.main import main
from satrap.planning import calibration
from waiting import DEADLINE_SECONDS


def run_on(screen: PtyScreen, *arguments: str, **environment: str) -> str:
    """Run a command whose standard error is the terminal; return its standard output."""
    done = subprocess.run(
        [str(SATRAP), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=screen.stream,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
        env=os.environ | {"TERM": "xterm"} | environment,
    )
    return done.stdout


def shown(screen: PtyScreen) -> list[str]:
    """Return what was drawn, one after the other. In the end nothing is left."""
    screen.wait_for(lambda rows: rows == [""])
    texts = re.split(r"\r|\x1b\[K", screen.received.decode())
    return [text for text in texts if text]


def test_doctor_times_a_run() -> None:
    with pty_screen(60) as screen:
        assert "bottleneck" in run_on(screen, "doctor", "--dim", "4")
        drawn = shown(screen)
    assert drawn[0] == "░" * 14 + "   0% | timing a short training run"
    shares = [int(re.fullmatch(r"█*░* +(\d+)% \| timing a short training run", text)[1]) for text in drawn]  # type: ignore[index]
    assert shares == sorted(shares) and shares[-1] < 100


def test_doctor_reads_files_on_a_narrow_terminal(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    rows = "".join(f"{number % 7},{number % 3}\n" for number in range(1000))
    path.write_text(f"page,user\n{rows}")
    with pty_screen(20, "ascii") as screen:
        options = ("--ids", "page", "user", "--batch-size", "10", "--batches", "100")
        environment = {"PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
        assert "Share of a batch" in run_on(screen, "doctor", str(path), *options, **environment)
        assert shown(screen)[0] == "....   0%"


def test_a_terminal_that_cannot_erase_gets_nothing(tmp_path: Path) -> None:
    with pty_screen(60) as screen:
        run_on(screen, "doctor", "--dim", "4", TERM="dumb")
    assert screen.received == b""


@pytest.mark.cluster  # the measurements start processes
def test_calibrate_names_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With short measurements of small batches."""
    monkeypatch.setattr(calibration, "_SECONDS", 0.02)
    monkeypatch.setattr(calibration, "_SHAPES", ((16, 4), (256, 4), (256, 32)))
    with pty_screen(200) as screen, os.fdopen(os.dup(screen.stream), "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        assert main(["plan", "--calibrate", "--coefficients", str(tmp_path / "costs.toml")]) == 0
        stream.flush()
        expected = f"satrap plan: {tmp_path / 'costs.toml'} has the coefficients of this machine"
        screen.wait_for(lambda rows: rows == [expected, ""])
    texts = re.findall(r" +(\d+)% \| measuring ([a-z -]+)", screen.received.decode())
    assert [int(share) for share, _ in texts] == [0, 20, 40, 60, 80]
