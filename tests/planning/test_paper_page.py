"""The paper's run in docs/internals/planning.md: each line of its tables is computed again and compared; the figures of
docs/deploy.md, too."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from satrap.planning.coefficients import DEFAULTS
from satrap.planning.estimate import Estimate
from satrap.planning.input_files import read_description, read_prices
from satrap.planning.machines import Layout, Pool
from satrap.planning.planner import Plan, _Search, make_plan
from satrap.planning.report import lines_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/internals/planning.md").read_text()
JOB = read_description(ROOT / "examples/planning/paper.toml")
LARGE = ("machines.m2-ultramem-208.available=0",)
WITHOUT_GPUS = (*LARGE, "machines.a2-highgpu-8g.available=0")
SUSTAINED = {"m2": 0.7, "n2": 0.8, "c2": 0.8, "a2": 1.0}
"""Prices of the list over those on demand."""


@cache
def plan(*changes: str) -> Plan:
    return make_plan(JOB, read_prices(ROOT / "examples/planning/machines.toml", changes), DEFAULTS)


def steps() -> Iterator[tuple[str, str, str]]:
    """Yield what is computed, how, and the result; every figure follows from those before and from the input files."""
    found = plan(*LARGE)
    yield from servers_of(found.estimate)
    yield from trainers_of(found.estimate)
    price = 24 * 61.99 + 4 * 29.98
    yield "price", "24 x 61.99 + 4 x 29.98", f"{price:,.2f} $/h"
    assert found.price_per_hour == pytest.approx(price)
    saved = 781.25e9 * JOB.tables[0].saved_row_bytes
    yield "a full save", f"{saved / 1e12:.0f} TB / 25 GB/s", f"{saved / 25e9 / 3600:.1f} h, while training continues"
    assert found.estimate.upkeep.save_seconds == pytest.approx(saved / 25e9, rel=1e-3)


def servers_of(found: Estimate) -> Iterator[tuple[str, str, str]]:
    """Yield how many machines the rows need."""
    (load,), (servers, _) = JOB.tables, found.layout.pools
    machine, rows = servers.machine, load.rows
    yield "rows", "10^14 parameters / 128", f"{10**14 // 128:,}"
    assert rows == 10**14 // 128
    yield "bytes of a row", "128 x 2 in float16 + 4 of row-wise Adagrad + 24", f"{128 * 2 + 4 + 24}"
    assert load.row_bytes == 128 * 2 + 4 + 24
    all_rows = rows * 284
    yield "all rows", f"{rows:,} x 284", f"{all_rows / 1e12:.1f} TB"
    pods = 0.92 * machine.memory_gib - 2
    yield "memory for pods", "0.92 x 11,776 GiB - 2", f"{pods:,.0f} GiB"
    usable = 0.8 * pods
    yield "of it 80 %, 20 % head room", f"0.8 x {pods:,.0f} GiB", f"{usable:,.0f} GiB = {usable * 2**30 / 1e12:.2f} TB"
    fewest = all_rows / (usable * 2**30)
    yield (
        "machines for rows",
        f"{all_rows / 1e12:.1f} / {usable * 2**30 / 1e12:.2f}",
        f"{fewest:.1f}: {math.ceil(fewest)}",
    )
    assert servers.num_machines == math.ceil(fewest) == 24
    number = found.layout.count("server")
    yield "servers", f"{servers.servers} on each machine, so that one thread of each suffices (below)", f"{number}"
    share = math.ceil(65536 / number) * all_rows / 65536
    yield (
        "rows of a server",
        f"{math.ceil(65536 / number):,} of 65,536 buckets",
        f"{share / 1e12:.2f} TB; `rows` in the job file {found.requests['server'].rows_mib / 2**20:.2f} TiB",
    )
    assert share == pytest.approx(0.8 * found.requests["server"].rows_mib * 2**20, rel=1e-5)


def trainers_of(found: Estimate) -> Iterator[tuple[str, str, str]]:
    """Yield how many trainers the rate needs."""
    costs, training, (load,) = DEFAULTS, JOB.training, JOB.tables
    number, trainers, batch = found.layout.count("server"), found.layout.pool_of("trainer"), training.batch_size
    batches = training.samples_per_second / batch
    yield "batches", "1,920,000 / 4,096", f"{batches:.1f} a second"
    unique = load.unique_ids(batch)
    yield "ids of a batch", "26 x 4,096; different ones by Zipf's law", f"{26 * batch:,}; {unique:,.0f}"
    request, reply = unique * (8 + 256), unique * 256
    yield "requests and replies", f"{unique:,.0f} x (8 + 256 + 256) bytes", f"{(request + reply) / 1e6:.1f} MB"
    assert found.demand.requests + found.demand.replies == pytest.approx(request + reply)
    encrypted = costs.key_byte * (request + reply)
    yield "their encryption", f"{(request + reply) / 1e6:.1f} MB x 0.83 ns", f"{1e3 * encrypted:.1f} ms"
    thread = costs.client.step + (number - 1) * costs.call + encrypted
    parts = f"1.9 ms + {number - 1} x 0.44 ms + {1e3 * encrypted:.1f} ms"
    yield "Python thread of a trainer, for a batch", parts, f"{1e3 * thread:.1f} ms"
    each = 0.7 / thread
    yield "a trainer at 70 %", f"0.7 / {1e3 * thread:.1f} ms", f"{each:.2f} batches a second"
    needed = batches / each
    yield "trainers: **this bounds the plan**", f"{batches:.1f} / {each:.2f}", f"{needed:.1f}: {math.ceil(needed)}"
    assert found.layout.count("trainer") == math.ceil(needed) == 8 * trainers.num_machines
    assert found.bounds[0].name == "Python thread of each trainer"
    yield "machines for trainers", f"{math.ceil(needed)} / 8 GPUs", f"{trainers.num_machines} x {trainers.machine.name}"
    server = costs.server.step + encrypted / number
    permits = 0.7 / server
    parts = f"0.7 / (0.9 ms + {1e3 * encrypted:.1f} ms / {number})"
    yield "network thread of a server", parts, f"{permits:.0f} batches a second"
    assert bound(found, "network thread") == pytest.approx(permits * batch) and permits > batches
    gpu = 3 * training.dense_flops * batch / 30e12
    permits = 32 / gpu
    yield "GPUs", "32 x 30 TFLOP/s / (3 x 24 MFLOP x 4,096)", f"{permits:,.0f} batches a second"
    assert bound(found, "GPUs") == pytest.approx(permits * batch)
    ring = 2 * 31 / 32 * 4 * training.dense_parameters
    rate = batches / 32 * ring
    yield (
        "all-reduce of a machine",
        f"2 x 31/32 x 48 MB, {batches / 32:.1f} times a second",
        f"{rate / 1e9:.2f} GB/s of 12.5",
    )
    assert found.demand.reduced == pytest.approx(ring)


def bound(found: Estimate, name: str) -> float:
    return next(each.samples_per_second for each in found.bounds if each.name.startswith(name))


def layouts() -> Iterator[list[str]]:
    """Yield machines, price, price on demand, rate and bound of other layouts."""
    listed = plan().prices
    kinds = {each.name: each for each in listed.machines}
    paper = Layout(
        pools=(
            Pool(machine=kinds["m2-ultramem-416"], num_machines=30, servers=4),
            Pool(machine=kinds["c2-standard-30"], num_machines=100, workers=1),
            Pool(machine=kinds["a2-highgpu-8g"], num_machines=8, trainers=8),
        )
    )
    yield ["the paper's", *described(paper), "1.92 million", "not known"]
    for name, changes in (("the plan", ()), ("large servers", LARGE), ("no GPUs", WITHOUT_GPUS)):
        found = plan(*changes).estimate
        rate = f"{found.samples_per_second / 1e6:.2f} million"
        yield [name, *described(found.layout), rate, found.bounds[0].name]


def described(layout: Layout) -> list[str]:
    machines = " + ".join(f"{pool.num_machines} x {pool.machine.name}" for pool in layout.pools)
    on_demand = sum(pool.price_per_hour / SUSTAINED[pool.machine.name[:2]] for pool in layout.pools)
    return [machines, f"{layout.price_per_hour:,.2f}", f"{on_demand:,.0f}"]


def test_the_arithmetic() -> None:
    lines = [f"| {' | '.join(line)} |" for line in steps()]
    assert "\n".join(lines) in PAGE


@pytest.mark.parametrize("model", ["paper", "clicks"])
def test_the_figures_of_the_page_on_kubernetes(model: str) -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("|") and f"`{model}.toml`" in line]
    planned = plan()
    if model != "paper":
        planned = make_plan(read_description(ROOT / f"examples/planning/{model}.toml"), planned.prices, DEFAULTS)
    text = "\n".join(lines_of(planned, ["train.py"]))
    for figure in (
        r"for \S+: (\S+ samples/s) requested",
        r"\nsum +(.*?) of rows",
        r"\nservers +\d+ +(\d+ x \S+)",
        r"\nservers .*?  ([\d.]+ [GT]B) ",
        r"\nbound by (.*?):",
        r"\nsaves .*? in (.*?) \(",
        r"\nprice +(.* for a billion samples)",
    ):
        match = re.search(figure, text)
        assert match is not None and match[1] in row, figure


def test_the_layouts() -> None:
    lines = [f"| {' | '.join(line)} |" for line in layouts()]
    assert "\n".join(lines) in PAGE


def test_the_conclusions() -> None:
    text = " ".join(PAGE.split())
    found, trainers = plan(*LARGE), plan(*LARGE).estimate.layout.pool_of("trainer")
    without = plan(*WITHOUT_GPUS).estimate.layout.pool_of("trainer")
    assert trainers.machine.gpus and not without.machine.gpus
    costs = f"{trainers.price_per_hour:.0f} $/h for trainers on GPUs and {without.price_per_hour:.0f} on CPUs"
    assert (
        f"{1 - trainers.price_per_hour / found.price_per_hour:.0%}".replace("%", " %") + " of the plan's price" in text
    )
    assert costs in text
    seventh = JOB.training.samples_per_second / bound(found.estimate, "GPUs")
    assert seventh == pytest.approx(1 / 7, rel=0.02)
    listed = found.prices
    larger, smaller = (replace(JOB, training=replace(JOB.training, batch_size=size)) for size in (8192, 2048))
    other = make_plan(larger, listed, DEFAULTS)
    assert other.meets
    assert f"with 8,192 samples three machines with GPUs suffice ({other.price_per_hour:,.2f} $/h)" in text
    # To find the fastest layout instead would take most of the time of this file.
    assert not _Search(smaller, listed, DEFAULTS, needs_servers=False).candidates(JOB.training.samples_per_second)


def test_the_bytes_of_rows() -> None:
    """On machines of the paper's types, of which there are enough."""
    listed = plan(*LARGE).prices
    kinds = {each.name: each for each in listed.machines}
    listed = replace(listed, machines=(replace(kinds["m2-ultramem-416"], available=100), kinds["a2-highgpu-8g"]))
    for dtype, optimizer in itertools.product(("float16", "float32"), ("RowWiseAdagrad", "Adagrad")):
        changes = [f"tables.ids.dtype={dtype}", f"tables.ids.optimizer={optimizer}"]
        job = read_description(ROOT / "examples/planning/paper.toml", changes)
        servers = make_plan(job, listed, DEFAULTS).estimate.layout.pool_of("server")
        name = {"RowWiseAdagrad": "row-wise Adagrad"}.get(optimizer, optimizer)
        size = f"{job.tables[0].row_bytes:,} | {job.bytes / 1e12:.0f} TB | {servers.num_machines}"
        assert f"| {dtype} | {name} | {size} |" in PAGE
