"""Modules whose rows a model joins side by side: they train as without prefetch, and no gradient
shares memory with another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from module_jobs import DIM, NUM_IDS, PLACES, embeddings_of, start_rows, tables
from satrap.nn import Embedding

SAMPLES, MODULES = 4, 3
WIDTH = MODULES * DIM


class Model(torch.nn.Module):
    """Looks up each of two tables by three modules."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.columns = {name: [Embedding(embeddings, name) for _ in range(MODULES)] for name in ("item", "user")}
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, SAMPLES * WIDTH).view(SAMPLES, WIDTH))

    def block(self, name: str, ids: Tensor) -> Tensor:
        return torch.cat([module(of) for module, of in zip(self.columns[name], ids, strict=True)], 1)


def one_block(model: Model, ids: Tensor) -> Tensor:
    return model.block("item", ids)


def beside_a_parameter(model: Model, ids: Tensor) -> Tensor:
    return model.block("item", ids) + model.bias


def two_blocks(model: Model, ids: Tensor) -> Tensor:
    return model.block("item", ids) + model.block("user", ids)


def another_shape(model: Model, ids: Tensor) -> Tensor:
    return model.block("item", ids).unsqueeze(0) + model.bias.unsqueeze(0)


def one_module(model: Model, ids: Tensor) -> Tensor:
    first, second = model.columns["item"][0](ids[0]), model.columns["user"][0](ids[1])
    return first.unsqueeze(0) + second.unsqueeze(0)


def by_columns(model: Model, ids: Tensor) -> Tensor:
    """Join the modules in another order than they are called in, beside other columns."""
    first, second, third = (module(of) for module, of in zip(model.columns["item"], ids, strict=True))
    return torch.cat([model.bias[:, :3], third, first, second], 1)


def not_all(model: Model, ids: Tensor) -> Tensor:
    return model.block("item", ids)[:, DIM:]


USES: list[Callable[[Model, Tensor], Tensor]] = [
    *(one_block, beside_a_parameter, two_blocks, another_shape, one_module, by_columns, not_all)
]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, NUM_IDS, (MODULES, SAMPLES), generator=generator) for _ in range(3)]


def prefetched(embeddings: Any, data: list[Tensor]) -> Iterator[Tensor]:
    yield from embeddings.prefetch(data, lambda ids: {"item": list(ids), "user": list(ids)})


def optimizer_of(embeddings: Any, model: Model) -> Any:
    return embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.draw(20)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", [*PLACES, "device", "direct"])
def test_prefetched_modules_train_as_others(where: str, use: Callable[[Model, Tensor], Tensor], times: int) -> None:
    found = []
    for is_prefetched in (False, True):
        with embeddings_of(*tables(), where=where) as embeddings:
            model = Model(embeddings)
            optimizer, losses = optimizer_of(embeddings, model), []
            for ids in prefetched(embeddings, batches()) if is_prefetched else batches():
                loss = use(model, ids).tanh().square().sum()
                optimizer.zero_grad()
                for _ in range(times):
                    loss.backward(retain_graph=True)
                optimizer.step()
                losses.append(loss.item())
            rows = {name: start_rows(embeddings, name, NUM_IDS).tolist() for name in embeddings.tables}
            found.append((losses, rows, model.bias.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kept", ["nothing", "of all", "of one"])
@pytest.mark.parametrize("is_prefetched", [False, True])
def test_gradients_of_rows_share_no_memory(
    use: Callable[[Model, Tensor], Tensor], kept: str, is_prefetched: bool
) -> None:
    """So that clipping and GradScaler, which change gradients in place, change each once."""
    with embeddings_of(*tables()) as embeddings:
        model = Model(embeddings)
        optimizer, others = optimizer_of(embeddings, model), list[Tensor]()

        def keep(_: Any, __: Any, rows: Tensor) -> None:
            rows.register_hook(others.append)

        for ids in prefetched(embeddings, batches()[:1]) if is_prefetched else batches()[:1]:
            if kept == "of one":
                model.columns["item"][0].register_forward_hook(keep)
            rows = use(model, ids)
            if kept == "of all":
                rows.register_hook(others.append)
            rows.square().sum().backward()
            assert (len(others) > 0) is (kept != "nothing")
            leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
            rows_gradients = [leaf.grad for leaf in leaves if leaf is not model.bias and leaf.grad is not None]
            others += [] if model.bias.grad is None else [model.bias.grad]
            memory = [each.untyped_storage().data_ptr() for each in rows_gradients]
            assert len(memory) == len(set(memory)) > 0
            assert not {each.untyped_storage().data_ptr() for each in others} & set(memory)
            optimizer.zero_grad()
