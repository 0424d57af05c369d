"""The largest magnitude of gradients, which the device computes before the update that reads it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loop import batches, job, train
from satrap.device import device_rows
from satrap.device.device_blocks import Magnitude


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_is_the_largest_magnitude(dtype: torch.dtype, rng: np.random.Generator) -> None:
    parts = [torch.from_numpy(rng.normal(size=(3, n))).to(dtype) for n in (1, 4, 7)]
    factors = [1.0, -3.0, 0.5]
    expected = max(float((each.float() * factor).abs().max()) for each, factor in zip(parts, factors, strict=True))
    assert float(Magnitude(zip(parts, factors, strict=True))) == expected
    assert float(Magnitude([(-parts[2], 1.0)])) == float(parts[2].float().abs().max())


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_never_below_a_bound(number: float) -> None:
    parts = [(torch.ones(4), 1.0), (torch.tensor([1.0, number, 2.0]), 1.0)]
    for given in (parts, parts[::-1]):
        assert not float(Magnitude(given)) < device_rows.LARGEST


def test_it_is_0_without_gradients() -> None:
    assert float(Magnitude([])) == float(Magnitude([(torch.empty(0, 3), 1.0)])) == 0.0


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_stream_measures_before_the_update(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread of the loop, behind the backward pass. The update does not look at gradients."""
    embeddings, model, optimizer = job(staleness, deterministic=staleness > 0, device="cpu")
    threads: list[Any] = []
    measure = embeddings.worker.measure

    def note(gradients: Any) -> Any:
        threads.append(threading.current_thread())
        assert all(isinstance(gradient, Tensor) for gradient, _ in gradients)
        return measure(gradients)

    def refuse(_: Any) -> Magnitude:
        raise AssertionError("an update measured its gradients")

    monkeypatch.setattr(embeddings.worker, "measure", note)
    monkeypatch.setattr(device_rows, "Magnitude", refuse)
    train(embeddings, model, optimizer, batches(5), overlap=staleness > 0)
    assert threads == [threading.main_thread()] * 5
