"""What runs on the streams of a device is ordered by marks, never by luck: whole loops on a CPU that has streams and
checks their order (`stream_recorder`). On a CUDA device, tests/train/test_gpu.py runs the same loops on streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from satrap import SGD, Adagrad, Embeddings, Inputs, Normal, Table
from satrap.config.features import Features
from satrap.data.inputs import Position
from satrap.device import device_ids, home_memory
from satrap.device.collective_rows import CollectiveRows
from satrap.device.device_stream import DeviceStream, new_stream
from satrap.device.device_worker import device_worker
from satrap.device.direct_collective_rows import DirectCollectiveRows
from satrap.device.exchange import RoundThread
from satrap.train import open_worker
from satrap.train.batch_lookup import BatchLookup
from stream_recorder import Recorder, recorded

SIZE, NUM_IDS, DIM = 8, 60, 4
CPU = torch.device("cpu")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Give the CPU streams."""
    with recorded(monkeypatch) as found:
        yield found


def features(num_rows: int | None = None) -> dict[str, Any]:
    user = Table("user", dim=DIM, optimizer=Adagrad(lr=0.1), initial=Normal(std=1.0), num_rows=num_rows)
    item = Table("item", dim=DIM, optimizer=SGD(lr=0.1), num_rows=num_rows)
    return {"user": user, "item": item.bag("mean"), "history": item.sequence(3)}


def batches(rng: np.random.Generator, num: int, *, on_device: bool = False) -> list[Inputs]:
    made = []
    for number in range(num):
        lengths = np.concatenate([np.ones(SIZE, np.int64), rng.integers(0, 4, 2 * SIZE)])
        offsets: Any = np.append(0, np.cumsum(lengths))
        values: Any = rng.integers(0, NUM_IDS, offsets[-1], dtype=np.uint64)
        dense: Any = rng.standard_normal((SIZE, 2)).astype(np.float32)
        label: Any = rng.integers(0, 2, SIZE).astype(np.float32)
        if on_device:
            values, offsets = torch.from_numpy(values.view(np.int64)), torch.from_numpy(offsets)
            dense, label = torch.from_numpy(dense), torch.from_numpy(label)
        made.append(
            Inputs(
                names=("user", "item", "history"),
                values=values,
                offsets=offsets,
                batch_size=SIZE,
                dense=dense,
                label=label,
                position=Position(0, 0, number + 1),
            )
        )
    return made


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2 + 3 * DIM, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, batch: Any) -> Any:
        history = batch["history"]
        seen = (history.values * history.mask[:, :, None]).sum(1)
        return self.layers(torch.cat([batch.dense, batch.embeddings, seen], 1))[:, 0]


def step(model: Net, batch: Any) -> None:
    torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label).backward()


def train_on_stream(
    data: list[Inputs],
    *,
    loop: DeviceStream | None = None,
    staleness: int = 0,
    overlap: bool = False,
    accumulate: int = 1,
    weight: float = 1.0,
    device: torch.device = CPU,
    num_rows: int | None = None,
    **how: Any,
) -> tuple[list[bytes], Embeddings]:
    """Train, evaluate and read. loop: the stream on which the loop runs."""
    torch.manual_seed(0)
    with nullcontext() if loop is None else loop.running():
        embeddings = Embeddings(
            features(num_rows), device=device, staleness=staleness, num_threads=1, deterministic=staleness > 0, **how
        )
        model = Net().to(device)
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        with embeddings.stream(data, overlap=overlap, accumulate=accumulate) as stream:
            for number, batch in enumerate(stream, 1):
                step(model, batch)
                if number == 3 and accumulate == 1:  # dropped
                    optimizer.zero_grad()
                    continue
                for held in stream._ledger.held():
                    held.weight = weight
                if number % accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        embeddings.eval()
        model.eval()
        with torch.no_grad():
            scores = [model(batch) for batch in embeddings.stream(data[:3], overlap=overlap)]
            alone = embeddings(data[0]).embeddings
            found = [(each + 0.0).tolist() for each in (*scores, alone)]
        rows = [embeddings.tables[name].read(np.arange(NUM_IDS, dtype=np.uint64)) for name in ("user", "item")]
    return [*(np.array(each).tobytes() for each in found), *(part.tobytes() for each in rows for part in each)], (
        embeddings
    )


