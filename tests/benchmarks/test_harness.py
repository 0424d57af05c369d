"""The harness: a command line that must not start, processes that fail, and work split over several ranks."""

from __future__ import annotations

import ast
import graphlib
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.harness import rounds
from benchmarks.harness.machine import ROOT

from benchmarks import workload
from waiting import DEADLINE_SECONDS


def imported(path: Path) -> set[str]:
    """Return the modules of the benchmarks that a file imports, in functions too."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    names = {node.module or "" for node in nodes}
    names |= {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    return {name for name in names if name.startswith("benchmarks.")}


def test_no_benchmark_imports_itself_in_a_circle_and_the_harness_imports_none() -> None:
    files = [path for path in (ROOT / "benchmarks").rglob("*.py") if path.name != "__init__.py"]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    graph = {name: imported(path) & modules.keys() for name, path in modules.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(modules)
    shared = {"benchmarks.summary", "benchmarks.workload"}
    for name, found in graph.items():
        if name.startswith("benchmarks.harness."):
            assert all(each in shared or each.startswith("benchmarks.harness.") for each in found), (name, found)


def test_the_children_of_a_process_end_with_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_SECONDS)
        address = listener.getsockname()
        child = f"import socket, time; s = socket.create_connection({address!r}); print(flush=True); time.sleep(600)"
        leaves = (
            "import subprocess, sys; "
            f"left = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, stderr=-3); "
            "left.stdout.readline(); print('{}')"
        )
        assert rounds.run_process([sys.executable, "-c", leaves]) == {}
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(DEADLINE_SECONDS)
            assert connection.recv(1) == b""


def test_a_process_that_hangs_is_killed_and_a_failure_has_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rounds.RunFailed, match=r"exit status 3: three"):
        rounds.run_process([sys.executable, "-c", "import sys; print('three', file=sys.stderr); sys.exit(3)"])
    monkeypatch.setattr(rounds, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(rounds.RunFailed, match=r"still running after 0\.1 s"):
        rounds.run_process([sys.executable, "-c", "import time; time.sleep(600)"])


RANK = """
import sys, torch
from benchmarks.harness import ranks
from benchmarks.contenders import torch_table
here = ranks.join({"rank": int(sys.argv[1]), "num_processes": 2, "rendezvous": sys.argv[2]})
own = torch.arange(8.0).view(4, 2).add(100 * here.rank).requires_grad_()  # four samples, two numbers of its feature
block = torch_table.exchange(own, 2)
block.backward(torch.arange(8.0).view(2, 4) + 100 * here.rank)
print(block.tolist(), own.grad.tolist(), here.longest(here.rank))
here.barrier()
"""


def test_ranks_exchange_rows_for_their_samples_and_get_the_gradients_of_their_features(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=DEADLINE_SECONDS)[0].strip() for rank in ranks]
    assert printed == [
        "[[0.0, 1.0, 100.0, 101.0], [2.0, 3.0, 102.0, 103.0]] [[0.0, 0.5], [2.0, 2.5], [50.0, 50.5], [52.0, 52.5]] 1.0",
        "[[4.0, 5.0, 104.0, 105.0], [6.0, 7.0, 106.0, 107.0]] [[1.0, 1.5], [3.0, 3.5], [51.0, 51.5], [53.0, 53.5]] 1.0",
    ]


def test_shares_of_the_features_are_the_whole_batch() -> None:
    rows = 26 * 100
    numbers = workload.row_numbers(rows, "uniform", 2, 0)
    shares = [workload.Share(rank=rank, size=2) for rank in range(2)]
    first, second = (share.own_rows(numbers, rows) for share in shares)
    assert np.array_equal(np.concatenate([first, second + 13 * 100], 1), numbers)
    assert first.max() < 13 * 100 and second.min() >= 0
    gradients = workload.gradients(3)
    by_sample = np.concatenate([share.sample_gradients(3) for share in shares])
    assert np.array_equal(by_sample, 2 * gradients.reshape(26, 4096, 3).swapaxes(0, 1).reshape(4096, 78))
