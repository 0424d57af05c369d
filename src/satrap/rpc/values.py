"""Values and their frames: types are read from annotations and checked on both sides. Uses no socket.

A value is a 1-D array (`NDArray[np.uint64]`, any bool, integer or float type), or a JSON value: None, bool, int
(of 64 bits), float (finite), str, list, dict with str keys, and unions of them; `object` is any of these. An array may
be None where its annotation says so.

A list of values becomes one JSON frame, then the bytes of each array, in order and little-endian, like all machines
that Satrap runs on. The JSON frame is a list with one item for every value: the value itself, or the number of elements
of an array. Nothing else is ever decoded, in particular no pickle. Arrays are not copied on either side, and decoded
arrays are read-only.

With encryption, an array may take several consecutive frames (`in_pieces`): ZeroMQ encrypts a frame whole before it
sends it, and decrypts it whole after it has received it, so pieces let both ends and the network work at the same time.
Joining them costs a copy, a tenth of the gain.
"""

import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from satrap._core import MessageCodec
from satrap.config.validation import describe
from satrap.errors import ConfigError, RpcError, SatrapError

Buffer = bytes | memoryview
Frames = Sequence[Buffer] | bytes
"""The frames of a message; or the whole message if it is one frame and `Header.of_joined` accepted it."""
MAX_JSON_BYTES = 4 << 20
"""Limit of the values other than arrays; parsing them takes about twenty times their bytes."""

PIECE_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class ArrayType:
    """A 1-D array of one dtype."""

    dtype: np.dtype[Any]
    optional: bool = False

    def native(self) -> tuple[Any, ...]:
        """Return the type as `_core.MessageCodec` takes it."""
        return self.dtype, np.empty(0, self.dtype).data.format, self.dtype.itemsize, self.optional

    def __str__(self) -> str:
        return f"{self.dtype.name}[]" + (" | None" if self.optional else "")


@dataclass(frozen=True, slots=True)
class PlainType:
    """A type of JSON values."""

    name: str
    fits: Callable[[object], bool]
    scalars: int | None = None
    """Which scalars fit: the sum of their numbers in `_SCALARS`. None: the core's codec does not know the type, because
    mappings, lists of lists or lists of anything fit."""
    items: int = -1
    """Which scalars fit in a list, as such a sum; -1: no list fits."""

    def native(self) -> tuple[Any, ...] | None:
        """Return the type as `_core.MessageCodec` takes it, or None."""
        return None if self.scalars is None else (self.scalars, self.items)

    def __str__(self) -> str:
        return self.name


ValueType = ArrayType | PlainType
_SCALARS = {"None": 1, "bool": 2, "int": 4, "float": 8, "str": 16}  # as in core/bindings/bindings_messages.cpp
_UNIONS = typing.Union, types.UnionType


def read_type(where: str, annotation: Any) -> ValueType:
    """Return the type of an annotation; ConfigError if it cannot be encoded."""
    is_union = typing.get_origin(annotation) in _UNIONS
    arms = typing.get_args(annotation) if is_union else (annotation,)
    arrays = [arm for arm in arms if typing.get_origin(arm) is np.ndarray]
    if not arrays:
        return _read_plain(where, annotation)
    if is_union and set(arms) != {arrays[0], types.NoneType}:
        raise ConfigError(f"{where}: found {annotation}; an array may be in a union with None only")
    return ArrayType(_read_dtype(where, arrays[0]), optional=is_union)


def _read_dtype(where: str, annotation: Any) -> np.dtype[Any]:
    scalar = typing.get_args(typing.get_args(annotation)[1])[0]
    try:
        dtype: np.dtype[Any] = np.dtype(scalar)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise TypeError
    except TypeError:
        raise ConfigError(f"{where}: found an array of {scalar}; expected e.g. NDArray[np.float32]") from None
    return dtype


