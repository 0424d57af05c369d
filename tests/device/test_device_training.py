"""Training with rows on a device against training with rows in this process: the same bits, whatever the loop does. The
device is the CPU, and a GPU in train/test_gpu.py, which imports these tests; the dense network is on it in both runs. A
run continues from the checkpoints of rows elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import satrap
from checkpoint_job import Job, Source, names, same
from cluster import running_servers
from contents import bits, contents, outcome
from loop import DIM, NUM_IDS, Net, batches, job, loss_of, train, train_step
from satrap import SGD, Adagrad, Deployment, Embeddings, Inputs, RowWiseAdagrad, Table
from satrap.errors import ConfigError, NonFiniteError, StreamError

EVERY = np.arange(NUM_IDS, dtype=np.uint64)


def scaled(embeddings: Embeddings, model: Net, optimizer: Any, device: str) -> None:
    """With an overflow in the second step."""
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for i, batch in enumerate(embeddings.stream(batches(6), device=device)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch) * (float("inf") if i == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


def bfloat16(embeddings: Embeddings, model: Net, optimizer: Any, device: str) -> None:
    for batch in embeddings.stream(batches(6), device=device):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):  # the step too: no kernel of the rows may change
            loss_of(model, batch).backward()
            optimizer.step()


def accumulated(embeddings: Embeddings, model: Net, optimizer: Any, device: str) -> None:
    for i, batch in enumerate(embeddings.stream(batches(9), accumulate=3, device=device), 1):
        (loss_of(model, batch) / 3).backward()
        if i % 3 == 0:
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
            optimizer.step()
            optimizer.zero_grad()


def compiled(embeddings: Embeddings, model: Net, optimizer: Any, device: str) -> None:
    """Without a break of the graph; on a GPU with torch's own kernels."""
    whole: Any = torch.compile(model, backend="inductor" if device == "cuda" else "eager", fullgraph=True)
    train(embeddings, whole, optimizer, batches(6), device=device)


def ahead(embeddings: Embeddings, model: Net, optimizer: Any, device: str) -> None:
    """A loop that reads ahead, and leaves batches without a step."""
    stream = embeddings.stream(batches(6), device=device)
    for batch in [next(stream), next(stream)]:
        train_step(model, optimizer, batch)
    next(stream)
    for batch in stream:
        train_step(model, optimizer, batch)
    stream.close()


def with_empty_batches(embeddings: Embeddings, model: Net, optimizer: Any, device: str) -> None:
    train(embeddings, model, optimizer, [*batches(2), *batches(2, size=0), *batches(1, size=1)], device=device)


def in_float64(embeddings: Embeddings, model: Net, optimizer: Any, device: str) -> None:
    """torch's default dtype concerns the tensors of the user."""
    torch.set_default_dtype(torch.float64)
    try:
        train(embeddings, model, optimizer, batches(3), device=device)
    finally:
        torch.set_default_dtype(torch.float32)


LOOPS: list[Callable[[Embeddings, Net, Any, str], None]] = [
    scaled, bfloat16, accumulated, compiled, ahead, with_empty_batches, in_float64
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda each: each.__name__)
def test_a_loop_ends_with_the_same_bits(loop: Callable[[Embeddings, Net, Any, str], None], device: str) -> None:
    found = []
    for place in (None, device):
        embeddings, model, optimizer = job(device=place, dense=device)
        loop(embeddings, model, optimizer, device)
        found.append(outcome(embeddings, model))
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness(staleness: int, overlap: bool, device: str) -> None:
    found = []
    for place in (None, device):
        embeddings, model, optimizer = job(staleness, dense=device, deterministic=True, device=place)
        losses = train(embeddings, model, optimizer, batches(20), overlap=overlap, device=device)
        found.append([losses, *outcome(embeddings, model)])
    assert found[0] == found[1]


