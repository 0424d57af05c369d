"""Fixtures of all tests: a printed seed, stores that are checked at the end, and a failure for every leak.

`pytest --seed N` repeats a run's random draws (hypothesis has its own `--hypothesis-seed`); without it each run draws
a new seed and prints it in the header. `open_store` makes stores and calls `check()` on each when the test ends. No
test may leave a thread, a child process or a warning behind, the log's included.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from logged import Records
from object_stores import S3, SCHEMES, Azure, ObjectStore, running_azurite, running_moto, use
from satrap.config.tables import Table
from satrap.server import lease
from satrap.storage.open_folder import _bucket
from satrap.table.store import Store
from trainers import Trainers

torch.set_num_threads(1)
lease._WATCH_SECONDS = 0.02  # every test of servers waits for the threads that look so often at leases
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # the jobs of a shell's background inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read by Triton's decorators, its own library's too, so before any import of it
    )
settings.register_profile(
    "laptop",
    deadline=None,
    max_examples=120,
    stateful_step_count=25,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("drawn", settings.get_profile("laptop"), max_examples=45)
settings.register_profile("thorough", settings.get_profile("laptop"), max_examples=500, stateful_step_count=40)
settings.register_profile(  # for tests/mutate.py: a failure need not be simplified
    "mutation", settings.get_profile("laptop"), phases=[Phase.explicit, Phase.generate], derandomize=True
)
settings.load_profile("laptop")

SEED = pytest.StashKey[int]()
SLOWEST = (
    "test_run.py",
    "test_ray.py",
    "test_compiled.py",
    "test_smoke.py",
    "test_migration.py",
    "test_remote_worker_faults.py",
    "test_sharded_training.py",
    "test_examples.py",
    "test_object_store_kills.py",
    "test_trainer_server.py",
    "test_trainers.py",
    "test_remote_worker_trainers.py",
    "test_save_beside.py",
    "test_object_stores.py",
    "test_checkpoint.py",
    "test_docs.py",
    "test_train.py",
    "test_faults_midway.py",
)
"""Files of tests that take tens of seconds, the longest first."""
LONG = (
    "test_triton.py",
    "test_remote_worker.py",
    "test_streams.py",
    "test_sharded_rows.py",
    "test_direct_rows.py",
    "test_close.py",
    "test_tiers.py",
    "test_plan.py",
    "test_interrupts.py",
    "test_device_property.py",
    "test_paper_page.py",
    "test_device_ids.py",
    "test_batch_assembler.py",
    "test_embedding.py",
    "test_exactly_once.py",
    "test_synthetic.py",
    "test_side_by_side.py",
    "test_part_reads.py",
    "test_property.py",
)
"""Files that take ten seconds and more, which follow them."""
CLUSTERS = ("benchmarks", "deploy", "faults", "launch")
"""Folders of tests that start processes. Their tests and those of the slowest files are marked `cluster`, and so is
each test that names one of PROCESSES, in its function, a fixture, or what these call in tests/ and benchmarks/."""
PROCESSES = {"subprocess", "multiprocessing", "observe_script"}
_OURS = tuple(str(Path(__file__).parents[1] / folder) for folder in ("tests", "benchmarks"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the tests' random draws (default: a new one)")
    parser.addoption("--draw", action="store_true", help="run some of the tests marked `draw`, and fewer examples")
    parser.addoption(
        "--faults-seconds", type=float, default=8.0, help="how long faults are drawn at random (default 8)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Draws the run's seed. Under `-n` the first process draws it and passes it to each worker. With `--draw`, property
    tests have fewer examples."""
    if config.getoption("--draw") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("drawn")
    given = getattr(config, "workerinput", {}).get("satrap_seed", config.getoption("--seed"))
    config.stash[SEED] = random.SystemRandom().randrange(1 << 32) if given is None else given


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["satrap_seed"] = node.config.stash[SEED]


def pytest_report_header(config: pytest.Config) -> str:
    return f"satrap: --seed {config.stash[SEED]}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file of clusters for a run without them."""
    is_slow = collection_path.parent.name in CLUSTERS or collection_path.name in SLOWEST
    return True if is_slow and collection_path.suffix == ".py" and "not cluster" in config.option.markexpr else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """Marks the tests of clusters. With `--draw`, draws some of the tests that are marked `draw`. Puts the slowest
    files first, so that no worker of `-n` starts one at the end. The tests of a file stay together and in order,
    because they share fixtures."""
    if config.getoption("--draw"):
        left_out = _not_drawn(items, config.stash[SEED])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        fixtures = [definition[-1].func for definition in item._fixtureinfo.name2fixturedefs.values()]
        is_slow = item.path.parent.name in CLUSTERS or item.path.name in SLOWEST
        if is_slow or any(map(starts_processes, [item.function, *fixtures])):
            item.add_marker("cluster")
    places = {name: place for place, name in enumerate((*SLOWEST, *LONG))}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@cache
