"""The basis of the configuration classes: the checks of a field's value, and the plain-dict form of an object.

It knows no class in particular: `Serializable` reads the fields of a dataclass and their types. A check takes the owner
of the value ("table 'item'"), the field's name and the value; it returns the value in its own type, or raises
ConfigError with what was found and what was expected. Integers of calls are checked by the same rule; their error is
InputError.
"""

import difflib
import math
import numbers
import os
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, wraps
from inspect import signature
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Never, ParamSpec, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from satrap.errors import ConfigError, SatrapError

LARGEST_FLOAT32 = 3.4028234663852886e38
"""The core computes in float32, where a larger number would become infinite."""
LAST_STEP = 2**32 - 2
"""The largest batch number; steps are stored in 32 bits."""
_MAX_NAME_BYTES = 255
V = TypeVar("V")
P = ParamSpec("P")
R = TypeVar("R")
_NOTHING: Mapping[str, str] = MappingProxyType({})
_PLAIN = (int, str, float, bool, NoneType)


class InText(ABC):
    """A value whose form in JSON is a text."""

    __slots__ = ()

    @abstractmethod
    def to_json(self) -> str:
        """Return the text."""


class KnownArguments:
    """A dataclass whose TypeError for an argument that it does not have says which is near."""

    __slots__ = ()

    def __new__(cls, *_: Any, **arguments: Any) -> Self:
        """Create the object, before the dataclass's `__init__`, which has a bare error."""
        if arguments and is_dataclass(cls):
            names = [field.name for field in fields(cls) if field.init]
            require_known(cls.__name__, arguments, names)
        return super().__new__(cls)


