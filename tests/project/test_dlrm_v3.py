"""The streaming recipe of DLRM-v3: what it draws, what its model sees, and that a killed run continues as if it had not
been."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import satrap

SCRIPT = Path(__file__).parents[2] / "examples/dlrm_v3.py"
SIZE = ("--items", "6400", "--windows", "8", "--history", "48", "--dim", "8", "--batch-size", "16", "--layers", "1")


@pytest.fixture(scope="module")
def recipe() -> Any:
    return runpy.run_path(str(SCRIPT))


def command(*options: str | Path) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {"args": [sys.executable, SCRIPT, *SIZE, *options], "env": environment, "text": True}


def evaluations(output: str) -> list[str]:
    return re.findall(r"window .*", output)


def test_it_learns_and_continues_after_a_kill(tmp_path: Path) -> None:
    """All windows have the same NE and AUC as without a kill, though it comes between two evaluations."""
    whole = subprocess.run(**command(), capture_output=True, timeout=300)
    assert whole.returncode == 0, whole.stderr
    expected = evaluations(whole.stdout)
    print(*expected, sep="\n")
    aucs = [float(line.split()[-1]) for line in expected]
    assert len(aucs) == 7 and aucs[-1] > 0.7 > aucs[0]

    options = ("--run", tmp_path / "run", "--save-every", "5")
    process = subprocess.Popen(**command(*options), stdout=subprocess.PIPE)
    assert process.stdout is not None
    seen: list[str] = []
    with process, process.stdout as lines:
        for line in lines:
            seen.append(line.strip())
            if line.startswith("window 3"):
                process.kill()
    again = subprocess.run(**command(*options), capture_output=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "continues after step" in again.stdout
    rest = evaluations(again.stdout)
    assert 0 < len(rest) < len(expected)
    assert rest == expected[-len(rest) :]
    assert evaluations("\n".join(seen))[:3] == expected[:3]


def test_the_requests_are_those_of_the_generator(recipe: Any) -> None:
    items, windows = 12_800, 10
    requests = recipe["Requests"](items, windows, 50, seed=3)
    assert requests.num_users == 640
    per_category = items // 128
    num_present = []
    for number in range(-1, windows):
        window = requests.next_window()
        num_present.append(len(window.users))
        lengths = np.diff(window.offsets)
        assert lengths.min() > 32
        assert 95 < lengths.mean() < 105
        owner = np.repeat(window.users, lengths)
        assert (window.items[:, None] // per_category == requests.liked[owner]).any(1).all(), "liked categories only"
        assert (window.items % per_category).max() < max(1, number + 1) * per_category // windows, "no item of later"
        assert ((window.ratings >= 1) & (window.ratings <= 5)).all()
        rows = [sorted(row) for row in window.candidates.tolist()]
        assert all(len(set(row)) == 32 for row in rows)
        assert all(
            b <= row[0] and row[-1] < e for row, b, e in zip(rows, window.offsets, window.offsets[1:], strict=False)
        )
    assert num_present[0] == 640
    assert 0.65 < np.mean(num_present[1:]) / 640 < 0.75


def test_a_window_is_the_same_whether_the_windows_before_it_were_batched(recipe: Any) -> None:
    """So a run may continue at an offset."""
    first, second = (recipe["Requests"](6400, 8, 50, seed=1) for _ in range(2))
    for number in range(3):
        list(first.batches(number, 7))
    batches = [list(each.batches(3, 7)) for each in (first, second)]
    assert len(batches[0]) > 3
    for one, other in zip(*batches, strict=True):
        for name in one:
            values = [each[name] if isinstance(each[name], tuple) else (each[name],) for each in (one, other)]
            assert all(np.array_equal(a, b) for a, b in zip(*values, strict=True)), name


def test_a_candidate_sees_the_history_and_no_other_candidate(recipe: Any) -> None:
    torch.manual_seed(0)
    with satrap.Embeddings(recipe["features"](8, 20, 0.1)) as embeddings:
        embeddings.eval()
        model = recipe["Ranker"](8, 20, 2, 2).eval()
        for table in embeddings.tables.values():
            table.write(np.arange(100), np.random.default_rng(1).normal(size=(100, 8)).astype(np.float32))
        columns = {"history": satrap.IdColumn(numbers="action"), "candidate": satrap.IdColumn(numbers="good")}

        def logits(past: list[list[int]], candidates: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            offsets, flat = np.cumsum([0, *map(len, past)]), np.array([i for ids in past for i in ids])
            each = np.arange(len(past) + 1) * 32
            item = {
                "user": np.array([len(ids) for ids in past]),
                "history": (flat, offsets),
                "history_category": (flat % 4, offsets),
                "action": (flat % 5, offsets),
                "candidate": (candidates.ravel(), each),
                "candidate_category": (candidates.ravel() % 4, each),
                "good": (candidates.ravel() % 2, each),
            }
            (batch,) = embeddings.stream(satrap.IterableSource([item], ids=columns))
            with torch.no_grad():
                found: np.ndarray[Any, Any] = model(batch).view(len(past), 32).numpy()
            return found

        candidates = np.random.default_rng(2).integers(0, 100, (3, 32))
        past = [[1, 2, 3], [4], list(range(5, 25))]
        base = logits(past, candidates)
        changed = candidates.copy()
        changed[:, 7] = (changed[:, 7] + 1) % 100
        other = logits(past, changed)
        is_same = np.arange(32) != 7
        np.testing.assert_allclose(other[:, is_same], base[:, is_same], atol=1e-5)
        assert (np.abs(other[:, 7] - base[:, 7]) > 1e-4).all()
        later = logits([[1, 2, 9], *past[1:]], candidates)
        assert (np.abs(later[0] - base[0]) > 1e-6).any()
        np.testing.assert_allclose(later[1:], base[1:], atol=1e-5)
        alone = logits(past[1:2], candidates[1:2])  # without the padding that a longer history brings
        np.testing.assert_allclose(alone[0], base[1], atol=1e-5)
