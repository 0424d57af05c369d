"""Small messages in the core: its codec makes the bytes and values that Python makes, or leaves them to Python."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc_parts import pairs, same
from satrap._core import read_header
from satrap.errors import InputError, RpcError
from satrap.rpc.header import HEADER_BYTES, JOINED_BYTES, NO_ORIGIN, Header, Kind, Origin, frames_in
from satrap.rpc.values import ArrayType, ValueType, codec_of, decode, encode, read_type

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ORIGINS = st.builds(Origin, attempt=U32, trainer=U32, step=U32, map_version=U32) | st.just(NO_ORIGIN)
HEADERS = st.builds(
    Header, kind=st.sampled_from(Kind), method=U64, client=U64, call=U64, deadline_ms=U32.filter(bool), origin=ORIGINS
)
UNUSUAL = [
    2**64,
    -(2**63) - 1,
    float("nan"),
    np.float64(1.5),
    np.arange(3),
    np.arange(6)[::2],
    np.zeros((2, 2)),
    [1, "x"],
]


def name(i: int) -> str:
    return f"value {i}"


def packed(header: Header, kinds: Sequence[ValueType], values: tuple[Any, ...]) -> bytearray | None:
    codec = codec_of(kinds)
    ids = header.method, header.client, header.call, header.deadline_ms, header.origin
    return None if codec is None else codec.pack(int(header.kind), *ids, ("not sent", *values), 1)


def oracle(header: Header, kinds: Sequence[ValueType], values: tuple[Any, ...]) -> bytes:
    """Returns the message that Python makes."""
    frames = encode(kinds, values, name, InputError)
    header.num_frames, header.body_bytes = len(frames), sum(map(len, frames))
    (message,) = header.message(frames)
    return bytes(message)


@given(HEADERS, st.lists(pairs(), max_size=6))
def test_a_message_has_the_same_bytes_and_values_as_in_python(header: Header, given: list[tuple[Any, Any]]) -> None:
    kinds, values = [kind for kind, _ in given], tuple(value for _, value in given)
    message, expected = packed(header, kinds, values), oracle(header, kinds, values)
    assert message is None or message == expected
    assert Header.of_joined(expected) == header
    codec = codec_of(kinds)
    found = None if codec is None else codec.unpack(expected)
    if found is None:
        found = decode(kinds, frames_in(expected), name)
    assert all(map(same, found, values))
    for value in found:
        assert not isinstance(value, np.ndarray) or (value.flags.aligned and not value.flags.writeable)


def test_the_usual_messages_take_the_short_way() -> None:
    """The messages of a lookup and an update of rows on servers, with arrays as numpy and as the core make them."""
    annotations = [int, bool, str, float, list[float], int | None, list[str] | None, None]
    values = [-(2**63), True, "float32", 1e-05, [0.05, 3, 1e300], 2**64 - 1, ["a b", "~"], None]
    kinds: list[ValueType] = [read_type("x", annotation) for annotation in annotations]
    kinds += [
        ArrayType(np.dtype(each), optional=True) for each in (np.uint64, np.uint64, np.int64, np.float32, np.bool_)
    ]
    values += [
        np.arange(3, dtype=np.uint64),
        np.arange(3, dtype=np.ulonglong),
        np.zeros(0, np.int64),
        None,
        np.ones(3, bool),
    ]
    header = Header(kind=Kind.REQUEST, method=1, client=2, call=3, deadline_ms=4, origin=Origin(step=5))
    message = packed(header, kinds, tuple(values))
    assert message is not None and message == oracle(header, kinds, tuple(values))
    codec = codec_of(kinds)
    assert codec is not None
    found = codec.unpack(bytes(message))
    assert found is not None and all(map(same, found, values))


@pytest.mark.parametrize("annotation", [dict, list, object, list[list[int]], list[int] | list[str], dict[str, int]])
def test_other_types_are_left_to_python(annotation: Any) -> None:
    assert codec_of([read_type("x", int), read_type("x", annotation)]) is None


@given(st.lists(pairs(), max_size=4), st.data())
def test_values_of_other_types_are_left_to_python(given: list[tuple[Any, Any]], data: st.DataObject) -> None:
    """Any value for any type: the core packs what Python encodes, and nothing else."""
    kinds = [kind for kind, _ in given]
    others = [value for _, value in given] + UNUSUAL
    values = tuple(data.draw(st.sampled_from(others)) for _ in kinds)
    header = Header(kind=Kind.REPLY, method=1, client=2, call=3)
    if (message := packed(header, kinds, values)) is not None:
        assert message == oracle(header, kinds, values)


def test_a_wrong_number_of_values_and_a_large_message_are_left_to_python() -> None:
    header = Header(kind=Kind.REPLY, method=1, client=2, call=3)
    kinds = [ArrayType(np.dtype(np.uint8))]
    json = len(b"[32000]")
    assert packed(header, kinds, ()) is None and packed(header, kinds, (np.zeros(1, np.uint8),) * 2) is None
    assert packed(header, kinds, (np.zeros(JOINED_BYTES - json, np.uint8),)) is not None
    assert packed(header, kinds, (np.zeros(JOINED_BYTES - json + 1, np.uint8),)) is None
    assert packed(header, kinds * 17, (np.zeros(1, np.uint8),) * 17) is None
    assert packed(header, [read_type("x", list[int])], ([0] * JOINED_BYTES,)) is None


def python_values(kinds: Sequence[ValueType], message: bytes) -> tuple[Header, list[Any]] | None:
    try:
        header = Header.unpack(message)
        return header, decode(kinds, header.frames_of([memoryview(message)]), name)
    except RpcError:
        return None


@given(HEADERS, st.lists(pairs(), max_size=4), st.data())
def test_damaged_messages_mean_the_same_in_the_core(
    header: Header, given: list[tuple[Any, Any]], data: st.DataObject
) -> None:
    kinds, values = [kind for kind, _ in given], tuple(value for _, value in given)
    damaged = bytearray(oracle(header, kinds, values))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'[]0123456789-.eE,"tfn '))
    damaged = damaged[: data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))]
    damaged += data.draw(st.just(b"") | st.binary(max_size=3))
    message = bytes(damaged)
    expected, codec = python_values(kinds, message), codec_of(kinds)
    fields = read_header(message)
    try:
        whole = Header.unpack(message)
        whole.frames_of([memoryview(message)])
        is_joined = len(message) > HEADER_BYTES
    except RpcError:
        is_joined = False
    assert (fields is not None) == is_joined and (Header.of_joined(message) == whole if is_joined else True)
    found = None if codec is None else codec.unpack(message)
    assert found is None or (expected is not None and all(map(same, found, expected[1])))


@pytest.mark.parametrize("size", [b"3", b"-1", b"true", b"null", b"2.0", b"02", b"18446744073709551618"])
def test_an_array_of_another_size_is_left_to_python(size: bytes) -> None:
    codec = codec_of([ArrayType(np.dtype(np.uint32))])
    assert codec is not None

    def message(json: bytes) -> bytes:
        body = json + bytes(8)
        header = Header(kind=Kind.REPLY, method=1, client=2, call=3, num_frames=2, body_bytes=len(body))
        return header.pack() + struct.pack("<2I", len(json), 8) + body

    assert codec.unpack(message(b"[2]")) is not None and codec.unpack(message(b"[" + size + b"]")) is None
    assert codec.unpack(message(b"[2]x")) is None and codec.unpack(message(b"[2")) is None
