"""The first frame of every message: 64 bytes, packed and unpacked with every field checked. Knows no socket.

    offset  size  field
         0     4  magic, b"STRP"
         4     1  version, 1
         5     1  kind: 1 request, 2 reply, 3 error, 4 busy (ask again later), 5 working (the call is known and open)
         6     2  number of frames that follow
         8     8  method: which one, see methods.py
        16     8  client: drawn at random by each connection of a client
        24     8  call: number of the call, counted by that connection; a request that is sent again keeps it
        32     8  bytes in the frames that follow
        40     4  milliseconds that the caller still waits, at least 1 in a request
        44    16  origin: attempt, trainer, step, map version, 4 bytes each
        60     4  zero

All numbers are little-endian and unsigned. (client, call) names a call wherever it is counted or compared.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from satrap.config.validation import check_integer
from satrap.errors import InputError, RpcError

HEADER_BYTES = 64
MAX_FRAMES = 0xFFFF
MAX_DEADLINE_MS = 0xFFFFFFFF
_MAGIC = b"STRP"
_VERSION = 1
_LAYOUT = struct.Struct("<4sBBHQQQQIIIIII")
assert _LAYOUT.size == HEADER_BYTES


class Kind(IntEnum):
    """What a message is."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    BUSY = 4
    WORKING = 5


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Who calls, and for what: a first parameter of this type travels in the header. Each field is a uint32."""

    attempt: int = 0
    """How often the job was started again."""
    trainer: int = 0
    """The trainer's rank."""
    step: int = 0
    """The batch number."""
    map_version: int = 0
    """Of the map that says which server owns which bucket."""

    def __post_init__(self) -> None:
        for name in ("attempt", "trainer", "step", "map_version"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= 0xFFFFFFFF:  # in the path of every call
                object.__setattr__(self, name, check_integer("Origin", name, value, 0, 0xFFFFFFFF, InputError))


NO_ORIGIN = Origin()


@dataclass(kw_only=True, slots=True)
class Header:
    """See the file's docstring."""

    kind: Kind
    method: int
    client: int
    call: int
    num_frames: int = 0
    body_bytes: int = 0
    deadline_ms: int = 0
    origin: Origin = NO_ORIGIN

    def pack(self) -> bytes:
        origin = self.origin
        return _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            self.num_frames,
            self.method,
            self.client,
            self.call,
            self.body_bytes,
            self.deadline_ms,
            origin.attempt,
            origin.trainer,
            origin.step,
            origin.map_version,
            0,
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "Header":
        """Raises RpcError for anything that `pack` could not have written."""
        if len(data) != HEADER_BYTES:
            raise RpcError(f"a message begins with a frame of {len(data)} bytes; wanted a header of {HEADER_BYTES}")
        magic, version, kind, num_frames, *numbers, deadline_ms, attempt, trainer, step, map_version, zero = (
            _LAYOUT.unpack(data)
        )
        if magic != _MAGIC:
            raise RpcError(f"a header begins with {magic!r}; wanted {_MAGIC!r}: the peer is not Satrap")
        if version != _VERSION:
            raise RpcError(f"a header of version {version}; wanted {_VERSION}: run one release of Satrap everywhere")
        if kind not in _KINDS:
            raise RpcError(f"a header of kind {kind}; wanted one of {', '.join(f'{k} ({k.name})' for k in Kind)}")
        if zero:
            raise RpcError(f"a header whose reserved bytes are {zero:#010x}; wanted zeros")
        if kind == Kind.REQUEST and not deadline_ms:
            raise RpcError("a request that nobody waits for: 0 ms are left")
        method, client, call, body_bytes = numbers
        return cls(
            kind=_KINDS[kind],
            method=method,
            client=client,
            call=call,
            num_frames=num_frames,
            body_bytes=body_bytes,
            deadline_ms=deadline_ms,
            origin=Origin(attempt=attempt, trainer=trainer, step=step, map_version=map_version)
            if attempt or trainer or step or map_version
            else NO_ORIGIN,
        )

    def check_frames(self, sizes: list[int]) -> None:
        """The frames that came are those that the header speaks of, or RpcError."""
        if len(sizes) != self.num_frames or sum(sizes) != self.body_bytes:
            raise RpcError(
                f"a message of {len(sizes)} frames and {sum(sizes)} bytes; its header says {self.num_frames} and "
                f"{self.body_bytes}"
            )
