"""Reads what a run recorded.

    records/trainer-N.jsonl, records/run.jsonl ──read_run──> RunRecords ──> satrap.html_report.figures, .summary

Other modules of this package do no I/O. A line that is damaged, or lacks what its kind must have, is left out and
counted. A kind that this release does not know is ignored.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from satrap.errors import ConfigError
from satrap.html_report.run_records import Interval, Loop, RunRecords
from satrap.monitor.record_file import FOLDER, RecordCounts, scan_records

_TRAINER = re.compile(r"trainer-(\d{1,9})")
_NUMBERS = ("loss", "auc", "ne", "window", "memory", "gradient_norm", "device_bytes")
_MAPS = ("logged", "learning_rates", "rows", "bytes", "metrics")
_OF_TRAINERS = {
    "start": ("id", "at"),
    "interval": ("id", *Interval._fields),
    "evaluation": ("id", "at", "step", "metrics"),
    "end": ("id", "at"),
}
"""What a record of a trainer must have, by its kind."""
_OF_RUN = dict.fromkeys(("run", "launch", "servers", "restart", "fault", "exit"), ("at",)) | {"memory": ("at", "bytes")}


def read_run(folder: Path, is_live: bool | None = None) -> RunRecords:
    """Read the records of a run; ConfigError if the folder is not that of a run."""
    records = folder / FOLDER
    if not records.is_dir() and not (folder / "run.json").is_file():
        near = [other for other in (folder.resolve().parent, *sorted(folder.iterdir())) if (other / FOLDER).is_dir()]
        raise ConfigError(
            f"there is no record of a run in {str(folder)!r}; expected the --folder of satrap run, or the folder "
            "that a script gives to satrap.Progress(record=...)" + (f"; did you mean {str(near[0])!r}?" if near else "")
        )
    run = RunRecords(name=folder.resolve().name, is_live=is_live)
    for path in sorted(records.glob("*.jsonl"), key=lambda path: (len(path.name), path.name)):
        match = _TRAINER.fullmatch(path.stem)
        if match is None and path.stem != "run":
            continue
        counts = RecordCounts()
        lines = scan_records(path, counts)
        try:
            if match is None:
                run.events = list(_whole(lines, _OF_RUN, counts))
            else:
                has_tables = any(key in ("rows", "bytes") for loop in run.loops for key, _ in loop.columns)
                run.loops += _loops(int(match[1]), _whole(lines, _OF_TRAINERS, counts), keeps_tables=not has_tables)
        except OSError as error:
            run.unreadable.append(f"{FOLDER}/{path.name} cannot be read ({error.strerror}).")
            continue
        run.missing += counts.missing
        if counts.damaged:
            run.damaged[f"{FOLDER}/{path.name}"] = counts.damaged
    _leave_out_earlier(run)
    return run


def _leave_out_earlier(run: RunRecords) -> None:
    """Keep the records from the start of the last `satrap run` that began at the first step, with those that continued
    it."""
    starts = [event["at"] for event in run.events if event["kind"] == "run"]
    for number, start in reversed(list(enumerate(starts))):
        loops = [loop for loop in run.loops if (loop.began_at or 0.0) >= start]
        if any(loop.intervals and loop.intervals[0].first_step <= 1 for loop in loops):
            run.loops, run.num_earlier = loops, number
            run.events = [event for event in run.events if event["at"] >= start]
            return


def _loops(rank: int, lines: Iterable[dict[str, Any]], *, keeps_tables: bool) -> list[Loop]:
    """Return the loops of one trainer."""
    loops: dict[str, Loop] = {}
    for line in lines:
        loop = loops.setdefault(line["id"], Loop(rank=rank))
        if line["kind"] == "start":
            loop.start = line
        elif line["kind"] == "end":
            loop.end = line
        elif line["kind"] == "evaluation":
            loop.evaluations.append(line)
            _add_columns(loop, line)
        else:
            _add_interval(loop, line if keeps_tables else {**line, "rows": None, "bytes": None})
    processes: dict[str, int] = {}
    for loop in loops.values():
        process = processes.setdefault(str(loop.start.get("process")), len(processes))
        loop.launch = (loop.start.get("launch") or 0, process)
    return list(loops.values())


def _add_interval(loop: Loop, line: dict[str, Any]) -> None:
    interval = Interval(*(line[name] for name in Interval._fields))
    loop.intervals.append(interval)
    if not line.get("learning_rates"):  # recorded when they change
        rates = {name: points[-1][1] for (key, name), points in loop.columns.items() if key == "learning_rates"}
        line["learning_rates"] = rates
    _add_columns(loop, line)
    loop.epochs += line.get("epochs") or []
    loop.staleness.update({int(steps): int(batches) for steps, batches in (line.get("staleness") or {}).items()})
    for stage, mean in (line.get("stages") or {}).items():
        loop.stage_steps[stage] += interval.steps
        loop.stage_seconds[stage] += mean * interval.steps
    loop.lost = line.get("lost") or loop.lost


def _add_columns(loop: Loop, line: Mapping[str, Any]) -> None:
    values = {(key, ""): line[key] for key in _NUMBERS if key in line}
    values |= {(key, sys.intern(name)): y for key in _MAPS for name, y in (line.get(key) or {}).items()}
    for column, value in values.items():
        loop.columns.setdefault(column, []).append((float(line["step"]), value))


def _whole(
    lines: Iterable[dict[str, Any]], kinds: Mapping[str, tuple[str, ...]], counts: RecordCounts
) -> Iterator[dict[str, Any]]:
    """Yield the records of these kinds that have what they must have, and count the others as damaged."""
    for line in lines:
        if line["kind"] not in kinds:
            continue
        is_complete = all(line.get(name) is not None for name in kinds[line["kind"]])
        if is_complete and all(check(line[name]) for name, check in _CHECKS.items() if line.get(name) is not None):
            yield line
        else:
            counts.damaged += 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("at", "seconds", "trained", "rate", *_NUMBERS), _is_number),
    **dict.fromkeys(("step", "steps", "samples", "launch", "servers", "status"), _is_count),
    **dict.fromkeys((*_MAPS, "stages", "lost"), _is_map),
    "id": lambda value: isinstance(value, str),
    "is_best": lambda value: isinstance(value, bool),
    "epochs": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "metrics": lambda value: isinstance(value, dict) and _is_map({k: v for k, v in value.items() if v is not None}),
    "staleness": lambda value: _is_map(value) and all(key.isdecimal() and len(key) < 10 for key in value),
}
"""Checks of the values of records, by name; each value may be null."""
