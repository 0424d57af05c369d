"""The command line of `python -m benchmarks.gpu`: all parts in their order, within some minutes.

A part gets a share of the time that is left when it starts, and is measured by separate processes (`child.py`). A
process that crashes or hangs loses one item: another process continues with the next. After a kernel that is wrong,
nothing else is measured, since its figures would be those of a wrong kernel.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.child import Job
from benchmarks.gpu.results import Results
from benchmarks.harness.machine import ROOT

GRACE_SECONDS = 3.0
"""After its end, until a process is killed; and after the last part, for the summary."""
TAIL_BYTES = 8000
PARTS = {
    "environment": 0.4,
    "kernels": 0.4,
    "tests": 0.3,
    "bandwidth": 0.25,
    "steps": 0.65,
    "profile": 0.4,
    "tiers": 1.0,
}
"""The share of the time that is left that a part may take."""
MOST_PROCESSES = 6
"""Beside one another, for the kernels, since one thread compiles a kernel for a second."""
GPU_TESTS = ("tests/device/test_triton.py", "tests/train/test_gpu.py")
CPU_TESTS = ("tests/device/test_device_worker.py", "tests/device/test_tiers.py", "tests/device/test_magnitude.py")
"""Tests of the dry run: some of those that test_gpu.py imports."""
PYTEST = (
    "import benchmarks.gpu.child as child, pytest, sys; child.end_with_parent(); sys.exit(pytest.main(sys.argv[1:]))"
)
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
TESTED = re.compile(rf"({'|'.join(OUTCOMES)})\b")


class Run:
    """One run of the parts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.results = Results(options.out)
        self.began = time.monotonic()
        self.end = self.began + 60 * options.minutes - GRACE_SECONDS
        self._stopped = threading.Event()
        self._processes: set[subprocess.Popen[Any]] = set()

    def measure(self) -> int:
        """Measure all parts, and return the exit status: 1 if anything failed."""
        for part in self.options.parts:
            left = self.end - time.monotonic()
            until = time.monotonic() + PARTS[part] * left
            if left <= 0:
                self.results.add(part, "all", {"status": "left out", "error": "the minutes are over"})
            elif part == "tests":
                self._test(until)
            else:
                self._measure_part(Job(part=part, until=until, out=self.options.out, kernels=self.options.kernels))
            note = f"{time.monotonic() - self.began:.0f} s of {60 * self.options.minutes:.0f} s, after {part}"
            if part == "kernels" and self.results.failed(part) and not self.options.keep_going:
                names = ", ".join(record["item"] for record in self.results.failed(part))
                self.results.summarise(f"{note}: stopped, since a kernel failed: {names}")
                return 1
            self.results.summarise(note)
        return int(bool(self.results.failed()))

    def _measure_part(self, job: Job) -> None:
        """Measure the items of a part. Kernels, which are not timed, are divided over several processes."""
        every = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)) if job.part == "kernels" else 1
        threads = [
            threading.Thread(target=self._measure_items, args=(replace(job, first=first, every=every),))
            for first in range(every)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._stopped.clear()

    def _measure_items(self, job: Job) -> None:
        """Measure some items, in as many processes as it takes: the next one continues after an item that crashed."""
        while not self._stopped.is_set():
            number, num_items = self._run_child(job)
            job = job if number is None else replace(job, first=number + job.every)
            if num_items is None or job.first >= num_items:
                return
            if job.seconds_left() <= 0:
                num_left = len(range(job.first, num_items, job.every))
                record = {"status": "left out", "error": "the part's time is over"}
                self.results.add(job.part, f"the last {num_left} items", record)
                return

    def _run_child(self, job: Job) -> tuple[int | None, int | None]:
        """Run one process. Return the number of the last item that it began, and how many items there are."""
        begun: tuple[int | None, str] = (None, "start")
        num_items, has_ended = None, True
        command = [sys.executable, "-m", "benchmarks.gpu.child", job.to_json()]
        with tempfile.TemporaryFile() as errors:
            process = self._start(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            killer = threading.Timer(max(0.0, job.seconds_left()) + GRACE_SECONDS, _kill, [process])
            killer.start()
            assert process.stdout is not None
            for line in process.stdout:
                told = json.loads(line)
                if "items" in told:
                    num_items = told["items"]
                elif "begins" in told:
                    begun, has_ended = (told["begins"], told["item"]), False
                else:
                    self.results.add(job.part, begun[1], told["record"])
                    has_ended = True
                    if job.part == "kernels" and told["record"]["status"] == "failed" and not self.options.keep_going:
                        self._stop()
            status = self._wait(process)
            killer.cancel()
            tail = _tail(errors)
        if status != 0 and not self._stopped.is_set():
            if not has_ended or num_items is None:
                is_late = job.seconds_left() <= 0
                last = (tail.strip().splitlines() or [""])[-1]
                what = "cut by the part's end" if is_late else f"the process ended with status {status}: {last[:300]}"
                record = {"status": "cut" if is_late else "crashed", "error": what, "stderr": tail}
                self.results.add(job.part, begun[1], record)
            self.results.append("errors.txt", f"== {job.part}, {begun[1]}, status {status}\n{tail}\n")
        return begun[0], num_items

    def _start(self, command: list[str], **how: Any) -> "subprocess.Popen[Any]":
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True, **how)
        self._processes.add(process)
        return process

    def _wait(self, process: "subprocess.Popen[Any]") -> int:
        """Return the status of a process that has closed its output."""
        status = process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._processes.discard(process)
        return status

    def _stop(self) -> None:
        """End the part: after a kernel that is wrong."""
        self._stopped.set()
        for process in list(self._processes):
            _kill(process)

    def close(self) -> None:
        """Kill what still runs, and write the summary."""
        self._stop()
        self.results.summarise("ended from outside")

    def _test(self, until: float) -> None:
        """Run the device tests until they or their time ends."""
        probe = "import hypothesis, pytest, zmq, torch; print(torch.cuda.is_available())"
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
        if done.returncode:
            note = f"the tests need hypothesis, pytest and zmq: {done.stderr.strip().splitlines()[-1]}"
            self.results.add("tests", "device tests", {"status": "left out", "error": note})
            return
        has_gpu = "True" in done.stdout
        start = time.monotonic()
        # Warnings of other versions of libraries, and other plugins of pytest, must not fail the tests.
        process = self._start(
            [sys.executable, "-c", PYTEST, "-v", "-W", "default", "--tb=short", *_test_options(has_gpu)],
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = max(0.1, until - start)
        cut = threading.Timer(seconds, process.send_signal, [signal.SIGINT])
        killer = threading.Timer(seconds + GRACE_SECONDS, _kill, [process])
        cut.start()
        killer.start()
        counts, failed, line = dict.fromkeys(OUTCOMES, 0), [], ""
        assert process.stdout is not None
        with (self.options.out / "tests.txt").open("w") as output:
            for line in process.stdout:
                output.write(line)
                output.flush()
                if "::" in line and "%]" in line and (outcome := TESTED.search(line)):
                    counts[outcome[1]] += 1
                    if outcome[1] in ("FAILED", "ERROR"):
                        failed.append(line.strip())
        status, was_cut = self._wait(process), not cut.is_alive()
        cut.cancel()
        killer.cancel()
        record: dict[str, Any] = {"status": "cut" if was_cut else "ok", "seconds": round(time.monotonic() - start, 1)}
        record["counts"] = " ".join(f"{number} {name.lower()}" for name, number in counts.items() if number)
        if failed or (status not in (0, 5) and not was_cut):
            shown = "; ".join(failed[:3]) or line.strip()
            record |= {
                "status": "failed",
                "error": f"pytest ended with status {status}: {shown}",
                "failed": failed[:50],
            }
        self.results.add("tests", "device tests", record)


def _kill(process: "subprocess.Popen[Any]") -> None:
    """Kill a process with those that it started, which may have its output, so that reading that ends."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _test_options(has_gpu: bool) -> list[str]:
    """Return the options and the files of pytest; several processes, if it can have them, use one GPU."""
    if not has_gpu:
        return ["-p", "no:cacheprovider", *CPU_TESTS]
    several = ["-p", "xdist.plugin", "-n", str(max(1, min(4, (os.cpu_count() or 1) // 4)))]
    return ["-p", "no:cacheprovider", *(several if find_spec("xdist") else []), *GPU_TESTS]


def _tail(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return str(file.read().decode(errors="replace"))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="how long the run may take (default 8)")
    parser.add_argument("--out", type=lambda path: Path(path).absolute(), required=True, metavar="FOLDER")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all, in order")
    parser.add_argument("--kernels", metavar="MODULE", help="the module of the kernels (default: the device's)")
    parser.add_argument("--keep-going", action="store_true", help="go on after a kernel that is wrong")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, found {options.minutes}")
    options.parts = [part for part in PARTS if part in options.parts]
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and print the summary."""
    run = Run(parse(arguments))

    def end(*_: object) -> None:
        run.close()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    status = run.measure()
    print((run.options.out / "summary.txt").read_text(), end="")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
