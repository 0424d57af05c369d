"""`satrap report`: reads the records of a run and writes its page, or one about two runs."""

import time
from pathlib import Path

from satrap.byte_sizes import format_bytes
from satrap.config.durable import replace_file
from satrap.errors import ConfigError
from satrap.html_report.page import page
from satrap.html_report.record_reader import read_run
from satrap.html_report.run_records import RunRecords
from satrap.launch.run_state import is_live


def write_report(folder: Path, output: Path | None, other: Path | None = None) -> str:
    """Write the page about the run in this folder, or about it and another one, and return what to print."""
    runs = [_read(run_folder) for run_folder in (folder, other) if run_folder is not None]
    if other is not None and runs[0].name == runs[1].name:
        runs[0].name, runs[1].name = str(folder), str(other)
        if folder.resolve() == other.resolve():
            raise ConfigError(f"{str(folder)!r} and {str(other)!r} are the same run; name two, or one alone")
    content = page(runs, time.time()).encode()
    path = folder / ("report.html" if other is None else "comparison.html") if output is None else output
    try:
        replace_file(path, content)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror}); choose another file with --output"
        ) from error
    damaged = sum(count for run in runs for count in run.damaged.values())
    warning = f"; {damaged} damaged line(s) of its records were left out" if damaged else ""
    return f"report: {path.resolve()} ({format_bytes(len(content))}{warning})"


def _read(folder: Path) -> RunRecords:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}; expected the folder of a run")
    return read_run(folder, is_live(folder) if (folder / "run.json").is_file() else None)
