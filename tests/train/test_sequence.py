"""Jagged sequences of a training stream: the bits of the padded form, the losses of plain PyTorch, and their forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn import Parameter

from satrap import (
    SGD,
    Adagrad,
    ConfigError,
    Embeddings,
    InputError,
    Inputs,
    JaggedSequence,
    NonFiniteError,
    Normal,
    Table,
)
from satrap.train.batch_lookup import BatchLookup
from satrap.train.joint_calls import Padding

DIM, NUM_IDS, LONGEST = 5, 9, 6
EVERY = np.arange(NUM_IDS, dtype=np.uint64)
Bags = list[list[int]]


def inputs(*features: tuple[str, Bags]) -> Inputs:
    """Return a batch of bags by feature."""
    bags = [bag for _, each in features for bag in each]
    return Inputs(
        names=tuple(name for name, _ in features),
        values=np.array([id_ for bag in bags for id_ in bag], np.uint64),
        offsets=np.cumsum([0, *map(len, bags)]),
        batch_size=len(features[0][1]),
    )


def job(feature: Any) -> tuple[Embeddings, Any]:
    embeddings = Embeddings({"past": feature}, num_threads=1)
    dense = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1)
    return embeddings, embeddings.optimizer(dense)


def item(dim: int = DIM, optimizer: Any = None) -> Table:
    return Table("item", dim=dim, initial=Normal(), optimizer=optimizer or Adagrad(lr=0.1))


def score(rows: Tensor, mask: Tensor, head: Tensor) -> Tensor:
    """Return a score of each sample that depends on the position and the value of each of its rows."""
    return (torch.tanh(rows) * head[: rows.shape[1]] * mask[:, :, None]).sum((1, 2))


bags = st.lists(st.integers(0, NUM_IDS - 1), max_size=LONGEST)


@settings(max_examples=settings().max_examples // 3, deadline=None)
@given(
    batches=st.lists(st.lists(bags, min_size=1, max_size=6), min_size=1, max_size=3),
    max_length=st.integers(1, LONGEST),
    keep=st.sampled_from(["last", "first"]),
    padding_id=st.sampled_from([None, 3]),
)
def test_the_bits_of_the_padded_form(
    batches: list[Bags], max_length: int, keep: Literal["last", "first"], padding_id: int | None
) -> None:
    """Rows, losses, gradients, updated rows and what was cut, with empty samples, repeated ids and padding."""
    head, found = torch.randn(LONGEST, DIM), []
    for jagged in (False, True):
        embeddings, optimizer = job(item().sequence(max_length, keep=keep, padding_id=padding_id, jagged=jagged))
        seen = []
        for batch in embeddings.stream([inputs(("past", each)) for each in batches]):
            past = batch["past"]
            padded = past.padded(max_length) if jagged else past
            loss = score(padded.values, padded.mask, head).square().sum()
            loss.backward()
            gradient = past.values.grad
            if not jagged:
                gradient = gradient[past.mask]
            seen += [padded.values.detach(), padded.mask, loss.detach(), gradient]
            optimizer.step()
            optimizer.zero_grad()
        embeddings.drain()
        rows = embeddings.tables["item"].read(EVERY)
        found.append((seen, rows, embeddings.counters().lost))
    (seen, rows, lost), (its_seen, its_rows, its_lost) = found
    assert all(torch.equal(one, other) for one, other in zip(seen, its_seen, strict=True))
    assert all(np.array_equal(one, other) for one, other in zip(rows, its_rows, strict=True)) and lost == its_lost


def test_the_losses_of_plain_torch(rng: np.random.Generator) -> None:
    """No limit: one sample is far longer than the others."""
    embeddings, optimizer = job(item(optimizer=SGD(lr=0.1)).sequence())
    plain = torch.nn.Embedding.from_pretrained(
        torch.from_numpy(embeddings.tables["item"].lookup(EVERY, train=False).copy()), freeze=False
    )
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = [[rng.integers(0, NUM_IDS, n).tolist() for n in (3, 0, 1, 200, 2)] for _ in range(5)]
    for batch, each in zip(embeddings.stream([inputs(("past", bags)) for bags in batches]), batches, strict=True):
        past = batch["past"]
        loss = (torch.tanh(past.values).sum(1) / (1 + past.lengths).repeat_interleave(past.lengths)).square().mean()
        terms = [torch.tanh(plain(torch.tensor(bag))).sum(1) / (1 + len(bag)) for bag in each if bag]
        expected = torch.cat(terms).square().mean()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stepper.zero_grad()
        expected.backward()
        stepper.step()
    embeddings.drain()
    found = torch.from_numpy(embeddings.tables["item"].read(EVERY).values)
    torch.testing.assert_close(found, plain.weight.detach(), rtol=1e-5, atol=1e-6)


def test_nested_and_padded_are_views_of_one_leaf() -> None:
    """A nested tensor has the rows without a copy; gradients through both forms add up."""
    embeddings, _ = job(item().sequence())
    batch = next(embeddings.stream([inputs(("past", [[1, 2, 1], [], [4]]))]))
    past = batch["past"]
    assert isinstance(past, JaggedSequence) and past.offsets.tolist() == [0, 3, 3, 4]
    assert (past.shortest, past.longest, past.lengths.tolist()) == (0, 3, [3, 0, 1])
    nested, padded = past.nested(), past.padded()
    assert nested.is_nested and nested.layout == torch.jagged
    assert nested.values().data_ptr() == past.values.data_ptr()
    assert [len(each) for each in nested.unbind()] == [3, 0, 1]
    assert torch.equal(nested.to_padded_tensor(0.0), padded.values)
    assert padded.mask.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert past.padded(5).values.shape == (3, 5, DIM)
    (nested.values().sum() + 2 * padded.values.sum()).backward()
    assert past.values.grad is not None
    assert torch.equal(past.values.grad, torch.full((4, DIM), 3.0))
    with pytest.raises(InputError, match="max_length is 2, and a sample has 3 rows; expected at least as many"):
        past.padded(2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_an_attention_over_nested_rows_trains(rng: np.random.Generator) -> None:
    """The gradient of torch's attention over the nested form is that over each sample alone."""
    embeddings, _ = job(item(dim=8).sequence())
    bags = [rng.integers(0, NUM_IDS, n).tolist() for n in (3, 1, 7)]
    past = next(embeddings.stream([inputs(("past", bags))]))["past"]
    heads = past.nested().unflatten(-1, [2, 4]).transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    out.values().square().sum().backward()
    alone = past.values.detach().clone().requires_grad_()
    for rows in alone.split(past.lengths.tolist()):
        one = rows.unflatten(-1, [2, 4]).transpose(0, 1)[None]
        torch.nn.functional.scaled_dot_product_attention(one, one, one).square().sum().backward()
    torch.testing.assert_close(past.values.grad, alone.grad)


