"""Requests with many items: user features once, exact against plain torch with repeated rows; ids of a batch."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import satrap
from satrap.errors import ConfigError, InputError, SourceError

NUM_IDS = 15
USER, ITEM, KIND = (
    satrap.Table(name, dim=dim, optimizer=satrap.Adagrad(lr=0.1))
    for name, dim in (("user", 4), ("item", 6), ("kind", 2))
)
FEATURES: dict[str, Any] = {
    "item": ITEM.sequence(),
    "user": USER,
    "seen": ITEM.bag("mean"),
    "kind": KIND.sequence(aligned_with="item"),
}


def request_batches(seed: int) -> list[dict[str, Any]]:
    """Return batches of requests with 0 to 5 items, and 0 to 3 items that their users saw."""
    random, batches = np.random.default_rng(seed), []
    for _ in range(6):
        counts, seen = random.integers(0, 6, 7), random.integers(0, 4, 7)
        counts[0] = 2
        offsets, seen_offsets = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(seen))
        batches.append(
            {
                "user": random.integers(0, NUM_IDS, 7),
                "item": (random.integers(0, NUM_IDS, counts.sum()), offsets),
                "kind": (random.integers(0, NUM_IDS, counts.sum()), offsets),
                "click": (random.integers(0, 2, counts.sum()), offsets),
                "seen": (random.integers(0, NUM_IDS, seen.sum()), seen_offsets),
                "age": random.normal(size=7).astype(np.float32),
            }
        )
    return batches


def source(batches: list[dict[str, Any]]) -> satrap.IterableSource:
    return satrap.IterableSource(batches, dense="age", ids={"item": satrap.IdColumn(numbers="click")})


def fill(embeddings: satrap.Embeddings) -> None:
    random = np.random.default_rng(0)
    for name, table in embeddings.tables.items():
        dim = next(each.dim for each in embeddings.features.tables if each.name == name)
        table.write(np.arange(NUM_IDS), random.normal(size=(NUM_IDS, dim)).astype(np.float32) / 3)


def rows(embeddings: satrap.Embeddings) -> dict[str, torch.Tensor]:
    ids = np.arange(NUM_IDS)
    return {name: torch.from_numpy(table.read(ids).values.copy()) for name, table in embeddings.tables.items()}


def test_a_step_equals_that_of_repeated_rows_in_plain_torch() -> None:
    """Every request's user is trained by the sum over its items, in one update."""
    torch.manual_seed(0)
    batches = request_batches(3)
    with satrap.Embeddings(FEATURES, seed=1) as embeddings:
        fill(embeddings)
        model = satrap.models.DCN(1, embeddings.features.expanded("item"), deep=(8,))
        plain = copy.deepcopy(model)
        tables = {
            name: torch.nn.Embedding.from_pretrained(values, freeze=False) for name, values in rows(embeddings).items()
        }
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        dense_step = torch.optim.SGD(plain.parameters(), lr=0.1)
        row_step = torch.optim.Adagrad([p for table in tables.values() for p in table.parameters()], lr=0.1)
        order = embeddings.features.expanded("item").names
        assert order == ("item", "seen", "user", "kind"), "in the order of tables, as a model expects the block"
        for item, batch in zip(batches, embeddings.stream(source(batches)), strict=True):
            loss = binary_cross_entropy_with_logits(
                model(*batch.expand("item")), batch["item"].numbers["click"].float()
            )
            optimizer.zero_grad()
            loss.backward()
            assert batch.embeddings.grad is not None and len(batch.embeddings.grad) == 7, "a row of each request"
            optimizer.step()

            seen, seen_offsets = item["seen"]
            of_request = torch.from_numpy(np.repeat(np.arange(7), np.diff(item["item"][1])))
            users = tables["user"](torch.from_numpy(item["user"]))[of_request]
            means = torch.nn.functional.embedding_bag(
                torch.from_numpy(seen), tables["item"].weight, torch.from_numpy(seen_offsets[:-1]), mode="mean"
            )[of_request]
            items_and_kinds = [tables[name](torch.from_numpy(item[name][0])) for name in ("item", "kind")]
            block = torch.cat([items_and_kinds[0], means, users, items_and_kinds[1]], 1)
            age = torch.from_numpy(item["age"])[of_request][:, None]
            expected = binary_cross_entropy_with_logits(plain(age, block), torch.from_numpy(item["click"][0]).float())
            dense_step.zero_grad()
            row_step.zero_grad()
            expected.backward()
            dense_step.step()
            row_step.step()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for name, values in rows(embeddings).items():
            torch.testing.assert_close(values, tables[name].weight.detach(), rtol=1e-4, atol=1e-6)


