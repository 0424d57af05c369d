"""Several trainers that shard the rows over their own memory: the same results as with servers, without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from network import only_ipv6
from trainers import Trainers, end_alike, require_same_as_alone
from waiting import DEADLINE_SECONDS


@pytest.mark.parametrize(("world_size", "overlap"), [(2, False), (3, True)])
def test_it_equals_one_trainer_on_the_joined_batch(
    trainers: Trainers, world_size: int, overlap: bool, tmp_path: Path
) -> None:
    found = trainers.run([], world_size, tmp_path, batches=6 * world_size, overlap=overlap)
    require_same_as_alone(found, 6 * world_size)


def test_it_equals_servers_and_other_machines_bit_for_bit(trainers: Trainers, tmp_path: Path) -> None:
    """Uneven data, a step that all drop, accumulation; other machines are reached over TCP with keys."""
    how: dict[str, Any] = {"batches": 9, "dropped": [[None, 2]], "accumulate": 2}
    on_servers = trainers.run_on_servers(3, 2, tmp_path, **how)
    for found in (trainers.run([], 2, tmp_path, **how), trainers.run([], 2, tmp_path, machines=True, **how)):
        assert end_alike(found[0], on_servers[0]) and end_alike(found[1], on_servers[1])


def test_machines_that_have_only_ipv6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with only_ipv6(), Trainers(2) as trainers:
        results = trainers.run([], 2, tmp_path, batches=4, machines=True)
    require_same_as_alone(results, 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_with_staleness_each_update_is_applied_once(trainers: Trainers, tmp_path: Path, overlap: bool) -> None:
    found = trainers.run([], 3, tmp_path, batches=15, staleness=2, overlap=overlap, counted=True)
    assert [each["lost"] for each in found] == [{}] * 3
    expected = trainers.run_on_servers(1, 1, tmp_path, batches=15, counted=True)
    assert found[0]["rows"] == found[2]["rows"] == expected[0]["rows"]


def test_a_checkpoint_resumes_on_more_trainers_on_one_and_on_servers(trainers: Trainers, tmp_path: Path) -> None:
    first = trainers.run([], 2, tmp_path, batches=12, checkpoint=str(tmp_path / "run"), until=5)
    assert not any(each["resumed"] for each in first)
    found = []
    for number, (world_size, num_servers) in enumerate([(3, 0), (1, 0), (3, 2)]):
        copy = tmp_path / f"run{number}"
        subprocess.run(["cp", "-r", tmp_path / "run", copy], check=True)
        if num_servers:
            found.append(trainers.run_on_servers(num_servers, world_size, tmp_path, batches=12, checkpoint=str(copy)))
        else:
            found.append(trainers.run([], world_size, tmp_path, batches=12, checkpoint=str(copy)))
        assert all(each["resumed"] for each in found[-1])
    assert end_alike(found[0][0], found[2][0]), "three trainers are three trainers, wherever the rows are"


SCRIPT = """
import os, signal, sys
from pathlib import Path
import numpy
import torch
import lean_torch
import satrap

lean_torch.skip_compiler()
torch.distributed.init_process_group("gloo")
rank, folder, mode = torch.distributed.get_rank(), Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
with satrap.Embeddings({"item": satrap.Table("item", dim=4)}) as embeddings:
    model = embeddings.parallel(torch.nn.Linear(4, 1))
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = satrap.Frame({"item": list(range(64)), "label": [0.0, 1.0] * 32}, label="label", batch_size=4)
    run = satrap.Checkpoint(folder / "run", model, optimizer, embeddings, data)
    resumed = run.resume()
    for batch in embeddings.stream(data):
        if rank == 1 and batch.step == 5 and not resumed:
            if mode == "exits":
                raise SystemExit(7)
            if mode == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
        model(batch.embeddings).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.save(every_steps=2)
    # One write: the trainers share a pipe.
    sys.stdout.write(f"trainer {rank}: {len(embeddings.tables['item'])} rows, resumed: {resumed}\\n")
    if rank == 0:  # the other one waits, since this reads its rows
        numpy.save(folder / "rows.npy", embeddings.tables["item"].read(numpy.arange(64)).values)
"""


def torchrun(folder: Path, mode: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(folder / "train.py"), str(folder), mode],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
    )


@pytest.mark.draw(2, of="whole runs")
def test_torchrun_alone_trains_and_after_a_kill_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = torchrun(tmp_path / "whole", "ends")
    assert whole.returncode == 0, whole.stderr
    lines = [f"trainer {rank}: 64 rows, resumed: False" for rank in (0, 1)]
    assert sorted(whole.stdout.splitlines()) == lines
    killed = torchrun(tmp_path / "killed", "is killed")
    assert killed.returncode != 0 and "(exitcode: -9) local_rank: 1" in killed.stderr, killed.stderr
    resumed = torchrun(tmp_path / "killed", "is killed")
    assert resumed.returncode == 0, resumed.stderr
    assert sorted(resumed.stdout.splitlines()) == [line.replace("False", "True") for line in lines]
    found, expected = (np.load(tmp_path / name / "rows.npy") for name in ("killed", "whole"))
    np.testing.assert_array_equal(found, expected)


def test_a_trainer_that_ends_with_an_error_ends_the_others_with_its_name(tmp_path: Path) -> None:
    done = torchrun(tmp_path / "run", "exits")
    assert done.returncode != 0 and "exitcode  : 7" in done.stderr, done.stderr
