"""`satrap.convert` replaces TorchRec's collections; models train as before, from the same inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import satrap
from module_jobs import PLACES, minimize, noted_calls, noted_reads, placed, start_rows
from satrap import SGD, Adagrad, ConfigError, InputError, Normal, Table, Uniform

torchrec: Any = pytest.importorskip("torchrec", reason="torchrec is not installed: make public-models")

NUM_IDS, DIM = 30, 4
STEPS = 5


def bag_configs(pooling: str = "SUM") -> list[Any]:
    kind = torchrec.PoolingType[pooling]
    shape = {"embedding_dim": DIM, "num_embeddings": NUM_IDS, "pooling": kind}
    return [
        torchrec.EmbeddingBagConfig(name="item", feature_names=["seen", "shown"], **shape),
        torchrec.EmbeddingBagConfig(name="user", feature_names=["user", "seen"], **shape | {"embedding_dim": 2}),
    ]


def jagged(step: int, *, weighted: bool = False) -> Any:
    """Return a batch of 6 with empty and long bags, whose features repeat ids."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (18,), generator=generator)
    ids = torch.randint(0, NUM_IDS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return torchrec.KeyedJaggedTensor(["shown", "user", "seen"], ids, weights, lengths=lengths)


class Bags(nn.Module):
    def __init__(self, pooling: str = "SUM", *, is_weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.ebc = torchrec.EmbeddingBagCollection(bag_configs(pooling), is_weighted=is_weighted, **options)
        self.head = nn.Linear(2 * DIM + 4, 1)
        self.is_weighted = is_weighted

    def loss(self, step: int) -> Tensor:
        pooled = self.ebc(jagged(step, weighted=self.is_weighted))
        loss: Tensor = (self.head(pooled.values()) - pooled["shown"].sum(1, keepdim=True)).square().mean()
        return loss


class Sequences(nn.Module):
    def __init__(self, *, need_indices: bool = False, **options: Any) -> None:
        super().__init__()
        configs = [
            torchrec.EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=NUM_IDS, feature_names=features)
            for name, features in (("item", ["seen", "shown"]), ("user", ["user", "seen"]))
        ]
        self.ec = torchrec.EmbeddingCollection(configs, need_indices=need_indices, **options)
        self.head = nn.Linear(DIM, 1)

    def loss(self, step: int) -> Tensor:
        rows = self.ec(jagged(step))
        losses = [self.head(part.values()).square().sum() * len(part.lengths()) for part in rows.values()]
        return torch.stack(losses).mean() / 10


MODELS: dict[str, Any] = {
    "sum": Bags,
    "mean": lambda: Bags("MEAN"),
    "weighted": lambda: Bags(is_weighted=True),
    "sequences": Sequences,
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_collection_trains_as_before(name: str, where: str) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]()
    model = copy.deepcopy(plain)
    with (
        placed(where) as place,
        satrap.convert(model, Adagrad(lr=0.1), weights=True, **place) as embeddings,
    ):
        assert "satrap" in type(model.get_submodule("ec" if name == "sequences" else "ebc")).__module__
        combined = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        dense = torch.optim.SGD(plain.head.parameters(), lr=0.1)
        rows = [weight for path, weight in plain.named_parameters() if "head" not in path]
        expected = minimize([dense, torch.optim.Adagrad(rows, lr=0.1)], plain.loss, STEPS)
        torch.testing.assert_close(minimize([combined], model.loss, STEPS), expected, rtol=1e-5, atol=1e-6)
        for table, weight in zip(embeddings.tables, rows, strict=True):
            found = start_rows(embeddings, table, NUM_IDS)
            torch.testing.assert_close(found, weight.detach(), rtol=1e-5, atol=1e-6)


def test_outputs_have_torchrecs_names_and_shapes() -> None:
    bags, sequences = Bags(), Sequences(need_indices=True)
    plain = copy.deepcopy(bags), copy.deepcopy(sequences)
    model = nn.ModuleDict({"bags": bags, "sequences": sequences}).eval()
    with satrap.convert(model, SGD(lr=1.0), weights=True):
        pooled, expected = bags.ebc(jagged(3)), plain[0].ebc(jagged(3))
        assert isinstance(pooled, torchrec.KeyedTensor) and pooled.keys() == expected.keys()
        assert pooled.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(pooled.values(), expected.values().detach())
        rows, expected_rows = sequences.ec(jagged(3)), plain[1].ec(jagged(3))
        assert list(rows) == list(expected_rows)
        for name, part in expected_rows.items():
            torch.testing.assert_close(rows[name].values(), part.values().detach())
            assert torch.equal(rows[name].lengths(), part.lengths())
            assert torch.equal(rows[name].weights(), part.weights())
        assert [config.name for config in bags.ebc.embedding_bag_configs()] == ["item", "user"]
        assert bags.ebc.device == plain[0].ebc.device and not bags.ebc.is_weighted()
        assert (sequences.ec.embedding_dim(), sequences.ec.need_indices()) == (DIM, True)


@pytest.mark.parametrize("kind", [Bags, Sequences])
def test_all_tables_of_a_collection_are_one_lookup(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind()
    with satrap.convert(model, SGD(lr=1.0)) as embeddings:
        embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        looked_up = noted_calls(embeddings, monkeypatch)
        model.loss(0).backward()
        (names,) = looked_up
        assert [name.rpartition(".")[2] for name in names] == ["item", "user"]


@pytest.mark.parametrize("kind", [Bags, Sequences])
def test_all_tables_of_a_collection_are_one_read_in_eval(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind()
    with satrap.convert(model, SGD(lr=1.0)) as embeddings:
        reads = noted_reads(embeddings, monkeypatch)
        model.eval().loss(0)
        (names,) = reads
        assert [name.rpartition(".")[2] for name in names] == ["item", "user"]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_with_a_jagged_tensor_says_what_to_do(name: str, is_training: bool, is_strict: bool) -> None:
    model = MODELS[name]().train(is_training)
    with satrap.convert(model, SGD(lr=1.0)) as embeddings:
        collection = model.get_submodule("ec" if name == "sequences" else "ebc")
        embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        given = (jagged(0, weighted=name == "weighted"),)
        errors = torch._dynamo.exc.Unsupported if is_strict else ConfigError
        with pytest.raises(errors, match=r"an export cannot include the rows of .*from_pretrained"):
            torch.export.export(collection, given, strict=is_strict)
        assert not any(len(table) for table in embeddings.tables.values())


def test_a_converted_collection_is_refused_where_a_copy_would_have_no_rows() -> None:
    model = Bags()
    state = {name: value.clone() for name, value in model.head.state_dict().items()}
    with satrap.convert(model, SGD(lr=1.0)):
        with pytest.raises(TypeError, match=r"a module over table '.*item' can be neither copied nor pickled"):
            copy.deepcopy(model)
        saved = model.state_dict()
        assert {name for name in saved if "head" not in name} == {
            f"ebc.embedding_bags.{name}._extra_state" for name in ("item", "user")
        }
        assert all(torch.equal(saved[f"head.{name}"], value) for name, value in state.items())
        model.load_state_dict(saved)


def test_torchrecs_dlrm_trains_on_rows_that_begin_as_its_configs_say() -> None:
    from torchrec.models.dlrm import DLRM

    configs = bag_configs()[:1]
    collection = torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
    model = DLRM(collection, dense_in_features=3, dense_arch_layer_sizes=[8, DIM], over_arch_layer_sizes=[8, 1])
    with satrap.convert(model, Adagrad(lr=0.1)) as embeddings:
        (store,) = embeddings.tables.values()
        assert store.table.initial == Uniform(-((1 / NUM_IDS) ** 0.5), (1 / NUM_IDS) ** 0.5)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        dense = torch.rand(6, 3)
        losses = minimize([optimizer], lambda _: (model(dense, jagged(0)) - 1).square().mean(), 30)
        assert losses[-1] < 0.5 * losses[0]


def test_what_a_collection_would_not_do_is_refused() -> None:
    meta = Bags(device=torch.device("meta"))
    tables = {"ebc.embedding_bags.item": Table("item", DIM)}
    with pytest.raises(ConfigError, match="has its weight on device meta, without values to write"):
        satrap.convert(meta, tables, weights=True)
    for config in (configs := bag_configs()):
        config.init_fn = nn.init.normal_
    meta.ebc = torchrec.EmbeddingBagCollection(configs, device=torch.device("meta"))
    with pytest.raises(ConfigError, match="on device meta, so its initial values are unknown: name the module"):
        satrap.convert(meta, Adagrad(lr=0.1))
    named = {
        f"ebc.embedding_bags.{name}": Table(name, dim, initial=Normal()) for name, dim in (("item", 4), ("user", 2))
    }
    with satrap.convert(meta, named):
        few = torchrec.KeyedJaggedTensor(["shown"], torch.tensor([1]), lengths=torch.tensor([1]))
        with pytest.raises(InputError, match="table 'item' takes feature 'seen', which the KeyedJaggedTensor does not"):
            meta.ebc.eval()(few)