LOOPS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"overlap": True},
    "stale": {"overlap": True, "staleness": 1},
    "stale inline": {"staleness": 1},
    "accumulates": {"overlap": True, "accumulate": 2},
    "direct": {"overlap": True, "staleness": 1, "num_rows": NUM_IDS},
    "direct, accumulates": {"overlap": True, "accumulate": 2, "num_rows": NUM_IDS},
    "direct, at home": {"overlap": True, "num_rows": NUM_IDS, "device_memory": {"user": "none", "item": 300}},
    "weighs": {"overlap": True, "staleness": 1, "weight": 0.5},
    "two tiers": {"overlap": True, "staleness": 1, "device_memory": 2000},
    "at home": {"overlap": True, "device_memory": {"user": "none", "item": "none"}},
}


@pytest.mark.draw(6)
@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("how", LOOPS)
def test_everything_is_ordered(
    how: str, own: bool, recorder: Recorder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 1024)
    data = batches(rng, 8)
    with recorder.recording():
        found, embeddings = train_on_stream(data, loop=new_stream(CPU) if own else None, **LOOPS[how])
    assert recorder.faults == []
    assert {name for name, _ in recorder.kernels} >= {"pool", "copy_sequence", "update", "initialise"}
    used = {name for kernel, name in recorder.kernels if kernel in ("pool", "copy_sequence", "update")}
    assert used == {embeddings.worker.device_stream.name}, "rows are used on one stream"
    monkeypatch.undo()
    expected, _ = train_on_stream(data, **LOOPS[how])
    assert found == expected


