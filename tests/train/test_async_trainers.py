"""Several trainers with dense="async": every update is applied once, no trainer waits for another, and together they
learn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_child import summed
from cluster import running_servers
from trainers import Trainers, said


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(2, (Path(__file__).parents[1] / "support/async_child.py")) as found:
        yield found


def job(services: Sequence[Any], **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"servers": [each.address for each in services], "staleness": 0, "overlap": False}
    given |= {"whole": False, "epochs": 1, "wait_at": None, "checkpoint": None, "every": None, "lengths": None}
    return given | options


def run(trainers: Trainers, num_servers: int, folder: Path, **options: Any) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the steps of each trainer, and its result, on new servers."""
    with running_servers(num_servers) as services, trainers.at_work(2, folder, job(services, **options)) as both:
        steps = [said(each)["steps"] for each in both]
        return steps, [said(each) for each in both]


@pytest.mark.parametrize(("staleness", "overlap"), [(0, False), (3, True)])
def test_every_update_is_applied_once(trainers: Trainers, staleness: int, overlap: bool, tmp_path: Path) -> None:
    steps, found = run(trainers, 2, tmp_path, whole=True, batches=41, staleness=staleness, overlap=overlap)
    assert steps == [21, 20], "each trainer trains to the end of its data"
    for each in found:
        assert each["dense"] == [summed(steps)] and each["lost"] == {}
        assert (each["stats"]["updated"], each["stats"]["repeated"]) == (41 * each["stats"]["rows"], 0)


@pytest.mark.parametrize("waiting", [0, 1])
def test_no_trainer_waits_for_a_slow_one(trainers: Trainers, waiting: int, tmp_path: Path) -> None:
    """The slow trainer waits at its first batch until the other has finished two epochs."""
    with (
        running_servers(2) as services,
        trainers.at_work(2, tmp_path, job(services, whole=True, batches=12, epochs=2, wait_at=[waiting, 1])) as both,
    ):
        slow, other = both[waiting], both[1 - waiting]
        assert said(slow) == {"at": 1}
        assert said(other) == {"steps": 12}
        assert slow.stdin is not None
        slow.stdin.write("\n")
        slow.stdin.flush()
        assert said(slow) == {"steps": 12}
        assert said(slow)["dense"] == said(other)["dense"] == [summed([12, 12])]


def test_trainers_learn_together_from_the_parameters_of_trainer_0(trainers: Trainers, tmp_path: Path) -> None:
    _, found = run(trainers, 2, tmp_path, batches=60, epochs=4, staleness=2, overlap=True)
    assert found[0]["began"] != found[1]["began"] and found[0]["dense"] == found[1]["dense"]
    for each in found:
        assert np.mean(each["losses"][-20:]) < 0.75 * np.mean(each["losses"][:20])


def test_both_trainers_resume_a_checkpoint(trainers: Trainers, tmp_path: Path) -> None:
    """Both trainers save at the end of their own data, and continue from there on other servers."""
    folder = tmp_path / "run"
    steps, first = run(trainers, 2, tmp_path, batches=9, checkpoint=str(folder))
    again, rest = run(trainers, 3, tmp_path, batches=9, checkpoint=str(folder))
    assert steps == [5, 4] and not any(each["resumed"] for each in first)
    assert again == [5, 5] and all(each["resumed"] and not each["losses"] for each in rest)
    assert all(each["began"] == each["dense"] == first[0]["dense"] for each in rest)


@pytest.mark.parametrize("lengths", [[9, 3], [3, 9]])
def test_a_finished_trainer_joins_the_other_trainers_saves(
    trainers: Trainers, lengths: list[int], tmp_path: Path
) -> None:
    """Such saves contain all its batches, and the other trainers continue at their positions."""
    folder = tmp_path / "run"
    options: dict[str, Any] = {"whole": True, "batches": 18, "lengths": lengths, "every": [2, 2]}
    steps, first = run(trainers, 2, tmp_path, checkpoint=str(folder), **options)
    assert steps == lengths and all(each["dense"] == [summed(lengths)] for each in first)
    saved = sorted(folder.glob("[0-9]*"))
    assert [each.name.partition("-")[2] for each in saved] == [f"step-{step}" for step in (2, 4, 6, 8, 9)]
    for checkpoint in saved[3:]:
        shutil.rmtree(checkpoint)
    again, rest = run(trainers, 3, tmp_path, checkpoint=str(folder), **options)
    so_far = [min(length, 6) for length in lengths]
    assert again == [6 if length == 3 else 9 for length in lengths]
    for each in rest:
        assert each["began"] == [summed(so_far)] and each["dense"] == [summed(lengths)] and each["lost"] == {}


def test_saves_at_different_steps_are_refused(trainers: Trainers, tmp_path: Path) -> None:
    _, found = run(trainers, 1, tmp_path, batches=6, checkpoint=str(tmp_path / "run"), every=[2, 3])
    for each in found:
        assert each["refused"] == (
            "the trainers save into ['run', 'run'] at steps [2, 3] with every_steps [2, 3] and wait "
            "[True, True]; expected the same values on all trainers"
        )
