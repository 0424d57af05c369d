"""Rows on the devices of several trainers: the same bits as with the rows in their memory, or on servers. The devices
are the CPU; train/test_gpu.py imports some of these tests for GPUs, where the dense network is, too."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from trainers import Trainers, end_alike, require_same_as_alone

CHILD = Path(__file__).parents[1] / "support/collective_child.py"


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(4, CHILD) as found:
        yield found


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    ("world_size", "shard"),
    [(n, shard) for shard in ("rows", "table", "replicated", "columns") for n in (2, 3, 4)],
)
def test_random_steps_have_the_bits_of_rows_in_memory(
    trainers: Trainers, world_size: int, shard: str, device: str, tmp_path: Path, seed: int
) -> None:
    """Micro-batches, padding, drops, gradients that are missing or not finite, other rates."""
    found = trainers.run([], world_size, tmp_path, compare=seed, steps=12, shard=shard, device=device)
    assert all(each == found[0] and min(each["rows"].values()) > 0 for each in found)


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    ("world_size", "shard", "more"),
    [
        *((world_size, "rows", {"jagged": False}) for world_size in (2, 3, 4)),
        (2, "rows", {"jagged": False, "device_memory": {"item": 300, "last": "none"}}),
        (3, "table", {"jagged": False}),
        (2, "columns", {}),
        (2, "rows", {}),
        (2, "rows", {"jagged": False, "output_dtype": "float16"}),
    ],
)
def test_random_steps_of_numbered_rows_have_the_bits_of_rows_in_memory(
    trainers: Trainers, world_size: int, shard: str, more: Any, device: str, tmp_path: Path, seed: int
) -> None:
    """A table has one bucket, fewer than ids, or more. By columns, or with a jagged sequence, there is a directory."""
    how: dict[str, Any] = {"steps": 12, "shard": shard, "num_rows": 47, "device": device} | more
    outcomes = trainers.run([], world_size, tmp_path, compare=seed, **how)
    assert all(each == outcomes[0] and min(each["rows"].values()) > 0 for each in outcomes)
    assert all(outcomes[0]["at_home"][name] > 0 for name in how.get("device_memory", {}))


@pytest.mark.draw(1)
@pytest.mark.parametrize("shard", ["rows", "table", "replicated", "columns"])
def test_rows_and_gradients_in_16_bits_have_the_bits_of_rounded_ones(
    trainers: Trainers, shard: str, device: str, tmp_path: Path, seed: int
) -> None:
    """Rounded by torch, with the rows in memory."""
    how: dict[str, Any] = {"steps": 12, "shard": shard, "device": device, "output_dtype": "bfloat16"}
    outcomes = trainers.run([], 2, tmp_path, compare=seed, **how)
    assert all(each == outcomes[0] and min(each["rows"].values()) > 0 for each in outcomes)


def test_a_lone_trainer_has_the_bits_of_rows_in_memory(device: str, tmp_path: Path, seed: int) -> None:
    """With the exchanges of several: on a GPU it sends rows to itself by NCCL."""
    with Trainers(1, CHILD) as alone:
        (found,) = alone.run([], 1, tmp_path, compare=seed, steps=12, shard="rows", device=device)
    assert min(found["rows"].values()) > 0


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    ("world_size", "shard", "of_item", "of_user"),
    [(3, "rows", 1600, 400), (2, "columns", 1500, 600), (2, "replicated", 4000, 1000)],
)
def test_random_steps_on_two_tiers_have_the_bits_of_rows_in_memory(
    trainers: Trainers, world_size: int, shard: str, of_item: int, of_user: int, device: str, tmp_path: Path, seed: int
) -> None:
    how: dict[str, Any] = {"shard": shard, "ids": 400, "batch_size": 2, "steps": 12, "device": device}
    memory = {"item": of_item, "user": of_user, "last": "none"}
    found = trainers.run([], world_size, tmp_path, compare=seed, **how, device_memory=memory)
    assert all(each == found[0] and each["moved_out"]["item"] > 0 for each in found)


def test_an_update_of_whole_batches_does_nothing_for_an_id(trainers: Trainers, tmp_path: Path) -> None:
    """Gradients are ordered when ids are resolved and looked up. If a trainer drops its batch, the ids of the others
    are sent again, and the next lookup is not ordered ahead."""
    for_all = ["drop", "lr", "take_inserted", "version"]
    found = trainers.run([], 2, tmp_path, visits=5, drops=2)
    for each in found:
        for step in (1, 4, 5):
            assert each["calls"][step - 1] == sorted([*for_all, "update_ordered_frames"]), step
        assert each["calls"][2] == sorted([*for_all, "copy runs", "update_id_frames"])
    assert found[0]["calls"][1] == sorted([*for_all, "copy runs", "join ids", "send ids", "update_id_frames"])


SHARDS = [("rows", "rows"), ("replicated", "columns"), ("columns", "replicated")]
ALL_SHARDS = [*SHARDS, ("table", "table"), ("table", "columns")]


@pytest.mark.draw(1)
@pytest.mark.parametrize(
    ("way", "staleness", "overlap", "ahead"),
    [
        ("leaves out", 0, False, False),
        ("leaves out", 0, True, True),
        ("leaves out", 2, True, False),
        ("no backward pass", 0, False, False),
        ("no backward pass", 1, True, False),
        ("saves", 0, False, False),
        ("evaluates", 0, True, True),
    ],
)
def test_what_all_trainers_do_is_no_error(
    trainers: Trainers, tmp_path: Path, way: str, staleness: int, overlap: bool, ahead: bool
) -> None:
    how: dict[str, Any] = {"staleness": staleness, "overlap": overlap, "ahead": ahead, "device": "cpu"}
    found = trainers.run([], 2, tmp_path, **how, checkpoint=str(tmp_path / "run"), differs=way, all=True)
    assert all(end["error"] == "" and end_alike(end, found[0]) for end in found), found[0]["error"]


@pytest.mark.draw(2)
@pytest.mark.parametrize("shards", ALL_SHARDS)
@pytest.mark.parametrize(("world_size", "overlap"), [(2, False), (3, True), (4, True)])
def test_it_equals_one_trainer_on_the_joined_batch(
    trainers: Trainers, world_size: int, overlap: bool, shards: tuple[str, str], device: str, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"batches": 6 * world_size, "overlap": overlap, "shards": shards, "dense": device}
    found = trainers.run([], world_size, tmp_path, **how, device=device)
    require_same_as_alone(found, 6 * world_size)


@pytest.mark.parametrize(
    ("overlap", "num_users", "accumulate", "output_dtype"),
    [
        (False, None, 2, "float32"),
        (True, 41, 2, "float32"),
        (True, 41, 1, "float32"),
        (True, None, 2, "bfloat16"),
        (True, 41, 2, "bfloat16"),
    ],
)
def test_uneven_batches_drops_and_accumulation_equal_rows_in_memory(
    trainers: Trainers,
    overlap: bool,
    num_users: int | None,
    accumulate: int,
    output_dtype: str,
    device: str,
    tmp_path: Path,
) -> None:
    how: dict[str, Any] = {"batches": 9, "dropped": [[None, 2]], "accumulate": accumulate, "overlap": overlap}
    how |= {"dense": device, "num_users": num_users, "output_dtype": output_dtype}
    in_memory = trainers.run([], 2, tmp_path, **how)
    found = trainers.run([], 2, tmp_path, **how, device=device)
    assert end_alike(found[0], in_memory[0]) and end_alike(found[1], in_memory[1])


@pytest.mark.draw(1)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("staleness", [0, 1])
def test_an_overflow_of_one_trainer(
    trainers: Trainers, tmp_path: Path, shards: tuple[str, str], staleness: int
) -> None:
    """torch's scaler for several trainers spreads the overflow, and all of them leave out the step."""
    how: dict[str, Any] = {"batches": 8, "scaler": "sharded", "overflow": [1, 2], "deterministic": True}
    found = trainers.run([], 2, tmp_path, **how, device="cpu", staleness=staleness, shards=shards)
    assert [(each["scale"], each["lost"]) for each in found] == [(512.0, {"batches/overflow": 1})] * 2
    assert end_alike(found[0], found[1])
    if staleness == 0:
        assert end_alike(trainers.run([], 2, tmp_path, **how)[0], found[0])


