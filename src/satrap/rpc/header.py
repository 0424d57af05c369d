"""The header of every message: 64 bytes, packed and unpacked with every field checked. Uses no socket.

    offset  size  field
         0     4  magic, b"STRP"
         4     1  version, 2
         5     1  kind: 1 request, 2 reply, 3 error, 4 busy (retry later), 5 working (the call is queued or running)
         6     2  number of frames that follow
         8     8  method: its number, see methods.py
        16     8  client: a random number for each connection of a client
        24     8  call: number of the call on that connection; a request that is sent again keeps it
        32     8  bytes in the frames that follow
        40     4  milliseconds until the deadline, at least 1 in a request
        44    16  origin: attempt, trainer, step, map version, 4 bytes each
        60     4  zero

All numbers are little-endian and unsigned. (client, call) identifies a call.

The header is the first frame of a message, and its frames follow. A small message (`JOINED_BYTES`) is a single frame
instead, because each frame costs both ends as much time as the rest of a small call: the header, the size of each frame
in 4 bytes, and the frames.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from satrap._core import read_header
from satrap.config.validation import check_integer
from satrap.errors import InputError, RpcError

HEADER_BYTES = 64
MAX_FRAMES = 0xFFFF
MAX_DEADLINE_MS = 0xFFFFFFFF
_MAGIC = b"STRP"
_VERSION = 2
JOINED_BYTES = 1 << 15
"""A message of at most so many bytes is sent as one frame. Copying them takes less time than one more frame does."""
_LAYOUT = struct.Struct("<4sBBHQQQQIIIIII")
_DEADLINE, _DEADLINE_AT = struct.Struct("<I"), 40
assert _LAYOUT.size == HEADER_BYTES
Message = list[bytearray | memoryview]
"""The frames of a message as they are sent. The first begins with the header, and can be changed."""


class Kind(IntEnum):
    """The kind of a message."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    BUSY = 4
    WORKING = 5


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The sender of a call and its step. A first parameter of this type travels in the header. Fields are uint32."""

    attempt: int = 0
    """Number of restarts of the job."""
    trainer: int = 0
    """The trainer's rank."""
    step: int = 0
    """The batch number."""
    map_version: int = 0
    """Version of the map of buckets to servers."""

    def __post_init__(self) -> None:
        for name in ("attempt", "trainer", "step", "map_version"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= 0xFFFFFFFF:  # fast path: every call comes here
                object.__setattr__(self, name, check_integer("Origin", name, value, 0, 0xFFFFFFFF, InputError))


NO_ORIGIN = Origin()


@dataclass(kw_only=True, slots=True)
class Header:
    """The header of a message."""

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

    def message(self, frames: Sequence[memoryview]) -> Message:
        """Return the frames of the message as they are sent: the header and these, or all in one if they are small."""
        packed = bytearray(self.pack())
        if not frames or self.body_bytes > JOINED_BYTES:
            return [packed, *frames]
        sizes = struct.pack(f"<{len(frames)}I", *map(len, frames))
        return [bytearray().join((packed, sizes, *frames))]

    def frames_of(self, received: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return the frames of a received message with this header; RpcError unless `message` could have made it."""
        first = received[0]
        if len(first) == HEADER_BYTES:
            frames = received[1:]
        elif len(received) == 1:
            frames = self._split(first)
        else:
            raise RpcError(
                f"a message of {len(received)} frames starts with one of {len(first)} bytes; expected a header of "
                f"{HEADER_BYTES}"
            )
        self.check_frames([len(frame) for frame in frames])
        return frames

    def _split(self, joined: memoryview) -> list[memoryview]:
        begin = HEADER_BYTES + 4 * self.num_frames
        if begin > len(joined):
            raise RpcError(
                f"a message of one frame has {len(joined)} bytes; expected the sizes of the {self.num_frames} frames "
                "that its header declares"
            )
        frames = []
        for size in struct.unpack_from(f"<{self.num_frames}I", joined, HEADER_BYTES):
            frames.append(joined[begin : begin + size])
            begin += size
        if begin != len(joined):
            raise RpcError(f"a message of one frame has {len(joined)} bytes; its sizes add up to {begin}")
        return frames

    @classmethod
    def of_joined(cls, message: bytes) -> "Header | None":
        """Return the header of a message of one frame; None unless `unpack` and `frames_of` would accept it."""
        fields = read_header(message)
        return None if fields is None else _header_of(fields)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "Header":
        """Return the header in the first frame of a message; RpcError unless `pack` could have written it."""
        if len(data) < HEADER_BYTES:
            raise RpcError(f"a message starts with a frame of {len(data)} bytes; expected a header of {HEADER_BYTES}")
        magic, version, kind, num_frames, method, client, call, body_bytes, deadline_ms, *origin, zero = (
            _LAYOUT.unpack_from(data)
        )
        if magic != _MAGIC:
            raise RpcError(f"a header starts with {magic!r}; expected {_MAGIC!r}: the peer is not Satrap")
        if version != _VERSION:
            raise RpcError(f"a header has version {version}; expected {_VERSION}: run one release of Satrap everywhere")
        if kind not in _KINDS:
            raise RpcError(f"a header has kind {kind}; expected one of {', '.join(f'{k} ({k.name})' for k in Kind)}")
        if zero:
            raise RpcError(f"a header has reserved bytes {zero:#010x}; expected zeros")
        if kind == Kind.REQUEST and not deadline_ms:
            raise RpcError("a request has 0 ms until its deadline; expected at least 1")
        return _header_of((kind, method, client, call, num_frames, body_bytes, deadline_ms, *origin))

    def check_frames(self, sizes: Sequence[int]) -> None:
        """Check number and total size of the received frames; RpcError if they differ from the header."""
        if len(sizes) != self.num_frames or sum(sizes) != self.body_bytes:
            raise RpcError(
                f"a message has {len(sizes)} frames and {sum(sizes)} bytes; its header declares {self.num_frames} and "
                f"{self.body_bytes}"
            )


def _header_of(fields: Sequence[int]) -> Header:
    kind, method, client, call, num_frames, body_bytes, deadline_ms, *origin = fields
    attempt, trainer, step, map_version = origin
    return Header(
        kind=_KINDS[kind],
        method=method,
        client=client,
        call=call,
        num_frames=num_frames,
        body_bytes=body_bytes,
        deadline_ms=deadline_ms,
        origin=Origin(attempt=attempt, trainer=trainer, step=step, map_version=map_version)
        if any(origin)
        else NO_ORIGIN,
    )


def frames_in(message: bytes) -> Sequence[memoryview]:
    """Return the frames of a message of one frame that `Header.of_joined` accepted."""
    return Header.unpack(message).frames_of([memoryview(message)])


def set_deadline(message: Message, milliseconds: int) -> None:
    """Change the deadline in the header of a message."""
    _DEADLINE.pack_into(message[0], _DEADLINE_AT, milliseconds)
