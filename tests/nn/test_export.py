"""torch.export refuses a lookup in a table, and exports a model whose modules were replaced by copies of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import satrap
from satrap import Adagrad, ConfigError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.head = nn.Embedding(20, 4, padding_idx=0), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.item(ids).mean(1))
        return logits


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_a_lookup_is_refused_and_inserts_nothing(kind: str, is_training: bool) -> None:
    model = Model().train(is_training)
    if kind == "EmbeddingBag":
        model.item = nn.EmbeddingBag(20, 4)  # type: ignore[assignment]
    with satrap.convert(model, Adagrad(lr=0.1)) as embeddings:
        embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ConfigError, match=rf"an export cannot include .* 'item'.*nn.{kind}.from_pretrained"):
            torch.export.export(model, (torch.tensor([[1, 2]]),), strict=False)
        assert len(embeddings.tables["item"]) == 0


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_a_model_with_copies_of_its_rows_is_exported(kind: str) -> None:
    model: Any = Model()
    if kind == "EmbeddingBag":
        model.item, model.forward = nn.EmbeddingBag(20, 4), lambda ids: model.head(model.item(ids))
    with satrap.convert(model, Adagrad(lr=0.1)) as embeddings:
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.tensor([[0, 2], [3, 3]])).sum().backward()
        optimizer.step()
        model.eval()
        ids = torch.tensor([[0, 2], [3, 7]])
        expected = model(ids)
        model.item = getattr(nn, kind).from_pretrained(model.item.weight.detach())
    exported: Any = torch.export.export(model, (ids,)).module()
    assert torch.equal(exported(ids), expected)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_a_lookup_is_refused_before_the_ids_are_used(kind: str, is_strict: bool) -> None:
    """Offsets have no values in an export, so nothing may depend on them before."""
    model: Any = nn.ModuleDict({"item": getattr(nn, kind)(20, 4)})
    given = (torch.tensor([1, 2]), torch.tensor([0, 1]))[: 1 + (kind == "EmbeddingBag")]
    with satrap.convert(model, Adagrad(lr=0.1)) as embeddings:
        embeddings.optimizer()
        errors = torch._dynamo.exc.Unsupported if is_strict else ConfigError
        with pytest.raises(errors, match=r"an export cannot include the rows of .*from_pretrained"):
            torch.export.export(model["item"], given, strict=is_strict)
        assert len(embeddings.tables["item"]) == 0
