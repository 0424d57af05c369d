"""`satrap deploy`: reads job files and writes their manifests."""

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from satrap.deploy.job_file import parse_job
from satrap.deploy.render import MARK, manifests
from satrap.errors import ConfigError


def render(options: argparse.Namespace) -> Iterator[str]:
    """Write the manifests, and return the lines to print."""
    job = parse_job([(str(path), _read(path)) for path in options.job], options.changes)
    files = manifests(job, options.target)
    for path in _write(files, options.output):
        yield f"{path}: written"
    for path in _remove_others(files, options.output):
        yield f"{path}: removed; an earlier rendering wrote it, and this one has no such file"
    yield f"start the run with: kubectl apply -k {options.output}"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job file cannot be read: {error}; expected the path of a TOML file") from None


def _write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write the files and return their paths; nothing if that would replace a file that was not rendered."""
    paths = [folder / name for name in files]
    try:
        for path in paths:
            if os.path.lexists(path) and not path.read_text().startswith(MARK):
                raise ConfigError(
                    f"{path} exists and was not rendered, or its first line was changed; choose another --output, or "
                    "move the file"
                )
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            path.write_text(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"manifests cannot be written to {folder}: {error}; choose another --output") from None
    return paths


def _remove_others(files: Mapping[str, str], folder: Path) -> Iterator[Path]:
    """Remove the files of an earlier rendering, such as one for the other target, and yield their paths."""
    for path in sorted(folder.glob("*.yaml")):
        if path.name not in files and path.read_bytes().startswith(MARK.encode()):
            path.unlink()
            yield path
