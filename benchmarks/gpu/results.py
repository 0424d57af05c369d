"""The folder in which a run of the GPU benchmark leaves its results, complete after each item: whatever ends the run,
what was measured is there.

    results.jsonl   a line for each item: part, item, status ("ok", "failed", "crashed", "left out", "cut"), figures
    summary.txt     the same as a table, written after each part
    errors.txt      what processes that failed printed last
    tests.txt       the output of the device tests
    profile.txt, trace.json.gz   of the part "profile"

Six files at most, each below 16 MiB, in no folder.
"""

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHOWN = (
    ("samples_per_s", "{:,} samples/s"),
    ("range", "{}"),
    ("ms", "{} ms"),
    ("without_column_ms", "{} ms without the column"),
    ("gb_per_s", "{:,} GB/s"),
    ("share_of_copy", "{} of a copy"),
    ("share_of_bus", "{} of the bus"),
    ("share_of_limit", "{} of its limit"),
    ("moved_rows_per_step", "{:,} rows moved a step"),
    ("rows", "{:,} rows"),
    ("copy_gb_per_s", "copy {:,} GB/s"),
    ("bus_gb_per_s", "bus {:,} GB/s"),
    ("device", "{}"),
    ("torch", "torch {}"),
    ("triton", "triton {}"),
    ("cpu", "{}"),
    ("cores", "{} cores"),
    ("counts", "{}"),
    ("note", "{}"),
    ("error", "{}"),
)
"""The figures of a record that the summary has, and how."""
MOST_BYTES = 4 << 20


class Results:
    """Records, in a folder."""

    def __init__(self, folder: Path) -> None:
        """Create the folder; what an earlier run left in it is removed."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "summary.txt", "errors.txt", "tests.txt", "profile.txt", "trace.json.gz"):
            (folder / name).unlink(missing_ok=True)
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, part: str, item: str, record: dict[str, Any]) -> None:
        """Write a record to the disk."""
        line = {"part": part, "item": item, **record}
        with self._lock, (self.folder / "results.jsonl").open("a", encoding="utf-8") as lines:
            self.records.append(line)
            lines.write(json.dumps(line, default=str) + "\n")
            lines.flush()
            os.fsync(lines.fileno())

    def failed(self, part: str | None = None) -> list[dict[str, Any]]:
        """Return the records of what failed, in a part or in any."""
        bad = ("failed", "crashed")
        return [record for record in self.records if record["status"] in bad and part in (None, record["part"])]

    def append(self, name: str, text: str) -> None:
        """Append to a file of text, whose earlier half is dropped where it grows too large."""
        path = self.folder / name
        with self._lock:
            so_far = path.read_text(errors="replace") if path.exists() else ""
            _write(path, (so_far + text)[-MOST_BYTES:])

    def summarise(self, note: str) -> str:
        """Write the summary, and return it."""
        text = "\n".join([*self._summary(), note, ""])
        _write(self.folder / "summary.txt", text)
        return text

    def _summary(self) -> Iterator[str]:
        shown_part = None
        for record in self.records:
            if record["part"] != shown_part:
                shown_part = record["part"]
                yield f"\n{shown_part}"
            figures = [form.format(record[name]) for name, form in SHOWN if record.get(name) is not None]
            if (peer := self._rate_of_torch(record)) is not None:
                figures.append(f"{record['samples_per_s'] / peer:.2f} of torch")
            status = "" if record["status"] == "ok" else f"{record['status'].upper()}: "
            yield f"  {record['item']:<66} {status}{', '.join(figures)}  [{record.get('seconds', 0):.1f} s]"
        yield from ("", f"{len(self.records)} items, {len(self.failed())} failed")
        yield from (f"  {record['part']}: {record['item']}" for record in self.failed())

    def _rate_of_torch(self, record: dict[str, Any]) -> float | None:
        """Return the samples/s of plain torch with the setting of a record; None: there is none."""
        contender, _, setting = record["item"].partition("/")
        if contender not in ("satrap", "satrap_direct") or "samples_per_s" not in record:
            return None
        peer = "torch/" + re.sub(r"staleness \d+", "staleness 0", re.sub(r"^\w+", "float32", setting))
        rates = {each["item"]: each["samples_per_s"] for each in self.records if "samples_per_s" in each}
        return rates.get(peer)


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a cut leaves the old one or the new one."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
