"""`satrap.convert` replaces the modules that are named or large and those tied to them. What a table would not do is
refused before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import satrap
from module_jobs import PLACES, placed
from satrap import Adagrad, ConfigError, InputError, Normal, Table


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item, self.small = nn.Embedding(20, 4, padding_idx=0), nn.Embedding(3, 4)
        self.parts = nn.ModuleList([nn.EmbeddingBag(30, 2, mode="max", include_last_offset=True)])
        self.tied = nn.Embedding(20, 4, padding_idx=0)
        self.tied.weight = self.item.weight
        self.same = self.small
        self.head = nn.Linear(4, 1)


def names(model: nn.Module) -> dict[str, str]:
    """Return the table of each module that has one, by name."""
    found = model.named_modules(remove_duplicate=False)
    return {path: module.table.name for path, module in found if isinstance(getattr(module, "table", None), Table)}


def test_an_optimizer_converts_what_is_large() -> None:
    model = Model().eval()
    weight = model.item.weight.detach()
    with satrap.convert(model, Adagrad(lr=0.2), min_rows=20, seed=3) as embeddings:
        assert names(model) == {"item": "item", "tied": "item", "parts.0": "parts.0"}
        assert type(model.small) is nn.Embedding and not model.item.training
        item, bag = embeddings.tables["item"].table, embeddings.tables["parts.0"].table
        assert (item.num_rows, item.dim, item.optimizer) == (20, 4, Adagrad(lr=0.2)) and bag.num_rows == 30
        initial = item.initial
        assert isinstance(initial, Normal)
        assert abs(initial.std / weight.std(correction=0) - 1) <= 0.05
        assert abs(initial.mean - weight.mean()) <= 0.1 * weight.std(correction=0)
        assert (model.item.padding_idx, model.tied.padding_idx) == (0, 0)
        part: Any = model.parts[0]
        assert (part.mode, part.include_last_offset) == ("max", True)
        assert [name for name, _ in model.named_parameters()] == ["small.weight", "head.weight", "head.bias"]


@pytest.mark.parametrize("std", [1.0, 0.1, 0.05, 0.02, 0.001])
def test_processes_that_draw_other_weights_declare_the_same_initial_values(std: float) -> None:
    """Else a job could not be resumed, and its trainers would declare different tables."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Sequential(embedding := nn.Embedding(1000, 8, padding_idx=0))
        nn.init.normal_(embedding.weight, std=std)
        with satrap.convert(model, Adagrad(lr=0.2), min_rows=20) as embeddings:
            assert embeddings.tables["0"].table.initial == Normal(std=std)


def test_a_module_under_two_names_stays_one_module() -> None:
    model = Model()
    with satrap.convert(model, {"same": Table("t", 4)}):
        assert names(model) == {"small": "t", "same": "t"} and model.small is model.same


def test_named_modules_get_their_tables_and_tied_ones_follow() -> None:
    model = Model()
    with satrap.convert(model, {"tied": Table("items", 4), "parts.0": Table("bags", 2)}) as embeddings:
        assert names(model) == {"item": "items", "tied": "items", "parts.0": "bags"}
        assert list(embeddings.tables) == ["items", "bags"]


@pytest.mark.parametrize("where", PLACES)
def test_weights_are_taken_along(where: str) -> None:
    model = Model()
    expected, ids = model.item.weight.detach().clone(), torch.arange(20)
    with (
        placed(where) as place,
        satrap.convert(model, Adagrad(), weights=True, **place) as embeddings,
    ):
        assert torch.equal(model.eval().item(ids), expected)
        assert embeddings.tables["item"].ids().size == 19, "padding has no row"
        assert len(embeddings.tables["parts.0"]) == 30


class Own(nn.Embedding):
    pass


def renormed(model: Any) -> None:
    model.item.max_norm = 1.0


def scaled(model: Any) -> None:
    model.tied.scale_grad_by_freq = True


def frozen(model: Any) -> None:
    model.item.weight.requires_grad_(False)


def hooked(model: Any) -> None:
    model.item.register_forward_hook(lambda *_: None)


def hooked_weight(model: Any) -> None:
    model.item.weight.register_hook(lambda gradient: gradient)


def subclassed(model: Any) -> None:
    model.item = Own(20, 4)


def tied_to_the_head(model: Any) -> None:
    model.head.weight = model.item.weight


def tied_to_small(model: Any) -> None:
    model.head = nn.Linear(4, 3)
    model.head.weight = model.small.weight


def tied_to_a_norm(model: Any) -> None:
    model.norm = nn.LayerNorm((3, 4))
    model.norm.weight = model.small.weight


