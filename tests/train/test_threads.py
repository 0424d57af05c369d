"""Table work on torch's own threads: where it is used, and that it does not change results."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import satrap.train.batch_lookup
from satrap import Adagrad, Embeddings, Inputs, Store, Table, _core
from satrap.errors import InputError
from satrap.train.torch_threads import _openmp, spare_cores, torch_threads

borrowed = pytest.mark.skipif(_openmp() is None, reason="this torch does not run on GNU's OpenMP")


def trained(num_threads: int, steps: int = 4) -> np.ndarray:
    """Train on enough rows that every phase is split."""
    store = Store(Table("t", dim=8, optimizer=Adagrad(lr=0.1)), num_threads=num_threads)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        ids = rng.integers(0, 30_000, 40_000, dtype=np.uint64)
        store.update(ids, store.lookup(ids) - 1.0)
    store.check()
    return store.read(np.arange(30_000, dtype=np.uint64)).values


@borrowed
@pytest.mark.parametrize("num_threads", [2, 3])
def test_borrowed_threads_do_not_change_the_bits(num_threads: int) -> None:
    expected = trained(num_threads)
    with torch_threads():
        np.testing.assert_array_equal(trained(num_threads), expected)
    np.testing.assert_array_equal(trained(num_threads), expected)


@borrowed
def test_several_threads_may_borrow_concurrently() -> None:
    expected, found = trained(2), {}

    def work(number: int) -> None:
        with torch_threads():
            found[number] = trained(2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for number in range(3):
        np.testing.assert_array_equal(found[number], expected)


def test_only_a_loaded_openmp_is_borrowed() -> None:
    with pytest.raises(InputError, match=r"no library /nowhere/libgomp\.so is loaded in this process"):
        _core.borrow_threads("/nowhere/libgomp.so")
    with pytest.raises(InputError, match=r"libc\.so\.6 has no GOMP_parallel"):
        _core.borrow_threads("libc.so.6")
    _core.borrow_threads(None)


@pytest.mark.parametrize(("overlap", "num_threads", "num_borrowed"), [(False, 1, 6), (True, 1, 0), (False, 3, 0)])
def test_an_inline_stream_borrows_torchs_threads(
    overlap: bool, num_threads: int, num_borrowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in the user's thread, and with equal numbers of threads: another number would make torch recreate its
    threads."""
    times = []

    @contextmanager
    def counted() -> Iterator[None]:
        times.append(threading.current_thread().name)
        with torch_threads():
            yield

    monkeypatch.setattr(satrap.train.batch_lookup, "torch_threads", counted)
    assert torch.get_num_threads() == 1
    embeddings = Embeddings({"item": Table("item", dim=4)}, num_threads=num_threads)
    optimizer = embeddings.optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    inputs = Inputs(names=("item",), values=np.arange(64, dtype=np.uint64), batch_size=64)
    with embeddings.stream([inputs] * 3, overlap=overlap) as stream:
        for batch in stream:
            batch.embeddings.sum().backward()
            optimizer.step()
    embeddings.drain()
    assert times == ["MainThread"] * num_borrowed


@pytest.mark.parametrize(
    ("cores", "threads", "left"), [(1, 1, 1), (2, 2, 1), (2, 1, 1), (4, 8, 3), (8, 8, 6), (8, 7, 7)]
)
def test_staleness_leaves_cores_free_unless_the_user_chose(
    cores: int, threads: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("satrap.train.torch_threads.num_cores", lambda: cores)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    chosen = [threads]
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    table = Table("item", dim=4)
    Embeddings({"item": table}), Embeddings({"item": table}, staleness=2, deterministic=True)
    assert chosen == [threads], "at staleness 0 table work runs between the steps"
    Embeddings({"item": table}, staleness=2)
    assert chosen[-1] == left


def test_spare_cores_depend_on_torchs_threads() -> None:
    before = spare_cores()
    torch.set_num_threads(2)
    try:
        assert spare_cores() == before - 1
    finally:
        torch.set_num_threads(1)
