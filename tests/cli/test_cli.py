"""The command line: `satrap doctor` reports real measurements, and misuse is a short error."""

import importlib.metadata
import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from child_processes import SATRAP, child_process, silent_server
from satrap import __version__, _core
from satrap.cli.doctor import _slow_threads
from satrap.cli.main import main
from satrap.server.migration.coordinator import MigrationResult


def test_the_report_of_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
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


def gpu_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["doctor", "--no-run"]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if re.match(r"(GPU|home|Triton|NCCL)\b", line)]


def test_the_report_without_a_gpu_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for cuda, built in ((None, "is built without CUDA"), ("12.8", "is built for CUDA 12.8")):
        monkeypatch.setattr("torch.version.cuda", cuda)
        assert gpu_lines(capsys) == [f"GPU          none found; torch {torch.__version__} {built}"]


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_report_of_gpus(
    is_complete: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda number: ((number + 1) << 30, 80 << 30))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: f"Model {number}")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: is_complete)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    versions = {"triton": "3.7.1"} if is_complete else {}
    monkeypatch.setattr("satrap.cli.doctor._version", lambda package: versions.get(package, "not installed"))
    monkeypatch.setitem(versions, "torch", torch.__version__)
    monkeypatch.setattr("satrap.cli.doctor._available", lambda: 3 << 30)
    assert gpu_lines(capsys) == [
        "GPU          cuda:0 Model 0, 80.0 GiB of memory, 1.0 GiB free",
        "GPU          cuda:1 Model 1, 80.0 GiB of memory, 2.0 GiB free",
        "home         3.0 GiB here for rows that do not fit on a GPU, with device_memory=",
        "Triton       3.7.1"
        if is_complete
        else "Triton       not installed; rows on a GPU need it: pip install triton",
        "NCCL         2.27.5"
        if is_complete
        else "NCCL         not in this torch; several trainers with a GPU each need it",
    ]


def test_a_busy_machine_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load in (9.0, 2.0):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 1.0, 1.0))
        assert main(["doctor", "--no-run"]) == 0
        assert ("load         9.0 on 2 cores: figures are those of a busy" in capsys.readouterr().out) is (load > 2)