class Attention(torch.nn.Module):
    """Uses the rows of a sequence one by one, with its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, DIM))

    def forward(self, batch: Any) -> Tensor:
        path = batch["path"].padded()
        scores = (path.values @ self.weight).masked_fill(~path.mask, -1e9).softmax(1)
        mixed: Tensor = (scores.unsqueeze(2) * path.values * path.mask.unsqueeze(2)).sum(1) * batch["user"]
        return mixed.sum(1)


@pytest.mark.parametrize("jagged", [False, True])
def test_sequences_and_features_that_share_tables(jagged: bool, device: str, rng: np.random.Generator) -> None:
    inputs = []
    for _ in range(5):
        lengths = np.append(np.ones(14, np.int64), rng.integers(0, 5, 7))
        inputs.append(
            Inputs(
                names=("user", "other", "path"),
                values=rng.integers(0, NUM_IDS, lengths.sum(), dtype=np.uint64),
                offsets=np.append(0, np.cumsum(lengths)),
                batch_size=7,
            )
        )
    found = []
    for place in (None, device):
        torch.manual_seed(0)
        item, user = (
            Table("item", dim=DIM, optimizer=Adagrad(0.1)),
            Table("user", dim=DIM, optimizer=RowWiseAdagrad(0.1)),
        )
        features: dict[str, Any] = {"user": user, "other": user, "path": item.sequence(3, jagged=jagged)}
        embeddings = Embeddings(features, num_threads=1, device=place)
        model = Attention().to(device)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        for batch in embeddings.stream(inputs, device=device):
            optimizer.zero_grad()
            (model(batch) + batch["other"].sum(1)).square().mean().backward()
            optimizer.step()
        found.append(outcome(embeddings, model))
    assert found[0] == found[1]


def test_evaluation_and_reading(device: str) -> None:
    found = []
    for place in (None, device):
        embeddings, model, optimizer = job(device=place, dense=device)
        train(embeddings, model, optimizer, batches(5), device=device)
        with torch.inference_mode():
            rows = embeddings(dict.fromkeys(("user", "item", "history"), EVERY)).embeddings
        embeddings.eval()
        measured = satrap.evaluate(model, embeddings.stream(batches(4, seed=1), device=device))
        embeddings.train()
        train(embeddings, model, optimizer, batches(2), device=device)  # and its rows may still be updated
        found.append([rows.tolist(), measured.log_loss(), measured.auc(), *outcome(embeddings, model)])
        if place is not None:
            assert embeddings.tables["item"].stats()["bytes"] > NUM_IDS * DIM * 4
    assert found[0] == found[1]


@pytest.mark.parametrize("full_every", [1, 3])
@pytest.mark.parametrize(
    "order",
    [("memory", "device", "servers", "device", "memory"), ("device", "memory", "device"), ("servers", "device")],
)
def test_a_run_resumes_wherever_its_rows_were(
    order: tuple[str, ...], full_every: int, device: str, tmp_path: Path
) -> None:
    """Each part of the run is another process: with rows here, on a device, or on two servers."""
    ends = [4 * (i + 1) for i in range(len(order))]
    whole = Job(str(tmp_path / "whole"), ends[-1], dense=device)
    whole.train(every_steps=10**6)
    for i, (place, end) in enumerate(zip(order, ends, strict=True)):
        with ExitStack() as stack:
            rows: dict[str, Any] = {"device": device} if place == "device" else {}
            if place == "servers":
                services = stack.enter_context(running_servers(2))
                rows["deployment"] = Deployment(servers=[each.address for each in services])
            part = Job(str(tmp_path / "run"), end, rows=rows, dense=device, full_every=full_every)
            stack.callback(part.embeddings.close)
            assert part.run.resume() == (i > 0)
            part.train()
            state = part.state()
    same(state, whole.state())


def test_a_run_goes_back_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    """In the same process, over rows that were used since: the frames of the others are free."""
    found = []
    for device in (None, "cpu"):
        run = Job(str(tmp_path / str(device)), 6, rows={"device": device}, keep=10)
        run.train()
        run.run.resume(names(tmp_path / str(device))[2])
        run.source.num = 9
        run.train()
        found.append(run.state())
    same(*found)


def test_checkpoints_of_a_loop_that_finds_rows_ahead(device: str, tmp_path: Path) -> None:
    """A checkpoint may have new rows of batches that were not looked up yet, and lack those that they evicted. A run
    that resumes any of them ends with the bits of one in memory that was never interrupted."""

    def run(place: str | None, folder: Path, resume: str | None = None) -> list[bytes]:
        torch.manual_seed(0)
        user = Table("user", dim=DIM, optimizer=Adagrad(0.1), capacity=80, num_buckets=2)
        item = Table("item", dim=DIM, optimizer=SGD(0.1), dtype="bfloat16", capacity=90, num_buckets=2)
        embeddings = Embeddings({"user": user, "item": item}, num_threads=1, device=place)
        model, source = Net(2 * DIM + 1).to(device), Source(12)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        checkpoint = satrap.Checkpoint(folder, model, optimizer, embeddings, source, keep=100, full_every=3)
        assert resume is None or checkpoint.resume(resume)
        with embeddings.stream(source, overlap=True, device=device) as stream:
            for batch in stream:
                train_step(model, optimizer, batch)
                if resume is None:
                    checkpoint.save()
        for store in embeddings.tables.values():
            store.check()
        with embeddings:
            return bits(embeddings, model, np.arange(200, dtype=np.uint64))

    expected = run(None, tmp_path / "memory")
    assert run(device, tmp_path / "device") == expected
    saved = names(tmp_path / "device")
    for name in (saved[0], saved[4], saved[-2]):
        assert run(device, tmp_path / "device", name) == expected
        assert run(None, tmp_path / "device", name) == expected


def test_what_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"device": "cpu:7"}, "device is 'cpu:7', and torch has one CPU, whatever its cores; expected 'cpu'"),
        ({"device": "gpu"}, "device is 'gpu', which torch does not know; expected 'cuda'"),
        ({"device": 0}, r"device is 0 \(int\); expected 'cuda'"),
        ({"device": "meta"}, "device is 'meta', for which there are no kernels"),
        ({"device": "cpu", "dense": "async"}, "dense='async'"),
        ({"device": "cpu", "deployment": Deployment(shared="/dev/shm/rows")}, "rows are in a shared-memory file"),
        ({"device": "cpu", "deployment": Deployment(servers=["tcp://127.0.0.1:1"])}, "rows are in servers"),
    ]
    if not torch.cuda.is_available():
        refused.append(({"device": "cuda"}, "device is 'cuda' and there is no GPU: .*satrap doctor"))
    else:
        refused.append(({"device": "cuda:99"}, "this process sees .* GPUs"))
    for options, match in refused:
        with pytest.raises(ConfigError, match=match):
            Embeddings({"item": Table("item", dim=4)}, **options)
    embeddings, model, optimizer = job(device="cpu")
    with pytest.raises(ConfigError, match="device is 'meta'"):
        embeddings.stream(batches(1), device="meta")
    assert train(embeddings, model, optimizer, batches(1), device="cpu:0")  # the same device by another name
    embeddings.close()
    with pytest.raises(StreamError, match="are closed"):
        embeddings.stream(batches(1))


@pytest.fixture
def tables() -> Iterator[dict[str, Any]]:
    yield {
        "strict": Table("strict", dim=2, optimizer=SGD(1.0)),
        "lenient": Table("lenient", dim=2, optimizer=SGD(1.0), on_nonfinite="skip"),
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("column", [0, 2])
def test_a_loss_that_is_not_finite(tables: dict[str, Any], column: int, bad: float, device: str) -> None:
    """One table refuses such gradients, the other skips them; the error names the feature, and nothing is applied."""
    found = []
    for place in (None, device):
        embeddings = Embeddings(tables, num_threads=1, device=place)
        weight = torch.nn.Parameter(torch.ones(()))
        optimizer = embeddings.optimizer(torch.optim.SGD([weight], lr=0.0))
        inputs = Inputs(names=("strict", "lenient"), values=np.array([1, 2, 3, 4], np.uint64), batch_size=2)
        ones = torch.ones(2, 4, device=device)
        factors = ones.clone()
        factors[1, column] = bad
        errors = []
        for factor in (ones, factors, ones):
            batch = next(iter(embeddings.stream([inputs], device=device)))
            (batch.embeddings * factor).sum().backward()
            try:
                optimizer.step()
            except NonFiniteError as error:
                errors.append(str(error))
        assert len(errors) == (column == 0)
        skipped = [store.stats()["skipped"] for store in embeddings.tables.values()]
        found.append([errors, contents(embeddings, EVERY), skipped])
    assert found[0] == found[1]
