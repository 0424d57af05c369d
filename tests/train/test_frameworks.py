"""Lightning and Accelerate end with the same bits as a plain loop; loading their checkpoints, which have no rows,
raises."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

import satrap
from contents import bits
from logged import logged
from loop import Net, batches, job, loss_of, train, train_step
from satrap import Batch, Embeddings, StreamError
from satrap.train.optimizer import HybridOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
]
NUM = 12


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    """Reset Accelerate, which keeps its state in the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def items(sized: bool, num: int = NUM) -> Any:
    """Return batches as a list, whose length is known, or from a function, so that Lightning reads one batch ahead."""
    data = batches(num)
    return satrap.IterableSource(data if sized else lambda: iter(data))


def plain(staleness: int = 0, *, accumulate: int = 1, num: int = NUM) -> list[bytes]:
    embeddings, model, optimizer = job(staleness, deterministic=True)
    with embeddings.stream(items(True, num), accumulate=accumulate) as stream:
        for i, batch in enumerate(stream, 1):
            (loss_of(model, batch) / accumulate).backward()
            if i % accumulate == 0 or i == num:
                optimizer.step()
                optimizer.zero_grad()
            if i == num:
                break
    return bits(embeddings, model)


class Validation:
    """A loader that starts a new stream for each validation."""

    def __init__(self, embeddings: Embeddings) -> None:
        self.embeddings, self.passes = embeddings, 0

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        return self.embeddings.stream(batches(3, seed=1), train=False)


class Module(lightning.LightningModule):  # type: ignore[misc]  # mypy skips it
    def __init__(self, embeddings: Embeddings, model: Net, optimizer: HybridOptimizer) -> None:
        super().__init__()
        self.embeddings, self.model, self.optimizer = embeddings, model, optimizer
        self.steps: list[int] = []
        self.skips: tuple[int, ...] = ()

    def training_step(self, batch: Batch, _: int) -> Tensor | None:
        self.steps.append(batch.step)
        self.log("loss", loss := loss_of(self.model, batch), batch_size=len(batch))
        return None if batch.step in self.skips else loss

    def configure_optimizers(self) -> HybridOptimizer:
        return self.optimizer


class Validated(Module):
    def validation_step(self, batch: Batch, _: int) -> None:
        assert batch.step == 0 and not batch.embeddings.requires_grad
        self.log("val", loss_of(self.model, batch), batch_size=len(batch))