def test_torchs_threads_that_take_longer_than_one_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    clock = iter([0.0, 3.0, 3.0, 5.0, 0.0, 1.0, 1.0, 3.0])
    monkeypatch.setattr("satrap.cli.doctor._STEPS", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    (line,) = _slow_threads()
    assert line.endswith(
        "4 threads of torch took 1.5 times as long as one for a dense layer: OMP_NUM_THREADS=1 may be faster"
    )
    assert list(_slow_threads()) == [] and asked == [4, 1, 4, 4, 1, 4]


def test_the_stages_of_the_short_run_add_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("satrap.cli.doctor._STEPS", 3)
    assert main(["doctor", "--dim", "4"]) == 0
    text = capsys.readouterr().out
    samples = float(re.search(r"short run +([\d,]+) samples/s", text).group(1).replace(",", ""))  # type: ignore[union-attr]
    stages = {name.strip(): float(ms) for name, ms in re.findall(r"^  (\D+?) +([\d.]+) ms a step", text, re.MULTILINE)}
    assert set(stages) == {"read", "lookup", "forward and backward", "update", "dense optimizer"}
    assert list(stages.values()) == sorted(stages.values(), reverse=True)
    assert sum(stages.values()) <= 1.02 * 4096 / samples * 1000
    assert text.rstrip().endswith(f"bottleneck   {next(iter(stages))}")


def test_the_processes_of_a_role_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts: list[Any] = []
    (script := tmp_path / "job.py").touch()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr("satrap.cli.run_command.run", lambda script, *_: scripts.insert(0, script))
    for workers, threads in (("0", 12), ("2", 6), ("50", 1)):
        options = ["--servers", "4", "--workers", workers, "--trainers", "3", "--folder", str(tmp_path / workers)]
        main(["run", str(script), *options])
        assert scripts[0].threads == {"trainer": 4, "worker": threads, "server": 3}


def test_the_command_is_installed() -> None:
    command = os.path.join(os.path.dirname(sys.executable), "satrap")
    done = subprocess.run([command, "doctor", "--no-run"], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.startswith("python ")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"satrap {__version__}\n"


@pytest.mark.parametrize(
    "command", ["run", "scale", "status", "server", "worker", "migrate", "keys", "doctor", "import"]
)
def test_every_option_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    text = capsys.readouterr().out
    options = re.findall(r"^  (?:-h, )?(--[a-z-]+.*|[A-Z]+ .*)$(?:\n {10,}(.*))?", text, re.MULTILINE)
    assert done.value.code == 0 and "options:" in text and options
    for option, next_line in options:
        assert next_line or re.search(r"\S {2,}\S", option), f"{option} has no help"


def test_the_page_of_commands_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / "docs" / "cli.md"
    monkeypatch.setenv("COLUMNS", "0")  # the page sets it
    assert runpy.run_path(str(path.with_suffix(".py")))["page"]() == path.read_text(), "run docs/cli.py"


@pytest.mark.parametrize("arguments", [[], ["cure"], ["doctor", "--dim", "x"]])
def test_misuse_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert "usage: satrap" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        ("scale --severs 2", "satrap scale", "unrecognized arguments: --severs; did you mean --servers?"),
        (
            "run x.py --server 2",
            "satrap run SCRIPT",
            "--server; did you mean --servers?; put the script's own",
        ),
        ("run x.py --epochs=3", "satrap run SCRIPT", "--epochs=3; put the script's own arguments after --"),
        ("train a.csv --lr 2", "satrap train FILES", "unrecognized arguments: --lr\n"),
        ("status extra", "satrap status", "unrecognized arguments: extra"),
        ("deploy render a --ouput b", "satrap deploy render JOB", "--ouput; did you mean --output?"),
    ],
)
def test_an_unknown_option_names_the_nearest(
    arguments: str, usage: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the usage of its command."""
    with pytest.raises(SystemExit):
        main(arguments.split())
    text = capsys.readouterr().err
    assert text.startswith(f"usage: {usage}") and message in text


@pytest.mark.parametrize(
    ("typed", "expected"), [("servr", "the nearest known one is 'server'"), ("x", "known are 'train', 'run'")]
)
def test_an_unknown_command_names_the_known_ones(typed: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([typed])
    assert f"there is no command {typed!r}; {expected}" in capsys.readouterr().err


def test_a_bad_dim_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dim", "0"]) == 1
    assert capsys.readouterr().err.startswith("satrap: ")
    assert main(["doctor", "--dim", "65536"]) == 1
    assert "the short run needs about" in capsys.readouterr().err


@pytest.mark.parametrize("twice", ["--from", "--to"])
def test_a_repeated_option_of_migrate_keeps_all_addresses(twice: str, capsys: pytest.CaptureFixture[str]) -> None:
    address = "tcp://127.0.0.1:1"
    assert main(["migrate", "--from", address, "--to", address, twice, address]) == 1
    assert f"addresses is {[address, address]}; expected each server once" in capsys.readouterr().err


def test_the_size_of_a_small_migration_is_not_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = MigrationResult(170, 52, 3328, 0.5, 0.01, 2)
    monkeypatch.setattr("satrap.server.migration.coordinator.Migration.run", lambda _: result)
    assert main(["migrate", "--from", "tcp://127.0.0.1:1", "--to", "tcp://127.0.0.1:1"]) == 0
    assert "migrated 170 buckets (52 rows, 3.2 KiB) in 0.5 s" in capsys.readouterr().out


def test_an_interrupted_migration_tells_how_to_finish_it() -> None:
    with ExitStack() as stack:
        listener, address = stack.enter_context(silent_server())
        command = [str(SATRAP), "migrate", "--from", address, "--to", address]
        child = stack.enter_context(child_process(command, stderr=subprocess.PIPE, text=True))
        listener.settimeout(60)
        listener.accept()[0].close()
        child.send_signal(signal.SIGINT)
        hint = "run the same command again to finish the migration"
        assert child.communicate(timeout=300)[1] == f"satrap: interrupted; {hint}\n"
        assert child.returncode == 130


@pytest.mark.parametrize(("own", "expected"), [(False, r"\S+Z INFO .* satrap\.train: news\n"), (True, "mine: news\n")])
def test_a_script_that_configures_logging_gets_the_log_itself(own: bool, expected: str) -> None:
    configure = "logging.basicConfig(format='mine: %(message)s'); " if own else ""
    code = "import logging; from satrap.cli.main import _show_log; _show_log('text'); "
    code += f"{configure}logging.getLogger('satrap.train').info('news')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "" and re.fullmatch(expected, done.stderr)


def test_a_closed_output_pipe_is_not_an_error_message() -> None:
    command = [str(SATRAP), "doctor", "--no-run"]
    with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.stdout.close()
        assert child.wait(300) == 1
        assert child.stderr.read() == ""


SIGNAL_RACE = """
import os, signal, threading
from satrap.cli.main import _StopSignals

wait_for_stop, permit = _StopSignals(), threading.Semaphore(0)

def send_signals():
    for _ in range(3000):
        permit.acquire()
        os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=send_signals, daemon=True).start()
