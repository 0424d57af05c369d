"""A small training job, run in tests and in child processes that are killed: `python checkpoint_job.py RUN STEPS`. A
third argument holds options of `Embeddings`, or the addresses of "servers", as JSON; a fourth, "beside", makes it save
while it trains.

It prints each step's number after the step. With the same seed and steps it ends with the same bits, killed or not.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from lean_torch import skip_compiler
from satrap import Adagrad, Adam, Checkpoint, Deployment, Embeddings, Inputs, MinCount, Position, Table
from satrap.checkpoint.run_owner import OWNER
from satrap.config.location import is_url
from waiting import DEADLINE_SECONDS

SIZE, NUM_IDS = 16, 200


class Source:
    """A source whose batches depend only on their number."""

    def __init__(self, num: int) -> None:
        self.num, self.seed = num, 0

    def signature(self) -> dict[str, Any]:
        return {"type": "Source", "seed": self.seed}

    def batches(self, features: Mapping[str, Any], position: Position | None = None) -> Iterator[Inputs]:
        for i in range(0 if position is None else position.batch, self.num):
            rng = np.random.default_rng(i)
            yield Inputs(
                names=tuple(features),
                values=rng.integers(0, NUM_IDS, 2 * SIZE, dtype=np.uint64),
                batch_size=SIZE,
                dense=rng.standard_normal((SIZE, 3)).astype(np.float32),
                label=rng.integers(0, 2, SIZE).astype(np.float32),
                position=Position(0, 0, i + 1),
            )


class Job:
    """The complete state of a run. Dropout makes it depend on the random state, and a scheduler is one further
    object."""

    def __init__(
        self,
        run: str,
        num_steps: int,
        *,
        dim: int = 4,
        seed: int = 0,
        hidden: int = 8,
        rows: Mapping[str, Any] = MappingProxyType({}),
        dense: str = "cpu",
        **options: Any,
    ) -> None:
        """rows: options of `Embeddings` that say where the rows are. dense: the device of the network. options: of
        `Checkpoint`."""
        torch.manual_seed(1)
        random.seed(1)
        user = Table("user", dim=dim, optimizer=Adagrad(lr=0.1), capacity=120, num_buckets=2)
        item = Table("item", dim=dim, optimizer=Adam(lr=0.01), admission=MinCount(2, window=64), dtype="bfloat16")
        self.embeddings = Embeddings({"user": user, "item": item}, seed=seed, num_threads=1, **rows)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3 + 2 * dim, hidden), torch.nn.Dropout(0.5), torch.nn.Linear(hidden, 1)
        ).to(dense)
        self.dense = dense
        self.optimizer = self.embeddings.optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.source = Source(num_steps)
        self.run = Checkpoint(
            run,
            self.model,
            self.optimizer,
            self.embeddings,
            self.source,
            extra_state={"scheduler": self.scheduler},
            **options,
        )

    def logits(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.cat([batch.dense, batch.embeddings], 1)).squeeze(1)
        return logits

    def step(self, batch: Any) -> None:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.logits(batch), batch.label)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def train(self, every_steps: int = 1, *, wait: bool = True) -> None:
        """Train the remaining steps."""
        with self.embeddings.stream(self.source, device=self.dense) as stream:
            for batch in stream:
                self.step(batch)
                self.run.save(every_steps=every_steps, wait=wait)
                print(self.embeddings.step, flush=True)

    def state(self) -> dict[str, Any]:
        """Return everything that must be equal after a resume."""
        every = np.arange(NUM_IDS, dtype=np.uint64)
        found: dict[str, Any] = {}
        for name, store in self.embeddings.tables.items():
            store.check()
            values, state, present = store.read(every)
            found |= {f"{name}.values": values, f"{name}.state": state, f"{name}.present": present}
            found[f"{name}.rows"] = len(store)
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().cpu().numpy().copy()
        found |= {"step": self.embeddings.step, "lr": [group["lr"] for group in self.optimizer.param_groups]}
        found["random"] = torch.get_rng_state().numpy()
        return found


def names(run: Path) -> list[str]:
    """Return the names in a run's folder, without the file of its owner."""
    return sorted(path.name for path in run.iterdir() if path.name != OWNER)


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Check that two states are equal, bit for bit."""
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def uninterrupted(tmp_path: Path, steps: int) -> dict[str, Any]:
    job = Job(str(tmp_path / "whole"), steps)
    job.train(every_steps=10**6)
    return job.state()


def run_killed(job: str, run: Path, steps: int, *arguments: str) -> dict[str, Any]:
    """Start the job repeatedly, kill it at random moments, and let it finish in the end."""
    rng = random.Random(int.from_bytes(os.urandom(4), "little"))
    command = [sys.executable, str(Path(__file__).with_name(job)), str(run), str(steps), *arguments]
    kills = 0
    while not (run / "end.npz").exists():
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        if kills < 3:
            for _ in range(rng.randint(1, 6)):  # so many steps, and then at some moment of the next
                child.stdout.readline()
            try:
                child.wait(rng.random() * 0.02)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
                kills += 1
        child.communicate(timeout=DEADLINE_SECONDS)
        assert child.returncode in (0, -signal.SIGKILL)
    assert kills > 0
    return dict(np.load(run / "end.npz"))


if __name__ == "__main__":
    skip_compiler()
    rows = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    if "servers" in rows:
        rows["deployment"] = Deployment(rows.pop("servers"), take_over=True)
    job = Job(sys.argv[1], int(sys.argv[2]), rows=rows, keep=2, full_every=3)
    if not job.run.resume() and "deployment" in rows:
        # Servers keep the rows of a trainer that was killed before its first checkpoint.
        job.embeddings.tables.clear()  # type: ignore[union-attr]
    job.train(wait="beside" not in sys.argv)
    if not is_url(sys.argv[1]):  # else the last checkpoint has it
        np.savez(Path(sys.argv[1]) / "end.npz", **job.state())
