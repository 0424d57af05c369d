"""Published models train after `satrap.convert` as before it, their code unchanged: from the same rows the losses are
equal. `make public-models` installs the packages; the tests of one that is not installed are skipped."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import satrap
from module_jobs import PLACES, minimize, placed
from public_models import MODELS, PublicModel, batch

LR, STEPS = 0.02, 6
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:enable_nested_tensor is True:UserWarning"
)


@pytest.fixture(params=MODELS, ids=lambda model: model.name)
def public(request: pytest.FixtureRequest) -> PublicModel:
    model: PublicModel = request.param
    if importlib.util.find_spec(model.package) is None:
        pytest.skip(f"{model.package} is not installed: make public-models")
    return model


@contextmanager
def pair(public: PublicModel, where: str = "here", **options: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield the model and its optimizer in plain torch, and a converted copy with the same rows and its optimizer."""
    torch.manual_seed(0)
    plain = public.make().train()
    own = copy.deepcopy(plain)
    for module in plain.modules():  # a row of padding stays 0 in a table, also if the loss reaches it by `weight`
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), 0.0))
    with (
        placed(where) as place,
        satrap.convert(own, satrap.Adagrad(lr=LR), min_rows=public.min_rows, weights=True, **place) as embeddings,
    ):
        dense = list(own.parameters())
        optimizer = embeddings.optimizer(torch.optim.Adagrad(dense, lr=LR) if dense else None)
        yield plain, torch.optim.Adagrad(plain.parameters(), lr=LR), own, optimizer
        assert not embeddings.counters().lost


def require_same(public: PublicModel, losses: list[float], expected: list[float]) -> None:
    print(public.name, max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)))
    assert losses == pytest.approx(expected, rel=1e-6, abs=0) and losses[-1] != losses[0]


@pytest.mark.parametrize("where", PLACES)
def test_the_losses_are_those_of_plain_torch(public: PublicModel, where: str) -> None:
    with pair(public, where) as (plain, of_torch, own, optimizer):
        losses = minimize([optimizer], lambda step: public.loss(own, batch(step)), STEPS)
        require_same(public, losses, minimize([of_torch], lambda step: public.loss(plain, batch(step)), STEPS))


def test_accumulated_batches_are_one_step(public: PublicModel) -> None:
    def two(model: Any, step: int) -> Tensor:
        return public.loss(model, batch(2 * step)) + public.loss(model, batch(2 * step + 1))

    with pair(public) as (plain, of_torch, own, optimizer):
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            halves = [public.loss(own, batch(2 * step + half)) for half in (0, 1)]
            for half in halves:
                half.backward()
            optimizer.step()
            losses.append(sum(half.item() for half in halves))
        require_same(public, losses, minimize([of_torch], lambda step: two(plain, step), STEPS))


def test_recomputed_activations_change_nothing(public: PublicModel) -> None:
    with pair(public) as (plain, of_torch, own, optimizer):

        def recomputed(step: int) -> Any:
            return checkpoint(lambda: public.loss(own, batch(step)), use_reentrant=False)

        losses = minimize([optimizer], recomputed, STEPS)
        require_same(public, losses, minimize([of_torch], lambda step: public.loss(plain, batch(step)), STEPS))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.compile reads .grad of what is no leaf
def test_a_compiled_model_has_the_same_losses(public: PublicModel) -> None:
    with pair(public) as (plain, of_torch, own, optimizer):
        compiled = torch.compile(own, backend="aot_eager")
        losses = minimize([optimizer], lambda step: public.loss(compiled, batch(step)), STEPS)
        require_same(public, losses, minimize([of_torch], lambda step: public.loss(plain, batch(step)), STEPS))


def test_a_state_dict_is_loaded(public: PublicModel) -> None:
    with pair(public) as (_, _, own, optimizer):
        minimize([optimizer], lambda step: public.loss(own, batch(step)), STEPS)
        state = copy.deepcopy(own.state_dict())
        with torch.no_grad():
            expected = public.loss(own.eval(), batch(STEPS)).item()
            for parameter in own.parameters():
                parameter.zero_()
            own.load_state_dict(state)
            assert public.loss(own, batch(STEPS)).item() == expected
