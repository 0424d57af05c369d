"""`batch[name]`: the rows of one feature of a batch, as a part of its block or as a sequence."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from bag_oracle import draw_bags
from contents import bits
from loop import batches, job, train_step
from satrap import Adagrad, Batch, Embeddings, InputError, Normal, Table
from satrap.train.sequence import Sequence


def looked_up() -> Batch:
    """Return a batch of features of other dims and tables, two of them sequences, in an order that tables change."""
    item = Table("item", dim=3, optimizer=Adagrad(), initial=Normal())
    user = Table("user", dim=5, optimizer=Adagrad(), initial=Normal())
    ours = Embeddings(
        {"item": item, "path": item.sequence(2), "user": user, "bag": item.bag("mean"), "past": user.sequence(3)},
        num_threads=1,
    )
    ours.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    inputs = draw_bags(np.random.default_rng(0), ours.features, 7).inputs()
    return next(ours.stream([inputs], overlap=False))


def test_a_batch_has_the_names_of_its_features() -> None:
    batch = looked_up()
    assert list(batch) == list(batch.keys()) == ["item", "path", "bag", "user", "past"]
    assert "bag" in batch and "bags" not in batch and 3 not in batch
    assert len(batch) == 7 and dict(batch).keys() == batch.keys()
    assert repr(batch).endswith("features=['item', 'path', 'bag', 'user', 'past'])")


def test_the_parts_are_views_that_make_the_block() -> None:
    batch = looked_up()
    parts = [batch[name] for name in batch if not isinstance(batch[name], Sequence)]
    assert torch.equal(torch.cat(parts, 1), batch.embeddings)
    assert [part.shape for part in parts] == [(7, 3), (7, 3), (7, 5)]
    assert all(part.untyped_storage().data_ptr() == batch.embeddings.untyped_storage().data_ptr() for part in parts)
    assert batch["path"].values.shape == (7, 2, 3) and batch["past"].mask.shape == (7, 3)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_of_the_parts_are_those_of_the_block(first: Callable[[], Any]) -> None:
    """Also where a part was read before, without autograd."""
    batch, other = looked_up(), looked_up()
    assert batch.embeddings.requires_grad
    with first():
        assert torch.equal(batch["user"], other["user"])
    factors = torch.randn(7, 11)
    (other.embeddings * factors).sum().backward()
    for name, part in zip(("user", "item", "bag"), (factors[:, 6:], factors[:, :3], factors[:, 3:6]), strict=True):
        (batch[name] * part).sum().backward()  # several backward passes through the same parts
    assert other.embeddings.grad is not None and batch.embeddings.grad is not None
    torch.testing.assert_close(batch.embeddings.grad, other.embeddings.grad, rtol=0, atol=0)
    batch["path"].values.sum().backward()
    assert batch["path"].values.grad is not None


def test_a_model_of_the_parts_trains_like_one_of_the_block() -> None:
    runs = []
    for by_name in (False, True):
        ours, model, optimizer = job()
        for batch in ours.stream(batches(5), overlap=False):
            logits = model(batch.dense, torch.cat([batch[each] for each in batch], 1) if by_name else batch.embeddings)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        runs.append(bits(ours, model))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_part_looks_up_a_batch_that_was_read_ahead(overlap: bool) -> None:
    ours, model, optimizer = job(staleness=0)
    first, second = islice(ours.stream(batches(2), overlap=overlap), 2)
    train_step(model, optimizer, first)
    assert "not looked up yet" in repr(second) or overlap
    assert list(second) == ["user", "item", "history"]  # names need no rows
    second["item"].sum().backward()
    assert second.embeddings.grad is not None
    optimizer.step()
    assert ours.step == 2 and not ours.counters().lost


def test_an_unknown_feature_is_refused() -> None:
    batch = looked_up()
    with pytest.raises(InputError, match="the batch has no feature 'users'; the nearest known one is 'user'"):
        batch["users"]
    with pytest.raises(InputError, match="no feature 0; known are 'item', 'path', 'bag', 'user', 'past'"):
        batch[0]  # type: ignore[index]
