"""Trainer processes for tests, which import torch once, since that takes longer than most jobs, and run one job
after another. They exit cleanly after the last test; a test that fails kills all of them, and the next one starts
new ones."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster import running_servers
from loop import batches, job, join, loss_of, rows
from satrap import Embeddings
from waiting import DEADLINE_SECONDS

CHILD = Path(__file__).with_name("trainer_child.py")


class Trainers:
    """A pool of as many trainers as a test uses at most."""

    def __init__(self, max_trainers: int, child: Path = CHILD) -> None:
        self._max_trainers, self._child = max_trainers, child
        self._jobs = itertools.count()  # torch removes the file of a rendezvous some time after its end
        self._start()

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._processes:
            assert each.stdin is not None and each.stdout is not None
            each.stdin.close()
            each.stdout.close()
        for each in self._processes:
            each.wait(timeout=DEADLINE_SECONDS)
        assert [each.returncode for each in self._processes] == [0] * self._max_trainers

    def run(
        self,
        services: Sequence[Any],
        world_size: int,
        folder: Path,
        meanwhile: Callable[[list[subprocess.Popen[str]]], object] = lambda trainers: None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Return the result of each of `world_size` trainers for a job of trainer_child.py. Skip a test that wants more
        GPUs than there are: NCCL needs one for each trainer."""
        num_gpus = torch.cuda.device_count()
        if "cuda" in (options.get("dense"), options.get("device")) and num_gpus < world_size:
            pytest.skip(f"NCCL needs a CUDA device for each of {world_size} trainers, found {num_gpus}")
        settings: dict[str, Any] = dict.fromkeys(("checkpoint", "until", "workers", "file"))
        settings |= {"staleness": 0, "overlap": False, "dropped": [], "epochs": 1, "accumulate": 1}
        settings["servers"] = [each.address for each in services] or None
        with self.at_work(world_size, folder, settings | options) as trainers:
            meanwhile(trainers)
            return [said(each) for each in trainers]

    def run_on_servers(self, num_servers: int, world_size: int, folder: Path, **options: Any) -> list[dict[str, Any]]:
        """Run a job on new servers."""
        with running_servers(num_servers) as services:
            return self.run(services, world_size, folder, **options)

    @contextmanager
    def at_work(self, world_size: int, folder: Path, job: dict[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
        """Yield `world_size` trainers that have received a job. One that hangs is killed, and its missing output fails
        the test."""
        rendezvous, trainers = folder / f"rendezvous-{next(self._jobs)}", self._processes[:world_size]
        timers = [threading.Timer(2 * DEADLINE_SECONDS, each.kill) for each in trainers]
        for timer in timers:
            timer.start()
        try:
            for rank, each in enumerate(trainers):
                assert each.stdin is not None
                each.stdin.write(json.dumps([rank, world_size, str(rendezvous), job]) + "\n")
                each.stdin.flush()
            yield trainers
        except BaseException:
            self._kill()
            self._start()
            raise
        finally:
            for timer in timers:
                timer.cancel()
                timer.join()

    def _start(self) -> None:
        command = [sys.executable, str(self._child)]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(self._max_trainers)
        ]

    def _kill(self) -> None:
        for each in self._processes:
            each.kill()
            each.communicate()


def said(trainer: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the trainer's next line."""
    assert trainer.stdout is not None
    line = trainer.stdout.readline()
    assert line, "the trainer exited, or was killed at the deadline"
    found: dict[str, Any] = json.loads(line)
    return found


def require_result(found: dict[str, Any], embeddings: Embeddings, model: torch.nn.Module, tolerance: float = 1) -> None:
    """Check that a trainer's parameters and rows are those of a job in this process, up to the rounding of sums in
    another order. tolerance: how many times as much."""
    near: dict[str, Any] = {"rtol": 1e-4 * tolerance, "atol": 1e-6 * tolerance}
    for parameter, there in zip(model.parameters(), found["dense"], strict=True):
        torch.testing.assert_close(torch.tensor(there).reshape(parameter.shape), parameter, **near)
    for name, values in rows(embeddings).items():
        np.testing.assert_allclose(found["rows"][name], values, **near)


def alone(found: list[dict[str, Any]], num: int, without: tuple[int, ...] = (), **options: Any) -> tuple[Any, Any]:
    """Train one trainer with its own rows on the samples of all trainers at each step."""
    known = {json.dumps(each.values.tolist()): each for each in batches(num)}
    seen = zip(*(each["seen"] for each in found), strict=True)
    embeddings, model, optimizer = job(**options)
    for step, each in enumerate(seen, 1):
        whole = join([known[json.dumps(values)] for values in each if values])
        with embeddings.stream([whole]) as stream:
            loss_of(model, next(stream)).backward()
            if step not in without:
                optimizer.step()
            optimizer.zero_grad()
    return embeddings, model


def require_same_as_alone(found: list[dict[str, Any]], num: int, without: tuple[int, ...] = (), **options: Any) -> None:
    """Check that one trainer on all samples of each step ends with the same parameters and rows."""
    embeddings, model = alone(found, num, without, **options)
    require_result(found[0], embeddings, model)
    assert all(each["dense"] == found[0]["dense"] and each["rows"] == found[0]["rows"] for each in found)
    assert found[0]["updated"] == {name: table.stats()["updated"] for name, table in embeddings.tables.items()}


def end_alike(found: dict[str, Any], other: dict[str, Any]) -> bool:
    return (found["dense"], found["rows"]) == (other["dense"], other["rows"])
