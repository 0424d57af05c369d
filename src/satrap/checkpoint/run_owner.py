"""Which process saves into the folder of a run: an object of its own there, read again before a checkpoint counts.

Object stores have no locks. So a process writes its name before it writes anything else, with the name of the
checkpoint to come, and looks before that is published whether its own is still there.
"""

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, field
from typing import Self

from satrap.errors import CheckpointError

OWNER = ".owner.json"
_FORMAT = "satrap-run-owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOwner:
    """See the file's docstring."""

    writer: str = field(default_factory=lambda: secrets.token_hex(16))
    """32 hex digits drawn at random by each process that saves."""
    host: str = field(default_factory=socket.gethostname)
    """The name of its machine."""
    pid: int = field(default_factory=os.getpid)
    """The process there."""
    announced: str | None = None
    """The name of the checkpoint that it writes, or wrote last."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (writer {self.writer[:8]})"

    def to_json(self) -> bytes:
        """Returns the object's content."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self | None:
        """Reads what `to_json` wrote, less fields that a later Satrap adds. None: its writing was cut short."""
        try:
            content = json.loads(data)
        except ValueError:
            return None
        try:
            if content["format"] != _FORMAT:
                raise ValueError(f"format is {content['format']!r}")
            return cls(**{name: content[name] for name in ("writer", "host", "pid", "announced")})
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{where} cannot be read ({error}); wanted which process saves into this folder: remove it if none does"
            ) from error
