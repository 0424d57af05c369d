"""Trainers with rows on their devices, of which one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from child_processes import child_process
from waiting import DEADLINE_SECONDS

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import satrap

torch.distributed.init_process_group("gloo")
rank, folder, mode = torch.distributed.get_rank(), Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
with satrap.Embeddings({"item": satrap.Table("item", dim=4)}, device="cpu") as embeddings:
    model = embeddings.parallel(torch.nn.Linear(4, 1))
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = satrap.Frame({"item": list(range(64)), "label": [0.0, 1.0] * 32}, label="label", batch_size=4)
    run = satrap.Checkpoint(folder / "run", model, optimizer, embeddings, data)
    resumed = run.resume()
    for batch in embeddings.stream(data):
        if rank == 1 and batch.step == 5 and not resumed:
            if mode == "raises":
                raise RuntimeError("no more")
            if mode == "is killed":  # when all trainers have begun the update
                embeddings.worker.update = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        model(batch.embeddings).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.save(every_steps=2)
    print(f"trainer {rank}: {len(embeddings.tables['item'])} rows, resumed: {resumed}")
"""


def run_together(folder: Path, mode: str) -> list[subprocess.CompletedProcess[str]]:
    """Run the script on two trainers, each of which ends by itself: no launcher ends the second one."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.port), "WORLD_SIZE": "2"}
    environment = {**os.environ, **common, "OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, str(folder / "train.py"), str(folder), mode]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        children = [
            child_process(command, 2 * DEADLINE_SECONDS, env={**environment, "RANK": str(rank)}, **pipes)
            for rank in range(2)
        ]
        running = [stack.enter_context(child) for child in children]
        outputs = [each.communicate(timeout=2 * DEADLINE_SECONDS) for each in running]
    return [
        subprocess.CompletedProcess(command, each.returncode, *output)
        for each, output in zip(running, outputs, strict=True)
    ]


@pytest.mark.draw(2, of="whole runs")
@pytest.mark.parametrize("mode", ["is killed", "raises"])
def test_a_trainer_that_dies_ends_the_others_with_its_name_and_the_run_resumes(mode: str, tmp_path: Path) -> None:
    first, second = run_together(tmp_path / "run", mode)
    assert (first.returncode, second.returncode) == (1, 1 if mode == "raises" else -signal.SIGKILL), first.stderr
    assert "trainer 1 has ended, and the others cannot continue without its rows" in first.stderr, first.stderr
    assert ("StreamError" in first.stderr) == (mode == "is killed")  # the other way torch finds it
    if mode == "is killed":
        resumed = run_together(tmp_path / "run", mode)
        assert [each.returncode for each in resumed] == [0, 0], resumed
        assert [each.stdout.strip() for each in resumed] == [f"trainer {n}: 64 rows, resumed: True" for n in range(2)]
