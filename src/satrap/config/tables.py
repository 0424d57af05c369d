"""Declarations of a table and of a feature that looks up its rows: frozen dataclasses that check themselves.

`satrap.table.engine` passes these values to the native core. Every class checks itself in `__post_init__`, so an object
that exists is valid; its docstring explains its fields. `to_dict` returns plain JSON types; `from_dict` makes an equal
object of them and refuses unknown keys, naming a near one.
"""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Self, get_args

from satrap.config.id_set import Ids, IdSet, checked_frozen, frozen_from_json
from satrap.config.optimizers import Adagrad, Optimizer, RowWiseAdagrad
from satrap.config.validation import (
    LARGEST_FLOAT32,
    LAST_STEP,
    Config,
    Serializable,
    check_choice,
    check_flag,
    check_id,
    check_integer,
    check_kind,
    check_name,
    check_numbers,
    describe,
    known_arguments,
    require_mapping,
    set_field,
)
from satrap.errors import ConfigError
from satrap.hidden_names import internal

LAST_VERSION = 2**32 - 2
"""The largest version of a table."""
_MOST_DEVIATIONS = 10  # no draw of Normal is further from the mean
_LARGEST_VALUE = {"float32": LARGEST_FLOAT32, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}
_MAX_LENGTH = 65536
_OF_TORCH = {"mode": 'write table.bag("mean"), e.g.', "per_sample_weights": "write weighted=True"}
MAX_BUCKETS = 65536
_MAX_BUCKET_ROWS = 2**32 - 2  # the core numbers a bucket's rows in 32 bits, and one number means none
_MAX_ROWS = MAX_BUCKETS * _MAX_BUCKET_ROWS
DEFAULT_BUCKETS = 256  # without a capacity: threads rarely wait, and with 4096 a step is slower
_MAX_DEFAULT_BUCKETS = 4096
_ROWS_PER_BUCKET = 32768


@dataclass(frozen=True, slots=True)
class Uniform(Config):
    """Initial values drawn evenly from [low, high). The default is much narrower than what `torch.nn.Embedding` draws,
    N(0, 1), which is Normal(std=1.0).

    low: the smallest value.
    high: above every value, unless it equals `low`; at least `low`.
    """

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        check_numbers(self, low=-math.inf, high=-math.inf)
        if self.low > self.high:
            raise ConfigError(f"Uniform: low {self.low} is above high {self.high}: give both, e.g. Uniform(-0.1, 0.1)")


