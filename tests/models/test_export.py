"""Models as programs for serving: torch.export, ONNX and torch.jit.trace produce programs that take any batch size."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.reference
import pytest
import torch
from torch.export import Dim

from satrap import Adagrad, Embeddings, Table
from satrap.models import DCN, DLRM, FFNN

MODELS: dict[str, Callable[[int, Any], torch.nn.Module]] = {
    "DLRM": lambda num_dense, features: DLRM(num_dense, features, bottom=(8,), top=(8, 1)),
    "DCN": lambda num_dense, features: DCN(num_dense, features, rank=2, deep=(8,)),
    "FFNN": lambda num_dense, features: FFNN(num_dense, features, hidden=(8,)),
}
each_case = pytest.mark.parametrize(("kind", "num_dense"), [("DLRM", 3), ("DLRM", 0), ("DCN", 3), ("FFNN", 3)])
SIZES = (1, 2, 7, 300)  # none is the size of the example


def build(kind: str, num_dense: int) -> torch.nn.Module:
    torch.manual_seed(0)
    tables = {name: Table(name, dim=4, optimizer=Adagrad(lr=0.1)) for name in "abc"}
    return MODELS[kind](num_dense, Embeddings(tables).features).eval()


def inputs(num: int, num_dense: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    return torch.randn(num, num_dense) if num_dense else None, torch.randn(num, 12)


def shapes(batch: Any, num_dense: int) -> tuple[Any, Any]:
    return {0: batch} if num_dense else None, {0: batch}


@pytest.mark.draw(8)
@each_case
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("batch", [Dim.AUTO, Dim.DYNAMIC, Dim("batch")], ids=["AUTO", "DYNAMIC", "named"])
def test_torch_export(kind: str, num_dense: int, strict: bool, batch: Any, tmp_path: Path) -> None:
    model = build(kind, num_dense)
    program = torch.export.export(model, inputs(4, num_dense), dynamic_shapes=shapes(batch, num_dense), strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for size in SIZES:
        given = inputs(size, num_dense)
        torch.testing.assert_close(loaded(*given), model(*given))


@pytest.mark.draw(2)
@each_case
def test_onnx(kind: str, num_dense: int, tmp_path: Path) -> None:
    model, path = build(kind, num_dense), tmp_path / "model.onnx"
    names = ["dense", "embeddings"] if num_dense else ["embeddings"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the exporter itself
        torch.onnx.export(
            model,
            inputs(4, num_dense),
            path,
            dynamo=True,
            dynamic_shapes=shapes(Dim.AUTO, num_dense),
            input_names=names,
            verbose=False,
        )
    program = onnx.reference.ReferenceEvaluator(onnx.load(path))
    assert program.input_names == names
    for size in SIZES:
        given = inputs(size, num_dense)
        arrays = [each.numpy() for each in given if each is not None]
        (found,) = program.run(None, dict(zip(names, arrays, strict=True)))
        np.testing.assert_allclose(np.asarray(found), model(*given).detach().numpy(), rtol=1e-4, atol=1e-5)


@each_case
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.jit is deprecated
def test_torch_jit_trace(kind: str, num_dense: int, tmp_path: Path) -> None:
    class TensorsOnly(torch.nn.Module):
        """Calls the model with tensors only, since a traced program takes no None."""

        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: torch.Tensor) -> Any:
            return self.model(*((None, *given) if num_dense == 0 else given))

    model = TensorsOnly(build(kind, num_dense))
    torch.jit.save(torch.jit.trace(model, tensors(4, num_dense)), tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    for size in (0, *SIZES):
        given = tensors(size, num_dense)
        torch.testing.assert_close(loaded(*given), model(*given))


def tensors(num: int, num_dense: int) -> tuple[torch.Tensor, ...]:
    return tuple(each for each in inputs(num, num_dense) if each is not None)
