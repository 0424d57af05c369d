"""A checkpoint saves the position of torchdata's StatefulDataLoader in `Embeddings.prefetch`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from module_jobs import DIM, NUM_IDS, embeddings_of, item, start_rows
from satrap import Checkpoint
from satrap.nn import Embedding

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
    loaders: Any = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed: make public-models"
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("save_at", [3, 7])
def test_training_resumes_exactly(num_workers: int, save_at: int, tmp_path: Path) -> None:
    """Each pass has five batches in another order, which the loader draws from torch's global generator."""
    found: list[Any] = []
    for folder, resumes, until in (("whole", False, 10), ("part", False, save_at), ("part", True, 10)):
        with embeddings_of(item()) as embeddings:
            torch.manual_seed(3)
            head = torch.nn.Linear(DIM, 1)
            module = Embedding(embeddings, "item")
            optimizer = embeddings.optimizer(torch.optim.SGD(head.parameters(), lr=0.1))
            loader = loaders.StatefulDataLoader(
                torch.arange(20) % NUM_IDS, batch_size=4, shuffle=True, num_workers=num_workers
            )
            batches = embeddings.prefetch(loader, lambda ids: {"item": ids}, overlap=True)
            run = Checkpoint(tmp_path / folder, head, optimizer, embeddings, loader)
            assert run.resume() == resumes
            seen = []
            while embeddings.step < until:
                for ids in batches:
                    seen.append(ids.tolist())
                    loss = (head(module(ids)) - torch.rand(())).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.save(every_steps=save_at)
                    if embeddings.step == until:
                        break
            found.append((seen, start_rows(embeddings, "item", NUM_IDS).tolist(), head.weight.tolist()))
    (whole, *expected), (first, *_), (rest, *resumed) = found
    assert first == whole[:save_at] and rest == whole[save_at:] and resumed == expected
