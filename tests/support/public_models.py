"""Models of published packages, each built small, with a loss of its step. Nothing of a model's code is changed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, cross_entropy, logsigmoid

USERS, ITEMS, DIM, SIZE, LENGTH = 30, 40, 8, 12, 6


@dataclass(frozen=True)
class PublicModel:
    """A model and how it is trained."""

    name: str
    package: str
    make: Callable[[], Any]
    loss: Callable[[Any, dict[str, Tensor]], Tensor]
    min_rows: int = 1


def batch(step: int) -> dict[str, Tensor]:
    """Return the ids and labels of a step; items 0 are padding, at the end of a history."""
    generator = torch.Generator().manual_seed(step)

    def items(*shape: int) -> Tensor:
        return torch.randint(1, ITEMS, shape, generator=generator)

    history, negatives = items(SIZE, LENGTH), items(SIZE, LENGTH)
    is_padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (SIZE, 1), generator=generator)
    user, item = torch.randint(0, USERS, (SIZE,), generator=generator), items(SIZE)
    return {
        "user": user,
        "item": item,
        "history": history.masked_fill(is_padding, 0),
        "negatives": negatives.masked_fill(is_padding, 0),
        "label": ((user + item) % 2).float(),
    }


def _torchfm(module: str, kind: str, *options: Any) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"torchfm.model.{module}"), kind)([USERS, ITEMS], DIM, *options)


def _fields(model: Any, given: dict[str, Tensor]) -> Tensor:
    return binary_cross_entropy(model(torch.stack([given["user"], given["item"]], 1)), given["label"])


def _dlrm() -> Any:
    torchrec, dlrm = importlib.import_module("torchrec"), importlib.import_module("torchrec.models.dlrm")
    features = {"user": (USERS, ["user"]), "item": (ITEMS, ["item", "history"])}
    configs = [
        torchrec.EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=count, feature_names=names)
        for name, (count, names) in features.items()
    ]
    collection = torchrec.EmbeddingBagCollection(configs)
    return dlrm.DLRM(collection, dense_in_features=1, dense_arch_layer_sizes=[DIM], over_arch_layer_sizes=[8, 1])


def _jagged(model: Any, given: dict[str, Tensor]) -> Tensor:
    torchrec = importlib.import_module("torchrec")
    history = given["history"]
    lengths = torch.cat([torch.ones(2 * SIZE, dtype=torch.int64), (history != 0).sum(1)])
    ids = torch.cat([given["user"], given["item"], history[history != 0]])
    jagged = torchrec.KeyedJaggedTensor(["user", "item", "history"], ids, lengths=lengths)
    logits = model(given["label"][:, None], jagged).squeeze(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, given["label"])


def _rechub(module: str, kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(f"torch_rechub.models.{module}"), kind)(
        **{name: value() if callable(value) else value for name, value in options.items()}
    )


def _feature(name: str, *, shared_with: str | None = None) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        features: Any = importlib.import_module("torch_rechub.basic.features")
        initial = importlib.import_module("torch_rechub.basic.initializers").RandomNormal(0, 0.1)
        own = {"shared_with": shared_with, "initializer": initial}
        if name in ("history", "shifted", "negatives"):
            return [features.SequenceFeature(name, ITEMS, DIM, padding_idx=0, pooling="concat", **own)]
        return [features.SparseFeature(name, USERS if name == "user" else ITEMS, DIM, **own)]

    return make


def _user_and_item() -> list[Any]:
    return _feature("user")() + _feature("item")()


def _sequences() -> list[Any]:
    shared = (_feature(name, shared_with="history")() for name in ("shifted", "negatives"))
    return [*_feature("history")(), *(feature for features in shared for feature in features)]


def _clicks(model: Any, given: dict[str, Tensor]) -> Tensor:
    return binary_cross_entropy(model(given), given["label"])


def _tasks(model: Any, given: dict[str, Tensor]) -> Tensor:
    found = model(given)
    return binary_cross_entropy(found, given["label"][:, None].expand_as(found))


def _with_auxiliary_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    clicks, auxiliary = model(given)
    loss: Tensor = binary_cross_entropy(clicks, given["label"]) + auxiliary
    return loss


def _ranked(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Return a softmax over the next item and six negatives."""
    return cross_entropy(model(given), torch.zeros(SIZE, dtype=torch.int64))


def _pairs(model: Any, given: dict[str, Tensor]) -> Tensor:
    history = given["history"]
    positive, negative = model({**given, "seq": history, "shifted": history.roll(-1, 1)})
    return -(logsigmoid(positive) + logsigmoid(-negative))[history != 0].mean()


