"""A checkpoint saves where a prefetched loader has come to, if the loader has a state: training that resumes equals
training that was not interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loop import take_step
from module_jobs import DIM, NUM_IDS, embeddings_of, item, start_rows
from satrap import Checkpoint, CheckpointError, StreamError
from satrap.nn import Embedding

NUM_BATCHES, PASSES = 5, 3


class Loader:
    """A loader with a state, as torchdata's StatefulDataLoader has one: it shuffles each pass."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(7)
        self._order: Tensor | None = None
        self._num_yielded = 0

    def __iter__(self) -> Iterator[Tensor]:
        if self._order is None:
            self._order = torch.randperm(NUM_BATCHES, generator=self._generator)
        while self._num_yielded < NUM_BATCHES:
            number = int(self._order[self._num_yielded])
            self._num_yielded += 1
            yield torch.arange(number, number + 4)
        self._order, self._num_yielded = None, 0

    def state_dict(self) -> dict[str, Any]:
        order = None if self._order is None else self._order
        return {"generator": self._generator.get_state(), "order": order, "yielded": self._num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._order, self._num_yielded = state["order"], state["yielded"]


def named(ids: Tensor) -> dict[str, Any]:
    return {"item": ids}


class Job:
    """Trains over the loader, and saves at a step, inside the loop or after it."""

    def __init__(self, embeddings: Any, folder: Path, loader: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.embeddings, self.module, self.head = embeddings, Embedding(embeddings, "item"), torch.nn.Linear(DIM, 1)
        self.optimizer = embeddings.optimizer(torch.optim.SGD(self.head.parameters(), lr=0.1))
        self.batches = embeddings.prefetch(loader, named, **options)
        self.run = Checkpoint(folder, self.head, self.optimizer, embeddings, loader)
        self.losses: list[float] = []
        self.passes: list[list[list[int]]] = []

    def train(self, passes: int, *, save_at: int = -1, stop: bool = False) -> None:
        for _ in range(passes):
            self.passes.append([])
            for ids in self.batches:
                self.passes[-1].append(ids.tolist())
                noise = torch.rand(())  # must be drawn as in training that was not interrupted
                self.losses.append(take_step((self.head(self.module(ids)) - noise).square().mean(), self.optimizer))
                if self.embeddings.step == save_at:
                    self.run.save()
                    if stop:
                        return

    def rows(self) -> Tensor:
        return start_rows(self.embeddings, "item", NUM_IDS)


@pytest.mark.parametrize("where", ["here", "servers", "device", "direct"])
@pytest.mark.parametrize("overlap", [False, True])
def test_training_resumes_in_the_middle_of_a_pass(where: str, overlap: bool, tmp_path: Path) -> None:
    save_at = NUM_BATCHES + 2
    with embeddings_of(item(), where=where) as embeddings:
        whole = Job(embeddings, tmp_path / "whole", Loader(), overlap=overlap)
        whole.train(PASSES)
        rows = whole.rows()
    with embeddings_of(item(), where=where) as embeddings:
        Job(embeddings, tmp_path / "run", Loader(), overlap=overlap).train(PASSES, save_at=save_at, stop=True)
    with embeddings_of(item(), where=where) as embeddings:
        job = Job(embeddings, tmp_path / "run", Loader(), overlap=overlap)
        assert job.run.resume() and embeddings.step == save_at
        job.train(PASSES - 1)
        assert [len(each) for each in job.passes] == [NUM_BATCHES - 2, NUM_BATCHES]
        assert job.passes == [whole.passes[1][2:], whole.passes[2]] and job.losses == whole.losses[save_at:]
        assert torch.equal(job.rows(), rows) and embeddings.step == PASSES * NUM_BATCHES


def test_with_staleness_batches_that_were_read_ahead_are_read_again(tmp_path: Path) -> None:
    with embeddings_of(item(), staleness=3) as embeddings:
        first = Job(embeddings, tmp_path, Loader(), overlap=True)
        first.train(1, save_at=2)
    with embeddings_of(item(), staleness=3) as embeddings:
        job = Job(embeddings, tmp_path, Loader(), overlap=True)
        assert job.run.resume()
        job.train(1)
        assert job.passes == [first.passes[0][2:]]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_save_between_passes_is_before_the_next_one(passes: int, tmp_path: Path) -> None:
    with embeddings_of(item()) as embeddings:
        whole = Job(embeddings, tmp_path / "whole", Loader())
        whole.train(PASSES)
    with embeddings_of(item()) as embeddings:
        job = Job(embeddings, tmp_path / "run", Loader())
        job.train(passes)
        job.run.save()
    with embeddings_of(item()) as embeddings:
        job = Job(embeddings, tmp_path / "run", Loader())
        assert job.run.resume()
        job.train(1)
        assert job.passes == whole.passes[passes : passes + 1]


def test_a_save_at_the_last_batch_resumes_at_the_end_of_its_pass(tmp_path: Path) -> None:
    with embeddings_of(item()) as embeddings:
        whole = Job(embeddings, tmp_path, Loader())
        whole.train(2, save_at=NUM_BATCHES)
    with embeddings_of(item()) as embeddings:
        job = Job(embeddings, tmp_path, Loader())
        assert job.run.resume()
        job.train(2)
        assert job.passes == [[], whole.passes[1]]


def test_a_resume_inside_a_run_starts_the_loop_where_it_was_saved(tmp_path: Path) -> None:
    with embeddings_of(item()) as embeddings:
        job = Job(embeddings, tmp_path, Loader())
        job.train(1, save_at=3)
        assert job.run.resume()
        job.train(1)
        assert job.passes[1] == job.passes[0][3:]


def test_a_loader_without_a_state_is_refused_beside_a_checkpoint(tmp_path: Path) -> None:
    with embeddings_of(item()) as embeddings:
        job = Job(embeddings, tmp_path, [torch.arange(4)])
        with pytest.raises(StreamError, match=r"a list has no state_dict\(\).*StatefulDataLoader"):
            job.train(1)
        assert embeddings.step == 0


def test_bad_states_are_named(tmp_path: Path) -> None:
    class Odd(Loader):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"odd": {1, 2}}

    class Short(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state | {"yielded": NUM_BATCHES})

    with embeddings_of(item()) as embeddings:
        job = Job(embeddings, tmp_path, Odd())
        with pytest.raises(CheckpointError, match=r"loader\.odd is a set; expected tensors, numbers"):
            job.train(1, save_at=2)
        assert not list(tmp_path.glob("0*"))
    with embeddings_of(item()) as embeddings:
        Job(embeddings, tmp_path, Loader()).train(1, save_at=2)
    with embeddings_of(item()) as embeddings:
        job = Job(embeddings, tmp_path, Short())
        assert job.run.resume()
        with pytest.raises(StreamError, match=r"the loader has no batch 2, after which the checkpoint was saved"):
            job.train(1)
