"""Accumulation over batches whose number is no multiple of N equals a loop in plain PyTorch that steps after every Nth
batch and after the last one; a loop that leaves the last batches over finds them counted and logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from contents import bits
from logged import logged
from loop import BATCH, NUM_IDS, Net, batches, job, loss_of
from satrap import Checkpoint, Embeddings, Inputs, IterableSource, StreamError
from satrap.train.embeddings import session_of
from satrap.train.joint_batches import JointBatches
from satrap.train.joint_calls import Call
from satrap.train.ledger import BatchLedger
from satrap.train.stream import Stream

UNSTEPPED = r"optimizer\.step\(\) has not taken its last batches \({}, of 3 in a step\)"


def test_a_batch_that_an_interrupt_kept_back_is_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    embeddings, _, _ = job()
    with embeddings.stream(batches(2), accumulate=3) as stream:
        first = next(stream)
        with monkeypatch.context() as patched:
            patched.setattr(stream._look_up, "wait_for_copies", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        assert not first.completes_step
        assert next(stream).completes_step


class Plain:
    """The job of loop.py without Satrap: tables are nn.Embedding with one dense SGD, as every row has the same lr."""

    def __init__(self, embeddings: Embeddings, model: Net) -> None:
        every = np.arange(NUM_IDS, dtype=np.uint64)
        self.tables = {
            name: torch.nn.Embedding.from_pretrained(
                torch.from_numpy(store.lookup(every, train=False).copy()), freeze=False
            )
            for name, store in embeddings.tables.items()
        }
        self.model = Net()
        self.model.load_state_dict(model.state_dict())
        self.optimizer = torch.optim.SGD(
            [
                {"params": self.model.parameters(), "lr": 0.05},
                {"params": [each.weight for each in self.tables.values()], "lr": 0.1},
            ]
        )

    def loss(self, inputs: Inputs) -> torch.Tensor:
        assert inputs.offsets is not None and inputs.dense is not None and inputs.label is not None
        size, values, pooled = inputs.batch_size, torch.from_numpy(inputs.values.astype(np.int64)), []
        for number, name in enumerate(("user", "item", "item")):
            offsets = torch.from_numpy(inputs.offsets[number * size : (number + 1) * size + 1])
            pooled.append(
                torch.nn.functional.embedding_bag(
                    values[offsets[0] : offsets[-1]],
                    self.tables[name].weight,
                    offsets[:-1] - offsets[0],
                    mode="mean" if number == 2 else "sum",
                )
            )
        logits = self.model(torch.from_numpy(inputs.dense), torch.cat(pooled, 1))
        return binary_cross_entropy_with_logits(logits, torch.from_numpy(inputs.label))

    def train(self, data: Sequence[Inputs], accumulate: int) -> None:
        """Train as a torch loop does: the last step has the batches that are left, each with its usual weight."""
        for number, inputs in enumerate(data, 1):
            (self.loss(inputs) / accumulate).backward()
            if number % accumulate == 0 or number == len(data):
                self.optimizer.step()
                self.optimizer.zero_grad()

    def require_equal(self, embeddings: Embeddings, model: Net) -> None:
        for plain, own in zip(self.model.parameters(), model.parameters(), strict=True):
            np.testing.assert_allclose(plain.detach(), own.detach(), rtol=1e-5, atol=1e-6)
        used = {name: store.read(np.arange(NUM_IDS, dtype=np.uint64)) for name, store in embeddings.tables.items()}
        for name, table in self.tables.items():
            present = used[name].present
            np.testing.assert_allclose(
                used[name].values[present], table.weight.detach().numpy()[present], rtol=1e-5, atol=1e-6
            )


def step_where_complete(optimizer: Any, model: Net, stream: Any, accumulate: int) -> list[bool]:
    """Step where the batches say so; return what they said."""
    said = []
    for batch in stream:
        (loss_of(model, batch) / accumulate).backward()
        said.append(batch.completes_step)
        if said[-1]:
            optimizer.step()
            optimizer.zero_grad()
    return said


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "ahead"])
@pytest.mark.parametrize(("overlap", "staleness"), [(False, 0), (True, 0), (True, 2)])
@pytest.mark.parametrize(("num", "accumulate"), [(7, 3), (8, 3), (9, 3), (2, 3), (1, 3), (4, 1)])
def test_the_last_batches_make_a_step_as_in_torch(
    num: int, accumulate: int, overlap: bool, staleness: int, ahead: bool
) -> None:
    embeddings, model, optimizer = job(staleness, deterministic=True)
    plain, data = Plain(embeddings, model), batches(num)
    with embeddings.stream(data, accumulate=accumulate, overlap=overlap) as stream:
        said = step_where_complete(optimizer, model, list(stream) if ahead else stream, accumulate)
        assert said == [number % accumulate == 0 or number == num for number in range(1, num + 1)]
        embeddings.drain()
        assert embeddings.step == -(-num // accumulate) and embeddings.counters().lost == {}
    if staleness == 0:
        plain.train(data, accumulate)
        plain.require_equal(embeddings, model)


def test_whether_a_batch_completes_its_step_reads_no_batch_too_many() -> None:
    """A source that waits for its data, such as a queue, must not delay a batch that is there."""
    embeddings, _, _ = job()
    read: list[int] = []

    def source() -> Any:
        for number, each in enumerate(batches(5), 1):
            read.append(number)
            yield each

    stream = embeddings.stream(source(), accumulate=2)
    first = next(stream)
    assert read == [1]
    assert not first.completes_step and read == [1, 2]
    second = next(stream)
    assert second.completes_step and not first.completes_step and read == [1, 2]
    stream.close()


def test_a_batch_says_whether_it_completes_its_step_after_its_stream() -> None:
    embeddings, _, _ = job()
    first, second, third = embeddings.stream(batches(3), accumulate=2)
    assert [each.completes_step for each in (first, second, third)] == [False, True, True]
    embeddings.stream(batches(1)).close()
    assert [each.completes_step for each in (first, second, third)] == [False, True, True]
    assert not next(embeddings.eval().stream(batches(1))).completes_step


def leave_over(embeddings: Embeddings, model: Net, optimizer: Any, data: Sequence[Inputs]) -> None:
    """Run a loop of three batches for each step that takes no step after the last batch."""
    with logged("satrap.train", match=UNSTEPPED.format(len(data) % 3)):
        for number, batch in enumerate(embeddings.stream(data, accumulate=3), 1):
            (loss_of(model, batch) / 3).backward()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(("num", "left"), [(61, 1), (62, 2)])
def test_batches_that_a_loop_leaves_over_are_counted_and_logged(num: int, left: int) -> None:
    embeddings, model, optimizer = job()
    leave_over(embeddings, model, optimizer, batches(4) * (num // 4) + batches(num % 4))
    assert embeddings.step == 20 and embeddings.counters().lost == {"batches/unstepped": left}
    embeddings.stream(batches(1)).close()
    assert embeddings.counters().lost == {"batches/unstepped": left}


def test_batches_that_are_stepped_after_the_loop_are_not_lost() -> None:
    embeddings, model, optimizer = job()
    plain, data = Plain(embeddings, model), batches(5)
    leave_over(embeddings, model, optimizer, data)
    assert embeddings.counters().lost == {"batches/unstepped": 2}
    optimizer.step()
    assert embeddings.step == 2 and embeddings.counters().lost == {}
    plain.train(data, 3)
    plain.require_equal(embeddings, model)


def test_a_step_closed_in_the_middle_is_counted_as_closed() -> None:
    embeddings, model, optimizer = job()
    stream = embeddings.stream(batches(9), accumulate=3)
    for batch in islice(stream, 5):
        (loss_of(model, batch) / 3).backward()
        if batch.completes_step:
            optimizer.step()
            optimizer.zero_grad()
    assert embeddings.step == 1 and embeddings.counters().lost == {}
    stream.close()
    assert embeddings.counters().lost == {"batches/closed": 2}
    with pytest.raises(StreamError, match="step 2: its batch was dropped: this stream was closed"):
        loss_of(model, batch).backward()


def test_a_run_resumes_at_the_step_that_was_not_finished(tmp_path: Path) -> None:
    """Saved after 5 of 8 batches, N = 3: the fourth and the fifth are read again."""
    data, found = batches(8), []
    for until in (8, 5):
        embeddings, model, optimizer = job()
        source = IterableSource(data)
        run = Checkpoint(tmp_path / str(until), model, optimizer, embeddings, source)
        stream = embeddings.stream(source, accumulate=3)
        step_where_complete(optimizer, model, islice(stream, until), 3)
        run.save()
        stream.close()
        if until == 5:
            embeddings, model, optimizer = job()
            source = IterableSource(data)
            assert Checkpoint(tmp_path / "5", model, optimizer, embeddings, source).resume()
            assert embeddings.step == 1
            said = step_where_complete(optimizer, model, embeddings.stream(source, accumulate=3), 3)
            assert said == [False, False, True, False, True]
        found.append(bits(embeddings, model))
    assert found[0] == found[1]


@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaled_loss_of_the_last_batches(overflow: bool) -> None:
    """The last step has the scale of the others; if it overflows, it is skipped and counted."""
    embeddings, model, optimizer = job()
    plain, data = Plain(embeddings, model), batches(5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in embeddings.stream(data, accumulate=3):
        if overflow and batch.step == 2:
            batch.embeddings.register_hook(lambda gradient: gradient * np.inf)
        scaler.scale(loss_of(model, batch) / 3).backward()
        if batch.completes_step:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert embeddings.counters().lost == ({"batches/overflow": 2} if overflow else {})
    assert scaler.get_scale() == (512.0 if overflow else 1024.0)
    plain.train(data[:3] if overflow else data, 3)
    plain.require_equal(embeddings, model)


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_refused_step_leaves_no_scale_behind(unscaled: bool) -> None:
    """GradScaler sets the scale before it calls step(), and multiplies what it finds there in the next step."""
    found = []
    for refused in (False, True):
        embeddings, model, optimizer = job()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for batch in embeddings.stream(batches(4), accumulate=2):
            scaler.scale(loss_of(model, batch) / 2).backward()
            if not batch.completes_step:
                if refused:
                    with pytest.raises(StreamError, match="after 1 of 2 batches"):
                        scaler.step(optimizer)
                continue
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(bits(embeddings, model))
    assert found[0] == found[1]


@pytest.mark.parametrize("moment", ["update", "measure"])
def test_an_interrupted_step_with_a_scale_is_finished_by_another_call(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are updated, and their leaves are gone; the dense parameters are stepped with the same scale."""
    found = []
    for interrupted in (False, True):
        embeddings, model, optimizer = job()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for batch in embeddings.stream(batches(3)):
            scaler.scale(loss_of(model, batch)).backward()
            if interrupted and batch.step == 2:
                session = session_of(embeddings)
                owner: Any = session if moment == "update" else session.figures
                call = getattr(owner, moment)

                def interrupt(*arguments: Any, call: Callable[..., Any] = call) -> None:
                    call(*arguments)
                    raise KeyboardInterrupt

                with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                    patched.setattr(owner, moment, interrupt)
                    scaler.step(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(bits(embeddings, model))
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("own", "other"), [(7, 7), (4, 6), (4, 5), (5, 4), (8, 5), (3, 4)])
def test_trainers_agree_which_batch_completes_a_step(own: int, other: int, overlap: bool) -> None:
    """This test is the other trainer, whose batches end earlier or later."""
    embeddings, model, optimizer = job()
    asked = 0

    def exchange(numbers: Sequence[int], *, patient: bool) -> Callable[[], list[Sequence[int]]]:
        nonlocal asked
        if numbers[0] != Call.NEXT:
            return lambda: [numbers, numbers]
        asked += 1
        size = BATCH if asked <= other else 0
        call = [*numbers[:3], size, 2 if size else 0, 0 if size else -1, int(asked >= other)]
        return lambda: [numbers, call]

    data = JointBatches(iter(batches(own)), embeddings.features.names, exchange, 0, lambda _: None)
    session_of(embeddings)._training = stream = Stream(
        data,
        embeddings.worker,
        BatchLedger(0, accumulate=3),
        train=True,
        device=torch.device("cpu"),
        overlap=overlap,
        on_hold=optimizer.hold,
    )
    total = max(own, other)
    said = step_where_complete(optimizer, model, stream, 3)
    assert said == [number % 3 == 0 or number == total for number in range(1, total + 1)]
    assert embeddings.step == -(-total // 3) and embeddings.counters().lost == {}
    assert stream.staleness_seen == {0: own}, "padding looks up nothing"
    stream.close()