def test_negatives_of_the_whole_batch_are_looked_up_once() -> None:
    """They are the first sample's; each has one row, whose gradient is the sum over all samples."""
    batches = [
        satrap.Inputs(names=("user",), values=np.array([4, 5, 4], np.uint64), batch_size=3, offsets=None)
        for _ in range(2)
    ]
    draws = satrap.negatives.Draws(np.arange(NUM_IDS, dtype=np.uint64))
    with satrap.Embeddings({"user": USER, "negatives": USER.sequence()}, seed=1) as embeddings:
        optimizer = embeddings.optimizer()
        shared = satrap.negatives.add(batches, "negatives", draws, size=5, seed=2, shared=True)
        fill(embeddings)
        start = rows(embeddings)["user"]
        for number, batch in enumerate(embeddings.stream(shared)):
            negatives = batch["negatives"]
            assert negatives.values.shape == (5, 4) and negatives.lengths.tolist() == [5, 0, 0]
            expected, _ = draws.draw(5, seed=2, number=number)
            assert batch.ids("negatives").tolist() == expected.tolist()
            (batch["user"] @ negatives.values.T).sum().backward()
            grad = negatives.values.grad
            assert grad is not None
            torch.testing.assert_close(grad, batch["user"].detach().sum(0).expand(5, 4))
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(start, rows(embeddings)["user"])


def test_ids_are_those_of_the_rows() -> None:
    """Every form of a feature leaves out padding ids and what a sequence cuts off."""
    features: dict[str, Any] = {
        "one": USER,
        "bag": USER.bag("sum", padding_id=9),
        "jagged": USER.sequence(2, jagged=True, padding_id=9),
        "padded": USER.sequence(3, keep="first"),
    }
    offsets = np.array([0, 4, 4, 6])
    ids = np.array([1, 9, 2, 3, 2**64 - 1, 9], np.uint64)
    item = {"one": np.array([7, 8, 9]), **dict.fromkeys(("bag", "jagged", "padded"), (ids, offsets))}
    with satrap.Embeddings(features) as embeddings:
        embeddings.eval()
        batch = embeddings(item)
        assert batch.ids("one").tolist() == [7, 8, 9]
        assert batch.ids("bag").tolist() == [1, 2, 3, -1]
        assert batch.ids("jagged").tolist() == [2, 3, -1]
        assert batch["jagged"].offsets.tolist() == [0, 2, 2, 3]
        assert batch["jagged"].samples.tolist() == [0, 0, 2]
        assert batch.ids("padded").tolist() == [[1, 9, 2], [0, 0, 0], [-1, 9, 0]]
        assert batch["padded"].mask.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
        with pytest.raises(InputError, match="no feature 'on'; the nearest known one is 'one'"):
            batch.ids("on")


def test_only_a_jagged_sequence_is_expanded() -> None:
    with satrap.Embeddings({"user": USER, "item": ITEM.sequence(2)}) as embeddings:
        with pytest.raises(ConfigError, match=r"items is 'item'; expected a jagged sequence of the model, of \[\]"):
            embeddings.features.expanded("item")
        embeddings.eval()
        batch = embeddings({"user": np.array([1]), "item": (np.array([1]), np.array([0, 1]))})
        with pytest.raises(ConfigError, match="items is 'user'"):
            batch.expand("user")


