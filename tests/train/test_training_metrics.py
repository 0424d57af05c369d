"""The samples of a trainer, which holds its rows: they are what the stream, the tables and the checkpoints counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from satrap import Checkpoint, Embeddings, Inputs, Table
from satrap.monitor import samples
from satrap.monitor.samples import Distribution, Sample, collect, not_ready


def numbers(found: list[Sample]) -> dict[str, float | Distribution]:
    return {".".join((each.name.removeprefix("satrap_"), *each.labels.values())): each.value for each in found}


def test_samples_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_sources", [])  # not those that other tests left
    embeddings = Embeddings({"item": Table("item", dim=4)}, staleness=2, deterministic=True, num_threads=1)
    model = torch.nn.Linear(4, 1)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    run = Checkpoint(tmp_path / "run", model, optimizer, embeddings)
    assert not_ready() == "" and numbers(collect())["last_checkpoint_timestamp_seconds"] == 0
    inputs = Inputs(names=("item",), values=np.arange(64, dtype=np.uint64), batch_size=64)
    for batch in embeddings.stream([inputs] * 6, overlap=False):
        optimizer.zero_grad()
        model(batch.embeddings).square().mean().backward()
        optimizer.step()
        run.save(every_steps=4)
    embeddings.drain()
    found = numbers(collect())
    counters, stats = embeddings.counters(), embeddings.tables["item"].stats()
    staleness = found["staleness_steps"]
    assert isinstance(staleness, Distribution)
    assert staleness.counts[:3] == [counters.staleness.get(steps, 0) for steps in range(3)]
    assert sum(staleness.counts) == 6 and staleness.total == sum(n * count for n, count in counters.staleness.items())
    for stage, seconds in counters.stages.items():
        assert found[f"stage_seconds.{stage}"] == seconds
    assert found["step"] == 6 and found["staleness_bound_steps"] == 2
    assert found["table_rows.item"] == 64 and found["table_lookups.item"] == stats["lookups"] == 6 * 64
    assert (found["table_hits.item"], found["table_updated.item"]) == (5 * 64, 6 * 64)
    assert (found["checkpoints"], found["last_checkpoint_step"], found["snapshots.save"]) == (1, 4, 1)
    size = sum(each.stat().st_size for each in (tmp_path / "run").rglob("*.arrow"))
    manifests = sum(each.stat().st_size for each in (tmp_path / "run").rglob("manifest.json"))
    assert found["last_snapshot_bytes.save"] == size + manifests and found["snapshot_done_bytes.save"] == 0
    # A second stream adds to the totals; a resumed checkpoint counts as the last one.
    for batch in embeddings.stream([inputs] * 2, overlap=False):
        optimizer.zero_grad()
        model(batch.embeddings).square().mean().backward()
        optimizer.step()
    assert run.resume()
    found = numbers(collect())
    staleness = found["staleness_steps"]
    assert isinstance(staleness, Distribution) and sum(staleness.counts) == 8
    assert (found["step"], found["last_checkpoint_step"], found["snapshots.restore"]) == (4, 4, 1)
    embeddings.close()
    assert not_ready() == "the embeddings are closed"
