"""The 64-byte header: packed headers are unpacked, and any other bytes are refused."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from satrap.errors import InputError, RpcError
from satrap.rpc.header import HEADER_BYTES, JOINED_BYTES, MAX_DEADLINE_MS, MAX_FRAMES, Header, Kind, Origin

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ORIGINS = st.builds(Origin, attempt=U32, trainer=U32, step=U32, map_version=U32)
HEADERS = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    method=U64,
    client=U64,
    call=U64,
    num_frames=st.integers(0, 2**16 - 1),
    body_bytes=U64,
    deadline_ms=st.integers(1, 2**32 - 1),
    origin=ORIGINS,
)
HEADER = Header(kind=Kind.REQUEST, method=1, client=2, call=3, num_frames=1, body_bytes=2, deadline_ms=5)


@given(HEADERS)
def test_a_header_makes_a_round_trip(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header
    assert Header.unpack(memoryview(packed)).pack() == packed


def test_the_layout_is_the_documented_one() -> None:
    origin = Origin(attempt=7, trainer=8, step=9, map_version=10)
    packed = replace(HEADER, kind=Kind.BUSY, origin=origin).pack()
    assert packed[:8] == b"STRP" + bytes([2, 4, 1, 0])
    assert struct.unpack_from("<4Q", packed, 8) == (1, 2, 3, 2)
    assert struct.unpack_from("<6I", packed, 40) == (5, 7, 8, 9, 10, 0)


def test_the_kinds_and_limits_are_the_documented_ones() -> None:
    assert {int(kind): kind.name for kind in Kind} == {1: "REQUEST", 2: "REPLY", 3: "ERROR", 4: "BUSY", 5: "WORKING"}
    assert (MAX_FRAMES, MAX_DEADLINE_MS) == (2**16 - 1, 2**32 - 1)
    plain = Header(kind=Kind.REPLY, method=1, client=2, call=3)
    assert plain == Header(kind=Kind.REPLY, method=1, client=2, call=3, num_frames=0, body_bytes=0, deadline_ms=0)


@pytest.mark.parametrize("value", [0, 2**32 - 1])
def test_numbers_of_other_types_become_ints(value: int) -> None:
    step = Origin(step=np.uint32(value)).step  # type: ignore[arg-type]
    assert step == value and type(step) is int


@given(st.binary(max_size=130))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RpcError):
        Header.unpack(data)


@given(HEADERS, st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_flipped_bit_is_refused_or_means_another_header(header: Header, bit: int) -> None:
    mutated = bytearray(header.pack())
    mutated[bit // 8] ^= 1 << bit % 8
    kind, (deadline_ms,) = mutated[5], struct.unpack_from("<I", mutated, 40)
    fixed = bit // 8 in (*range(5), *range(60, 64))  # magic, version and reserved bytes
    if fixed or not 1 <= kind <= 5 or (kind == Kind.REQUEST and deadline_ms == 0):
        with pytest.raises(RpcError):
            Header.unpack(bytes(mutated))
        return
    unpacked = Header.unpack(bytes(mutated))
    assert unpacked != header
    assert unpacked.pack() == bytes(mutated)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"HTTP", "starts with b'HTTP'; expected b'STRP': the peer is not Satrap"),
        (4, b"\1", "version 1; expected 2: run one release"),
        (5, b"\0", r"kind 0; expected one of 1 \(REQUEST\)"),
        (5, b"\6", "kind 6"),
        (40, b"\0\0\0\0", "a request has 0 ms until its deadline"),
        (60, b"\1\0\0\0", "reserved bytes 0x00000001; expected zeros"),
    ],
)
def test_errors_name_the_wrong_field(at: int, value: bytes, words: str) -> None:
    packed = bytearray(HEADER.pack())
    packed[at : at + len(value)] = value
    with pytest.raises(RpcError, match=words):
        Header.unpack(bytes(packed))
    with pytest.raises(RpcError, match="a frame of 63 bytes; expected a header of 64"):
        Header.unpack(HEADER.pack()[:-1])


FRAMES = st.lists(st.binary(max_size=40), max_size=5)


def header_of(frames: list[bytes]) -> Header:
    return replace(HEADER, num_frames=len(frames), body_bytes=sum(map(len, frames)))


def message_of(frames: list[bytes]) -> list[bytes]:
    return [bytes(each) for each in header_of(frames).message([memoryview(frame) for frame in frames])]


@given(FRAMES)
def test_a_small_message_is_one_frame_and_is_split_again(frames: list[bytes]) -> None:
    header = header_of(frames)
    (message,) = message_of(frames)
    assert Header.unpack(message) == header
    for received in ([message], [header.pack(), *frames]):
        assert list(header.frames_of([memoryview(each) for each in received])) == frames


def test_the_frames_of_a_large_message_are_not_copied() -> None:
    frames = [memoryview(bytes(JOINED_BYTES)), memoryview(b"x")]
    header = header_of([bytes(each) for each in frames])
    packed, *others = header.message(frames)
    assert bytes(packed) == header.pack() and all(each is frame for each, frame in zip(others, frames, strict=True))
    assert len(message_of([bytes(JOINED_BYTES)])) == 1


@given(FRAMES, st.data())
def test_a_damaged_small_message_is_refused_or_has_other_frames(frames: list[bytes], data: st.DataObject) -> None:
    header = header_of(frames)
    (message,) = message_of(frames)
    damaged = bytearray(message)
    if data.draw(st.booleans()) and len(message) > HEADER_BYTES:
        damaged[data.draw(st.integers(HEADER_BYTES, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del damaged[data.draw(st.integers(HEADER_BYTES, len(message))) :]
        damaged += data.draw(st.binary(max_size=3))
    try:
        found = list(header.frames_of([memoryview(damaged)]))
    except RpcError:
        return
    assert message_of([bytes(each) for each in found]) == [bytes(damaged)]


def test_a_first_frame_that_is_no_header_has_no_other_frames() -> None:
    with pytest.raises(RpcError, match="a message of 2 frames starts with one of 65 bytes; expected a header of 64"):
        HEADER.frames_of([memoryview(HEADER.pack() + b"x"), memoryview(b"x")])


@pytest.mark.parametrize("sizes", [[], [1], [3], [1, 1], [2, 0]])
def test_frames_that_do_not_match_the_header(sizes: list[int]) -> None:
    HEADER.check_frames([2])
    with pytest.raises(RpcError, match=f"{len(sizes)} frames and {sum(sizes)} bytes; its header declares 1 and 2"):
        HEADER.check_frames(sizes)


@pytest.mark.parametrize("name", ["attempt", "trainer", "step", "map_version"])
@pytest.mark.parametrize("value", [-1, 2**32, 1.0, True, None])
def test_the_fields_of_an_origin_have_32_bits(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"Origin: {name} is"):
        Origin(**{name: value})  # type: ignore[arg-type]
