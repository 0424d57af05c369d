"""Checkpoints in an object store under kills at random moments of servers and the trainer, in uploads and restores."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from checkpoint_job import Job, same, uninterrupted
from cluster import ANYWHERE, ServerProcess, server_processes
from object_stores import BUCKET, S3
from waiting import DEADLINE_SECONDS, wait_until

ROOT = f"s3://{BUCKET}"
SCRIPT = Path(__file__).parents[1] / "support/checkpoint_job.py"
STEPS, KILLS = 8, 4


class Trainer:
    """The job of checkpoint_job.py as a process, which resumes. `events` counts its lines, and what the store does."""

    def __init__(self, url: str, servers: list[ServerProcess], *how: str) -> None:
        rows = json.dumps({"servers": [each.address for each in servers]})
        command = [sys.executable, str(SCRIPT), url, str(STEPS), rows, *how]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._out: list[str] = []
        self._readers = [threading.Thread(target=self._read, args=(pipe,)) for pipe in ("stdout", "stderr")]
        for each in self._readers:
            each.start()

    def _read(self, pipe: str) -> None:
        self._out.extend(getattr(self.process, pipe))

    def wait_for_steps(self, number: int) -> None:
        """Waits until it has taken so many steps, or has ended."""
        wait_until(
            lambda: sum(line.strip().isdecimal() for line in self._out) >= number or self.process.poll() is not None,
            otherwise=lambda: "".join(self._out),
        )

    def end(self, seconds: float) -> int | None:
        """Returns the exit status, or None if the trainer still runs after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode

    def close(self) -> str:
        self.process.kill()
        self.process.wait()
        for each in self._readers:
            each.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return "".join(self._out)


def kill_one(rng: random.Random, trainer: Trainer, servers: list[ServerProcess]) -> str:
    """Kills the trainer or a server, which restarts with or without its rows; returns which."""
    victim = rng.choice(["trainer", "server", "server"])
    if victim == "trainer":
        trainer.process.kill()
        return victim
    server = rng.choice(servers)
    server.kill()
    if is_emptied := rng.random() < 0.5:
        server.shared.unlink(missing_ok=True)
    server.restart()
    return f"server {servers.index(server)}" + " with its rows" * is_emptied


@pytest.mark.draw(1)
@pytest.mark.parametrize("how", [(), ("beside",)], ids=["waiting", "beside"])
def test_kills_at_any_moment_lose_no_checkpoint(s3: S3, tmp_path: Path, seed: int, how: tuple[str, ...]) -> None:
    """A killed trainer, or one that gives up because a server lost its rows, is started again, until the run ends."""
    rng, run = random.Random(seed), f"kills-{seed}-{len(how)}/run"
    expected = uninterrupted(tmp_path, STEPS)
    log: list[str] = []
    kills = 0
    with server_processes(tmp_path, 2, ANYWHERE, ["--checkpoints", ROOT]) as servers:
        for _ in range(4 * KILLS):
            trainer = Trainer(f"{ROOT}/{run}", servers, *how)
            try:
                trainer.wait_for_steps(rng.randint(0, 2))  # it restores before the first
                while kills < KILLS and (status := trainer.end(rng.random() * 2)) is None:
                    log.append(kill_one(rng, trainer, servers))
                    kills += 1
                status = trainer.end(DEADLINE_SECONDS)
                assert status is not None, f"the trainer hangs after {log}"
            finally:
                out = trainer.close()
            log.append(f"exit {status}")
            if status == 0:
                break
            assert status == -9 or (status == 1 and "satrap.errors." in out), (log, out[-3000:])
        assert status == 0 and kills > 0, log
    print(log)
    alone = Job(f"{ROOT}/{run}", STEPS)
    assert alone.run.resume() and alone.embeddings.step == STEPS
    same(alone.state(), expected)
    newest = max(key.split("/")[2] for key in s3.sizes(f"{run}/") if key.endswith("/checkpoint.json"))
    assert newest.endswith(f"-step-{STEPS}") or f"-step-{STEPS}-" in newest
