"""`satrap plan --calibrate`: measures the coefficients on this machine, in about half a minute of CPU time.

Every figure is CPU time of processes, read around real loops, so that other processes on the machine disturb it little.
Table work and torch run in one thread each. Meanwhile all other cores are kept busy, as they are in a run: two threads
of one core take more CPU time for the same work. What cannot be measured by two processes on one machine keeps its
default: encryption, the transfer between a worker and its trainer, the pause of a save, and how long trainers wait for
each other.

    dense network     a linear model of three layers, forward, backward and a step of SGD
    local             the loop of `Embeddings` with three sizes of batch, rows in this process
    client, server    the same with one `satrap server`, and with four for the cost of another server
    reduce            all-reduces of two processes by gloo
    read, save, load  Criteo's text, and a table in a directory
"""

import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date, timedelta
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from satrap.config.tables import Table
from satrap.data.inputs import Inputs
from satrap.data.synthetic import Clicks
from satrap.errors import ConfigError
from satrap.planning.coefficients import DEFAULTS, Coefficients, Cost
from satrap.table.store import Store
from satrap.train.deployment import Deployment
from satrap.train.embeddings import Embeddings

_NUM_TABLES, _ROWS = 26, 200_000  # tables as many as Criteo has
_SMALL, _LARGE = (16, 4), (2048, 64)
_SHAPES = (_SMALL, (_LARGE[0], _SMALL[1]), _LARGE)
"""Samples and numbers of a row: the first shows the cost of a step, the second that of ids, the third that of bytes."""
NUM_MEASUREMENTS = 5
"""How often `calibrate` reports a measurement."""
_NUM_BATCHES = 8
_FURTHER = 3  # servers beside the first, for the cost of one more
_SECONDS = 0.7  # CPU time that each measurement takes
_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 600.0
_SMALL_REDUCE, _LARGE_REDUCE = 4, 4 << 20  # bytes
_NUM_REDUCES = 30
_REDUCES_PER_STEP = 3  # gradients; whether all trainers have a batch; whether their gradients agree
_REDUCE_TIMEOUT = timedelta(minutes=10)


def calibrate(report: Callable[[str], None]) -> Coefficients:
    """Return the coefficients of this machine. report: called with the name of each measurement that begins."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = _flops_per_second()
        with tempfile.TemporaryDirectory(prefix="satrap-calibrate-") as folder, _busy_cores():
            measured = _measure(Path(folder), report)
        # 1.0: a vCPU is a whole core. 1.3 or more: it is one of two hardware threads of a core.
        factor = alone / measured.flops_per_second
        source = f"measured on {_cpu_name()}, {date.today().isoformat()}; a vCPU alone is {factor:.1f} times as fast"
        return replace(measured, source=source)
    finally:
        torch.set_num_threads(threads)


def _measure(folder: Path, report: Callable[[str], None]) -> Coefficients:
    report("the dense network")
    measured = replace(DEFAULTS, flops_per_second=_flops_per_second(), trainer_bytes=_resident_bytes(os.getpid()))
    report("rows in this process")
    measured = replace(measured, local=fit_cost([_loop(shape)[0] for shape in _SHAPES]))
    report("rows on servers")
    measured = _with_servers(measured, folder)
    report("all-reduces")
    step, byte = _reduce_seconds(folder)
    measured = replace(measured, reduce_step=step, reduce_byte=byte)
    report("reading and checkpoints")
    save, load = _checkpoint_seconds(folder)
    return replace(measured, save_byte=save, load_byte=load, read_byte=_read_seconds(folder))


Sample = tuple[float, float, float]
"""A step's ids, the bytes that it moved, and its seconds of a core."""


def fit_cost(samples: Sequence[Sample]) -> Cost:
    """Return the cost that explains the measurements best, by the least sum of squared relative errors; no part of it
    is negative."""
    ids, moved, seconds = np.array(samples).T
    parts = np.stack([np.ones_like(ids), ids, moved], axis=1) / seconds[:, None]
    parts /= (scales := np.linalg.norm(parts, axis=0))
    best, least = np.zeros(3), math.inf
    for used in map(list, chain.from_iterable(combinations(range(3), count) for count in (1, 2, 3))):
        weights = np.zeros(3)
        weights[used] = np.linalg.lstsq(parts[:, used], np.ones(len(samples)), rcond=None)[0]
        error = float(np.sum((parts @ weights - 1.0) ** 2))
        if weights.min() >= 0 and error < least:
            best, least = weights / scales, error
    step, each_id, byte = best.tolist()
    return Cost(step=step, id=each_id, byte=byte)