def _read_plain(where: str, annotation: Any) -> PlainType:
    known = _PLAIN.get(annotation) if isinstance(annotation, type) or annotation in (None, Any) else None
    if known is not None:
        return known
    outer, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if outer in _UNIONS:
        arms = [_read_plain(where, arm) for arm in inner]
        lists = [arm.items for arm in arms if arm.items >= 0]
        return PlainType(
            " | ".join(map(str, arms)),
            lambda value: any(arm.fits(value) for arm in arms),
            None if len(lists) > 1 else _union(arm.scalars for arm in arms),
            *lists[:1],
        )
    if outer is list:
        item = _read_plain(where, inner[0])
        is_flat = item.scalars is not None and item.items < 0
        return PlainType(
            f"list[{item}]",
            lambda value: type(value) is list and all(map(item.fits, value)),
            0 if is_flat else None,
            item.scalars if item.scalars is not None and is_flat else -1,
        )
    if outer is dict and inner[0] is str:
        item = _read_plain(where, inner[1])
        return PlainType(
            f"dict[str, {item}]",
            lambda value: type(value) is dict and all(type(k) is str and item.fits(v) for k, v in value.items()),
        )
    raise ConfigError(
        f"{where}: found {annotation}; expected a 1-D array such as NDArray[np.float32], or bool, int, float, str, "
        "None, list[...], dict[str, ...], object"
    )


def _union(scalars: Iterable[int | None]) -> int | None:
    union = 0
    for scalar in scalars:
        if scalar is None:
            return None
        union |= scalar
    return union


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def _is_float(value: object) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or _is_int(value)


def _is_json(value: object) -> bool:
    """Return whether the value survives a round trip through JSON."""
    if type(value) is list:
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return value is None or isinstance(value, bool | str) or _is_float(value)


_PLAIN: dict[object, PlainType] = {
    None: PlainType("None", lambda value: value is None, _SCALARS["None"]),
    types.NoneType: PlainType("None", lambda value: value is None, _SCALARS["None"]),
    bool: PlainType("bool", lambda value: isinstance(value, bool), _SCALARS["bool"]),
    int: PlainType("int", _is_int, _SCALARS["int"]),
    float: PlainType("float", _is_float, _SCALARS["float"]),
    str: PlainType("str", lambda value: isinstance(value, str), _SCALARS["str"]),
    list: PlainType("list", lambda value: type(value) is list and _is_json(value)),
    dict: PlainType("dict", lambda value: type(value) is dict and _is_json(value)),
    object: PlainType("object", _is_json),
    Any: PlainType("object", _is_json),
}


def codec_of(types: Sequence[ValueType]) -> MessageCodec | None:
    """Return the codec of small messages with values of these types, which does what `encode`, `decode` and the header
    do together; None if it does not know one of the types."""
    native = [native for kind in types if (native := kind.native()) is not None]
    if len(native) < len(types):
        return None
    return MessageCodec(native, np.ndarray, np.frombuffer, _DECODER.scan_once)  # type: ignore[attr-defined]


def encode(
    expected: Sequence[ValueType], values: Sequence[object], name: Callable[[int], str], error: type[SatrapError]
) -> list[memoryview]:
    """Return the frames of values. `name(i)` names the i-th one in errors; `error` is the class of the errors."""
    plain: list[object] = []
    frames = [memoryview(b"")]
    for i, (kind, value) in enumerate(zip(expected, values, strict=True)):
        if isinstance(kind, PlainType):
            if not _fits(kind, value):
                raise error(f"{name(i)} is {describe(value)}; expected {kind}{_limits(kind)}")
            plain.append(value)
        elif value is None and kind.optional:
            plain.append(None)
        elif not isinstance(value, np.ndarray) or value.dtype != kind.dtype or value.ndim != 1:
            given = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else describe(value)
            raise error(f"{name(i)} is {given}; expected {kind} in one dimension")
        else:
            plain.append(value.size)
            frames.append(np.ascontiguousarray(value).view(np.uint8).data)
    frames[0] = memoryview("".join(_encode_json(plain, 0)).encode())
    if len(frames[0]) > MAX_JSON_BYTES:
        raise error(
            f"values other than arrays take {len(frames[0])} bytes; expected at most {MAX_JSON_BYTES}: send arrays"
        )
    return frames


