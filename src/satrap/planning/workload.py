"""What a job asks for: its tables, the ids of a sample, the dense network and the requested rate. Pure.

`satrap.planning.input_files` reads it from a file, `satrap.planning.job_script` from a script. Ids of a table follow
Zipf's law: the id of rank r occurs with a probability proportional to r ** -zipf.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from satrap.config.tables import Table
from satrap.config.validation import Serializable, check_choice, check_integer, check_number, describe, set_field
from satrap.errors import ConfigError

_MAX_COUNT = 2**53
_MAX_BUCKETS = 65536
_BUCKETS_PER_SERVER = 64
_BUCKET_BYTES = 1 << 30
_EXACT_RANKS = 2000  # further ranks are summed in bins, so 10^12 rows cost as little as 10^6
_BIN_GROWTH = 1.02
BACKWARD = 3.0  # times the forward pass: a backward pass takes two products where the forward pass takes one


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLoad:
    """One table, how many rows it will have, and the ids that a sample looks up in it."""

    table: Table
    rows: int
    """Rows at the end of training; at most the table's capacity."""
    row_bytes: int
    """Bytes of memory that a row takes, as `satrap.planning.input_files` measures them."""
    saved_row_bytes: int
    """Bytes that a row takes in a checkpoint."""
    vectors_per_sample: float = 1.0
    """Vectors of `dim` numbers that the dense network receives: one for each bag, `max_length` for each sequence."""
    ids_per_sample: float = 1.0
    """Ids of a sample, over all features of the table."""
    zipf: float = 1.05
    """Exponent of Zipf's law by which ids occur; 0 is uniform."""
    unique_share: float | None = None
    """Different ids of a batch over all its ids, if it was measured; None: computed from `zipf`."""

    def unique_ids(self, batch_size: int) -> float:
        """Return the different ids of a batch."""
        draws = batch_size * self.ids_per_sample
        if self.unique_share is not None:
            return draws * self.unique_share
        return expected_unique(draws, self.rows, self.zipf)

    @property
    def bytes(self) -> int:
        """Memory of all rows."""
        return self.rows * self.row_bytes

    def num_buckets(self, num_servers: int) -> int:
        """Return the table's own number of buckets, or one that servers share evenly and that migrates in parts."""
        if self.table.num_buckets is not None:
            return self.table.num_buckets
        num = max(num_servers * _BUCKETS_PER_SERVER, -(-self.bytes // _BUCKET_BYTES)) if num_servers else 1
        if self.table.capacity is not None:
            num = min(num, self.table.capacity)
        power = 1 << (min(num, _MAX_BUCKETS) - 1).bit_length()
        while self.table.capacity is not None and power > self.table.capacity:
            power //= 2
        return max(self.table.resolved_num_buckets, power)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Serializable):
    """The keys of [training] in a description: the dense network, how it is trained, and how fast."""

    samples_per_second: float
    """Requested samples a second, of all trainers together."""
    batch_size: int
    """Samples of a step of one trainer."""
    dense_flops: float
    """Floating-point operations of the dense network for one sample, forward pass only; a multiplication and an
    addition are two. The backward pass is counted as twice that."""
    dense_parameters: int
    """Parameters of the dense network."""
    dense_features: int = 0
    """Numbers of a sample beside its ids, labels included."""
    staleness: int = 0
    """`staleness` of `satrap.Embeddings`."""
    wire: str = "float32"
    """`wire` of `satrap.Deployment`."""
    read_bytes_per_sample: float = 0.0
    """Bytes of a sample in the files that are read; 0: reading is not counted."""

    def __post_init__(self) -> None:
        where = "training"
        for name, low in (("batch_size", 1), ("dense_parameters", 0), ("dense_features", 0), ("staleness", 0)):
            set_field(self, name, whole_number(where, name, getattr(self, name), low))
        for name in ("samples_per_second", "dense_flops", "read_bytes_per_sample"):
            set_field(self, name, check_number(where, name, getattr(self, name), 0.0))
        if self.samples_per_second <= 0:
            raise ConfigError(f"{where}: samples_per_second is {self.samples_per_second:g}; expected more than 0")
        check_choice(where, "wire", self.wire, ("float32", "float16"))

    @classmethod
    def _where(cls, data: Mapping[str, Any]) -> str:
        return "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job, for which machines are planned."""

    name: str
    """The file or script that it was read from."""
    tables: tuple[TableLoad, ...]
    training: Training
    assumptions: tuple[str, ...] = ()
    """What was assumed because the input does not say it."""

    @property
    def vector_floats(self) -> float:
        """Numbers of a sample's embeddings, as the dense network receives them."""
        return sum(table.vectors_per_sample * table.table.dim for table in self.tables)

    @property
    def step_flops(self) -> float:
        """Floating-point operations of a trainer's step."""
        return BACKWARD * self.training.dense_flops * self.training.batch_size

    @property
    def bytes(self) -> int:
        """Memory of all rows."""
        return sum(table.bytes for table in self.tables)

    @property
    def saved_bytes(self) -> int:
        """Size of a full checkpoint's tables."""
        return sum(table.rows * table.saved_row_bytes for table in self.tables)

    def server_bytes(self, num_servers: int) -> float:
        """Return the memory of rows on the server that owns the most buckets."""
        buckets = [(table, table.num_buckets(num_servers)) for table in self.tables]
        return sum(-(-num // num_servers) * table.bytes / num for table, num in buckets)

    def largest_bucket(self, num_servers: int) -> tuple[TableLoad, float]:
        """Return the table with the largest buckets and the bytes of one of them."""
        sizes = [(table.bytes / table.num_buckets(num_servers), table) for table in self.tables]
        size, table = max(sizes, key=lambda pair: pair[0])
        return table, size


def whole_number(where: str, name: str, value: object, low: int) -> int:
    """Return a whole number; 7.8e11 is one, too, since TOML's integers have no exponent."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float):
        raise ConfigError(f"{where}: {name} is {describe(value)}; expected a whole number")
    return check_integer(where, name, value, low, _MAX_COUNT)


@lru_cache(maxsize=4096)
def expected_unique(draws: float, rows: int, exponent: float) -> float:
    """Return how many different ids `draws` independent draws are expected to contain."""
    if draws <= 0 or rows <= 0:
        return 0.0
    total = sum(count * rank**-exponent for rank, count in _ranks(rows))
    unique = 0.0
    for rank, count in _ranks(rows):
        share = rank**-exponent / total
        unique += count * (1.0 if share >= 1.0 else -math.expm1(draws * math.log1p(-share)))
    return min(unique, draws, float(rows))


def _ranks(rows: int) -> Iterator[tuple[float, float]]:
    """Yield ranks and how many ranks each stands for: one each at first, then the middles of bins."""
    exact = min(rows, _EXACT_RANKS)
    yield from ((float(rank), 1.0) for rank in range(1, exact + 1))
    begin = exact + 0.5
    while begin < rows + 0.5:
        end = min(begin * _BIN_GROWTH, rows + 0.5)
        yield math.sqrt(begin * end), end - begin
        begin = end
