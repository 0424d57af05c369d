"""The durable state of a run, in its file run.json: the addresses of its processes and the number of its launches.

The file is on disk before its content takes effect. So after a supervisor was killed, the next one starts a later
launch and knows which files in shared memory are left over.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from satrap.config.durable import opened, parse_json, replace_file, try_lock
from satrap.config.regular_file import MAX_JSON_BYTES, read_regular
from satrap.config.validation import Serializable, check_integer, set_field
from satrap.errors import ConfigError
from satrap.run_context import MAX_LAUNCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(Serializable):
    """The addresses and the launch of a run."""

    name: str
    """Name of the run, in the names of its files in shared memory."""
    launch: int = 0
    """Number of launches so far, including those of earlier runs in the same folder."""
    first_launch: int = 1
    """The first launch of this run."""
    servers: tuple[str, ...] = ()
    """Addresses of the servers, in the order that trainers know; "" if not known yet."""
    workers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_integer("RunState", "launch", self.launch, 0, MAX_LAUNCHES)
        check_integer("RunState", "first_launch", self.first_launch, 1, MAX_LAUNCHES + 1)
        set_field(self, "servers", tuple(self.servers))
        set_field(self, "workers", tuple(self.workers))
        if not (isinstance(self.name, str) and self.name.isalnum()):
            raise ConfigError(f"RunState: name is {self.name!r}; expected letters and digits")

    def write(self, path: Path) -> None:
        """Replace the file atomically; it is on disk when this returns."""
        try:
            replace_file(path, json.dumps(self.to_dict(), indent=1).encode())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}), and no launch can start without it; free some disk "
                "space, or choose another folder with --folder"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the state in the file; None if there is no file."""
        try:
            return cls.from_dict(parse_json(read_regular(path, MAX_JSON_BYTES)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, ConfigError) as error:
            raise ConfigError(
                f"{path} is not the state of a run ({error}); remove it, or choose another folder with --folder"
            ) from error


def is_live(folder: Path) -> bool | None:
    """Return whether a run uses the folder; None on a file system without locks, where that is not known.
    ConfigError if none ever did."""
    if not (folder / "run.json").exists():
        raise ConfigError(f"there is no run in {str(folder)!r}; expected the --folder of a live run")
    with opened(folder) as file:  # a live run holds the lock of `satrap.launch.run_loop.lock_run_folder`
        try:
            return not try_lock(file, shared=True)
        except OSError:
            return None