def fit(module: Module, stream: Any, validation: Any = None, **options: Any) -> None:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(**{"max_epochs": 1, "accelerator": "cpu"} | quiet | options)
    trainer.fit(module, stream, validation)


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize(
    ("staleness", "accumulate", "num"), [(0, 1, NUM), (4, 1, NUM), (0, 3, NUM), (1, 2, NUM), (0, 3, 7), (1, 3, 8)]
)
def test_lightning_equals_the_plain_loop(staleness: int, accumulate: int, num: int, sized: bool) -> None:
    """Also where the last step has fewer batches: Lightning steps it, too."""
    module = Module(*job(staleness, deterministic=True))
    with module.embeddings.stream(items(sized, num), accumulate=accumulate) as stream:
        fit(module, stream, accumulate_grad_batches=accumulate)
        assert module.embeddings.counters().lost == {}
    assert module.steps == [1 + i // accumulate for i in range(num)]
    assert bits(module.embeddings, module.model) == plain(staleness, accumulate=accumulate, num=num)


@pytest.mark.parametrize("sized", [False, True])
def test_lightning_validates_during_training(sized: bool) -> None:
    """Lightning also validates before training, as a check of the validation loop."""
    module = Validated(*job())
    store: Any = module.embeddings.tables["user"]
    store.lookup(batches(1)[0].values[:1])  # an evaluation without any rows warns
    validation = Validation(module.embeddings)
    with module.embeddings.stream(items(sized)) as stream:
        fit(module, stream, validation, val_check_interval=4, num_sanity_val_steps=2)
        assert not stream.dropped
    assert validation.passes >= 1 + NUM // 4
    assert bits(module.embeddings, module.model) == plain()
    assert module.embeddings.training


@pytest.mark.parametrize("sized", [False, True])
def test_lightning_stops_early(sized: bool) -> None:
    """The batch that it has read ahead is never used."""
    module = Module(*job())
    with module.embeddings.stream(items(sized)) as stream:
        fit(module, stream, limit_train_batches=5)
    assert bits(module.embeddings, module.model) == plain(num=5)
    assert module.embeddings.step == 5 and stream.dropped.keys() <= {"unused"}


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
@pytest.mark.parametrize("sized", [False, True])
def test_lightning_skips_steps(sized: bool) -> None:
    module = Module(*job())
    module.skips = (1, 4, 5)
    with module.embeddings.stream(items(sized)) as stream:
        fit(module, stream)
        assert stream.dropped == {"unused": 3}
    assert module.steps == list(range(1, NUM + 1)) and module.embeddings.step == NUM


@pytest.mark.parametrize("sized", [False, True])
def test_a_second_epoch_of_a_stream_raises(sized: bool) -> None:
    """Lightning counts the batches of a stream that has a length, and never requests its end."""
    module = Module(*job())
    with (
        module.embeddings.stream(items(sized)) as stream,
        pytest.raises(StreamError, match="a stream is one pass over its data"),
    ):
        fit(module, stream, max_epochs=2)


@pytest.mark.parametrize(("staleness", "accumulate"), [(0, 1), (4, 1), (0, 3), (1, 2)])
@pytest.mark.parametrize("ahead", [False, True])
def test_accelerate_equals_the_plain_loop(staleness: int, accumulate: int, ahead: bool) -> None:
    """The stream is prepared like everything else. ahead: all its batches are taken before the first step."""
    embeddings, model, inner = job(staleness, deterministic=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    with embeddings.stream(items(False), accumulate=accumulate) as stream:
        net, optimizer, prepared = accelerator.prepare(model, inner, stream)
        taken: Iterable[Batch] = list(prepared) if ahead else prepared
        for batch in taken:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                optimizer.step()
                optimizer.zero_grad()
        assert not stream.dropped
    assert bits(embeddings, model) == plain(staleness, accumulate=accumulate)


def test_accelerate_leaves_the_last_batches_to_the_loop() -> None:
    """It steps after every third batch only, since it does not see the end of a stream."""
    embeddings, model, inner = job()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    net, optimizer = accelerator.prepare(model, inner)
    with logged("satrap.train", match=r"last batches \(2, of 3 in a step\)"):
        for batch in embeddings.stream(items(False, 8), accumulate=3):
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                optimizer.step()
                optimizer.zero_grad()
    assert embeddings.counters().lost == {"batches/unstepped": 2}
    inner.step()
    assert embeddings.counters().lost == {}
    assert bits(embeddings, model) == plain(accumulate=3, num=8)


class ModelWithEmbeddings(nn.Module):
    """A model that contains the embeddings, so that its state_dict identifies their rows."""

    def __init__(self, embeddings: Embeddings, model: Net) -> None:
        super().__init__()
        self.embeddings, self.model = embeddings, model


@pytest.mark.parametrize("holds", [False, True], ids=["model alone", "model with embeddings"])
@pytest.mark.parametrize("safe", [False, True], ids=["pickle", "safetensors"])
def test_loading_an_accelerate_state_without_rows_raises(holds: bool, safe: bool, tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, Embeddings, Net, Any]:
        embeddings, model, inner = job()
        accelerator = Accelerator(cpu=True)
        whole, optimizer = accelerator.prepare(ModelWithEmbeddings(embeddings, model) if holds else model, inner)
        assert whole is not None
        return accelerator, embeddings, model, optimizer

    accelerator, embeddings, model, optimizer = prepared()
    for batch in embeddings.stream(items(True)):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    accelerator.load_state(str(tmp_path))  # with the rows that it was saved with
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, embeddings, _, _ = prepared()
    with pytest.raises(StreamError, match=f"state of step {NUM}, .* tables are at step 0, .*satrap.Checkpoint"):
        accelerator.load_state(str(tmp_path))


@pytest.mark.parametrize("what", ["stream", "step", "evaluation"])
def test_a_model_state_without_rows_is_refused_before_use(what: str) -> None:
    embeddings, model, optimizer = job()
    train(embeddings, model, optimizer, items(True))
    state = ModelWithEmbeddings(embeddings, model).state_dict()
    embeddings, model, optimizer = job()
    stream = embeddings.stream(items(True))
    ModelWithEmbeddings(embeddings, model).load_state_dict(state)
    with stream, pytest.raises(StreamError, match=f"state of step {NUM}, .* tables are at step 0"):
        if what == "step":
            train_step(model, optimizer, next(stream))
        else:
            embeddings.stream(items(True), train=what == "stream")


def test_stream_train_overrides_the_evaluation_mode() -> None:
    embeddings, model, optimizer = job()
    embeddings.eval()
    with embeddings.stream(batches(2), train=True) as stream:
        train_step(model, optimizer, next(stream))
    assert embeddings.step == 1 and not torch.is_inference_mode_enabled()
