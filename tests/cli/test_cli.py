"""`satrap doctor`, as a user calls it: its numbers are of this machine, and of a run that took place."""

import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from satrap import __version__, _core
from satrap.cli.main import main


def test_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-run"]) == 0
    text = capsys.readouterr().out
    for package in ("numpy", "torch", "pyarrow"):
        assert re.search(rf"^{package} +{re.escape(importlib.metadata.version(package))}$", text, re.MULTILINE)
    assert f"{_core.simd_paths()[0]} (this machine has" in text
    assert f"cores        {len(os.sched_getaffinity(0))} for this process" in text
    assert f"threads      torch {torch.get_num_threads()}, tables " in text
    total, available = (float(x) for x in re.search(r"memory +([\d.]+) GiB, ([\d.]+) GiB avail", text).groups())  # type: ignore[union-attr]
    assert 0 < available <= total
    assert "short run" not in text


def test_the_short_run_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dim", "4"]) == 0
    text = capsys.readouterr().out
    samples = float(re.search(r"short run +([\d,]+) samples/s", text).group(1).replace(",", ""))  # type: ignore[union-attr]
    stages = {name.strip(): float(ms) for name, ms in re.findall(r"^  (\D+?) +([\d.]+) ms a step", text, re.MULTILINE)}
    assert set(stages) == {"read", "lookup", "forward and backward", "update", "dense optimizer"}
    assert list(stages.values()) == sorted(stages.values(), reverse=True)
    assert sum(stages.values()) <= 1.02 * 4096 / samples * 1000
    assert text.rstrip().endswith(f"bounded by {next(iter(stages))}")


def test_cores_are_shared_by_the_processes_of_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    (script := tmp_path / "job.py").touch()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr("satrap.launch.run_loop.run", lambda script, *_: made.insert(0, script))
    for workers, threads in (("0", 12), ("2", 6), ("50", 1)):
        given = ["--servers", "4", "--workers", workers, "--trainers", "3", "--folder", str(tmp_path / workers)]
        main(["run", str(script), *given])
        found = made[0]
        assert (found.trainer_threads, found.worker_threads, found.server_threads) == (4, threads, 3)


def test_the_command_is_installed() -> None:
    command = os.path.join(os.path.dirname(sys.executable), "satrap")
    found = subprocess.run([command, "doctor", "--no-run"], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.startswith("python ")
    found = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout == f"satrap {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["cure"], ["doctor", "--dim", "x"]])
def test_misuse_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert "usage: satrap" in capsys.readouterr().err


def test_a_bad_dim_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dim", "0"]) == 1
    assert capsys.readouterr().err.startswith("satrap: ")
    assert main(["doctor", "--dim", "65536"]) == 1
    assert "the short run would take some" in capsys.readouterr().err


@pytest.mark.parametrize("twice", ["--now", "--wanted"])
def test_no_address_of_a_move_is_lost_where_the_option_is_repeated(
    twice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "tcp://127.0.0.1:1"
    assert main(["move", "--now", address, "--wanted", address, twice, address]) == 1
    assert f"addresses is {[address, address]}; expected each server once" in capsys.readouterr().err


def test_a_mover_that_is_interrupted_says_what_to_do() -> None:
    command = os.path.join(os.path.dirname(sys.executable), "satrap")
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # who listens, and says nothing
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run
        child = subprocess.Popen(
            [command, "move", "--now", address, "--wanted", address], stderr=subprocess.PIPE, text=True
        )
        signal.signal(signal.SIGINT, before)
        assert child.stderr is not None
        nobody.settimeout(60)
        nobody.accept()[0].close()
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=300)[1] == "satrap: interrupted; run again, it ends what it began\n"
        assert child.returncode == 130


def test_a_reader_that_has_seen_enough() -> None:
    command = [os.path.join(os.path.dirname(sys.executable), "satrap"), "doctor", "--no-run"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.wait(300) == 1
    assert child.stderr.read() == ""
    child.stderr.close()


ENDED = """
import os, signal, threading
from satrap.cli.main import _told_to_end

wait_for_end, begin = _told_to_end(), threading.Semaphore(0)

def tell():
    for _ in range(3000):
        begin.acquire()
        os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=tell, daemon=True).start()
for _ in range(3000):
    begin.release()
    wait_for_end()
"""


def test_a_signal_that_comes_before_its_waiter_sleeps_wakes_it() -> None:
    """Some of the 3000 come at that moment: with an Event none of three tries came through."""
    subprocess.run([sys.executable, "-c", ENDED], check=True, timeout=240)