def test_aligned_sequences_have_one_length() -> None:
    kind = Table("kind", dim=2, initial=Normal())
    features = {"past": item().sequence(2, jagged=True), "kinds": kind.sequence(2, jagged=True, aligned_with="past")}
    embeddings = Embeddings(features, num_threads=1)
    embeddings.optimizer(torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1))
    good = inputs(("past", [[1, 2, 3], [], [4]]), ("kinds", [[7, 8, 7], [], [8]]))
    batch = next(embeddings.stream([good]))
    assert torch.equal(batch["past"].offsets, batch["kinds"].offsets)
    assert torch.cat([batch["past"].values, batch["kinds"].values], 1).shape == (3, DIM + 2)
    bad = inputs(("past", [[1, 2, 3], []]), ("kinds", [[7, 8, 7], [5]]))
    before = {name: len(table) for name, table in embeddings.tables.items()}
    with pytest.raises(InputError, match="sample 1 has 1 ids of 'kinds' and 0 of 'past', with which it is aligned"):
        embeddings.worker.lookup(bad)
    assert {name: len(table) for name, table in embeddings.tables.items()} == before, "nothing was looked up"


def test_declarations_that_contradict_each_other() -> None:
    table = item()
    for make, found in (
        (lambda: table.sequence(jagged=False), "there is no max_length: use table.sequence"),
        (lambda: table.sequence(3, aligned_with=""), "aligned_with|name"),
        (lambda: Embeddings({"a": table.sequence(3, aligned_with="b")}), "aligned_with is 'b'; expected another sequ"),
        (
            lambda: Embeddings({"a": table.sequence(3), "b": table.sequence(2, aligned_with="a")}),
            "feature 'b': max_length is 2, and 3 in 'a', with which it is aligned",
        ),
        (
            lambda: Embeddings({"a": table.sequence(), "b": table.bag("sum"), "c": table.sequence(aligned_with="b")}),
            "expected another sequence of the model, of \\['a'\\]",
        ),
    ):
        with pytest.raises(ConfigError, match=found):
            make()


