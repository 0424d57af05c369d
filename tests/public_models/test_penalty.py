"""A penalty that FuxiCTR adds over the Parameters of embeddings is refused, since it would be 0 after a conversion."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import satrap
from satrap import ConfigError


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("penalty", [1e-5, "l2(1e-5)"])
def test_the_penalty_of_fuxictr_is_refused(penalty: Any, tmp_path: Path) -> None:
    features: Any = pytest.importorskip("fuxictr.features", reason="fuxictr is not installed: make public-models")
    models: Any = pytest.importorskip("fuxictr.pytorch.models")
    layers: Any = pytest.importorskip("fuxictr.pytorch.layers")
    schema = features.FeatureMap("clicks", str(tmp_path))
    schema.features = OrderedDict(user={"type": "categorical", "vocab_size": 30, "source": ""})
    options: dict[str, Any] = {"verbose": 0, "model_root": str(tmp_path), "metrics": ["AUC"]}
    model = models.BaseModel(schema, embedding_regularizer=penalty, **options)
    model.embedding_layer = layers.FeatureEmbedding(schema, 8)
    before = dict(model.named_modules())
    assert isinstance(model.regularization_loss(), torch.Tensor)
    with pytest.raises(ConfigError, match=r"_embedding_regularizer is .*, a penalty over Parameters, .* weight_decay"):
        satrap.convert(model, satrap.Adagrad(lr=0.1))
    assert dict(model.named_modules()) == before
