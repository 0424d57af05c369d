"""A checkpoint saves the position of torchdata's StatefulDataLoader in `Embeddings.prefetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loop import take_step
from module_jobs import DIM, NUM_IDS, embeddings_of, item, start_rows
from satrap import Checkpoint
from satrap.nn import Embedding

loaders: Any = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed: make public-models"
)
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("save_at", [3, 7])
def test_training_resumes_exactly(num_workers: int, save_at: int, tmp_path: Path) -> None:
    """Each pass has five batches in another order, which the loader draws from torch's global generator."""
    whole, *expected = trained(tmp_path / "whole", num_workers, save_at, until=10)
    first, *_ = trained(tmp_path / "part", num_workers, save_at, until=save_at)
    rest, *resumed = trained(tmp_path / "part", num_workers, save_at, until=10)
    assert first == whole[:save_at] and rest == whole[save_at:] and resumed == expected


def trained(folder: Path, num_workers: int, save_at: int, *, until: int) -> list[Any]:
    """Return the batches up to a step, the rows and the weights."""
    with embeddings_of(item()) as embeddings:
        torch.manual_seed(3)
        head = torch.nn.Linear(DIM, 1)
        module = Embedding(embeddings, "item")
        optimizer = embeddings.optimizer(torch.optim.SGD(head.parameters(), lr=0.1))
        data = torch.arange(20) % NUM_IDS
        loader = loaders.StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers)
        batches = embeddings.prefetch(loader, lambda ids: {"item": ids}, overlap=True)
        run = Checkpoint(folder, head, optimizer, embeddings, loader)
        run.resume()
        seen: list[Any] = []
        while embeddings.step < until:
            for ids in batches:
                seen.append(ids.tolist())
                take_step((head(module(ids)) - torch.rand(())).square().mean(), optimizer)
                run.save(every_steps=save_at)
                if embeddings.step == until:
                    break
        found = [seen, start_rows(embeddings, "item", NUM_IDS).tolist(), head.weight.tolist()]
    loader._iterator = None  # ends its processes
    return found
