"""Several trainers that shard the rows over their own memory: the same results as with servers, without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import DEADLINE_SECONDS
from trainers import Trainers, require_same_as_alone


def same(found: dict[str, Any], other: dict[str, Any]) -> bool:
    return (found["dense"], found["rows"]) == (other["dense"], other["rows"])


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
        assert same(found[0], on_servers[0]) and same(found[1], on_servers[1])


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
    assert same(found[0][0], found[2][0]), "three trainers are three trainers, wherever the rows are"


SCRIPT = """
import sys
import numpy
import torch
import satrap

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
item = satrap.Table("item", dim=4)
with satrap.Embeddings({"item": item}) as embeddings:
    model = embeddings.parallel(torch.nn.Linear(4, 1))
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = satrap.Frame({"item": list(range(64)), "label": [0.0, 1.0] * 32}, label="label", batch_size=4)
    for batch in embeddings.stream(data):
        if rank == 1 and batch.step == 5 and "fail" in sys.argv:
            raise SystemExit(7)
        model(batch.embeddings).mean().backward()
        optimizer.step()
    print(f"trainer {rank}: {len(embeddings.tables['item'])} rows")
    if rank == 0:  # the others wait for it, since it reads their rows
        rows = embeddings.tables["item"].read(numpy.arange(64))
        assert rows.present.all()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_torchrun_alone_trains_over_the_trainers(fails: bool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, *(["fail"] if fails else [])],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if fails:
        assert done.returncode != 0 and "exitcode  : 7" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["trainer 0: 64 rows", "trainer 1: 64 rows"]
