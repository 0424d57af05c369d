"""`satrap trainer`: a script that names no servers, on servers that were started by hand, alone and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import satrap.run_context
from cluster import running_servers
from logged import logged
from loop import Net, batches, tables, train_step
from runs import JOB, write_changed_job
from satrap import Embeddings
from satrap.cli.main import main
from satrap.errors import StreamError
from satrap.run_context import RunContext
from waiting import DEADLINE_SECONDS


def torchrun(script: Path, servers: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["-m", "satrap", "trainer", str(script), "--clear", "--http=0", "--servers", *servers, "--", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parent)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
        "1"  # as in the manifests; else a restart may find old addresses
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_SECONDS, env=environment)


@pytest.mark.draw(2, of="whole runs")
def test_after_the_death_of_a_trainer_torchrun_starts_all_and_they_resume(tmp_path: Path) -> None:
    save = "        run.save(every_steps=5)\n"
    dies = (
        f"{save}        died = folder / 'died'\n"
        "        if embeddings.step == 12 and embeddings.trainers.rank == 1 and not died.exists():\n"
        "            died.touch()\n"
        "            __import__('os')._exit(1)\n"
    )
    script = write_changed_job(tmp_path, (save, dies))
    with running_servers(2) as servers:
        done = torchrun(script, [each.address for each in servers], str(tmp_path), "40")
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("began|resumed", done.stdout)) == ["began", "began", "resumed", "resumed"]
    assert "satrap.checkpoint: continues after step 10, from" in done.stderr
    assert "trainer 1: metrics at http://127.0.0.1:" in done.stderr
    with np.load(tmp_path / "end.npz") as result:
        assert int(result["step"]) == 20, "40 batches, two in each step"


def train_in_context(monkeypatch: pytest.MonkeyPatch, context: RunContext) -> int:
    monkeypatch.setattr(satrap.run_context, "_here", context)
    with Embeddings(tables()) as embeddings:
        net = Net()
        optimizer = embeddings.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for batch in embeddings.stream(batches(3)):
            train_step(net, optimizer, batch)
        embeddings.drain()
        return embeddings.step


def test_rows_of_an_earlier_start_are_removed_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_servers(1) as (server,):
        context = RunContext(rank=0, world_size=1, launch=0, servers=(server.address,))
        assert train_in_context(monkeypatch, context) == 3
        with pytest.raises(
            StreamError, match=r"the servers hold rows of an earlier run, trained up to step 3, .* --clear$"
        ):
            train_in_context(monkeypatch, context)
        clearing = RunContext(rank=0, world_size=1, launch=0, servers=(server.address,), clear=True)
        with logged("satrap.train", match="") as records:
            assert train_in_context(monkeypatch, clearing) == 3
        assert "removes rows of step 3" in records[0].getMessage()


def test_the_options_are_checked_before_trainers_wait_for_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trainer", str(JOB)]) == 1
    assert "trainer: --servers is missing; expected the addresses of all servers" in capsys.readouterr().err
    assert main(["trainer", str(tmp_path / "none.py"), "--servers", "tcp://10.0.0.5:5555"]) == 1
    assert "trainer: there is no script" in capsys.readouterr().err