@pytest.mark.draw(1)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_with_staleness_each_update_is_applied_once(
    trainers: Trainers, tmp_path: Path, overlap: bool, shards: tuple[str, str], device: str
) -> None:
    how: dict[str, Any] = {"batches": 16, "staleness": 2, "counted": True, "shards": shards}
    found = trainers.run([], 4, tmp_path, **how, overlap=overlap, dense=device, device=device)
    assert [each["lost"] for each in found] == [{}] * 4
    expected = trainers.run([], 1, tmp_path, **how)
    assert all(each["rows"] == expected[0]["rows"] for each in found)


@pytest.mark.parametrize("num_users", [None, 41])
def test_a_deterministic_run_with_staleness_repeats_and_equals_no_other_staleness(
    trainers: Trainers, tmp_path: Path, num_users: int | None
) -> None:
    how: dict[str, Any] = {"batches": 18, "device": "cpu", "deterministic": True, "num_users": num_users}
    found = [
        trainers.run([], 3, tmp_path, **how, staleness=staleness, overlap=overlap)[0]
        for staleness, overlap in ((2, True), (2, False), (1, True))
    ]
    assert end_alike(found[0], found[1]) and not end_alike(found[0], found[2])


@pytest.mark.draw(1)
@pytest.mark.parametrize("shards", SHARDS[1:])
@pytest.mark.parametrize(("world_size", "staleness", "memory"), [(2, 2, None), (3, 1, None), (3, 2, {"user": "none"})])
def test_a_deterministic_run_with_staleness_is_the_same_for_every_shard(
    trainers: Trainers, tmp_path: Path, shards: tuple[str, str], world_size: int, staleness: int, memory: Any
) -> None:
    how: dict[str, Any] = {"batches": 6 * world_size, "device": "cpu", "deterministic": True, "staleness": staleness}
    by_rows = trainers.run([], world_size, tmp_path, **how, overlap=True)
    for overlap in (True, False):
        found = trainers.run([], world_size, tmp_path, **how, shards=shards, overlap=overlap, device_memory=memory)
        assert all(end_alike(end, by_rows[0]) and end["updated"] == by_rows[0]["updated"] for end in found)


