"""Who belongs to a run, and which launch of its trainers this is: a value, and the file that it is kept in.

The file is on disk before anything is done that it says, so that a supervisor that was killed is followed by one that
begins a later launch, and that knows which rows in shared memory are left over.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from satrap.config.validation import check_integer, known_keys, set_field
from satrap.errors import ConfigError
from satrap.run_context import MOST_LAUNCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """See the file's docstring."""

    name: str
    """Of the run: what its files in shared memory are called."""
    launch: int = 0
    """How often trainers were started."""
    first_launch: int = 1
    """Of this run; those before it were of earlier ones in its folder."""
    servers: tuple[str, ...] = ()
    """Their addresses, in the order that trainers know; empty: not known yet."""
    workers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_integer("RunState", "launch", self.launch, 0, MOST_LAUNCHES)
        check_integer("RunState", "first_launch", self.first_launch, 1, MOST_LAUNCHES + 1)
        set_field(self, "servers", tuple(self.servers))
        set_field(self, "workers", tuple(self.workers))
        if not (isinstance(self.name, str) and self.name.isalnum()):
            raise ConfigError(f"RunState: name is {self.name!r}; wanted letters and digits")

    def next_launch(self) -> Self:
        """With the trainers started once more."""
        return replace(self, launch=self.launch + 1)

    def write(self, path: Path) -> None:
        """Into the file, whole or not at all, on disk when this returns."""
        new = path.with_name(f".{path.name}.new")
        try:
            with open(new, "w") as file:
                json.dump(asdict(self), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}), and no launch begins without it: make room, or name "
                "another --folder"
            ) from error

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """What the file says; None if there is none."""
        try:
            data: Any = json.loads(path.read_bytes())
            return cls(**known_keys(cls, "RunState", data))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} is no run's ({error}); name another folder, or remove it") from error
