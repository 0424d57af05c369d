"""What bounds a step: the bytes, ids and products of a sample, over what the device and the host can do. Pure.

Counted are the bytes that the kernels must move, and for the dense network six passes over each activation: written
once and read twice, and so is its gradient. Fused kernels move less, and caches hide some, so a limit is an estimate of
what is possible and no promise. `python -m benchmarks.gpu.roofline FILE` prints the tables of
docs/internals/004-device.md, that of hashed tables from the records of `benchmarks.store --case resolve` in a file.
Those of tables with `num_rows` need no record: the host does nothing for an id. Of these, each call of torch is taken
to read its operands from memory and to write its result there, though most lists of a batch would fit the cache.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.devices import LARGE, SHEETS, DataSheet
from benchmarks.workload import NUM_DENSE, NUM_FEATURES, row_numbers

BOTTOM, TOP = (512, 256), (1024, 1024, 512, 256, 1)
"""The widths of the small DLRM's layers, but for the dim between them."""
CLASS = "H200"
"""The device of the table, by its data sheet."""
WANTED = {"9.1 M samples/s": 9.1e6, "12 M samples/s": 12e6}
FLOAT, PLACE, ID = 4, 4, 8
ACTIVATION_PASSES = 6
PRODUCTS = 3
"""Products of each layer: forward, and the gradients of its input and of its weights."""
CORES = 16
CLASSES = {"H200": CLASS, "H100": "H100 80GB HBM3"}
PLACED = 183 + 14
"""Bytes of an int32 id, until it has a row (`DirectIds.of`) and a frame (`DirectRows._find_frames`)."""
SORTED = ID + FLOAT + 4 * 2 * (FLOAT + ID)
"""Bytes of an id in the sort: its place is written, one pass counts, four passes of 8 bits move row and place."""
GROUPED, GROUPED_ROW = 161 + 36, 2 * ID
"""Bytes of an id, and of a distinct one beside that, for the runs (`RowRuns.of`) and the places of its gradients."""
NOTED, HEADS, SECTOR = 82 + 172, 4 + 3, 32
"""Bytes of an id for the stamps, versions and counters of lookup and update (`DirectHeads`), and how often they read or
write a number of a row: scattered ones, so that each moves a sector."""
STEPPED = 66 + 28
"""Bytes of an id for the frames and flags of the runs (`DirectEngine.step`), and in kernels, for empty runs too."""
KEYED = 560 + ID
"""Bytes of an id of a table in 16 bits, for the key from which its row's rounding is drawn."""
HOST_SECONDS = 0.9e-3
"""Time of one thread for a step with `num_rows`, without that to launch 125 operations: see the log, 2026-11-28."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one sample of the small DLRM takes."""

    rows_bytes: float
    """Moved in the device's memory for its rows: lookup, check of the gradients, update."""
    dense_bytes: float
    """Moved there for the dense network."""
    bus_bytes: float
    """Sent to the device: frames, dense numbers, label, and the runs of the update."""
    flops: float
    ids: int = NUM_FEATURES

    @property
    def memory_bytes(self) -> float:
        """Moved in the device's memory in all."""
        return self.rows_bytes + self.dense_bytes


def sample_of(
    dim: int,
    unique: float,
    *,
    is_half: bool,
    value_bytes: int = FLOAT,
    output_bytes: int = FLOAT,
    is_checked: bool = True,
    moved: float = 0.0,
    num_rows: int = NUM_FEATURES,
) -> Sample:
    """Return what a sample takes. unique: its ids that no other sample of the batch has named before, on average.

    is_half: the dense network computes in 16 bits. value_bytes: of a number of a row. output_bytes: of one that is
    looked up, and of its gradient. is_checked: a pass looks for gradients that are not finite. moved: rows from home.
    """
    row, line = dim * value_bytes, dim * output_bytes
    lookup = num_rows * (row + line + PLACE)
    check = is_checked * num_rows * line
    update = num_rows * (line + PLACE) + unique * (2 * row + 3 * PLACE)
    runs = num_rows * PLACE + unique * (3 * PLACE + (ID if value_bytes < FLOAT else 0))
    moves = moved * 2 * row
    macs, widths = _dense(dim, num_rows)
    number = 2 if is_half else FLOAT
    casts = 2 * num_rows * dim * (output_bytes + number) if is_half else 0
    return Sample(
        rows_bytes=lookup + check + update + moves,
        dense_bytes=ACTIVATION_PASSES * number * widths + casts,
        bus_bytes=num_rows * PLACE + (NUM_DENSE + 1) * FLOAT + runs + moved * row,
        flops=2 * PRODUCTS * macs,
        ids=num_rows,
    )


