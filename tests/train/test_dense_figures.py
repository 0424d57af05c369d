"""The learning rates and the gradient norm that a record has are those of torch."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from example_reports import Clock
from loop import batches, job, loss_of
from report_records import read_records
from satrap.monitor.progress import Progress
from satrap.monitor.sinks import Screen


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_norm_is_that_of_the_first_step_after_a_report(scale: float) -> None:
    """Gradients of a scaled loss are those of the loss, as a GradScaler has the optimizer apply them."""
    embeddings, model, optimizer = job()
    norms, found = [], []
    with embeddings:
        for number, batch in enumerate(embeddings.stream(batches(6))):
            optimizer.zero_grad()
            (scale * loss_of(model, batch)).backward()
            gradients = [param.grad / scale for param in model.parameters() if param.grad is not None]
            norms.append(float(torch.cat([each.flatten() for each in gradients]).norm()))
            optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
            optimizer.step()
            if number % 2:
                found.append(embeddings.counters().gradient_norm)
    assert found == pytest.approx(norms[::2], rel=1e-5)


def test_rates_are_recorded_when_they_change(tmp_path: Path) -> None:
    embeddings, model, optimizer = job()
    assert embeddings.counters().learning_rates == {"dense": optimizer.param_groups[0]["lr"], "tables": 0.1}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    clock = Clock()
    screen = Screen(io.StringIO(), as_bar=True)  # its reports read the norm, too
    with embeddings, Progress(embeddings, [screen], record=tmp_path, clock=clock) as progress:
        for batch in embeddings.stream(batches(8)):
            optimizer.zero_grad()
            (loss := loss_of(model, batch)).backward()
            optimizer.step()
            scheduler.step()
            clock.now += 1.0
            progress.step(batch, loss=loss)
    lines = [
        line for line in read_records(tmp_path / "records" / "trainer-0.jsonl").lines if line["kind"] == "interval"
    ]
    changes = {line["step"]: line["learning_rates"] for line in lines if "learning_rates" in line}
    first = changes[1]["dense"]
    assert changes == {
        1: {"dense": first, "tables": 0.1},
        4: {"dense": first / 2, "tables": 0.05},
        8: {"dense": first / 4, "tables": 0.025},
    }
    assert len(lines) == 8 and all(line["gradient_norm"] > 0 for line in lines)
    assert json.dumps(lines).count("device_bytes") == (len(lines) if torch.cuda.is_initialized() else 0)


def test_tables_with_different_rates_have_their_names() -> None:
    embeddings, _, optimizer = job()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.75})
    optimizer.param_groups[-1]["lr"] = 0.5
    rates = embeddings.counters().learning_rates
    assert rates == {"dense group 0": rates["dense group 0"], "dense group 1": 0.75, "user": 0.1, "item": 0.5}
    assert embeddings.counters().gradient_norm is None
    embeddings.close()
