"""`weight` of a converted module is all rows of its table, trained as torch's weight; tied output layers use it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import satrap
from module_jobs import NUM_IDS, PLACES, embeddings_of, item, minimize, placed, start_rows
from satrap import Table
from satrap.nn import Embedding, EmbeddingBag

LR, STEPS = 0.05, 6


class NextItem(nn.Module):
    """Predicts the next item with the rows of the input as the weight of the output, with a layer or without."""

    def __init__(self, *, has_layer: bool) -> None:
        super().__init__()
        self.item = nn.Embedding(NUM_IDS, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, NUM_IDS) if has_layer else None
        if self.head is not None:
            self.head.weight = self.item.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.item(ids[:-1])))
        logits = hidden @ self.item.weight.T if self.head is None else self.head(hidden)
        return cross_entropy(logits, ids[1:])


def ids_at(step: int) -> Tensor:
    return torch.randint(0, NUM_IDS, (9,), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("has_layer", [False, True])
def test_a_softmax_over_all_rows_trains_as_in_torch(has_layer: bool, where: str) -> None:
    torch.manual_seed(0)
    plain = NextItem(has_layer=has_layer)
    own: Any = copy.deepcopy(plain)
    with placed(where) as place:
        adam = satrap.Adam(lr=LR)
        with satrap.convert(own, adam, weights=True, **place) as embeddings:
            dense = [name for name, _ in own.named_parameters()]
            assert dense == ["mix.weight", "mix.bias", *(["head.bias"] if has_layer else [])]
            optimizer = embeddings.optimizer(torch.optim.Adam(own.parameters(), lr=LR))
            losses = minimize([optimizer], lambda step: own(ids_at(step)), STEPS)
            of_torch = torch.optim.Adam(plain.parameters(), lr=LR)
            expected = minimize([of_torch], lambda step: plain(ids_at(step)), STEPS)
            assert losses == pytest.approx(expected, rel=1e-5)
            assert embeddings.step == STEPS, "lookups and weight are one update a step"
            found = own.eval().item.weight
            torch.testing.assert_close(found, plain.item.weight.detach(), rtol=1e-4, atol=1e-6)
            if has_layer:
                assert torch.equal(own.head.weight, found) and "tied to Embedding" in repr(own.head)


def test_a_row_of_padding_is_zeros_and_stays_so() -> None:
    with embeddings_of(item(num_rows=5)) as embeddings:
        module = Embedding(embeddings, "item", padding_idx=2)
        expected = start_rows(embeddings, "item", 5)
        optimizer = embeddings.optimizer()
        assert not module.weight[2].any()
        module.weight.sum().backward()
        optimizer.step()
        found = module.eval().weight
        assert not found[2].any() and torch.equal(found[[0, 1, 3, 4]] != expected[[0, 1, 3, 4]], torch.ones(4, 4) > 0)


def test_weight_of_a_bag_is_read_without_gradients_and_changes_nothing() -> None:
    with embeddings_of(item(num_rows=5)) as embeddings, torch.no_grad():
        module = EmbeddingBag(embeddings, "item")
        weight = module.weight
        assert torch.equal(weight, start_rows(embeddings, "item", 5)) and not weight.requires_grad
        weight.zero_()
        assert module.weight.all() and embeddings.step == 0


def test_rows_that_do_not_fit_are_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    with embeddings_of(item(), Table("small", 4, num_rows=5)) as embeddings:
        module = Embedding(embeddings, "item")
        with pytest.raises(AttributeError, match=r"no num_rows, so any number is an id\. Call .*satrap\.negatives"):
            _ = module.weight
        assert not hasattr(module, "weight")
        monkeypatch.setattr("satrap.nn.embedding.memory", lambda: {"machine": [700, 1019]})
        with pytest.raises(AttributeError, match=r"a step with 5 rows takes 320 bytes, of which 319 are free\. Call"):
            _ = Embedding(embeddings, "small").weight
