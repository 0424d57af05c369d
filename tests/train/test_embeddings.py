"""Training by a user's own loop, compared with the same model in plain PyTorch, and with torch's own tools."""

import copy
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

import satrap
from child_processes import child_process
from contents import bits
from loop import BATCH, batches, job, loss_of, rows, tables, train, train_step
from satrap import ConfigError, Embeddings, InputError, Inputs, IterableSource, Position, StreamError, Table
from satrap.train.embeddings import session_of
from waiting import DEADLINE_SECONDS


@pytest.mark.parametrize(
    ("compress", "message"),
    [("bfloat16", "on the CPU use 'float16'"), ("int8", "expected one of 'float16', 'bfloat16'")],
)
def test_unsupported_gradient_compression_is_refused(compress: Any, message: str) -> None:
    embeddings, model, _ = job()
    with pytest.raises(ConfigError, match=message):
        embeddings.parallel(model, compress=compress)


def test_a_trainer_of_torchrun_that_trains_alone_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.warns(UserWarning, match="torchrun started this process, but it trains alone") as caught:
        Embeddings({"item": Table("item", dim=2)})
    assert caught[0].filename == __file__


def test_a_class_in_place_of_a_dense_optimizer_is_named() -> None:
    embeddings, model, _ = job()
    with pytest.raises(
        ConfigError, match=r"dense is the class Adam; expected an object: Adam\(model\.parameters\(\), "
    ):
        embeddings.optimizer(torch.optim.Adam)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dense is a generator; expected a torch\.optim\.Optimizer"):
        embeddings.optimizer(model.parameters())  # type: ignore[arg-type]


def test_a_device_that_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    embeddings, _, _ = job()
    for device, message in (("cuda", "there is no GPU"), ("cuda:3", "there is no GPU"), ("gpu", "torch does not know")):
        with pytest.raises(ConfigError, match=f"device is '{device}'.* {message}"):
            embeddings.stream(batches(1), device=device)


def test_a_stream_of_a_stream_is_refused_and_changes_nothing() -> None:
    embeddings, model, optimizer = job()
    with embeddings.stream(batches(2)) as stream:
        for is_training in (True, False):
            with pytest.raises(InputError, match="data is a Stream; expected the source that it reads"):
                embeddings.stream(stream, train=is_training)
        for batch in stream:
            train_step(model, optimizer, batch)
    assert embeddings.step == 2


@pytest.mark.parametrize("path", ["a.csv", Path("a.csv")])
def test_a_stream_of_a_path_names_the_sources(path: str | Path) -> None:
    embeddings, _, _ = job()
    for is_training in (True, False):
        with pytest.raises(
            ConfigError, match=r"found .*a\.csv.*; expected batches\. To read files, use satrap\.Parquet"
        ):
            embeddings.stream(path, train=is_training)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_deterministic_runs_repeat_exactly_inline_and_overlapped(staleness: int) -> None:
    found = []
    for overlap in (False, True, False, True):
        embeddings, model, optimizer = job(staleness, deterministic=True)
        found.append((train(embeddings, model, optimizer, batches(15), overlap=overlap), bits(embeddings, model)))
    assert all(each == found[0] for each in found)


def test_a_scheduler_changes_the_lr_of_tables() -> None:
    embeddings, model, optimizer = job()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0 if epoch >= 2 else 1.0)
    states = []
    with embeddings.stream(batches(4)) as stream:
        for batch in stream:
            train_step(model, optimizer, batch)
            scheduler.step()
            states.append(rows(embeddings)["user"].copy())
    assert not np.array_equal(states[0], states[1])
    present = states[1].any(axis=1)
    np.testing.assert_array_equal(states[3][present], states[1][present])