class Serializable(KnownArguments):
    """A dataclass with a form in plain JSON types: its fields by name. A field's type says how to read its form."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the required fields, then those that differ from their defaults. Dataclasses with repr=False use it,
        which have many fields."""
        shown = []
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if value != default:
                shown.append(f"{'' if default is MISSING else field.name + '='}{value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_dict(self) -> dict[str, Any]:
        """Return this object as plain JSON types; ConfigError if it holds a table, a filesystem or the like."""
        values = {name: getattr(self, name) for name in _types(type(self))}
        return {name: value if type(value) in _PLAIN else _to_json(self, name, value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the object that `to_dict` wrote. Missing fields take their defaults."""
        where = cls._where(require_mapping(cls.__name__, data))
        values, types = known_keys(cls, where, data), _types(cls)
        for name, value in values.items():
            if types[name] not in _PLAIN:
                values[name] = _from_json(f"{where}: {name}", types[name], value)
        return cls(**values)

    @classmethod
    def _where(cls, data: Mapping[str, Any]) -> str:
        """Return what errors call the object that `data` describes."""
        return cls.__name__


class Config(Serializable):
    """A dataclass whose form also names its class, since several classes may stand in one place:
    `{"type": class name, field: value, ...}`."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return this object as plain JSON types; ConfigError if it holds a table, a filesystem or the like."""
        return {"type": type(self).__name__} | super().to_dict()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the object that `to_dict` wrote. Missing fields take their defaults."""
        given = dict(require_mapping(cls.__name__, data))
        kind = given.pop("type", cls.__name__)
        if kind != cls.__name__:
            raise ConfigError(f"{cls.__name__}: type is {kind!r}; expected {cls.__name__!r}, or leave it out")
        return super().from_dict(given)


def set_field(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)  # how a frozen dataclass stores the checked value


def describe(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def kind_of(value: object) -> str:
    """Return the type's name with its article: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def suggest(name: object, known: list[str]) -> str:
    """Return the known name nearest to `name`, whatever the case of its letters, if one is near, else all of them."""
    lowered = {one.lower(): one for one in known}
    near = difflib.get_close_matches(str(name).lower(), lowered, n=1)
    return f"the nearest known one is {lowered[near[0]]!r}" if near else f"known are {', '.join(map(repr, known))}"


def require_known(
    where: str, arguments: Iterable[str], known: Collection[str], instead: Mapping[str, str] = _NOTHING
) -> None:
    """Raise TypeError if a keyword argument is none of those that are known. instead: what to do, for some others."""
    for name in arguments:
        if name not in known:
            advice = instead.get(name) or suggest(name, list(known))
            raise TypeError(f"{where} got an unexpected keyword argument {name!r}: {advice}")


def known_arguments(
    instead: Mapping[str, str] = _NOTHING, *, options_of: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a public function or method, whose TypeError for a keyword argument that it does not have
    then says which is near. It costs a call with keyword arguments the comparison of two sets.

    instead: for arguments of other libraries, what to write. options_of: what receives the function's `**options`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = signature(function).parameters.values()
        others = () if options_of is None else signature(options_of).parameters.values()
        known = [p.name for p in own if p.name != "self" and p.kind is not p.VAR_KEYWORD]
        known += [p.name for p in others if p.kind is p.KEYWORD_ONLY]
        names = frozenset(known)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if kwargs and not kwargs.keys() <= names:
                require_known(function.__qualname__.removesuffix(".__init__"), kwargs, known, instead)
            return function(*args, **kwargs)

        return call

    return decorate


class ByName(dict[str, V]):
    """Values by name; the KeyError of another name says which is near."""

    def __init__(self, what: str, values: Mapping[str, V]) -> None:
        """what: what errors call a value: "table"."""
        super().__init__(values)
        self._what = what

    def __missing__(self, name: object) -> Never:
        raise KeyError(f"there is no {self._what} {name!r}; {suggest(name, list(self))}")


def check_numbers(config: Config, **lowest: float) -> None:
    """Check that each named field is a finite float32 number of at least its minimum; store it as a float."""
    for name, low in lowest.items():
        set_field(config, name, check_number(type(config).__name__, name, getattr(config, name), low))


def check_number(where: str, name: str, value: object, low: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{where}: {name} is {describe(value)}; expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_FLOAT32:
        raise ConfigError(f"{where}: {name} is {describe(value)}; expected a finite number that float32 can hold")
    if number < low:
        raise ConfigError(f"{where}: {name} is {describe(value)}; expected a number of at least {low:g}")
    return number


def check_integer(
    where: str, name: str, value: object, low: int, high: int, error: type[SatrapError] = ConfigError
) -> int:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise error(f"{where}: {name} is {describe(value)}; expected an integer from {low} to {high}")
    number = int(value)
    if not low <= number <= high:
        raise error(f"{where}: {name} is {number}; expected an integer from {low} to {high}")
    return number


def check_id(where: str, name: str, value: object) -> int:
    """Return an id as uint64; int64 is taken as its bit pattern."""
    return check_integer(where, name, value, -(2**63), 2**64 - 1) % 2**64


def check_flag(where: str, name: str, value: object, error: type[SatrapError] = ConfigError) -> bool:
    if not isinstance(value, bool):
        raise error(f"{where}: {name} is {describe(value)}; expected True or False")
    return value


def check_name(where: str, name: object, example: str) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name is {describe(name)}; expected a string, e.g. {example}")
    # isprintable() refuses control characters and lone surrogates, which neither a message nor UTF-8 can carry.
    if not name or not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(f"{where}: name is {describe(name)}; expected 1 to {_MAX_NAME_BYTES} bytes of printable text")
    return name


def check_kind(where: str, name: str, value: object, kinds: Sequence[type[Serializable]]) -> None:
    if isinstance(value, type) and value in kinds:
        raise ConfigError(f"{where}: {name} is the class {value.__name__}; expected an object: {value.__name__}(...)")
    if type(value) not in kinds:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{where}: {name} is {describe(value)}; expected an object of one of {names}")


def check_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{where}: {name} is {describe(value)}; expected one of {', '.join(map(repr, choices))}")


def _types(cls: Any) -> dict[str, Any]:
    """Return the type of each field."""
    return _cached_types(cls)


@cache
def _cached_types(cls: Any) -> dict[str, Any]:
    types = get_type_hints(cls)
    return {field.name: types[field.name] for field in fields(cls) if field.init}


def _to_json(owner: object, name: str, value: Any) -> Any:
    if isinstance(value, Serializable):
        return value.to_dict()
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json(owner, name, element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(owner, name, element) for element in value]
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, InText):
        return value.to_json()
    if isinstance(value, _PLAIN):
        return value
    raise ConfigError(
        f"{type(owner).__name__}: {name} is {describe(value)}, which has no form in plain JSON types; "
        "expected paths or URLs"
    )


def _from_json(where: str, kind: Any, value: Any) -> Any:
    """Return the value of a field of type `kind` from its form. Other values are left to the class to
    check."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and NoneType in kinds:
        return None
    classes = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Serializable)]
    if classes and (isinstance(value, Mapping) or len(classes) + (NoneType in kinds) == len(kinds)):
        content = require_mapping(where, value)
        return classes[0].from_dict(content) if len(classes) == 1 else kind_from_dict(where, content, classes)
    for candidate in kinds:
        origin, arguments = get_origin(candidate), get_args(candidate)
        if origin is Mapping and isinstance(value, Mapping):
            return {key: _from_json(where, arguments[1], item) for key, item in value.items()}
        if origin is Sequence or ... in arguments:
            if isinstance(value, list | tuple):
                return tuple(_from_json(where, arguments[0], item) for item in value)
            if len(kinds) == 1:
                raise ConfigError(f"{where} is {describe(value)}; expected a list")
    return value


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a dict of dicts, its keys joined by dots: the form in which configurations are compared."""
    leaves: dict[str, Any] = {}
    for name, value in data.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return leaves


def require_mapping(where: str, data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: found {describe(data)}; expected a dict, as to_dict() returns")
    return data


def known_keys(cls: Any, where: str, data: object) -> dict[str, Any]:
    """Return `data` as keyword arguments of `cls`; raise unless every key is known and every required one present."""
    known, given = list(_types(cls)), dict(require_mapping(where, data))
    for key in given:
        if key in known:
            continue
        if not known:
            raise ConfigError(f"{where}: unknown key {key!r}; {cls.__name__} has none: remove it")
        raise ConfigError(f"{where}: unknown key {key!r}; {suggest(key, known)}")
    for field in fields(cls):
        if field.init and field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{where}: the key {field.name!r} is missing; add it")
    return given


def kind_from_dict(where: str, data: object, kinds: Sequence[type[Serializable]]) -> Serializable:
    by_name = {kind.__name__: kind for kind in kinds}
    type_name = require_mapping(where, data).get("type")
    if type_name is None:
        raise ConfigError(f"{where}: the key 'type' is missing; add it, one of {', '.join(by_name)}")
    if not isinstance(type_name, str) or type_name not in by_name:
        raise ConfigError(f"{where}: type is {type_name!r}; {suggest(type_name, list(by_name))}")
    try:
        return by_name[type_name].from_dict(require_mapping(where, data))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def is_path(text: str) -> bool:
    """Return whether the system and a message can hold this path: no NUL, and Unicode that UTF-8 can write."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False
