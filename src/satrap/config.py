"""What a user says about a table: frozen dataclasses, checked when they are made, and their plain-dict form.

Reads nothing and decides nothing at run time: `store` hands these values to the native core. Every class checks itself
in `__post_init__`, so an object that exists is valid. `to_dict` gives plain JSON types; `from_dict` gives an equal
object back and refuses unknown keys, naming the nearest known one.
"""

import difflib
import math
import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from satrap.errors import ConfigError

# The core computes in float32: a larger number would become infinite there.
_LARGEST_VALUE = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}
_LARGEST_INT = 2**63 - 1
_LARGEST_STEP = 2**32 - 2
_MAX_NAME_BYTES = 255
_DEFAULT_BUCKETS = 256  # without a capacity: enough that many threads rarely meet and that growing one is short
_MAX_DEFAULT_BUCKETS = 4096
_ROWS_PER_BUCKET = 32768


class _Config:
    """The dict form that all configuration classes share."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """This object as plain JSON types; `{"type": class name, field: value, ...}`."""
        return {"type": type(self).__name__} | _fields_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The object that `to_dict` wrote. Fields that are missing take their defaults."""
        given = dict(_require_mapping(cls.__name__, data))
        kind = given.pop("type", cls.__name__)
        if kind != cls.__name__:
            raise ConfigError(f"{cls.__name__}: type is {kind!r}; wanted {cls.__name__!r}, or leave it out")
        return cls(**_known_keys(cls, cls.__name__, given))


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD(_Config):
    """Stochastic gradient descent, with torch's momentum and Nesterov momentum."""

    lr: float = 0.01
    """Learning rate; `Store.set_lr` and `update(lr=...)` override it."""
    momentum: float = 0.0
    """Momentum factor; 0 keeps no state. The buffer of a row moves only in steps in which it has a gradient."""
    nesterov: bool = False
    """Nesterov's form of momentum; needs `momentum` > 0."""
    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    def __post_init__(self) -> None:
        _check_numbers(self, lr=0.0, momentum=0.0, weight_decay=0.0)
        _set(self, "nesterov", _flag("SGD", "nesterov", self.nesterov))
        if self.nesterov and self.momentum == 0.0:
            raise ConfigError(
                "SGD: nesterov is True and momentum is 0; Nesterov's form needs momentum > 0: "
                "give momentum (e.g. 0.9) or nesterov=False"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(_Config):
    """Adagrad: one accumulator per element."""

    lr: float = 0.01
    """Learning rate; `Store.set_lr` and `update(lr=...)` override it."""
    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""
    initial_accumulator_value: float = 0.0
    """What the accumulators of a new row start from."""
    eps: float = 1e-10
    """Added to the root of the accumulator. With 0, as in torch, a gradient of 0 on an accumulator of 0 gives NaN."""

    def __post_init__(self) -> None:
        _check_numbers(self, lr=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWiseAdagrad(_Config):
    """Adagrad with one accumulator per row, the mean of the squared gradient, as FBGEMM defines it."""

    lr: float = 0.01
    """Learning rate; `Store.set_lr` and `update(lr=...)` override it."""
    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""
    initial_accumulator_value: float = 0.0
    """What the accumulator of a new row starts from."""
    eps: float = 1e-8
    """Added to the root of the accumulator. With 0 a gradient of 0 on an accumulator of 0 gives NaN."""

    def __post_init__(self) -> None:
        _check_numbers(self, lr=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam(_Config):
    """Adam; every row counts its own steps, so a rare id's bias correction is its own."""

    lr: float = 1e-3
    """Learning rate; `Store.set_lr` and `update(lr=...)` override it."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square; each in [0, 1)."""
    eps: float = 1e-8
    """Added to the denominator. With 0, as in torch, a row whose gradients were all 0 becomes NaN."""
    weight_decay: float = 0.0
    """L2 penalty, added to the gradient."""

    def __post_init__(self) -> None:
        _check_numbers(self, lr=0.0, eps=0.0, weight_decay=0.0)
        _set(self, "betas", _betas("Adam", self.betas))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW(_Config):
    """Adam with decoupled weight decay; every row counts its own steps."""

    lr: float = 1e-3
    """Learning rate; `Store.set_lr` and `update(lr=...)` override it."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square; each in [0, 1)."""
    eps: float = 1e-8
    """Added to the denominator. With 0, as in torch, a row whose gradients were all 0 becomes NaN."""
    weight_decay: float = 1e-2
    """The row shrinks by lr * weight_decay of itself in each of its steps."""

    def __post_init__(self) -> None:
        _check_numbers(self, lr=0.0, eps=0.0, weight_decay=0.0)
        _set(self, "betas", _betas("AdamW", self.betas))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ftrl(_Config):
    """FTRL-Proximal (McMahan et al., 2013), per coordinate. z starts where the closed form gives the initial value, for
    this `lr`: the first update of a row after the lr has changed moves it by that difference as well."""

    lr: float = 0.05
    """The paper's alpha; > 0, because the formula divides by it."""
    beta: float = 1.0
    """The paper's beta; together with `l2` > 0, because a new row's denominator is beta / lr + l2."""
    l1: float = 0.0
    """L1 strength: elements whose |z| stays within it are exactly 0."""
    l2: float = 0.0
    """L2 strength."""

    def __post_init__(self) -> None:
        _check_numbers(self, lr=0.0, beta=0.0, l1=0.0, l2=0.0)
        if self.lr == 0.0:
            raise ConfigError("Ftrl: lr is 0; wanted > 0, because the formula divides by it: give e.g. lr=0.05")
        if self.beta == 0.0 and self.l2 == 0.0:
            raise ConfigError(
                "Ftrl: beta and l2 are both 0, so a new row divides by 0: give one of them, e.g. beta=1.0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Uniform(_Config):
    """Initial values drawn evenly from [low, high)."""

    low: float = -0.01
    """The smallest value."""
    high: float = 0.01
    """The largest value; at least `low`."""

    def __post_init__(self) -> None:
        _check_numbers(self, low=-math.inf, high=-math.inf)
        if self.low > self.high:
            raise ConfigError(f"Uniform: low {self.low} is above high {self.high}; swap them")


@dataclass(frozen=True, kw_only=True, slots=True)
class Normal(_Config):
    """Initial values drawn from a normal distribution."""

    mean: float = 0.0
    """Its mean."""
    std: float = 0.01
    """Its standard deviation; at least 0."""

    def __post_init__(self) -> None:
        _check_numbers(self, mean=-math.inf, std=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Zeros(_Config):
    """Initial values of 0."""


@dataclass(frozen=True, slots=True)
class Constant(_Config):
    """One initial value for every element."""

    value: float
    """That value."""

    def __post_init__(self) -> None:
        _check_numbers(self, value=-math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledUniform(_Config):
    """Initial values drawn evenly from [-1/sqrt(dim), 1/sqrt(dim))."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Always(_Config):
    """Every id gets a row when it is first looked up for training."""


@dataclass(frozen=True, slots=True)
class Probability(_Config):
    """An id without a row gets one with probability `p` in each step that looks it up for training."""

    p: float
    """In (0, 1]. The draw is a pure function of (seed, table, id, step)."""

    def __post_init__(self) -> None:
        _check_numbers(self, p=0.0)
        if not 0.0 < self.p <= 1.0:
            raise ConfigError(f"Probability: p is {self.p}; wanted a number in (0, 1]")


@dataclass(frozen=True, slots=True)
class MinCount(_Config):
    """An id gets a row at its n-th sighting; a step counts at most once."""

    n: int
    """From 1 (at once) to 2**31 - 1."""
    window: int = field(default=1 << 20, kw_only=True)
    """How many ids not yet admitted the table remembers; the least recently sighted are forgotten first."""

    def __post_init__(self) -> None:
        _set(self, "n", _integer("MinCount", "n", self.n, 1, 2**31 - 1))
        _set(self, "window", _integer("MinCount", "window", self.window, 1, _LARGEST_INT))


Optimizer = SGD | Adagrad | RowWiseAdagrad | Adam | AdamW | Ftrl
Initial = Uniform | Normal | Zeros | Constant | ScaledUniform
Admission = Always | Probability | MinCount


@dataclass(frozen=True, slots=True)
class Table(_Config):
    """One embedding table: what a row is, how it starts, learns, lives and goes."""

    name: str
    """Names the table in messages and seeds its initial values: another name gives other rows."""
    _: KW_ONLY
    dim: int
    """Numbers in a row's values; 1 to 65536."""
    optimizer: Optimizer = field(default_factory=Adagrad)
    """How a gradient changes a row; decides what state a row carries."""
    initial: Initial = field(default_factory=Uniform)
    """A new row's values: a pure function of (seed, table name, id)."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """How values are stored. 16-bit types are rounded stochastically after an update; state is always float32."""
    admission: Admission = field(default_factory=Always)
    """Which ids get a row."""
    capacity: int | None = None
    """Rows the table may hold; None: no bound."""
    on_full: Literal["evict", "raise", "grow"] = "evict"
    """At capacity: drop the least recently used step first, raise CapacityError, or take capacity as a hint only."""
    expire_after: int | None = None
    """Steps after which a row not looked up or updated is gone; None: never."""
    absent: Literal["initial", "zeros"] = "initial"
    """What an id without a row reads as."""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """A NaN or infinite gradient: refuse the whole update, or leave out that position and count it."""
    num_buckets: int | None = None
    """Into how many parts, each with its own lock, the table is cut: a power of two up to 65536 and at most
    `capacity`. It decides which row is evicted, so it is saved. None: see `resolved_num_buckets`."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        where = f"table {self.name!r}"
        _set(self, "dim", _integer(where, "dim", self.dim, 1, 65536))
        for name, kinds in _KINDS.items():
            _check_kind(where, name, getattr(self, name), kinds)
        for name, choices in _CHOICES.items():
            _check_choice(where, name, getattr(self, name), choices)
        for name, largest in (("capacity", _LARGEST_INT), ("expire_after", _LARGEST_STEP), ("num_buckets", 65536)):
            if getattr(self, name) is not None:
                _set(self, name, _integer(where, name, getattr(self, name), 1, largest))
        _check_num_buckets(where, self.num_buckets, self.capacity)
        _check_initial_fits(where, self.initial, self.dtype)

    @property
    def resolved_num_buckets(self) -> int:
        """`num_buckets`, or its default: 256 without a capacity, else about one per 32768 rows, at most 4096."""
        if self.num_buckets is not None:
            return self.num_buckets
        if self.capacity is None:
            return _DEFAULT_BUCKETS
        wanted = min(max(1, self.capacity // _ROWS_PER_BUCKET), _MAX_DEFAULT_BUCKETS)
        return 1 << (wanted.bit_length() - 1)

    def to_dict(self) -> dict[str, Any]:
        """This table as plain JSON types."""
        return _fields_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The table that `to_dict` wrote. Fields that are missing take their defaults."""
        name = _require_mapping("Table", data).get("name")
        where = f"table {name!r}" if isinstance(name, str) else "Table"
        given = _known_keys(cls, where, data)
        for key, kinds in _KINDS.items():
            if key in given:
                given[key] = _kind_from_dict(f"{where}: {key}", given[key], kinds)
        return cls(**given)


_KINDS: dict[str, tuple[type[_Config], ...]] = {
    "optimizer": get_args(Optimizer),
    "initial": get_args(Initial),
    "admission": get_args(Admission),
}
_CHOICES = {
    "dtype": tuple(_LARGEST_VALUE),
    "on_full": ("evict", "raise", "grow"),
    "absent": ("initial", "zeros"),
    "on_nonfinite": ("raise", "skip"),
}


def _set(config: _Config, name: str, value: object) -> None:
    object.__setattr__(config, name, value)  # how a frozen dataclass stores the checked value


def _found(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _nearest(name: str, known: list[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def _check_numbers(config: _Config, **lowest: float) -> None:
    """Each named field must be a finite float32 number of at least the given one; stores it as a float."""
    for name, low in lowest.items():
        _set(config, name, _number(type(config).__name__, name, getattr(config, name), low))


def _number(where: str, name: str, value: object, low: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{where}: {name} is {_found(value)}; wanted a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST_VALUE["float32"]:
        raise ConfigError(f"{where}: {name} is {_found(value)}; wanted a finite number that float32 can hold")
    if number < low:
        raise ConfigError(f"{where}: {name} is {_found(value)}; wanted a number of at least {low:g}")
    return number


def _integer(where: str, name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{where}: {name} is {_found(value)}; wanted an integer from {low} to {high}")
    number = int(value)
    if not low <= number <= high:
        raise ConfigError(f"{where}: {name} is {number}; wanted an integer from {low} to {high}")
    return number


def _flag(where: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} is {_found(value)}; wanted True or False")
    return value


def _betas(where: str, value: object) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{where}: betas is {_found(value)}; wanted two numbers, e.g. (0.9, 0.999)")
    first, second = (_number(where, f"betas[{position}]", beta, 0.0) for position, beta in enumerate(value))
    if first >= 1.0 or second >= 1.0:
        raise ConfigError(f"{where}: betas is {_found(value)}; wanted each in [0, 1), e.g. (0.9, 0.999)")
    return first, second


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"Table: name is {_found(name)}; wanted a string, e.g. Table('item', dim=16)")
    # isprintable() refuses control characters and lone surrogates, which neither a message nor UTF-8 could carry.
    if not name or not name.isprintable() or len(name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(f"Table: name is {_found(name)}; wanted 1 to {_MAX_NAME_BYTES} bytes of printable text")


def _check_kind(where: str, name: str, value: object, kinds: tuple[type[_Config], ...]) -> None:
    if isinstance(value, type) and value in kinds:
        raise ConfigError(f"{where}: {name} is the class {value.__name__}; wanted an object: {value.__name__}(...)")
    if type(value) not in kinds:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{where}: {name} is {_found(value)}; wanted an object of one of {names}")


def _check_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{where}: {name} is {_found(value)}; wanted one of {', '.join(map(repr, choices))}")


def _check_num_buckets(where: str, num_buckets: int | None, capacity: int | None) -> None:
    if num_buckets is None:
        return
    if num_buckets & (num_buckets - 1):
        below = 1 << (num_buckets.bit_length() - 1)
        raise ConfigError(f"{where}: num_buckets is {num_buckets}; wanted a power of two: give {below} or {2 * below}")
    if capacity is not None and num_buckets > capacity:
        raise ConfigError(
            f"{where}: num_buckets is {num_buckets} and capacity {capacity}, so some buckets could hold no row: "
            "give fewer buckets or more capacity"
        )


def _check_initial_fits(where: str, initial: Initial, dtype: str) -> None:
    extent = 0.0
    match initial:
        case Uniform(low=low, high=high):
            extent = max(abs(low), abs(high))
        case Normal(mean=mean):
            extent = abs(mean)
        case Constant(value=value):
            extent = abs(value)
    if extent > _LARGEST_VALUE[dtype]:
        raise ConfigError(
            f"{where}: initial is {initial!r}, but {dtype} holds at most {_LARGEST_VALUE[dtype]:g}: "
            "give smaller values or dtype='float32'"
        )


def _fields_to_dict(config: Any) -> dict[str, Any]:
    return {each.name: _plain(getattr(config, each.name)) for each in fields(config)}


def _plain(value: Any) -> Any:
    if isinstance(value, _Config):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _require_mapping(where: str, data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: found {_found(data)}; wanted a dict, as to_dict() gives")
    return data


def _known_keys(cls: Any, where: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` as keyword arguments of `cls`: every key known, every required one there."""
    known = [each.name for each in fields(cls)]
    for key in data:
        if key in known:
            continue
        if not known:
            raise ConfigError(f"{where}: unknown key {key!r}; {cls.__name__} has none: remove it")
        raise ConfigError(f"{where}: unknown key {key!r}; the nearest known one is {_nearest(str(key), known)!r}")
    for each in fields(cls):
        if each.name not in data and each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(f"{where}: the key {each.name!r} is missing; add it")
    return dict(data)


def _kind_from_dict(where: str, data: object, kinds: tuple[type[_Config], ...]) -> _Config:
    by_name = {kind.__name__: kind for kind in kinds}
    found = _require_mapping(where, data).get("type")
    if found is None:
        raise ConfigError(f"{where}: the key 'type' is missing; add it, one of {', '.join(by_name)}")
    if not isinstance(found, str) or found not in by_name:
        nearest = _nearest(str(found), list(by_name))
        raise ConfigError(f"{where}: type is {found!r}; the nearest known one is {nearest!r} of {', '.join(by_name)}")
    try:
        return by_name[found].from_dict(_require_mapping(where, data))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
