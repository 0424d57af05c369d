"""Several trainers prefetch around loaders of the same or of different lengths: all end together, with the rows of one
trainer on their joined batches, the same bits wherever the rows are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import prefetch_child
from module_jobs import NUM_IDS, Scores, batch, embeddings_of, loss_of, minimize, start_rows, tables
from satrap import evaluate
from trainers import Trainers

PLACES: dict[str, dict[str, Any]] = {
    "shared": {},
    "servers": {"num_servers": 2},
    "device": {"device": "cpu"},
    "direct": {"device": "cpu", "direct": True},
}


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(2, Path(prefetch_child.__file__)) as found:
        yield found


def run(trainers: Trainers, folder: Path, where: str, *, num_servers: int = 0, **options: Any) -> list[dict[str, Any]]:
    place = PLACES[where] | options
    return trainers.run_on_servers(place.pop("num_servers", num_servers), 2, folder, **place)


def joined(lengths: list[int]) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    """Return the losses, the rows and the last evaluation of one trainer, whose loss is the mean over those that have a
    batch."""
    with embeddings_of(*tables()) as embeddings:
        torch.manual_seed(0)
        model = Scores.over(embeddings)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def loss(step: int) -> Tensor:
            ranks = [rank for rank, length in enumerate(lengths) if step <= length]
            parts = [loss_of(model, *(each.chunk(2)[rank] for each in batch(step))) for rank in ranks]
            return torch.stack(parts).mean()

        losses = minimize([optimizer], loss, max(lengths), first=1)
        result = evaluate(model, prefetch_child.VALID, score=lambda ids: model(*ids), label=prefetch_child.clicked)
        return losses, {name: start_rows(embeddings, name, NUM_IDS) for name in embeddings.tables}, result.values()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("lengths", [[4, 4], [2, 5]])
def test_trainers_equal_one_on_their_joined_batches(
    trainers: Trainers, where: str, lengths: list[int], tmp_path: Path
) -> None:
    found = run(trainers, tmp_path, where, lengths=lengths)
    losses, rows, _ = joined(lengths)
    for rank, each in enumerate(found):
        assert not each["error"] and each["step"] == max(lengths)
        own = list(range(1, lengths[rank] + 1))
        assert each["passes"] == [own + own[-1:] * (max(lengths) - lengths[rank])]  # the last one is repeated
    assert found[0]["rows"] == found[1]["rows"]
    for step, expected in enumerate(losses):
        has = [rank for rank in range(2) if step < lengths[rank]]
        assert sum(found[rank]["losses"][step] for rank in has) / len(has) == pytest.approx(expected, abs=1e-6)
    for name, values in found[0]["rows"].items():
        torch.testing.assert_close(torch.tensor(values), rows[name])


def test_the_bits_are_those_without_prefetch_wherever_the_rows_are(trainers: Trainers, tmp_path: Path) -> None:
    plain = run(trainers, tmp_path, "servers", lengths=[4, 4], prefetched=False)
    for where in PLACES:
        found = run(trainers, tmp_path, where, lengths=[4, 4])
        assert [(each["losses"], each["rows"]) for each in found] == [(each["losses"], each["rows"]) for each in plain]


@pytest.mark.parametrize("where", PLACES)
def test_with_staleness_and_accumulation_all_end_together(trainers: Trainers, where: str, tmp_path: Path) -> None:
    found = run(trainers, tmp_path, where, lengths=[6, 3], staleness=2, overlap=True, epochs=2, accumulate=2)
    for each in found:
        assert not each["error"] and each["step"] == 6 and [len(part) for part in each["passes"]] == [6, 6]
    assert found[0]["rows"] == found[1]["rows"]


@pytest.mark.parametrize(
    ("where", "prefetched"), [*((where, True) for where in PLACES), ("shared", False), ("servers", False)]
)
def test_trainer_0_validates_for_all_on_a_list_of_batches(
    trainers: Trainers, where: str, prefetched: bool, tmp_path: Path
) -> None:
    """Training is not changed by it."""
    job: dict[str, Any] = {"lengths": [4, 4], "prefetched": prefetched}
    plain = run(trainers, tmp_path, where, **job)
    trained = run(trainers, tmp_path, where, validated=True, **job)
    assert not any(trainer["error"] for trainer in trained)
    for name in ("losses", "rows"):
        assert [trainer[name] for trainer in trained] == [trainer[name] for trainer in plain]
    assert trained[0]["metrics"] == trained[1]["metrics"] == pytest.approx(joined([4, 4])[2], abs=1e-6)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("until", [2, 4])
def test_a_resumed_job_equals_one_that_was_not_interrupted(
    trainers: Trainers, where: str, until: int, tmp_path: Path
) -> None:
    """At step 4 one loader has ended, so its trainer repeats its last batch after the resume, too."""
    job: dict[str, Any] = {"lengths": [6, 3], "until": until}
    whole = run(trainers, tmp_path, where, checkpoint=str(tmp_path / "whole"), **job)
    run(trainers, tmp_path, where, checkpoint=str(tmp_path / "run"), stops=True, **job)
    found = run(trainers, tmp_path, where, checkpoint=str(tmp_path / "run"), resumes=True, **job)
    for rank, each in enumerate(found):
        assert not each["error"] and each["passes"] == [whole[rank]["passes"][0][until:]]
        assert each["losses"] == whole[rank]["losses"][until:] and each["rows"] == whole[rank]["rows"]


@pytest.mark.parametrize("where", PLACES)
def test_a_loader_without_a_batch_is_an_error_of_all(trainers: Trainers, where: str, tmp_path: Path) -> None:
    for each in run(trainers, tmp_path, where, lengths=[3, 0]):
        assert "StreamError: prefetch: the loaders of trainers [1] have no batch" in each["error"]
    for each in run(trainers, tmp_path, where, lengths=[0, 0]):
        assert not each["error"] and each["step"] == 0


@pytest.mark.parametrize("where", PLACES)
def test_all_trainers_may_leave_their_loops(trainers: Trainers, where: str, tmp_path: Path) -> None:
    found = run(trainers, tmp_path, where, lengths=[4, 4], leaves=["all", 3], epochs=2)
    assert [each["passes"] for each in found] == [[[1, 2], [4]]] * 2  # the loader had yielded 3
    assert not any(each["error"] for each in found) and found[0]["rows"] == found[1]["rows"]


def test_a_trainer_that_leaves_alone_is_an_error_of_all(trainers: Trainers, tmp_path: Path) -> None:
    for each in run(trainers, tmp_path, "servers", lengths=[4, 4], leaves=[0, 3], epochs=2):
        assert re.search(r"step 3: trainer 1 \w.* step 3, but trainer 0 ends its stream", each["error"])


def test_ids_on_the_devices_of_several_trainers_must_be_named(trainers: Trainers, tmp_path: Path) -> None:
    for each in run(trainers, tmp_path, "device", lengths=[2, 2], few=True):
        assert "ConfigError: modules look up 30 ids of table 'item', but the rows are on the devices" in each["error"]


def test_loaders_that_do_not_divide_their_data_are_a_warning(trainers: Trainers, tmp_path: Path) -> None:
    first, second = run(trainers, tmp_path, "shared", lengths=[2, 2], undivided=True, epochs=2)
    (warning,) = first["warnings"]
    assert (
        warning.startswith("prefetch: the first batches of trainers [0, 1] have the same ids")
        and not second["warnings"]
    )
    assert not any(each["warnings"] for each in run(trainers, tmp_path, "shared", lengths=[2, 2]))
