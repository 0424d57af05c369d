"""The dense network on a GPU: batches and gradients are copied on CUDA streams of their own, and nothing else changes.
Skipped without a device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import satrap
from loop import DIM, batches, job, loss_of, rows, train, train_step
from runs import JOB, start_run, wait_for_exit
from satrap import SGD, Embeddings, Inputs, Table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = "cuda"


def trained(device: str, staleness: int, overlap: bool | None = None) -> tuple[list[float], dict[str, Any]]:
    embeddings, model, _ = job(staleness, deterministic=True)
    model.to(device)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    with embeddings.stream(batches(30), device=device, overlap=overlap) as stream:
        for batch in stream:
            assert {each.device.type for each in (batch.dense, batch.label, batch.embeddings)} == {device}
            losses.append(train_step(model, optimizer, batch))
    return losses, rows(embeddings)


@pytest.mark.parametrize("overlap", [None, False])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_device_changes_only_rounding(staleness: int, overlap: bool | None) -> None:
    here, there = trained("cpu", staleness), trained(DEVICE, staleness, overlap)
    np.testing.assert_allclose(there[0], here[0], rtol=1e-4)
    for name, values in here[1].items():
        np.testing.assert_allclose(there[1][name], values, rtol=1e-3, atol=1e-5)


def test_runs_on_a_device_are_reproducible() -> None:
    first, second = trained(DEVICE, 2), trained(DEVICE, 2)
    for name, values in first[1].items():
        np.testing.assert_array_equal(second[1][name], values)


def test_sequences_and_accumulation() -> None:
    """Checks the gradients of padded rows, summed over two batches."""
    item = Table("item", dim=DIM, optimizer=SGD(lr=0.1))
    found = []
    for device in ("cpu", DEVICE):
        embeddings = Embeddings({"history": item.sequence(3)}, num_threads=1)
        optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
        inputs = Inputs(
            names=("history",), values=np.arange(8, dtype=np.uint64), offsets=np.array([0, 2, 2, 8]), batch_size=3
        )
        for i, batch in enumerate(embeddings.stream([inputs] * 4, device=device, accumulate=2)):
            part = batch["history"]
            (part.values * part.mask.unsqueeze(2)).square().sum().backward()
            if i % 2:
                optimizer.step()
        embeddings.drain()
        found.append(embeddings.tables["item"].read(np.arange(8, dtype=np.uint64)).values)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_an_overflow_in_half_precision_drops_the_batch() -> None:
    embeddings, model, _ = job()
    model.to(DEVICE)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**100)
    batch = next(embeddings.stream(batches(2), device=DEVICE))
    with torch.autocast(DEVICE, torch.float16):
        loss = loss_of(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert embeddings.counters().lost == {"batches/overflow": 1}


def test_evaluation_on_a_device() -> None:
    embeddings, model, optimizer = job()
    train(embeddings, model, optimizer, batches(10))
    embeddings.eval()
    here = satrap.evaluate(model, embeddings.stream(batches(5)))
    there = satrap.evaluate(model.to(DEVICE), embeddings.stream(batches(5), device=DEVICE))
    assert there.log_loss() == pytest.approx(here.log_loss(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dlrm_uses_torchs_form_on_a_device(dtype: torch.dtype) -> None:
    features = Embeddings({"a": Table("a", dim=DIM), "b": Table("b", dim=DIM)})
    model = satrap.models.DLRM(2, features, bottom=(8,), top=(8, 1))
    dense, block = torch.randn(6, 2), torch.randn(6, 2 * DIM)
    expected = model(dense, block)
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        found = model.to(DEVICE)(dense.to(DEVICE), block.to(DEVICE))
    torch.testing.assert_close(found.cpu(), expected, rtol=0.05, atol=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device for each of two trainers")
def test_two_trainers_of_a_run_with_a_device_each(tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", DEVICE):
        folder = tmp_path / device
        folder.mkdir()
        with start_run(folder, JOB, "--trainers", "2", arguments=(str(folder), "40", "0", "", device)) as run:
            status, _, err = wait_for_exit(run)
        assert status == 0, err
        with np.load(folder / "end.npz") as made:
            found[device] = dict(made)
    for name, values in found["cpu"].items():
        np.testing.assert_allclose(found[DEVICE][name], values, rtol=1e-3, atol=1e-5)
