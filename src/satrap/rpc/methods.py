"""What a Protocol offers: its methods with the types of their parameters and results, and a number for each.

The number is a hash of "Protocol.method(parameters) -> result", so that a peer whose Protocol differs is refused by
name instead of misread. Knows no socket. A method's parameters are values (see values.py); a first one of type `Origin`
travels in the header. Its result is None, a value, or a tuple of values. The annotations are those of the answer: an
object that is served may as well return a `concurrent.futures.Future` of it.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from satrap.errors import ConfigError, InputError, RpcError
from satrap.rpc.header import NO_ORIGIN, Origin
from satrap.rpc.values import Buffer, ValueType, decode, encode, read_type


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One method of a Protocol. Encodes and decodes its arguments and results."""

    name: str
    """Protocol.method"""
    takes_origin: bool
    names: tuple[str, ...]
    """Of the parameters, without the origin."""
    parameters: tuple[ValueType, ...]
    result: tuple[ValueType, ...] | ValueType | None
    signature: inspect.Signature
    """Without self."""
    num_positional: int
    """Of the parameters; the others are given by name."""

    def __str__(self) -> str:
        taken = [f"{name}: {kind}" for name, kind in zip(self.names, self.parameters, strict=True)]
        parts = ", ".join(["Origin"] * self.takes_origin + taken)
        result = f"({', '.join(map(str, self.result))})" if isinstance(self.result, tuple) else str(self.result)
        return f"{self.name}({parts}) -> {result}"

    @property
    def number(self) -> int:
        return int.from_bytes(blake2b(str(self).encode(), digest_size=8).digest(), "little")

    def encode_arguments(self, given: Sequence[object], named: Mapping[str, object]) -> tuple[Origin, list[memoryview]]:
        at_once = self.num_positional == len(self.parameters) and not named
        if not at_once or len(given) != len(self.parameters) + self.takes_origin:
            try:
                bound = self.signature.bind(*given, **named)
            except TypeError as error:
                raise InputError(f"{self.name}: {error}; wanted {self}") from None
            bound.apply_defaults()
            given = list(bound.arguments.values())
        origin: object = given[0] if self.takes_origin else NO_ORIGIN
        if not isinstance(origin, Origin):
            raise InputError(f"{self.name}: found {type(origin).__name__} first; wanted Origin: {self}")
        frames = encode(self.parameters, given[self.takes_origin :], self._argument, InputError)
        return origin, frames

    def decode_arguments(self, origin: Origin, frames: Sequence[Buffer]) -> tuple[list[Any], dict[str, Any]]:
        """Those given by position and those given by name."""
        values = decode(self.parameters, frames, self._argument)
        at = self.num_positional
        positional = [origin, *values[:at]] if self.takes_origin else values[:at]
        return positional, dict(zip(self.names[at:], values[at:], strict=True))

    def encode_result(self, value: object) -> list[memoryview]:
        if not isinstance(self.result, tuple):
            wanted: Sequence[ValueType] = () if self.result is None else (self.result,)
            if self.result is None and value is not None:
                raise RpcError(
                    f"{self.name} gave a {type(value).__name__}; wanted None: mend the object that is served"
                )
            return encode(wanted, [value][: len(wanted)], self._result, RpcError)
        if not isinstance(value, tuple) or len(value) != len(self.result):
            raise RpcError(f"{self.name} gave a {type(value).__name__}; wanted a tuple of {len(self.result)}: {self}")
        return encode(self.result, value, self._result, RpcError)

    def decode_result(self, frames: Sequence[Buffer]) -> Any:
        if isinstance(self.result, tuple):
            return tuple(decode(self.result, frames, self._result))
        wanted = () if self.result is None else (self.result,)
        values = decode(wanted, frames, self._result)
        return values[0] if values else None

    def _argument(self, i: int) -> str:
        return f"{self.name}: {self.names[i]}"

    def _result(self, i: int) -> str:
        return f"{self.name}: result {i}" if isinstance(self.result, tuple) else f"{self.name}: the result"


def methods_of(protocol: Callable[..., Any]) -> dict[str, Method]:
    """By name, the public methods of a Protocol; ConfigError if one has a parameter or result that cannot travel."""
    if not getattr(protocol, "_is_protocol", False):
        raise ConfigError(f"found {protocol!r}; wanted a class derived from typing.Protocol, whose methods are called")
    found = {
        name: _read_method(f"{protocol.__name__}.{name}", function)
        for name, function in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    }
    if not found:
        raise ConfigError(f"{protocol.__name__} has no public method; there is nothing to serve")
    return found


def _read_method(name: str, function: Callable[..., Any]) -> Method:
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"{name}: {error}: import at run time what its annotations name") from None
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1:]
    for each in parameters:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise ConfigError(f"{name}: {each} takes any number of arguments; name them, or take a list or a dict")
        if each.name == "deadline":
            raise ConfigError(f"{name}: deadline is what callers give of their own; choose another name")
        if each.name not in hints:
            raise ConfigError(f"{name}: {each.name} has no annotation; add one")
    if "return" not in hints:
        raise ConfigError(f"{name}: the result has no annotation; add one, e.g. -> None")
    takes_origin = bool(parameters) and hints[parameters[0].name] is Origin
    valued = parameters[takes_origin:]
    result = hints["return"]
    kinds: tuple[ValueType, ...] | ValueType | None
    if typing.get_origin(result) is tuple:
        kinds = tuple(read_type(f"{name}: the result", each) for each in typing.get_args(result))
    else:
        kinds = None if result is type(None) else read_type(f"{name}: the result", result)
    return Method(
        name=name,
        takes_origin=takes_origin,
        names=tuple(each.name for each in valued),
        parameters=tuple(read_type(f"{name}: {each.name}", hints[each.name]) for each in valued),
        result=kinds,
        signature=signature.replace(parameters=parameters),
        num_positional=sum(each.kind is not each.KEYWORD_ONLY for each in valued),
    )
