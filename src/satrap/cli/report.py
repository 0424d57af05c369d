"""`satrap report`: reads the records of a run and writes its page."""

import time
from pathlib import Path

from satrap.byte_sizes import format_bytes
from satrap.config.durable import replace_file
from satrap.errors import ConfigError
from satrap.html_report.page import page
from satrap.html_report.run_records import read_run
from satrap.launch.run_state import is_live


def write_report(folder: Path, output: Path | None) -> str:
    """Write the page about the run in this folder, and return what to print."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}; expected the folder of a run")
    run = read_run(folder, is_live(folder) if (folder / "run.json").is_file() else None)
    content = page(run, time.time()).encode()
    path = folder / "report.html" if output is None else output
    try:
        replace_file(path, content)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror}); choose another file with --output"
        ) from error
    damaged = sum(run.damaged.values())
    warning = f"; {damaged} damaged line(s) of its records were left out" if damaged else ""
    return f"report: {path.resolve()} ({format_bytes(len(content))}{warning})"
