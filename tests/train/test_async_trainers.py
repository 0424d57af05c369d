"""Several trainers with dense="async": every update is applied once, none waits for another, together they learn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_child import summed
from cluster import serving
from trainers import Trainers, said


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(2, (Path(__file__).parents[1] / "async_child.py")) as found:
        yield found


def job(services: Sequence[Any], **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"servers": [each.address for each in services], "staleness": 0, "overlap": False}
    given |= {"whole": False, "epochs": 1, "wait_at": None, "checkpoint": None, "every": None, "lengths": None}
    return given | options


def run(
    trainers: Trainers, services: Sequence[Any], folder: Path, **options: Any
) -> tuple[list[int], list[dict[str, Any]]]:
    """The steps of each trainer, and what it found."""
    with trainers.at_work(2, folder, job(services, **options)) as both:
        steps = [said(each)["steps"] for each in both]
        return steps, [said(each) for each in both]


@pytest.mark.parametrize(("staleness", "overlap"), [(0, False), (3, True)])
def test_every_update_is_applied_once(trainers: Trainers, staleness: int, overlap: bool, tmp_path: Path) -> None:
    with serving(2) as services:
        steps, found = run(trainers, services, tmp_path, whole=True, batches=41, staleness=staleness, overlap=overlap)
    assert steps == [21, 20], "each trains to its own end"
    for each in found:
        assert each["dense"] == [summed(steps)] and each["lost"] == {}
        assert (each["stats"]["updated"], each["stats"]["repeated"]) == (41 * each["stats"]["rows"], 0)


@pytest.mark.parametrize("waiting", [0, 1])
def test_none_waits_for_one_that_is_slow(trainers: Trainers, waiting: int, tmp_path: Path) -> None:
    """It stands at its first batch until the other one's two epochs are over."""
    with (
        serving(2) as services,
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


def test_together_they_learn_from_the_first_ones_start(trainers: Trainers, tmp_path: Path) -> None:
    with serving(2) as services:
        _, found = run(trainers, services, tmp_path, batches=60, epochs=4, staleness=2, overlap=True)
    assert found[0]["began"] != found[1]["began"] and found[0]["dense"] == found[1]["dense"]
    for each in found:
        assert np.mean(each["losses"][-20:]) < 0.75 * np.mean(each["losses"][:20])


def test_a_checkpoint_of_both(trainers: Trainers, tmp_path: Path) -> None:
    """They save at ends of their own, and both go on from there, on other servers."""
    folder = tmp_path / "run"
    with serving(2) as services:
        steps, first = run(trainers, services, tmp_path, batches=9, checkpoint=str(folder))
    with serving(3) as services:
        again, rest = run(trainers, services, tmp_path, batches=9, checkpoint=str(folder))
    assert steps == [5, 4] and not any(each["resumed"] for each in first)
    assert again == [5, 5] and all(each["resumed"] and not each["losses"] for each in rest)
    assert all(each["began"] == each["dense"] == first[0]["dense"] for each in rest)


@pytest.mark.parametrize("lengths", [[9, 3], [3, 9]])
def test_one_that_is_done_takes_part_in_the_others_saves(
    trainers: Trainers, lengths: list[int], tmp_path: Path
) -> None:
    """What they save then has all of its batches, and goes on where the others were."""
    folder = tmp_path / "run"
    options: dict[str, Any] = {"whole": True, "batches": 18, "lengths": lengths, "every": [2, 2]}
    with serving(2) as services:
        steps, first = run(trainers, services, tmp_path, checkpoint=str(folder), **options)
    assert steps == lengths and all(each["dense"] == [summed(lengths)] for each in first)
    saved = sorted(folder.glob("[0-9]*"))
    assert [each.name.partition("-")[2] for each in saved] == [f"step-{step}" for step in (2, 4, 6, 8, 9)]
    for checkpoint in saved[3:]:
        shutil.rmtree(checkpoint)
    with serving(3) as services:
        again, rest = run(trainers, services, tmp_path, checkpoint=str(folder), **options)
    so_far = [min(length, 6) for length in lengths]
    assert again == [6 if length == 3 else 9 for length in lengths]
    for each in rest:
        assert each["began"] == [summed(so_far)] and each["dense"] == [summed(lengths)] and each["lost"] == {}


def test_saves_at_other_steps_are_refused(trainers: Trainers, tmp_path: Path) -> None:
    with serving(1) as services:
        _, found = run(trainers, services, tmp_path, batches=6, checkpoint=str(tmp_path / "run"), every=[2, 3])
    for each in found:
        assert each["refused"] == (
            "the trainers save into ['run', 'run'] at steps [2, 3] with every_steps [2, 3]; expected the "
            "same values on all trainers"
        )