def test_clipping_includes_the_gradients_of_embeddings() -> None:
    embeddings, model, optimizer = job()
    with embeddings.stream(batches(1)) as stream:
        batch = next(stream)
        (100 * loss_of(model, batch)).backward()
        every = [p for group in optimizer.param_groups for p in group["params"]]
        assert any(p is batch.embeddings for p in every)
        torch.nn.utils.clip_grad_norm_(every, 1e-3)
        assert batch.embeddings.grad is not None and batch.embeddings.grad.norm() < 1.1e-3
        optimizer.step()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_overflowed_step_touches_neither_half(ahead: bool) -> None:
    embeddings, model, optimizer = job()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with embeddings.stream(batches(4)) as stream:
        for i, batch in enumerate(list(stream) if ahead else stream):
            optimizer.zero_grad()
            loss = loss_of(model, batch) * (float("inf") if i == 1 else 1.0)
            scaler.scale(loss).backward()
            before = bits(embeddings, model)
            scaler.step(optimizer)
            scaler.update()
            assert (bits(embeddings, model) == before) == (i == 1)
        assert stream.dropped == {"overflow": 1} and embeddings.step == 4
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("has_dense", [True, False], ids=["model", "embeddings alone"])
def test_a_scaled_loss_gives_the_same_rows(has_dense: bool) -> None:
    """Without the model no dense parameter has a gradient."""
    results = []
    for scaled in (False, True):
        embeddings, model, optimizer = job()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        with embeddings.stream(batches(4)) as stream:
            for batch in stream:
                optimizer.zero_grad()
                loss = loss_of(model, batch) if has_dense else batch.embeddings.square().sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        assert embeddings.step == 4
        results.append(rows(embeddings))
    np.testing.assert_array_equal(results[0]["item"], results[1]["item"])


def test_autocast_to_bfloat16() -> None:
    embeddings, model, optimizer = job()
    with embeddings.stream(batches(3)) as stream:
        for batch in stream:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, batch)
            loss.backward()
            assert batch.embeddings.grad is not None and batch.embeddings.grad.dtype == torch.float32
            optimizer.step()
    assert embeddings.step == 3


def test_a_compiled_dense_part() -> None:
    embeddings, model, optimizer = job()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain_embeddings, plain_model, plain_optimizer = job()
    losses = train(embeddings, compiled, optimizer, batches(3))  # type: ignore[arg-type]
    assert losses == train(plain_embeddings, plain_model, plain_optimizer, batches(3))


def test_a_list_and_a_generator_train_equally() -> None:
    found = []
    for data in (batches(5), iter(batches(5)), (each for each in batches(5)), IterableSource(batches(5))):
        embeddings, model, optimizer = job()
        found.append([(train_step(model, optimizer, batch), batch.position) for batch in embeddings.stream(data)])
    assert all(each == found[0] for each in found)
    assert [position for _, position in found[0]] == [Position(0, 0, i, i * BATCH, end=1) for i in range(1, 6)]


@pytest.mark.parametrize("data", [list, iter, IterableSource], ids=["list", "iterator", "IterableSource"])
def test_a_label_keeps_its_two_dimensions(data: Callable[[list[Inputs]], Any]) -> None:
    column = [replace(each, label=np.ones((each.batch_size, 1), np.float32)) for each in batches(3)]
    embeddings, _, _ = job()
    embeddings.eval()
    stream = embeddings.stream(data(column))
    assert [tuple(batch.label.shape) for batch in stream] == [(BATCH, 1)] * 3


@pytest.mark.parametrize("declared", [False, True], ids=["list-first", "IterableSource-first"])
def test_a_position_of_a_list_holds_in_an_iterable_over_it(declared: bool) -> None:
    items = batches(7)
    first, second = (IterableSource(items), items) if declared else (items, IterableSource(items))
    embeddings, model, optimizer = job()
    session_of(embeddings).track_position(first)
    with embeddings.stream(first) as stream:
        for batch in islice(stream, 4):
            train_step(model, optimizer, batch)
    position = session_of(embeddings).position_of(first)
    again, model, _ = job()
    session_of(again).resume_at(4, second, position)
    rest = [batch.inputs for batch in again.stream(second)]
    assert [inputs.values.tolist() for inputs in rest] == [inputs.values.tolist() for inputs in items[4:]]
    assert [inputs.position for inputs in rest] == [Position(0, 0, i, i * BATCH, end=1) for i in (5, 6, 7)]


def test_streams_need_an_optimizer_or_evaluation() -> None:
    embeddings = Embeddings(tables())
    with pytest.raises(StreamError, match="no optimizer"):
        embeddings.stream(batches(1))