def direct_parts(
    dim: int, unique: float, *, value_bytes: int = FLOAT, output_bytes: int = FLOAT, num_rows: int = NUM_FEATURES
) -> dict[str, float]:
    """Return the bytes that a sample moves in the device's memory for rows of tables with `num_rows`, by part of the
    step. Gradients that are not finite are skipped in the update, so no pass looks for them."""
    row, line = dim * value_bytes, dim * output_bytes
    keyed = KEYED if value_bytes < FLOAT else 0
    return {
        "ids placed and sorted": num_rows * (PLACED + SORTED),
        "runs": num_rows * (GROUPED + keyed) + unique * GROUPED_ROW,
        "stamps, versions, counters": num_rows * NOTED + unique * HEADS * SECTOR,
        "rows pooled": num_rows * (row + line + PLACE),
        "rows updated": num_rows * (line + PLACE + STEPPED) + unique * 2 * row,
    }


def direct_sample_of(
    dim: int, unique: float, *, is_half: bool, value_bytes: int = FLOAT, output_bytes: int = FLOAT
) -> Sample:
    """Return what a sample takes of tables with `num_rows`: of the host nothing but its share of a step."""
    parts = direct_parts(dim, unique, value_bytes=value_bytes, output_bytes=output_bytes)
    hashed = sample_of(dim, unique, is_half=is_half, output_bytes=output_bytes)
    bus = NUM_FEATURES * FLOAT + (NUM_DENSE + 1) * FLOAT
    return replace(hashed, rows_bytes=sum(parts.values()), bus_bytes=bus, ids=0)


def _dense(dim: int, num_rows: int) -> tuple[int, int]:
    """Return the multiplications of the dense network forward, and the numbers that its layers write."""
    vectors = num_rows + 1
    pairs = vectors * (vectors - 1) // 2
    bottom, top = (NUM_DENSE, *BOTTOM, dim), (dim + pairs, *TOP)
    macs = sum(a * b for sizes in (bottom, top) for a, b in pairwise(sizes))
    return macs + vectors * vectors * dim, sum(bottom[1:]) + sum(top) + vectors * dim


def limits(sample: Sample, rates: Mapping[str, float | None]) -> dict[str, float]:
    """Return the samples/s that each resource permits. rates: bytes/s of memory and bus, ids/s of the host, flops; None
    where it is unknown."""
    needed = {"memory": sample.memory_bytes, "bus": sample.bus_bytes, "host": sample.ids, "flops": sample.flops}
    return {name: rate / needed[name] for name, rate in rates.items() if rate}


def in_turn(limits: Iterable[float]) -> float:
    """Return the samples/s if nothing overlaps: each resource waits for the others."""
    return 1 / sum(1 / limit for limit in limits)


def of_host(resolve: float, update: float) -> float:
    """Return the samples/s that both halves of a step permit, given ids/s of each: a step looks up and updates every id
    of a sample, and the two never overlap."""
    return 1 / (1 / resolve + 1 / update) / NUM_FEATURES


