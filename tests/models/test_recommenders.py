"""DeepFM, DIN, HSTU, SASRec and the two-tower model beside the same models in plain PyTorch.

The plain job keeps each table as an `nn.Embedding` that starts with the same rows, writes the model's formula again,
sample by sample, and steps everything with torch's SGD. Both jobs must have the same losses for some steps. The
histories have any length, and are looked up padded and jagged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    layer_norm,
    logsigmoid,
    normalize,
    silu,
)

import satrap
from satrap import SGD, ConfigError, Embeddings, InputError, Inputs, Normal, Table, negatives
from satrap.config.features import Features
from satrap.models import DIN, HSTU, DeepFM, SASRec, TwoTower
from satrap.train.sequence import Sequence

NUM_IDS, SIZE, STEPS, LONGEST, DIM = 12, 7, 6, 5, 4
Bags = dict[str, list[list[int]]]
ITEM, USER, KIND = (
    Table(name, dim=DIM, optimizer=SGD(lr=0.1), initial=Normal(std=0.3)) for name in ("item", "user", "kind")
)


@dataclass
class Case:
    """A model over features, its loss of a batch, and the same loss of the batch's ids in plain PyTorch."""

    features: dict[str, Any]
    model: Callable[[Embeddings], Any]
    loss: Callable[[Any, Any], Tensor]
    plain: Callable[[Any, dict[str, Any], Bags, Tensor, Tensor], Tensor]
    """The loss, from the model's parameters, the rows of a feature's ids by name, ids, dense features and labels."""


# -- the models, by hand -----------------------------------------------------------------------------------------------


def deep_fm(model: Any, rows: dict[str, Any], bags: Bags, dense: Tensor, label: Tensor) -> Tensor:
    logits = []
    for s in range(len(label)):
        vectors = [rows[name](bags[name][s]).sum(0) for name in bags]
        pairs = [vectors[i][1:] @ vectors[j][1:] for i in range(len(vectors)) for j in range(i)]
        deep = model.deep(torch.cat([dense[s], *(vector[1:] for vector in vectors)]))[0]
        logits.append(sum(vector[0] for vector in vectors) + sum(pairs) + deep + model.linear.weight[0] @ dense[s])
    return binary_cross_entropy_with_logits(torch.stack(logits), label)


def din(model: Any, rows: dict[str, Any], bags: Bags, dense: Tensor, label: Tensor) -> Tensor:
    logits = []
    for s in range(len(label)):
        target, user = rows["item"](bags["item"][s]).sum(0), rows["user"](bags["user"][s]).sum(0)
        interest = torch.zeros(DIM)
        for row in rows["past"](bags["past"][s][-LONGEST:]):
            interest = interest + model.attention(torch.cat([row, target, row * target, row - target])) * row
        logits.append(model.deep(torch.cat([dense[s], target, user, interest]))[0])
    return binary_cross_entropy_with_logits(torch.stack(logits), label)