for _ in range(3000):
    permit.release()
    wait_for_stop()
"""


def test_a_signal_just_before_the_wait_ends_it() -> None:
    """Some of the 3000 signals arrive at that moment: with an Event, none of three trials finished."""
    subprocess.run([sys.executable, "-c", SIGNAL_RACE], check=True, timeout=240)


def test_a_run_with_too_few_file_descriptors_is_refused(tmp_path: Path) -> None:
    """Before it starts a process, and it names the limit; one more than is needed, and it runs."""
    (script := tmp_path / "script.py").write_text("print('it runs')")

    def run(limit: int) -> subprocess.CompletedProcess[str]:
        command = [str(SATRAP), "run", str(script), "--servers", "3", "--folder", str(tmp_path / "run")]
        limited = ["bash", "-c", f'ulimit -n {limit}; exec "$@"', "bash", *command, "--memory", str(tmp_path)]
        return subprocess.run(limited, capture_output=True, text=True, timeout=300)

    refused = run(24)
    words = r"satrap: the pipes of 4 processes need 26 file descriptors besides the (\d+) that this process has open; "
    found = re.match(
        words + r"its limit is 24 \(hard limit: 24\): raise the hard limit to (\d+) or more", refused.stderr
    )
    assert refused.returncode == 1 and found is not None, refused.stderr
    assert not (tmp_path / "run").exists()
    allowed = run(int(found[2]))
    assert allowed.returncode == 0 and "it runs" in allowed.stdout, allowed.stderr


def test_the_reuse_of_a_users_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = [number % 7 for number in range(400)]
    lines = ["page,user", *(f"{page},{number}" for number, page in enumerate(pages))]
    (path := tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    command = ["doctor", str(path), "--ids", "page", "user", "--batch-size", "14"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"^page +7 +0\.14 +100 % +100 % +100 % +100 % +- *$", out, re.MULTILINE), out
    assert re.search(r"^user +392 +0\.00 +0 % +0 % +0 % +- +0 % *$", out, re.MULTILINE), out
    assert "no id is in more than 14.3 % of the samples: by the bound, rows permit 2.6 times" in out
    path.write_text("\n".join(["page,user", *(f"0,{number}" for number in range(400))]) + "\n")
    assert main(command) == 0
    assert "'page' has an id in 100 % of the samples" in capsys.readouterr().out
    path.write_text(f"{path.read_text()}0,1,2\n")
    assert main(command) == 1
    assert "allow more with --max-bad-rows" in capsys.readouterr().err
    assert main([*command, "--max-bad-rows", "1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ids", "page"], "without FILES"),
        (["log.csv", "--ids", "page"], "found 2 rows, 0 batches of 4,096; expected at least 17 batches: use more data"),
        (
            ["hits.csv", "--ids", "page"],
            "found 40 rows, 0 batches of 4,096; expected at least 17 batches: use "
            "--batch-size 2 or smaller, or more data",
        ),
        (["hits.csv", "--ids", "user", "--batch-size", "2"], "found no ids in user; name other columns"),
        (["hits.csv", "--ids", "page", "--batches", "16"], "--batches is 16; expected an integer from 17"),
        (["hits.csv"], "hits.csv has the columns page, user; name the columns of ids, such as --ids user item"),
        (["hits.parquet"], "hits.parquet has the columns page, user; name the columns of ids"),
        (
            ["bare.csv"],
            "fix the row, or allow more with --max-bad-rows; without --ids, FILES are Criteo's click logs",
        ),
        (["none.csv"], "none.csv: there is no such file"),
        (["log.csv", "--ids", "pages"], "pages"),
        (["none.csv", "--ids", "page"], "none.csv"),
    ],
)
def test_misuse_of_the_report_on_files(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log.csv").write_text("page\n1\n2\n")
    (tmp_path / "hits.csv").write_text("page,user\n" + "1,\n" * 40)
    (tmp_path / "bare.csv").write_text("1,2\n" * 40)
    parquet.write_table(pa.table({"page": [1], "user": [2]}), "hits.parquet")
    assert main(["doctor", *arguments]) == 1
    assert complaint in capsys.readouterr().err