def test_sequences_that_are_aligned_in_a_chain_are_expanded_together() -> None:
    features = satrap.Features(
        {"a": USER.sequence(), "b": ITEM.sequence(aligned_with="a"), "c": KIND.sequence(aligned_with="b"), "d": USER}
    )
    assert features.aligned("a") == ("a", "b", "c")
    assert list(features.expanded("a").pooled.values()) == [4, 4, 6, 2]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_items_with_several_ids_each_equal_bags_of_plain_torch(mode: str) -> None:
    """The tags of all items of a request are one sequence, and each item says how many of them are its own."""
    random = np.random.default_rng(5)
    batches: list[dict[str, Any]] = []
    for _ in range(4):
        counts = random.integers(0, 4, 6)
        num_tags = random.integers(0, 4, counts.sum())
        item_offsets, tag_offsets = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(num_tags))
        items, tags = random.integers(0, NUM_IDS, counts.sum()), random.integers(0, NUM_IDS, num_tags.sum())
        batches.append(
            {
                "item": (items, item_offsets),
                "num_tags": (num_tags, item_offsets),
                "tags": (tags, tag_offsets[item_offsets]),
                "by_item": tag_offsets,
            }
        )
    features: dict[str, Any] = {"item": ITEM.sequence(), "tags": KIND.sequence()}
    data = [{name: batch[name] for name in ("item", "num_tags", "tags")} for batch in batches]
    source = satrap.IterableSource(data, ids={"item": satrap.IdColumn(numbers="num_tags")})
    with satrap.Embeddings(features, seed=1) as embeddings:
        fill(embeddings)
        bags = torch.nn.EmbeddingBag.from_pretrained(rows(embeddings)["kind"], freeze=False, mode=mode)
        bag_step, weights = torch.optim.Adagrad(bags.parameters(), lr=0.1), torch.tensor([1.0, -2.0])
        optimizer = embeddings.optimizer()
        for item, batch in zip(batches, embeddings.stream(source), strict=True):
            pooled = batch["tags"].pooled(batch["item"].numbers["num_tags"], mode)
            expected = bags(torch.from_numpy(item["tags"][0]), torch.from_numpy(item["by_item"][:-1]))
            torch.testing.assert_close(pooled, expected)
            for block, step in ((pooled, optimizer), (expected, bag_step)):
                (block @ weights).square().sum().backward()
                step.step()
                step.zero_grad()
        torch.testing.assert_close(rows(embeddings)["kind"], bags.weight.detach())


def test_counts_of_other_rows_are_refused() -> None:
    with satrap.Embeddings({"tags": KIND.sequence()}) as embeddings:
        embeddings.eval()
        tags = embeddings({"tags": (np.arange(5), np.array([0, 2, 5]))})["tags"]
        assert tags.pooled(torch.tensor([0, 5, 0])).shape == (3, 2)
        for counts in (torch.tensor([2, 2]), torch.tensor([6, -1]), torch.tensor([[2], [3]])):
            with pytest.raises(InputError, match=r"expected one number of rows.* the sequence has 5 rows"):
                tags.pooled(counts)
        with pytest.raises(InputError, match="mode is 'max'; expected 'sum' or 'mean'"):
            tags.pooled(torch.tensor([2, 3]), "max")


def test_lists_of_lists_of_ids_are_refused() -> None:
    with satrap.Embeddings({"tags": KIND.sequence()}) as embeddings:
        embeddings.optimizer()
        with pytest.raises(SourceError, match=r"give the ids of all items one after another, and .* as numbers"):
            next(embeddings.stream(satrap.IterableSource([{"tags": [[[1, 2], [3]], [[4]]]}])))
