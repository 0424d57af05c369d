"""Models: their formulas by hand, the gradient of the interaction, autocast, torch.compile, and that they learn."""

import copy
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import satrap
from satrap import _core
from satrap.config.features import Features
from satrap.data.synthetic import Clicks
from satrap.errors import ConfigError, InputError
from satrap.models import DCN, DLRM, FFNN
from satrap.models.interaction import Interaction, dot_products, pair_indices
from satrap.models.parts import PaddedLinear
from satrap.monitor.metrics import Evaluation


def shape(*dims: int) -> Features:
    return Features({f"C{at}": satrap.Table(f"C{at}", dim=dim) for at, dim in enumerate(dims, 1)})


def small(kind: type[Any], num_dense: int, embeddings: object) -> torch.nn.Module:
    if kind is DLRM:
        return DLRM(num_dense, embeddings, bottom=(16,), top=(16, 1))
    if kind is DCN:
        return DCN(num_dense, embeddings, num_cross=2, deep=(16,))
    return FFNN(num_dense, embeddings, hidden=(32, 16))


KINDS = [DLRM, DCN, FFNN]
each_kind = pytest.mark.parametrize("kind", KINDS)


def inputs(num: int, num_dense: int, total_dim: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    dense = torch.randn(num, num_dense) if num_dense else None
    return dense, torch.randn(num, total_dim).requires_grad_()


# -- formulas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_dense", [0, 3])
def test_dlrm_by_hand(num_dense: int) -> None:
    model = DLRM(num_dense, shape(*[4] * 5), bottom=(8,), top=(6, 1)).double()
    dense = torch.randn(7, num_dense).double() if num_dense else None
    block = torch.randn(7, 20).double()
    logits = model(dense, block)
    for sample in range(7):
        vectors = list(block[sample].view(5, 4))
        first = []
        if dense is not None:
            assert model.bottom is not None
            first = [model.bottom(dense[sample])]
        vectors = first + vectors
        dots = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        expected = model.top(torch.cat([*first, torch.stack(dots)]))
        torch.testing.assert_close(logits[sample], expected.float()[0])


@each_kind
@pytest.mark.parametrize(("num_dense", "num_features"), [(0, 1), (1, 1), (0, 2), (0, 3)])
def test_the_logit_depends_on_every_feature(kind: type[Any], num_dense: int, num_features: int) -> None:
    torch.manual_seed(0)
    model = small(kind, num_dense, shape(*[4] * num_features))
    dense, block = inputs(64, num_dense, 4 * num_features)
    if dense is not None:
        dense.requires_grad_()
    torch.autograd.backward(model(dense, block).sum())
    assert block.grad is not None and block.grad.view(64, num_features, 4).abs().sum((0, 2)).all()
    assert dense is None or (dense.grad is not None and dense.grad.abs().sum(0).all())


@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("deep", [(), (6, 5)])
def test_dcn_by_hand(num_dense: int, rank: int | None, deep: tuple[int, ...]) -> None:
    model = DCN(num_dense, shape(2, 3), num_cross=2, rank=rank, deep=deep)
    dense, block = inputs(7, num_dense, 5)
    first = block if dense is None else torch.cat([dense, block], 1)
    x = first
    for each in model.cross:
        layer: Any = each
        if rank is None:
            product = x @ layer.linear.weight.T + layer.linear.bias
        else:
            narrow, wide = layer.linear
            assert narrow.weight.shape == (rank, first.shape[1])
            product = x @ narrow.weight.T @ wide.weight.T + wide.bias
        x = first * product + x
    if deep:
        assert model.deep is not None
        x = torch.cat([x, model.deep(first)], 1)
    torch.testing.assert_close(model(dense, block), (x @ model.join.weight.T + model.join.bias)[:, 0])


def test_ffnn_has_the_widths_of_the_paper() -> None:
    with torch.device("meta"):
        model = FFNN(13, shape(*[16] * 26))
    widths = [(layer.in_features, layer.out_features) for layer in model.layers if isinstance(layer, torch.nn.Linear)]
    assert widths == list(pairwise([13 + 26 * 16, 4096, 2048, 1024, 512, 256, 1]))
    assert [type(layer).__name__ for layer in model.layers] == ["Linear", "ReLU"] * 5 + ["Linear"]


def test_ffnn_by_hand() -> None:
    model = FFNN(2, shape(3), hidden=(4,))
    dense, block = inputs(7, 2, 3)
    assert dense is not None
    hidden = torch.relu(model.layers[0](torch.cat([dense, block], 1)))
    torch.testing.assert_close(model(dense, block), model.layers[2](hidden)[:, 0])


# -- the interaction ---------------------------------------------------------------------------------------------------


def test_the_interaction_has_first_and_second_derivatives() -> None:
    pairs, mirror = pair_indices(4)
    vectors = torch.randn(3, 4, 2, dtype=torch.float64).requires_grad_()
    call = (lambda v: dot_products(v, pairs, mirror), (vectors,))
    assert torch.autograd.gradcheck(*call)
    assert torch.autograd.gradgradcheck(*call)


@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize(
    ("batch", "num", "dim"), [(5, 4, 3), (1, 2, 1), (3, 1, 4), (0, 3, 2), (70, 27, 16), (6, 40, 33)]
)
def test_both_forms_of_the_interaction_agree(
    has_first: bool, batch: int, num: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interaction = Interaction(num, dim)
    made = []
    for fused in (True, False):
        torch.manual_seed(0)
        first = torch.randn(batch, dim, requires_grad=True) if has_first else None
        block = torch.randn(batch, (num - has_first) * dim, requires_grad=True)
        if not fused:
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        out = interaction(first, block)
        torch.autograd.backward((out * torch.randn_like(out)).sum())
        made.append([out, block.grad, *([] if first is None else [first.grad])])
    assert made[0][0].shape == (batch, has_first * dim + num * (num - 1) // 2)
    for ours, torchs in zip(*made, strict=True):
        torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_dense", [0, 3])
def test_columns_of_zeros_change_nothing(
    num_dense: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """A GPU gets them, and so does the CPU here, where they have the same bits: sums of small integers are exact."""
    model = DLRM(num_dense, shape(*[4] * 5), bottom=(8,), top=(6, 1)).to(dtype)
    for parameter in model.parameters():
        parameter.data.copy_(torch.from_numpy(rng.integers(-1, 2, tuple(parameter.shape))))
    dense = torch.from_numpy(rng.integers(-1, 2, (7, num_dense))).to(dtype) if num_dense else None
    block = torch.from_numpy(rng.integers(-1, 2, (7, 20))).to(dtype)
    width = num_dense // 3 * 4 + (15 if num_dense else 10)
    found, widths = [], []
    model.top[0].register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    in_torch: Callable[..., torch.Tensor] = Interaction.in_torch
    for padded in (False, True):
        model.zero_grad()
        block.requires_grad_().grad = None
        monkeypatch.setattr(
            Interaction, "forward", lambda *given, padded=padded: in_torch(*given[:3], given[3] if padded else 0)
        )
        logits = model(dense, block)
        logits.sum().backward()
        found.append([logits, block.grad, *(parameter.grad for parameter in model.parameters())])
    assert widths == [width, -(-width // 8) * 8]
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert model.top[0].state_dict()["weight"].shape == (6, width)


def test_a_gpu_multiplies_a_multiple_of_eight_columns() -> None:
    """The meta device has no numbers, and takes the operators that a GPU takes; a layer that replaced the first, and
    an exported program, take no columns of zeros."""
    widths: list[int] = []

    def note(_: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
        widths.append(given[0].shape[1])

    for device, expected in (("cpu", 479), ("meta", 480)):
        with torch.device(device):
            model = DLRM(13, shape(*[128] * 26))
            assert isinstance(model.top[0], PaddedLinear) and model.top[0].weight.shape == (256, 479)
            model.top[0].register_forward_pre_hook(note)
            assert model(torch.empty(2, 13), torch.zeros(2, 26 * 128)).shape == (2,)
            assert widths.pop() == expected
            model.top[0] = torch.nn.Linear(479, 256)
            model.top[0].register_forward_pre_hook(note)
            model(torch.empty(2, 13), torch.zeros(2, 26 * 128))
            assert widths.pop() == 479


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_dtype(dtype: torch.dtype) -> None:
    model = DLRM(3, shape(*[4] * 3)).to(dtype)
    block = torch.randn(5, 12, requires_grad=True)
    logits = model(torch.randn(5, 3, dtype=dtype), block)
    logits.sum().backward()
    assert block.grad is not None and block.grad.dtype == torch.float32
    same = copy.deepcopy(model).float()
    assert logits.shape == same(torch.randn(5, 3), block).shape == (5,)


def test_the_core_has_second_derivatives_by_torchs_form() -> None:
    """A gradient penalty needs them."""
    found = []
    interaction = Interaction(4, 2)
    for call in (interaction, interaction.in_torch):
        torch.manual_seed(0)
        first, block = torch.randn(3, 2, requires_grad=True), torch.randn(3, 6, requires_grad=True)
        out = call(first, block).square().sum()
        grads = torch.autograd.grad(out, (first, block), create_graph=True)
        penalty = torch.stack([each.square().sum() for each in grads]).sum()
        found.append(torch.autograd.grad(penalty, (first, block)))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs)


def test_a_tracer_sees_operators_and_no_constant() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    interaction = Interaction(3, 2)
    traced = make_fx(lambda block: interaction(None, block))(torch.randn(4, 6))
    block = torch.randn(4, 6)
    torch.testing.assert_close(traced(block), interaction(None, block))


def test_the_core_is_used_where_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    interaction, block = Interaction(3, 2), torch.randn(4, 6)
    calls = []

    def native(num_threads: int) -> Any:
        calls.append(num_threads)
        return _core.Dots(1)

    monkeypatch.setattr("satrap.models.interaction._native", native)
    interaction(None, block)
    interaction(None, block.T.contiguous().T)  # another layout
    assert calls == [torch.get_num_threads()] * 2
    interaction(None, block.double())
    with torch.device("meta"):
        interaction(None, torch.empty(4, 6))
    assert len(calls) == 2


def test_the_core_refuses_other_sizes() -> None:
    dots, block = _core.Dots(1), np.zeros((2, 6), np.float32)
    for call, message in (
        (lambda: dots.forward(4, None, block, np.zeros((2, 1), np.float32)), "block is 2 x 6, expected 2 x 4"),
        (lambda: dots.forward(2, None, block, np.zeros((2, 4), np.float32)), "out is 2 x 4, expected 2 x 3"),
        (lambda: dots.forward(0, None, block, block), "dim=0, expected"),
        (lambda: dots.forward(2, np.zeros((3, 2), np.float32), block, block), "first is 3 x 2, expected 2 x 2"),
        (lambda: _core.Dots(0), "num_threads=0"),
        (lambda: _core.Dots(1, "sse"), "simd='sse' is not available"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            call()


# -- PyTorch's conventions ---------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("num_dense", [0, 3])
def test_the_same_seed_gives_the_same_model(kind: type[Any], num_dense: int) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(small(kind, num_dense, shape(*[4] * 3)).state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
    assert not all(torch.equal(value, states[2][name]) for name, value in states[0].items())
    assert not {"pairs", "mirror"} & set(states[0])  # computed, not learned


@each_kind
@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(kind: type[Any], num_dense: int, dtype: torch.dtype) -> None:
    """Logits stay float32, the block's gradient has its dtype, and both are close to those without autocast."""
    model = small(kind, num_dense, shape(*[4] * 3))
    dense, block = inputs(64, num_dense, 12)
    labels = (torch.arange(64) % 2).float()
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for enabled in (False, True):
        block = block.detach().to(dtype if enabled else torch.float32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(dense, block)
            loss = binary_cross_entropy_with_logits(logits, labels)
        torch.autograd.backward(loss)
        assert logits.dtype == torch.float32
        assert logits.shape == (64,)
        assert block.grad is not None
        found.append((logits.detach(), block.grad.clone()))
    assert found[1][1].dtype == dtype
    for plain, narrow in zip(*found, strict=True):
        assert (narrow - plain).norm() < 0.4 * plain.norm()  # a ReLU near 0 may switch: 0.13 was seen


@pytest.mark.draw(3)
# torch's tracing creates an object of the Function to hold its context.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@each_kind
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(kind: type[Any], backend: str) -> None:
    """One graph computes what the model computes, also for a short last batch."""
    torch.compiler.reset()
    model = small(kind, 3, shape(*[4] * 3))
    compiled: Callable[..., torch.Tensor] = torch.compile(model, backend=backend, fullgraph=True)
    for num in (16, 5):
        dense, block = inputs(num, 3, 12)
        gradients = []
        for call in (model, compiled):
            block.grad = None
            logits = call(dense, block)
            torch.autograd.backward((logits * torch.arange(num)).sum())
            gradients.append((logits, block.grad))
        torch.testing.assert_close(gradients[0], gradients[1])


@each_kind
def test_no_dense_features_are_none_or_no_columns(kind: type[Any]) -> None:
    """A batch of a source without dense columns has a tensor without columns."""
    model = small(kind, 0, shape(*[4] * 3))
    _, block = inputs(5, 0, 12)
    found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for dense in (None, torch.zeros(5, 0)):
        block.grad = None
        logits = model(dense, block)
        torch.autograd.backward((logits * torch.arange(5)).sum())
        found.append((logits, block.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] is not None and found[1][1] is not None and torch.equal(found[0][1], found[1][1])


@each_kind
def test_an_empty_batch(kind: type[Any]) -> None:
    dense, block = inputs(0, 3, 12)
    model = small(kind, 3, shape(*[4] * 3))
    logits = model(dense, block)
    assert logits.shape == (0,)
    torch.autograd.backward(logits.sum())


# -- learning ----------------------------------------------------------------------------------------------------------


class Additive(torch.nn.Module):
    """A linear model, which has no pairs of ids."""

    def __init__(self, num_dense: int, features: Features) -> None:
        super().__init__()
        self.join = torch.nn.Linear(num_dense + features.total_dim, 1)

    def forward(self, dense: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.join(torch.cat([dense, block], 1))[:, 0]
        return logits


@pytest.mark.parametrize("kind", [*KINDS, Additive])
def test_the_models_learn(kind: type[Any]) -> None:
    """The AUC on unseen samples is close to that of the true model.

    Over 100 seeds of torch every model reached at least 0.97 of the possible AUC, the linear one 0.91. With six
    features instead of three FFNN does not find the pairs from every seed.
    """
    torch.manual_seed(0)
    clicks = Clicks(num_samples=120_000, num_dense=3, num_ids=3, cardinalities=[5, 10, 20], num_factors=1)
    test = clicks.following(20_000)
    model = Additive(3, shape(*[8] * 3)) if kind is Additive else small(kind, 3, shape(*[8] * 3))
    starts = np.cumsum([0, 5, 10])
    rows = torch.nn.Embedding(35, 8)
    torch.nn.init.normal_(rows.weight, std=0.3)
    optimizer = torch.optim.Adam([*model.parameters(), *rows.parameters()], lr=0.02)

    def logits(block: Any) -> torch.Tensor:
        values: torch.Tensor = model(
            torch.from_numpy(block["dense"]), rows(torch.from_numpy(block["ranks"] + starts)).flatten(1)
        )
        return values

    for block in clicks.batches(512):
        loss = binary_cross_entropy_with_logits(logits(block), torch.from_numpy(block["label"]))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    metrics = Evaluation()
    with torch.no_grad():
        for block in test.blocks():
            metrics.add(block["label"], logits(block))
    reached = (metrics.auc() - 0.5) / (test.best_auc() - 0.5)
    print(f"{kind.__name__}: AUC {metrics.auc():.4f} of {test.best_auc():.4f}, {reached:.3f} of what there is")
    assert 0.88 < reached < 0.93 if kind is Additive else 0.95 < reached < 1.01


# -- refusals ----------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("value", [-1, 1.5, "3", None, True])
def test_num_dense_is_checked(kind: type[Any], value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: num_dense is .*; expected an integer of at least 0"):
        small(kind, value, shape(4, 4))


@each_kind
def test_a_sequence_is_refused_unless_it_is_named(kind: type[Any]) -> None:
    table = satrap.Table("item", dim=4)
    features = Features({"item": table, "history": table.sequence(3), "last": table.sequence(1)})
    for ignore in ([], ["history"], ["item", "history", "last"], "history"):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}: .*\['history', 'last'\], and ignore.*table\.bag"):
            kind(2, features, ignore=ignore)
    model = kind(2, features, ignore=["last", "history"])
    assert model(torch.zeros(5, 2), torch.zeros(5, 4)).shape == (5,)


@each_kind
def test_embeddings_are_checked(kind: type[Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: embeddings is a list; expected satrap\.Embeddings or"):
        small(kind, 1, [4, 4])
    only_sequences = Features({"past": satrap.Table("item", dim=4).sequence(3)})
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: all features are sequences; expected at least one"):
        kind(1, only_sequences, ignore=["past"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DLRM(1, shape(4, 8, 4)), "DLRM: feature 'C1' has dim 4 and 'C2' has 8; expected one dim for all"),
        (lambda: DLRM(1, shape(4), top=(8, 2)), r"DLRM: top is \(8, 2\); expected 1 as its last width"),
        (lambda: DLRM(1, shape(4), top=()), r"DLRM: top is \(\); expected 1 as its last width"),
        (lambda: DLRM(1, shape(4), bottom=(8, 0)), r"DLRM: bottom\[1\] is 0; expected an integer of at least 1"),
        (lambda: DLRM(1, shape(4), bottom=8), "DLRM: bottom is 8; expected the widths of the layers"),  # type: ignore[arg-type]
        (lambda: DCN(1, shape(4), num_cross=0), "DCN: num_cross is 0; expected an integer of at least 1"),
        (lambda: DCN(1, shape(4), rank=0), "DCN: rank is 0; expected an integer of at least 1"),
        (lambda: DCN(1, shape(4), deep="big"), "DCN: deep is 'big'; expected the widths of the layers"),  # type: ignore[arg-type]
        (lambda: FFNN(1, shape(4), hidden=(True,)), r"FFNN: hidden\[0\] is True; expected an integer of at least 1"),
    ],
)
def test_sizes_are_checked(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@each_kind
def test_shapes_of_the_inputs_are_checked(kind: type[Any]) -> None:
    name = kind.__name__
    model = small(kind, 2, shape(4, 4))
    with pytest.raises(InputError, match=rf"{name}: embeddings have the shape \(3, 9\); expected \[batch, 8\]"):
        model(torch.zeros(3, 2), torch.zeros(3, 9))
    with pytest.raises(InputError, match=rf"{name}: embeddings have the shape \(3, 2, 4\); expected \[batch, 8\]"):
        model(torch.zeros(3, 2), torch.zeros(3, 2, 4))
    with pytest.raises(InputError, match=rf"{name}: dense has the shape \(4, 2\); expected the shape \(3, 2\)"):
        model(torch.zeros(4, 2), torch.zeros(3, 8))
    with pytest.raises(InputError, match=rf"{name}: dense is None; expected the shape \(3, 2\)"):
        model(None, torch.zeros(3, 8))
    with pytest.raises(InputError, match=rf"{name}: dense has the shape \(3, 2\); .*\(3, 0\), .* or None"):
        small(kind, 0, shape(4, 4))(torch.zeros(3, 2), torch.zeros(3, 8))
    with pytest.raises(InputError, match=r"has the shape \(3, 0\); .*columns; name the columns in the source: dense="):
        model(torch.zeros(3, 0), torch.zeros(3, 8))
    assert small(kind, 0, shape(4, 4))(torch.zeros(3, 0), torch.zeros(3, 8)).shape == (3,)