@pytest.mark.parametrize("closure", [False, True])
def test_the_optimizer_is_a_torch_optimizer(closure: bool) -> None:
    embeddings, model, optimizer = job()
    assert isinstance(optimizer, torch.optim.Optimizer)
    with embeddings.stream(batches(1)) as stream:
        batch = next(stream)

        def again() -> Tensor:
            optimizer.dense.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        call: Callable[[], Any] = (
            (lambda: optimizer.step(again)) if closure else (lambda: (again(), optimizer.step())[0])
        )
        assert call() is not None
    state = optimizer.state_dict()
    optimizer.param_groups[-1]["lr"] = 7.0
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[-1]["lr"] == pytest.approx(0.1)


def test_control_c_stops_a_run_at_once() -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "support/endless_job.py")]
    with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "training\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=DEADLINE_SECONDS)
        assert child.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors  # and no message about threads or leaks after it


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_has_rows_is_neither_copied_nor_pickled(copied: Callable[[Any], Any]) -> None:
    """A copy of the optimizer would have no tables, and a model's would fail somewhere in the core."""
    embeddings, model, optimizer = job()
    model.add_module("embeddings", embeddings)
    with pytest.raises(TypeError, match=r"embeddings can be neither copied nor pickled, .*satrap\.Checkpoint"):
        copied(embeddings)
    with pytest.raises(TypeError, match="an optimizer of embeddings can be neither copied nor pickled"):
        copied(optimizer)
    if copied is not copy.copy:  # which shares the submodules
        with pytest.raises(TypeError, match="no model that has them as a submodule"):
            copied(model)


def test_a_mapping_of_ids_is_a_batch() -> None:
    embeddings, model, optimizer = job()
    train(embeddings, model, optimizer, batches(3))
    inputs = batches(1)[0]
    assert inputs.offsets is not None
    cuts = inputs.offsets.reshape(-1)[[0, BATCH, 2 * BATCH, 3 * BATCH]]
    parts = [inputs.values[a:b] for a, b in pairwise(cuts)]
    history = parts[2], torch.from_numpy(inputs.offsets[2 * BATCH :] - cuts[2])
    batch = embeddings({"history": history, "item": torch.from_numpy(parts[1].view(np.int64)), "user": parts[0]})
    assert torch.equal(batch.embeddings, embeddings(inputs).embeddings)
    assert len(batch) == BATCH and batch.dense.shape == (BATCH, 0) and embeddings.step == 3


