"""The outcome of every batch: trained, unchanged, or lost and reported; and which rows a state_dict belongs to."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from loop import DIM, batches, job, loss_of, train
from satrap import SGD, AdamW, Embeddings, Inputs, StreamError, Table


def test_losses_are_reported_at_once() -> None:
    """By cause, over all streams so far, while the stream still runs."""
    embeddings, model, optimizer = job()
    for batch in embeddings.stream(batches(4)):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if batch.step % 2:
            optimizer.step()
        else:
            optimizer.zero_grad()
    assert embeddings.counters().lost == {"batches/zero_grad": 2}
    for batch in embeddings.stream(batches(2)):
        loss_of(model, batch).backward()
        optimizer.zero_grad()
    found = embeddings.counters()
    assert found.lost == {"batches/zero_grad": 4}
    assert sum(found.staleness.values()) == 6
    assert embeddings.step == 6, "a dropped step is settled, too"


def test_truncated_ids_are_reported() -> None:
    item = Table("item", dim=DIM, optimizer=SGD(lr=0.1))
    embeddings = Embeddings({"history": item.sequence(2)}).eval()
    offsets = np.array([0, 3, 3, 8])
    inputs = Inputs(names=("history",), values=np.arange(8, dtype=np.uint64), offsets=offsets, batch_size=3)
    batch = embeddings(inputs)
    assert batch["history"].mask.sum() == 4
    assert embeddings.counters().lost == {"ids/history": 4}


@pytest.mark.parametrize("used", ["pooled", "sequence"])
def test_rows_that_no_loss_used_stay_unchanged(used: str) -> None:
    """They stay as a Parameter whose grad is None stays; with a gradient of 0, weight decay would change them."""
    optimizer_ = AdamW(lr=0.1, weight_decay=0.5)
    one, other = Table("one", dim=DIM, optimizer=optimizer_), Table("other", dim=DIM, optimizer=optimizer_)
    embeddings = Embeddings({"pooled": one, "sequence": other.sequence(1)}, num_threads=1)
    optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    ids = np.arange(4, dtype=np.uint64)
    inputs = Inputs(names=("pooled", "sequence"), values=np.tile(ids, 2), offsets=np.arange(9), batch_size=4)
    before: dict[str, Any] = {}
    for batch in embeddings.stream([inputs] * 3):
        for name, table in (("pooled", "one"), ("sequence", "other")):
            before.setdefault(name, embeddings.tables[table].read(ids).values)
        leaf = batch.embeddings if used == "pooled" else batch["sequence"].values
        leaf.square().sum().backward()
        optimizer.step()
    for name, table in (("pooled", "one"), ("sequence", "other")):
        same = np.array_equal(embeddings.tables[table].read(ids).values, before[name])
        assert same == (name != used)


def test_rows_of_another_checkpoint_are_refused() -> None:
    embeddings, model, optimizer = job()
    whole = torch.nn.ModuleDict({"embeddings": embeddings, "model": model})
    train(embeddings, model, optimizer, batches(3))
    state = copy.deepcopy(whole.state_dict())
    assert not any("user" in name or "item" in name for name in state)
    whole.load_state_dict(state)
    train(embeddings, model, optimizer, batches(1))
    whole.load_state_dict(state)
    with pytest.raises(StreamError, match=r"state of step 3, table versions .*, but the tables are at step 4"):
        embeddings.stream(batches(1))
