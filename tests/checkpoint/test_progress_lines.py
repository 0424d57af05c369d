"""A save, a resume and a migration over servers log how far they are and how long they will take."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import running_servers
from logged import received
from loop import Net, batches, tables, train
from satrap import Checkpoint, Deployment, Embeddings, transfer
from satrap.server.migration.coordinator import Migration
from satrap.table.snapshot.directory import ChecksumFile
from satrap.worker import remote_progress
from waiting import DEADLINE_SECONDS


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """The records of the log, in which every advance makes a line."""
    monkeypatch.setattr(transfer, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(remote_progress, "_QUERY_SECONDS", 0.0)
    with received("satrap") as records:
        yield records


def figures(records: list[logging.LogRecord], logger: str, event: str) -> list[dict[str, Any]]:
    found = [each for each in records if each.name == logger and getattr(each, "event", None) == event]
    return [each.event_values for each in found]  # type: ignore[attr-defined]


def observed_midway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a server continue a save after its first bytes, and end a verification or restore, only after the trainer
    has observed one of its kind."""
    is_observed = {kind: threading.Event() for kind in ("save", "verify", "restore")}
    observe, leave, write = transfer.Transfer.observe, transfer.Transfer.__exit__, ChecksumFile.write

    def observe_and_note(self: transfer.Transfer, figures: Sequence[Mapping[str, int]]) -> None:
        observe(self, figures)
        if any(each["done"] for each in figures):
            is_observed[self.kind].set()

    def wait_once_begun(begun: transfer.Transfer | None) -> None:
        if begun is not None and begun._among is not None and begun.figures()["done"]:
            assert is_observed[begun.kind].wait(DEADLINE_SECONDS)

    def write_once_observed(self: ChecksumFile, data: Any) -> Any:
        wait_once_begun(transfer.current_transfer())
        return write(self, data)

    def leave_once_observed(self: transfer.Transfer, *error: Any) -> None:
        wait_once_begun(self)
        leave(self, *error)

    monkeypatch.setattr(transfer.Transfer, "observe", observe_and_note)
    monkeypatch.setattr(transfer.Transfer, "__exit__", leave_once_observed)
    monkeypatch.setattr(ChecksumFile, "write", write_once_observed)


def test_saves_resumes_and_moves_over_servers(
    tmp_path: Path, records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    user, item = (replace(tables()[name], num_buckets=32) for name in ("user", "item"))
    features = {"user": user, "item": item, "history": item.bag("mean")}
    with running_servers(2, checkpoints=["/"]) as services:
        addresses = [service.address for service in services]
        with Embeddings(features, deployment=Deployment(addresses[:1])) as embeddings:
            model = Net()
            optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            train(embeddings, model, optimizer, batches(10))
            run = Checkpoint(tmp_path, model, optimizer, embeddings)
            with monkeypatch.context() as patched:
                observed_midway(patched)
                run.save()
                run.resume()
        Migration(addresses[:1], addresses, group_bytes=40, pause_ratio=0.0).run()
    saves = figures(records, "satrap.checkpoint", "save_progress")
    assert any(0 < each["done"] < each["total"] and each["seconds_left"] >= 0 for each in saves), saves
    (done,) = figures(records, "satrap.checkpoint", "save_done")
    assert done["bytes"] == sum(each.stat().st_size for each in tmp_path.glob("*/tables/**/*") if each.is_file())
    for event in ("verify_progress", "restore_progress"):
        assert any(each["total"] and each["done"] for each in figures(records, "satrap.worker", event)), event
    moves = figures(records, "satrap.server", "move_progress")
    shares = [each["done"] / each["total"] for each in moves]
    assert shares == sorted(shares) and shares[-1] == 1 and len(shares) > 5
    assert all(each["seconds_left"] is not None for each in moves) and moves[-1]["seconds_left"] == 0