@dataclass(frozen=True, slots=True)
class Normal(Config):
    """Initial values drawn from a normal distribution.

    mean: its mean.
    std: its standard deviation; at least 0.
    """

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        check_numbers(self, mean=-math.inf, std=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Zeros(Config):
    """Initial values of 0."""


@dataclass(frozen=True, slots=True)
class Constant(Config):
    """One initial value for every element.

    value: that value.
    """

    value: float

    def __post_init__(self) -> None:
        check_numbers(self, value=-math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledUniform(Config):
    """Initial values drawn evenly from [-1/sqrt(dim), 1/sqrt(dim))."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Always(Config):
    """Every id gets a row when it is first looked up for training."""


@dataclass(frozen=True, slots=True)
class Probability(Config):
    """An id without a row gets one with probability `p` in each step that looks it up for training.

    p: in (0, 1]. The draw is a pure function of (seed, table, id, step).
    """

    p: float

    def __post_init__(self) -> None:
        check_numbers(self, p=0.0)
        if not 0.0 < self.p <= 1.0:
            raise ConfigError(f"Probability: p is {self.p}; expected a number in (0, 1]")


@dataclass(frozen=True, slots=True)
class MinCount(Config):
    """An id gets a row at its n-th sighting; a step counts at most once.

    An id that recurs in a later epoch is sighted again: from epoch n on every id has a row that the window still
    remembers. `first_epoch_only` admits only ids that occur n times within one pass of the data.

    n: from 1 (at once) to 2**31 - 1.
    window: how many ids not yet admitted the table remembers; the least recently sighted are forgotten first.
    first_epoch_only: count sightings in the first epoch of a source only (`epochs=` of the source); in later ones an
        id without a row gets none. Lookups of a `Store` belong to no source and all count.
    """

    n: int
    window: int = field(default=1 << 20, kw_only=True)
    first_epoch_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        set_field(self, "n", check_integer("MinCount", "n", self.n, 1, 2**31 - 1))
        set_field(self, "window", check_integer("MinCount", "window", self.window, 1, 2**63 - 1))
        set_field(self, "first_epoch_only", check_flag("MinCount", "first_epoch_only", self.first_epoch_only))


Initial = Uniform | Normal | Zeros | Constant | ScaledUniform
Admission = Always | Probability | MinCount
Pooling = Literal["sum", "mean", "sqrtn", "none"]
Keep = Literal["last", "first"]


@internal("frozen_ids with_buckets")
@dataclass(frozen=True, slots=True, repr=False)
class Table(Serializable):
    """One embedding table: what a row holds, how it starts, learns and expires.

    name: the table's name in messages; a seed of its initial values: another name gives other rows.
    dim: numbers in a row's values; 1 to 65536.
    optimizer: how a gradient changes a row; decides what state a row carries. Default: Adagrad().
    initial: a new row's values: a pure function of (seed, table name, id). Default: Uniform(-0.01, 0.01).
    dtype: how values are stored. 16-bit types are rounded stochastically after an update; state is always float32.
    admission: which ids get a row. Default: Always().
    num_rows: ids are 0 to num_rows - 1, so rows are found without a hash; None: any 64-bit number is an id. An id out
        of range is an error. capacity, admission and expire_after cannot be set beside it. It does not change a row, so
        a saved table may be restored with it or without it, if its ids are in range.
    capacity: rows the table may hold, at most 2**32 - 2 for each bucket; None: no bound.
    on_full: at capacity: evict rows of the least recently used step, raise CapacityError, or treat capacity as a hint.
        Without a capacity a table always grows; "raise" is refused then, because it would never take effect.
    expire_after: steps after which a row that is neither looked up nor updated expires; None: never.
    absent: what an id without a row reads as.
    on_nonfinite: a NaN or infinite gradient: refuse the whole update, or leave out that position and count it.
    frozen: rows that no update changes: True for all, or those of some ids, such as pretrained rows: a range, or any
        ids in a list, a set, an array or a tensor (int64 as its bit pattern). They are looked up, inserted and written
        like other rows. A saved table may be restored with other frozen rows. The form in JSON has the number of ids
        and their checksum alone, unless they are a range.
    num_buckets: how many parts, each with its own lock, the table is divided into: a power of two up to 65536 and at
        most `capacity`. It decides which row is evicted, so it is saved; a table that never evicts may be restored with
        another number. None: see `resolved_num_buckets`; without a capacity a run on more than 32 servers has more, at
        least 8 for each server that it starts with. With a capacity the default is 1 for 32768 rows, so a small table
        may leave servers without rows: set 8 for each server.
    shard: how several servers, or trainers without servers, divide the table: by rows, or the whole "table" to one of
        them. With rows on the devices of several trainers also "replicated": each has all rows, which suits small
        tables; or "columns": each has some columns of all rows, for an optimizer that treats each number alone;
        elsewhere both mean "rows". It does not change a row, so a saved table may be restored with another one.
    """

    name: str
    dim: int
    _: KW_ONLY
    optimizer: Optimizer = field(default_factory=Adagrad)
    initial: Initial = field(default_factory=Uniform)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    admission: Admission = field(default_factory=Always)
    num_rows: int | None = None
    capacity: int | None = None
    on_full: Literal["evict", "raise", "grow"] = "evict"
    expire_after: int | None = None
    absent: Literal["initial", "zeros"] = "initial"
    on_nonfinite: Literal["raise", "skip"] = "raise"
    frozen: "bool | Ids" = False  # without quotes, help shows all of ArrayLike
    num_buckets: int | None = None
    shard: Literal["rows", "table", "columns", "replicated"] = "rows"

    def __post_init__(self) -> None:
        check_name("Table", self.name, "Table('item', dim=16)")
        where = f"table {self.name!r}"
        set_field(self, "dim", check_integer(where, "dim", self.dim, 1, 65536))
        for name, kinds in _KINDS.items():
            check_kind(where, name, getattr(self, name), kinds)
        for name, choices in _CHOICES.items():
            check_choice(where, name, getattr(self, name), choices)
        for name, largest in _LARGEST.items():
            if getattr(self, name) is not None:
                set_field(self, name, check_integer(where, name, getattr(self, name), 1, largest))
        _check_num_rows(where, self)
        set_field(self, "frozen", checked_frozen(where, self.frozen, self.num_rows))
        if self.on_full == "raise" and self.capacity is None:
            raise ConfigError(
                f"{where}: on_full is 'raise' and there is no capacity to reach: set a capacity, or leave on_full out"
            )
        if self.shard == "columns" and isinstance(self.optimizer, RowWiseAdagrad):
            raise ConfigError(
                f"{where}: shard is 'columns' and the optimizer RowWiseAdagrad, whose step needs the whole row; "
                "expected SGD, Adagrad, Adam, AdamW or Ftrl, or another shard"
            )
        _check_buckets(where, self)
        _check_initial_fits(where, self.initial, self.dtype)

    @property
    def resolved_num_buckets(self) -> int:
        """`num_buckets`, or its default: 256 without a capacity, else about one per 32768 rows, at most 4096."""
        if self.num_buckets is not None:
            return self.num_buckets
        if self.capacity is None:
            return DEFAULT_BUCKETS
        count = min(max(1, self.capacity // _ROWS_PER_BUCKET), _MAX_DEFAULT_BUCKETS)
        return 1 << (count.bit_length() - 1)

    def with_buckets(self, num_buckets: int) -> "Table":
        """Return the table with so many buckets, unless it names a number, or a capacity that gives one."""
        if self.num_buckets is not None or self.capacity is not None or num_buckets == self.resolved_num_buckets:
            return self
        return replace(self, num_buckets=num_buckets)

    @property
    def is_direct(self) -> bool:
        """Whether ids are 0 to num_rows - 1."""
        return self.num_rows is not None

    @property
    def frozen_ids(self) -> range | IdSet:
        """The ids whose rows no update changes."""
        return self.frozen if isinstance(self.frozen, range | IdSet) else range(2**64 * (self.frozen is True))

    @known_arguments(_OF_TORCH)
    def bag(self, pooling: Pooling, *, weighted: bool = False, padding_id: int | None = None) -> "Feature":
        """Return a feature of this table that pools any number of ids in a sample into one row; see `Feature`."""
        return Feature(self, pooling, weighted=weighted, padding_id=padding_id)

    @known_arguments()
    def sequence(
        self,
        max_length: int | None = None,
        *,
        keep: Keep = "last",
        padding_id: int | None = None,
        jagged: bool | None = None,
        aligned_with: str | None = None,
    ) -> "Feature":
        """Return a feature of this table that keeps a sample's rows in order: its last, or first, `max_length`; see
        `Feature`.

        jagged: None: whether `max_length` is None."""
        return Feature(
            self,
            "none",
            max_length=max_length,
            keep=keep if max_length is not None else None,
            padding_id=padding_id,
            jagged=max_length is None if jagged is None else jagged,
            aligned_with=aligned_with,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the table that `to_dict` wrote. Of any set of frozen ids it has the number and the checksum."""
        given = dict(require_mapping("Table", data))
        if "frozen" in given:
            given["frozen"] = frozen_from_json(cls._where(given), given["frozen"])
        return super(Table, cls).from_dict(given)

    @classmethod
    def _where(cls, data: Mapping[str, Any]) -> str:
        name = data.get("name")
        return f"table {name!r}" if isinstance(name, str) else "Table"


@dataclass(frozen=True, slots=True, repr=False)
class Feature(Config):
    """A column of ids that are looked up in a table, and how the rows of one sample, its bag, are combined.

    table: the table that holds the ids' rows. Several features may share a table.
    pooling: "sum"; "mean": the sum divided by the number of ids; "sqrtn": by its root; an empty bag gives 0.
        "none": the rows themselves, a sequence: padded with zeros to `max_length`, with a mask, or jagged.
    weighted: each id comes with a weight that its row is multiplied by before the sum. "mean" and "sqrtn" divide by the
        number of ids, not by their weights.
    max_length: for "none" only: rows of a sample; 1 to 65536. Ids beyond it are counted and not looked up. None: a
        jagged sequence is as long as its sample.
    keep: for "none" only: which ids of a longer sample are looked up, the "last" (the default) or the "first".
    padding_id: an id that stands for no id, e.g. the 0 that pads lists to one length. It is dropped from its bag,
        with its weight, before anything is counted or cut.
    jagged: for "none" only: the rows of all samples follow each other without padding, [ids, dim], beside the offset
        where each sample begins.
    aligned_with: for "none" only: another sequence of the model whose samples have the same lengths, such as the items
        where this one has their categories. Both need the same `max_length`, `keep` and `jagged`.
    """

    table: Table
    pooling: Pooling = "sum"
    _: KW_ONLY
    weighted: bool = False
    max_length: int | None = None
    keep: Keep | None = None
    padding_id: int | None = None
    jagged: bool = False
    aligned_with: str | None = None

    def __post_init__(self) -> None:
        check_kind("Feature", "table", self.table, (Table,))
        where = f"a feature of table {self.table.name!r}"
        check_choice(where, "pooling", self.pooling, get_args(Pooling))
        set_field(self, "weighted", check_flag(where, "weighted", self.weighted))
        set_field(self, "jagged", check_flag(where, "jagged", self.jagged))
        if self.padding_id is not None:
            set_field(self, "padding_id", check_id(where, "padding_id", self.padding_id))
        if self.aligned_with is not None:
            check_name(where, self.aligned_with, "'history'")
        if self.pooling != "none":
            for name in ("max_length", "keep", "jagged", "aligned_with"):
                if (value := getattr(self, name)) not in (None, False):
                    raise ConfigError(
                        f"{where}: {name} is {describe(value)} and pooling {self.pooling!r}, which takes bags of any "
                        f"length: leave {name} out, or use table.sequence(max_length)"
                    )
            return
        self._check_length(where)
        if self.weighted:
            raise ConfigError(
                f"{where}: weighted is True and pooling 'none', which sums nothing: leave weighted out, "
                "and multiply the rows in the model"
            )

    def _check_length(self, where: str) -> None:
        if self.max_length is not None:
            set_field(self, "max_length", check_integer(where, "max_length", self.max_length, 1, _MAX_LENGTH))
            set_field(self, "keep", "last" if self.keep is None else self.keep)
            check_choice(where, "keep", self.keep, get_args(Keep))
        elif not self.jagged:
            raise ConfigError(
                f"{where}: pooling is 'none' and there is no max_length: use table.sequence(max_length), or "
                "table.sequence() for a jagged sequence of any length"
            )
        elif self.keep is not None:
            raise ConfigError(
                f"{where}: keep is {describe(self.keep)} and there is no max_length, so nothing is cut: give a "
                "max_length, or leave keep out"
            )

    @property
    def padded_length(self) -> int | None:
        """The length to which a sequence is padded; None if the feature is pooled or jagged."""
        return None if self.jagged else self.max_length


_KINDS: dict[str, tuple[type[Config], ...]] = {
    "optimizer": get_args(Optimizer),
    "initial": get_args(Initial),
    "admission": get_args(Admission),
}
_LARGEST = {"num_rows": _MAX_ROWS, "capacity": _MAX_ROWS, "expire_after": LAST_STEP, "num_buckets": MAX_BUCKETS}
_CHOICES = {
    "dtype": tuple(_LARGEST_VALUE),
    "on_full": ("evict", "raise", "grow"),
    "absent": ("initial", "zeros"),
    "on_nonfinite": ("raise", "skip"),
    "shard": ("rows", "table", "columns", "replicated"),
}


def _check_num_rows(where: str, table: Table) -> None:
    if table.num_rows is None:
        return
    reasons = {
        "capacity": "bounds the number of rows",
        "admission": "keeps rare ids from getting rows",
        "expire_after": "removes rows",
    }
    for name, reason in reasons.items():
        if getattr(table, name) not in (None, Always()):
            raise ConfigError(
                f"{where}: num_rows is {table.num_rows} and {name} {getattr(table, name)!r}, which {reason}; with "
                f"num_rows every id has a row: leave one of the two out"
            )


def with_frozen_ids(table: Table, ids: Any) -> Table:
    """Return a table that was read from JSON with its set of frozen ids, which came beside it."""
    complete = replace(table, frozen=ids)
    if complete != table:
        raise ConfigError(
            f"table {table.name!r}: frozen is {table.frozen!r}; expected its ids, found {complete.frozen!r}"
        )
    return complete


def require_frozen_ids(table: Table) -> None:
    """Raise ConfigError if the frozen ids of a table that is to train are not known: it was read from JSON."""
    frozen = table.frozen_ids
    if isinstance(frozen, IdSet) and not frozen.has_ids:
        raise ConfigError(
            f"table {table.name!r}: frozen is {frozen!r}, of which the ids are not known; expected the ids, to train "
            "the others: declare the table with frozen=... and restore its rows"
        )


def _check_buckets(where: str, table: Table) -> None:
    num_buckets, capacity = table.resolved_num_buckets, table.capacity
    if num_buckets & (num_buckets - 1):
        below = 1 << (num_buckets.bit_length() - 1)
        raise ConfigError(f"{where}: num_buckets is {num_buckets}; expected a power of two: {below} or {2 * below}")
    if capacity is not None and num_buckets > capacity:
        raise ConfigError(
            f"{where}: num_buckets is {num_buckets} and capacity {capacity}, so some buckets could hold no row: "
            "give fewer buckets or more capacity"
        )
    for name, most in (("capacity", capacity), ("num_rows", table.num_rows)):
        if most is not None and most > num_buckets * _MAX_BUCKET_ROWS:
            needed = 1 << ((most - 1) // _MAX_BUCKET_ROWS).bit_length()
            raise ConfigError(
                f"{where}: {name} is {most} in {num_buckets} buckets; expected at most {_MAX_BUCKET_ROWS} in each: "
                f"give num_buckets={needed} or less {name}"
            )


def _check_initial_fits(where: str, initial: Initial, dtype: str) -> None:
    extent = 0.0
    match initial:
        case Uniform(low=low, high=high):
            extent = max(abs(low), abs(high))
            if high - low > LARGEST_FLOAT32:
                raise ConfigError(f"{where}: initial is {initial!r}, but float32 cannot hold high - low: give less")
        case Normal(mean=mean, std=std):
            extent = abs(mean) + _MOST_DEVIATIONS * std
        case Constant(value=value):
            extent = abs(value)
    if extent > _LARGEST_VALUE[dtype]:
        raise ConfigError(
            f"{where}: initial is {initial!r}, but {dtype} holds at most {_LARGEST_VALUE[dtype]:g}: "
            "give smaller values or dtype='float32'"
        )