IDS = np.arange(2, dtype=np.uint64)
HASH = r": make ids of strings with satrap\.data\.hashing\.hash_strings\(ids\)$"
BAGS = r"expected an array with one id per sample, or for bags \(ids, offsets\): all ids in one array"


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("form", [np.asarray, torch.as_tensor])
def test_weights_of_ids_by_feature(form: Any, device: str | None) -> None:
    item = satrap.Table("item", 4)
    embeddings = Embeddings({"bag": item.bag("sum", weighted=True), "item": item}, device=device)
    bag = np.array([1, 2, 3]), np.array([0, 2, 3]), np.array([0.5, 0.25, 2], np.float32)
    found = embeddings({"bag": tuple(map(form, bag)), "item": form(np.array([5, 5]))})
    one, two, three = embeddings.tables["item"].lookup(np.array([1, 2, 3], np.uint64), train=False)
    np.testing.assert_allclose(found["bag"].numpy(), [0.5 * one + 0.25 * two, 2 * three], rtol=1e-6)
    for wrong, message in [
        (bag[:2], r"'bag' is weighted and there are no weights; expected \(ids, offsets, weights\)"),
        ((*bag[:2], bag[2][:2]), "feature 'bag': found 2 weights for 3 ids; expected one for each"),
        ((*bag[:2], [1.0, 1.0, 1.0]), "feature 'bag': weights is a list; expected a float32 array"),
    ]:
        with pytest.raises(InputError, match=message):
            embeddings({"bag": wrong, "item": np.array([5, 5])})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([IDS], "a batch is a list; expected Inputs, or a mapping from features to ids"),
        ({"usr": IDS}, "a batch has ids of 'usr', which is no feature; the nearest known one is 'user'"),
        ({"user": IDS}, r"a batch has no ids of \['item', 'history'\]; expected ids of each feature: \['user', 'item'"),
        ({"user": IDS[:1]}, "a batch has 1 samples of 'user' and 2 of 'item'"),
        ({"user": IDS.astype(np.float32)}, "feature 'user': ids are float32; expected uint64"),
        ({"user": np.array(["US", "DE"])}, f"feature 'user': ids are <U2; expected uint64 .*{HASH}"),
        ({"user": np.array(["US", "DE"], object)}, f"feature 'user': ids are object; expected uint64 .*{HASH}"),
        ({"user": ["US", "DE"]}, rf"feature 'user': ids\[0\] is 'US' \(str\); expected an integer .*{HASH}"),
        ({"user": "US"}, f"feature 'user': ids is a str; expected a uint64 or int64 array{HASH}"),
        ({"user": np.array([1, 2], np.int32)}, r"ids are int32; .*: convert them, e\.g\. ids\.astype\(numpy\.uint64\)"),
        ({"history": [[1, 2], [3]]}, rf"'history': found several ids for one sample in a list; {BAGS}"),
        ({"history": [IDS, IDS]}, rf"'history': found several ids for one sample in a list; {BAGS}"),
        ({"history": np.array([[1, 2], [3, 4]], np.uint64)}, rf"several ids for one sample in a ndarray; {BAGS}"),
        ({"history": torch.zeros(2, 3, dtype=torch.int64)}, rf"several ids for one sample in a Tensor; {BAGS}"),
        ({"history": pa.array([[1, 2], [3]])}, rf"several ids for one sample in a ListArray; {BAGS}"),
        (
            {"user": (IDS,)},
            r"a batch has 1 values for 'user'; expected ids, \(ids, offsets\) or \(ids, offsets, weights",
        ),
        ({"user": (IDS, None, IDS)}, "a batch has weights of feature 'user', which is not weighted: leave them out"),
        ({"user": (IDS, np.array([0, 1]))}, r"feature 'user': offsets must rise from 0 to the number of ids, 2; found"),
        ({"user": (IDS, np.array([0, 3, 2]))}, r"feature 'user': offsets must rise from 0 to the number of ids, 2"),
        ({"user": (IDS, np.zeros(0, np.int64))}, r"feature 'user': offsets are int64 of shape \(0,\); expected int64"),
        ({"user": (IDS, 7)}, "feature 'user': offsets is an int; expected an int64 array"),
    ],
)
def test_invalid_mappings_are_refused(ids: Any, message: str) -> None:
    if isinstance(ids, dict) and message.find("has no ids") < 0 and "usr" not in ids:
        ids = {"user": IDS, "item": IDS, "history": IDS, **ids}
    with pytest.raises(InputError, match=message):
        job()[0](ids)


def test_evaluating_without_rows_is_warned_of_unless_training_follows() -> None:
    """Lightning evaluates once before the first step."""
    embeddings, model, optimizer = job()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embeddings.stream(batches(1), train=False).close()
        train(embeddings, model, optimizer, batches(1))
        embeddings.close()
        embeddings, model, optimizer = job()
        stream = embeddings.stream(batches(1))
        embeddings.stream(batches(1), train=False).close()
        for batch in stream:
            train_step(model, optimizer, batch)
        embeddings.close()
    embeddings, _, _ = job()
    embeddings.stream(batches(1), train=False).close()
    with pytest.warns(UserWarning, match="no table has a row yet: resume a checkpoint, or train first"):
        embeddings.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_traceback_of_wrong_data_has_no_readers(overlap: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("user,price,label\n1,2,0\n1,x,1\n")
    embeddings = Embeddings({"user": satrap.Table("user", dim=2)})
    embeddings.tables["user"].write([1], np.zeros((1, 2), np.float32))
    for dense, message in (("prise", "has no column 'prise'"), ("price", "line 3: column 'price' holds 'x'")):
        with pytest.raises(satrap.SourceError, match=message) as caught:
            list(embeddings.stream(satrap.CSV(path, dense=dense, label="label"), train=False, overlap=overlap))
        files = [str(entry.path) for entry in caught.traceback]
        assert len(files) <= 5 and not any("/data/" in file or "concurrent" in file for file in files), files
