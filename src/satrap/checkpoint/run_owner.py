"""The owner of a run's folder: the process that saves into it, recorded in an object that is checked before each
publish.

Object stores have no locks. So a process writes its identity, and the name of its next checkpoint, before it writes
anything else, and checks before publishing the checkpoint that its identity is still there.
"""

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, field
from typing import Self

from satrap.config.durable import parse_json
from satrap.errors import CheckpointError

OWNER = ".owner.json"
_FORMAT = "satrap-run-owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOwner:
    """The process that saves into the folder of a run."""

    writer: str = field(default_factory=lambda: secrets.token_hex(16))
    """32 hex digits that each saving process draws at random."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    """Its process id on that host."""
    announced: str | None = None
    """The name of the checkpoint that it is writing, or wrote last."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (writer {self.writer[:8]})"

    def to_json(self) -> bytes:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self | None:
        """Parse what `to_json` wrote, ignoring fields of later releases; return None if the write was cut short."""
        try:
            content = parse_json(data)
        except ValueError:
            return None
        try:
            if content["format"] != _FORMAT:
                raise ValueError(f"format is {content['format']!r}")
            writer, host, pid, announced = (content[name] for name in ("writer", "host", "pid", "announced"))
            if not (isinstance(writer, str) and isinstance(host, str) and isinstance(announced, str | None)):
                raise TypeError("writer, host and announced are no text")
            return cls(writer=writer, host=host, pid=int(pid), announced=announced)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{where} cannot be read ({error}); expected the process that saves into this folder: remove the file "
                "if there is none"
            ) from error