def sasrec(model: Any, rows: dict[str, Any], bags: Bags, dense: Tensor, label: Tensor) -> Tensor:
    terms = []
    for s in range(len(label)):
        ids, then, other = (bags[name][s][-LONGEST:] for name in ("past", "next", "other"))
        if not ids:
            continue
        states = rows["past"](ids) * DIM**0.5 + model.places.weight[: len(ids)]
        for block in model.blocks:
            normed = layer_norm(states, [DIM], block.before_attention.weight, block.before_attention.bias)
            heads = []
            for h in range(2):
                part = slice(h * DIM // 2, (h + 1) * DIM // 2)
                query, key = block.query(normed)[:, part], block.key(states)[:, part]
                scores = query @ key.T / (DIM // 2) ** 0.5
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
                heads.append(scores.softmax(1) @ block.value(states)[:, part])
            states = normed + block.out(torch.cat(heads, 1))
            states = states + block.layers(
                layer_norm(states, [DIM], block.before_layers.weight, block.before_layers.bias)
            )
        states = layer_norm(states, [DIM], model.norm.weight, model.norm.bias)
        good, bad = ((states * rows[name](its)).sum(1) for name, its in (("next", then), ("other", other)))
        terms.append(-logsigmoid(good) - logsigmoid(-bad))
    return torch.cat(terms).mean()


def hstu(model: Any, rows: dict[str, Any], bags: Bags, dense: Tensor, label: Tensor) -> Tensor:
    terms = []
    for s in range(len(label)):
        ids, then, other = (bags[name][s][-LONGEST:] for name in ("past", "next", "other"))
        if not ids:
            continue
        states = rows["past"](ids)
        for layer in model.layers:
            normed = layer_norm(states, [DIM], layer.before.weight, layer.before.bias)
            query, key, value, gate = silu(layer.make(normed)).split(DIM, 1)
            sums = []
            for i in range(len(ids)):
                heads = []
                for h in range(2):
                    part = slice(h * DIM // 2, (h + 1) * DIM // 2)
                    seen = [
                        silu(query[i, part] @ key[j, part] + layer.of_distance[h, i - j]) / len(ids) * value[j, part]
                        for j in range(i + 1)
                    ]
                    heads.append(torch.stack(seen).sum(0))
                sums.append(torch.cat(heads))
            states = states + layer.out(layer_norm(torch.stack(sums), [DIM]) * gate)
        states = layer_norm(states, [DIM])
        good, bad = ((states * rows[name](its)).sum(1) for name, its in (("next", then), ("other", other)))
        terms.append(-logsigmoid(good) - logsigmoid(-bad))
    return torch.cat(terms).mean()


def sasrec_loss(model: Any, batch: Any) -> Tensor:
    states = model(batch["past"])
    good, bad = ((states * batch[name].rows).sum(1) for name in ("next", "other"))
    return (-logsigmoid(good) - logsigmoid(-bad)).mean()


def two_tower(model: Any, rows: dict[str, Any], bags: Bags, dense: Tensor, label: Tensor) -> Tensor:
    users, items, kinds = ([rows[name](bag).sum(0) for bag in bags[name]] for name in ("user", "item", "kind"))
    queries = [normalize(model.query(torch.cat([d, user])), dim=0) for d, user in zip(dense, users, strict=True)]
    vectors = [normalize(model.item(torch.cat([kind, item])), dim=0) for kind, item in zip(kinds, items, strict=True)]
    terms = []
    for s, query in enumerate(queries):
        mine = bags["item"][s]
        others = [vectors[k] for k in range(len(vectors)) if k == s or bags["item"][k] != mine]
        at = sum(1 for k in range(s) if bags["item"][k] != mine)
        logits = torch.stack([query @ vector / 0.1 for vector in others])
        terms.append(cross_entropy(logits, torch.tensor(at)))
    return torch.stack(terms).mean()


def two_tower_loss(model: Any, batch: Any) -> Tensor:
    queries, items = model(batch.dense, batch.embeddings)
    inputs = batch.inputs
    first = inputs.offsets[inputs.names.index("item") * len(batch) :][: len(batch)]
    logits = negatives.in_batch(queries, items, inputs.values[first])
    return cross_entropy(logits, torch.arange(len(batch)))


def click_loss(model: Any, batch: Any) -> Tensor:
    history = [batch["past"]] if "past" in batch else []
    return binary_cross_entropy_with_logits(model(batch.dense, batch.embeddings, *history), batch.label)


def histories(jagged: bool) -> dict[str, Any]:
    names = ("past", "next", "other")
    return {
        name: ITEM.sequence(LONGEST, jagged=jagged, aligned_with=None if name == "past" else "past") for name in names
    }


CASES = {
    "DeepFM": Case(
        {"item": ITEM, "user": USER, "kind": KIND.bag("sum")},
        lambda embeddings: DeepFM(2, embeddings, deep=(6,)),
        click_loss,
        deep_fm,
    ),
    "TwoTower": Case(
        {"item": ITEM, "user": USER, "kind": KIND.bag("sum")},
        lambda embeddings: TwoTower(
            embeddings, ["user"], ["kind", "item"], num_dense=2, hidden=(6,), dim=3, temperature=0.1
        ),
        two_tower_loss,
        two_tower,
    ),
} | {
    f"{name}, {'jagged' if jagged else 'padded'}": case
    for jagged in (False, True)
    for name, case in {
        "DIN": Case(
            {"item": ITEM, "user": USER, "past": ITEM.sequence(LONGEST, jagged=jagged)},
            lambda embeddings: DIN(2, embeddings, "past", "item", attention=(5,), deep=(6,)),
            click_loss,
            din,
        ),
        "SASRec": Case(
            histories(jagged),
            lambda embeddings: SASRec(embeddings, "past", num_heads=2, dropout=0.0, ignore=["next", "other"]),
            sasrec_loss,
            sasrec,
        ),
        "HSTU": Case(
            histories(jagged),
            lambda embeddings: HSTU(embeddings, "past", num_heads=2, ignore=["next", "other"]),
            sasrec_loss,
            hstu,
        ),
    }.items()
}


def drawn(features: Features) -> Iterator[tuple[Inputs, Bags]]:
    """Yield batches, with empty histories, some longer than `LONGEST`, and repeated ids."""
    rng = np.random.default_rng(5)
    for _ in range(STEPS):
        lengths = [0, LONGEST + 2, *rng.integers(0, LONGEST + 1, SIZE - 2)]
        bags = {
            name: [rng.integers(0, NUM_IDS, length if feature.pooling == "none" else 1).tolist() for length in lengths]
            for name, feature in features.items()
        }
        flat = [bag for each in bags.values() for bag in each]
        yield (
            Inputs(
                names=features.names,
                values=np.array([id_ for bag in flat for id_ in bag], np.uint64),
                offsets=np.cumsum([0, *map(len, flat)]),
                batch_size=SIZE,
                dense=rng.standard_normal((SIZE, 2)).astype(np.float32),
                label=rng.integers(0, 2, SIZE).astype(np.float32),
            ),
            bags,
        )


@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_the_same_model_in_plain_torch(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    embeddings = Embeddings(case.features, num_threads=1)
    every = np.arange(NUM_IDS, dtype=np.uint64)
    tables = {
        table: torch.nn.Embedding.from_pretrained(
            torch.from_numpy(store.lookup(every, train=False).copy()), freeze=False
        )
        for table, store in embeddings.tables.items()
    }
    model = case.model(embeddings)
    plain = copy.deepcopy(model)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    stepper = torch.optim.SGD(
        [*plain.parameters(), *(p for each in tables.values() for p in each.parameters())], lr=0.1
    )
    rows = {
        feature: lambda ids, table=tables[each.table.name]: table(torch.tensor(ids, dtype=torch.int64))
        for feature, each in embeddings.features.items()
    }
    batches = list(drawn(embeddings.features))
    losses, expected = [], []
    stream = embeddings.stream([inputs for inputs, _ in batches])
    for batch, (inputs, bags) in zip(stream, batches, strict=True):
        loss = case.loss(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        assert inputs.dense is not None and inputs.label is not None
        its = case.plain(plain, rows, bags, torch.from_numpy(inputs.dense), torch.from_numpy(inputs.label))
        stepper.zero_grad()
        torch.autograd.backward(its)
        stepper.step()
        losses.append(loss.item())
        expected.append(its.item())
    embeddings.drain()
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert len(set(losses)) == STEPS
    for table, store in embeddings.tables.items():
        found = store.read(every)
        np.testing.assert_allclose(
            found.values[found.present], tables[table].weight.detach().numpy()[found.present], rtol=1e-3, atol=1e-5
        )


# -- what is beside the formulas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("jagged", [False, True])
def test_queries_find_the_next_item(jagged: bool) -> None:
    """Histories that count up: SASRec learns that id + 1 follows id, and `topk` of its query finds it."""
    torch.manual_seed(0)
    table = Table("item", dim=16, optimizer=satrap.Adam(lr=0.02), initial=Normal(std=0.3))
    form: dict[str, Any] = {"jagged": jagged}
    features = {name: table.sequence(4, **form) for name in ("past", "next", "other")}
    embeddings = Embeddings(features, num_threads=1)
    model = SASRec(embeddings, "past", dropout=0.0, ignore=["next", "other"])
    optimizer = embeddings.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    rng = np.random.default_rng(0)

    def batches(count: int) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            lengths = rng.integers(1, 5, 32)
            ids = np.concatenate([rng.integers(0, NUM_IDS) + np.arange(n) for n in lengths]).astype(np.uint64)
            other = (ids + rng.integers(2, NUM_IDS, len(ids)).astype(np.uint64)) % np.uint64(NUM_IDS)
            offsets = np.append(0, np.cumsum(lengths))
            columns = {"past": ids % NUM_IDS, "next": (ids + 1) % NUM_IDS, "other": other}
            yield {name: (its, offsets) for name, its in columns.items()}

    for batch in embeddings.stream(batches(200)):
        loss = sasrec_loss(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    embeddings.drain()
    model.eval()
    embeddings.eval()
    past = np.array([3, 4, 5, 8], np.uint64), np.array([0, 3, 3, 4])
    batch = next(embeddings.stream([dict.fromkeys(features, past)]))
    with torch.no_grad():
        queries = model.queries(batch["past"])
    assert not queries[1].any(), "an empty history"
    ids, _ = satrap.topk(queries[[0, 2]], embeddings.tables["item"], 1)
    assert ids[:, 0].tolist() == [6, 9]


def test_a_batch_of_empty_histories_has_losses() -> None:
    features = Features({"item": ITEM, "past": ITEM.sequence(3, jagged=True), "old": ITEM.sequence(3)})
    attentive, model = (
        DIN(0, features, "past", "item", ignore=["old"]),
        SASRec(features, "old", ignore=["item", "past"]),
    )
    embeddings = Embeddings(features, num_threads=1)
    embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    nothing = np.zeros(0, np.uint64), np.zeros(3, np.int64)
    batch = next(embeddings.stream([{"item": np.arange(2), "past": nothing, "old": nothing}]))
    assert attentive(None, batch.embeddings, batch["past"]).shape == (2,)
    for name in ("past", "old"):
        assert model(batch[name]).shape == (0, DIM) and model.queries(batch[name]).shape == (2, DIM)


def test_what_is_refused() -> None:
    features = Features({"item": ITEM, "past": ITEM.sequence(3), "long": ITEM.sequence(), "user": Table("u", dim=3)})
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: DIN(0, features, "past", "item"), r"DIN: .*the sequences .* are \['past', 'long'\], and ignore"),
        (lambda: DIN(0, features, "item", "item"), r"DIN: history is 'item'; expected one of the sequences"),
        (
            lambda: DIN(0, features, "past", "past", ignore=["long"]),
            r"DIN, target is \['past'\]; expected at least one",
        ),
        (lambda: DIN(0, features, "past", "user", ignore=["long"]), "target 'user' has dim 3 and history 'past' has 4"),
        (lambda: DIN(0, [4], "past", "item"), "DIN: embeddings is a list; expected satrap.Embeddings"),
        (lambda: SASRec(features, "past"), r"the other features are \['item', 'long', 'user'\], and ignore is \(\)"),
        (
            lambda: SASRec(features, "long", ignore=["item", "past", "user"]),
            "'long' has no max_length, and the model has",
        ),
        (lambda: SASRec(features, "past", num_heads=3, ignore=["item", "long", "user"]), "num_heads is 3 and the rows"),
        (lambda: HSTU(features, "past", 0, ignore=["item", "long", "user"]), "HSTU: num_layers is 0; expected an int"),
        (lambda: HSTU(features, "past"), r"HSTU: .*the other features are \['item', 'long', 'user'\]"),
        (lambda: TwoTower(features, ["item"], ["user"]), "TwoTower: .*the sequences of the embeddings are"),
        (lambda: TwoTower(features, ["item"], ["item"], ignore=["past", "long"]), "each of the pooled features"),
        (lambda: TwoTower(features, "item", ["user"], ignore=["past", "long"]), "TwoTower, query is 'item'; expected"),
        (
            lambda: TwoTower(features, ["item"], ["user"], temperature=0, ignore=["past", "long"]),
            "temperature is 0; expected a number above 0",
        ),
        (
            lambda: DeepFM(0, features, ignore=["past", "long"]),
            "feature 'user' has dim 3 and 'item' has 4; expected one",
        ),
        (lambda: DeepFM(0, Features({"a": Table("a", dim=1)})), "feature 'a' has dim 1 and"),
    ]
    for make, found in refused:
        with pytest.raises(ConfigError, match=found):
            make()


def test_inputs_of_another_shape_are_refused() -> None:
    features = Features({"item": ITEM, "past": ITEM.sequence(3)})
    model, attentive = SASRec(features, "past", ignore=["item"]), DIN(0, features, "past", "item")
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(InputError, match=r"SASRec: the history has the shape \(2, 4, 4\); expected \[batch, at most 3"):
        model(Sequence(torch.zeros(2, 4, DIM), mask))
    with pytest.raises(InputError, match="DIN: the history has 2 samples of rows of 4; expected 3 samples"):
        attentive(None, torch.zeros(3, DIM), Sequence(torch.zeros(2, 4, DIM), mask))
