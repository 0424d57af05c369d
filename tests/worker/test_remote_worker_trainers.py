"""Several trainers with remote workers, a shared one or one for each: the bits of trainers that look up themselves."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster import running_servers, server_processes
from faults import kill, random_faults
from loop import NUM_IDS
from remote_worker_parts import KillableWorker, ending, working
from trainers import Trainers, said
from waiting import DEADLINE_SECONDS


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(2) as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Write batches of 8, three to a block; the last block is half as long, so the trainers' last batches are short."""
    rng = np.random.default_rng(0)
    n = 30 * 8 - 12
    lists = [rng.integers(0, NUM_IDS, int(k)).tolist() for k in rng.integers(0, 5, n)]
    ids = {name: rng.integers(0, NUM_IDS, n, dtype=np.uint64) for name in ("user", "item")}
    dense = {name: rng.standard_normal(n) for name in ("d0", "d1")}
    label = rng.integers(0, 2, n).astype(np.float64)
    path = tmp_path / "data" / "a.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table(ids | dense | {"history": lists, "label": label, "number": np.arange(n)}), path, 24)
    return str(path)


@pytest.mark.draw(1)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_two_trainers_have_the_bits_of_two_without_workers(
    trainers: Trainers, tmp_path: Path, file: str, num_workers: int
) -> None:
    """Synchronous, with drops, over two epochs that end with short batches."""
    options: dict[str, Any] = {"batches": 0, "file": file, "dropped": [[None, 2], [0, 5]], "epochs": 2}
    with running_servers(2) as services:
        wanted = trainers.run(services, 2, tmp_path, **options)
    with running_servers(2) as services, working(num_workers) as workers:
        found = trainers.run(services, 2, tmp_path, workers=[each.address for each in workers], overlap=True, **options)
        assert [len(each.host._sessions) for each in workers] == [2 // num_workers] * num_workers
    assert found == wanted
    numbers = [number for each in found for batch in each["seen"] for number in batch]
    assert sorted(numbers) == sorted(2 * list(range(30 * 8 - 12))), "every sample once an epoch"


def test_trainers_resume_with_workers_a_run_started_without(trainers: Trainers, tmp_path: Path, file: str) -> None:
    options: dict[str, Any] = {"batches": 0, "file": file}
    with running_servers(2) as services:
        whole = trainers.run(services, 2, tmp_path, **options)
    with running_servers(2) as services:
        first = trainers.run(services, 2, tmp_path, checkpoint=str(tmp_path / "run"), until=6, **options)
    with running_servers(1) as services, working(2) as workers:
        where: dict[str, Any] = {
            "workers": [each.address for each in workers],
            "checkpoint": str(tmp_path / "run"),
        }
        rest = trainers.run(services, 2, tmp_path, **where, **options)
    for before, after, once in zip(first, rest, whole, strict=True):
        assert after["resumed"] and before["seen"][:4] + after["seen"] == once["seen"]
        assert (after["dense"], after["rows"]) == (once["dense"], once["rows"])


@pytest.mark.draw(2, of="whole runs")
@pytest.mark.draw(1)
@pytest.mark.parametrize("staleness", [0, 3])
def test_everything_is_killed_under_two_trainers(
    trainers: Trainers, tmp_path: Path, file: str, seed: int, staleness: int
) -> None:
    """Two servers and the worker that the trainers share, from the third step on. Stale updates are applied in any
    order, but each once: the updates of their rows are counted."""
    options: dict[str, Any] = {"batches": 0, "file": file, "epochs": 12, "staleness": staleness}
    options["counted"] = staleness > 0
    with running_servers(2) as services:
        wanted = trainers.run(services, 2, tmp_path, **options)
    worker = KillableWorker()
    with server_processes(tmp_path, 2) as servers, ending([worker]):
        victims = [kill(each) for each in (*servers, worker)]

        def kill_some(processes: list[subprocess.Popen[str]]) -> None:
            assert [said(each) for each in processes] == [{"step": 3}] * 2
            with random_faults(victims, seed, num=5, gap=0.4) as over:
                assert over.wait(DEADLINE_SECONDS)

        options |= {"workers": [worker.address], "overlap": True, "tells": True}
        found = trainers.run(servers, 2, tmp_path, kill_some, **options)
    what = ("seen", "rows", "dense", "lost") if staleness == 0 else ("seen", "rows", "lost")
    for each, once in zip(found, wanted, strict=True):
        assert {name: each[name] for name in what} == {name: once[name] for name in what}