@pytest.mark.draw(1)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_trainers_evaluate_different_numbers_of_batches(
    trainers: Trainers, tmp_path: Path, shards: tuple[str, str], overlap: bool
) -> None:
    """Neither waits another one, nor changes an evaluation the training."""
    how: dict[str, Any] = {"device": "cpu", "shards": shards, "overlap": overlap}
    found = trainers.run([], 3, tmp_path, **how, unequal=True)
    plain = trainers.run([], 3, tmp_path, **how, unequal=False)
    assert all(end_alike(each, plain[0]) for each in found)
    lengths = [[len(of_step) for of_step in each["shown"]] for each in found]
    assert lengths == [[(2 * rank + step) % 5 for step in range(1, 5)] for rank in range(3)]
    if not overlap:  # a lookup ahead inserts rows, which evaluations then show
        for of_step in zip(*(each["shown"] for each in found), strict=True):
            assert all(one == other for a, b in pairwise(of_step) for one, other in zip(a, b, strict=False))


def test_a_run_that_leaves_its_stream_early_starts_another_one(trainers: Trainers, tmp_path: Path) -> None:
    """The trainers have looked up different numbers of batches ahead when they leave."""
    how: dict[str, Any] = {"batches": 18, "staleness": 2, "epochs": 3, "until": 4, "overlap": True, "counted": True}
    found = trainers.run([], 3, tmp_path, **how, device="cpu")
    assert all(each["rows"] == found[0]["rows"] for each in found)


