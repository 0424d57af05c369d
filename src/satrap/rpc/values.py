"""What may travel, and how values become frames: read from annotations, checked on both sides. Knows no socket.

A value is a 1-D array (`NDArray[np.uint64]`, any bool, integer or float type), or what JSON can say: None, bool, int
(of 64 bits), float (finite), str, list, dict with str keys, and unions of them; `object` is any of these. An array may
be None where its annotation says so.

A list of values becomes one JSON frame, then the bytes of each array, in order and little-endian, as all machines are
that Satrap runs on. The JSON frame is a list with one item for every value: the value itself, or of an array its number
of elements. Nothing else is ever decoded, no pickle in particular. Arrays are not copied on either side, and decoded
ones are read-only.

Where frames are encrypted, an array may come in several, one after the other (`in_pieces`): a frame is encrypted whole
before it is sent and decrypted whole once it is there, so pieces are at work at both ends and on the way at once. To
join them is a copy, a tenth of what is gained.
"""

import json
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from satrap.config.validation import describe
from satrap.errors import ConfigError, RpcError, SatrapError

Buffer = bytes | memoryview
MAX_JSON_BYTES = 4 << 20
"""Values beside arrays are few; parsing takes some twenty times their bytes."""

PIECE_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class ArrayType:
    """A 1-D array of one dtype."""

    dtype: np.dtype[Any]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.dtype.name}[]" + (" | None" if self.optional else "")


@dataclass(frozen=True, slots=True)
class PlainType:
    """What JSON can say."""

    name: str
    fits: Callable[[object], bool]

    def __str__(self) -> str:
        return self.name


ValueType = ArrayType | PlainType


