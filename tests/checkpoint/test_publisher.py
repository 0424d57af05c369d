"""Checkpoints on file systems with weak guarantees: no rename, no folders, lagging lists, errors in the middle.

Whatever fails, a run resumes from its newest complete checkpoint and ends with the same bits, parts of two attempts are
never mixed, and a second process that writes into the folder is refused.
"""

from __future__ import annotations

import errno
import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_job import Job, same
from hostile_store import Hostile, KilledError, hostile
from logged import logged
from satrap.checkpoint.publisher import open_publisher
from satrap.errors import CheckpointError, SnapshotError
from satrap.storage.open_folder import open_folder

URL = "hostile://bucket/run"
STEPS = 12


@pytest.fixture
def store() -> Iterator[Hostile]:
    with hostile() as store:
        yield store


class Never(random.Random):
    """A random generator with which lists never show a change."""

    def randint(self, a: int, b: int) -> int:
        return 0


def published(store: Hostile) -> list[str]:
    return sorted(path.split("/")[-2] for path in store.objects if path.endswith("/checkpoint.json"))


def test_a_run_over_a_randomly_failing_store_ends_with_the_same_bits(
    store: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt is killed or fails at random operations; the next resumes no checkpoint older than the last saved
    one."""
    whole = Job(str(tmp_path), STEPS)
    whole.train(every_steps=10**6)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    store.lag(random.Random(seed))
    saved = failures = 0

    def fail_at(operation: str, path: str) -> type[BaseException] | None:
        nonlocal failures
        if failures >= 20 or rng.random() > 0.03:
            return None
        failures += 1
        return KilledError if rng.random() < 0.5 else RuntimeError

    store.fail_at = fail_at
    monkeypatch.setattr(logging.getLogger("satrap.checkpoint"), "disabled", True)
    while saved < STEPS:
        try:
            job = Job(URL, STEPS, keep=2, full_every=3)  # probes the store, which may fail
        except (KilledError, CheckpointError, SnapshotError):
            continue
        try:
            assert job.run.resume() or saved == 0
            assert job.embeddings.step >= saved
            job.train()
        except (KilledError, CheckpointError, SnapshotError):
            pass
        saved = max(saved, job.run._saved_step)
    assert failures > 0
    same(job.state(), whole.state())
    store.settle()
    job.run.save()
    again = Job(URL, STEPS)
    assert again.run.resume()
    same(again.state(), whole.state())
    names = {path.split("/")[2] for path in store.objects if path.count("/") > 2}
    assert names <= set(published(store)), "interrupted uploads are removed"


def test_each_operation_of_a_save_may_fail(store: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation n of a save fails, for each n: `save` raises a documented error, or leaves a removal to the next save,
    which works. Saves that succeed need no more operations than the first ones, whatever came before."""
    job = Job(URL, 3, keep=2, full_every=3)
    job.train()
    operations: list[tuple[str, str]] = []

    def fail_at(operation: str, path: str) -> type[BaseException] | None:
        if operations[-1:] != [(operation, path)]:  # an object is written and read in several operations
            operations.append((operation, path))
        return RuntimeError if len(operations) == fails_at else None

    monkeypatch.setattr(logging.getLogger("satrap.checkpoint"), "disabled", True)
    store.fail_at, failures = fail_at, 0
    for fails_at in range(1, 200):
        operations.clear()
        try:
            job.run.save()
        except (CheckpointError, SnapshotError) as error:
            assert "bucket/run" in str(error)
            failures += 1
        if len(operations) < fails_at:
            break
        store.fail_at = lambda operation, path: None
        job.run.save()
        store.fail_at = fail_at
    assert failures > 20
    assert fails_at < 100
    store.fail_at = lambda operation, path: None
    again = Job(URL, 3)
    assert again.run.resume()
    same(again.state(), job.state())


@pytest.mark.parametrize("path", ["memory://{}/run[1]", "memory://{}/a*b?c/run", "hostile://{}/run[1-3]*", "{}/run[1]"])
def test_a_path_is_not_a_pattern(path: str, tmp_path: Path, store: Hostile) -> None:
    run = path.format(tmp_path if path.startswith("{") else tmp_path.name)
    job = Job(run, 5, keep=2, full_every=2)
    store.lag(random.Random(1))
    job.train()
    again = Job(run, 5)
    assert again.run.resume() and again.embeddings.step == 5
    same(again.state(), job.state())


@pytest.mark.parametrize("requires_folders", [False, True])
def test_stores_with_and_without_folders(requires_folders: bool, store: Hostile) -> None:
    store.requires_folders = requires_folders
    Job(URL, 4, keep=1).train()
    again = Job(URL, 4)
    assert again.run.resume() and again.embeddings.step == 4
    assert len(published(store)) == 1
    assert not any("000003-step-3" in folder for folder in store.folders), "a removed version leaves no folder"


@pytest.mark.parametrize("start", ["{}", "memory://{}"], ids=["disk", "url"])
def test_a_run_that_was_copied_elsewhere_resumes(start: str, tmp_path: Path) -> None:
    """From a disk to a URL, where earlier releases wrote the same files, and back."""
    end = "memory://{}" if start == "{}" else "{}"
    one, other = (open_folder(f"{each.format(tmp_path)}/run-{start[:3]}") for each in (start, end))
    job = Job(str(one), 3, full_every=3)
    job.train()
    for key in one.sizes():
        if other.is_local:
            (Path(other) / key).parent.mkdir(parents=True, exist_ok=True)
        other.write(key, one.read(key))
    again = Job(str(other), 5, full_every=3)
    assert again.run.resume() and again.embeddings.step == 3
    same(again.state(), job.state())
    again.train()
    assert Job(str(other), 5).run.resume()


@pytest.mark.parametrize("scheme", ["local://", "file://"])
def test_a_url_of_the_local_disk(scheme: str, tmp_path: Path) -> None:
    Job(f"{scheme}{tmp_path}/new/run", 2).train()
    assert (tmp_path / "new/run/000002-step-2/checkpoint.json").exists()
    assert Job(f"{scheme}{tmp_path}/new/run", 2).run.resume()
    assert Job(str(tmp_path / "new/run"), 2).run.resume()


def test_an_error_names_the_object(store: Hostile) -> None:
    job = Job(URL, 2)
    store.fail_at = lambda operation, path: PermissionError if "state.safetensors" in path else None
    with pytest.raises(CheckpointError, match=rf"step 1: {URL} cannot be written: .* at {URL}/000001-step-1-\w+/state"):
        job.train()


def test_a_killed_upload_is_never_mixed_into_a_later_one(store: Hostile) -> None:
    """This holds even if no list shows it, and the next attempt is at the same step."""
    job = Job(URL, 3)
    job.train()
    store.fail_at = lambda operation, path: KilledError if path.endswith("state.safetensors") else None
    with pytest.raises(KilledError):
        job.run.save()
    left = {path for path in store.objects if "000004-" in path and ".owner" not in path}
    for path in left:  # as if another number of servers had saved it
        store.change(path.replace("/tables/0/", "/tables/0/2-of-3/"), store.objects[path])
    assert left
    store.fail_at = lambda operation, path: None
    store.lag(Never())
    again = Job(URL, 5)
    assert again.run.resume() and again.embeddings.step == 3
    again.run.save()
    assert published(store)[-1].startswith("000005-step-3-"), "its number is not reused"
    store.settle()
    again.train()
    assert not any("000004-step-3-" in path for path in store.objects), "and it is removed"
    last = Job(URL, 5)
    assert last.run.resume()
    same(last.state(), again.state())


@pytest.mark.parametrize("half", [False, True], ids=["absent", "half"])
def test_an_incomplete_newest_version_is_named(half: bool, store: Hostile) -> None:
    Job(URL, 3).train()
    newest = published(store)[-1]
    path = next(path for path in store.objects if path.endswith(f"{newest}/checkpoint.json"))
    store.change(path, store.objects[path][:-2] if half else None)
    store.settle()
    job = Job(URL, 4)
    words = rf"{URL}/{newest} has no complete checkpoint\.json: .*000002-step-2-\w+ is the newest before it\. The next"
    with logged("satrap.checkpoint", match=words):
        assert job.run.resume() and job.embeddings.step == 2
    job.train()
    assert [name[:13] for name in published(store)[-2:]] == ["000004-step-3", "000005-step-4"]


def test_empty_lists_hide_no_checkpoint(store: Hostile) -> None:
    """The newest checkpoint is found by the name that its writer announced."""

    store.lag(Never())
    job = Job(URL, 4, full_every=3)
    job.train()
    again = Job(URL, 4)
    assert again.run.resume() and again.embeddings.step == 4
    same(again.state(), job.state())


# -- two processes -----------------------------------------------------------------------------------------------------

BOTH = rf"(?s){URL}: process \d+ on .* \(writer \w+\) saves into it, and so did this process, .*terminate one"


def test_the_second_of_two_concurrent_processes_is_refused(store: Hostile) -> None:
    one, other = Job(URL, 2), Job(URL, 2)
    assert not one.run.resume() and not other.run.resume()
    one.train()
    with pytest.raises(CheckpointError, match=BOTH):
        other.train()
    one.run.save()
    assert Job(URL, 2).run.resume()


def test_a_process_that_lost_ownership_during_a_write_publishes_nothing(store: Hostile) -> None:
    one = Job(URL, 2)

    def taken_over(path: str) -> None:
        if "state.safetensors" in path:
            store.before_write = lambda path: None
            other = Job(URL, 1)
            with logged("satrap.checkpoint", match="has no complete"):
                other.train()

    store.before_write = taken_over
    with pytest.raises(CheckpointError, match=BOTH):
        one.train()
    store.settle()
    assert len(published(store)) == 1
    with pytest.raises(CheckpointError, match=BOTH):
        one.run.save()
    assert Job(URL, 2).run.resume()


@pytest.mark.parametrize("url", [URL, "{}"])
def test_a_process_that_slept_while_another_saved_is_refused(url: str, store: Hostile, tmp_path: Path) -> None:
    url = url.format(tmp_path / "run")
    sleeper = Job(url, 2)
    sleeper.train()
    other = Job(url, 4)
    assert other.run.resume()
    other.train()
    with pytest.raises(CheckpointError, match=BOTH.replace(URL, re.escape(url))):
        sleeper.run.save()
    other.run.save()


def test_evaluation_does_not_take_over_a_run(store: Hostile) -> None:
    job = Job(URL, 2)
    job.train()
    assert Job(URL, 2).run.resume()
    job.run.save()


def test_a_torn_owner_file_is_ignored(store: Hostile) -> None:
    Job(URL, 2).train()
    path = next(path for path in store.objects if path.endswith(".owner.json"))
    store.change(path, store.objects[path][:20])
    store.settle()
    job = Job(URL, 4)
    assert job.run.resume()
    job.train()


def test_an_invalid_owner_file_is_refused(store: Hostile) -> None:
    job = Job(URL, 2)
    job.train()
    store.change("bucket/run/.owner.json", b'{"format": "mine"}')
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(URL)}/\.owner\.json cannot be read \(format is 'mine'\); expected"
    ):
        job.run.save()


