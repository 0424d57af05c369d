"""A GPU: the dense network on it, with rows in memory; and rows on it.

Tests of rows are those of tests/device, which have them on the CPU, with the fixture `device` of this file: the same
bits as rows in memory, whatever the loop, the tier and the number of trainers. Skipped without a device; what several
trainers do by NCCL, without as many devices; what saves tables, without pyarrow. The benchmark of GPUs runs them on a
machine that has little more than torch, so nothing else may be imported here.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import satrap
from device import test_collective_training as of_trainers
from device import test_device_training as of_loops
from device import test_device_worker as of_workers
from device import test_direct_rows as of_direct
from device import test_pending_work as of_pending_work
from device import test_streams as of_streams
from device import test_tiers as of_tiers
from device.test_tiers import small_segments as small_segments
from loop import DIM, batches, job, loss_of, rows, train, train_step
from runs import JOB, start_run, wait_for_exit
from satrap import SGD, Embeddings, Inputs, Table
from satrap.device.device_stream import new_stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = "cuda"


@pytest.fixture
def device() -> str:
    """Where the tests of rows on a device have them here."""
    return DEVICE


test_rows_have_the_bits_of_the_core = of_workers.test_it_has_the_bits_of_the_core
test_rows_live_as_in_the_core = of_workers.test_rows_live_as_in_the_core
test_rows_equal_those_of_torch = of_workers.test_it_equals_torch
test_gradients_that_are_not_finite = of_workers.test_gradients_that_are_not_finite
test_a_store_reads_rows = of_workers.test_a_store_reads_rows_on_the_device
test_frames_are_used_again = of_workers.test_memory_grows_with_the_rows_and_frames_are_used_again
test_memory_that_runs_out = of_workers.test_a_device_without_memory_is_an_error_that_changes_nothing

test_a_loop_ends_with_the_same_bits = of_loops.test_a_loop_ends_with_the_same_bits
test_staleness = of_loops.test_staleness
test_sequences_and_features_that_share_tables = of_loops.test_sequences_and_features_that_share_tables
test_evaluation_and_reading = of_loops.test_evaluation_and_reading
tables = of_loops.tables
test_a_loss_that_is_not_finite = of_loops.test_a_loss_that_is_not_finite

test_two_tiers_equal_rows_in_memory = of_tiers.test_training_equals_rows_in_memory
test_tables_of_every_kind_share_a_device = of_tiers.test_tables_of_every_kind_share_a_device
test_batches_after_one_that_did_not_fit = of_tiers.test_batches_are_found_ahead_again_after_one_that_did_not_fit
test_reading_and_evaluation_move_nothing = of_tiers.test_reading_and_evaluation_move_nothing
test_a_batch_that_does_not_fit = of_tiers.test_a_batch_that_does_not_fit_is_refused_by_name
test_an_update_of_rows_that_went_home = of_tiers.test_an_update_of_rows_that_went_home_is_applied_there
test_batches_found_ahead_on_two_tiers = of_tiers.test_batches_found_ahead_have_the_bits_of_rows_in_memory

test_a_move_that_fails = of_pending_work.test_a_move_that_fails_between_two_pools_is_done_once
test_an_import_that_fails = of_pending_work.test_rows_of_an_import_that_fails_are_written_later
test_skipped_gradients_are_counted_once = of_pending_work.test_skipped_gradients_are_counted_once
test_memory_at_home_is_allocated_ahead = of_pending_work.test_memory_at_home_is_allocated_ahead_and_without_the_lock
test_no_memory_for_the_reserve = of_pending_work.test_no_memory_for_the_reserve_is_no_error_until_it_is_needed

test_direct_bits = of_direct.test_bits_and_counters
test_direct_ids_without_offsets = of_direct.test_one_id_in_each_bag_without_offsets
test_direct_steps = of_direct.test_random_steps
test_direct_gradients_that_are_not_finite = of_direct.test_gradients_that_are_not_finite
test_direct_updates_that_check_gradients = of_direct.test_nothing_but_the_update_reads_gradients_of_tables_that_skip
test_direct_ids_that_are_refused = of_direct.test_what_the_core_refuses_changes_nothing_and_has_its_message
test_direct_ids_of_32_bits = of_direct.test_ids_of_32_bits_and_empty_batches
test_direct_ids_in_memory_that_is_used_again = of_direct.test_the_memory_of_a_batch_may_be_used_again
test_direct_rows_at_steps_of_32_bits = of_direct.test_steps_of_32_bits

test_a_lone_trainer = of_trainers.test_a_lone_trainer_has_the_bits_of_rows_in_memory

if find_spec("pyarrow") is not None:
    test_snapshots_are_those_of_the_core = of_workers.test_snapshots_are_those_of_the_core
    test_a_run_resumes_wherever_its_rows_were = of_loops.test_a_run_resumes_wherever_its_rows_were
    test_checkpoints_of_a_loop_that_finds_rows_ahead = of_loops.test_checkpoints_of_a_loop_that_finds_rows_ahead
    test_direct_files_are_those_of_the_core = of_direct.test_files_are_those_of_the_core
    test_a_checkpoint_resumes_with_other_tiers = of_tiers.test_a_checkpoint_resumes_with_other_tiers

if torch.cuda.device_count() > 1:
    trainers = of_trainers.trainers  # with NCCL, beside gloo
    test_random_steps_of_trainers = of_trainers.test_random_steps_have_the_bits_of_rows_in_memory
    test_trainers_with_two_tiers = of_trainers.test_random_steps_on_two_tiers_have_the_bits_of_rows_in_memory
    test_trainers_equal_one_on_the_joined_batch = of_trainers.test_it_equals_one_trainer_on_the_joined_batch
    test_uneven_batches = of_trainers.test_uneven_batches_drops_and_accumulation_equal_rows_in_memory
    test_each_update_is_applied_once = of_trainers.test_with_staleness_each_update_is_applied_once
    test_a_run_of_trainers_resumes = (
        of_trainers.test_a_checkpoint_resumes_on_other_numbers_of_trainers_in_memory_and_on_servers
    )
    test_a_run_of_shared_tables_resumes = (
        of_trainers.test_a_checkpoint_of_tables_that_all_trainers_have_resumes_elsewhere
    )
    test_collectives_have_one_order = of_trainers.test_all_trainers_give_collectives_to_their_devices_in_one_order


@pytest.mark.parametrize("how", of_streams.LOOPS)
def test_a_loop_on_a_stream_of_its_own(how: str, rng: np.random.Generator) -> None:
    """The bits do not depend on the stream on which the user's loop runs."""
    data, there = of_streams.batches(rng, 40), torch.device(DEVICE, torch.cuda.current_device())
    found = [
        of_streams.train_on_stream(data, loop=loop, device=there, **of_streams.LOOPS[how])[0]
        for loop in (None, new_stream(there), new_stream(there))
    ]
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_waits_for_nothing_but_the_largest_gradient(overlap: bool, rng: np.random.Generator) -> None:
    """Neither new ids nor the update make this process wait for the device, but by the event behind that number."""
    embeddings = Embeddings({"t": Table("t", dim=DIM, optimizer=SGD(lr=0.1))}, device=DEVICE, num_threads=1)
    layer = torch.nn.Linear(DIM, 1).to(DEVICE)
    optimizer = embeddings.optimizer(torch.optim.SGD(layer.parameters(), lr=0.05))
    data = [Inputs(names=("t",), values=rng.integers(0, 10**6, 64, dtype=np.uint64), batch_size=64) for _ in range(12)]
    try:
        with embeddings.stream(data, overlap=overlap) as stream:
            for number, batch in enumerate(stream):
                layer(batch.embeddings).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 3:  # the kernels are compiled
                    stream.drain()
                    torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(embeddings.tables["t"]) > 700