def of_cores(records: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return ids/s of one core for both halves of a step, by distribution: those of the run with most threads, divided
    by these."""
    resolved = sorted((each for each in records if each.get("kind") == "resolve"), key=lambda each: each["num_threads"])
    return {
        each["ids"]: (
            each["rows_per_s"]["resolve"]["median"] / each["num_threads"],
            each["rows_per_s"]["update"]["median"] / each["num_threads"],
        )
        for each in resolved
    }


def table(sheet: DataSheet, cores: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the table of the design note. cores: what one core does, by distribution."""
    uniques = {ids: unique_per_sample(ids) for ids in cores}
    samples = {ids: sample_of(128, unique, is_half=True) for ids, unique in uniques.items()}
    sixteen = {ids: sample_of(128, unique, is_half=True, output_bytes=2) for ids, unique in uniques.items()}
    hosts = {ids: of_host(*rates) for ids, rates in cores.items()}
    limit = {"memory": sheet.memory_bytes_per_s, "bus": sheet.bus_bytes_per_s, "flops": sheet.flops}
    found = {ids: limits(sample, limit) for ids, sample in samples.items()}
    in_16_bits = [limits(sample, limit) for sample in sixteen.values()]
    rows = {
        "distinct ids of a sample in its batch": [f"{unique:.1f}" for unique in uniques.values()],
        "bytes in the device's memory: rows": [f"{sample.rows_bytes:,.0f}" for sample in samples.values()],
        "bytes in the device's memory: dense network": [f"{sample.dense_bytes:,.0f}" for sample in samples.values()],
        "both, with rows and gradients in 16 bits": [f"{sample.memory_bytes:,.0f}" for sample in sixteen.values()],
        "bytes over the bus": [f"{sample.bus_bytes:,.0f}" for sample in samples.values()],
        "MFLOP": [f"{sample.flops / 1e6:.1f}" for sample in samples.values()],
        "ids/s of a core: resolve, update (M)": [f"{a / 1e6:.0f}, {b / 1e6:.0f}" for a, b in cores.values()],
        "**limit** of the memory, M samples/s": [f"{permitted['memory'] / 1e6:.1f}" for permitted in found.values()],
        "of the memory, with rows and gradients in 16 bits": [
            f"{permitted['memory'] / 1e6:.1f}" for permitted in in_16_bits
        ],
        "of the bus": [f"{permitted['bus'] / 1e6:.0f}" for permitted in found.values()],
        "of the products": [f"{permitted['flops'] / 1e6:.0f}" for permitted in found.values()],
        f"of the host, {CORES} cores": [f"{CORES * each / 1e6:.1f}" for each in hosts.values()],
        **{f"cores for {name}": [f"{rate / each:.1f}" for each in hosts.values()] for name, rate in WANTED.items()},
    }
    heads = [f"| a sample | {' | '.join(cores)} |", f"|---|{'---:|' * len(cores)}"]
    return [*heads, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def direct_table(uniques: Mapping[str, float]) -> list[str]:
    """Return the same table for tables with `num_rows`. uniques: distinct ids of a sample, by distribution."""
    samples = [direct_sample_of(128, unique, is_half=True) for unique in uniques.values()]
    sixteen = [direct_sample_of(128, unique, is_half=True, output_bytes=2) for unique in uniques.values()]
    parts = [direct_parts(128, unique) for unique in uniques.values()]
    rows = {f"bytes: {name}": [f"{part[name]:,.0f}" for part in parts] for name in parts[0]}
    rows |= {
        "bytes: dense network": [f"{sample.dense_bytes:,.0f}" for sample in samples],
        "bytes: all": [f"{sample.memory_bytes:,.0f}" for sample in samples],
        "all, with gradients and what is looked up in 16 bits": [f"{sample.memory_bytes:,.0f}" for sample in sixteen],
        "bytes over the bus": [f"{sample.bus_bytes:,.0f}" for sample in samples],
        "**limit** of the host, one thread, M samples/s": [f"{LARGE.samples / HOST_SECONDS / 1e6:.0f}"] * len(samples),
    }
    for name, sheet in ((name, SHEETS[part]) for name, part in CLASSES.items()):
        limit = {"memory": sheet.memory_bytes_per_s, "bus": sheet.bus_bytes_per_s, "flops": sheet.flops}
        permitted = [limits(sample, limit) for sample in samples]
        alone = [in_turn([*rates.values(), LARGE.samples / HOST_SECONDS]) for rates in permitted]
        rows[f"**limit** of the memory, {name}"] = [f"{rates['memory'] / 1e6:.1f}" for rates in permitted]
        rows[f"if nothing overlaps, {name}"] = [f"{rate / 1e6:.1f}" for rate in alone]
        for wanted, rate in WANTED.items():
            shares = [f"{rate / rates['memory']:.0%}" for rates in permitted]
            rows[f"share of the memory's bandwidth for {wanted}, {name}"] = shares
    heads = [f"| a sample, `num_rows` | {' | '.join(uniques)} |", f"|---|{'---:|' * len(uniques)}"]
    return [*heads, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def unique_per_sample(ids: str, rows: int = 33_000_000) -> float:
    """Return the distinct ids of a batch, over its samples."""
    numbers = row_numbers(rows, ids, 1, 0, LARGE.samples)[0]
    return len(set(numbers.tolist())) / LARGE.samples


def main(path: str) -> None:
    """Print both tables, the first from a file of records."""
    records = [json.loads(line) for line in Path(path).read_text().splitlines()]
    cores = of_cores(records)
    print("\n".join([*table(SHEETS[CLASS], cores), "", *direct_table({ids: unique_per_sample(ids) for ids in cores})]))


if __name__ == "__main__":
    main(*sys.argv[1:])
