"""The methods of a Protocol: the types of their parameters and results, and a number for each method.

The number is a hash of "Protocol.method(parameters) -> result", so that calls of a peer with a different Protocol are
refused, not misread. Uses no socket. A method's parameters are values (see values.py); a first parameter of type
`Origin` travels in the header. The result is None, a value, or a tuple of values. A served object may also return a
`concurrent.futures.Future` of the annotated result.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from satrap._core import MessageCodec
from satrap.errors import ConfigError, InputError, RpcError
from satrap.rpc.header import NO_ORIGIN, Header, Kind, Origin, frames_in
from satrap.rpc.values import Frames, ValueType, codec_of, decode, encode, read_type

_REQUEST, _REPLY = int(Kind.REQUEST), int(Kind.REPLY)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of a Protocol. Encodes and decodes its arguments and results.

    Small messages of the usual types take the short way: the core's codec packs and unpacks them whole. Where it does
    not, `encode` and `decode` do the same work or raise the error."""

    name: str
    """Protocol.method"""
    takes_origin: bool
    names: tuple[str, ...]
    """Names of the parameters, without the origin."""
    parameters: tuple[ValueType, ...]
    result: tuple[ValueType, ...] | ValueType | None
    signature: inspect.Signature
    """Signature without self."""
    num_positional: int
    """Number of positional parameters; the others are keyword-only."""

    @property
    def action(self) -> str:
        """What the method does, in words for messages to users: "get shard map"."""
        return self.name.rpartition(".")[2].replace("_", " ")

    def __str__(self) -> str:
        taken = [f"{name}: {kind}" for name, kind in zip(self.names, self.parameters, strict=True)]
        parts = ", ".join(["Origin"] * self.takes_origin + taken)
        result = f"({', '.join(map(str, self.result))})" if isinstance(self.result, tuple) else str(self.result)
        return f"{self.name}({parts}) -> {result}"

    @cached_property
    def number(self) -> int:
        return int.from_bytes(blake2b(str(self).encode(), digest_size=8).digest(), "little")

    @cached_property
    def _argument_codec(self) -> MessageCodec | None:
        return codec_of(self.parameters) if self.num_positional == len(self.parameters) else None

    @cached_property
    def _result_types(self) -> tuple[ValueType, ...]:
        if isinstance(self.result, tuple):
            return self.result
        return () if self.result is None else (self.result,)

    @cached_property
    def _result_codec(self) -> MessageCodec | None:
        return codec_of(self._result_types)

    def pack_arguments(self, positional: tuple[object, ...], client: int, call: int) -> bytearray | None:
        """Return a request as one message, with a deadline that is still to be set; None if `encode_arguments` has to
        decide."""
        codec, origin = self._argument_codec, NO_ORIGIN
        if codec is None:
            return None
        if self.takes_origin:
            if not positional or type(positional[0]) is not Origin:
                return None
            origin = positional[0]
        return codec.pack(_REQUEST, self.number, client, call, 1, origin, positional, int(self.takes_origin))

    def encode_arguments(
        self, positional: Sequence[object], keywords: Mapping[str, object]
    ) -> tuple[Origin, list[memoryview]]:
        is_positional = self.num_positional == len(self.parameters) and not keywords
        if not is_positional or len(positional) != len(self.parameters) + self.takes_origin:
            try:
                bound = self.signature.bind(*positional, **keywords)
            except TypeError as error:
                raise InputError(f"{self.name}: {error}; expected {self}") from None
            bound.apply_defaults()
            positional = list(bound.arguments.values())
        origin: object = positional[0] if self.takes_origin else NO_ORIGIN
        if not isinstance(origin, Origin):
            raise InputError(
                f"{self.name}: the first argument has type {type(origin).__name__}; expected Origin: {self}"
            )
        frames = encode(self.parameters, positional[self.takes_origin :], self._argument, InputError)
        return origin, frames

    def decode_arguments(self, origin: Origin, frames: Frames) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments."""
        values = _decode(self._argument_codec, self.parameters, frames, self._argument)
        num_positional = self.num_positional
        positional = [origin, *values[:num_positional]] if self.takes_origin else values[:num_positional]
        return positional, dict(zip(self.names[num_positional:], values[num_positional:], strict=True))

    def pack_result(self, value: object, request: Header) -> bytearray | None:
        """Return the reply to a request as one message; None if `encode_result` has to decide."""
        codec, result = self._result_codec, self.result
        if codec is None:
            return None
        if isinstance(result, tuple):
            if type(value) is not tuple:
                return None
            values = value
        else:
            values = () if result is value is None else (value,)
        return codec.pack(_REPLY, request.method, request.client, request.call, 0, NO_ORIGIN, values, 0)

    def encode_result(self, value: object) -> list[memoryview]:
        if not isinstance(self.result, tuple):
            if self.result is None and value is not None:
                raise RpcError(
                    f"{self.name} returned type {type(value).__name__}; expected None: correct the served object"
                )
            return encode(self._result_types, [value][: len(self._result_types)], self._result, RpcError)
        if not isinstance(value, tuple) or len(value) != len(self.result):
            raise RpcError(
                f"{self.name} returned type {type(value).__name__}; expected a tuple of {len(self.result)}: {self}"
            )
        return encode(self.result, value, self._result, RpcError)

    def decode_result(self, frames: Frames) -> Any:
        values = _decode(self._result_codec, self._result_types, frames, self._result)
        if isinstance(self.result, tuple):
            return tuple(values)
        return values[0] if values else None

    def _argument(self, i: int) -> str:
        return f"{self.name}: {self.names[i]}"

    def _result(self, i: int) -> str:
        return f"{self.name}: result {i}" if isinstance(self.result, tuple) else f"{self.name}: the result"


def _decode(
    codec: MessageCodec | None, types: Sequence[ValueType], frames: Frames, name: Callable[[int], str]
) -> list[Any]:
    if isinstance(frames, bytes):
        if codec is not None and (values := codec.unpack(frames)) is not None:
            return values
        frames = frames_in(frames)
    return decode(types, frames, name)


def methods_of(protocol: Callable[..., Any]) -> dict[str, Method]:
    """Return a Protocol's public methods by name; ConfigError if a parameter or result cannot be encoded."""
    if not getattr(protocol, "_is_protocol", False):
        raise ConfigError(
            f"found {protocol!r}; expected a class derived from typing.Protocol, whose methods are called"
        )
    methods = {
        name: _read_method(f"{protocol.__name__}.{name}", function)
        for name, function in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    }
    if not methods:
        raise ConfigError(f"{protocol.__name__} has no public method; expected at least one to serve")
    return methods


