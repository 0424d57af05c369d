"""Records for tests: reads a file of them, and writes those of a long run with several trainers and launches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from satrap.monitor.record_file import RecordCounts, RecordFile, scan_records

AT = 1_790_000_000.0


@dataclass(slots=True)
class Records(RecordCounts):
    """The content of a file of records."""

    lines: list[dict[str, Any]] = field(default_factory=list)


def read_records(path: Path) -> Records:
    found = Records()
    found.lines = list(scan_records(path, found))
    return found


def write_long_run(folder: Path, *, num_intervals: int = 2000, trainers: int = 2, tables: int = 3) -> None:
    """Write a run of `satrap run` with three launches, faults, evaluations and an end."""
    draw = random.Random(1)
    run = RecordFile.open(folder / "records" / "run.jsonl")
    settings = {"script": "train.py", "arguments": ["--epochs", "3"], "servers": 2, "trainers": trainers}
    run.append("run", at=AT, where="process 7 on here", version="1", settings=settings)
    third = num_intervals // 3
    for launch in (1, 2, 3):
        begin = AT + 5 + (launch - 1) * (third * 30.0 + 60)
        run.append("launch", at=begin - 2, launch=launch, first_launch=1, servers=2)
        for index in range(0, third, 10):
            sizes = {f"server {number}": 1e9 * (1 + number) + 1e6 * index for number in (0, 1)}
            run.append("memory", at=begin + 30.0 * index, bytes=sizes)
        for rank in range(trainers):
            _write_loop(
                folder, draw, rank, launch, begin, (launch - 1) * third * 100 - 2000 * (launch > 1), third, tables
            )
        if launch < 3:
            at = begin + third * 30.0 + 1
            run.append("fault", at=at, what=f"trainer {launch - 1} was killed by signal 9")
            run.append("restart", at=at + 1, process="server 1")
    run.append("exit", at=AT + 3 * third * 30.0 + 200, status=0)
    run.close()


def _write_loop(
    folder: Path, draw: random.Random, rank: int, launch: int, begin: float, first: int, count: int, tables: int
) -> None:
    file = RecordFile.open(folder / "records" / f"trainer-{rank}.jsonl")
    loop = f"{rank}-{launch}"
    names = [f"table_{number}" for number in range(tables)]
    declared = [{"name": name, "dim": 16, "optimizer": {"type": "Adagrad", "lr": 0.05}} for name in names]
    settings: dict[str, Any] = {"rank": rank, "staleness": 4, "tables": declared, "script": {"lr": 0.1 / launch}}
    where = f"process {launch} on here"
    file.append("start", id=loop, at=begin, process=loop, where=where, launch=launch, version="1", settings=settings)
    for index in range(1, count + 1):
        step = first + 100 * index
        rows = {name: int(1e6 * (number + 1) * (1 - math.exp(-step / 5e4))) for number, name in enumerate(names)}
        file.append(
            "interval",
            id=loop,
            at=begin + 30.0 * index,
            seconds=30.0 * index,
            trained=30.0,
            step=step,
            steps=100,
            samples=100 * 4096 * index,
            rate=13_600.0 + draw.gauss(0, 400),
            loss=0.45 + 0.2 * math.exp(-step / 2e4) + draw.gauss(0, 0.004),
            auc=0.80 - 0.2 * math.exp(-step / 2e4) + draw.gauss(0, 0.001),
            ne=0.8,
            window=65_536,
            staleness={"0": 3, "1": 10, "2": 40, "3": 37, "4": 10},
            stages={"read": 0.0012, "lookup": 0.0131, "update": 0.0102, "wait": 0.0002, "dense": 0.27},
            memory=2e9 + 1e5 * index,
            gradient_norm=abs(draw.gauss(2.0, 0.2)),
            learning_rates={"dense": 0.1 / launch, "tables": 0.05},
            logged={"learning rate": 0.1 / launch, "gradient norm": abs(draw.gauss(2.0, 1.0))},
            epochs=[step] if index == count // 2 else [],
            rows=rows,
            bytes={name: 200 * value for name, value in rows.items()},
            lost={"batches/overflow": 2} if launch == 1 else {},
        )
        if index % 100 == 0 or index == count:
            metrics = {"auc": 0.79 - 0.2 * math.exp(-step / 2e4), "log_loss": 0.46 + 0.2 * math.exp(-step / 2e4)}
            values = {"at": begin + 30.0 * index, "seconds": 30.0 * index, "step": step, "took": 1.0}
            file.append("evaluation", id=loop, metrics=metrics, is_best=True, **values)
    if launch == 3:
        file.append("end", id=loop, at=begin + 30.0 * count, seconds=30.0 * count, error=None)
    file.close()