def in_pieces(frames: Sequence[memoryview], max_bytes: int = PIECE_BYTES) -> list[memoryview]:
    """Return the frames with arrays of more than `max_bytes` split into several frames."""
    pieces = list(frames[:1])
    for frame in frames[1:]:
        pieces += [frame[at : at + max_bytes] for at in range(0, max(1, len(frame)), max_bytes)]
    return pieces


def decode(expected: Sequence[ValueType], frames: Sequence[Buffer], name: Callable[[int], str]) -> list[Any]:
    """Return the values that were encoded in the frames; RpcError if they do not fit."""
    values = parse_json(frames[0]) if frames else None
    if type(values) is not list or len(values) != len(expected):
        received = f"{len(values)} values" if type(values) is list else "no list of values"
        raise RpcError(f"found {received}; expected {len(expected)}")
    at = 1
    for i, kind in enumerate(expected):
        value = values[i]
        if isinstance(kind, PlainType):
            if not _fits(kind, value):
                raise RpcError(f"{name(i)} is {describe(value)}; expected {kind}")
        elif value is not None or not kind.optional:
            if at == len(frames):
                raise RpcError(f"{name(i)} has no frame; expected one for every array")
            end = _end_of_array(kind, frames, at, value)
            values[i] = _as_array(kind, _joined(frames[at:end]), value, name(i))
            at = end
    if at != len(frames):
        raise RpcError(f"found {len(frames)} frames; expected {at}")
    return values


def _end_of_array(kind: ArrayType, frames: Sequence[Buffer], at: int, size: object) -> int:
    missing = size * kind.dtype.itemsize if _is_int(size) else 0
    while (missing := missing - len(frames[at])) > 0 and at + 1 < len(frames):
        at += 1
    return at + 1


def _joined(pieces: Sequence[Buffer]) -> Buffer:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces]).data


def _as_array(kind: ArrayType, frame: Buffer, size: object, name: str) -> NDArray[Any]:
    if not _is_int(size) or size * kind.dtype.itemsize != len(frame):
        raise RpcError(f"{name} has a frame of {len(frame)} bytes for {describe(size)} elements; expected {kind}")
    array = np.frombuffer(frame, kind.dtype)
    if kind.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise RpcError(f"{name} has bytes that are neither 0 nor 1; expected {kind}")
    if not array.flags.aligned:  # small frames may start anywhere in the receive buffer
        array = array.copy()
    array.flags.writeable = False
    return array


def parse_json(frame: Buffer) -> Any:
    """Return the value of a frame; raise RpcError for one that is not JSON."""
    if len(frame) > MAX_JSON_BYTES:
        raise RpcError(f"a JSON frame has {len(frame)} bytes; expected at most {MAX_JSON_BYTES}")
    try:
        return _DECODER.decode(str(frame, "utf-8"))
    except (ValueError, RecursionError) as error:
        if type(error) not in _JSON_ERRORS:
            raise  # by the handler of a signal
        raise RpcError(f"a frame is not valid JSON: {type(error).__name__}: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it contains {name}")


def _refuse_object(value: object) -> None:
    raise TypeError(f"{type(value).__name__} is no JSON value")


# `JSONEncoder.encode` creates this encoder in each call, which takes longer than its work.
_encode_json = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
    None, _refuse_object, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False
)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_JSON_ERRORS = (ValueError, json.JSONDecodeError, UnicodeDecodeError, RecursionError)


def _fits(kind: PlainType, value: object) -> bool:
    try:
        return kind.fits(value)
    except RecursionError:
        return False


def _limits(kind: PlainType) -> str:
    return " of at most 64 bits, finite, with str keys only" if kind.name not in ("None", "bool", "str") else ""