def starts_processes(tested: Any) -> bool:
    """Return whether this function, or one of those and the classes in tests/ and benchmarks/ that it uses, names a way
    to start processes."""
    used = [inspect.unwrap(tested)]
    for function in used:
        codes = [function.__code__]
        for code in codes:
            codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        names = {name for code in codes for name in code.co_names}
        if names & PROCESSES:
            return True
        for value in (function.__globals__.get(name) for name in names):
            methods = vars(value).values() if inspect.isclass(value) else [value]
            called = [inspect.unwrap(method) for method in methods if inspect.isfunction(method)]
            called = [one for one in called if inspect.isfunction(one) and one not in used]
            used += [one for one in called if one.__code__.co_filename.startswith(_OURS)]
    return False


def _not_drawn(items: list[pytest.Item], seed: int) -> set[pytest.Item]:
    """Returns the tests that a run with this seed leaves out. `draw(number)` marks a function with several variants, or
    a module, of whose tests so many run; `draw(number, of=group)` marks functions and modules, of which so many run."""
    groups: dict[tuple[str, int], dict[str, list[pytest.Item]]] = {}
    for item in items:
        for node, mark in item.iter_markers_with_node("draw"):
            marked = node.nodeid.partition("[")[0]
            group, unit = (mark.kwargs["of"], marked) if mark.kwargs else (marked, item.nodeid)
            groups.setdefault((group, mark.args[0]), {}).setdefault(unit, []).append(item)
    left_out: set[pytest.Item] = set()
    for (name, number), units in groups.items():
        drawn = random.Random(f"{seed} {name}").sample(sorted(units), min(number, len(units)))
        left_out.update(item for unit, its_items in units.items() if unit not in drawn for item in its_items)
    return left_out


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_stay() -> None:
    """Keeps collections quick, of which many tests make one: most objects exist before a file's tests, and stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> str:
    """Where tests of rows on a device have them; train/test_gpu.py runs the same tests on a GPU."""
    return "cpu"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for each test, from the run's seed and the test's name, so that tests can be repeated alone."""
    own = zlib.crc32(request.node.nodeid.encode(), request.config.stash[SEED] & 0xFFFFFFFF)
    print(f"seed {own} (repeat with --seed {request.config.stash[SEED]})")
    return own


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def open_store() -> Iterator[Callable[..., Store]]:
    """Creates stores, and checks them when the test ends."""
    stores: list[Store] = []

    def open_(table: Table, **options: Any) -> Store:
        stores.append(Store(table, **{"num_threads": 1, **options}))
        return stores[-1]

    yield open_
    while stores:
        stores.pop().check()


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory."""
    import fsspec  # not where rows on a GPU are tested

    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, S3]]:
    """S3 and Google Cloud Storage, by scheme."""
    with running_moto(tmp_path_factory.mktemp("moto")) as stores:
        yield stores


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Azure]]:
    with running_azurite(tmp_path_factory.mktemp("azurite")) as stores:
        yield stores


@pytest.fixture(scope="module", params=SCHEMES)
def bucket_server(request: pytest.FixtureRequest, moto: dict[str, S3]) -> ObjectStore:
    stores: dict[str, ObjectStore] = request.getfixturevalue("azurite") if request.param == "az" else {**moto}
    return stores[request.param]


@pytest.fixture
def object_store(bucket_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """An object store of each kind, which this process uses."""
    use(monkeypatch, bucket_server)
    yield bucket_server
    _bucket.cache_clear()


@pytest.fixture
def s3(moto: dict[str, S3], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    use(monkeypatch, moto["s3"])
    yield moto["s3"]
    _bucket.cache_clear()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(3) as found:
        yield found


def _children() -> set[str]:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return set()
    children: set[str] = set()
    for task in tasks.iterdir():
        try:
            children.update((task / "children").read_text().split())
        except FileNotFoundError:  # the thread has ended
            continue
    return children


_END_SECONDS = 10.0
_LASTING_THREADS = {"satrap-collected", "tqdm_monitor"}  # the latter belongs to tqdm, which torch uses


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    threads, children, directory = set(threading.enumerate()), _children(), os.getcwd()
    cores = os.sched_getaffinity(0)
    yield
    # A benchmark that runs in this process pins it. A fork of it would hang in an operation of more threads.
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    until = time.monotonic() + _END_SECONDS
    while left := [each for each in threading.enumerate() if each not in threads and each.name not in _LASTING_THREADS]:
        assert time.monotonic() < until, f"leaked threads: {[each.name for each in left]}"
        gc.collect()  # collected objects are closed by a thread
        left[0].join(0.1)
    assert not _children() - children, f"leaked processes: {_children() - children}"
    assert os.getcwd() == directory


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    """Fails a test that causes a warning in Satrap's log and does not expect it with `logged`."""
    logger, handler = logging.getLogger("satrap"), Records()
    handler.setLevel(logging.WARNING)
    # How soon a server that was killed listens again depends on the machine. What is refused, or fails, also raises an
    # error at the caller.
    handler.addFilter(
        lambda record: (
            record.name != "satrap.rpc"
            and not str(getattr(record, "event", "")).endswith(("_refused", "_failed", "peer_lost"))
        )
    )
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.records, handler.messages