# -- removal -----------------------------------------------------------------------------------------------------------


def test_a_failed_removal_warns_and_is_retried(store: Hostile) -> None:
    job = Job(URL, 4, keep=1)
    job.train()
    store.fail_at = lambda operation, path: RuntimeError if operation == "remove" and "state" in path else None
    with logged(
        "satrap.checkpoint", match="old checkpoints could not be removed: .* at hostile://bucket/run/000004-step-4"
    ):
        assert job.run.save()
    left = {path.split("/")[-2] for path in store.objects if path.endswith("state.safetensors")}
    assert len(left) == 2 and len(published(store)) == 1, "a partly removed version no longer counts"
    store.fail_at = lambda operation, path: None
    assert job.run.save()
    assert [path.split("/")[-2] for path in store.objects if path.endswith("state.safetensors")] == published(store)


def test_a_removal_starts_with_the_manifest(store: Hostile) -> None:
    """This holds even if no list shows the object, whatever its name."""
    publisher, removed = open_publisher(URL), list[str]()

    def note(operation: str, path: str) -> None:
        if operation == "remove":
            removed.append(path)

    store.fail_at = note
    for name in ("a", "z", "b"):
        publisher.folder.write(f"v/{name}", b"x")
    publisher.remove("v", "z")
    assert removed[0] == "bucket/run/v/z" and not store.objects
    store.lag(Never())
    publisher.folder.write("w/z", b"x")
    publisher.remove("w", "z")
    assert not store.objects