def _next_of_all(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Return a softmax over all items, for each position."""
    return cross_entropy(model(given["history"])[:, :-1].flatten(0, 1), given["history"][:, 1:].flatten())


def _graph(model: Any, given: dict[str, Tensor]) -> Tensor:
    edges = batch(1000)
    both = torch.stack([edges["user"], edges["item"] + USERS])
    scores = model(torch.cat([both, both.flip(0)], 1), torch.stack([given["user"], given["item"] + USERS]))
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, given["label"])


def _transformer(kind: str, config: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        transformers: Any = importlib.import_module("transformers")
        return getattr(transformers, kind)(getattr(transformers, config)(vocab_size=ITEMS, **options))

    return make


def _language(model: Any, given: dict[str, Tensor]) -> Tensor:
    history = given["history"]
    loss: Tensor = model(input_ids=history, attention_mask=(history != 0).long(), labels=history).loss
    return loss


def _lightgcn() -> Any:
    nn: Any = importlib.import_module("torch_geometric.nn")
    return nn.LightGCN(USERS + ITEMS, DIM, num_layers=2)


_MLP = {"dims": [16], "dropout": 0.0}
_CTR = {"features": _feature("user"), "mlp_params": _MLP}
_HISTORY = {"history_features": _feature("history", shared_with="item"), "target_features": _feature("item")}
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}

MODELS = [
    PublicModel("DeepFM", "torchfm", _torchfm("dfm", "DeepFactorizationMachineModel", (16,), 0.0), _fields),
    PublicModel(
        "xDeepFM",
        "torchfm",
        _torchfm("xdfm", "ExtremeDeepFactorizationMachineModel", (16,), 0.0, (8, 8)),
        _fields,
    ),
    PublicModel("FFM", "torchfm", _torchfm("ffm", "FieldAwareFactorizationMachineModel"), _fields),
    PublicModel(
        "DCNv2",
        "torch_rechub",
        _rechub("ranking", "DCNv2", features=_user_and_item, n_cross_layers=2, mlp_params=_MLP),
        _clicks,
    ),
    PublicModel(
        "DIN",
        "torch_rechub",
        _rechub("ranking", "DIN", **_CTR, **_HISTORY, attention_mlp_params={"dims": [8]}),
        _clicks,
    ),
    PublicModel(
        "DIEN",
        "torch_rechub",
        _rechub("ranking", "DIEN", **_CTR, **_HISTORY, neg_history_features=_feature("negatives", shared_with="item")),
        _with_auxiliary_loss,
    ),
    PublicModel("BST", "torch_rechub", _rechub("ranking", "BST", **_CTR, **_HISTORY, nhead=2, dropout=0.0), _clicks),
    PublicModel(
        "DSSM",
        "torch_rechub",
        _rechub(
            "matching",
            "DSSM",
            user_features=_feature("user"),
            item_features=_feature("item"),
            user_params=_MLP,
            item_params=_MLP,
        ),
        _clicks,
    ),
    PublicModel(
        "GRU4Rec",
        "torch_rechub",
        _rechub(
            "matching",
            "GRU4Rec",
            user_features=_feature("user"),
            history_features=_feature("history", shared_with="item"),
            item_features=_feature("item"),
            neg_item_feature=_feature("negatives", shared_with="item"),
            user_params={"dims": [DIM], "dropout": 0.0},
        ),
        _ranked,
    ),
    PublicModel(
        "SASRec",
        "torch_rechub",
        _rechub("matching", "SASRec", features=_sequences, max_len=LENGTH, dropout_rate=0.0),
        _pairs,
    ),
    PublicModel(
        "ESMM",
        "torch_rechub",
        _rechub(
            "multi_task",
            "ESMM",
            user_features=_feature("user"),
            item_features=_feature("item"),
            cvr_params=_MLP,
            ctr_params=_MLP,
        ),
        _tasks,
    ),
    PublicModel(
        "MMoE",
        "torch_rechub",
        _rechub(
            "multi_task",
            "MMOE",
            features=_user_and_item,
            task_types=["classification"] * 2,
            n_expert=3,
            expert_params=_MLP,
            tower_params_list=[_MLP] * 2,
        ),
        _tasks,
    ),
    PublicModel(
        "PLE",
        "torch_rechub",
        _rechub(
            "multi_task",
            "PLE",
            features=_user_and_item,
            task_types=["classification"] * 2,
            n_level=1,
            n_expert_specific=2,
            n_expert_shared=1,
            expert_params=_MLP,
            tower_params_list=[_MLP] * 2,
        ),
        _tasks,
    ),
    PublicModel(
        "HSTU",
        "torch_rechub",
        _rechub(
            "generative",
            "HSTUModel",
            vocab_size=ITEMS,
            d_model=16,
            n_heads=2,
            n_layers=1,
            dqk=8,
            dv=8,
            max_seq_len=LENGTH,
            dropout=0.0,
        ),
        _next_of_all,
    ),
    PublicModel("LightGCN", "torch_geometric", _lightgcn, _graph),
    PublicModel("DLRM", "torchrec", _dlrm, _jagged),
    PublicModel(
        "T5, as in TIGER",
        "transformers",
        _transformer("T5ForConditionalGeneration", "T5Config", **_T5, decoder_start_token_id=0),
        _language,
        min_rows=ITEMS,
    ),
    PublicModel(
        "BERT, as in BERT4Rec",
        "transformers",
        _transformer(
            "BertForMaskedLM",
            "BertConfig",
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=None,
        ),
        _language,
        min_rows=ITEMS,
    ),
]