def hooked_head(model: Any) -> None:
    tied_to_small(model)
    model.head.register_forward_hook(lambda *_: None)


def penalised(model: Any) -> None:
    model.penalties = [([model.head.weight, model.item.weight], 1e-5)]


def regularised(model: Any) -> None:
    model.head._embedding_regularizer = 1e-5


def listed(model: Any) -> None:
    model.both = [model.small, model.item]


def bound(model: Any) -> None:
    model.look_up = {"item": model.item.forward}


def doubled(model: Any) -> None:
    model.item.double()


def nonzero_padding(model: Any) -> None:
    with torch.no_grad():
        model.item.weight[0] = 1.0


def padded_differently(model: Any) -> None:
    model.tied.padding_idx = None


def nothing(_: Any) -> None:
    pass


REFUSED: list[tuple[Callable[[Any], None], Any, dict[str, Any], str]] = [
    (renormed, Adagrad(), {}, r"module 'item' has max_norm=1\.0, which a table does not do: leave the module out"),
    (scaled, {"item": Table("t", 4)}, {}, "module 'tied' has scale_grad_by_freq=True"),
    (frozen, Adagrad(), {}, "module 'item' has a frozen weight, and weights is False"),
    (hooked, Adagrad(), {}, "module 'item' has hooks"),
    (hooked_weight, Adagrad(), {}, "module 'item' has hooks"),
    (subclassed, Adagrad(), {}, "module 'item' is a Own, a class of the model's code"),
    (tied_to_the_head, Adagrad(), {}, r"has padding_idx 0 and shares its weight with 'head\.weight', which trains"),
    (tied_to_small, {"small": Table("t", 4)}, {}, r"needs all 3 rows in each step, .* has num_rows None; expected 3"),
    (tied_to_a_norm, Adagrad(), {}, r"'norm\.weight', which is neither an embedding nor an nn\.Linear"),
    (hooked_head, Adagrad(), {}, r"shares its weight with 'head\.weight', whose module has hooks"),
    (penalised, Adagrad(), {}, r"'item': attribute 'penalties' of the model has its weight too, .* weight_decay"),
    (regularised, Adagrad(), {}, r"convert: head\._embedding_regularizer is 1e-05, a penalty .* weight_decay"),
    (listed, {"item": Table("t", 4)}, {}, "'item': attribute 'both' of the model has the module too, .*ModuleList"),
    (bound, Adagrad(), {}, "'item': attribute 'look_up' of the model has the module too"),
    (doubled, Adagrad(), {}, r"module 'item' has a weight of torch\.float64, and rows are float32"),
    (padded_differently, Adagrad(), {}, r"modules of another padding_idx; found \[0, None\], expected the same"),
    (nonzero_padding, Adagrad(), {"weights": True}, "module 'item' has padding_idx 0, whose weight is not 0"),
    (nothing, {"item": Table("t", 5)}, {}, "has embedding_dim 4, and table 't' has dim 5"),
    (nothing, {"item": Table("t", 4, num_rows=19)}, {}, "has 20 rows, and table 't' has num_rows 19"),
    (nothing, {"itm": Table("t", 4)}, {}, r"no nn\.Embedding or nn\.EmbeddingBag 'itm'; .*'item'"),
    (nothing, {"item": 4}, {}, r"tables\['item'\] is .*; expected a satrap\.Table"),
    (nothing, {"item": Table("t", 4), "tied": Table("u", 4)}, {}, "'item' and 'tied' share a weight"),
    (
        nothing,
        {"item": Table("t", 4), "small": Table("t", 4)},
        {},
        "different weights and one table 't'.* tie the modules first",
    ),
    (nothing, {}, {}, "tables names no module"),
    (nothing, 3, {}, "tables is .*; expected a dict from a module's name"),
    (nothing, Adagrad(), {"min_rows": 31}, "with 31 rows or more"),
    (nothing, Adagrad(), {"min_rows": 0}, "min_rows is 0"),
    (nothing, Adagrad(), {"weights": 1}, "weights is 1"),
]


@pytest.mark.parametrize(("change", "tables", "options", "message"), REFUSED)
def test_what_would_be_different_is_refused(
    change: Callable[[Any], None], tables: Any, options: dict[str, Any], message: str
) -> None:
    model = Model()
    change(model)
    before = dict(model.named_modules(remove_duplicate=False))
    with pytest.raises(ConfigError, match=message):
        satrap.convert(model, tables, **options)
    assert dict(model.named_modules(remove_duplicate=False)) == before


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(number: float, weights: bool) -> None:
    model = Model()
    with torch.no_grad():
        model.small.weight[2, 1] = number
    with pytest.raises(ConfigError, match="the weight of module 'small' holds NaN or infinity"):
        satrap.convert(model, Adagrad(), weights=weights)
    assert not names(model)