def _read_method(name: str, function: Callable[..., Any]) -> Method:
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(
            f"{name}: {error}: import the names in its annotations at run time, not only for type checkers"
        ) from None
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"{name}: {parameter} takes any number of arguments; declare each one, or use a list or a dict"
            )
        if parameter.name == "deadline":
            raise ConfigError(f"{name}: deadline is reserved for callers; choose another name")
        if parameter.name not in hints:
            raise ConfigError(f"{name}: {parameter.name} has no annotation; add one")
    if "return" not in hints:
        raise ConfigError(f"{name}: the result has no annotation; add one, e.g. -> None")
    takes_origin = bool(parameters) and hints[parameters[0].name] is Origin
    value_parameters = parameters[takes_origin:]
    result = hints["return"]
    result_type: tuple[ValueType, ...] | ValueType | None
    if typing.get_origin(result) is tuple:
        result_type = tuple(read_type(f"{name}: the result", parameter) for parameter in typing.get_args(result))
    else:
        result_type = None if result is type(None) else read_type(f"{name}: the result", result)
    return Method(
        name=name,
        takes_origin=takes_origin,
        names=tuple(parameter.name for parameter in value_parameters),
        parameters=tuple(
            read_type(f"{name}: {parameter.name}", hints[parameter.name]) for parameter in value_parameters
        ),
        result=result_type,
        signature=signature.replace(parameters=parameters),
        num_positional=sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in value_parameters),
    )
