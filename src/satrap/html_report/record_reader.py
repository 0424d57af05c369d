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
from satrap.html_report.run_records import MAPS, NUMBERS, Loop, Record, RunRecords
from satrap.monitor.record_file import FOLDER, RecordCounts, scan_records

_TRAINER = re.compile(r"trainer-(\d{1,9})")
_OF_TRAINERS = {
    "start": ("id", "at"),
    "interval": ("id", "at", "seconds", "trained", "step", "steps", "samples", "rate"),
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
        try:
            if match is None:
                run.events = list(_whole(path, _OF_RUN, counts))
            else:
                has_tables = any("rows" in line or "bytes" in line for line in run.intervals)
                run.loops += _loops(int(match[1]), _whole(path, _OF_TRAINERS, counts), keeps_tables=not has_tables)
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
        loops = [loop for loop in run.loops if loop.began_at >= start]
        if any(loop.intervals and loop.intervals[0]["first_step"] <= 1 for loop in loops):
            run.loops, run.num_earlier = loops, number
            run.events = [event for event in run.events if event["at"] >= start]
            return


def _loops(rank: int, lines: Iterable[Record], *, keeps_tables: bool) -> list[Loop]:
    """Return the loops of one trainer. keeps_tables: whether to keep the rows and bytes of each table, of which one
    trainer's are enough."""
    loops: dict[str, Loop] = {}
    for line in lines:
        loop = loops.setdefault(line["id"], Loop(rank=rank))
        if line["kind"] == "start":
            loop.start = line
        elif line["kind"] == "end":
            loop.end = line
        elif line["kind"] == "evaluation":
            loop.evaluations.append(line)
        else:
            line["first_step"] = line["step"] - line["steps"] + 1
            if loop.intervals and "learning_rates" in loop.intervals[-1]:  # recorded when they change
                line.setdefault("learning_rates", loop.intervals[-1]["learning_rates"])
            for key in () if keeps_tables else ("rows", "bytes"):
                line.pop(key, None)
            loop.intervals.append(line)
    processes: dict[str, int] = {}
    for loop in loops.values():
        process = processes.setdefault(str(loop.start.get("process")), len(processes))
        loop.launch = loop.start.get("launch") or process + 1
    return list(loops.values())


def _whole(path: Path, kinds: Mapping[str, tuple[str, ...]], counts: RecordCounts) -> Iterator[Record]:
    """Yield the records of these kinds that have what they must have, and count the others as damaged."""
    for line in scan_records(path, counts):
        if line["kind"] not in kinds:
            continue
        record = {sys.intern(key): value for key, value in line.items() if value is not None or key in NUMBERS}
        is_complete = all(name in record for name in kinds[line["kind"]])
        if is_complete and all(check(record[name]) for name, check in _CHECKS.items() if name in record):
            yield record | {key: {sys.intern(k): v for k, v in record[key].items()} for key in MAPS if key in record}
        else:
            counts.damaged += 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_number_or_null(value: object) -> bool:
    return value is None or _is_number(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(NUMBERS, _is_number_or_null),
    **dict.fromkeys(("at", "seconds", "trained"), lambda value: _is_number(value) and 0 <= value < 1e11),
    "rate": _is_number,
    **dict.fromkeys(("step", "steps", "samples", "launch", "servers", "status"), _is_count),
    **dict.fromkeys((*MAPS, "stages", "lost"), _is_map),
    **dict.fromkeys(("id", "best_by"), lambda value: isinstance(value, str)),
    "settings": lambda value: isinstance(value, dict),
    "is_best": lambda value: isinstance(value, bool),
    "epochs": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "metrics": lambda value: isinstance(value, dict) and all(map(_is_number_or_null, value.values())),
    "staleness": lambda value: _is_map(value) and all(key.isdecimal() and len(key) < 10 for key in value),
}
"""Checks of the values of records, by name."""
