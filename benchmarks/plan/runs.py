"""One run of the job, and its prediction by coefficients that were measured in the same command."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.clock import noise_between, read_cpu
from benchmarks.plan import job as script
from satrap.data.synthetic import Clicks
from satrap.planning.calibration import calibrate
from satrap.planning.coefficients import Coefficients
from satrap.planning.estimate import Estimate
from satrap.planning.input_files import memory_row_bytes, read_coefficients, write_coefficients
from satrap.planning.machines import Layout, Limits, MachineType, Pool
from satrap.planning.workload import TableLoad, Training, Workload
from satrap.table.snapshot.writer import row_bytes

SAMPLES = 1 << 16  # in the file, which is read again and again
FREE = Limits(memory=1.0, cores=1.0, network=1.0, round_trip_ms=0.0)
TIMEOUT_SECONDS = 1500
PROCESSES = {"local": (0, 1), "servers": (2, 1), "trainers": (2, 2)}
"""Servers and trainers of each kind."""


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return predictions over measurements, and both."""
    folder = Path(job["data"])
    clicks = Clicks(num_samples=SAMPLES, cardinalities=job["rows"])
    costs, path = coefficients(folder), data(folder, clicks)
    before = read_cpu()
    measured = run(job, path)
    noise = noise_between(before, read_cpu())
    predicted = predict(job, path, clicks, costs, measured["rows"])
    samples = measured["samples"]
    cpu, rate = measured["cpu_seconds"] / samples, samples / measured["seconds"]
    figures = {
        "cpu": round(predicted["cpu_seconds"] / cpu, 3),
        "rate": round(predicted["samples_per_s"] / rate, 3),
        "memory": round(predicted["row_bytes"] / measured["row_bytes"], 3),
        "cpu_us": round(1e6 * cpu, 3),
        "samples_per_s": round(rate),
        "row_bytes": round(measured["row_bytes"], 1),
    }
    return {"streams": {f"{job['kind']}:run": {**figures, **noise}}}


def coefficients(folder: Path) -> Coefficients:
    """Return the coefficients of this machine, which the first run measures."""
    path = folder / "coefficients.json"
    if not path.exists():
        write_coefficients(path, calibrate(lambda name: print(f"measuring {name}", file=sys.stderr)))
    return read_coefficients(path)


def data(folder: Path, clicks: Clicks) -> Path:
    """Return the path of the samples in Criteo's format."""
    path = folder / f"clicks-{sum(clicks.cardinalities)}.txt"  # type: ignore[arg-type]  # it is a tuple by now
    if not path.exists():
        clicks.write_criteo(path)
    return path


def run(job: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Run the job, and return what it measured."""
    servers, trainers = PROCESSES[job["kind"]]
    with TemporaryDirectory(prefix="satrap-bench-") as folder:
        out = Path(folder) / "measured.json"
        keys = {name: job[name] for name in ("dim", "num_warmup", "num_steps")}
        (staleness,) = job["stalenesses"]
        argument = json.dumps({**keys, "staleness": staleness, "path": str(path), "out": str(out)})
        command = [sys.executable, script.__file__, argument]
        if servers:
            counts = ["--servers", str(servers), "--trainers", str(trainers), "--folder", f"{folder}/run"]
            command = [sys.executable, "-m", "satrap", "run", script.__file__, *counts, "--", argument]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=TIMEOUT_SECONDS)
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def predict(
    job: Mapping[str, Any], path: Path, clicks: Clicks, costs: Coefficients, rows: Mapping[str, int]
) -> dict[str, float]:
    """Return what the planner expects of this machine."""
    servers, trainers = PROCESSES[job["kind"]]
    here = MachineType(
        name="here", cores=len(os.sched_getaffinity(0)), memory_gib=1024.0, network_gbit=100.0, price_per_hour=0.0
    )
    pool = Pool(machine=here, num_machines=1, servers=servers, trainers=trainers)
    workload = workload_of(job, path.stat().st_size / SAMPLES, clicks)
    estimate = Estimate(workload=workload, layout=Layout(pools=(pool,)), costs=costs, limits=FREE)
    held = {load.table.name: load.row_bytes for load in workload.tables}
    return {
        "cpu_seconds": sum(estimate.core_seconds(pool).values()) / script.BATCH,
        "samples_per_s": estimate.samples_per_second,
        "row_bytes": sum(count * held[name] for name, count in rows.items()) / sum(rows.values()),
    }


def workload_of(job: Mapping[str, Any], line_bytes: float, clicks: Clicks) -> Workload:
    """Return the job as the planner sees it: its declarations, not what its steps have."""
    dim = job["dim"]
    ids: Any = clicks.cardinalities
    loads = tuple(
        TableLoad(
            table=table,
            rows=count,
            row_bytes=memory_row_bytes(table, count),
            saved_row_bytes=row_bytes(table),
            zipf=clicks.zipf,
        )
        for table, count in zip(script.tables_of(dim).values(), ids, strict=True)
    )
    sizes = (script.NUM_DENSE + script.NUM_FEATURES * dim, *script.HIDDEN, 1)
    training = Training(
        samples_per_second=1.0,
        batch_size=script.BATCH,
        dense_flops=float(sum(2 * before * after for before, after in pairwise(sizes))),
        dense_parameters=sum(before * after + after for before, after in pairwise(sizes)),
        dense_features=script.NUM_DENSE + 1,
        staleness=job["stalenesses"][0],
        read_bytes_per_sample=line_bytes,
    )
    return Workload(name="benchmark", tables=loads, training=training)
