"""Criteo's click logs: tab-separated text without a header, one click or no click in a line.

The columns are called label, I1 to I13 (counts) and C1 to C26 (eight hexadecimal digits each, hashed as texts). The
files are those that Criteo publishes, plain or .gz; a test file has no label: give label=None.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from satrap.config.columns import Columns, DenseColumn, LabelColumn
from satrap.config.features import Features
from satrap.config.validation import check_flag, describe, set_field
from satrap.data.delimited import CSV
from satrap.errors import ConfigError

_COUNTS = tuple(f"I{i}" for i in range(1, 14))
_FIELDS = (*_COUNTS, *(f"C{i}" for i in range(1, 27)))
_HASH_OF_EMPTY = 0xEF46DB3751D8E999


@dataclass(frozen=True, kw_only=True)
class Criteo(CSV):
    """Files in the format of Criteo's click logs. Features are called C1 to C26, or named in `ids`."""

    log1p: bool = True
    """Read every count x as ln(1 + max(x, 0)). As it is, its range of 0 to millions trains badly."""
    dense: str | DenseColumn | Sequence[str | DenseColumn] = _COUNTS
    """The counts; a missing one reads as 0."""
    label: str | LabelColumn | Sequence[str | LabelColumn] | None = "label"
    """None: lines have no label and begin with I1, like Criteo's test file."""
    missing_id: int | None = _HASH_OF_EMPTY
    """What stands for a missing category: the hash of the empty text, a category of its own, so that every sample has
    one id of each feature. None: an empty bag."""
    columns: Sequence[str] | None = None
    """As the format says; not to be given."""
    delimiter: str = "\t"
    quote: str | None = None

    def __post_init__(self) -> None:
        known = (_FIELDS, ("label", *_FIELDS))
        if self.columns is not None and tuple(self.columns) not in known:
            raise ConfigError(f"Criteo: columns is {describe(self.columns)}; its format fixes them: use CSV for others")
        set_field(self, "columns", known[self.label is not None])
        check_flag("Criteo", "log1p", self.log1p)
        super().__post_init__()

    def _columns(self, features: Features | Sequence[str]) -> Columns:
        columns = super()._columns(features)
        return replace(columns, dense=tuple(replace(c, log1p=c.log1p or self.log1p) for c in columns.dense))