def _with_servers(measured: Coefficients, folder: Path) -> Coefficients:
    one = []
    for shape in _SHAPES:  # a server has the tables of one job
        with _servers(folder, 1) as servers:
            one.append(_loop(shape, servers))
    with _servers(folder, 1 + _FURTHER) as servers:
        server_bytes = _resident_bytes(next(iter(servers.values())))
        (_, _, several), _ = _loop(_SMALL, servers)
    client, server = zip(*one, strict=True)
    return replace(
        measured,
        client=fit_cost(client),
        server=fit_cost(server),
        call=max(0.0, several - client[0][2]) / _FURTHER,
        server_bytes=server_bytes,
        start=_start_seconds(),
    )


@contextmanager
def _busy_cores() -> Iterator[None]:
    """Keep all cores but one busy, with products of matrices and with reads from all over an array."""
    with ExitStack() as stack:
        for _ in range(len(os.sched_getaffinity(0)) - 1):
            child = stack.enter_context(subprocess.Popen([sys.executable, "-c", _WORK], stdin=subprocess.PIPE))
            stack.callback(child.kill)
        yield


_WORK = """
import select, sys
import numpy as np
array, matrix = np.zeros(1 << 22, np.float32), np.ones((48, 48), np.float32)
places = np.random.default_rng(0).integers(0, len(array), 1 << 16)
while not select.select([sys.stdin], [], [], 0)[0]:  # until the parent kills it, or ends
    array[places] += 1
    for _ in range(100):
        matrix @ matrix
"""


# -- loops of training -------------------------------------------------------------------------------------------------


def _loop(shape: tuple[int, int], servers: Mapping[str, int] | None = None) -> tuple[Sample, Sample]:
    """Train a linear model on random batches; return what a step takes here and on all servers together. servers: the
    process of each address."""
    servers = servers or {}
    batch_size, dim = shape
    tables = {f"t{number}": Table(f"t{number}_{dim}_{batch_size}", dim=dim) for number in range(_NUM_TABLES)}
    deployment = Deployment(list(servers)) if servers else None
    batches = [_batch(batch_size, number) for number in range(_NUM_BATCHES)]
    rows = sum(len(np.unique(part)) for batch in batches for part in batch.values.reshape(_NUM_TABLES, -1))
    with Embeddings(tables, num_threads=1, deployment=deployment) as embeddings:
        layer = torch.nn.Linear(_NUM_TABLES * dim, 1)
        optimizer = embeddings.optimizer(torch.optim.SGD(layer.parameters(), lr=0.01))

        def train(data: list[Inputs]) -> None:
            for batch in embeddings.stream(data, overlap=False):
                loss = layer(batch.embeddings).squeeze(1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        train(batches)  # creates the rows
        served = -sum(map(_cpu_seconds, servers.values()))
        seconds, rounds = _time(lambda: train(batches * 4))
        served += sum(map(_cpu_seconds, servers.values()))
    steps, ids, unique = 4 * rounds * _NUM_BATCHES, float(_NUM_TABLES * batch_size), rows / _NUM_BATCHES
    vectors, sent = 4.0 * dim * ids, 4.0 * dim * unique
    touched = unique * (8.0 * dim + 24)  # values, the state of Adagrad, and what a row has beside them
    own = 2 * (vectors + (sent if servers else touched))
    return (ids, own, seconds / steps), (unique, 2 * (sent + touched), served / steps)


def _batch(batch_size: int, number: int) -> Inputs:
    """Return a batch with one id for each table; ids of lower ranks occur more often, as in Zipf's law."""
    generator = np.random.default_rng(number)
    ranks = _ROWS ** generator.random((_NUM_TABLES, batch_size))
    return Inputs(
        names=tuple(f"t{number}" for number in range(_NUM_TABLES)),
        values=ranks.astype(np.uint64).ravel(),
        batch_size=batch_size,
    )


def _time(run: Callable[[], Any]) -> tuple[float, int]:
    """Run it until it has taken enough CPU time of this process; return the CPU time and how often it ran."""
    rounds, begin = 0, time.process_time()
    while rounds == 0 or time.process_time() - begin < _SECONDS:
        run()
        rounds += 1
    return time.process_time() - begin, rounds


@contextmanager
def _servers(folder: Path, count: int) -> Iterator[dict[str, int]]:
    """Start servers at Unix sockets in the folder, which no other user can enter; yield the process of each address."""
    with ExitStack() as stack:
        pids = {}
        for number in range(count):
            address = f"ipc://{folder}/server-{number}"
            log = stack.enter_context((folder / "server.log").open("w"))
            command = [sys.executable, "-m", "satrap", "--die-with", str(os.getpid()), "server", "--listen", address]
            process = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, stderr=log, text=True)
            stack.callback(_stop, process)
            assert process.stdout is not None
            if address not in process.stdout.readline():
                text = (folder / "server.log").read_text()
                raise ConfigError(f"--calibrate: a server did not start; its log is {text!r}")
            pids[address] = process.pid
        yield pids


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    process.wait(_START_SECONDS)
    assert process.stdout is not None
    process.stdout.close()