@pytest.fixture
def lone_trainer(tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A trainer that exchanges rows with itself, in recorded threads."""
    run = RoundThread._run

    def recorded(thread: RoundThread) -> None:
        with recorder.recording():
            run(thread)

    monkeypatch.setattr(RoundThread, "_run", recorded)
    monkeypatch.setattr(open_worker, "_open_on_device", open_worker._open_among_devices)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.draw(3)
@pytest.mark.parametrize("how", ["inline", "stale", "direct", "direct, accumulates", "direct, at home"])
def test_exchanges_between_trainers_are_ordered(
    how: str, lone_trainer: None, recorder: Recorder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_memory, "SEGMENT_BYTES", 1024)
    data = batches(rng, 8)
    with recorder.recording():
        found, embeddings = train_on_stream(data, loop=new_stream(CPU), **LOOPS[how])
    assert isinstance(embeddings.worker.rows, CollectiveRows)
    assert isinstance(embeddings.worker.rows, DirectCollectiveRows) == ("direct" in how)
    embeddings.close()
    assert recorder.faults == []
    monkeypatch.undo()
    expected, _ = train_on_stream(data, **LOOPS[how])
    assert found == expected


@pytest.mark.parametrize("num_rows", [None, NUM_IDS])
@pytest.mark.parametrize("overlap", [False, True])
def test_ids_that_the_loop_computes(
    overlap: bool, num_rows: int | None, recorder: Recorder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, dense numbers and labels come from the stream of the thread that reads them."""
    monkeypatch.setitem(device_ids.SORTS_IDS, "cpu", True)

    def computed() -> Iterator[Inputs]:
        for each in batches(rng, 6, on_device=True):
            parts: Any = {name: getattr(each, name) * 1 for name in ("values", "offsets", "dense", "label")}
            yield replace(each, **parts)

    torch.manual_seed(0)
    loop = new_stream(CPU)
    with recorder.recording(), loop.running():
        embeddings = Embeddings(features(num_rows), device="cpu", num_threads=1)
        model = Net()
        optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        for batch in embeddings.stream(computed(), overlap=overlap):
            step(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.faults == []


@pytest.mark.parametrize(
    ("method", "expected"),
    [("wait", "does not wait for"), ("keep", "is released while"), ("wait_for_copies", "does not wait for")],
)
def test_the_recorder_sees_what_is_not_ordered(
    method: str, expected: str, recorder: Recorder, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: Any = BatchLookup if method == "wait_for_copies" else type(new_stream(CPU))
    monkeypatch.setattr(owner, method, lambda *_: None)
    with recorder.recording():
        train_on_stream(batches(rng, 6), loop=new_stream(CPU), overlap=True, staleness=1)
    assert any(expected in fault for fault in recorder.faults)


def test_a_weighted_gradient_is_made_where_it_is_used(recorder: Recorder, rng: np.random.Generator) -> None:
    """It was made on a stream of copies, and read by the update on another one."""
    with recorder.recording():
        _, embeddings = train_on_stream(batches(rng, 6), loop=new_stream(CPU), overlap=True, weight=0.5)
    assert recorder.faults == []
    assert embeddings.worker.device_stream is not None


@pytest.mark.parametrize("num_rows", [None, 1000])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("overlap", "dtype"), [(False, "float32"), (True, "float32"), (True, "float16")])
def test_waits_and_passes_of_a_step(
    overlap: bool, dtype: Any, scaled: bool, num_rows: int | None, recorder: Recorder, rng: np.random.Generator
) -> None:
    """A step waits once for the device, whether or not a GradScaler has a say in it; its lookup never does. The
    gradients are read once to check them, and once by the update; a GradScaler reads them once more, which is the check
    of those in float16."""
    plain = Table("t", dim=DIM, optimizer=SGD(lr=0.1), num_rows=num_rows)
    with recorder.recording(), new_stream(CPU).running():
        embeddings = Embeddings({"t": plain}, device="cpu", num_threads=1, output_dtype=dtype)
        layer = torch.nn.Linear(DIM, 1)
        optimizer = embeddings.optimizer(torch.optim.SGD(layer.parameters(), lr=0.05))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scaled)
        data = [
            Inputs(names=("t",), values=rng.integers(0, 1000, SIZE, dtype=np.uint64), batch_size=SIZE) for _ in range(6)
        ]
        passes: list[Counter[str]] = []
        before = 0
        with embeddings.stream(data, overlap=overlap) as stream:
            for number, batch in enumerate(stream):
                scaler.scale(layer(batch.embeddings.float()).sum()).backward()
                assert batch.embeddings.grad is not None
                gradient = recorder.memory_of(batch.embeddings.grad)
                read = len(gradient.reads)
                scaler.step(optimizer)
                scaler.update()
                stream.drain()
                passes.append(Counter(gradient.reads[read:]))
                optimizer.zero_grad()
                assert len(recorder.waits) - before <= 1, recorder.waits[before:]
                if number:
                    assert len(recorder.waits) - before == 1
                before = len(recorder.waits)
    assert recorder.faults == []
    expected = {"update"} | ({"_amp_foreach_non_finite_check_and_unscale_"} if scaled else set())
    expected |= set() if scaled and dtype == "float16" else {"aminmax"}
    assert [set(each) for each in passes] == [expected] * len(data)


def test_calls_of_a_worker_are_ordered_with_the_callers_stream(recorder: Recorder, rng: np.random.Generator) -> None:
    """Without a stream of batches: its work comes after what the caller has computed, and before what follows."""
    with recorder.recording(), new_stream(CPU).running():
        worker = device_worker(Features(features()), CPU, num_threads=1)
        for number, inputs in enumerate(batches(rng, 4), 1):
            block = torch.ones(SIZE, 2 * DIM) * 7.0
            found = worker.lookup(inputs, step=number, block=block)
            assert found.ticket is not None and found.block is block
            gradient, rows = found.block * 0.5, found.sequences["history"] * 0.5
            worker.update([found.ticket], [gradient], [{"history": rows}], step=number)
        values = worker.tables["user"].read(np.arange(NUM_IDS, dtype=np.uint64)).values
    assert recorder.faults == [] and values.any()