def trained(device: str, staleness: int, overlap: bool | None = None) -> tuple[list[float], dict[str, Any]]:
    embeddings, model, _ = job(staleness, deterministic=True)
    model.to(device)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    losses = []
    with embeddings.stream(batches(30), device=device, overlap=overlap) as stream:
        for batch in stream:
            assert {each.device.type for each in (batch.dense, batch.label, batch.embeddings)} == {device}
            losses.append(train_step(model, optimizer, batch))
    return losses, rows(embeddings)


@pytest.mark.parametrize("overlap", [None, False])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_device_changes_only_rounding(staleness: int, overlap: bool | None) -> None:
    here, there = trained("cpu", staleness), trained(DEVICE, staleness, overlap)
    np.testing.assert_allclose(there[0], here[0], rtol=1e-4)
    for name, values in here[1].items():
        np.testing.assert_allclose(there[1][name], values, rtol=1e-3, atol=1e-5)


def test_runs_on_a_device_are_reproducible() -> None:
    first, second = trained(DEVICE, 2), trained(DEVICE, 2)
    for name, values in first[1].items():
        np.testing.assert_array_equal(second[1][name], values)


def test_sequences_and_accumulation() -> None:
    """Checks the gradients of padded rows, summed over two batches."""
    item = Table("item", dim=DIM, optimizer=SGD(lr=0.1))
    found = []
    for device in ("cpu", DEVICE):
        embeddings = Embeddings({"history": item.sequence(3)}, num_threads=1)
        optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
        inputs = Inputs(
            names=("history",), values=np.arange(8, dtype=np.uint64), offsets=np.array([0, 2, 2, 8]), batch_size=3
        )
        for i, batch in enumerate(embeddings.stream([inputs] * 4, device=device, accumulate=2)):
            part = batch["history"]
            (part.values * part.mask.unsqueeze(2)).square().sum().backward()
            if i % 2:
                optimizer.step()
        embeddings.drain()
        found.append(embeddings.tables["item"].read(np.arange(8, dtype=np.uint64)).values)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_an_overflow_in_half_precision_drops_the_batch() -> None:
    embeddings, model, _ = job()
    model.to(DEVICE)
    optimizer = embeddings.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**100)
    batch = next(embeddings.stream(batches(2), device=DEVICE))
    with torch.autocast(DEVICE, torch.float16):
        loss = loss_of(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert embeddings.counters().lost == {"batches/overflow": 1}


def test_evaluation_on_a_device() -> None:
    embeddings, model, optimizer = job()
    train(embeddings, model, optimizer, batches(10))
    embeddings.eval()
    here = satrap.evaluate(model, embeddings.stream(batches(5)))
    there = satrap.evaluate(model.to(DEVICE), embeddings.stream(batches(5), device=DEVICE))
    assert there.log_loss() == pytest.approx(here.log_loss(), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dlrm_uses_torchs_form_on_a_device(dtype: torch.dtype) -> None:
    features = Embeddings({"a": Table("a", dim=DIM), "b": Table("b", dim=DIM)})
    model = satrap.models.DLRM(2, features, bottom=(8,), top=(8, 1))
    dense, block = torch.randn(6, 2), torch.randn(6, 2 * DIM)
    expected = model(dense, block)
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        found = model.to(DEVICE)(dense.to(DEVICE), block.to(DEVICE))
    torch.testing.assert_close(found.cpu(), expected, rtol=0.05, atol=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device for each of two trainers")
def test_two_trainers_of_a_run_with_a_device_each(tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", DEVICE):
        folder = tmp_path / device
        folder.mkdir()
        with start_run(folder, JOB, "--trainers", "2", arguments=(str(folder), "40", "0", "", device)) as run:
            status, _, err = wait_for_exit(run)
        assert status == 0, err
        with np.load(folder / "end.npz") as made:
            found[device] = dict(made)
    for name, values in found["cpu"].items():
        np.testing.assert_allclose(found[DEVICE][name], values, rtol=1e-3, atol=1e-5)