def _start_seconds() -> float:
    """Return the CPU time in which a process imports what a trainer needs."""
    before = os.times()
    subprocess.run([sys.executable, "-c", "import torch, satrap.train.embeddings"], check=True, timeout=_START_SECONDS)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


# -- other measurements ------------------------------------------------------------------------------------------------


def _flops_per_second() -> float:
    """Return the operations a second of a small network of linear layers, trained on one core."""
    sizes, batch_size = (512, 256, 128, 1), 1024
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    data = torch.randn(batch_size, sizes[0], requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        network(data).square().mean().backward()
        optimizer.step()

    step()
    seconds, rounds = _time(step)
    flops = sum(2 * before * after for before, after in pairwise(sizes))
    return 3 * flops * batch_size * rounds / seconds


def _reduce_seconds(folder: Path) -> tuple[float, float]:
    """Return the CPU time of one of two processes for the all-reduces of a step, however small, and for each byte that
    it sends."""
    store = folder / "reduce"
    code = f"from satrap.planning.calibration import join_reduces; join_reduces({str(store)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            small, large = _reduce(store, 0)
        except BaseException:
            child.kill()
            raise
        child.wait(_REDUCE_TIMEOUT.total_seconds())
    # A ring of two processes sends each byte once.
    return _REDUCES_PER_STEP * small, max(0.0, large - small) / _LARGE_REDUCE


def join_reduces(store: str) -> None:
    """Be the other process of `_reduce_seconds`."""
    torch.set_num_threads(1)
    _reduce(Path(store), 1)


def _reduce(store: Path, rank: int) -> tuple[float, float]:
    """Return the CPU time of a small all-reduce and of a large one."""
    group: Any = dist.ProcessGroupGloo(dist.FileStore(str(store), 2), rank, 2, _REDUCE_TIMEOUT)  # type: ignore[attr-defined]

    def seconds(size: int) -> float:
        tensor = torch.zeros(size // 4)
        group.allreduce([tensor]).wait()
        begin = time.process_time()
        for _ in range(_NUM_REDUCES):
            group.allreduce([tensor]).wait()
        return (time.process_time() - begin) / _NUM_REDUCES

    return seconds(_SMALL_REDUCE), seconds(_LARGE_REDUCE)


def _checkpoint_seconds(folder: Path) -> tuple[float, float]:
    """Return the CPU time to save and to load a byte of a table."""
    table = Table("saved", dim=32)
    store = Store(table, num_threads=1)
    store.lookup(np.arange(_ROWS, dtype=np.uint64))
    for path in (folder / "first", folder / "second"):  # the first imports what a checkpoint needs
        begin = time.process_time()
        store.save(path)
        saved = time.process_time()
        Store.load(path, num_threads=1)
        loaded = time.process_time()
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return (saved - begin) / size, (loaded - saved) / size


def _read_seconds(folder: Path) -> float:
    """Return the CPU time to read and decode a byte of Criteo's text."""
    from satrap.data.criteo import Criteo

    path = folder / "clicks.txt"
    Clicks(num_samples=20_000).write_criteo(path)
    source = Criteo(path, batch_size=2048)
    seconds, rounds = _time(lambda: [None for _ in source.batches([f"C{number}" for number in range(1, 27)])])
    return seconds / (rounds * path.stat().st_size)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _resident_bytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {len(os.sched_getaffinity(0))} cores"
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