def read_type(where: str, annotation: Any) -> ValueType:
    """The type that an annotation means, or ConfigError."""
    if typing.get_origin(annotation) is np.ndarray:
        return _read_array(where, annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        arms = typing.get_args(annotation)
        arrays = [arm for arm in arms if typing.get_origin(arm) is np.ndarray]
        if arrays:
            if set(arms) != {arrays[0], types.NoneType}:
                raise ConfigError(f"{where}: found {annotation}; an array may be in a union with None only")
            return ArrayType(_read_array(where, arrays[0]).dtype, optional=True)
        plain = [_read_plain(where, arm) for arm in arms]
        return PlainType(" | ".join(map(str, plain)), lambda value: any(arm.fits(value) for arm in plain))
    return _read_plain(where, annotation)


def _read_array(where: str, annotation: Any) -> ArrayType:
    scalar = typing.get_args(typing.get_args(annotation)[1])[0]
    try:
        dtype = np.dtype(scalar)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise TypeError
    except TypeError:
        raise ConfigError(f"{where}: found an array of {scalar}; wanted e.g. NDArray[np.float32]") from None
    return ArrayType(dtype)


def _read_plain(where: str, annotation: Any) -> PlainType:
    known = _PLAIN.get(annotation) if isinstance(annotation, type) or annotation in (None, Any) else None
    if known is not None:
        return known
    outer, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if outer in (typing.Union, types.UnionType):
        nested = read_type(where, annotation)
        if isinstance(nested, PlainType):
            return nested
    elif outer is list:
        item = _read_plain(where, inner[0])
        return PlainType(f"list[{item}]", lambda value: type(value) is list and all(map(item.fits, value)))
    elif outer is dict and inner[0] is str:
        item = _read_plain(where, inner[1])
        return PlainType(
            f"dict[str, {item}]",
            lambda value: type(value) is dict and all(type(k) is str and item.fits(v) for k, v in value.items()),
        )
    raise ConfigError(
        f"{where}: found {annotation}; wanted a 1-D array such as NDArray[np.float32], or bool, int, float, str, None, "
        "list[...], dict[str, ...], object"
    )


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def _is_float(value: object) -> bool:
    return (isinstance(value, float) and math.isfinite(value)) or _is_int(value)


def _is_json(value: object) -> bool:
    """Whether JSON gives this very value back."""
    if type(value) is list:
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return value is None or isinstance(value, bool | str) or _is_float(value)


_PLAIN: dict[object, PlainType] = {
    None: PlainType("None", lambda value: value is None),
    types.NoneType: PlainType("None", lambda value: value is None),
    bool: PlainType("bool", lambda value: isinstance(value, bool)),
    int: PlainType("int", _is_int),
    float: PlainType("float", _is_float),
    str: PlainType("str", lambda value: isinstance(value, str)),
    list: PlainType("list", lambda value: type(value) is list and _is_json(value)),
    dict: PlainType("dict", lambda value: type(value) is dict and _is_json(value)),
    object: PlainType("object", _is_json),
    Any: PlainType("object", _is_json),
}


def encode(
    wanted: Sequence[ValueType], values: Sequence[object], name: Callable[[int], str], error: type[SatrapError]
) -> list[memoryview]:
    """The frames of some values. `name` says what the i-th is called, `error` is raised if one does not fit."""
    plain: list[object] = []
    frames = [memoryview(b"")]
    for i, (kind, value) in enumerate(zip(wanted, values, strict=True)):
        if isinstance(kind, PlainType):
            if not _fits(kind, value):
                raise error(f"{name(i)} is {describe(value)}; wanted {kind}{_limits(kind)}")
            plain.append(value)
        elif value is None and kind.optional:
            plain.append(None)
        elif not isinstance(value, np.ndarray) or value.dtype != kind.dtype or value.ndim != 1:
            found = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else describe(value)
            raise error(f"{name(i)} is {found}; wanted {kind} in one dimension")
        else:
            plain.append(value.size)
            frames.append(np.ascontiguousarray(value).view(np.uint8).data)
    frames[0] = memoryview(_ENCODER.encode(plain).encode())
    if len(frames[0]) > MAX_JSON_BYTES:
        raise error(f"values other than arrays take {len(frames[0])} bytes; at most {MAX_JSON_BYTES}: send arrays")
    return frames


def in_pieces(frames: Sequence[memoryview], most: int = PIECE_BYTES) -> list[memoryview]:
    """The same with arrays of more bytes than `most` in several frames."""
    pieces = list(frames[:1])
    for frame in frames[1:]:
        pieces += [frame[at : at + most] for at in range(0, max(1, len(frame)), most)]
    return pieces


def decode(wanted: Sequence[ValueType], frames: Sequence[Buffer], name: Callable[[int], str]) -> list[Any]:
    """The values that `encode` was given, or RpcError."""
    values = _parse(frames[0]) if frames else None
    if type(values) is not list or len(values) != len(wanted):
        found = f"{len(values)} values" if type(values) is list else "no list of values"
        raise RpcError(f"found {found}; wanted {len(wanted)}")
    at = 1
    for i, kind in enumerate(wanted):
        value = values[i]
        if isinstance(kind, PlainType):
            if not _fits(kind, value):
                raise RpcError(f"{name(i)} is {describe(value)}; wanted {kind}")
        elif value is not None or not kind.optional:
            if at == len(frames):
                raise RpcError(f"{name(i)} has no frame; wanted one for every array")
            end = _end_of_array(kind, frames, at, value)
            values[i] = _as_array(kind, _joined(frames[at:end]), value, name(i))
            at = end
    if at != len(frames):
        raise RpcError(f"found {len(frames)} frames; wanted {at}")
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
        raise RpcError(f"{name} has a frame of {len(frame)} bytes for {describe(size)} elements; wanted {kind}")
    array = np.frombuffer(frame, kind.dtype)
    if kind.dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise RpcError(f"{name} has bytes that are neither 0 nor 1; wanted {kind}")
    if not array.flags.aligned:  # small frames lie anywhere in the receiver's buffer
        array = array.copy()
    array.flags.writeable = False
    return array


def _parse(frame: Buffer) -> Any:
    if len(frame) > MAX_JSON_BYTES:
        raise RpcError(f"a JSON frame of {len(frame)} bytes; wanted at most {MAX_JSON_BYTES}")
    try:
        return _DECODER.decode(str(frame, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise RpcError(f"a frame that should be JSON is not: {type(error).__name__}: {error}") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _fits(kind: PlainType, value: object) -> bool:
    try:
        return kind.fits(value)
    except RecursionError:
        return False


def _limits(kind: PlainType) -> str:
    return " of at most 64 bits, finite, with str keys only" if kind.name not in ("None", "bool", "str") else ""