@pytest.mark.parametrize("earlier", ["collected", "kept"])
def test_an_earlier_stream_does_nothing_to_the_next(trainers: Trainers, tmp_path: Path, earlier: str) -> None:
    in_memory = trainers.run([], 2, tmp_path, slowly=earlier)
    found = trainers.run([], 2, tmp_path, slowly=earlier, device="cpu")
    assert all(end_alike(*each) for each in zip(found, in_memory, strict=True))


@pytest.mark.parametrize("num_users", [None, 41])
def test_a_checkpoint_resumes_on_other_numbers_of_trainers_in_memory_and_on_servers(
    trainers: Trainers, device: str, tmp_path: Path, num_users: int | None
) -> None:
    """Also if all tables have `num_rows`, and the trainers keep no directory."""
    how: dict[str, Any] = {"batches": 12, "dense": device, "num_users": num_users}
    whole = trainers.run([], 2, tmp_path, **how, device=device)
    first = trainers.run([], 2, tmp_path, **how, device=device, checkpoint=str(tmp_path / "run"), until=5)
    assert not any(each["resumed"] for each in first)
    found = {}
    for world_size, where in ((2, "devices"), (3, "devices"), (3, "memory"), (3, "servers"), (1, "devices")):
        copy = tmp_path / f"{where}{world_size}"
        shutil.copytree(tmp_path / "run", copy)
        how["checkpoint"] = str(copy)
        if where == "servers":
            each = trainers.run_on_servers(2, world_size, tmp_path, **how)
        else:
            each = trainers.run([], world_size, tmp_path, **how, device=device if where == "devices" else None)
        assert all(one["resumed"] for one in each)
        found[where, world_size] = each[0]
    assert end_alike(found["devices", 2], whole[0])
    assert end_alike(found["devices", 3], found["memory", 3]) and end_alike(found["devices", 3], found["servers", 3])


@pytest.mark.draw(1)
@pytest.mark.parametrize("device_memory", [None, {"user": "none", "item": 400}])
def test_a_checkpoint_of_tables_that_all_trainers_have_resumes_elsewhere(
    trainers: Trainers, device_memory: Any, device: str, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"batches": 12, "shards": ["replicated", "columns"], "dense": device}
    there = {"device": device, "device_memory": device_memory}
    whole = trainers.run([], 2, tmp_path, **how, **there)
    trainers.run([], 2, tmp_path, **how, **there, checkpoint=str(tmp_path / "run"), until=5)
    found: dict[tuple[int, bool], dict[str, Any]] = {}
    for world_size, where in ((2, there), (3, there), (3, {})):
        copy = tmp_path / f"{len(found)}"
        shutil.copytree(tmp_path / "run", copy)
        each = trainers.run([], world_size, tmp_path, **how, **where, checkpoint=str(copy))
        assert all(one["resumed"] and end_alike(one, each[0]) for one in each)
        found[world_size, bool(where)] = each[0]
    assert end_alike(found[2, True], whole[0]) and end_alike(found[3, True], found[3, False])


@pytest.mark.parametrize("num_users", [None, 41])
def test_saves_and_evaluations_in_the_loop(trainers: Trainers, tmp_path: Path, num_users: int | None) -> None:
    """With threads and staleness: a pause comes while other trainers look up ahead."""
    how: dict[str, Any] = {"batches": 24, "patience": 5, "device": "cpu", "num_users": num_users}
    outcomes = trainers.run([], 3, tmp_path, **how, staleness=2, overlap=True, checkpoint=str(tmp_path / "run"))
    assert all(end_alike(each, outcomes[0]) for each in outcomes)
    again = trainers.run([], 2, tmp_path, **how, checkpoint=str(tmp_path / "run"))
    assert all(each["resumed"] for each in again)