def test_a_name_that_no_table_can_have_is_refused() -> None:
    model = nn.Module()
    model.add_module("a\nb", nn.Embedding(3, 2))
    with pytest.raises(ConfigError, match=r"convert: module 'a\\nb' cannot have a table by its name.*satrap\.Table"):
        satrap.convert(model, Adagrad())


def test_the_model_itself_is_no_part_of_a_model() -> None:
    with pytest.raises(ConfigError, match="the model itself is an embedding"):
        satrap.convert(nn.Embedding(2, 2), Adagrad())


def test_a_failed_write_changes_nothing() -> None:
    model = Model()
    with torch.no_grad():
        model.small.weight[2, 1] = np.nan
    with pytest.raises(InputError, match="table 't'"):
        satrap.convert(model, {"item": Table("i", 4), "small": Table("t", 4)}, weights=True)
    assert not names(model)


def test_a_frozen_weight_stays_frozen() -> None:
    model: Any = Model()
    model.small.weight.requires_grad_(False)
    expected, ids = model.small.weight.clone(), torch.arange(3)
    with satrap.convert(model, {"small": Table("t", 4, num_rows=3), "item": Table("i", 4)}, weights=True) as embeddings:
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss = (model.small(ids) * model.item(ids + 1)).sum()
        loss.backward()
        optimizer.step()
        assert embeddings.step == 1
        assert torch.equal(model.small(ids), expected) and torch.equal(model.small.weight, expected)


def test_what_was_replaced_is_refused_elsewhere() -> None:
    model, ids = Model(), torch.arange(3)
    other = nn.Sequential(model.small)
    with satrap.convert(model, Adagrad()) as embeddings:
        with pytest.raises(ConfigError, match=r"was replaced by one over table 'small'.*in one nn\.ModuleList"):
            other(ids)
        with pytest.raises(ConfigError, match="'0' shares its weight with a module that convert has replaced"):
            satrap.convert(other, Adagrad())
        with pytest.raises(ConfigError, match="modules of the model were replaced before: create the model again"):
            satrap.convert(model, Adagrad())
        embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert model.small(ids).requires_grad


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_with_weights_is_refused(strict: bool) -> None:
    state, model = Model().state_dict(), Model()
    with (
        satrap.convert(model, {"small": Table("t", 4)}),
        pytest.raises(RuntimeError, match=r"the state has small\.weight, .* table 't': load the state before satrap"),
    ):
        model.load_state_dict(state, strict=strict)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_dtype_gets_its_rows_in_it(dtype: torch.dtype) -> None:
    model: Any = nn.ModuleList([nn.Embedding(9, 4), nn.EmbeddingBag(9, 4, mode="sum", padding_idx=0), nn.Linear(4, 1)])
    plain, ids = copy.deepcopy(model).to(dtype), torch.tensor([[1, 0, 2], [3, 3, 0]])
    weights = torch.ones(2, 3, dtype=dtype)

    def loss_of(parts: Any) -> Tensor:
        loss: Tensor = parts[2](parts[0](ids).sum(1) + parts[1](ids, per_sample_weights=weights)).sum()
        return loss

    with satrap.convert(model, satrap.SGD(lr=0.5), weights=True) as embeddings:
        model.to(dtype)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        of_torch = torch.optim.SGD(plain.parameters(), lr=0.5)
        for _ in range(2):
            found, expected = loss_of(model), loss_of(plain)
            torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
            for loss, each in ((found, optimizer), (expected, of_torch)):
                each.zero_grad()
                loss.backward()
                each.step()
        assert embeddings.step == 2


def test_a_table_may_be_frozen_where_the_weight_is_not() -> None:
    model: Any = Model()
    expected, ids = model.small.weight.detach().clone(), torch.arange(3)
    with satrap.convert(model, {"small": Table("t", 4, num_rows=3, frozen=True)}, weights=True) as embeddings:
        embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert torch.equal(model.small(ids), expected) and not model.small(ids).requires_grad
        assert len(embeddings.tables["t"]) == 3


def test_an_optimizer_of_before_is_refused() -> None:
    model = Model()
    before = torch.optim.Adam(model.parameters(), amsgrad=True)
    with (
        satrap.convert(model, {"small": Table("t", 4)}) as embeddings,
        pytest.raises(
            ConfigError, match=r"the weight that satrap\.convert replaced by table 't'.*after satrap\.convert"
        ),
    ):
        embeddings.optimizer(before)
