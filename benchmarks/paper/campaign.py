"""A campaign of faults with a seed: what the project survives, counted.

`kills` trains a job under `satrap run` with two servers and two trainers, kills one of its processes at random
moments, and compares the end with that of a run without faults, bit for bit. `packets` repeats the test in which a
network loses, delays, doubles and reorders packets, with other seeds. `bytes` flips bits of saved tables, one at a
time; the table must be refused or unchanged.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import satrap
from benchmarks.harness.machine import ROOT
from benchmarks.paper.cell import CannotRunError, Cell, Done, Figures
from satrap.errors import SatrapError
from satrap.table.store import Store

ROLES = ("server", "trainer")
STEPS = 400
RUN_SECONDS = 600.0


def cells(*, full: bool) -> list[Cell]:
    """Return the campaigns; together two minutes, or with full an hour."""
    seconds = 1800 if full else 70
    return [
        Cell("campaign/kills", seconds, "measured", partial(kills, seconds, 1)),
        Cell("campaign/packets", seconds / 2, "measured", partial(packets, seconds / 2, 2)),
        Cell("campaign/bytes", 10, "measured", partial(flips, 2000 if full else 200, 3)),
    ]


@contextmanager
def run_of(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job; it is ended with the context."""
    folder.mkdir()
    (folder / "memory").mkdir()
    script = Path(__file__).with_name("campaign_job.py")
    command = [str(Path(sys.executable).with_name("satrap")), "run", str(script), "--folder", str(folder / "run")]
    command += ["--memory", str(folder / "memory"), "--servers", "2", "--trainers", "2", "--restarts", "1000", "--"]
    log = (folder / "log").open("wb")
    with log, subprocess.Popen([*command, str(folder), str(STEPS)], stdout=log, stderr=log, cwd=ROOT) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def processes_of(run: int) -> list[tuple[str, int]]:
    """Return role and process id of the servers and trainers of a run."""
    processes = []
    for pid in Path(f"/proc/{run}/task/{run}/children").read_text().split():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):  # it has just exited
            continue
        processes += [(role, int(pid)) for role in ROLES if role in words]
    return processes


def kills(seconds: float, seed: int, done: Done) -> Figures:
    """Kill processes of run after run until the time is up; the last run is finished without further kills."""
    draw, deadline = random.Random(seed), time.monotonic() + seconds
    count, ends, num_runs = dict.fromkeys(ROLES, 0), [], 0
    with tempfile.TemporaryDirectory() as temporary:
        expected = _end(Path(temporary, "calm"), None, deadline, draw, count)
        while num_runs == 0 or time.monotonic() < deadline:
            num_runs += 1
            ends.append(_end(Path(temporary, f"run-{num_runs}"), 2.0, deadline, draw, count))
    same = [all(np.array_equal(expected[name], end[name]) for name in expected) for end in ends]
    return {"kills": count, "runs": num_runs, "same_bits": sum(same), "seed": seed, "steps": STEPS}


def _end(
    folder: Path, pause: float | None, deadline: float, draw: random.Random, count: dict[str, int]
) -> dict[str, Any]:
    """Return the result of a run. pause: mean seconds between kills; None: no kills."""
    limit = time.monotonic() + RUN_SECONDS + max(0.0, deadline - time.monotonic())
    with run_of(folder) as run:
        due = time.monotonic() + (draw.expovariate(1 / pause) if pause else 0.0)
        while run.poll() is None:
            if time.monotonic() > limit:
                raise RuntimeError(f"the run did not end in time; its log: {(folder / 'log').read_text()[-2000:]}")
            if pause and due < time.monotonic() < deadline:
                running = processes_of(run.pid)
                if running and (folder / "run").exists():
                    role, pid = draw.choice(sorted(running))
                    os.kill(pid, signal.SIGKILL)
                    count[role] += 1
                due = time.monotonic() + draw.expovariate(1 / pause)
            time.sleep(0.02)
        if run.returncode:
            raise RuntimeError(f"the run ended with status {run.returncode}: {(folder / 'log').read_text()[-2000:]}")
    with np.load(folder / "end.npz") as end:
        return dict(end)


def packets(seconds: float, seed: int, done: Done) -> Figures:
    """Run the tests of faulty networks with one seed after another."""
    deadline, passed, skipped = time.monotonic() + seconds, 0, 0
    test = "tests/faults/test_faults_network.py::test_a_network_that_loses_delays_and_duplicates"
    while passed == 0 or time.monotonic() < deadline:
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "--no-header", "--seed", str(seed + passed), test]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"seed {seed + passed}: {result.stdout[-3000:]}")
        skipped += "1 skipped" in result.stdout
        if skipped:
            raise CannotRunError("emulated networks need root and the command ip")
        passed += 1
    return {"runs": passed, "first_seed": seed, "steps": 4}


def flips(count: int, seed: int, done: Done) -> Figures:
    """Flip one bit of a saved table at a time, and load it."""
    draw, refused = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        store = Store(satrap.Table("ids", dim=8, optimizer=satrap.Adagrad()), seed=1)
        store.lookup(np.arange(2000, dtype=np.uint64))
        store.save(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size)
        for _ in range(count):
            path = draw.choice(files)
            at, before = draw.randrange(path.stat().st_size), path.read_bytes()
            path.write_bytes(before[:at] + bytes([before[at] ^ (1 << draw.randrange(8))]) + before[at + 1 :])
            try:
                loaded = Store.load(folder)
                if loaded.stats() != store.stats():
                    raise RuntimeError(f"{path.name}, byte {at}: the flipped bit changed the table and was not refused")
            except SatrapError:
                refused += 1
            path.write_bytes(before)
    return {"flips": count, "refused": refused, "seed": seed}