@pytest.mark.draw(2)
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("leaves out", "trainer 0 uses the batch of step 3, but trainer 1 requests its next batch"),
        ("reads ahead", "trainer 0 uses the batch of step 3, but trainer 1 uses the batch of step 4"),
        ("no backward pass", "trainer 0 makes a backward pass for step 3, but trainer 1 requests its next batch"),
        (
            "no step",
            "trainer 0 calls optimizer.step() or zero_grad() for step 3, but trainer 1 requests its next batch",
        ),
        ("ends", "trainer 0 uses the batch of step 3, but trainer 1 ends its stream"),
        ("saves", "trainer 0 uses the batch of step 3, but trainer 1 saves a checkpoint"),
        ("resumes", "trainer 0 uses the batch of step 3, but trainer 1 resumes a checkpoint"),
        ("evaluates", "trainer 0 uses the batch of step 3, but trainer 1 evaluates"),
    ],
)
@pytest.mark.parametrize(("world_size", "staleness", "overlap"), [(2, 0, False), (3, 0, True), (2, 2, True)])
def test_a_trainer_that_leaves_the_step_of_the_others_is_named_by_all(
    trainers: Trainers, tmp_path: Path, way: str, expected: str, world_size: int, staleness: int, overlap: bool
) -> None:
    """At staleness 0, neither a table nor a dense parameter has changed since the step before."""
    how: dict[str, Any] = {"staleness": staleness, "overlap": overlap, "device": "cpu"}
    how |= {"checkpoint": str(tmp_path / "run"), "deterministic": staleness > 0, "ahead": way == "reads ahead"}
    found = trainers.run([], world_size, tmp_path, **how, differs="leaves out" if how["ahead"] else way)
    expected = expected if world_size == 2 else expected.replace("trainer 0 ", "each of trainers 0, 2 ")
    assert all(each["error"].startswith(f"step 3: {expected}. In each of these calls") for each in found), found
    if staleness == 0:
        whole = trainers.run([], world_size, tmp_path, **how, differs="ends", all=True)
        assert [each["error"] for each in whole] == [""] * world_size
        assert all(end_alike(each, whole[0]) for each in found)


def test_columns_need_as_many_as_there_are_trainers(trainers: Trainers, tmp_path: Path) -> None:
    found = trainers.run([], 3, tmp_path, refused={"dim": 2, "shard": "columns"})
    expected = (
        "table 'item' has shard='columns', dim 2 and 3 trainers; expected at least one column for each: use "
        "shard='rows'"
    )
    assert found == [{"refused": expected}] * 3


@pytest.mark.draw(1)
@pytest.mark.parametrize(("world_size", "staleness"), [(2, 0), (2, 2), (3, 2)])
def test_all_trainers_give_collectives_to_their_devices_in_one_order(
    trainers: Trainers, world_size: int, staleness: int, device: str, tmp_path: Path, seed: int
) -> None:
    """Lookups, updates and what the dense network sends have a thread each, at another pace on each trainer. Two
    devices that are given collectives in different orders wait for each other forever."""
    how: dict[str, Any] = {"staleness": staleness, "launches": True, "seed": seed, "num_batches": 12 * world_size}
    found = trainers.run([], world_size, tmp_path, **how, device=device)
    orders = [each["launched"] for each in found]
    assert all(order == orders[0] for order in orders)
    assert {"lookups", "updates", "gradients", "buffers"} == set(orders[0])
    assert found[0]["buffers"][-1] == 11 and all(each["buffers"] == found[0]["buffers"] for each in found)
    of_rows = [kind for kind in orders[0] if kind in ("lookups", "updates")]
    if staleness:
        assert of_rows != ["lookups", "updates"] * (len(of_rows) // 2), "lookups run ahead of updates"