def test_a_checkpoint_written_with_an_error_is_not_taken_for_another_runs(store: Hostile) -> None:
    """The write succeeds but reports an error, and so does the removal after it."""
    job = Job(URL, 3)
    job.train()

    def lose_the_answer(path: str) -> None:
        if path.endswith("checkpoint.json"):
            store.fail_at = lambda operation, path: RuntimeError if operation == "remove" else None
            raise TimeoutError(errno.ETIMEDOUT, "no answer")

    store.after_write = lose_the_answer
    with pytest.raises(CheckpointError, match=r"cannot be written: no answer at .*/000004-step-3-\w+/checkpoint\.json"):
        job.run.save()
    store.after_write, store.fail_at = lambda path: None, lambda operation, path: None
    assert published(store)[-1].startswith("000004-step-3-")
    assert job.run.save()
    assert Job(URL, 3).run.resume()


def test_foreign_objects_are_neither_read_nor_removed(store: Hostile) -> None:
    foreign = ["bucket/run/notes.txt", "bucket/run/best-step-1/checkpoint.json", "bucket/run/000001-step-1/part"]
    for path in foreign:
        store.change(path, b"mine")
    store.settle()
    job = Job(URL, 4, keep=1)
    with logged("satrap.checkpoint", match="000001-step-1 has no complete"):
        job.train()
    store.settle()
    assert job.run.save()
    assert {path: store.objects[path] for path in foreign} == dict.fromkeys(foreign, b"mine")