def test_a_gradient_of_other_rows_is_refused() -> None:
    embeddings, _ = job(item().sequence())
    looked = embeddings.worker.lookup(inputs(("past", [[1, 2], [3]])), step=1)
    assert looked.ticket is not None
    for rows in (2, 4):
        gradients = {"past": np.ones((rows, DIM), np.float32)}
        with pytest.raises(InputError, match=f"gradients holds? {rows * DIM} elements, expected {3 * DIM}"):
            embeddings.worker.update([looked.ticket], [None], [gradients])
    embeddings.worker.update([looked.ticket], [None], [{"past": np.ones((3, DIM), np.float32)}])


def test_offsets_that_fall_are_refused_before_memory_is_taken() -> None:
    embeddings, _ = job(item().sequence())
    for offsets, found in (([0, 3, 1, 3], "offsets fall from 3 to 1"), ([0, 1, 2, 2**60], "offsets")):
        broken = Inputs(names=("past",), values=np.arange(3, dtype=np.uint64), offsets=np.array(offsets), batch_size=3)
        with pytest.raises(InputError, match=found):
            embeddings.worker.lookup(broken)
    assert len(embeddings.tables["item"]) == 0


def test_a_gradient_that_is_not_finite_is_named_by_its_row() -> None:
    embeddings, _ = job(item().sequence())
    looked = embeddings.worker.lookup(inputs(("past", [[1, 2], [3]])), step=1)
    gradient = np.ones((3, DIM), np.float32)
    gradient[2, 1] = np.nan
    with pytest.raises(NonFiniteError, match="the gradient of id 3 in row 2 of feature 'past'"):
        embeddings.worker.update([looked.ticket], [None], [{"past": gradient}])  # type: ignore[list-item]


def test_a_padding_batch_has_rows_of_zeros_and_the_numbers_of_the_batch_before() -> None:
    """A trainer whose data has ended joins the others' steps with the same model."""
    features = {"past": item().sequence(), "last": item().sequence(2)}
    embeddings = Embeddings(features, num_threads=1)
    lookup = BatchLookup(embeddings.worker, torch.device("cpu"), train=True, overlap=False)
    numbers = {f"{name}[time]": pa.array([[1.0, 2.0]], pa.large_list(pa.float64())) for name in features}
    for made in (
        replace(inputs(("past", [[1, 2]]), ("last", [[1, 2]])), extra=numbers),
        Padding(names=embeddings.features.names, values=np.empty(0, np.uint64), batch_size=0),
    ):
        batch = lookup.new(made)
        batch.step = 1
        lookup.look_up(batch, 1)
    past, last = batch.sequences["past"], batch.sequences["last"]
    assert past.values.shape == (len(past.lengths), DIM) and not past.values.any() and (past.lengths == 1).all()
    assert not last.values.any() and not last.lengths.any() and len(last.lengths) == len(past.lengths)
    for sequence, shape in ((past, past.values.shape[:1]), (last, last.values.shape[:2])):
        assert sequence.numbers["time"].shape == shape and not sequence.numbers["time"].any()
